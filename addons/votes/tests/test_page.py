"""The page on which people vote: what it shows, what it does not tell, and when it stays as it is."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.report.rebuild import rebuild
from sd_quant.report.summary import read_sweep
from sd_quant_votes import page as votes
from sd_quant_votes.page import DAMAGED, EQUAL, VOTE, draw_votes, named, read_key, write_votes
from tests.unit.report.sweeps import change_record, write_job, write_plan

pytestmark = pytest.mark.commit

PROMPTS = [f"prompt {index}" for index in range(12)]
NAMES = {"a": "alpha=a", "b": "alpha=b"}


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@pytest.fixture
def sweep(tmp_path):
    """Two recipes of twelve prompts, whose images have texture and say in their metadata what they are."""
    chance = np.random.default_rng(0)
    for name in NAMES:
        write_job(tmp_path / name, prompts=PROMPTS)
        for path in (tmp_path / name / "images").rglob("*.png"):
            image = Image.fromarray(chance.integers(0, 255, (48, 32, 3), np.uint8))
            image.info["icc_profile"] = b"made by full precision"
            image.save(path, icc_profile=b"made by full precision")
    return write_plan(tmp_path, {name: {"alpha": name} for name in NAMES})


def data_of(page) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def test_every_recipe_stands_beside_full_precision_on_its_prompts(sweep):
    page = write_votes(sweep)
    key, images = read_key(sweep.directory), {}
    for pair in data_of(page)["pairs"]:
        for image in pair["images"]:
            kind, content = image["source"].split(",")
            assert kind == "data:image/webp;base64"
            images[image["id"]] = pixels(io.BytesIO(base64.b64decode(content)))
    assert key["comparisons"] == [{"a": "full precision", "b": name} for name in NAMES.values()]
    kinds = [pair["kind"] for pair in key["pairs"].values()]
    assert {kind: kinds.count(kind) for kind in (VOTE, EQUAL, DAMAGED)} == {VOTE: 24, EQUAL: 1, DAMAGED: 1}
    for pair in key["pairs"].values():
        if pair["kind"] == VOTE:
            folder = sweep.directory / "ab"[pair["comparison"]] / "images"
            file = f"{pair['index']:04d}.png"
            assert np.array_equal(images[pair["a"]], pixels(folder / "full_precision" / file))  # without loss
            assert np.array_equal(images[pair["b"]], pixels(folder / "quantized" / file))
        else:
            assert np.array_equal(images[pair["a"]], images[pair["b"]]) == (pair["kind"] == EQUAL)


def test_the_page_does_not_say_which_is_which(sweep):
    page = write_votes(sweep)
    text, data, key = page.read_text(), data_of(page), read_key(sweep.directory)
    told = (*NAMES.values(), "full precision", "full_precision", "quantized", str(key["seed"]), str(sweep.directory))
    assert not [word for word in told if word in text]
    a_is_first = 0
    for pair in data["pairs"]:
        first, second = pair["images"]
        assert len(first["source"]) == len(second["source"]) and first["source"] != second["source"]
        assert first.keys() == second.keys() == {"id", "source"}
        assert b"made by" not in base64.b64decode(first["source"].split(",")[1])
        a_is_first += first["id"] == key["pairs"][pair["id"]]["a"]
    assert 4 <= a_is_first <= 22
    ids = [pair["id"] for pair in data["pairs"]]
    assert ids == sorted(ids) and list(key["pairs"]) != ids  # in random order, and the key is in another


def test_most_pairs_are_shared_among_the_recipes(sweep, monkeypatch):
    draw_votes(sweep, most_pairs=10)
    pairs = read_key(sweep.directory)["pairs"].values()
    assert [sum(pair["comparison"] == number for pair in pairs) for number in (0, 1)] == [5, 5]
    monkeypatch.setattr(votes, "MOST_BYTES", 100e3)  # a pair has 13 kB
    page = draw_votes(sweep)
    left = len(data_of(page)["pairs"])
    assert 3 <= left < 10 and f"{26 - left} further pairs are left out" in page.read_text()
    kinds = [pair["kind"] for pair in read_key(sweep.directory)["pairs"].values()]
    assert {EQUAL, DAMAGED, VOTE} == set(kinds)


def test_a_report_that_is_made_again_keeps_the_page_as_long_as_its_images(sweep, tmp_path_factory, monkeypatch):
    """Images of both compared recipes, or of a recipe and full precision. Without images there is no page."""
    monkeypatch.setattr("sd_quant.report.rebuild.figures", lambda sweep, advice: {})  # plots take most of the time
    page = sweep.directory / "votes.html"
    assert "votes.html" in rebuild(sweep.directory).read_text()
    draw_votes(sweep, named("alpha=a", sweep), 5)
    kept, key = page.read_bytes(), read_key(sweep.directory)
    rebuild(sweep.directory)
    assert page.read_bytes() == kept and read_key(sweep.directory) == key
    for path in (sweep.directory / "b/images/quantized").iterdir():
        Image.new("RGB", (32, 48)).save(path)
    rebuild(sweep.directory)
    new = read_key(sweep.directory)
    assert new["page"] != key["page"] and (new["against"], new["most_pairs"]) == ("a", 5)
    assert json.loads((sweep.directory / f"votes_key_{key['page'][:8]}.json").read_text()) == key
    assert key["comparisons"] == [{"a": "alpha=a", "b": "alpha=b"}] and named("b", sweep).name == "b"
    with pytest.raises(ConfigError, match="against is alpha=c, .* did you mean alpha="):
        named("alpha=c", sweep)
    write_job(folder := tmp_path_factory.mktemp("no images"), prompts=[])
    assert "votes.html" not in rebuild(folder).read_text() and not (folder / "votes.html").exists()
    with pytest.raises(ConfigError, match="has no votes_key.json, expected the folder of a report"):
        read_key(folder)


def test_what_is_no_pair_is_left_out(sweep):
    folder = sweep.directory
    (folder / "a/images/quantized/0000.png").unlink()
    (folder / "a/images/quantized/0001.png").write_bytes(b"GIF89a")
    whole = folder / "a/images/quantized/0002.png"
    whole.write_bytes(whole.read_bytes()[:900])  # its head is whole
    Image.new("RGB", (8, 8)).save(folder / "a/images/quantized/0003.png")
    write_votes(sweep)
    pairs = read_key(folder)["pairs"].values()
    assert sorted(pair["index"] for pair in pairs if pair["comparison"] == 0) == list(range(4, 12))
    change_record(folder / "b", {"prompts": [f"other {index}" for index in range(12)]})
    sweep = read_sweep(folder)
    assert draw_votes(sweep, sweep.jobs[0]) is None  # not of the same prompts


@pytest.mark.parametrize("change", [
    lambda key: key.pop("page"), lambda key: key.update(pairs=[]), lambda key: key.update(page="/../../x"),
    lambda key: key["comparisons"].pop(), lambda key: next(iter(key["pairs"].values())).update(kind="x"),
    lambda key: next(iter(key["pairs"].values())).update(a=1),
])  # fmt: skip
def test_a_damaged_key_is_refused(sweep, change):
    write_votes(sweep)
    path = sweep.directory / "votes_key.json"
    key = json.loads(path.read_text())
    change(key)
    path.write_text(json.dumps(key))
    with pytest.raises(ArtifactError, match=r"votes_key.json is damaged \(.*; take it from the folder"):
        read_key(sweep.directory)
    assert write_votes(sweep) and read_key(sweep.directory)["page"] != key.get("page")
