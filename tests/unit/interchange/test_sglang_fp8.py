"""The rules of SGLang's loader, as its source has them: names, dtypes, shapes, layers that are ignored, inputs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ml_dtypes import float8_e4m3fn
from safetensors.torch import load_file
from torch import nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.tensors import lazy
from sd_quant.interchange import TARGETS
from sd_quant.interchange.holding import held, not_held
from sd_quant.interchange.inputs import BlockFloat8
from sd_quant.interchange.model_card import model_card
from sd_quant.interchange.servers import check_served
from sd_quant.interchange.sglang_fp8 import LAYOUT, skips
from sd_quant.interchange.stored import LayerTensors
from sd_quant.interchange.weights import codes_and_scales
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS

from .conftest import recipe_of
from .damage import CONFIG, WEIGHTS, damaged
from .figures import FIGURES

pytestmark = pytest.mark.commit

NAME = "sglang_fp8"
KEPT = "single_transformer_blocks.1.proj_out"  # by the recipe
LINEARS = {"to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "proj_mlp", "proj_out"}


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    """A case, its assignment with one layer in high precision by the recipe, and the folder."""
    case = tiny("flux")
    recipe = recipe_of("fp8_128x128", "fp8_128", smoothing="none", alpha=None)
    assignment = case.assignment(recipe, NAME)
    assignment[KEPT] = not_held(assignment[KEPT], "sensitive")
    return case, assignment, case.written(assignment, NAME, tmp_path_factory.mktemp("flux"))


def config_of(folder: Path) -> dict:
    return json.loads((folder / CONFIG).read_text())["quantization_config"]


def skipped(prefix: str, ignored: list[str]) -> bool:
    """As SGLang's ``is_layer_skipped`` of a linear that is not stacked, after ``from_config``: words in their order."""
    both = [name for entry in ignored for name in (entry.removeprefix("model."), f"model.{entry}")]
    words = prefix.split(".")
    parts = {tuple(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)}
    return any(tuple(name.split(".")) in parts for name in both)


