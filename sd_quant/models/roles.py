"""Roles of a network's layers, and which linears read the same tensor, derived from the layers' names in diffusers.

quant_level selects layers by role, see ``sd_quant.quantization.recipe``. The rules are the same for all families,
except for the layers that a family excludes.
"""

import re
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from sd_quant.models.parts import Heads, SharedInput

QKV = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
FEED_FORWARD = ("ff", "ff_context")
FIRST_OF_FEED_FORWARD = re.compile(r"(.*)\.ff(_context|)\.net\.0\.proj")
MODULATIONS = ("norm1.linear", "norm1_context.linear", "norm.linear")  # endings of the names of a block's modulations
ONE_ROW = (*MODULATIONS, "norm_out.linear")  # of the names of layers that read one row an image
# Chunks (shift, scale) in the outputs of diffusers' modulations: AdaLayerNormZero, AdaLayerNormZeroSingle and
# SD35AdaLayerNormZeroX begin with the attention's, AdaLayerNormContinuous is a scale, then a shift.
OF_ATTENTION, OF_FEED_FORWARD, OF_SECOND_ATTENTION, CONTINUOUS = (0, 1), (3, 4), (6, 7), (1, 0)


# (name prefix in a block, endings of the linears there that read one tensor, the block's module that computes the
# tensor or None, whether the tensor is computed from the prompt alone)
Row = tuple[str, tuple[str, ...], str | None, bool]


def layer_role(name: str, is_conv: bool, excluded: Iterable[str]) -> str:
    """Return the role of a layer, derived from its name: excluded, conv, ffn, qkv or linear.

    ``excluded`` holds whole components of dotted names, or several in a row: ``conv_in``, ``norm1.linear``.
    """
    if any(f".{words}." in f".{name}." for words in excluded):
        return "excluded"
    if is_conv:
        return "conv"
    words = name.split(".")
    if any(word in FEED_FORWARD for word in words):
        return "ffn"
    return "qkv" if words[-1] in QKV else "linear"


def roles_of(network: nn.Module, excluded: Sequence[str]) -> dict[str, str]:
    """Return the role of every Linear and Conv2d by name, in network order; ``excluded`` as in ``layer_role``."""
    layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    return {name: layer_role(name, isinstance(module, nn.Conv2d), excluded) for name, module in layers.items()}


def attention_heads(denoiser: nn.Module) -> dict[str, Heads]:
    """Return the heads of every ``Attention`` and (rotary) ``FluxAttention`` of diffusers by module name."""
    from diffusers.models.attention_processor import Attention
    from diffusers.models.transformers.transformer_flux import FluxAttention

    found = {}
    for name, module in denoiser.named_modules():
        if isinstance(module, Attention | FluxAttention):
            normed = getattr(getattr(module, "norm_q", None), "weight", None) is not None  # HiDream names it otherwise
            found[name] = Heads(module.to_q.out_features // module.heads, isinstance(module, FluxAttention), normed)
    return found


def inputs_by_place(linears: Iterable[str], rows: Iterable[Row]) -> list[SharedInput]:
    """Return inputs of linears whose names match ``rows``, one row for each tensor that linears of a block share."""
    known, inputs, seen = dict.fromkeys(linears), [], set[str]()
    patterns = [(re.compile(rf"(.*\.)?{re.escape(row[0])}({'|'.join(map(re.escape, row[1]))})"), row) for row in rows]
    for name in known:
        for pattern, (place, ends, producer, text) in patterns:
            if name not in seen and (found := pattern.fullmatch(name)):
                block = found[1] or ""
                readers = tuple(each for end in ends if (each := f"{block}{place}{end}") in known)
                inputs.append(SharedInput(readers, producer and f"{block}{producer}", text))
                seen.update(readers)
    return inputs


def inputs_of_transformer(linears: Iterable[str]) -> list[SharedInput]:
    """Return the tensors that a transformer's linears read (Flux, SD3, PixArt), each with its linears.

    Query, key and value of a self-attention read one tensor. So do query, key and value of the text in a joint
    attention, and key and value of a cross-attention. Flux's proj_mlp reads to_q's input. Other inputs are separate.

    A norm without weights precedes attention and feed-forward; its output is multiplied by 1 + scale, and a shift is
    added. In SD3 and Flux a linear of the block, its modulation, computes scale and shift and can absorb a factor for
    each channel. PixArt has one modulation for all blocks, so a factor would change every block.

    An attention's output is a weighted mean of its values, so ``to_v`` can absorb a factor of the output projection;
    not in a joint attention, where ``add_v_proj`` would have to absorb the same factor.

    A modulation's own input comes before the inputs that it modulates, so that its factors come from original weights.
    """
    names = list(dict.fromkeys(linears))
    known, inputs, seen = set(names), [], set[str]()
    with_text = {name.partition(".ff_context.")[0] for name in names if ".ff_context." in name}  # blocks that go on

    def add(
        readers: Collection[str],
        producer: str | None = None,
        text: bool = False,
        modulation: tuple[int, int] | None = None,
    ) -> None:
        readers = tuple(reader for reader in readers if reader in known and reader not in seen)
        if readers:
            made = (producer, text, modulation) if producer in known else (None, text, None)
            inputs.append(SharedInput(readers, *made, one_row=readers[0].endswith(ONE_ROW)))
            seen.update(readers)

    for name in names:
        block, _, layer = name.rpartition(".")
        parent = block.rpartition(".")[0]
        second = block.endswith("attn2")
        cross = second and f"{parent}.attn.to_q" not in known  # SD3.5's second attention reads the image again
        if name.endswith(MODULATIONS) or (layer == "to_q" and cross):
            add([name])
        elif layer == "to_q":  # in Flux's single blocks the feed-forward reads the same tensor
            readers = [name, f"{block}.to_k", f"{block}.to_v", f"{parent}.proj_mlp"]
            single = f"{parent}.norm.linear" in known
            chunks = OF_SECOND_ATTENTION if second else OF_ATTENTION
            add(readers, f"{parent}.norm.linear" if single else f"{parent}.norm1.linear", modulation=chunks)
        elif layer == "to_k":
            add([name, f"{block}.to_v"], text=f"{block.removesuffix('2')}1.to_k" in known)  # a block's second attention
        elif layer == "add_q_proj":  # the last block of SD3 has no text behind its attention, and another norm
            readers = [name, f"{block}.add_k_proj", f"{block}.add_v_proj"]
            chunks = OF_ATTENTION if parent in with_text else CONTINUOUS
            add(readers, f"{parent}.norm1_context.linear", modulation=chunks)
        elif first := FIRST_OF_FEED_FORWARD.fullmatch(name):
            add([name], f"{first[1]}.norm1{first[2]}.linear", modulation=OF_FEED_FORWARD)
        elif name.endswith(".to_out.0"):
            attention = name.removesuffix(".to_out.0")
            joint = f"{attention}.add_v_proj" in known
            add([name], None if joint else f"{attention}.to_v")
    for name in names:
        add([name])
    return inputs
