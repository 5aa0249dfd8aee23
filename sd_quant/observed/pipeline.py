"""Makes images with engines in the place of an observed pipeline's networks.

A pipeline of any class is called as a whole: it encodes, denoises and decodes in one call, and nobody but the class
knows what it does between. To encode all prompts first and to decode all images last, so that engines can be open one
at a time, it is called three times for each batch, and answers that were computed before are given again: the first
call ends where the denoiser would be called, the second where the autoencoder would be, and the third returns the
images. What lies between networks is computed again, a few operations on latents a step. The road not taken is to cut
each class into its three phases, which takes a file for each family.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sd_quant.engines.base import Engine
from sd_quant.errors import SdQuantError
from sd_quant.inference.calls import Calls
from sd_quant.inference.pipeline import ByBatch, Generated, Sampling, Tensors, calls_of, in_turn, made_with
from sd_quant.metrics.images import joined
from sd_quant.models.parts import Part
from sd_quant.observed.watching import Run, Style, bound, request, told_steps


class Reached(BaseException):
    """Ends a pipeline's call in front of a network that is not to be called yet; no ``Exception``, which some catch."""


class ReplayedNetwork(nn.Module):
    """A network of a pipeline that an engine computes, and that gives answers again.

    ``network`` may be on the meta device: its configuration and the signature of its method are used. ``answers`` are
    the outputs in the calls of one batch, in order; a call beyond them is computed, or ends the pipeline's call if
    ``stops``. ``on_call`` and ``through`` as in ``EngineNetwork``.
    """

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, engines: Mapping[str, Engine], name: str, part: Part, network: nn.Module, method: str):
        super().__init__()
        self.engines, self.name, self.part, self.method = engines, name, part, method
        self.network = [network]  # in a list, so that it is no submodule
        self.on_call: Callable[[], object] = lambda: None
        self.through: Calls | None = None
        self.answers: list[Tensors] = []
        self.given, self.stops = 0, False

    def __getattr__(self, name: str) -> Any:
        if name == self.__dict__.get("method") != "forward":
            return self.call
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.network[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.given == len(self.answers):
            if self.stops:
                raise Reached
            self.answers.append(self.computed(args, kwargs))
        answer = self.answers[self.given]
        self.given += 1
        return self.part.answer({name: output.clone() for name, output in answer.items()})  # pipelines change them

    def computed(self, args: tuple, kwargs: Mapping[str, Any]) -> Tensors:
        self.on_call()
        arguments = bound(getattr(self.network[0], self.method), args, kwargs)
        given = self.part.arguments(self.part.contract, arguments)
        outputs = self.outputs(given) if self.through is None else self.through(self.outputs, given)
        return {
            name: output.cpu().float() if output.is_floating_point() else output.cpu()
            for name, output in outputs.items()
        }

    def outputs(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The engine's outputs."""
        return self.engines[self.name](**inputs)


class ObservedPipeline:
    """A pipeline of any class with ``engines`` by part; called as ``inference.pipeline.Pipeline`` is.

    ``stands`` are its networks by part, ``denoisers`` the parts that denoise, ``outputs`` names the images in a result.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        pipe: Any,
        stands: Mapping[str, ReplayedNetwork],
        denoisers: Sequence[str],
        arguments: Mapping[str, Any],
        style: Style,
        outputs: str,
    ):
        self.engines, self.pipe, self.stands, self.denoisers, self.arguments = (
            engines, pipe, stands, denoisers, arguments
        )  # fmt: skip
        self.style, self.outputs = style, outputs
        self.own_sampler = pipe.scheduler
        self.decoders = [name for name, stand in stands.items() if stand.method == "decode"]

    def __call__(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        *,
        numbers: Sequence[int] | None = None,
        decode: bool = True,
        on_batch: Callable[[Sequence[int]], object] = lambda numbers: None,
        on_step: Callable[[int], object] = lambda step: None,
        by_batch: ByBatch = in_turn,
    ) -> Generated:
        """An image for each of the ``prompts``, or for those whose ``numbers`` are given; the number decides its noise.

        A video's frames stand side by side in its image. Other arguments, and what is raised, as for ``Pipeline``.
        """
        self.pipe.set_progress_bar_config(disable=True)
        numbers = range(len(prompts)) if numbers is None else numbers
        batches = sampling.batches(numbers)
        answers: list[dict[str, list]] = [{name: [] for name in self.stands} for _ in batches]
        latents: dict[int, Tensor] = {}
        images: dict[int, np.ndarray] = {}
        for batch, known in zip(batches, answers, strict=True):
            self.run(prompts, batch, sampling, known, until=self.denoisers)

        def denoised(place: int) -> Tensors:
            batch, known = batches[place], answers[place]
            on_batch(batch)
            steps, result = self.run(prompts, batch, sampling, known, until=self.decoders, on_step=on_step)
            made = {"steps": by_image(steps, len(batch))} | packed(known)
            if decode and result is not None:  # nothing is decoded by a network
                made["images"] = torch.from_numpy(self.pixels(batch, result))
            return made

        made = by_batch(batches, denoised, ())
        for batch, known, each in zip(batches, answers, made, strict=True):
            known.clear()
            latents |= zip(batch, each["steps"], strict=True)
            if "images" not in each and decode:
                _, result = self.run(prompts, batch, sampling, unpacked(each, self.stands), until=())
                each["images"] = torch.from_numpy(self.pixels(batch, result))
            images |= zip(batch, each["images"].numpy(), strict=True) if decode else ()
            each.clear()
        in_order = [latents[number] for number in numbers]
        one_shape = len({each.shape for each in in_order}) == 1
        return Generated(
            joined([images[each] for each in numbers]) if decode else None,
            torch.stack(in_order) if one_shape else in_order,
        )

    def run(
        self,
        prompts: Sequence[str],
        numbers: Sequence[int],
        sampling: Sampling,
        known: Mapping[str, list],
        until: Sequence[str],
        on_step: Callable[[int], object] | None = None,
    ) -> tuple[list[Tensor], Any]:
        """Calls the pipeline until one of the networks ``until`` would have to compute.

        Returns the latents behind each step of the scheduler, fp32 on the CPU, and the pipeline's result, None where
        the call has ended before it.
        """
        width, height = sampling.size_of(numbers[0])
        run = Run("", [prompts[number] for number in numbers], width, height)
        seeds = [sampling.seed + number for number in numbers]
        negative = sampling.negatives_of(numbers)
        arguments = dict(self.arguments) if negative is None else {**self.arguments, "negative_prompt": negative}
        steps: list[Tensor] = []
        self.pipe.scheduler = made_with(sampling, self.own_sampler)
        through = calls_of(sampling, self.pipe, lambda: len(steps), ())
        for name, stand in self.stands.items():
            stand.answers, stand.given, stand.stops = known[name], 0, name in until
            stand.on_call, stand.through = lambda: None, through if name in self.denoisers else None
            if on_step is not None and name in self.denoisers:
                stand.on_call = lambda: on_step(self.step_of(len(steps), sampling))
        with kept_steps(self.pipe, steps):
            torch.manual_seed(seeds[0])
            try:
                given = request(self.pipe, run, sampling.guidance_scale, sampling.steps, arguments, seeds, self.style)
                result = self.pipe(**given)
            except Reached:
                result = None
        if on_step is not None:
            self.check_finite(numbers, steps)
        return steps, result

    def step_of(self, done: int, sampling: Sampling) -> int:
        """Returns the denoising step after ``done`` steps of the scheduler, which may make several in one."""
        return min(done * sampling.steps // max(1, len(self.pipe.scheduler.timesteps)), sampling.steps_taken - 1)

    def check_finite(self, numbers: Sequence[int], steps: Sequence[Tensor]) -> None:
        for step, values in enumerate(steps):
            if not torch.isfinite(values).all():
                broken = ~torch.isfinite(by_image([values], len(numbers))).flatten(1).all(dim=1)
                raise SdQuantError(
                    f"{self.engines[self.denoisers[0]].name} gave a latent that is not finite for prompt "
                    f"{numbers[int(broken.nonzero()[0])]} at step {step}; a lower quant_level or a calibration with "
                    "more prompts may keep it in range"
                )

    def pixels(self, numbers: Sequence[int], result: Any) -> np.ndarray:
        """The images of a result, uint8 [B, H, W, 3]; a video's frames side by side."""
        values = np.asarray(getattr(result, self.outputs))
        if self.outputs == "video":  # of one prompt, without an axis for it
            values = values[None]
        if values.ndim == 5:  # [B, F, H, W, C]
            values = np.concatenate(np.moveaxis(values, 1, 0), axis=2)
        if values.ndim == 3:
            values = values[..., None]
        if not np.isfinite(values).all():
            broken = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
            raise SdQuantError(
                f"the decoder gave an image that is not finite for prompt {numbers[int(broken.argmax())]}, of latents "
                "that are; its weights may be stored in fewer bits than it needs: export it in fp32"
            )
        return np.repeat((values * 255).round().astype(np.uint8), 3 if values.shape[-1] == 1 else 1, axis=-1)


def packed(answers: Mapping[str, Sequence[Tensors]]) -> Tensors:
    """Networks' answers under names that ``unpacked`` reads: ``answer/<network>/<call>/<output>``."""
    return {
        f"answer/{network}/{call}/{name}": output
        for network, calls in answers.items()
        for call, outputs in enumerate(calls)
        for name, output in outputs.items()
    }


def unpacked(tensors: Tensors, networks: Iterable[str]) -> dict[str, list[Tensors]]:
    """Reverse ``packed`` of what these ``networks`` answered."""
    answers: dict[str, list[Tensors]] = {network: [] for network in networks}
    calls = sorted(
        (path.split("/", 3)[1:] for path in tensors if path.startswith("answer/")), key=lambda at: int(at[1])
    )
    for network, call, name in calls:
        if len(answers[network]) == int(call):
            answers[network].append({})
        answers[network][int(call)][name] = tensors[f"answer/{network}/{call}/{name}"]
    return answers


def by_image(steps: Sequence[Tensor], images: int) -> Tensor:
    """Returns latents [images, steps, ...] of latents [samples, ...] after each step.

    Where no axis counts images they are given to each image as a whole.
    """
    alike = [each for each in steps if each.shape == steps[-1].shape]  # some pipelines begin with smaller latents
    stacked = torch.stack(alike) if alike else torch.zeros(1, images, 1)
    return stacked.movedim(1, 0) if stacked.shape[1] == images else stacked[None].expand(images, *stacked.shape)


@contextmanager
def kept_steps(pipe: Any, steps: list[Tensor]) -> Iterator[None]:
    """In the block the latents behind each step of the pipeline's scheduler are added to ``steps``."""

    def keep(result: Any) -> None:
        latents = result[0] if isinstance(result, tuple) else result.prev_sample
        steps.append(latents.detach().float().cpu().clone())

    with told_steps(pipe, keep):
        yield
