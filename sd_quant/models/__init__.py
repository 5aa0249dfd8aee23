"""Families of diffusion models. The rest of the project names none.

To add one, write ``sd_quant/models/<name>.py`` as ``Family`` says, one line of ``FAMILIES``, and
``conf/model/<name>.yaml``. Nothing is imported until a checkpoint of that family is opened.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol

FAMILIES = {
    "sd15": "sd_quant.models.sd",
    "sd21": "sd_quant.models.sd",
    "sdxl": "sd_quant.models.sdxl",
    "sd3": "sd_quant.models.sd3",
    "flux": "sd_quant.models.flux",
    "pixart": "sd_quant.models.pixart",
}


class Family(Protocol):
    """A module with what is special about one family.

    ``PIPELINES``: diffusers' classes, of which a folder is one. ``NETWORKS``: the components that are networks, and
    their classes. ``DENOISER``: the part that is quantized. ``GUIDES``: whether guidance doubles its samples.
    ``TOKENS``: of the longest text that its T5 reads by default, None where there is none.
    """

    PIPELINES: tuple[str, ...]
    NETWORKS: Mapping[str, str]
    DENOISER: str
    GUIDES: bool
    TOKENS: int | None

    @staticmethod
    def parts(configs: Mapping[str, Mapping], tokens: int | None, io: str) -> dict[str, Any]:
        """Name to ``parts.Part``, the denoiser first, for networks of these configs. ``tokens``: the longest text that
        a T5 reads, ``io``: whose names the denoiser's inputs have, where there is a choice."""

    @staticmethod
    def layer_roles(denoiser) -> dict[str, str]:
        """Name to role of every Linear and Conv2d, ``layers.roles_of``."""

    @staticmethod
    def shared_inputs(linears: Iterable[str]) -> list:
        """Which linears read one tensor, and what could take over a factor of it; every one that may be quantized is
        in one of them."""

    @staticmethod
    def attentions(denoiser) -> dict[str, int]:
        """Name to head width of the attentions whose matrix products can be quantized."""

    @staticmethod
    def encode(pipe, prompts: list[str], guided: bool, tokens: int | None) -> dict[str, Any]:
        """What the pipeline's call takes instead of prompts, and whatever else it has to be told."""

    @staticmethod
    def pack(pipe, latents):
        """Latents [B,C,h,w] as the pipeline takes them."""

    @staticmethod
    def unpack(pipe, latents, height: int, width: int):
        """And back; sizes in pixels."""


def family_named(name: str) -> Family:
    return import_module(FAMILIES[name])  # type: ignore[return-value]
