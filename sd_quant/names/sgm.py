"""SDXL as one safetensors file in Stability AI's own layout, such as ``sd_xl_base_1.0.safetensors``.

NeMo's implementation descends from SGM's, so its keys are SGM's behind ``model.``, except in the UNet, where NeMo fuses
the SiLU into the GroupNorm and moves norms into the attention and the feed-forward: eight renames. The road not taken
is the way through diffusers, which splits tensors that NeMo's keys would join again.
"""

from collections.abc import Iterable, Mapping

from sd_quant.names.nemo import PREFIX, SIGMAS, locations

PREFIXES = tuple(key.removeprefix("model.") for key in (*PREFIX.values(), SIGMAS))
UNET = PREFIX["unet"].removeprefix("model.")
TO_NEMO = {  # what the UNet's keys hold, each at most one of them, behind a dot that is put in front
    ".in_layers.2.": ".in_layers.1.",
    ".out_layers.3.": ".out_layers.2.",
    ".out.2.": ".out.1.",
    ".norm1.": ".attn1.norm.",
    ".norm2.": ".attn2.norm.",
    ".norm3.": ".ff.net.0.",
    ".ff.net.0.proj.": ".ff.net.1.proj.",
    ".ff.net.2.": ".ff.net.3.",
}
FROM_NEMO = {nemo: sgm for sgm, nemo in TO_NEMO.items()}


def nemo_key(key: str) -> str:
    """Returns NeMo's key for a key of SGM's SDXL, and any other key as it is: it is then refused by its name."""
    if not key.startswith(PREFIXES):
        return key
    within = key.removeprefix(UNET)
    return f"model.{key if within == key else UNET + _replaced(within, TO_NEMO)}"


def sgm_key(key: str) -> str:
    """Returns SGM's key for a key of NeMo's SDXL: ``nemo_key`` undone."""
    within = key.removeprefix(PREFIX["unet"])
    return key.removeprefix("model.") if within == key else UNET + _replaced(within, FROM_NEMO)


def sgm_names(names: Iterable[str]) -> dict[str, str]:
    """Returns SGM's key, without the prefix ``UNET``, of each parameter of SDXL's UNet by diffusers' name.

    Both store the same tensors: none is joined, split or reshaped. ``names`` are those of all parameters, because SGM
    counts the blocks of all levels in one row, so that a key depends on how many there are.
    """
    places = locations("unet", names)
    return {name: sgm_key(place.key).removeprefix(UNET) for name, place in places.items()}


def _replaced(key: str, parts: Mapping[str, str]) -> str:
    dotted = f".{key}"
    found = next((part for part in parts if part in dotted), None)
    return key if found is None else dotted.replace(found, parts[found]).removeprefix(".")
