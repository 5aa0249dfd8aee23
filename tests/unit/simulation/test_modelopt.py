"""The simulation, and our ranges against those that NVIDIA ModelOpt calibrates for itself on the same calls.

With ``smoothing=modelopt`` both are fp32 throughout and compute the same formulas, but divide, multiply and take powers
in another order, each time off by 2^-24: 1e-5 leaves room for a hundred of these and for nothing else. fp16 enters only
in what the graph stores: the scales (relative 2^-11) and the vector that multiplies a layer's input.

One difference is deliberate, and no network here shows it. A channel that was never active gets 1. ModelOpt means to do
the same, but asks for it only when another factor is almost zero, and leaves such channels at its clamp of 1e4.
"""

import warnings
from dataclasses import replace

import modelopt.torch.opt as mto
import modelopt.torch.quantization as mtq
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.inference.loading import load_model
from sd_quant.models.unet import EXCLUDED
from sd_quant.numbers import relative_error
from sd_quant.places import HOME
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Recipe
from sd_quant.simulation.modelopt import restorable, save_quantized, simulate
from sd_quant.simulation.rewrite import FloatProducts, QuantizedAttention, rewrite
from tests.layers import drawn, static_layer

from ...joint_attention import MADE, Joint
from ...joint_attention import calibrated as calibrated_joint

pytestmark = pytest.mark.commit

KEPT = ("mid_block.attentions.0.transformer_blocks.0.attn1.to_k", "mid_block.attentions.0.proj_out")


@pytest.fixture(scope="module", params=["folded", "modelopt"])
def assignment(request, calibrated):
    """Every role of layer, two layers kept."""
    return calibrated.assignment(0.8, smoothing=request.param, kept=KEPT)


@pytest.fixture(scope="module")
def simulated(calibrated, assignment):
    """A part whose UNet is quantized."""
    part = calibrated.part()
    simulate(part.unet, assignment)
    return part


def quantizers(unet: nn.Module, kind: str) -> dict[str, nn.Module]:
    suffix = f".{kind}_quantizer"
    return {name.removesuffix(suffix): module for name, module in unet.named_modules() if name.endswith(suffix)}


def test_it_computes_nearly_what_the_original_does(simulated, assignment, calibrated):
    """Exactly the assigned layers are quantized, and their inputs multiplied where nothing else does it."""
    weights, inputs, outputs = (quantizers(simulated.unet, kind) for kind in ("weight", "input", "output"))
    enabled = [{name for name, each in kind.items() if each.is_enabled} for kind in (weights, inputs, outputs)]
    expected = {layer.name for layer in assignment.values() if layer.format}
    assert enabled == [expected, expected, set()] and not expected & set(KEPT)
    multiplied = {name for name, module in inputs.items() if module.pre_quant_scale is not None}
    assert multiplied == {layer.name for layer in assignment.values() if layer.multiplies}
    inputs = calibrated.calls[0]
    error = relative_error(calibrated.part()(**inputs), simulated(**inputs))
    assert 1e-2 < error < 0.3  # rounded, and not broken: measured 0.09, uneven norms are hard on a small network


@pytest.mark.slow
@pytest.mark.parametrize("quant_level, kept, tolerance", [(2.0, (), 1e-5), (3.0, KEPT, 1e-3)])
def test_folding_alone_changes_nothing(calibrated, quant_level, kept, tolerance):
    """With rounding off, the norms, the linears and the divided weights, of kept layers too, cancel.

    In level 2 every vector is in a norm or a linear, in fp32; in level 3 text and proj_out are multiplied by vectors in
    fp16, each off by up to 2^-12. Measured 1e-6 and 3e-4.
    """
    original, part, inputs = calibrated.part(), calibrated.part(), calibrated.calls[1]
    assignment = calibrated.assignment(0.8, quant_level, kept=kept)
    simulate(part.unet, assignment)
    for kind in ("weight", "input"):
        for quantizer in quantizers(part.unet, kind).values():
            quantizer.disable()
    absorbing = [layer.name for layer in assignment.values() if layer.output_scale is not None]
    assert absorbing
    for name in absorbing:
        assert relative_error(*(each.unet.get_submodule(name).weight for each in (original, part))) > 1e-2
    assert relative_error(original(**inputs), part(**inputs)) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ["folded"], indirect=True)
