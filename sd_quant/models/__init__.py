"""The families of diffusion models, one module each. Nothing outside this package names a family.

To add one, write ``sd_quant/models/<name>.py`` with a subclass of ``family.Family`` and an instance of it, ``FAMILY``,
one line of ``FAMILIES``, and ``conf/model/<name>.yaml``. A module is imported when a checkpoint of its family is
opened.
"""

VAE_ENCODER = "vae_encoder"  # the part that images from images begin with
LATENT_FACTOR = 8  # pixels per latent along each axis, in the autoencoders of all families
OBSERVED = "diffusers"  # the name of all others, which are opened by observation
FAMILIES = {
    "sd15": "sd_quant.models.sd",
    "sd21": "sd_quant.models.sd",
    "sdxl": "sd_quant.models.sdxl",
    "sd3": "sd_quant.models.sd3",
    "flux": "sd_quant.models.flux",
    "pixart": "sd_quant.models.pixart",
    OBSERVED: "sd_quant.models.observed",
}
