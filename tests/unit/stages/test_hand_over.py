"""What of a recipe and a pipeline is lost, and what is not written."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sd_quant.errors import ResourceError
from sd_quant.interchange import TARGETS
from sd_quant.interchange.holding import adapted
from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.report.record import parsed
from sd_quant.report.table import write_csv
from sd_quant.stages import choose, consumer, hand_over, session, target_folder, targets
from tests.pasting import AWKWARD, words_of
from tests.presets import job as composed_job
from tests.refusals import refused

from ..config.composition import composed
from .conftest import loaded

pytestmark = pytest.mark.commit


def row(name: str, *shape: int, **options) -> LayerAssignment:
    known = {"weight_axis": 0, "weight_amax": torch.ones(shape[0]), "activation_amax": 1.0}
    return LayerAssignment(name, "qkv", shape, "int8", "int8", **known | options)


def test_what_a_target_loses_widens_or_stacks_is_counted_by_its_reason():
    attention = LayerAssignment("attn", "attention", (), None, "int8", attention_amax=(torch.ones(1),) * 4)
    kept = LayerAssignment("kept", "qkv", (4, 4), reason="kept")
    rows = {each.name: each for each in (row("a", 4, 4), row("b", 4, 4, 3, 3), row("c", 4, 4, 1, 1), attention, kept)}
    found = targets.lost(rows, adapted(rows, TARGETS["diffusers_torchao"]))
    assert found == {
        "diffusers_torchao holds no convolutions in int8": 2, "diffusers_torchao holds no products of attention": 1
    }  # fmt: skip
    known = ("pos_embed.proj", "transformer_blocks.0.attn.add_q_proj")
    rows = {name: LayerAssignment(name, "linear", (4, 4), reason="kept") for name in known}
    for name, amax in zip((f"transformer_blocks.0.attn.to_{each}" for each in "qkv"), (1.0, 3.0, 2.0), strict=True):
        one = row(name, 4, 4, weight_axis=None, weight_amax=torch.tensor([amax]))
        rows[name] = replace(one, format="fp8", activation_format="fp8")
    (words,) = targets.widened(rows, adapted(rows, TARGETS["comfyui"]))
    assert words.startswith("the ranges of 2 layers: query, key and value are one tensor")
    assert targets.widened(rows, rows) == []
    up, downs = torch.zeros(4, 1), (torch.zeros(1, 4), torch.ones(1, 4))
    names = [f"a.attn1.to_{each}" for each in "qkv"]
    shared = {name: row(name, 4, 4, low_rank=(up, downs[0].clone())) for name in names}
    apart = shared | {names[2]: replace(shared[names[2]], low_rank=(up, downs[1]))}
    (words,) = targets.stacked(TARGETS["nunchaku"], apart)
    assert "stacked, 1 times" in words and "quantize.shared_branch=true" in words
    assert targets.stacked(TARGETS["nunchaku"], shared) == []
    assert targets.stacked(TARGETS["diffusers_nunchaku_lite"], apart) == []
    assert targets.stacked(TARGETS["nunchaku"], {names[0]: row(names[0], 4, 4)}) == []


def test_no_consumer_but_a_graph_pads_text():
    x, other = torch.ones(1, 80, 2), torch.ones(1, 90)
    arguments, inputs = consumer.without_padding(None, (), {"context": x, "y": other})
    assert inputs["context"].shape == (1, CONTEXT_LENGTH, 2) and inputs["y"] is other and arguments == ()


def test_every_column_decides_but_those_of_errors(tmp_path):
    """Their last digits depend on how many threads add them up."""
    layer, found = row("a", 2, 2, pre_quant_scale=torch.ones(2)).row(), {}
    for column in ("", *layer):
        write_csv([layer | ({column: "another"} if column else {})], tmp_path / "layers.csv")
        found[column] = choose.decided(tmp_path / "layers.csv")
    plain = found.pop("")
    ignored = {column for column in found if found[column] == plain}
    assert ignored == {"output_error", "output_error_alpha_0.8"} and len(found) > 18


@pytest.mark.parametrize("when", ["write", "card", "meanwhile"])
def test_an_earlier_result_stays_until_the_next_is_whole(tmp_path, monkeypatch, when):
    folder, earlier = tmp_path / "gguf", json.dumps({"files": ["old", "../canary"]})
    folder.mkdir()
    (folder / target_folder.FIGURES).write_text(earlier)
    for name in ("gguf/old", "canary"):
        (tmp_path / name).touch()

    def write(place, *_):
        place.mkdir()
        (place / "weights").write_bytes(bytes(200_000))
        if when == "write":
            raise KeyboardInterrupt
        if when == "meanwhile":
            (folder / "thesis.txt").touch()

    def make() -> dict:
        rows = {"unet_xl": {"a": row("a", 32, 32)}}
        return target_folder.write_target(TARGETS["gguf"], loaded(), rows, rows, folder, "sd-quant", None, tmp_path)

    monkeypatch.setattr(target_folder, "write_folder", write)
    if when == "write":
        with pytest.raises(KeyboardInterrupt):
            make()
        assert (folder / target_folder.FIGURES).read_text() == earlier and not list(tmp_path.glob(".*"))
    elif when == "meanwhile":
        with refused(".*holds thesis.txt, which was not handed over by us"):
            make()
        assert {path.name for path in folder.iterdir()} == {"thesis.txt", "old", target_folder.FIGURES}
    else:
        for _ in range(2):  # over the earlier result, and over its own
            assert make()["bytes"] == {"weights": 200_000}
            names = {path.name for path in folder.iterdir()}
            assert names == {"weights", "README.md", target_folder.FIGURES}
            assert names == set(json.loads((folder / target_folder.FIGURES).read_text())["files"])
        assert (tmp_path / "canary").exists()


def test_a_card_has_the_command_that_made_it(tmp_path, monkeypatch, answering):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["quantize.py"])  # of a checkout, which the reader of a card may not have
    said, run = [], tmp_path / AWKWARD
    monkeypatch.setattr(hand_over, "write_target", lambda *given: said.append(given[5]))
    answering(
        hand_over, measured_by=None, images_of_run=None, recipe_of_run=composed_job(), handed_over_table=None,
        record_of_run=parsed(None), chosen_again=(loaded(), {"unet_xl": {"a": row("a", 32, 32)}}), as_text=[],
        open_session=SimpleNamespace(checkpoint=None),
    )  # fmt: skip
    given = ["prompts=[it's a rocket, a key]", "hand_over=[gguf]", "model.path='${x}'"]
    shared = SimpleNamespace(facts={"overrides": given})
    hand_over.hand_over_run(
        SimpleNamespace(loaded=loaded(), directory=run, shared=shared, assignments={}), {"gguf": {}}
    )
    assert words_of(said.pop(), tmp_path / "bin") == ["sd-quant", "quantize", *given]
    for images in (True, False):
        job = SimpleNamespace(run=AWKWARD, cache=None, targets=lambda: ["gguf"], images=images)
        hand_over.hand_over(job, tmp_path / "out")
        program, command, *words = words_of(said.pop(), tmp_path / "bin")
        made = composed(command, *words)
        assert (program, command, made["run"]) == ("sd-quant", "hand_over", AWKWARD)
        assert (made["to"], made["images"]) == ("gguf", images)


def test_a_disk_that_is_too_small_is_found_out_before_anything_is_written(tmp_path, monkeypatch, answering):
    class Opened(session.Session):
        parts = {"unet_xl": SimpleNamespace(contract=SimpleNamespace(weights=torch.float16))}
        parameters = {"unet_xl": 10**9}

    answering(shutil, disk_usage=SimpleNamespace(free=0))
    answering(session, open_unchecked=Opened(None))
    answering(hand_over, recipe_of_run=SimpleNamespace(model=None))
    job = SimpleNamespace(run=str(tmp_path), cache=None, images=False, targets=lambda: ["onnx", "gguf"])
    with pytest.raises(ResourceError, match=r"needs up to 4.00 GB .*hand_over 4.0 GB.* and the disk has 0.00 GB free"):
        hand_over.hand_over(job, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock"}


@pytest.mark.parametrize(("target", "knobs", "sentence"), [
    ("modelopt_export", ['infer.precise_steps="first3,last3"'], None),
    ("gguf", [], None),
    ("gguf", ["infer.schedule=ccrc", "infer.steps=4"], None),
    ("gguf", ["infer.precise_steps=last3"], "gguf cannot say which steps are precise.* export to modelopt_export"),
    ("modelopt_export", ["infer.schedule=chcc", "infer.steps=4"], "modelopt_export says .* schedule is chcc"),
    ("modelopt_export", ["infer.schedule=fccc", "infer.steps=4"], "modelopt_export says .* schedule is fccc"),
    ("modelopt_export", ["infer.precise_steps=3"], "modelopt_export says how many.* is chosen later; give places"),
])  # fmt: skip
def test_a_target_says_which_steps_are_precise_or_is_refused(target, knobs, sentence):
    with refused(sentence):
        targets.check_schedule([target], composed_job(*knobs).infer)
