"""What is observed of a whole folder: kept in the cache, the same after JSON, and the choices that a user has."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from sd_quant.cache import Cache
from sd_quant.checkpoints.diffusers_network import with_small_weights
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.tensors import StoredTensor
from sd_quant.models.checkpoint import denoiser_part, empty_denoiser, samples_per_image
from sd_quant.models.family import Style
from sd_quant.models.parts import Axis, exported
from sd_quant.observed import observing
from sd_quant.observed.calls import Call, signature_of
from sd_quant.observed.checkpoint import Observation, ObservedFamily, why_refused
from sd_quant.observed.ladder import IN_FP32
from sd_quant.observed.observing import axis_of, chosen, filled, for_any_text, smaller, text_of
from sd_quant.observed.part import Rung
from tests.presets import job

pytestmark = pytest.mark.commit

OBSERVE = observing.observe
PIXART, TWO = "PixArtSigmaPipeline", "WanPipeline, two denoisers"
LARGE = [PIXART, "StableDiffusion3Pipeline", "Lumina2Pipeline", "MochiPipeline", "HunyuanVideo15Pipeline"]


@pytest.mark.parametrize("case", [PIXART, TWO, "AmusedPipeline", "DreamLitePipeline"])
def test_an_observation_is_the_same_after_json(observe, case):
    observation = observe(case).observation
    assert Observation.from_json(json.loads(json.dumps(observation.to_json(), allow_nan=False))) == observation


@pytest.fixture
def misses(observe, tiny_folder, monkeypatch, tmp_path) -> Callable[..., bool]:
    """``misses(width=...)``: whether a copy of the pipeline is observed again, with these arguments."""
    shutil.copytree(tiny_folder(PIXART), tmp_path / "copy")
    known, times = observe(PIXART).observation, list[int]()
    monkeypatch.setattr(observing, "observe", lambda *_: times.append(1) or known)

    def missed(**changes) -> bool:
        before = len(times)
        observe(PIXART, **{"path": tmp_path / "copy", "cache": Cache(tmp_path / "cache", 1e9)} | changes)
        return len(times) > before

    assert missed() and not missed()
    assert not missed(denoiser="transformer", excluded=("*",)), "which need no observing"
    return missed


def change(file: Path) -> None:
    """Gives a file of the folder other content, with which it is opened as before."""
    if file.suffix == ".safetensors":
        file.write_bytes(file.read_bytes()[:-1] + b"\x3e")  # of its last number
    elif file.name in ("model_index.json", "config.json"):
        version = "transformers_version" if file.parent.name == "text_encoder" else "_diffusers_version"
        file.write_text(json.dumps(json.loads(file.read_text()) | {version: "0.1"}))
    else:
        file.write_bytes(file.read_bytes() + b"\n")


def test_every_file_that_is_opened_is_in_the_key(observe, tiny_folder, misses, monkeypatch, tmp_path):
    opened, folders = set[Path](), [tiny_folder(PIXART)]

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and folders and isinstance(arguments[0], str | os.PathLike):
            opened.add(Path(arguments[0]))

    sys.addaudithook(note)  # for the rest of the process
    with monkeypatch.context() as patch:
        patch.setattr(observing, "observe", OBSERVE)
        observe(PIXART, cache=Cache(None))
    folder = folders.pop()
    files = [path.relative_to(folder) for path in sorted(opened) if path.is_relative_to(folder) and path.is_file()]
    assert {file.parts[0] for file in files} == {"model_index.json", *(each.name for each in folder.iterdir())}
    for file in files:
        change(tmp_path / "copy" / file)
        assert misses() and not misses(), file


def test_every_number_that_an_observation_depends_on_is_in_the_key(misses, monkeypatch):
    for request in ({"width": 96}, {"height": 96}, {"scale": 1.0}, {"arguments": {"clean_caption": False}}):
        assert misses(**request), request
    packages = "torch diffusers transformers tokenizers onnx onnx-ir onnxscript onnxruntime openvino"
    for package in ("none of them", *packages.split()):
        monkeypatch.setattr(observing, "versions", lambda *names, of=package: {name: name == of for name in names})
        assert misses() and not misses(), package
    monkeypatch.setattr(observing, "source_digest", lambda *_: "another")
    assert misses() and not misses()


def test_weights_of_a_large_network_are_neither_read_nor_in_the_key(misses, monkeypatch, tmp_path):
    monkeypatch.setattr(observing, "SMALL", 0)
    monkeypatch.setattr(StoredTensor, "read", lambda _: pytest.fail("a weight was read"))
    misses()
    change(tmp_path / "copy" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert not misses()


def test_a_tokenizer_that_would_be_hashed_for_hours_is_refused(misses, tmp_path):
    with (tmp_path / "copy" / "tokenizer" / "more").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(ArtifactError, match=r"tokenizer holds \d+ bytes of files, expected at most 1073741824; fetch"):
        misses()


def test_the_first_denoiser_is_quantized_unless_another_is_named(observe):
    for name in (None, "transformer_2"):
        named, quantized = observe(TWO, denoiser=name), name or "transformer"
        assert named.family.DENOISER == list(named.parts())[0] == denoiser_part(named).component == quantized
        assert list(named.family.DENOISERS) == list(named.observation.layers) == ["transformer", "transformer_2"]
    with pytest.raises(ConfigError) as caught:
        observe(TWO, denoiser="vae")
    assert str(caught.value) == (
        "model.denoiser is vae, expected one of transformer, transformer_2, the networks that WanPipeline calls in its "
        "denoising steps"
    )


def test_patterns_exclude_layers_and_one_that_matches_nothing_excludes_none(observe):
    plain, none, some, all_of_them = (
        observe(PIXART, excluded=excluded).family.layer_roles(None)
        for excluded in ((), ("nothing.*",), ("nothing.*", "transformer_blocks.0.ff.*"), ("*",))
    )
    assert none == plain and "excluded" in plain.values() and len(set(plain.values())) > 1
    changed = {name for name in plain if plain[name] != some[name]}
    assert changed and all(name.startswith("transformer_blocks.0.ff.") and some[name] == "excluded" for name in changed)
    assert all_of_them == dict.fromkeys(plain, "excluded")


def test_inputs_that_layers_share_are_those_of_the_layers_that_are_asked_for(observe):
    family = observe(PIXART).family
    linears = [name for name, role in family.layer_roles(None).items() if role != "excluded"]
    query = "transformer_blocks.0.attn1.to_q"
    whole, alone = family.shared_inputs(linears), family.shared_inputs([query])
    assert sorted(name for shared in whole for name in shared.readers) == sorted(linears)
    assert {f"transformer_blocks.0.attn1.to_{each}" for each in "qkv"} in [set(shared.readers) for shared in whole]
    assert [shared.readers for shared in alone] == [(query,)] and family.shared_inputs([]) == []


def test_a_checkpoint_says_what_families_state(observe):
    checkpoint = observe(PIXART)
    family, parts, denoiser = checkpoint.family, checkpoint.parts(), empty_denoiser(checkpoint)
    assert family.PIPELINES == (PIXART,) and family.NETWORKS["transformer"] == "PixArtTransformer2DModel"
    assert family.GUIDES and samples_per_image(checkpoint, 5.0) == 2
    assert family.OWN_NOISE, "whose layout the pipeline alone knows"
    assert family.reads_guidance(parts["transformer"].contract)
    assert list(parts) == ["transformer", "text_encoder", "vae"]
    assert exported(parts) == [] and {part.refused for part in parts.values()} == {"not tried"}
    layers = {name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    assert set(family.layer_roles(denoiser)) == layers
    shapes = parts["transformer"].contract.shapes_for(4, 64, 48)
    assert shapes["hidden_states"] == (4, 4, 48 // 8, 64 // 8)
    assert all(isinstance(side, int) for shape in shapes.values() for side in shape), "every axis has its formula"


def test_another_process_opens_the_folder_again(observe, tmp_path):
    cache = Cache(tmp_path, 1e9)
    checkpoint = observe(TWO, cache=cache, denoiser="transformer_2", excluded=("a.*",))
    again = pickle.loads(pickle.dumps(checkpoint))
    assert (again.denoiser, again.excluded, again.arguments) == ("transformer_2", ("a.*",), checkpoint.arguments)
    assert again.observation == checkpoint.observation


def test_a_networks_weights_are_read_where_it_is_small_alone(observe, monkeypatch):
    checkpoint = observe(PIXART)
    weights = checkpoint.components["transformer"]
    whole = filled(checkpoint.build_one("transformer"), weights)
    assert not any(parameter.is_meta for parameter in whole.parameters())
    assert all(torch.equal(parameter, weights[name].float()) for name, parameter in whole.named_parameters())
    monkeypatch.setattr(observing, "SMALL", 10)
    empty = filled(checkpoint.build_one("transformer"), weights)
    assert all(parameter.is_meta for parameter in empty.parameters())
    few = checkpoint.build_one("transformer")
    with_small_weights(few, weights, 64)
    assert {parameter.is_meta for parameter in few.parameters() if parameter.numel() <= 64} == {False}
    assert {parameter.is_meta for parameter in few.parameters() if parameter.numel() > 64} == {True}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning")  # of autocast on a CPU, which Mochi asks for
@pytest.mark.parametrize("case", LARGE)
def test_a_pipeline_too_large_for_its_weights_is_observed_as_if_they_were_there(observe, monkeypatch, case):
    """Whose text encoders ask whether a mask has gaps, whose tables are buffers, and whose code casts by the device."""
    real = observe(case).observation
    monkeypatch.setattr(observing, "SMALL", 0)
    empty = observe(case, excluded=("nothing",)).observation
    assert empty.layers == real.layers
    for name in ("denoisers", "samples_per_image", "calls_a_step", "style", "prepared", "unequal", "fixed", "outputs"):
        assert getattr(empty, name) == getattr(real, name), name
    for name, part in real.parts.items():
        assert (empty.parts[name].signature.inputs, empty.parts[name].axes) == (part.signature.inputs, part.axes)


def call(run: str, step: int, **arguments) -> Call:
    return Call(arguments, run, step)


RUNS = ("base", "larger", "prompt", "batch")
SIGNATURE = signature_of([call("base", 0, x=torch.zeros(2, 3))])
CALLS = [call(run, 0, x=torch.zeros(2, length)) for run, length in zip(RUNS, (3, 3, 5, 3), strict=True)]


def test_a_graph_for_texts_of_one_length_is_none():
    graph = Rung("one graph a size", SIGNATURE, "called")
    for serves in ((0, 1, 2, 3), (0, 2)):
        assert for_any_text(replace(graph, serves=serves), CALLS).cause is None
    cause = "its graph serves texts of one length alone (one graph a size)"
    for serves in ((0, 1, 3), (0,)):  # torch computes it as it is called
        assert for_any_text(replace(graph, serves=serves), CALLS) == Rung("refused", method="called", cause=cause)
    of_one_length = [each for each in CALLS if each.run != "prompt"]
    assert for_any_text(replace(graph, serves=(0, 1, 2)), of_one_length).cause is None


@pytest.mark.parametrize(
    "runs, style, fixed, one_batch, one_size",
    [
        (RUNS, Style(), {}, None, None),
        (("base", "prompt"), Style(), {}, "vae", ("vae", 96, 64)),
        (("base", "prompt"), Style(batched=False, each=False), {"larger": "it fails"}, None, None),
    ],
)
def test_a_family_says_which_graph_serves_one_batch_or_size(observe, runs, style, fixed, one_batch, one_size):
    observation = observe(PIXART).observation
    parts = {name: replace(part, rung=Rung("plain"), runs=RUNS) for name, part in observation.parts.items()}
    parts["vae"] = replace(parts["vae"], runs=runs)
    observation = replace(observation, size=(96, 64), parts=parts, style=style, fixed=fixed)
    family = ObservedFamily(observation, "transformer", {}, ())
    assert (family.ONE_BATCH, family.ONE_SIZE) == (one_batch, one_size)


def test_a_graph_in_fp32_is_not_exported():
    assert why_refused(Rung("plain", notes=("another note",))) is None
    assert why_refused(Rung("refused", cause="why")) == "why"
    assert why_refused(Rung("plain", notes=(f"{IN_FP32}, because fp16 fails",))) == f"{IN_FP32}, because fp16 fails"


def test_the_ladder_gets_one_call_of_each_run_and_two_steps_of_the_first_on_small_images():
    calls = [call(run, step) for run in ("base", "larger", "batch") for step in (0, 1) for _ in range(2)]
    assert [(each.run, each.step) for each in chosen(calls)] == [("base", 0), ("base", 1), ("larger", 0), ("batch", 0)]
    late = [call("base", 1), call("larger", 1), call("batch", 1)]
    assert chosen(late) == late, "of a denoiser that begins later"
    assert list(map(smaller, (64, 48, 512, 1024, 1328))) == [64, 48, 64, 128, 128]


def test_text_stays_the_same_between_steps():
    ids, same = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 3)
    steps = [
        call(
            "base", step, x=torch.randn(2, 4, 8), text=torch.ones(2, 5, 8), ids=ids, pooled=same, scale=same[0], flag=1
        )
        for step in (0, 1)
    ]
    assert text_of(steps) == {"text", "pooled"}
    assert text_of(steps[:1]) == set(), "of one step nobody knows"


@pytest.mark.parametrize(
    ("family", "knob", "because"),
    [
        ("sd3_mini", "excluded=[a.*]", "quantize.exclude has patterns for all families"),
        ("sd3_mini", "denoiser=transformer_2", "this family has one denoiser"),
        ("diffusers", "parts=[vae]", "are the networks that it calls"),
        ("sd3_mini", "loras=[transformer_2:a.safetensors]", "because sd3 has one denoiser"),
    ],
)
def test_a_knob_that_a_family_does_not_read_is_refused(family, knob, because):
    with pytest.raises(ConfigError, match=f"^model.{knob.partition('=')[0]} is .*{because}"):
        job(f"model={family}", "model.path=checkpoints/sd3_mini", f"model.{knob}")


SIZES = [  # base, another size, several images with guidance
    {"batch": 2, "width": 512, "height": 512}, {"batch": 2, "width": 576, "height": 640},
    {"batch": 10, "width": 512, "height": 512},
]  # fmt: skip
OTHER = {"batch": 4, "width": 1024, "height": 768}
FORMULAS = {
    "the batch": (lambda batch, width, height: batch, "batch"),
    "images of a batch with guidance": (lambda batch, width, height: batch // 2, "batch"),
    "columns of latents": (lambda batch, width, height: width // 8, "width"),
    "rows of latents": (lambda batch, width, height: height // 8, "height"),
    "tokens": (lambda batch, width, height: width * height // 256, "width*height"),
    "all tokens of a batch": (lambda batch, width, height: batch * width * height // 256, "batch*width*height"),
    "all columns of a batch": (lambda batch, width, height: batch * width // 16, "batch*width"),
    "tokens behind a text": (lambda batch, width, height: width * height // 256 + 77, "width*height"),
    "columns and one more": (lambda batch, width, height: width // 8 + 1, "width"),
}


@pytest.mark.parametrize(("size", "of"), FORMULAS.values(), ids=FORMULAS)
def test_an_axis_has_its_formula_and_the_size_of_an_image_that_was_not_observed(size, of):
    axis = axis_of([size(**run) for run in SIZES], SIZES)
    assert axis.of == of
    assert axis.size(**OTHER) == size(**OTHER)
    assert [axis.size(**run) for run in SIZES] == [size(**run) for run in SIZES]


@pytest.mark.parametrize("sizes", [[64, 70, 71], [7, 13, 11], [64, 64, 64], [100, 90, 100]])
def test_an_axis_that_fits_no_formula_has_the_first_size_that_was_observed(sizes):
    assert axis_of(sizes, SIZES) == axis_of(sizes[:1], SIZES[:1]) == Axis("", 0, 1, sizes[0]), "one run says nothing"


def test_nothing_is_taken_away_from_a_size():
    """A text of fewer than no tokens is a chance, as is a fraction of one."""
    assert axis_of([size - 5 for size in (1024, 1440, 1024)], SIZES).of == ""
