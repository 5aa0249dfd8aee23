"""Names that only some versions of diffusers and transformers have for a parameter or a class."""

import re

# names in the VAE's attention in older files, as in diffusers' ModelMixin._fix_state_dict_keys_on_load
OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def plain_name(name: str) -> str:
    """Returns a parameter's name without what only some versions of the libraries have: old names, ``text_model.``."""
    old = rf"(mid_block\.attentions\.0\.)({'|'.join(OLD_NAMES)})(?=\.)"
    return re.sub(old, lambda match: match[1] + OLD_NAMES[match[2]], name).removeprefix("text_model.")