def parameters_of_the_server(
    network: nn.Module, config: dict, gpus: int = 1
) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """The shapes of what SGLang's Flux has to load, by names in the file, and dtypes of what has codes.

    Made with the config are the linears of attention and of single blocks, with more than one GPU feed-forwards too.
    """
    assert config["quant_method"] == "fp8" and config["activation_scheme"] == "dynamic"
    rows, columns = config["weight_block_size"]
    needed = {name: (tuple(each.shape), None) for name, each in network.state_dict().items()}
    for name, module in network.named_modules():
        if not isinstance(module, nn.Linear) or "transformer_blocks." not in name or ".norm" in name:
            continue
        if (".ff" in name and gpus == 1) or skipped(name, config["ignored_layers"]):
            continue
        (outputs, inputs) = module.weight.shape
        assert inputs % columns == 0, "an assertion of per_token_group_quant"
        needed[f"{name}.weight"] = (outputs, inputs), torch.float8_e4m3fn
        needed[f"{name}.weight_scale_inv"] = ((outputs + rows - 1) // rows, inputs // columns), torch.float32
    return needed


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_tensor_has_a_place_in_the_server_and_every_place_its_tensor(written, gpus):
    case, assignment, folder = written
    stored = load_file(folder / WEIGHTS)
    needed = parameters_of_the_server(empty_denoiser(case.checkpoint), config_of(folder), gpus)
    assert {name: tuple(each.shape) for name, each in stored.items()} == {
        name: shape for name, (shape, _) in needed.items()
    }
    for name, (_, dtype) in needed.items():
        assert stored[name].dtype == (dtype or torch.float16), name
    found = {row.name.removesuffix(".0").rpartition(".")[2] for row in assignment.values() if row.format}
    assert found == LINEARS | {"to_out"}


def test_transformers_decodes_the_numbers_of_the_assignment(written):
    case, assignment, folder = written
    stored, read = load_file(folder / WEIGHTS), case.read(folder, NAME)
    config = FineGrainedFP8Config(**config_of(folder))
    assert config.modules_to_not_convert == config_of(folder)["ignored_layers"]
    assert tuple(config.weight_block_size) == (128, 128)
    held_rows = [row for row in assignment.values() if row.format]
    assert len(held_rows) == 2 * 8 + 2 * 5 - 1
    for row in held_rows:
        codes, scales = codes_and_scales(case.checkpoint, row)
        own = {end: stored[f"{row.name}.{end}"] for end in ("weight", "weight_scale_inv")}
        assert torch.equal(own["weight"].view(torch.uint8), codes.view(torch.uint8))
        (decoded,) = Fp8Dequantize(None).convert(own).values()
        assert torch.equal(decoded, FORMATS["fp8_128x128"].dequantize(codes, scales))
        assert torch.equal(read.layers[row.name].weight.read(), decoded)


def test_ignored_layers_are_whole_words_and_leave_out_what_would_match_a_quantized_layer(written):
    case, assignment, folder = written
    ignored = config_of(folder)["ignored_layers"]
    assert {KEPT, "transformer_blocks.0.ff.net.2", "transformer_blocks.1.norm1.linear", "x_embedder"} <= set(ignored)
    assert "proj_out" not in ignored and assignment["single_transformer_blocks.0.proj_out"].format
    network = empty_denoiser(case.checkpoint)
    linears = [name for name, each in network.named_modules() if isinstance(each, nn.Linear)]
    kept = {name for name in linears if assignment.get(name) is None or assignment[name].format is None}
    assert {name for name in linears if skipped(name, ignored)} == kept - {"proj_out"}
    assert [skips(ignored, name) for name in linears] == [skipped(name, ignored) for name in linears]


@pytest.mark.parametrize(
    "entry, found",
    {
        "proj_out": True, "single_transformer_blocks.0": True, "single_transformer_blocks.0.proj_out": True, "0": True,
        "single_transformer_blocks.0.": True, "transformer_blocks.0.proj_out": False, "proj": False,
        "*.proj_out": False, "single_transformer_blocks.1": False, "single_transformer_blocks.0.proj_out.x": False,
    }.items(),
)  # fmt: skip
def test_an_entry_is_whole_words_of_a_name(entry, found):
    name = "single_transformer_blocks.0.proj_out"
    assert skips([entry], name) == found
    assert found == skipped(name, [entry.rstrip(".")])


def test_a_layer_that_the_server_does_not_quantize_says_so(written):
    _, assignment, _ = written
    row = assignment["transformer_blocks.0.ff.net.2"]
    assert row.format is None and row.reason == "SGLang leaves such layers in high precision"


ROW = LayerAssignment(
    "single_transformer_blocks.0.attn.to_q", "qkv", (256, 128), "fp8_128x128", "fp8_128", weight_amax=torch.ones(1)
)


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, None),
        ({"activation_format": None}, "wants inputs quantized in fp8_128, and the recipe leaves them in high precisi"),
        ({"activation_format": "mxfp8"}, "quantized in fp8_128, and the recipe leaves them in mxfp8"),
        ({"weight_shape": (128, 192)}, "whose inputs are a multiple of 128"),
        ({"format": "fp8", "activation_format": "fp8"}, "holds no weights in fp8"),
        ({"pre_quant_scale": torch.ones(128)}, "cannot multiply the inputs of fp8_128x128"),
    ],
)
def test_what_it_holds(change, words):
    found = held(replace(ROW, **change), TARGETS[NAME])
    assert found.format == (None if words else "fp8_128x128") and (words is None or words in found.reason)


def test_rows_that_are_no_whole_blocks_have_a_scale_too():
    codes = torch.randn(200, 256, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors = {"weight": codes, "weight_scale_inv": scale}
    own = LayerTensors(Path("x"), "a", {end: lazy(tensor) for end, tensor in tensors.items()})
    layer = LAYOUT.layer(own, (200, 256), own.size(), None)
    expected = codes.float()
    for row, column in np.ndindex(2, 2):
        expected[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)] *= scale[row, column]
    assert torch.equal(layer.weight.read(), expected)
    assert layer.stored_bytes == 200 * 256 + 4 * 4 and layer.scales == "1 for 128 x 128"


def test_such_rows_are_written_with_a_scale(monkeypatch):
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    row = replace(ROW, weight_shape=(200, 256))
    codes, (scales,) = row.codes_and_scales(weight)
    monkeypatch.setattr(f"{codes_and_scales.__module__}.codes_and_scales", lambda checkpoint, layer: (codes, scales))
    tensors = {name.removeprefix(f"{row.name}."): each.read() for name, each in LAYOUT.tensors(None, row).items()}
    assert tensors["weight_scale_inv"].tolist() == [scales[0].tolist(), scales[128].tolist()]
    assert torch.equal(scales[128], scales[199]) and not torch.equal(scales[0], scales[128])


