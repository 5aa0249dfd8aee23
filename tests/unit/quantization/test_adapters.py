"""LoRAs beside quantized linears: against the formula, and networks against PEFT's own unmerged adapter."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sd_quant.checkpoints.lora import adapted_in, fused, without_loras
from sd_quant.errors import ConfigError
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.low_rank import with_adapter
from sd_quant.simulation.modelopt import simulate, unrounded
from sd_quant.stages.judged_run import with_loras_beside

from ..interchange.conftest import recipe_of
from ..tiny import Tiny, tiny  # noqa: F401 a fixture

pytestmark = pytest.mark.commit

PART = "unet_xl"
OUT, IN, RANK = 24, 40, 3
RANDOM = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=RANDOM)


PLAIN = LayerAssignment("a", "linear", (OUT, IN), format="int8")
SMOOTHED = replace(PLAIN, pre_quant_scale=drawn(IN).exp())
ROWS = {
    "plain": PLAIN,
    "smoothed": SMOOTHED,
    "folded": replace(SMOOTHED, folded_into="norm"),
    "absorbs": replace(SMOOTHED, output_scale=drawn(OUT).exp()),
    "with a branch": replace(SMOOTHED, low_rank=(drawn(OUT, 5).half(), drawn(5, IN).half())),
}


@pytest.mark.parametrize("size", [1.0, 1e4, 1e-4])
@pytest.mark.parametrize("case", ROWS)
def test_what_is_quantized_is_the_weight_without_it_and_the_sum_is_the_weight_with_it(case, size):
    """For factors of any size that fp16 could not hold as they come: their product alone matters."""
    row, weight, up, down = ROWS[case], drawn(OUT, IN), drawn(OUT, RANK) / size, drawn(RANK, IN) * size
    beside = with_adapter(row, up, down)
    assert beside.rank == row.rank + RANK and all(each.dtype == torch.half for each in beside.low_rank)
    assert relative_error(rewritten(weight, row), rewritten(weight + up @ down, beside)) < 1e-3
    x, (all_up, all_down) = drawn(7, IN).double(), (each.double() for each in beside.low_rank)
    smoothed = x * (1 if row.pre_quant_scale is None else row.pre_quant_scale)
    output = smoothed @ (rewritten(weight + up @ down, beside).double() + all_up @ all_down).T
    expected = x @ (weight + up @ down).double().T * (1 if row.output_scale is None else row.output_scale)
    assert relative_error(expected, output) < 1e-6
    for untrained in (with_adapter(row, 0 * up, factor) for factor in (down / size, 1e6 * down)):  # beyond fp16
        assert torch.equal(rewritten(weight, untrained), rewritten(weight, row))  # which a NaN is not


LINEARS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


def adapter_of(network: nn.Module, path, names=LINEARS, size: float = 0.1):
    tensors = {}
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and any(name.endswith(f".{each}") for each in names):
            out, width, *kernel = layer.weight.shape
            tensors[f"unet.{name}.lora_A.weight"] = drawn(RANK, width, *kernel) * width**-0.5
            tensors[f"unet.{name}.lora_B.weight"] = drawn(out, RANK, *[1] * len(kernel)) * size
    save_file(tensors, path)
    return tensors


@pytest.fixture
def case(tiny, tmp_path):  # noqa: F811
    found = tiny("sdxl")
    adapter_of(found.denoiser(), tmp_path / "style.safetensors")
    return found, Tiny(fused(found.checkpoint, [(tmp_path / "style.safetensors", 1.0)]))


def assigned(found: Tiny, **options) -> dict[str, LayerAssignment]:
    return found.derived(recipe_of("int8", **options))


@pytest.mark.nightly
def test_where_nothing_is_rounded_it_is_the_network_with_the_lora_fused(case):
    """With smoothing that producers compute, some of which have a LoRA too, and layers in high precision beside it."""
    found, adapted = case
    assignment = assigned(found)
    assert {layer.output_scale is not None for layer in assignment.values() if layer.format} == {True, False}
    assignment |= {name: replace(layer, format=None) for name, layer in assignment.items() if name.endswith("to_q")}
    rows = with_loras_beside(adapted.checkpoint, PART, assignment)
    assert {name.endswith("to_q") for name in adapted_in(adapted.checkpoint, "unet") if not rows[name].rank} == {True}
    network = simulate(adapted.denoiser(), rows)
    with ExitStack() as stack:
        for name, each in network.named_modules():
            if name.endswith("_quantizer"):
                stack.enter_context(unrounded(each))
        assert found.error(adapted.denoiser(), network) < 1e-3  # of fp16
    assert found.error(adapted.denoiser(), found.denoiser()) > 0.1
    before = without_loras(adapted.checkpoint)
    assert without_loras(found.checkpoint) is found.checkpoint and adapted_in(found.checkpoint, "unet") == {}
    for name, tensor in found.checkpoint.components["unet"].items():
        assert torch.equal(before.components["unet"][name], tensor), name


@pytest.mark.consumer
def test_it_is_what_peft_computes_beside_the_network_that_was_quantized_without_it(case, tmp_path):
    peft = pytest.importorskip("peft")

    found, adapted = case
    assignment = assigned(found, smoothing="none", alpha=None)
    theirs = simulate(found.denoiser(), assignment)
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LINEARS)
    theirs = peft.inject_adapter_in_model(config, theirs)
    tensors = load_file(tmp_path / "style.safetensors")
    for name, module in theirs.named_modules():
        if hasattr(module, "lora_A"):
            module.lora_A["default"].weight.data = tensors[f"unet.{name}.lora_A.weight"]
            module.lora_B["default"].weight.data = tensors[f"unet.{name}.lora_B.weight"]
    ours = simulate(adapted.denoiser(), with_loras_beside(adapted.checkpoint, PART, assignment))
    fused_before = simulate(adapted.denoiser(), assigned(adapted, smoothing="none", alpha=None))
    names = [name for name in adapted_in(adapted.checkpoint, "unet") if assignment[name].format]
    assert names
    for name in names:  # one by one: a network moves an input that lies between two codes to the other
        x = drawn(2, 9, assignment[name].weight_shape[1])
        expected, computed, other = (each.get_submodule(name)(x) for each in (theirs, ours, fused_before))
        assert relative_error(expected, computed) < 3e-3 < relative_error(expected, other), name


def test_a_lora_of_a_quantized_convolution_is_refused_and_one_that_stays_in_high_precision_is_not(tiny, tmp_path):  # noqa: F811
    found = tiny("sdxl")
    adapter_of(found.denoiser(), tmp_path / "style.safetensors", ["to_q", "conv1"])
    adapted = fused(found.checkpoint, [(tmp_path / "style.safetensors", 1.0)])
    rows = assigned(found)
    with pytest.raises(ConfigError, match=r"^model.loras change \d+ quantized convolutions of unet_xl \(down_blocks.0"):
        with_loras_beside(adapted, PART, rows)
    left = {name: replace(layer, format=None) if layer.role == "conv" else layer for name, layer in rows.items()}
    beside = with_loras_beside(adapted, PART, left)
    assert {name for name, layer in beside.items() if layer.rank} == {name for name in rows if name.endswith("to_q")}
