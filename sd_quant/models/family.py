"""Interface of a family of diffusion models, and the call of its pipeline with engines in place of networks."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from sd_quant.models import FAMILIES
from sd_quant.models.parts import Contract, Heads, Part, SharedInput
from sd_quant.models.roles import inputs_of_transformer, roles_of


class Family:
    """What is special about one family. The defaults suit a transformer that takes latents [B, C, h, w]."""

    PIPELINES: tuple[str, ...]  # diffusers' pipeline classes that are of this family
    FROM_IMAGES: tuple[str, str] | None = None  # image-to-image and inpainting classes; None: no such class
    CONTROLLED: str | None = None  # the pipeline class with ControlNets; None: no such class
    NETWORKS: Mapping[str, str]  # the pipeline's components that are networks, and their classes
    OPTIONAL: tuple[str, ...] = ()  # networks that a pipeline may lack, each a part of the same name
    DENOISER: str = "transformer"  # name of the part that is quantized
    EXCLUDED: tuple[str, ...]  # layers of the denoiser that no level quantizes, see ``roles.layer_role``
    GUIDES: bool = True  # whether classifier-free guidance doubles the denoiser's batch
    TOKENS: int | None = None  # longest text that its T5 reads by default, in tokens; None without a T5
    PADDED: bool = False  # whether models may be trained with zeros after CLIP's tokens, as NeMo adds them
    OWN_NOISE: bool = False  # whether only the pipeline knows the layout of its noise, so noise cannot be passed
    MOVES: bool = False  # whether the pipeline makes videos, whose frames are shown side by side in an image
    DENOISERS: Sequence[str] = ()  # parts that are called in the denoising steps, where there are several
    SOME_STEPS: bool = False  # whether a denoiser may be called in some steps only (several denoisers, image-to-image)
    ONE_BATCH: str | None = None  # a part whose graph serves a single batch size; None where every graph serves all
    ONE_SIZE: tuple[str, int, int] | None = None  # a part whose graph serves a single image size, width and height
    UNEQUAL: str | None = None  # why prompts of unequal length cannot be in one batch; None where they can

    def parts(self, configs: Mapping[str, Mapping], tokens: int | None, io: str) -> dict[str, Part]:
        """Return the exported parts by name, the denoiser first.

        ``configs`` are the configurations of the networks by component; an optional network is there only if used.
        ``tokens`` is the longest text that a T5 reads, None for the default. ``io`` is "nemo" or "diffusers": the
        naming of the denoiser's inputs, where a family has both.
        """
        raise NotImplementedError

    def layer_roles(self, denoiser: nn.Module) -> dict[str, str]:
        """Return the role of every Linear and Conv2d by name, see ``roles.roles_of``."""
        return roles_of(denoiser, self.EXCLUDED)

    def shared_inputs(self, linears: Iterable[str]) -> list[SharedInput]:
        """Return each tensor that ``linears`` read, with all linears that read this tensor and may be quantized."""
        return inputs_of_transformer(linears)

    def attentions(self, denoiser: nn.Module) -> dict[str, Heads]:
        """Return the heads of each attention whose matrix products can be quantized, by the attention's name."""
        return {}

    def reads_guidance(self, contract: Contract) -> bool:
        """Whether the guidance scale has an effect: as weight of a second pass, or as input of the denoiser."""
        return self.GUIDES or "guidance" in contract.inputs

    def call_arguments(self, tokens: int | None) -> dict[str, Any]:
        """Return further arguments of the pipeline's call; ``tokens`` as in ``parts``."""
        return {} if self.TOKENS is None else {"max_sequence_length": tokens or self.TOKENS}

    def pack(self, pipe, latents: Tensor) -> Tensor:
        """Return latents [B, C, h, w] in the layout that the pipeline's call takes."""
        return latents


class Observed(Family):
    """Family of any other diffusers pipeline, whose facts ``sd_quant.observed`` records by running the pipeline.

    This class itself holds the defaults that are valid before a checkpoint is opened.
    """

    PIPELINES: tuple[str, ...] = ()
    NETWORKS: dict[str, str] = {}
    EXCLUDED: tuple[str, ...] = ()
    OWN_NOISE = True

    def reads_guidance(self, contract: Contract) -> bool:
        return True  # what a pipeline does with the scale is unknown


FAMILY = Observed()


def family_named(name: str) -> Family:
    """Import and return the family called ``name``. Raises KeyError for a name that is not in ``FAMILIES``."""
    return import_module(FAMILIES[name]).FAMILY


@dataclass(frozen=True)
class Style:
    """How a pipeline takes prompts, noise and images."""

    batched: bool = True  # a call takes a list of prompts; False: a single prompt
    each: bool = True  # a random generator for each image of a batch; False: one for all
    keeps: tuple[str, ...] = ()  # arguments whose images keep their sizes; other images are fitted to the output's size


@dataclass(frozen=True)
class PipelineCall:
    """A diffusers pipeline with stand-ins for its networks, and how it is called."""

    family: Family
    pipe: Any
    denoisers: Sequence[str]  # parts that are called in the denoising steps, the quantized one first
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of its call, beside prompts, sizes, steps and seeds
    style: Style = Style()
    outputs: str = "images"  # the name of the images among its results
    tokenizer: Any = None  # of the text encoder that reads the shortest prompts; None where that is not known


# (component, network) -> what a pipeline gets in the place of that network, which may be on the meta device
StandIn = Callable[[str, nn.Module], Any]


def remade(name: str, pipe: Any, **others: Any) -> Any:
    """Build a pipeline of diffusers' class ``name`` from ``pipe``'s components and configuration, and ``others``."""
    import diffusers

    kind, known = getattr(diffusers, name), {**pipe.config, **pipe.components, **others}
    made = kind(**{each: known[each] for each in inspect.signature(kind).parameters if each in known})
    if "encode_prompt" in vars(pipe):  # an author's own way to encode texts
        made.encode_prompt = pipe.encode_prompt
    return made
