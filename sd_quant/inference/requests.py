"""Arguments for the call of any diffusers pipeline, and hooks for its scheduler's steps and random numbers."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import torch
from PIL import Image
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sd_quant.errors import ConfigError
from sd_quant.files import refusing
from sd_quant.files.images import fitted, is_of_each
from sd_quant.models.family import Style

DECIDED = {  # arguments of a pipeline's call that knobs decide, or that change the form of its result
    "prompt", "width", "height", "num_inference_steps", "generator", "latents", "output_type", "return_dict",
    "num_images_per_prompt", "num_videos_per_prompt", "batch_size",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The name, prompts and image size of one call of a pipeline."""

    name: str
    prompts: list[str]
    width: int
    height: int


def request(
    pipe: Any, run: Run, scale: float, steps: int, arguments: Mapping[str, Any], seeds: Sequence[int], style: Style
) -> dict[str, Any]:
    """Build the keyword arguments, such as the guidance ``scale``, that the class of ``pipe`` accepts, for one call.

    Images among ``arguments`` are cropped and resized to the run's size, unless ``style.keeps`` names the argument. One
    image or negative prompt serves all prompts; a list has one for each prompt, or several for a single prompt.
    Raises ConfigError when a required argument is missing, or one of ``arguments`` is unknown or set by a knob.
    """
    known = inspect.signature(type(pipe).__call__).parameters
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    given = {
        "prompt": list(run.prompts) if style.batched else run.prompts[0], "width": run.width, "height": run.height,
        "num_inference_steps": steps, "guidance_scale": scale, "output_type": "np", "use_resolution_binning": False,
        "generator": generators if style.each else generators[0], "max_area": run.width * run.height,
    }  # fmt: skip
    arguments = {
        name: value if name in style.keeps else fitted(value, run.width, run.height)
        for name, value in arguments.items()
    }
    for name, value in arguments.items():
        alone = isinstance(value, Image.Image) and len(run.prompts) == 1
        if style.batched and is_of_each(name, value) and not alone:
            arguments[name] = [value] * len(run.prompts)
        elif isinstance(value, list) and name in known and re.search(r"(?i)\btuple", str(known[name].annotation)):
            arguments[name] = tuple(value)
    if "prompt" not in known:
        given["batch_size"] = len(run.prompts)
    check_taken(type(pipe), "model.arguments", arguments)
    taken = {name: value for name, value in {**given, **arguments}.items() if name in known}
    missing = [
        name for name, each in known.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD and name not in {"self", *taken}
    ]  # fmt: skip
    if missing:
        raise ConfigError(
            f"{type(pipe).__name__} takes {', '.join(missing)} beside a prompt, and nothing gives it; state it in "
            f"model.arguments={{{missing[0]}: <a number, a text or the file of an image>}}, or give tables with a "
            "column of that name, model.calibration_table and infer.table"
        )
    return taken


def check_taken(kind: type, where: str, names: Iterable[str]) -> None:
    """Raise ConfigError if the pipeline class ``kind`` lacks one of the arguments ``names`` or if a knob sets it."""
    known = inspect.signature(kind.__call__).parameters
    if unknown := sorted(set(names) - known.keys()):
        raise ConfigError(
            f"{where} has {unknown[0]}, which {kind.__name__} does not take; it takes "
            f"{', '.join(name for name in known if name not in ('self', 'args', 'kwargs'))}"
        )
    if decided := sorted(set(names) & DECIDED):
        raise ConfigError(
            f"{where} has {decided[0]}, which is not stated there: sizes, steps, prompts, seeds and the number of "
            "images have knobs of their own; leave it out"
        )


@contextmanager
def told_steps(
    pipe: Any, tell: Callable[[Any], None], draws: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Call ``tell`` with the result of every scheduler step in the block; each step runs in the context ``draws``.

    The method is replaced in the scheduler's class, because some pipelines copy their scheduler, such as one a frame.
    """
    kind = type(pipe.scheduler)
    step = kind.step

    @wraps(step)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        with draws or nullcontext():
            result = step(self, *args, **kwargs)
        tell(result)
        return result

    with mock.patch.object(kind, "step", told):
        yield


@contextmanager
def refusing_steps(pipe: Any) -> Iterator[None]:
    """In the block, raise ArtifactError where the pipeline's scheduler fails because of its configuration or steps."""
    kind = type(pipe.scheduler)
    refused = refusing(f"{kind.__name__} fails", advice="mend the folder's scheduler, or take other steps")
    methods: dict[str, Any] = {
        name: refused(getattr(kind, name)) for name in ("set_timesteps", "step") if hasattr(kind, name)
    }
    with mock.patch.multiple(kind, **methods):
        yield


class DrawsByImage(TorchFunctionMode):
    """A torch function mode in which noise drawn without a generator comes from one generator for each image.

    Some pipelines pass no generator to their scheduler; its noise would depend on the other images of the batch.
    """

    def __init__(self, seeds: Sequence[int]):
        super().__init__()
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        drawn = func(*args, **(kwargs or {}))
        own = func in (torch.randn, torch.randn_like) and (kwargs or {}).get("generator") is None
        if not own or len(drawn) != len(self.generators):
            return drawn
        return torch.cat([
            torch.randn(each.shape, generator=generator, dtype=drawn.dtype)
            for each, generator in zip(drawn.split(1), self.generators, strict=True)
        ]).to(drawn.device)  # fmt: skip


def seeded(scheduler: Any, seeds: Sequence[int]) -> Any:
    """Set a noise seed for each image on ``scheduler``: ``DPMSolverSDEScheduler`` has one for the batch by default."""
    if scheduler.config.get("noise_sampler_seed", 0) is None:
        drawn = [torch.randint(0, 2**63 - 1, [], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        scheduler.noise_sampler_seed = [int(seed) for seed in drawn]
    return scheduler


def latents_of(result: Any) -> Tensor:
    """Copy the latents out of a scheduler step's result, fp32 on the CPU."""
    latents = result[0] if isinstance(result, tuple) else result.prev_sample
    return latents.detach().float().cpu().clone()