def test_a_saved_model_holds_no_code_and_is_restored_bit_for_bit(simulated, calibrated, tmp_path):
    file = tmp_path / "quantized.pt"
    save_quantized(simulated.unet, file)
    assert list(tmp_path.iterdir()) == [file]
    assert torch.load(file, weights_only=True).keys() == {"modelopt_state", "model_state_dict"}
    fresh, inputs = calibrated.part(), calibrated.calls[1]
    mto.restore(fresh.unet, file)
    found = fresh(**inputs)
    assert torch.equal(found, simulated(**inputs)) and not torch.equal(found, calibrated.part()(**inputs))


def test_modelopt_holds_what_is_its_own_and_nothing_else():
    """A low-rank branch is a hook, quantized attention a processor: its file would lose both."""
    layer = LayerAssignment("layer", "ffn", (2, 2), "int8", "int8")
    assert restorable({"layer": layer})
    for lost in (
        {"format": "int4"}, {"activation_format": "nvfp4"}, {"low_rank": (torch.ones(2, 1), torch.ones(1, 2))},
        {"attention_amax": (torch.ones(1),) * 3}, {"per_token": True}, {"rotation": 4},
    ):  # fmt: skip
        assert not restorable({"layer": replace(layer, **lost)}), lost


def test_on_a_gpu_modelopt_would_compile_nothing(monkeypatch):
    """It asks for its kernels in every call there, and falls back to what it computes on a processor."""
    from modelopt.torch.quantization import extensions, tensor_quant

    simulate(nn.ModuleDict({"layer": nn.Linear(2, 2)}), {"layer": static_layer(torch.ones(2, 2), "int8", True)})
    monkeypatch.setattr(extensions, "load_cpp_extension", lambda *_, **__: pytest.fail("it compiles"))
    assert tensor_quant.get_cuda_ext() is None and tensor_quant.get_cuda_ext_fp8() is None


@torch.no_grad()
def test_attention_that_is_spread_over_many_tokens_is_not_rounded_to_nothing():
    """What a softmax returns is then about 2^-11, which the scale 1 would round to zero, E4M3's smallest being 2^-9."""
    torch.manual_seed(0)
    attention, tokens = Attention(32, heads=2, dim_head=16), 1 + 0.1 * torch.randn(1, 2048, 32)
    expected = attention(tokens)
    layer = LayerAssignment(
        "attention", "attention", (), activation_format="fp8", attention_amax=(torch.full((1,), 4.0),) * 3
    )
    attention.set_processor(QuantizedAttention(layer))
    assert relative_error(expected, attention(tokens)) < 0.05


@torch.no_grad()
def test_fp8_weights_half_way_between_two_codes_get_those_of_the_export():
    """ModelOpt multiplies by 1 / scale; a large weight with another code looks like another scale of its channel."""
    layer = nn.Sequential(nn.Linear(64, 400, bias=False))
    scales = torch.linspace(1e-3, 2e-3, 400).half().float()
    layer[0].weight.copy_(scales[:, None] * (torch.arange(64) % 8 + 8.5))  # 8.5, 9.5, ... are half-way
    layer[0].weight[:, 0] = 448 * scales
    row = LayerAssignment(
        "0", "linear", (400, 64), "fp8", "fp8", weight_axis=0, weight_amax=448 * scales, activation_amax=1.0,
        per_token=True,
    )  # fmt: skip
    expected = row.rounded_weight(layer[0].weight.clone())
    simulated = simulate(layer, {"0": row})
    torch.testing.assert_close(simulated[0].weight_quantizer(simulated[0].weight), expected, rtol=1e-5, atol=0)


# Ranges of ModelOpt's own calibration

