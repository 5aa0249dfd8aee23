"""Black Forest Labs' names of Flux's layers, and diffusers': one tensor of theirs may hold the rows of several of ours.

A name of theirs stands with the names of diffusers whose rows lie in it one behind the other. The road not taken is
diffusers' converter: it works on whole checkpoints of one width, and LoRAs and slices of files need names alone.
"""

QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
DOUBLE = {
    "img_mod.lin": ("norm1.linear",), "txt_mod.lin": ("norm1_context.linear",),
    "img_attn.qkv": QKV, "txt_attn.qkv": ADDED_QKV,
    "img_attn.norm.query_norm": ("attn.norm_q",), "img_attn.norm.key_norm": ("attn.norm_k",),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",), "txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "img_attn.proj": ("attn.to_out.0",), "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",), "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",), "txt_mlp.2": ("ff_context.net.2",),
}  # fmt: skip
SINGLE = {
    "modulation.lin": ("norm.linear",), "linear1": (*QKV, "proj_mlp"), "linear2": ("proj_out",),
    "norm.query_norm": ("attn.norm_q",), "norm.key_norm": ("attn.norm_k",),
}  # fmt: skip
BLOCKS = {  # by diffusers' name of a kind of block
    "transformer_blocks": ("double_blocks", DOUBLE),
    "single_transformer_blocks": ("single_blocks", SINGLE),
}
OUTER = {  # in no block
    "img_in": ("x_embedder",), "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "final_layer.linear": ("proj_out",), "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}  # fmt: skip
EXCHANGED = "final_layer.adaLN_modulation.1"  # whose halves, a shift and a scale, are in the other order in diffusers
