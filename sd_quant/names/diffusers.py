"""diffusers' names of networks, and names that only some versions of diffusers and transformers use."""

import re

DENOISERS = ("unet", "transformer")  # components that can be the denoiser
FORMER_CLASSES = {"Transformer2DModel": "PixArtTransformer2DModel"}  # in published folders
TIED = {"encoder.embed_tokens.weight": "shared.weight"}  # T5's embedding is stored under one of two names, or both
# names in the VAE's attention in older files, as in diffusers' ModelMixin._fix_state_dict_keys_on_load
OLD_VAE_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def plain_name(name: str) -> str:
    """Return a parameter's name in its current form: old VAE names replaced, a leading ``text_model.`` removed."""
    old = rf"(mid_block\.attentions\.0\.)({'|'.join(OLD_VAE_NAMES)})(?=\.)"
    return re.sub(old, lambda match: match[1] + OLD_VAE_NAMES[match[2]], name).removeprefix("text_model.")
