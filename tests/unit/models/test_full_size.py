"""Every family's denoiser at full size, on the meta device: what a level quantizes, how much of the network that is,
and whether other people's recipes leave the same layers alone.

Golden numbers of layers are written as the architecture has them: so many blocks of so many layers. Those of parameters
are the published checkpoints' own.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from torch import nn

from sd_quant.config.recipe import MOST_LAYERS
from sd_quant.models import FAMILIES, OBSERVED
from sd_quant.models.family import family_named
from sd_quant.names.nemo import PREFIX, locations
from sd_quant.quantization.recipe import ROLES, reason_kept

from ..config.composition import composed

pytestmark = [pytest.mark.commit, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[3]
DENOISERS = yaml.safe_load((REPOSITORY / "benchmarks/denoisers.yaml").read_text())  # of published checkpoints
LEVELS = (1, 2, 2.5, 3)


@dataclass(frozen=True)
class Full:
    """A denoiser of the published size."""

    name: str
    family: Any
    denoiser: nn.Module
    roles: dict[str, str]
    layers: dict[str, nn.Module]

    def quantized(self, level: float) -> list[str]:
        return [name for name, role in self.roles.items() if reason_kept(role, level) is None]

    @property
    def excluded(self) -> set[str]:
        return {name for name, role in self.roles.items() if role == "excluded"}


@pytest.fixture(scope="session", params=DENOISERS)
def full(request) -> Full:
    name, entry = request.param, DENOISERS[request.param]
    family = family_named(name)
    with torch.device("meta"):
        denoiser = getattr(diffusers, entry["class"])(**entry["config"]).eval().requires_grad_(False)
    roles = family.layer_roles(denoiser)
    return Full(name, family, denoiser, roles, {layer: denoiser.get_submodule(layer) for layer in roles})


def kinds(names: Iterable[str]) -> Counter[str]:
    """How many layers there are of each name, blocks aside."""
    return Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)


def test_the_file_holds_every_family_as_its_own_configuration_has_it():
    assert DENOISERS.keys() == FAMILIES.keys() - {OBSERVED}
    for name, entry in DENOISERS.items():
        model = composed("infer", f"model={name}", "model.path=unknown")["model"]
        assert (model["family"], model["width"], model["height"]) == (name, entry["width"], entry["height"])
        assert model["max_sequence_length"] in (None, entry["tokens"])  # None: CLIP's
        assert entry["class"] in family_named(name).NETWORKS.values()


PARAMETERS = {
    "sd15": 859_520_964, "sd21": 865_910_724, "sdxl": 2_567_463_684, "sd3": 2_028_328_000, "flux": 11_901_408_320,
    "pixart": 610_856_096,
}  # fmt: skip


def test_the_size_is_the_published_one_and_every_linear_and_convolution_has_one_role(full):
    """Whatever has a weight of two dimensions or more is one of them, so nothing that computes is overlooked."""
    assert sum(parameter.numel() for parameter in full.denoiser.parameters()) == PARAMETERS[full.name]
    weights = {name for name, parameter in full.denoiser.named_parameters() if parameter.ndim > 1}
    assert full.roles.keys() == {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
    assert {type(layer) for layer in full.layers.values()} <= {nn.Linear, nn.Conv2d}
    assert set(full.roles.values()) <= {*ROLES, "excluded"}


# Every UNet: 2 ResBlocks a level down, 2 in the middle, 3 a level up, each with 2 convolutions and one projection of
# the time; a stack of transformer blocks behind each ResBlock where there is attention, one in the middle. A block has
# 2 attentions (3 + 3 linears that make their inputs, 1 + 1 behind them) and a feed-forward of 2; a stack has proj_in
# and proj_out. Where a ResBlock changes its width there is a conv_shortcut: where the level's width doubles on the way
# down, and everywhere on the way up, because of what is concatenated.
# 1 and 2: 4 levels, 8 + 2 + 12 = 22 ResBlocks, 6 + 1 + 9 = 16 stacks of 1 block, 3 down- and 3 upsamplers.
# XL: 3 levels, 6 + 2 + 9 = 17 ResBlocks, 4 + 1 + 6 = 11 stacks, 2 * 2 + 2 * 10 + 10 + 3 * 10 + 3 * 2 = 70 blocks.
def of_unet(blocks: int, conv: int, linear: int, excluded: int) -> dict[str, int]:
    """``conv`` and ``linear`` beside those of the transformer blocks."""
    return {"conv": conv, "ffn": blocks * 2, "qkv": blocks * 6, "linear": blocks * 2 + linear, "excluded": excluded}


BY_ARCHITECTURE = {
    "sd15": of_unet(16, 22 * 2 + 3 + 3 + 16 * 2, 0, (22 + 2) + (1 + 1 + 2 + 12)),  # proj_in, proj_out are convolutions
    "sd21": of_unet(16, 22 * 2 + 3 + 3, 16 * 2, (22 + 2) + (1 + 1 + 2 + 12)),
    "sdxl": of_unet(70, 17 * 2 + 2 + 2, 11 * 2, (17 + 2 + 2) + (1 + 1 + 2 + 9)),
    # 24 blocks of two streams, image and text, of which the last has no text behind its attention; the modulations
    # (norm1.linear and norm1_context.linear) are linears as others.
    "sd3": {"ffn": 24 * 2 + 23 * 2, "qkv": 24 * 6, "linear": 24 + 23 + 24 * 2, "excluded": 8},
    # 19 blocks of two streams, and 38 of one, whose feed-forward is proj_mlp and a part of proj_out.
    "flux": {"ffn": 19 * 4, "qkv": 19 * 6 + 38 * 3, "linear": 19 * 2 + 38 * 2, "excluded": 19 * 2 + 38 + 10},
    # 28 blocks as a UNet's.
    "pixart": {"ffn": 28 * 2, "qkv": 28 * 6, "linear": 28 * 2, "excluded": 7},
}


def test_golden_counts(full):
    assert Counter(full.roles.values()) == BY_ARCHITECTURE[full.name]
    assert len(full.quantized(LEVELS[-1])) < MOST_LAYERS
    convolutions = {name for name, layer in full.layers.items() if isinstance(layer, nn.Conv2d)} - full.excluded
    assert convolutions == {name for name, role in full.roles.items() if role == "conv"}
    for number, level in enumerate(LEVELS, start=1):
        assert {full.roles[name] for name in full.quantized(level)} == {*ROLES[:number]} & set(full.roles.values())


SHARES = {  # of the parameters at each level, where weights alone are quantized
    "sd15": (0.658, 0.831, 0.911, 0.940), "sd21": (0.625, 0.796, 0.883, 0.940), "sdxl": (0.125, 0.603, 0.895, 0.984),
    "sd3": (0, 0.437, 0.605, 0.990), "flux": (0, 0.241, 0.422, 0.723), "pixart": (0, 0.487, 0.852, 0.973),
}  # fmt: skip


def test_golden_shares(full):
    numbers = [sum(full.layers[name].weight.numel() for name in full.quantized(level)) for level in LEVELS]
    assert tuple(round(number / PARAMETERS[full.name], 3) for number in numbers) == SHARES[full.name]


SHARED = {  # inputs of linears that may be quantized, and of those how many can be folded into what makes them
    "sd15": (16 * 7, 16 * 6),  # not the text's
    "sd21": (16 * 7 + 16 * 2, 16 * 6 + 16),  # and not those of proj_out
    "sdxl": (70 * 7 + 11 * 2, 70 * 6 + 11),
    # The image's and the text's query, key and value, what is behind them, 2 modulations, 2 feed-forwards of 2.
    # The modulations make what query, key and value read, and the first linear of a feed-forward.
    "sd3": (24 * 7 + 23 * 3, 24 * 3 + 23),
    "flux": (19 * 8 + 38 * 2, 19 * 4 + 38),  # no modulations; proj_mlp reads what query, key and value read
    "pixart": (28 * 7, 28 * 2),  # both attentions' outputs; its norms have no weights
}


MODULATIONS = {  # diffusers' class, its chunks, and which of them are a shift and a scale
    *(("AdaLayerNormZero", 6, chunks) for chunks in ((0, 1), (3, 4))),
    ("AdaLayerNormContinuous", 2, (1, 0)),
    ("AdaLayerNormZeroSingle", 3, (0, 1)),
}


def test_every_linear_that_may_be_quantized_reads_exactly_one_input(full):
    """Its producer has as many outputs; more only where half of them are a gate, or where they are several tensors."""
    linears = [name for name, role in full.roles.items() if role != "conv"]  # as the main job asks
    shared = full.family.shared_inputs(linears)
    readers = Counter(reader for each in shared for reader in each.readers)
    wanted = {name for name in linears if full.roles[name] != "excluded"}
    assert wanted <= readers.keys() <= set(linears) and set(readers.values()) == {1}
    wanted_inputs = [each for each in shared if wanted & set(each.readers)]
    assert all(wanted >= set(each.readers) for each in wanted_inputs)
    folded = [each for each in wanted_inputs if each.producer is not None]
    assert (len(wanted_inputs), len(folded)) == SHARED[full.name]
    for each in wanted_inputs:
        assert len({full.layers[reader].in_features for reader in each.readers}) == 1
    for each in folded:
        producer = full.denoiser.get_submodule(each.producer)
        assert isinstance(producer, nn.LayerNorm | nn.GroupNorm | nn.Linear)
        outputs = len(producer.weight) / full.layers[each.readers[0]].in_features
        if each.modulation is None:
            assert outputs == (2 if each.producer.endswith(".ff.net.0.proj") else 1)
        else:
            kind = type(full.denoiser.get_submodule(each.producer.rpartition(".")[0])).__name__
            assert (kind, outputs, each.modulation) in MODULATIONS


def test_the_heads_of_an_attention_divide_its_width(full):
    for attention, heads in full.family.attentions(full.denoiser).items():
        assert full.denoiser.get_submodule(attention).to_q.out_features % heads.width == 0


# NVIDIA/Model-Optimizer, examples/diffusers/quantization/utils.py, August 2026: filter_func_default and
# filter_func_flux_dev, which models_utils.py takes for Flux-dev. They are asked for names of quantizers, which begin
# with a layer's and go on behind a dot; all patterns end in anything.
MODELOPT_DEFAULT = (
    r".*(time_emb_proj|time_embedding|conv_in|conv_out|conv_shortcut|add_embedding|pos_embed|time_text_embed"
    r"|context_embedder|norm_out|x_embedder).*"
)
MODELOPT_FLUX = (
    r"(proj_out.*|.*(time_text_embed|context_embedder|x_embedder|norm_out|time_guidance_embed|stream_modulation).*)"
)
BEYOND_MODELOPT = {  # what only we exclude
    "sd3": {"proj_out": 1},  # as Quark, and ModelOpt's own levels, which no longer stand in its example
    "flux": {  # as Quark, and the single blocks' for the same reason: they see one token, 0.01 % of the work
        "transformer_blocks.*.norm1.linear": 19,
        "transformer_blocks.*.norm1_context.linear": 19,
        "single_transformer_blocks.*.norm.linear": 38,
    },
    "pixart": {  # which is not among its models
        "adaln_single.emb.timestep_embedder.linear_1": 1,
        "adaln_single.emb.timestep_embedder.linear_2": 1,
        "adaln_single.linear": 1,
        "caption_projection.linear_1": 1,
        "caption_projection.linear_2": 1,
        "proj_out": 1,
    },
}


def test_modelopts_filter_excludes_nothing_that_we_quantize(full):
    pattern = re.compile(MODELOPT_FLUX if full.name == "flux" else MODELOPT_DEFAULT)
    theirs = {name for name in full.roles if pattern.match(name)}
    assert theirs and theirs <= full.excluded
    assert kinds(full.excluded - theirs) == BEYOND_MODELOPT.get(full.name, {})


# amd/Quark, examples/torch/diffusers: what its README, quantize_diffusers.py and testSVDQuant.py exclude, together.
# The last takes SDXL's for every other UNet; PixArt is in none of them.
QUARK_UNET = ("*time_embedding*", "*time_emb_proj*", "*add_time_proj*", "*conv_in*", "*conv_out*", "*conv_shortcut*",
              "*add_embedding*", "*attn2.to_k*", "*attn2.to_v*")  # fmt: skip
QUARK = {
    "sd15": QUARK_UNET,
    "sd21": QUARK_UNET,
    "sdxl": QUARK_UNET,
    "sd3": ("*time_text_embed*", "*context_embedder*", "*pos_embed*", "*norm_out*", "*proj_out*"),
    "flux": ("*x_embedder*", "*context_embedder*", "*time_text_embed*", "*norm_out*", "*proj_out*", "*norm1.linear*",
             "*norm1_context.linear*"),
    "pixart": (),
}  # fmt: skip
WE_QUANTIZE = {  # what Quark does not, by the end of the name
    "sd15": {"attn2.to_k": 16, "attn2.to_v": 16},  # which testSVDQuant.py alone leaves: less than 1 % of the work
    "sd21": {"attn2.to_k": 16, "attn2.to_v": 16},
    "sdxl": {"attn2.to_k": 70, "attn2.to_v": 70},
    "flux": {"proj_out": 38},  # of the single blocks, 22 % of all work, which ModelOpt quantizes
}


def test_quark_excludes_nothing_that_we_quantize_but_what_is_listed(full):
    theirs = {name for name in full.roles if any(fnmatch(name, pattern) for pattern in QUARK[full.name])}
    listed = WE_QUANTIZE.get(full.name, {})
    ends = [end for name in theirs - full.excluded for end in listed if name.endswith(f".{end}")]
    assert len(ends) == len(theirs - full.excluded)
    assert Counter(ends) == listed


NEMO_EXCLUDED = "emb_layers.1|time_embed|input_blocks.0.0|^out.1$|skip_connection|label_emb"  # facts seen in NeMo 2.4
NEMO_LEVELS = {1: "$^", 2: r"ff\.net", 2.5: r"ff\.net|to_q|to_k|to_v", 3: ""}  # of linears; convolutions always


@pytest.mark.parametrize("full", ["sdxl"], indirect=True)
def test_nemos_own_patterns_choose_the_same_layers(full):
    places = locations("unet", [f"{name}.weight" for name in full.roles])
    for name, layer in full.layers.items():
        of_nemo = places[f"{name}.weight"].key.removeprefix(PREFIX["unet"]).removesuffix(".weight")
        for level, pattern in NEMO_LEVELS.items():
            chosen = isinstance(layer, nn.Conv2d) or re.search(pattern, of_nemo) is not None
            expected = chosen and re.search(NEMO_EXCLUDED, of_nemo) is None
            assert (reason_kept(full.roles[name], level) is None) == expected, (of_nemo, level)
