"""Common base class of an opened diffusers folder and an opened SDXL of NeMo."""

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
    """A checkpoint on disk whose weights are known to be complete and of the right shapes."""

    path: Path
    name: str = "sdxl"  # of the family
    components: dict[str, Weights]  # by diffusers' name of the network
    io: str  # naming of the denoiser's inputs, "nemo" or "diffusers"
    reopen: Callable[[], Checkpoint] | None = None  # opens the same files; None for checkpoints that are only converted
    encodes: bool = False  # whether the autoencoder's encoder is a part
    dtypes: Dtypes = None  # of exported weights, see ``models.parts``
    controlnets: ControlNets = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)  # additional arguments of the pipeline's call

    @property
    def family(self) -> Family:
        return family_named(self.name)

    def __reduce__(self):
        """Pickle the function that reopens the files, so that another process opens them again."""
        return self.reopen, ()

    def parts_of(self, configs: Mapping[str, Mapping], tokens: int | None) -> dict[str, Part]:
        """Return the exported parts of networks with these ``configs``; ``tokens`` is the length of a text."""
        parts = with_encoder(self.family.parts(configs, tokens, self.io), self.encodes)
        parts = with_controlnets(parts, self.family.DENOISER, self.controlnets)
        return with_dtypes(parts, self.dtypes, self.components)
