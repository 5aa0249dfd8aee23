"""A folded candidate of a tiny network is judged layer by layer as if nothing were folded."""

import pytest
import torch

from sd_quant.candidates.candidate import Candidate, StoredLayer
from sd_quant.candidates.errors import layer_errors
from sd_quant.candidates.folding import unfolded
from sd_quant.candidates.inputs import Multiplied, RowInteger
from sd_quant.checkpoints.tensors import lazy
from sd_quant.inference.loading import load_part
from sd_quant.models.checkpoint import denoiser_of, denoiser_weights, empty_denoiser
from sd_quant.models.parts import SharedInput

from .diffusers_folders import network_inputs, tiny_checkpoint

BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def candidate(checkpoint, folded: bool) -> Candidate:
    """Weights in steps of 1/64, of a block whose norm, value and feed-forward have taken over a smoothing."""
    weights = {name: weight.float() for name, weight in denoiser_weights(checkpoint).items()}
    chosen = {
        name: weight for name, weight in weights.items()
        if name.startswith(BLOCK) and name.endswith(".weight") and weight.ndim == 2
    }  # fmt: skip
    random, rounded = torch.Generator().manual_seed(0), {n: (w * 64).round() / 64 for n, w in chosen.items()}

    def smooth(reader: str, *producers: str) -> None:
        """By factors from 0.5 to 2, so that rounding, which stays as it is, is no reason for a difference."""
        inputs = chosen[f"{BLOCK}.{reader}.weight"].shape[1]
        factor = torch.exp2(2 * torch.rand(inputs, generator=random) - 1)
        rounded[f"{BLOCK}.{reader}.weight"] = rounded[f"{BLOCK}.{reader}.weight"] / factor
        for name in producers:
            source = rounded if f"{BLOCK}.{name}" in rounded else weights
            weight = source[f"{BLOCK}.{name}"]
            rows = torch.cat([factor, torch.ones(len(weight) - inputs)])
            source[f"{BLOCK}.{name}"] = weight * rows.view(-1, *(1,) * (weight.ndim - 1))

    if folded:
        smooth("attn2.to_q", "norm2.weight", "norm2.bias")
        smooth("attn1.to_out.0", "attn1.to_v.weight")
        smooth("ff.net.2", "ff.net.0.proj.weight", "ff.net.0.proj.bias")
        smooth("ff.net.0.proj", "norm3.weight", "norm3.bias")
    layers = {
        name.removesuffix(".weight"): StoredLayer("int4", "1 for all", weight.numel() // 2, lazy(weight), RowInteger())
        for name, weight in rounded.items()
    }
    others = {name: lazy(weight) for name, weight in weights.items() if name not in rounded}
    return Candidate(checkpoint.path, "gguf", "a test", layers, others)


@torch.no_grad()
def test_the_errors_of_folded_layers_are_those_of_the_same_layers_unfolded(checkpoint):
    part = load_part(checkpoint, checkpoint.family.DENOISER).module
    inputs = network_inputs(checkpoint)
    found = {}
    for folded in (False, True):
        layers = unfolded(candidate(checkpoint, folded), checkpoint)
        multiplied = {name for name, layer in layers.items() if isinstance(layer.inputs, Multiplied)}
        readers = {"attn2.to_q", "attn1.to_out.0", "ff.net.2", "ff.net.0.proj"} if folded else set()
        assert multiplied == {f"{BLOCK}.{name}" for name in readers}
        found[folded] = layer_errors(denoiser_of(checkpoint, part), layers, lambda: part(**inputs))
    for name, plain in found[False].items():
        assert found[True][name].weight == pytest.approx(plain.weight, rel=0.05), name
        assert found[True][name].output == pytest.approx(plain.output, rel=0.3), name  # inputs are rounded smoothed
    naive = layer_errors(denoiser_of(checkpoint, part), candidate(checkpoint, True).layers, lambda: part(**inputs))
    assert naive[f"{BLOCK}.ff.net.0.proj"].output > 2.5 * found[True][f"{BLOCK}.ff.net.0.proj"].output


def test_coarse_rounding_is_no_folding_and_a_linear_may_fold_without_a_norm(tmp_path):
    """PixArt's norms have no weights, so linears alone take over a smoothing there."""
    checkpoint = tiny_checkpoint(tmp_path, "pixart")
    weights = {name: weight.float() for name, weight in denoiser_weights(checkpoint).items()}
    roles = checkpoint.family.layer_roles(empty_denoiser(checkpoint))
    shared = checkpoint.family.shared_inputs([name for name, role in roles.items() if role != "conv"])
    folded = next(each for each in shared if each.producer is not None)
    inputs = weights[f"{folded.readers[0]}.weight"].shape[1]
    factor = torch.exp2(4 * torch.rand(inputs, generator=torch.Generator().manual_seed(0)) - 2)

    def found(fold: bool) -> set[str]:
        layers = {}
        for name in roles:
            weight = weights[f"{name}.weight"]
            largest = weight.flatten(1).abs().amax(1).view(-1, *(1,) * (weight.ndim - 1))
            rounded = (weight / largest * 1.5).round() / 1.5 * largest  # two bits: thirds of the row's largest
            if fold and name == folded.producer:
                rows = torch.cat([factor, torch.ones(len(weight) - inputs)])
                rounded = rounded * rows.view(-1, *(1,) * (weight.ndim - 1))
            layers[name] = StoredLayer("int2", "1 for a row", weight.numel() // 4, lazy(rounded))
        others = {name: lazy(each) for name, each in weights.items() if name.removesuffix(".weight") not in layers}
        made = unfolded(Candidate(checkpoint.path, "gguf", "a test", layers, others), checkpoint)
        return {name for name, layer in made.items() if isinstance(layer.inputs, Multiplied)}

    assert found(False) == set() and found(True) == set(folded.readers)


@torch.no_grad()
def test_a_modulations_factors_are_read_off_its_weights_and_biases(tmp_path):
    """Of two tensors that one modulation makes, of which the graph multiplies none."""
    checkpoint = tiny_checkpoint(tmp_path, "sd3")
    weights = {name: weight.float() for name, weight in denoiser_weights(checkpoint).items()}
    block, random = "transformer_blocks.0", torch.Generator().manual_seed(0)
    name = f"{block}.norm1.linear"
    inputs_of_block = [
        SharedInput((f"{block}.attn.to_q", f"{block}.attn.to_k", f"{block}.attn.to_v"), name, modulation=(0, 1)),
        SharedInput((f"{block}.ff.net.0.proj",), name, modulation=(3, 4)),
    ]
    changed, absorbed, factors = dict(weights), torch.ones(len(weights[f"{name}.bias"])), {}
    for shared in inputs_of_block:
        inputs = weights[f"{shared.readers[0]}.weight"].shape[1]
        factor = torch.exp2(4 * torch.rand(inputs, generator=random) - 2)
        shift, scale = shared.rows(inputs)
        changed[f"{name}.bias"] = changed[f"{name}.bias"].clone()
        changed[f"{name}.bias"][shift] *= factor
        changed[f"{name}.bias"][scale] = factor * (1 + changed[f"{name}.bias"][scale]) - 1
        absorbed[shift] = absorbed[scale] = factor
        for reader in shared.readers:
            changed[f"{reader}.weight"] = weights[f"{reader}.weight"] / factor
            factors[reader] = factor
    changed[f"{name}.weight"] = weights[f"{name}.weight"] * absorbed[:, None]

    def layer(weight: torch.Tensor) -> StoredLayer:
        return StoredLayer("int8", "1 for a row", weight.numel(), lazy(weight), RowInteger())

    names = [name, *factors, f"{block}.attn.add_q_proj"]
    layers = {each: layer(changed[f"{each}.weight"]) for each in names}
    others = {key: lazy(each) for key, each in changed.items() if key.removesuffix(".weight") not in layers}
    found = unfolded(Candidate(checkpoint.path, "gguf", "a test", layers, others), checkpoint)
    for reader, factor in factors.items():
        torch.testing.assert_close(found[reader].inputs.factor, factor)
    assert not isinstance(found[f"{block}.attn.add_q_proj"].inputs, Multiplied)
    torch.testing.assert_close(found[name].weight.read(), weights[f"{name}.weight"])
