"""The families of diffusion models, one module each. Nothing outside this package names a family.

To add one, write ``sd_quant/models/<name>.py`` with a subclass of ``family.Family`` and an instance of it, ``FAMILY``,
one line of ``FAMILIES``, and ``conf/model/<name>.yaml``. A module is imported when a checkpoint of its family is
opened.
"""

from collections.abc import Mapping

Dtypes = Mapping[str, str] | str | None  # of exported weights: one of EXPORTED or STORED, for all parts or by part
EXPORTED = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}  # torch's names
STORED = "stored"  # bf16 where the checkpoint stores it, else the family's own

VAE_ENCODER = "vae_encoder"  # the part that images from images begin with
CONTROLNET = "controlnet"  # the first ControlNet's component, and its part
LATENT_FACTOR = 8  # pixels per latent along each axis, in the autoencoders of all families
OBSERVED = "diffusers"  # any other pipeline of diffusers, whose structure is recorded by running it
FAMILIES = {
    "sd15": "sd_quant.models.sd",
    "sd21": "sd_quant.models.sd",
    "sdxl": "sd_quant.models.sdxl",
    "sd3": "sd_quant.models.sd3",
    "flux": "sd_quant.models.flux",
    "pixart": "sd_quant.models.pixart",
    OBSERVED: "sd_quant.models.family",
}


def controlnet_names(count: int) -> list[str]:
    """Return the names of ``count`` ControlNets; each is the name of the component and of its part."""
    return [CONTROLNET if number == 1 else f"{CONTROLNET}_{number}" for number in range(1, count + 1)]


def may_be_bf16(dtypes: Dtypes) -> bool:
    """Whether ``dtypes`` ask for bf16 in any part, or allow bf16 where the checkpoint stores bf16."""
    stated = dtypes.values() if isinstance(dtypes, Mapping) else [dtypes]
    return not {"bf16", STORED}.isdisjoint(stated)
