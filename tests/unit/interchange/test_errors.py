"""Errors of a layer against whole networks; a folded candidate is judged layer by layer as if nothing were folded."""

from collections.abc import Collection, Mapping

import pytest
import torch
from torch import Tensor, nn

from sd_quant.files.tensors import lazy
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.errors import alone, layer_errors, put_in, unfolded
from sd_quant.interchange.inputs import Affine, Multiplied, RowInteger
from sd_quant.models.checkpoint import denoiser_weights, empty_denoiser
from sd_quant.models.parts import SharedInput
from sd_quant.numbers import relative_error

from .conftest import assert_equal

pytestmark = pytest.mark.commit

BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"


def weights_of(checkpoint) -> dict[str, Tensor]:
    return {name: weight.float() for name, weight in denoiser_weights(checkpoint).items()}


def factors(count: int, most: float, random: torch.Generator) -> Tensor:
    return most ** (2 * torch.rand(count, generator=random) - 1)


def with_first_rows(weight: Tensor, factor: Tensor) -> Tensor:
    """Whatever is behind them are a gate's, which take over nothing."""
    rows = torch.cat([factor, torch.ones(len(weight) - len(factor))])
    return weight * rows.view(-1, *(1,) * (weight.ndim - 1))


def candidate_of(checkpoint, weights: Mapping[str, Tensor], quantized: Collection[str]) -> QuantizedDenoiser:
    layers = {
        name: QuantizedLayer("int4", "1 for all", weight.numel() // 2, lazy(weight), RowInteger())
        for name in quantized
        for weight in [weights[f"{name}.weight"]]
    }
    others = {name: lazy(each) for name, each in weights.items() if name.removesuffix(".weight") not in layers}
    return QuantizedDenoiser(checkpoint.path, "gguf", "a test", layers, others)


def multiplied(candidate: QuantizedDenoiser, checkpoint) -> set[str]:
    """The ends of names of layers whose inputs are multiplied once nothing is folded."""
    layers = unfolded(candidate, checkpoint)
    return {name.removeprefix(f"{BLOCK}.") for name, each in layers.items() if isinstance(each.inputs, Multiplied)}


def block_candidate(checkpoint, folded: Mapping[str, tuple[str, ...]]) -> QuantizedDenoiser:
    """Weights in steps of 1/64, of a block some of whose layers have given a smoothing to others in front."""
    weights, random = weights_of(checkpoint), torch.Generator().manual_seed(0)
    chosen = [name for name in weights if name.startswith(BLOCK) and weights[name].ndim == 2]
    weights |= {name: (weights[name] * 64).round() / 64 for name in chosen}
    for reader, producers in folded.items():
        name = f"{BLOCK}.{reader}.weight"
        factor = factors(weights[name].shape[1], 2, random)  # little, so that rounding is no reason for a difference
        weights[name] = weights[name] / factor
        weights |= {key: with_first_rows(weights[key], factor) for key in (f"{BLOCK}.{each}" for each in producers)}
    return candidate_of(checkpoint, weights, [name.removesuffix(".weight") for name in chosen])


@torch.no_grad()
def test_the_errors_of_folded_layers_are_those_of_the_same_layers_unfolded(tiny):
    case = tiny("sdxl")
    network, found = case.denoiser(), []
    folded = {
        "attn2.to_q": ("norm2.weight", "norm2.bias"),
        "attn1.to_out.0": ("attn1.to_v.weight",),
        "ff.net.2": ("ff.net.0.proj.weight", "ff.net.0.proj.bias"),
        "ff.net.0.proj": ("norm3.weight", "norm3.bias"),
    }
    for which in ({}, folded):
        candidate = block_candidate(case.checkpoint, which)
        assert multiplied(candidate, case.checkpoint) == which.keys()
        layers = unfolded(candidate, case.checkpoint)
        found.append(layer_errors(network, layers, lambda: case.output(network)))
    for name, plain in found[0].items():
        assert found[1][name].weight == pytest.approx(plain.weight, rel=0.05), name
        assert found[1][name].output == pytest.approx(plain.output, rel=0.3), name  # inputs are rounded smoothed
    naive = layer_errors(network, candidate.layers, lambda: case.output(network))
    assert naive[f"{BLOCK}.ff.net.0.proj"].output > 2.5 * found[1][f"{BLOCK}.ff.net.0.proj"].output


@pytest.mark.parametrize(
    "first, readers",
    [
        ({"norm2": 1.14, "norm3": 1.02, "attn1.to_v": 1.45}, set()),
        ({"attn1.to_v": 1.55}, {"attn1.to_out.0"}),
        ({"norm2": 1.16, "norm3": 1.02, "attn1.to_v": 1.06}, {"attn2.to_q", "ff.net.0.proj", "attn1.to_out.0"}),
        ({"norm2": 1.16, "norm3": 1.005, "attn1.to_v": 1.04}, {"attn2.to_q"}),
    ],
    ids=["rounding", "a row", "slight", "slightest"],
)
def test_a_slight_factor_counts_where_a_norm_has_a_large_one(tiny, first, readers):
    """Of a norm's first number, or a first row: alone they have to differ by 0.15 and 0.5, else by 0.01 and 0.05."""
    checkpoint = tiny("sdxl").checkpoint
    weights = weights_of(checkpoint)
    for producer, factor in first.items():
        name = f"{BLOCK}.{producer}.weight"
        weights[name] = with_first_rows(weights[name], torch.tensor([factor]))
    names = [f"{BLOCK}.{reader}" for reader in ("attn2.to_q", "ff.net.0.proj", "attn1.to_out.0")]
    assert multiplied(candidate_of(checkpoint, weights, names), checkpoint) == readers


def test_coarse_rounding_is_no_folding_and_a_linear_may_fold_without_a_norm(tiny):
    """PixArt's norms have no weights, so linears alone take over a smoothing there."""
    checkpoint = tiny("pixart").checkpoint
    weights = weights_of(checkpoint)
    roles = checkpoint.family.layer_roles(empty_denoiser(checkpoint))
    shared = checkpoint.family.shared_inputs([name for name, role in roles.items() if role != "conv"])
    folded = next(each for each in shared if each.producer is not None)
    for name in roles:
        weight = weights[f"{name}.weight"]
        largest = weight.flatten(1).abs().amax(1).view(-1, *(1,) * (weight.ndim - 1))
        weights[f"{name}.weight"] = (weight / largest * 1.5).round() / 1.5 * largest  # two bits: thirds of the largest
    assert not multiplied(candidate_of(checkpoint, weights, roles), checkpoint)
    factor = factors(weights[f"{folded.readers[0]}.weight"].shape[1], 4, torch.Generator().manual_seed(0))
    producer = f"{folded.producer}.weight"
    weights[producer] = with_first_rows(weights[producer], factor)
    assert multiplied(candidate_of(checkpoint, weights, roles), checkpoint) == set(folded.readers)


@torch.no_grad()
def test_a_modulations_factors_are_read_off_its_weights_and_biases(tiny):
    """Of two tensors that one modulation makes, of which the graph multiplies none."""
    checkpoint, block = tiny("sd3").checkpoint, "transformer_blocks.0"
    weights, random = weights_of(checkpoint), torch.Generator().manual_seed(0)
    name = f"{block}.norm1.linear"
    inputs_of_block = [
        SharedInput((f"{block}.attn.to_q", f"{block}.attn.to_k", f"{block}.attn.to_v"), name, modulation=(0, 1)),
        SharedInput((f"{block}.ff.net.0.proj",), name, modulation=(3, 4)),
    ]
    bias, expected = weights[f"{name}.bias"].clone(), {}
    absorbed = torch.ones(len(bias))
    for shared in inputs_of_block:
        inputs = weights[f"{shared.readers[0]}.weight"].shape[1]
        factor = factors(inputs, 4, random)
        shift, scale = shared.rows(inputs)
        bias[shift] *= factor
        bias[scale] = factor * (1 + bias[scale]) - 1
        absorbed[shift] = absorbed[scale] = factor
        expected |= dict.fromkeys(shared.readers, factor)
    changed = {f"{reader}.weight": weights[f"{reader}.weight"] / factor for reader, factor in expected.items()}
    changed |= {f"{name}.bias": bias, f"{name}.weight": weights[f"{name}.weight"] * absorbed[:, None]}
    other = f"{block}.attn.add_q_proj"
    candidate = candidate_of(checkpoint, weights | changed, [name, *expected, other])
    assert multiplied(candidate, checkpoint) == expected.keys()
    found = unfolded(candidate, checkpoint)
    for reader, factor in expected.items():
        torch.testing.assert_close(found[reader].inputs.factor, factor)
    torch.testing.assert_close(found[name].weight.read(), weights[f"{name}.weight"])


# A network of a convolution and two linears

torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Flatten(2), nn.Linear(16, 12), nn.Linear(12, 5))
NETWORK.requires_grad_(False)
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROUNDED = RowInteger(-8, 7)