RELATIVE = 1e-5
LAYERS = {"small": (48, 18), "checkpoint": (124, 26)}  # linears and convolutions that level 3 quantizes


@pytest.fixture(scope="module")
def checkpoint(calibrate):
    model = load_model(open_nemo(HOME / "checkpoints/sdxl_mini.nemo"))
    shapes = model.contracts["unet_xl"].shapes(batch=2, height=8, width=8)
    calls = [
        {name: drawn(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
        | {"timesteps": torch.full((2,), step)}
        for step in (999.0, 499.0, 49.0)
    ]
    return calibrate(model.parts["unet_xl"].requires_grad_(False), calls)


def smoothquant(network: nn.Module, alpha: float, run) -> nn.Module:
    """``network`` as ModelOpt calibrates it for itself: everything but what its own diffusion recipes leave out."""
    rules = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*.weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}},
        {"quantizer_name": "*.input_quantizer", "cfg": {"num_bits": 8, "axis": None}},
        *({"quantizer_name": f"*{word}*", "enable": False} for word in EXCLUDED),
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not calibrated, skip smoothing")  # those that are left out
        return mtq.quantize(network, {"quant_cfg": rules, "algorithm": {"method": "smoothquant", "alpha": alpha}}, run)


def close(ours: torch.Tensor, theirs: torch.Tensor, relative: float = RELATIVE) -> None:
    torch.testing.assert_close(ours, theirs.float(), rtol=relative, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name, alpha", [("small", 0.5), ("small", 1.0), ("checkpoint", 0.8)])
def test_vectors_weights_and_ranges_are_those_of_modelopt(name, alpha, calibrated, request):
    """And what the graph stores is off by fp16's rounding and no more."""
    network = calibrated if name == "small" else request.getfixturevalue("checkpoint")
    assignment, part, original = network.assignment(alpha, smoothing="modelopt"), network.part(), network.part().unet
    smoothquant(part, alpha, network.run)
    layers, spreads = [layer for layer in assignment.values() if layer.format], []
    for layer in layers:
        module, weight = part.unet.get_submodule(layer.name), original.get_submodule(layer.name).weight
        of_weight, of_input = module.weight_quantizer.amax.flatten(), module.input_quantizer.amax.squeeze()
        if layer.role == "conv":
            assert layer.pre_quant_scale is None and module.input_quantizer.pre_quant_scale is None
        else:
            assert layer.multiplies
            close(layer.pre_quant_scale, module.input_quantizer.pre_quant_scale)
            spreads.append((layer.pre_quant_scale.max() / layer.pre_quant_scale.min()).item())
        close(rewritten(weight, layer), module.weight)
        close(layer.weight_amax, of_weight)
        close(torch.tensor(layer.activation_amax), of_input)
        close(layer.weight_scale * FORMATS["int8"].largest_code, of_weight, 2.0**-11 + RELATIVE)
        close(torch.tensor(layer.activation_scale * FORMATS["int8"].largest_code), of_input, 2.0**-11 + RELATIVE)
    assert (len(spreads), len(layers) - len(spreads)) == LAYERS[name]
    assert max(spreads) > 2  # there was something to smooth


# The simulation's attentions against diffusers' own, whose two products they replace; and absorbed factors


class Exact(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, *mask, scale=1.0)


def calls_of(joint: Joint, names: list[str]) -> dict[str, tuple[tuple, dict, Tensor | tuple[Tensor, ...]]]:
    part, found = joint.part(), {}
    for name in names:
        part.transformer.get_submodule(name).register_forward_hook(
            lambda _, given, named, output, name=name: found.update({name: (given, named, output)}), with_kwargs=True
        )
    part(**joint.inputs(seed=7))
    return found


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
@torch.no_grad()
def test_it_is_diffusers_own_but_for_what_is_rounded(name, fmt):
    joint = calibrated_joint(name)
    rows = {each: row for each, row in joint.rows(fmt).items() if row.role == "attention"}
    quantized = [each for each, row in rows.items() if row.attention_products]
    network = joint.part().transformer
    rewrite(network, rows)
    assert len(quantized) == {("pixart", "int8"): 2, ("flux", "int8"): 0}.get((name, fmt), len(rows))
    for attention, (given, named, expected) in calls_of(joint, quantized).items():
        module = network.get_submodule(attention)
        rounded = module(*given, **named)
        module.processor.products = Exact()
        exact = module(*given, **named)
        streams = [(expected, rounded, exact)]
        for theirs, codes, ours in streams if torch.is_tensor(expected) else zip(*streams[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            assert 5e-4 < relative_error(theirs, codes) < 0.1, attention


@torch.no_grad()
def test_products_in_floats_are_torchs_own_attention_and_its_mask_widens_nothing():
    """E4M3 has a relative error of 2^-4 at most, and 0.05 was measured; a masked score of -10000 has no part in it."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 40, 32) for _ in "qkv")
    mask = torch.zeros(2, 3, 1, 40)
    mask[..., 25:] = -10000.0
    root = 32**-0.25
    ranges = tuple(each.abs().amax().view(1) for each in (root * query, root * key, value))
    row = LayerAssignment("attn", "attention", (32,), activation_format="fp8", attention_amax=ranges)
    products = FloatProducts(row)
    for given in ((), (mask,)):
        expected = F.scaled_dot_product_attention(query, key, value, *given)
        assert relative_error(expected, products(root * query, root * key, value, *given)) < 0.06
    cut = products(root * query, root * key[..., :25, :], value[..., :25, :])
    torch.testing.assert_close(products(root * query, root * key, value, mask), cut)


BLOCK, SINGLE = "transformer_blocks.0", "single_transformer_blocks.0"
FOLDED = {  # by network: readers of a block, and what their input's modulation is
    "sd3": {
        f"{BLOCK}.attn.to_q": f"{BLOCK}.norm1.linear",
        f"{BLOCK}.attn.add_k_proj": f"{BLOCK}.norm1_context.linear",
        f"{BLOCK}.ff.net.0.proj": f"{BLOCK}.norm1.linear",
        f"{BLOCK}.ff_context.net.0.proj": f"{BLOCK}.norm1_context.linear",
        "transformer_blocks.1.attn.add_q_proj": "transformer_blocks.1.norm1_context.linear",  # scale, then shift
    },
    "sd35": {f"{BLOCK}.attn2.{layer}": f"{BLOCK}.norm1.linear" for layer in ("to_q", "to_k", "to_v")},
    "flux": {
        f"{BLOCK}.attn.to_v": f"{BLOCK}.norm1.linear",
        f"{BLOCK}.ff_context.net.0.proj": f"{BLOCK}.norm1_context.linear",
        f"{SINGLE}.attn.to_q": f"{SINGLE}.norm.linear",
        f"{SINGLE}.proj_mlp": f"{SINGLE}.norm.linear",
    },
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_network_whose_modulations_have_absorbed_factors_computes_the_same(name):
    joint = calibrated_joint(name, modulated=True)
    assignment = joint.derived(Recipe(3.0, 0.5, collect_method="min-max", per_channel=True))
    found = {reader: assignment[reader].folded_into for reader in FOLDED[name]}
    assert found == FOLDED[name]
    readers = [layer for layer in assignment.values() if ".norm" in (layer.folded_into or "")]
    assert all(layer.pre_quant_scale.max() > 2 * layer.pre_quant_scale.min() for layer in readers)
    plain, changed = joint.part(), joint.part()  # without the factors for which the graph has to multiply
    rewrite(
        changed.transformer,
        {row.name: replace(row, pre_quant_scale=None) if row.multiplies else row for row in assignment.values()},
    )
    for reader, producer in FOLDED[name].items():
        for layer in (reader, producer):
            weights = (part.transformer.get_submodule(layer).weight for part in (plain, changed))
            assert relative_error(*weights) > 0.05
    inputs = joint.inputs(seed=7)
    assert relative_error(plain(**inputs), changed(**inputs)) < 1e-5  # measured 1e-6
