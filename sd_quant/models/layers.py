"""Roles of layers by their diffusers names, and which linears read one tensor. The rules know no family.

What a family adds is the names that it excludes. quant_level selects by role: ``sd_quant.quantization.recipe``.
"""

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from sd_quant.models.parts import SharedInput

QKV = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
FEED_FORWARD = ("ff", "ff_context")


def layer_role(name: str, is_conv: bool, excluded: Iterable[str]) -> str:
    """Role of a layer: excluded, conv, ffn, qkv or linear. ``excluded`` are words of names, or several with dots."""
    if any(f".{words}." in f".{name}." for words in excluded):
        return "excluded"
    if is_conv:
        return "conv"
    words = name.split(".")
    if any(word in FEED_FORWARD for word in words):
        return "ffn"
    return "qkv" if words[-1] in QKV else "linear"


def roles_of(network: nn.Module, excluded: Sequence[str]) -> dict[str, str]:
    """Name to role of every Linear and Conv2d, in the order of the network."""
    layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    return {name: layer_role(name, isinstance(module, nn.Conv2d), excluded) for name, module in layers.items()}


def attention_widths(network: nn.Module) -> dict[str, int]:
    """Name of every attention of diffusers' first kind to the width of its heads."""
    from diffusers.models.attention_processor import Attention

    found = {name: module for name, module in network.named_modules() if isinstance(module, Attention)}
    return {name: module.to_q.out_features // module.heads for name, module in found.items()}


def inputs_of_transformer(linears: Iterable[str]) -> list[SharedInput]:
    """Shared inputs of diffusers' transformers: query, key and value of a self-attention, those of the added text, key
    and value of a cross-attention, and every other linear on its own.

    What is in front of an attention is a norm without weights and a modulation that is computed anew for every picture,
    so nothing there could take a factor. An attention's output is a mean of value rows, so a factor moves into
    ``to_v``, unless text is attended with it: then ``add_v_proj`` would have to take it too.
    """
    names = list(dict.fromkeys(linears))
    known, inputs, seen = set(names), [], set[str]()

    def add(readers: Collection[str], producer: str | None = None) -> None:
        readers = tuple(reader for reader in readers if reader in known and reader not in seen)
        if readers:
            inputs.append(SharedInput(readers, producer if producer in known else None))
            seen.update(readers)

    for name in names:
        block, _, layer = name.rpartition(".")
        cross = block.endswith("attn2") and f"{block}.add_q_proj" not in known
        if layer == "to_q":
            beside = block.rpartition(".")[0]  # of a single block: its feed-forward reads the same
            add([name] if cross else [name, f"{block}.to_k", f"{block}.to_v", f"{beside}.proj_mlp"])
        elif layer == "to_k":
            add([name, f"{block}.to_v"])
        elif layer == "add_q_proj":
            add([name, f"{block}.add_k_proj", f"{block}.add_v_proj"])
        elif name.endswith(".to_out.0"):
            attention = name.removesuffix(".to_out.0")
            joint = f"{attention}.add_v_proj" in known
            add([name], None if joint else f"{attention}.to_v")
    for name in names:
        add([name])
    return inputs
