"""The rules of vLLM-Omni's loader, as its source has them: names, dtypes, shapes, layers that are ignored."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sd_quant.errors import ArtifactError
from sd_quant.interchange import TARGETS
from sd_quant.interchange.model_card import model_card
from sd_quant.interchange.weights import codes_and_scales
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.quantization.formats import FORMATS

from .conftest import recipe_of
from .damage import CONFIG, WEIGHTS, damaged
from .figures import FIGURES

pytestmark = pytest.mark.commit

NAME = "vllm_int8"
PARTS = {"to_qkv": ("to_q", "to_k", "to_v"), "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj")}


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    case = tiny("flux")
    recipe = recipe_of("int8", smoothing="none", alpha=None, per_token=True)
    assignment = case.assignment(recipe, NAME)
    return case, assignment, case.written(assignment, NAME, tmp_path_factory.mktemp("flux"))


def config_of(folder) -> dict:
    return json.loads((folder / CONFIG).read_text())["quantization_config"]


def skipped(prefix: str, ignored: list[str]) -> bool:
    """As vLLM's ``is_layer_skipped``: exact names, of a stacked linear its own or those of all parts."""
    owner, _, last = prefix.rpartition(".")
    if prefix in ignored or last not in PARTS:
        return prefix in ignored
    (found,) = {f"{owner}.{part}" in ignored for part in PARTS[last]}
    return found


def parameters_of_the_server(network: nn.Module, config: dict) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """The shapes of what vLLM-Omni's Flux has to load, by names in the file, and dtypes of what has codes.

    Its double blocks, norms and embedders get no quantization; its single blocks' linears do unless they are ignored.
    """
    assert config.pop("quant_method") == "int8"
    assert config.keys() <= {"is_checkpoint_int8_serialized", "activation_scheme", "ignored_layers"}  # its arguments
    assert config["activation_scheme"] == "dynamic" and config["is_checkpoint_int8_serialized"]
    needed = {name: (tuple(each.shape), None) for name, each in network.state_dict().items()}
    for name, module in network.named_modules():
        owner, _, last = name.rpartition(".")
        quantizes = name.startswith("single_transformer_blocks.") and not owner.endswith(".norm")
        stacked = {part: whole for whole, parts in PARTS.items() for part in parts}
        prefix = f"{owner}.{stacked[last]}" if last in stacked else name
        if isinstance(module, nn.Linear) and quantizes and not skipped(prefix, config["ignored_layers"]):
            assert last not in stacked, "the server would take the scales of three rows for all"
            needed[f"{name}.weight"] = tuple(module.weight.shape), torch.int8
            needed[f"{name}.weight_scale"] = (len(module.weight), 1), torch.float32
    return needed


def test_every_tensor_has_a_place_in_the_server_and_every_place_its_tensor(written):
    case, assignment, folder = written
    stored = load_file(folder / WEIGHTS)
    needed = parameters_of_the_server(empty_denoiser(case.checkpoint), config_of(folder))
    shapes = {name: shape for name, (shape, _) in needed.items()}
    assert {name: tuple(each.shape) for name, each in stored.items()} == shapes
    for name, (_, dtype) in needed.items():
        assert stored[name].dtype == (dtype or torch.float16), name
    held = [row for row in assignment.values() if row.format]
    assert held and {row.name.rpartition(".")[2] for row in held} == {"proj_mlp", "proj_out"}
    for row in held:
        codes, scales = codes_and_scales(case.checkpoint, row)
        product = stored[f"{row.name}.weight"].float() * stored[f"{row.name}.weight_scale"]
        assert torch.equal(product, FORMATS["int8"].dequantize(codes, scales))


def test_ignored_layers_are_exact_names_of_parts_and_of_what_is_stacked(written):
    """Neither the end of a name nor a pattern matches. Parts of one stacked linear must agree."""
    _, _, folder = written
    ignored = config_of(folder)["ignored_layers"]
    block = "single_transformer_blocks.0"
    expected = {f"{block}.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_qkv")} | {f"{block}.norm.linear"}
    assert expected <= set(ignored)
    assert not any("*" in name for name in ignored) and f"{block}.proj_mlp" not in ignored
    assert skipped(f"{block}.attn.to_qkv", ignored) and not skipped(f"{block}.proj_mlp", ignored)
    for other in (["proj_mlp"], ["*.proj_mlp"], ["single_transformer_blocks"]):
        assert not skipped(f"{block}.proj_mlp", other)
    with pytest.raises(ValueError, match="too many values"):
        skipped(f"{block}.attn.to_qkv", [f"{block}.attn.to_q"])


def test_a_layer_that_the_server_does_not_quantize_says_so(written):
    _, assignment, _ = written
    row = assignment["transformer_blocks.0.ff.net.2"]
    assert row.format is None and row.reason == "vLLM-Omni leaves such layers in high precision"


@pytest.mark.parametrize(
    "message, change",
    {
        "lacks is_checkpoint_int8_serialized True": lambda config: config.update(is_checkpoint_int8_serialized=False),
        "lacks activation_scheme dynamic": lambda config: config.update(activation_scheme="static"),
        "has weight_block_size, which": lambda config: config.update(weight_block_size=[1, 2]),
        "is no list of names": lambda config: config.update(ignored_layers="proj_mlp"),
        r"that its config ignores \(single_transformer_blocks.0.proj_mlp": (
            lambda config: config["ignored_layers"].append("single_transformer_blocks.0.proj_mlp")
        ),
    }.items(),
)
def test_a_config_that_the_server_does_not_take_is_refused(written, tmp_path, message, change):
    with pytest.raises(ArtifactError, match=message):
        damaged(NAME, written, tmp_path, change_config=change)


def test_an_unknown_tensor_is_refused(written, tmp_path):
    def change(tensors: dict, layer: str) -> None:
        tensors[f"{layer}.input_scale"] = torch.ones(())

    with pytest.raises(ArtifactError, match="1 unknown: .*input_scale"):
        damaged(NAME, written, tmp_path, change=change)


def test_the_card_says_how_it_is_served_and_that_nobody_has():
    card = model_card(FIGURES | {"folder": "x/vllm_int8", "servers": {"vLLM-Omni": None}}, TARGETS[NAME])
    assert "vLLM-Omni 0.30.0, on a GPU of SM80 or newer:\n\n    vllm serve vllm_int8 --omni\n" in card
    assert "Nobody has run a server with it" in card and "Tried with" not in card
