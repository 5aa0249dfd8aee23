"""Original layer names of diffusion transformers: Black Forest Labs' Flux, Stability AI's SD 3, and PixArt.

An original tensor may join several of diffusers' along the first axis: each original name is listed with the diffusers
names that it joins, in that order. Alternative not taken: diffusers' converters. They work on whole checkpoints of one
width, and LoRAs and slices of files need names alone.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence


def _embedder(theirs: str, ours: str, layers: tuple[str, str] = ("mlp.0", "mlp.2")) -> dict[str, tuple[str]]:
    """Map the original names of an embedder's two linears to diffusers'; ``theirs`` and ``ours`` are the embedder's."""
    return {f"{theirs}.{layer}": (f"{ours}.linear_{number}",) for number, layer in enumerate(layers, 1)}


IN_OUT = ("in_layer", "out_layer")
QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
FLUX_DOUBLE = {
    "img_mod.lin": ("norm1.linear",), "txt_mod.lin": ("norm1_context.linear",),
    "img_attn.qkv": QKV, "txt_attn.qkv": ADDED_QKV,
    "img_attn.norm.query_norm": ("attn.norm_q",), "img_attn.norm.key_norm": ("attn.norm_k",),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",), "txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "img_attn.proj": ("attn.to_out.0",), "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",), "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",), "txt_mlp.2": ("ff_context.net.2",),
}  # fmt: skip
FLUX_SINGLE = {
    "modulation.lin": ("norm.linear",), "linear1": (*QKV, "proj_mlp"), "linear2": ("proj_out",),
    "norm.query_norm": ("attn.norm_q",), "norm.key_norm": ("attn.norm_k",),
}  # fmt: skip
FLUX_OUTER = {  # in no block
    "img_in": ("x_embedder",), "txt_in": ("context_embedder",),
    **_embedder("time_in", "time_text_embed.timestep_embedder", IN_OUT),
    **_embedder("vector_in", "time_text_embed.text_embedder", IN_OUT),
    **_embedder("guidance_in", "time_text_embed.guidance_embedder", IN_OUT),
    "final_layer.linear": ("proj_out",), "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}  # fmt: skip
SD3_JOINT = {
    "x_block.attn.qkv": QKV, "context_block.attn.qkv": ADDED_QKV,
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn.ln_q": ("attn.norm_q",), "x_block.attn.ln_k": ("attn.norm_k",),
    "context_block.attn.ln_q": ("attn.norm_added_q",), "context_block.attn.ln_k": ("attn.norm_added_k",),
    "x_block.attn2.ln_q": ("attn2.norm_q",), "x_block.attn2.ln_k": ("attn2.norm_k",),
    "x_block.attn.proj": ("attn.to_out.0",), "context_block.attn.proj": ("attn.to_add_out",),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.adaLN_modulation.1": ("norm1.linear",), "context_block.adaLN_modulation.1": ("norm1_context.linear",),
    "x_block.mlp.fc1": ("ff.net.0.proj",), "x_block.mlp.fc2": ("ff.net.2",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",), "context_block.mlp.fc2": ("ff_context.net.2",),
}  # fmt: skip
SD3_OUTER = {
    "pos_embed": ("pos_embed.pos_embed",), "x_embedder.proj": ("pos_embed.proj",),
    **_embedder("t_embedder", "time_text_embed.timestep_embedder"),
    **_embedder("y_embedder", "time_text_embed.text_embedder"),
    "final_layer.linear": ("proj_out",), "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}  # fmt: skip
PIXART_BLOCK = {
    "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn.proj": ("attn1.to_out.0",),
    "cross_attn.q_linear": ("attn2.to_q",), "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
    "cross_attn.proj": ("attn2.to_out.0",), "mlp.fc1": ("ff.net.0.proj",), "mlp.fc2": ("ff.net.2",),
    "scale_shift_table": ("scale_shift_table",),
}  # fmt: skip
PIXART_OUTER = {
    "x_embedder.proj": ("pos_embed.proj",), "t_block.1": ("adaln_single.linear",),
    **_embedder("t_embedder", "adaln_single.emb.timestep_embedder"),
    **_embedder("csize_embedder", "adaln_single.emb.resolution_embedder"),
    **_embedder("ar_embedder", "adaln_single.emb.aspect_ratio_embedder"),
    **_embedder("y_embedder.y_proj", "caption_projection", ("fc1", "fc2")),
    "final_layer.linear": ("proj_out",), "final_layer.scale_shift_table": ("scale_shift_table",),
}  # fmt: skip
# by diffusers' name of a kind of block, "" for layers outside blocks: its original name, and the layers in it
Layout = Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]]
FLUX: Layout = {
    "transformer_blocks": ("double_blocks", FLUX_DOUBLE),
    "single_transformer_blocks": ("single_blocks", FLUX_SINGLE),
    "": ("", FLUX_OUTER),
}
SD3: Layout = {"transformer_blocks": ("joint_blocks", SD3_JOINT), "": ("", SD3_OUTER)}
PIXART: Layout = {"transformer_blocks": ("blocks", PIXART_BLOCK), "": ("", PIXART_OUTER)}
LAYERS: Sequence[tuple[Layout, tuple[str, ...]]] = (  # that identify a network; the first layout with all counts
    (FLUX, ("single_transformer_blocks.0.proj_mlp", "time_text_embed.text_embedder.linear_1")),
    (SD3, ("transformer_blocks.0.attn.add_q_proj", "pos_embed.proj")),
    (PIXART, ("adaln_single.linear", "caption_projection.linear_1", "pos_embed.proj")),
)
SCALED = ("query_norm", "key_norm")  # norms whose weight Flux's original code calls scale


def layout_of(layers: Collection[str]) -> Layout:
    """Return the table of original names for the network with these ``layers``; empty for a UNet."""
    return next((layout for layout, marks in LAYERS if all(mark in layers for mark in marks)), {})


def stored_names(names: Iterable[str], layout: Layout) -> dict[str, list[str]]:
    """Group diffusers' ``names`` by the original tensor that joins them, in their order along its first axis."""
    inside: dict[str, dict[int, str]] = {}
    for name in names:
        stored, turn = _stored_name(name, layout)
        inside.setdefault(stored, {})[turn] = name
    return {stored: [by_turn[turn] for turn in sorted(by_turn)] for stored, by_turn in inside.items()}


def _stored_name(name: str, layout: Layout) -> tuple[str, int]:
    """Return the original tensor that holds diffusers' ``name``, and the index of ``name`` among those it joins."""
    block = re.match(r"(\w+)\.(\d+)\.", name)
    ours = block[1] if block and block[1] in layout else ""
    theirs, table = layout.get(ours, ("", {}))
    inner = name[block.end() :] if block and ours else name
    for stored, parts in table.items():
        for turn, part in enumerate(parts):
            if inner == part or inner.startswith(f"{part}."):
                head = f"{theirs}.{block[2]}.{stored}" if block and ours else stored
                return head + (".scale" if stored.endswith(SCALED) else inner.removeprefix(part)), turn
    return name, 0