def test_inputs_are_rounded_as_sglangs_kernel_does():
    """In numpy: ``448 / amax`` and ``amax * (1 / 448)`` in fp32, amax at least 1e-10, E4M3 by ml_dtypes."""
    x = torch.randn(3, 5, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 384)
    x[0, 0, :128], x[0, 1, :128] = 0.0, 1e-12
    blocks = x.numpy().reshape(3, 5, 3, 128)
    largest = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(1e-10))
    codes = np.clip(blocks * (np.float32(448) / largest), -448, 448).astype(float8_e4m3fn).astype(np.float32)
    expected = (codes * (largest * np.float32(1 / 448))).reshape(x.shape)
    found = BlockFloat8(128)(x)
    assert np.array_equal(found.numpy(), expected) and not found[0, 0, :128].any()
    assert BlockFloat8(128)(x.half()).dtype == torch.float16
    assert 0.01 < relative_error(x, found) < 0.04


def test_the_network_that_is_read_rounds_the_inputs_of_every_quantized_layer(written):
    case, _, folder = written
    read = case.read(folder, NAME)
    assert {str(layer.inputs) for layer in read.layers.values()} == {"float8_e4m3fn, a scale for 128 numbers"}
    weights_alone = replace(read, layers={name: replace(each, inputs=None) for name, each in read.layers.items()})
    by_hand = case.network(weights_alone)
    for name in read.layers:
        by_hand.get_submodule(name).register_forward_pre_hook(lambda _, given: (BlockFloat8(128)(given[0]),))
    judged = case.network(read)
    assert case.error(by_hand, judged) == 0 and case.error(case.network(weights_alone), judged) > 1e-3


@pytest.mark.parametrize(
    "message, change",
    {
        "lacks activation_scheme dynamic": lambda config: config.update(activation_scheme="static"),
        r"lacks weight_block_size \[128, 128\]": lambda config: config.update(weight_block_size=[64, 128]),
        r"lacks weight_block_size": lambda config: config.pop("weight_block_size"),
        "has scale_fmt ue8m0, which is not decoded": lambda config: config.update(scale_fmt="ue8m0"),
        "is no list of names": lambda config: config.update(ignored_layers="proj_out"),
        r"ignores \(single_transformer_blocks.0.proj_out\), so SGLang": (
            lambda config: config["ignored_layers"].append("proj_out")
        ),
        "for 5 layers that its config ignores": (  # q, k, v and two proj_mlp
            lambda config: config.update(
                ignored_layers=[], modules_to_not_convert=["single_transformer_blocks.1", "proj_mlp"]
            )
        ),
    }.items(),
)
def test_a_config_that_the_server_takes_otherwise_is_refused(written, tmp_path, message, change):
    with pytest.raises(ArtifactError, match=message):
        damaged(NAME, written, tmp_path, change_config=change)


def test_what_transformers_writes_besides_is_read(written, tmp_path):
    """Its name for the list, its keys as they are by default, scales in bf16."""

    def change(config: dict) -> None:
        config["modules_to_not_convert"] = config.pop("ignored_layers")
        config.update(FineGrainedFP8Config(**config).to_dict())

    def to_bf16(tensors: dict, layer: str) -> None:
        tensors[f"{layer}.weight_scale_inv"] = tensors[f"{layer}.weight_scale_inv"].bfloat16()

    assert len(damaged(NAME, written, tmp_path, change, to_bf16).layers) == 2 * 8 + 2 * 5 - 1


def test_codes_without_a_scale_are_refused(written, tmp_path):
    with pytest.raises(ArtifactError, match="in no floating point"):
        damaged(NAME, written, tmp_path, change=lambda tensors, layer: tensors.pop(f"{layer}.weight_scale_inv"))


def test_it_is_for_flux(tiny):
    with pytest.raises(ConfigError, match="SGLang: it loads no quantized StableDiffusion3Pipeline"):
        check_served(TARGETS[NAME], tiny("sd3").checkpoint)


def test_the_card_says_how_it_is_served_and_that_nobody_has():
    figures = FIGURES | {
        "folder": "x/sglang_fp8", "servers": {"SGLang": None}, "inputs": {"fp8_128x128": "in blocks, while it runs"}
    }  # fmt: skip
    card = model_card(figures, TARGETS[NAME])
    assert "SGLang 0.5.23, on a GPU of SM89 or newer:\n\n    sglang serve --model-path sglang_fp8\n" in card
    assert "Nobody has run a server with it" in card and "Tried with" not in card
    assert "DeepGEMM quantizes the weights again" in card
