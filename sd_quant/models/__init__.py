"""The families of diffusion models, one module each. Nothing outside this package names a family.

To add one, write ``sd_quant/models/<name>.py`` with everything that ``Family`` lists, one line of ``FAMILIES``, and
``conf/model/<name>.yaml``. A module is imported when a checkpoint of its family is opened, and not before.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol

VAE_ENCODER = "vae_encoder"  # the part that images from images begin with
LATENT_FACTOR = 8  # pixels per latent along each axis, in the autoencoders of all families
FAMILIES = {
    "sd15": "sd_quant.models.sd",
    "sd21": "sd_quant.models.sd",
    "sdxl": "sd_quant.models.sdxl",
    "sd3": "sd_quant.models.sd3",
    "flux": "sd_quant.models.flux",
    "pixart": "sd_quant.models.pixart",
}


class Family(Protocol):
    """What the module of a family holds."""

    PIPELINES: tuple[str, ...]  # diffusers' pipeline classes that are of this family
    FROM_IMAGES: tuple[str, str] | None  # those that change an image, and a part of one; None: none is known here
    NETWORKS: Mapping[str, str]  # the pipeline's components that are networks, and their classes
    OPTIONAL: tuple[str, ...]  # those of them that a pipeline may do without, each a part of the same name
    DENOISER: str  # name of the part that is quantized
    GUIDES: bool  # whether classifier-free guidance doubles the denoiser's batch
    TOKENS: int | None  # longest text that its T5 reads by default, in tokens; None without a T5

    @staticmethod
    def parts(configs: Mapping[str, Mapping], tokens: int | None, io: str) -> dict[str, Any]:
        """The exported parts by name, each a ``parts.Part``, the denoiser first.

        ``configs`` are the configurations of the networks, by component; of the optional ones only if they are used.
        ``tokens`` is the longest text that a T5 reads, None for the default. ``io``, "nemo" or "diffusers", says whose
        names the denoiser's inputs get, where a family has both.
        """

    @staticmethod
    def layer_roles(denoiser) -> dict[str, str]:
        """The role of every Linear and Conv2d by name, see ``roles.roles_of``."""

    @staticmethod
    def shared_inputs(linears: Iterable[str]) -> list:
        """The inputs of the linears, each a ``parts.SharedInput``. Every linear that may be quantized is in one."""

    @staticmethod
    def attentions(denoiser) -> dict[str, int]:
        """The head width of each attention whose matrix products can be quantized, by the attention's name."""

    @staticmethod
    def encode(
        pipe, prompts: list[str], negative: list[str] | None, guided: bool, tokens: int | None
    ) -> dict[str, Any]:
        """Keyword arguments for a call of ``pipe`` that replace the prompts, such as their embeddings.

        ``guided`` asks for the negative embeddings too: those of the ``negative`` prompts, one for each of the prompts,
        or with None those of the model's own unconditional half. ``tokens`` as in ``parts``.
        """

    @staticmethod
    def pack(pipe, latents):
        """Latents [B, C, h, w] in the layout that the pipeline's call takes."""

    @staticmethod
    def unpack(pipe, latents, height: int, width: int):
        """The inverse of ``pack``: latents [B, C, h, w] of an image of ``height`` by ``width`` pixels."""


def family_named(name: str) -> Family:
    """The family's module. Raises KeyError for a name that is not in ``FAMILIES``."""
    return import_module(FAMILIES[name])  # type: ignore[return-value]
