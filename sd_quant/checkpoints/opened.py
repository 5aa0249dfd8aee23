"""Common content of an opened folder of diffusers and an opened SDXL of NeMo."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd_quant.files.tensors import Weights
from sd_quant.models import Dtypes
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.models.controlnet import ControlNets, with_controlnets
from sd_quant.models.family import Family, family_named
from sd_quant.models.parts import Part, with_dtypes, with_encoder


@dataclass(frozen=True, kw_only=True)
class OpenedFiles:
    """A checkpoint whose weights are complete and of the right shapes."""

    path: Path
    name: str = "sdxl"  # of the family
    components: dict[str, Weights]  # by diffusers' name of the network
    io: str  # whose names the denoiser's inputs have, "nemo" or "diffusers"
    reopen: Callable[[], Checkpoint] | None = None  # opens the same files; None for what is only converted
    encodes: bool = False  # whether the autoencoder's encoder is a part
    dtypes: Dtypes = None  # of exported weights, see ``models.parts``
    controlnets: ControlNets = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further ones of the pipeline's call

    @property
    def family(self) -> Family:
        return family_named(self.name)

    def __reduce__(self):
        """Pickles the way of opening; another process opens the files again."""
        return self.reopen, ()

    def parts_of(self, configs: Mapping[str, Mapping], tokens: int | None) -> dict[str, Part]:
        """Returns the parts of networks with these ``configs``; ``tokens`` is the length of a text."""
        parts = with_encoder(self.family.parts(configs, tokens, self.io), self.encodes)
        parts = with_controlnets(parts, self.family.DENOISER, self.controlnets)
        return with_dtypes(parts, self.dtypes, self.components)