def rounded(name: str, inputs=None) -> QuantizedLayer:
    weight = NETWORK.get_submodule(name).weight
    return QuantizedLayer("int4", "1 for all", weight.numel() // 2, lazy((weight * 8).round() / 8), inputs)


def test_a_layer_is_judged_on_the_inputs_that_it_has_in_full_precision():
    layers = {"0": rounded("0", Affine(scale=0.1)), "2": rounded("2", ROUNDED)}
    errors = layer_errors(NETWORK, layers, lambda: [NETWORK(X), NETWORK(2 * X)])
    first, linear = NETWORK[0].weight, NETWORK[2].weight
    both = torch.cat([X, 2 * X])
    flat = NETWORK[:2](both)
    theirs = ROUNDED(flat) @ layers["2"].weight.read().T
    assert errors["2"].output == pytest.approx(relative_error(flat @ linear.T, theirs), rel=1e-5)
    assert errors["2"].weight == pytest.approx(relative_error(linear, layers["2"].weight.read()), rel=1e-6)
    theirs = nn.functional.conv2d(Affine(scale=0.1)(both), layers["0"].weight.read(), None, 2, 1)
    expected = relative_error(nn.functional.conv2d(both, first, None, 2, 1), theirs)
    assert errors["0"].output == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("smooths", [False, True])
def test_a_branch_is_multiplied_with_inputs_as_they_come_or_smoothed(smooths):
    random, residual = torch.Generator().manual_seed(2), rounded("3").weight.read()
    up, down = torch.randn(5, 2, generator=random), torch.randn(2, 12, generator=random)
    factor = torch.rand(12, generator=random) + 0.5 if smooths else torch.ones(12)
    own = Multiplied(factor, False, ROUNDED) if smooths else ROUNDED
    layer = QuantizedLayer("int4", "1 for all", 30, lazy(residual + up @ down), own, (lazy(up), lazy(down)))
    read = NETWORK[:3](X) * factor
    expected = ROUNDED(read) @ residual.T + read @ (up @ down).T
    error = relative_error(NETWORK[:3](X) @ NETWORK[3].weight.T, expected)
    assert layer_errors(NETWORK, {"3": layer}, lambda: NETWORK(X))["3"].output == pytest.approx(error, rel=1e-5)
    with put_in(NETWORK, "3", layer):
        torch.testing.assert_close(NETWORK(X), expected + NETWORK[3].bias)


@pytest.mark.parametrize("zero_point", [-110, 0, 3])
def test_static_codes_are_torchs(zero_point):
    expected = torch.fake_quantize_per_tensor_affine(X, 0.02, zero_point, -128, 127)
    torch.testing.assert_close(Affine(scale=0.02, zero_point=zero_point)(X), expected)


def test_each_layer_stands_alone_in_the_network_which_is_then_as_it_was():
    layers = {name: rounded(name, ROUNDED if name == "3" else None) for name in ("0", "2", "3")}
    before, full = {name: each.clone() for name, each in NETWORK.state_dict().items()}, NETWORK(X)
    errors = alone(NETWORK, layers, list(layers), lambda: NETWORK(X))
    assert list(errors.values()) == sorted(errors.values(), reverse=True) and min(errors.values()) > 1e-3
    for name, error in errors.items():
        with put_in(NETWORK, name, layers[name]):
            assert relative_error(full, NETWORK(X)) == pytest.approx(error)
    assert_equal(NETWORK.state_dict(), before)
    assert torch.equal(NETWORK(X), full)
