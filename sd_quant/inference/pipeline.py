"""Generate images with a diffusers pipeline of any class, whose networks are replaced by engines.

The pipeline is called as a whole, because only its class knows what it does between encoding, denoising and decoding.
Yet all prompts are encoded first and all images decoded last, so that engines can be open one at a time. For this the
pipeline is called several times for each batch: outputs of networks that are known from earlier calls are replayed, and
each call except the last ends before the next network. Only cheap operations between networks are computed again.
Alternatives not taken: our own denoising loop, which would have to agree with diffusers for every family, scheduler and
autoencoder; and a file for each family that cuts its pipeline into phases.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd_quant.errors import SdQuantError
from sd_quant.files.images import identities, is_of_each
from sd_quant.inference.calls import Calls
from sd_quant.inference.latents import digest_of
from sd_quant.inference.requests import DrawsByImage, Run, latents_of, refusing_steps, request, seeded, told_steps
from sd_quant.inference.source_images import SourceImages
from sd_quant.inference.stand_ins import AnsweredPart, Outputs, Reached, Tensors
from sd_quant.inference.tiles import in_tiles
from sd_quant.knobs import seed_of
from sd_quant.metrics.images import Images, joined
from sd_quant.models.family import PipelineCall, remade

LOG = logging.getLogger(__name__)
# ``by_batch(batches, make, also)`` returns the results of ``make(place)`` in the order of the batches of prompts'
# numbers; ``also`` has, for each, what else its result depends on.
ByBatch = Callable[[Sequence[Sequence[int]], Callable[[int], Tensors], Sequence[Any]], list[Tensors]]


def in_turn(
    batches: Sequence[Sequence[int]], make: Callable[[int], Tensors], also: Sequence[Any] = ()
) -> list[Tensors]:
    """Return ``make(place)`` for the place of each batch in ``batches``, one after the other in this process."""
    return [make(place) for place in range(len(batches))]


@dataclass(slots=True)
class Sampling:
    """The settings with which images are generated."""

    steps: int  # of denoising
    guidance_scale: float  # no guidance at 1 and below
    height: int  # in pixels
    width: int  # in pixels
    batch_size: int  # images that are made at a time
    seed: int  # of the first image; the next image has the next seed, whatever the batch size
    # Of the following lists the images take one entry each, again from the first where the list is shorter.
    negative_prompts: list[str] | None = None  # None: the model's own unconditional embedding
    latents: Tensor | None = None  # start noise, fp32 [N, C, h, w]; None: drawn from the seeds
    source: SourceImages | None = None  # images to start from, with noise that is drawn from the seeds
    sizes: list[tuple[int, int]] | None = None  # (width, height); None: ``width`` and ``height``
    vae_tile: int | None = None  # side of the tiles in which images are decoded, in pixels; None: as a whole
    schedule: str | None = None  # a letter for each step taken, see ``calls``; None: all are computed
    # Further arguments of the pipeline's call, of the images in turn: numbers, texts, PIL images and lists of these
    arguments: list[dict[str, Any]] | None = None

    @property
    def steps_taken(self) -> int:
        """The number of denoising steps of an image: with a source image, ``strength`` times ``steps``."""
        return self.steps if self.source is None else int(self.steps * self.source.strength)

    def described(self) -> dict[str, Any]:
        """Return the settings that affect the images, for JSON: tensors and images as digests, no unused options."""
        latents = None if self.latents is None else digest_of(self.latents)
        described = asdict(replace(self, latents=None, source=None, arguments=None)) | {"latents": latents}
        del described["source"], described["sizes"], described["arguments"]
        for name in ("vae_tile", "schedule"):
            if described[name] is None:
                del described[name]
        if self.source is not None:
            of_source = self.source.described() | {"of_steps": self.steps}
            described |= {"steps": self.steps_taken, "source": of_source}
        if self.sizes is not None:
            described["sizes"] = [f"{width}x{height}" for width, height in self.sizes]
        if self.arguments is not None:
            described["arguments"] = list(map(identities, self.arguments))
        return described

    def size_of(self, number: int) -> tuple[int, int]:
        """Return width and height, in pixels, of the image with this ``number``."""
        return self.sizes[number % len(self.sizes)] if self.sizes else (self.width, self.height)

    def of_image(self, number: int) -> "Sampling":
        """Return the settings with the size of the image with this ``number``."""
        width, height = self.size_of(number)
        return replace(self, width=width, height=height, sizes=None)

    def batches(self, numbers: Sequence[int]) -> list[list[int]]:
        """Split image ``numbers`` into batches of equal size and arguments, each for one call of the pipeline."""
        alike: dict[Any, list[int]] = {}
        for number in numbers:
            alike.setdefault((self.size_of(number), self.of_one_call(number)), []).append(number)
        count = self.batch_size
        return [same[start : start + count] for same in alike.values() for start in range(0, len(same), count)]

    def row(self, number: int) -> dict[str, Any]:
        """Return the entry of ``arguments`` for the image with this ``number``."""
        return self.arguments[number % len(self.arguments)] if self.arguments else {}

    def of_one_call(self, number: int) -> Any:
        """Return a key, equal for images that one call can generate; an image with a list as argument has its own."""
        if any(isinstance(value, list) for value in self.row(number).values()):
            return number
        return repr({name: value for name, value in self.row(number).items() if not is_of_each(name, value)})

    def arguments_of(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return these images' arguments for one pipeline call: negative prompts, source images, ``arguments``."""
        texts, rows = self.negative_prompts, list(map(self.row, numbers))
        negative = {} if texts is None else {"negative_prompt": [texts[number % len(texts)] for number in numbers]}
        source = {} if self.source is None else self.source.arguments_of(numbers)
        further = {
            name: [row[name] for row in rows] if len(rows) > 1 and is_of_each(name, value) else value
            for name, value in rows[0].items()
        }
        return negative | source | further

    def texts_of(self, prompts: Sequence[str]) -> list[str]:
        """Return, for each prompt, a text of the prompt and its entry of ``arguments``, which identifies its image."""
        if self.arguments is None:
            return list(prompts)
        return [f"{prompt}\n{json.dumps(identities(self.row(number)))}" for number, prompt in enumerate(prompts)]


