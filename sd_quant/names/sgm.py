"""SDXL as one safetensors file in Stability AI's own layout, such as ``sd_xl_base_1.0.safetensors``.

NeMo's implementation descends from SGM's, so its keys are SGM's behind ``model.``, except in the UNet, where NeMo fuses
the SiLU into the GroupNorm and moves norms into the attention and the feed-forward: seven renames. The road not taken
is the way through diffusers, which splits tensors that NeMo's keys would join again.
"""

import re
from collections.abc import Iterable

from sd_quant.names.nemo import PREFIX, SIGMAS, locations

PREFIXES = tuple(key.removeprefix("model.") for key in (*PREFIX.values(), SIGMAS))
UNET_RENAMES = {  # from SGM to NeMo; no result is the pattern of another
    r"\bin_layers\.2\.": "in_layers.1.",
    r"\bout_layers\.3\.": "out_layers.2.",
    r"^model\.diffusion_model\.out\.2\.": "model.diffusion_model.out.1.",
    r"(\.transformer_blocks\.\d+)\.norm([12])\.": r"\1.attn\2.norm.",
    r"(\.transformer_blocks\.\d+)\.norm3\.": r"\1.ff.net.0.",
    r"\bff\.net\.0\.proj\.": "ff.net.1.proj.",
    r"\bff\.net\.2\.": "ff.net.3.",
}
FROM_NEMO = {  # the way back, behind the UNet's prefix; the first pattern that is found counts
    r"\bin_layers\.1\.": "in_layers.2.",
    r"\bout_layers\.2\.": "out_layers.3.",
    r"^out\.1\.": "out.2.",
    r"\battn([12])\.norm\.": r"norm\1.",
    r"\bff\.net\.0\.": "norm3.",
    r"\bff\.net\.1\.proj\.": "ff.net.0.proj.",
    r"\bff\.net\.3\.": "ff.net.2.",
}


def nemo_key(key: str) -> str:
    """Returns NeMo's key for a key of SGM's SDXL, and any other key as it is: it is then refused by its name."""
    if not key.startswith(PREFIXES):
        return key
    for pattern, replacement in UNET_RENAMES.items():
        key = re.sub(pattern, replacement, key)
    return f"model.{key}"


def sgm_names(names: Iterable[str]) -> dict[str, str]:
    """SGM's key, without the prefix ``model.diffusion_model.``, of each parameter of SDXL's UNet by diffusers' name.

    Both store the same tensors: none is joined, split or reshaped. ``names`` are those of all parameters, because SGM
    counts the blocks of all levels in one row, so that a key depends on how many there are.
    """
    return {
        name: _from_nemo(place.key.removeprefix(PREFIX["unet"])) for name, place in locations("unet", names).items()
    }


def sgm_key(key: str) -> str:
    """SGM's key for a key of NeMo's SDXL: ``nemo_key`` undone."""
    within = key.removeprefix(PREFIX["unet"])
    return (key if within == key else PREFIX["unet"] + _from_nemo(within)).removeprefix("model.")


def _from_nemo(key: str) -> str:
    for pattern, replacement in FROM_NEMO.items():
        key, count = re.subn(pattern, replacement, key)
        if count:
            return key
    return key
