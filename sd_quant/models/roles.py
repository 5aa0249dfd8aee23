"""The role of every layer of a denoiser, and the linears that read one tensor, both told from the names in diffusers.

quant_level selects layers by role, see ``sd_quant.quantization.recipe``. The rules are the same for all families; a
family only adds the names that it excludes.
"""

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from sd_quant.models.parts import SharedInput

QKV = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
FEED_FORWARD = ("ff", "ff_context")


def layer_role(name: str, is_conv: bool, excluded: Iterable[str]) -> str:
    """The role of a layer: excluded, conv, ffn, qkv or linear.

    ``excluded`` are words between the dots of a name, or several words with their dots: ``conv_in``, ``norm1.linear``.
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
    """The role of every Linear and Conv2d by name, in the order of the network. ``excluded`` as in ``layer_role``."""
    layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    return {name: layer_role(name, isinstance(module, nn.Conv2d), excluded) for name, module in layers.items()}


def attention_widths(network: nn.Module) -> dict[str, int]:
    """The head width of every ``diffusers.models.attention_processor.Attention``, by name."""
    from diffusers.models.attention_processor import Attention

    attentions = {name: module for name, module in network.named_modules() if isinstance(module, Attention)}
    return {name: module.to_q.out_features // module.heads for name, module in attentions.items()}


def inputs_of_transformer(linears: Iterable[str]) -> list[SharedInput]:
    """The inputs of a transformer's linears (Flux, SD3, PixArt).

    Query, key and value of a self-attention read one tensor. So do query, key and value of the text in a joint
    attention, and key and value of a cross-attention. Every other linear has an input of its own.

    In front of an attention stand a norm without weights and a modulation that is computed anew for every image, and
    neither can absorb a factor. An attention's output is a weighted mean of its values, so ``to_v`` absorbs a factor of
    the output projection. Not in a joint attention, where ``add_v_proj`` would have to absorb the same one.
    """
    names = list(dict.fromkeys(linears))
    known, inputs, seen = set(names), [], set[str]()

    def add(readers: Collection[str], producer: str | None = None, text: bool = False) -> None:
        readers = tuple(reader for reader in readers if reader in known and reader not in seen)
        if readers:
            inputs.append(SharedInput(readers, producer if producer in known else None, text))
            seen.update(readers)

    for name in names:
        block, _, layer = name.rpartition(".")
        cross = block.endswith("attn2") and f"{block}.add_q_proj" not in known
        if layer == "to_q":
            parent = block.rpartition(".")[0]  # in Flux's single blocks the feed-forward reads the same tensor
            add([name] if cross else [name, f"{block}.to_k", f"{block}.to_v", f"{parent}.proj_mlp"])
        elif layer == "to_k":
            add([name, f"{block}.to_v"], text=f"{block.removesuffix('2')}1.to_k" in known)  # a block's second attention
        elif layer == "add_q_proj":
            add([name, f"{block}.add_k_proj", f"{block}.add_v_proj"])
        elif name.endswith(".to_out.0"):
            attention = name.removesuffix(".to_out.0")
            joint = f"{attention}.add_v_proj" in known
            add([name], None if joint else f"{attention}.to_v")
    for name in names:
        add([name])
    return inputs
