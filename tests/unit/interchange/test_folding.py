"""A folded candidate of a tiny network is judged layer by layer as if nothing were folded."""

from collections.abc import Collection, Mapping

import pytest
import torch
from torch import Tensor

from sd_quant.files.tensors import lazy
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.errors import layer_errors
from sd_quant.interchange.folding import unfolded
from sd_quant.interchange.inputs import Multiplied, RowInteger
from sd_quant.models.checkpoint import denoiser_weights, empty_denoiser
from sd_quant.models.parts import SharedInput

pytestmark = pytest.mark.commit

BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"


def weights_of(checkpoint) -> dict[str, Tensor]:
    return {name: weight.float() for name, weight in denoiser_weights(checkpoint).items()}


def factors(count: int, most: float, random: torch.Generator) -> Tensor:
    """From 1 / ``most`` to ``most``."""
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


def multiplied(layers: Mapping[str, QuantizedLayer]) -> set[str]:
    return {name for name, layer in layers.items() if isinstance(layer.inputs, Multiplied)}


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
        layers = unfolded(block_candidate(case.checkpoint, which), case.checkpoint)
        assert multiplied(layers) == {f"{BLOCK}.{name}" for name in which}
        found.append(layer_errors(network, layers, lambda: case.output(network)))
    for name, plain in found[0].items():
        assert found[1][name].weight == pytest.approx(plain.weight, rel=0.05), name
        assert found[1][name].output == pytest.approx(plain.output, rel=0.3), name  # inputs are rounded smoothed
    layers = block_candidate(case.checkpoint, folded).layers
    naive = layer_errors(network, layers, lambda: case.output(network))
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
    found = multiplied(unfolded(candidate_of(checkpoint, weights, names), checkpoint))
    assert found == {f"{BLOCK}.{reader}" for reader in readers}


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
    assert not multiplied(unfolded(candidate_of(checkpoint, weights, roles), checkpoint))
    factor = factors(weights[f"{folded.readers[0]}.weight"].shape[1], 4, torch.Generator().manual_seed(0))
    producer = f"{folded.producer}.weight"
    weights[producer] = with_first_rows(weights[producer], factor)
    assert multiplied(unfolded(candidate_of(checkpoint, weights, roles), checkpoint)) == set(folded.readers)


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
    found = unfolded(candidate_of(checkpoint, weights | changed, [name, *expected, other]), checkpoint)
    for reader, factor in expected.items():
        torch.testing.assert_close(found[reader].inputs.factor, factor)
    assert multiplied({other: found[other]}) == set()
    torch.testing.assert_close(found[name].weight.read(), weights[f"{name}.weight"])
