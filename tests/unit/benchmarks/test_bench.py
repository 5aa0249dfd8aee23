"""The bench of checkpoints: its pictures, what it refuses, how it chooses, and one checkpoint from drawing to table."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

pytestmark = pytest.mark.commit


@pytest.mark.parametrize("kind", ["glyphs", "textures", "faces", "scenes"])
def test_pictures_are_drawn_alike_each_time_and_captions_tell_them_apart(kind, benchmark):
    pictures = benchmark("bench_pictures")
    (captions, first), (again, second) = pictures.drawn(kind, 8), pictures.drawn(kind, 8)
    assert captions == again and np.array_equal(first, second)
    assert first.shape == (8, 64, 64, 3) and first.dtype == np.uint8
    assert len(set(captions)) > 4 and all(picture.std() > 1 for picture in first)
    assert not np.array_equal(first, pictures.drawn(kind, 8, seed=1)[1])


def refusal(opened, name, bench) -> str:
    with pytest.raises(SystemExit) as refused:
        opened(name, bench)
    return str(refused.value)


def test_a_bench_that_is_missing_incomplete_or_of_another_hash(benchmark, tmp_path, monkeypatch):
    bench = benchmark("bench")
    assert "checkpoints.json is missing" in refusal(bench.opened, "faces", tmp_path)
    (tmp_path / "checkpoints.json").write_text(json.dumps({"faces": {"family": "sdxl", "sha256": "0" * 64}}))
    for name in ("faces", "unknown"):
        assert f"the checkpoint {name} of the bench is missing" in refusal(bench.opened, name, tmp_path)
    (tmp_path / "faces").mkdir()
    (tmp_path / "faces/captions.txt").write_text("a face\n")
    found = refusal(bench.opened, "faces", tmp_path)
    assert "expected 000000000000: its files are incomplete or altered" in found and "make bench-checkpoints" in found
    monkeypatch.setitem(bench.KNOWN, "second", ("sdxl_mini", tmp_path / "none.nemo", None, "a", "b"))
    assert "none.nemo is missing" in refusal(bench.opened, "second", tmp_path)


def test_the_recipe_for_a_checkpoint_is_chosen_on_the_others(benchmark):
    """On a and b the second is better when choosing, on c the first, by much: c alone decides for a and b."""

    def of(first: float, second: float) -> dict:
        return {"x": {"choice": [first] * 2, "report": [30.0, 31.0]},
                "y": {"choice": [second] * 2, "report": [32.0, 32.5]}}  # fmt: skip

    found = {"a": of(30, 31), "b": of(30, 31), "c": of(40, 30)}
    rows = [line.split(" | ") for line in benchmark("bench").tables(found, ["x", "y"]).splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == ["a", "b", "c"] and "30.50, 30.00" in rows[0][1]
    assert [row[3] for row in rows] == ["x", "x", "y"] and "+1.75 ± 0.25" in rows[2][4]


@pytest.mark.nightly
def test_a_checkpoint_is_made_noted_and_opened(benchmark, tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    train, bench = benchmark("bench_train"), benchmark("bench")
    monkeypatch.setattr(train, "PICTURES", 260)
    monkeypatch.setitem(train.BENCH, "sketches", dataclasses.replace(train.BENCH["sketches"], steps=3))
    train.make("sketches", tmp_path)
    subject, chosen, reported = bench.opened("sketches", tmp_path)
    assert subject.denoiser == "transformer" and len(subject.names) > 20
    assert not set(subject.prompts) & set(chosen) and not {*subject.prompts, *chosen} & set(reported)
    shutil.rmtree(tmp_path / "sketches/transformer")
    assert "incomplete or altered" in refusal(bench.opened, "sketches", tmp_path)