@dataclass(slots=True)
class Generated:
    """N generated images, and their latents after every step."""

    images: Images | None  # None where latents alone are wanted
    latents: Tensor | list[Tensor]  # fp32 [N, steps, ...], or N of [steps, ...], in the pipeline's own layout
    decoded: list[Tensor] | None = None  # the decoder's first input by image, fp32; None if not one an image


def calls_of(sampling: Sampling, pipe: Any, step: Callable[[], int]) -> Calls | None:
    """Return the ``Calls`` of a batch by the schedule; None without one, where every call is computed."""
    if sampling.schedule is None:
        return None
    return Calls(sampling.schedule, step, lambda step: place_of(step, sampling, pipe))


def place_of(done: int, sampling: Sampling, pipe: Any) -> int:
    """Return the index of the denoising step after ``done`` scheduler steps, several of which may make one step."""
    return min(done * sampling.steps // max(1, len(pipe.scheduler.timesteps)), sampling.steps_taken - 1)


class Pipeline:
    """A pipeline of any class, whose networks are computed by engines.

    ``parts`` are the networks' replacements by name; their engines may be opened on use, closing the previous one.
    """

    def __init__(self, call: PipelineCall, parts: Mapping[str, AnsweredPart]):
        self.call, self.parts = call, parts
        self.own_sampler = call.pipe.scheduler
        self.decoders = [name for name, each in parts.items() if each.part.method == "decode"]
        self.conditioners = [name for name, each in parts.items() if each.part.in_steps]

    def pipe_for(self, sampling: Sampling, seeds: Sequence[int]) -> Any:
        """Return the diffusers pipeline for ``sampling``: text-to-image, image-to-image or inpainting."""
        source, pipe = sampling.source, self.call.pipe
        pipe.scheduler = seeded(self.own_sampler, seeds)
        if source is not None:
            pipe = remade(self.call.family.FROM_IMAGES[source.masks is not None], pipe)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def warn_of_long_prompts(self, prompts: Sequence[str]) -> None:
        """Log a warning with the number of prompts that exceed the tokenizer's maximal length."""
        if (tokenizer := self.call.tokenizer) is None:
            return
        lengths = [len(ids) for ids in tokenizer(list(prompts), truncation=False, verbose=False)["input_ids"]]
        if longer := sum(length > tokenizer.model_max_length for length in lengths):
            LOG.warning(
                "%d of %d prompts are longer than the %d tokens that are read (the longest has %d); their rest is left "
                "out", longer, len(prompts), tokenizer.model_max_length, max(lengths),
            )  # fmt: skip

    def __call__(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        *,
        numbers: Sequence[int] | None = None,
        decode: Collection[int] | None = None,
        on_batch: Callable[[Sequence[int]], object] = lambda numbers: None,
        on_step: Callable[[int], object] = lambda step: None,
        by_batch: ByBatch = in_turn,
    ) -> Generated:
        """Generate an image for each prompt, or for the prompts with these ``numbers``; the number decides the noise.

        The frames of a video are placed side by side in one image. ``decode`` gives the numbers whose batches are
        decoded, by default all; with fewer, no images are returned. ``on_batch`` is called with the numbers of the
        batch that is denoised next, ``on_step`` with the step. ``by_batch`` may denoise batches in other processes.
        Raises SdQuantError, with the prompt's number, when a latent or an image becomes NaN or infinite.
        """
        self.warn_of_long_prompts([*prompts, *(sampling.negative_prompts or ())])
        numbers = range(len(prompts)) if numbers is None else numbers
        wanted = set(numbers if decode is None else decode)
        batches = sampling.batches(numbers)
        calls = [partial(self.run, [prompts[number] for number in batch], batch, sampling) for batch in batches]
        answers: list[dict[str, list[Tensors]]] = [{name: [] for name in self.parts} for _ in batches]
        self.prepare(calls, answers)

        def denoised(place: int) -> Tensors:
            batch, known = batches[place], answers[place]
            on_batch(batch)
            steps, result = calls[place](known, self.parts.keys() - self.decoders, on_step)
            made = {"steps": by_image(steps, len(batch))} | packed(known)
            if not isinstance(result, Reached):  # nothing is decoded by a network
                return made | {"images": torch.from_numpy(self.pixels(batch, result))}
            z = next(iter(result.inputs.values()))
            return made | ({"decoded": z.float().cpu()} if len(z) == len(batch) else {})

        made = by_batch(batches, denoised, ())
        latents: dict[int, Tensor] = {}
        decoded: dict[int, Tensor] = {}
        images: dict[int, np.ndarray] = {}
        for place, (batch, each) in enumerate(zip(batches, made, strict=True)):
            answers[place].clear()
            latents |= zip(batch, each["steps"], strict=True)
            decoded |= zip(batch, each["decoded"], strict=True) if "decoded" in each else ()
            if wanted.intersection(batch):
                if "images" not in each:
                    _, result = calls[place](unpacked(each, self.parts), self.parts)
                    each["images"] = torch.from_numpy(self.pixels(batch, result))
                images |= zip(batch, each["images"].numpy(), strict=True)
            each.clear()
        in_order = [latents[number] for number in numbers]
        one_shape = len({each.shape for each in in_order}) == 1
        return Generated(
            joined([images[each] for each in numbers]) if wanted.issuperset(numbers) else None,
            torch.stack(in_order) if one_shape else in_order,
            [decoded[number] for number in numbers] if len(decoded) == len(latents) else None,
        )

    def prepare(self, calls: Sequence[Callable], answers: Sequence[dict[str, list[Tensors]]]) -> None:
        """Run each batch's call up to denoising, one part at a time; append the parts' outputs to ``answers``."""
        waiting, turn = list(range(len(calls))), list[str]()
        last = {*self.call.denoisers, *self.conditioners, *self.decoders}
        while waiting:
            ends = {place: calls[place](answers[place], turn)[1] for place in waiting}
            before = {
                place: end.part for place, end in ends.items() if isinstance(end, Reached) and end.part not in last
            }
            waiting, turn = list(before), list(before.values())[:1]

    def image_of(self, prompts: Sequence[str], sampling: Sampling) -> np.ndarray:
        """Generate one batch in one call, as an application does: uint8 [B, H, W, 3]; prompts repeat to fill it."""
        batch, one_size = (list(prompts) * sampling.batch_size)[: sampling.batch_size], replace(sampling, sizes=None)
        numbers, known = range(len(batch)), {name: list[Tensors]() for name in self.parts}
        return self.pixels(numbers, self.run(batch, numbers, one_size, known, self.parts)[1])

    def run(
        self,
        prompts: Sequence[str],
        numbers: Sequence[int],
        sampling: Sampling,
        known: Mapping[str, list[Tensors]],
        computing: Collection[str],
        on_step: Callable[[int], object] | None = None,
    ) -> tuple[list[Tensor], Any]:
        """Call the pipeline with the ``known`` outputs by part, until a part that is not in ``computing`` is needed.

        Returns the latents after each scheduler step, fp32 on the CPU, and the pipeline's result or ``Reached``.
        """
        call, steps = self.call, list[Tensor]()
        seeds = [seed_of(sampling.seed, number) for number in numbers]
        pipe = self.pipe_for(sampling, seeds)
        run = Run("", list(prompts), *sampling.size_of(numbers[0]))
        arguments = {**call.arguments, **sampling.arguments_of(numbers)}
        given = request(pipe, run, sampling.guidance_scale, sampling.steps, arguments, seeds, call.style)
        if sampling.latents is not None:
            rows = sampling.latents[[number % len(sampling.latents) for number in numbers]]
            given["latents"] = call.family.pack(pipe, rows)

        def count() -> None:
            if on_step is not None:
                on_step(place_of(len(steps), sampling, pipe))

        def keep(result: Any) -> None:
            steps.append(latents_of(result))
            if on_step is not None and (broken := first_broken(steps[-1], numbers)) is not None:
                raise SdQuantError(
                    f"{self.engine_of(call.denoisers[0])} gave a latent that is not finite for prompt {broken} at step "
                    f"{len(steps) - 1}; a lower quant_level or a calibration with more prompts may keep it in range"
                )

        def settled(pipe: Any, step: int, timestep: Any, values: dict) -> dict:
            """Replace the kept latents by those in which the pipeline has restored the source outside of the mask."""
            steps[-1] = latents_of((values["latents"],))
            return values

        if sampling.source is not None:
            given["callback_on_step_end"] = settled
        calls = calls_of(sampling, pipe, lambda: len(steps))
        for name, part in self.parts.items():
            part.begin(known[name], name not in computing)
            if name in call.denoisers:
                part.through, part.on_call = calls, count
            elif name in self.conditioners:  # computed in the steps of the denoiser that reads them
                part.through = calls_of(sampling, pipe, lambda: len(steps))
            elif name in self.decoders:
                part.through = partial(self.finite_images, part, numbers, sampling.vae_tile)
        draws = DrawsByImage(seeds) if len(seeds) > 1 else None
        with torch.random.fork_rng(devices=[]), refusing_steps(pipe), told_steps(pipe, keep, draws):
            torch.manual_seed(seeds[0])
            try:
                return steps, pipe(**given)
            except Reached as end:
                return steps, end

    def finite_images(
        self,
        part: AnsweredPart,
        numbers: Sequence[int],
        tile: int | None,
        compute: Callable[[Outputs], Outputs],
        inputs: Outputs,
    ) -> Outputs:
        """Decode latents by ``compute``, in tiles of ``tile`` pixels if given. Raises SdQuantError for NaN or inf."""
        outputs = in_tiles(compute, inputs, tile)
        if (broken := first_broken(next(iter(outputs.values())), numbers)) is not None:
            raise SdQuantError(
                f"{self.engine_of(part.name)} gave an image that is not finite for prompt {broken}, of latents that "
                "are; its weights may be stored in fewer bits than it needs: export them in fp32"
            )
        return outputs

    def engine_of(self, part: str) -> str:
        return self.parts[part].engines[part].name

    def pixels(self, numbers: Sequence[int], result: Any) -> np.ndarray:
        """Convert a pipeline's result to images, uint8 [B, H, W, 3]; a video's frames side by side."""
        values = np.asarray(getattr(result, self.call.outputs))
        if self.call.outputs == "video":  # of one prompt, without an axis for it
            values = values[None]
        if values.ndim == 5:  # [B, F, H, W, C]
            values = np.concatenate(np.moveaxis(values, 1, 0), axis=2)
        if values.ndim == 3:
            values = values[..., None]
        return np.repeat((values * 255).round().astype(np.uint8), 3 if values.shape[-1] == 1 else 1, axis=-1)


def packed(answers: Mapping[str, Sequence[Tensors]]) -> Tensors:
    """Flatten outputs of parts to one dictionary with keys ``answer/<part>/<call>/<output>``."""
    return {
        f"answer/{part}/{call}/{name}": output
        for part, calls in answers.items()
        for call, outputs in enumerate(calls)
        for name, output in outputs.items()
    }


def unpacked(tensors: Tensors, parts: Iterable[str]) -> dict[str, list[Tensors]]:
    """Return the outputs by part and call that ``packed`` has flattened; an empty list for a part without calls."""
    answers: dict[str, list[Tensors]] = {part: [] for part in parts}
    calls = sorted(
        (path.split("/", 3)[1:] for path in tensors if path.startswith("answer/")), key=lambda at: int(at[1])
    )
    for part, call, name in calls:
        if len(answers[part]) == int(call):
            answers[part].append({})
        answers[part][int(call)][name] = tensors[f"answer/{part}/{call}/{name}"]
    return answers


def first_broken(values: Tensor, numbers: Sequence[int]) -> int | None:
    """Return the number of the first image whose values are not finite, or None."""
    if torch.isfinite(values).all():
        return None
    broken = ~torch.isfinite(by_image([values], len(numbers))).flatten(1).all(dim=1)
    return numbers[int(broken.nonzero()[0])]


def by_image(steps: Sequence[Tensor], images: int) -> Tensor:
    """Stack each step's latents to [images, steps, ...]; latents without a batch axis are repeated for each image."""
    alike = [each for each in steps if each.shape == steps[-1].shape]  # some pipelines begin with smaller latents
    stacked = torch.stack(alike) if alike else torch.zeros(1, images, 1)
    return stacked.movedim(1, 0) if stacked.shape[1] == images else stacked[None].expand(images, *stacked.shape)
