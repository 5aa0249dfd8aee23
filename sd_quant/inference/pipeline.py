"""Makes images with engines: a diffusers pipeline whose networks are replaced by engines.

Scheduler, guidance, text encoding and image processing stay diffusers' own, and a ``PipelineAdapter`` supplies what is
special about a family. All prompts are encoded first, then all images are denoised, then all are decoded, so that
engines can be opened one at a time. Images from images are made by diffusers' own pipelines for them, with the same
networks; the autoencoder's encoder computes their inputs beforehand, in a phase of its own.
The road not taken is a pipeline of our own, which would have to agree with diffusers for every family and scheduler.
"""

import hashlib
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sd_quant.engines.base import Engine
from sd_quant.errors import SdQuantError
from sd_quant.inference.calls import Calls
from sd_quant.inference.latents import digest_of
from sd_quant.inference.samplers import noise_levels, sampler_for
from sd_quant.inference.source_images import SourceImages
from sd_quant.inference.tiles import decode
from sd_quant.metrics.images import Images, joined
from sd_quant.models.family import PipelineAdapter, remade
from sd_quant.models.parts import Part

LOG = logging.getLogger(__name__)
Tensors = dict[str, Tensor]
# ``by_batch(batches, make, also)`` returns what ``make(place)`` makes of each of the batches, which are numbers of
# prompts, in their order; ``also`` says of each what else that depends on.
ByBatch = Callable[[Sequence[Sequence[int]], Callable[[int], Tensors], Sequence[Any]], list[Tensors]]


def in_turn(
    batches: Sequence[Sequence[int]], make: Callable[[int], Tensors], also: Sequence[Any] = ()
) -> list[Tensors]:
    """Make all batches here, one after the other."""
    return [make(place) for place in range(len(batches))]


class EngineNetwork(nn.Module):
    """A network of a pipeline, computed by an engine. Other attributes are those of the ``network`` that it replaces.

    ``network`` may be on the meta device: only its configuration and the signature of its ``forward`` are used.
    ``on_call`` is called before each call of the engine. ``through``, if there is one, decides which are computed.
    """

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, engines: Mapping[str, Engine], name: str, part: Part, network: nn.Module):
        super().__init__()
        self.engines, self.name, self.part = engines, name, part
        self.network = [network]  # in a list, so that it does not become a submodule: it may be on the meta device
        self.signature = inspect.signature(network.forward)
        self.on_call: Callable[[], object] = lambda: None
        self.through: Calls | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.network[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.on_call()
        arguments = self.signature.bind(*args, **kwargs).arguments
        for nested in ("added_cond_kwargs", "kwargs"):
            arguments |= arguments.pop(nested, None) or {}
        sample = next((value for value in arguments.values() if isinstance(value, Tensor)), torch.empty(0))
        given = self.part.arguments(self.part.contract, arguments)
        outputs = self.computed(given) if self.through is None else self.through(self.computed, given)
        dtype = torch.float32 if not sample.is_floating_point() else sample.dtype
        return self.part.answer({name: output.to(sample.device, dtype) for name, output in outputs.items()})

    def computed(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The engine's outputs."""
        return self.engines[self.name](**inputs)


class EncodingNetwork(EngineNetwork):
    """A pipeline's autoencoder, whose encoder an engine computes and which keeps what it computed for each image.

    ``encode_images`` encodes all images while that engine is open; the pipeline takes them from here as it denoises.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.moments: dict[bytes, Tensor] = {}  # by the bytes of an image

    def encode(self, x: Tensor, return_dict: bool = True) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        key = hashlib.sha256(x.numpy().tobytes()).digest()
        if key not in self.moments:
            self.moments[key] = self.engines[self.name](x=x)["moments"].to(x)
        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(self.moments[key]))


def encode_images(pipe: Any, source: SourceImages, numbers: Sequence[int]) -> None:
    """Let the autoencoder of ``pipe`` encode the source images of these prompts, and the unmasked rest of them.

    It forgets the images of an earlier call, so that every call takes the same time.
    """
    pipe.vae.moments.clear()
    for number in {number % len(source.images) for number in numbers}:
        image = pipe.image_processor.preprocess(source.images_of([number]))
        pipe.vae.encode(image)
        if source.masks is not None:
            pipe.vae.encode(image * (pipe.mask_processor.preprocess(source.masks_of([number])) < 0.5))


@dataclass(slots=True)
class Sampling:
    """The settings by which images are made."""

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
    sizes: list[tuple[int, int]] | None = None  # (width, height); None: those above
    vae_tile: int | None = None  # side of the tiles in which images are decoded, in pixels; None: as a whole
    sampler: str | None = None  # of ``samplers.SAMPLERS``; None: the checkpoint's own
    schedule: str | None = None  # a letter for each step taken, see ``calls``; None: all are computed
    guidance_until: float | None = None  # noise level, down to which steps are guided; None: all are

    @property
    def steps_taken(self) -> int:
        """The denoising steps that an image takes: with a source image, the last of ``steps``."""
        return self.steps if self.source is None else int(self.steps * self.source.strength)

    def described(self) -> dict[str, Any]:
        """All settings that decide the images, for JSON; latents and source images by their digests.

        Newer settings are absent where they are not used, so that cached results of earlier versions are found.
        """
        latents = None if self.latents is None else digest_of(self.latents)
        described = asdict(replace(self, latents=None, source=None)) | {"latents": latents}
        del described["source"], described["sizes"]
        for name in ("vae_tile", "sampler", "schedule", "guidance_until"):
            if described[name] is None:
                del described[name]
        if self.source is not None:
            of_source = self.source.described() | {"of_steps": self.steps}
            described |= {"steps": self.steps_taken, "source": of_source}
        if self.sizes is not None:
            described["sizes"] = [f"{width}x{height}" for width, height in self.sizes]
        return described

    def size_of(self, number: int) -> tuple[int, int]:
        """Width and height of the image with this ``number``."""
        return self.sizes[number % len(self.sizes)] if self.sizes else (self.width, self.height)

    def of_image(self, number: int) -> "Sampling":
        """The settings of the image with this ``number``: the same, with its own size."""
        width, height = self.size_of(number)
        return replace(self, width=width, height=height, sizes=None)

    def batches(self, numbers: Sequence[int]) -> list[list[int]]:
        """The images with these ``numbers`` in batches; all images of a batch have one size."""
        by_size: dict[tuple[int, int], list[int]] = {}
        for number in numbers:
            by_size.setdefault(self.size_of(number), []).append(number)
        count = self.batch_size
        return [same[start : start + count] for same in by_size.values() for start in range(0, len(same), count)]

    def negatives_of(self, numbers: Sequence[int]) -> list[str] | None:
        """The negative prompts of the images with these ``numbers``."""
        texts = self.negative_prompts
        return None if texts is None else [texts[number % len(texts)] for number in numbers]


@dataclass(slots=True)
class Generated:
    """N images, and their latents after every step."""

    images: Images | None  # None when only latents were asked for
    latents: Tensor | list[Tensor]  # fp32 [N, steps, ...], or N of [steps, ...], in the pipeline's own layout


def made_with(sampling: Sampling, own: Any) -> Any:
    """The scheduler that ``sampling`` asks for; ``own`` is the checkpoint's. Raises what ``sampler_for`` raises."""
    return own if sampling.sampler is None else sampler_for(sampling.sampler, own)


def calls_of(sampling: Sampling, pipe: Any, step: Callable[[], int], batched: Collection[str]) -> Calls | None:
    """How the denoiser's calls in a batch of ``pipe`` are made; None where each is computed and guided."""
    until = sampling.guidance_until
    if sampling.schedule is None and until is None:
        return None

    def is_guided(step: int) -> bool:
        return until is None or noise_levels(pipe.scheduler)[step] > until

    return Calls(sampling.schedule, step, is_guided, batched)


class Pipeline:
    """A text-to-image pipeline of ``engines`` by part.

    The mapping may open an engine when it is asked for and close the one before.
    """

    def __init__(self, engines: Mapping[str, Engine], adapter: PipelineAdapter):
        self.engines, self.adapter, self.pipe = engines, adapter, adapter.pipe
        self.own_sampler = adapter.pipe.scheduler

    def pipe_for(self, sampling: Sampling) -> Any:
        """diffusers' pipeline for images from noise, from images, or inside of masks, as ``sampling`` asks for."""
        source, pipe = sampling.source, self.adapter.pipe
        pipe.scheduler = made_with(sampling, self.own_sampler)
        if source is not None:
            pipe = remade(self.adapter.family.FROM_IMAGES[source.masks is not None], pipe)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def warn_of_long_prompts(self, prompts: Sequence[str]) -> None:
        """Log how many prompts are longer than the text encoders read."""
        tokenizer = self.adapter.tokenizer
        lengths = [len(ids) for ids in tokenizer(list(prompts), truncation=False, verbose=False)["input_ids"]]
        if longer := sum(length > tokenizer.model_max_length for length in lengths):
            LOG.warning(
                "%d of %d prompts are longer than the %d tokens that are read (the longest has %d); their rest is left "
                "out", longer, len(prompts), tokenizer.model_max_length, max(lengths),
            )  # fmt: skip

    def decode(self, numbers: Sequence[int], latents: Tensor, sampling: Sampling) -> np.ndarray:
        """The images, uint8 [B, H, W, 3], of ``latents`` in the pipeline's layout, made for these ``numbers``.

        Raises SdQuantError when an image has a pixel that is NaN or infinite, naming the prompt.
        """
        config = self.adapter.pipe.vae.config
        latents = self.adapter.unpack(latents, sampling.height, sampling.width)
        z = latents / config.scaling_factor + (getattr(config, "shift_factor", None) or 0)
        decoded = decode(self.engines["vae"], z, sampling.vae_tile).float().cpu()
        broken = [number for number, image in zip(numbers, decoded, strict=True) if not torch.isfinite(image).all()]
        if broken:
            raise SdQuantError(
                f"{self.engines['vae'].name} gave an image that is not finite for prompt {broken[0]}, of latents that "
                "are; the weights of the VAE may be stored in fewer bits than it needs: export them in fp32"
            )
        images = self.adapter.pipe.image_processor.postprocess(decoded, output_type="np")
        return (images * 255).round().astype(np.uint8)

    def noise(self, numbers: Sequence[int], sampling: Sampling) -> Tensor:
        """The start noise of the prompts of these ``numbers``, fp32 and packed, the same on every device."""
        if sampling.latents is not None:
            return self.adapter.pack(sampling.latents[[number % len(sampling.latents) for number in numbers]])
        factor, channels = self.adapter.pipe.vae_scale_factor, self.adapter.pipe.vae.config.latent_channels
        shape = (channels, sampling.height // factor, sampling.width // factor)
        seeded = [torch.Generator().manual_seed(sampling.seed + number) for number in numbers]
        return self.adapter.pack(torch.stack([torch.randn(shape, generator=generator) for generator in seeded]))

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

        ``decode=False`` returns latents alone. ``on_batch`` is called with the numbers of the prompts that are denoised
        next, ``on_step`` with the step. ``by_batch`` lets batches be denoised, here or elsewhere.
        Raises SdQuantError when a latent or an image becomes NaN or infinite, naming the prompt.
        """
        self.warn_of_long_prompts([*prompts, *(sampling.negative_prompts or ())])
        numbers = range(len(prompts)) if numbers is None else numbers
        batches = sampling.batches(numbers)
        texts = [[prompts[number] for number in batch] for batch in batches]
        negatives = [sampling.negatives_of(batch) for batch in batches]
        encoded = self.adapter.encode(texts, negatives, sampling.guidance_scale > 1)
        pipe = self.pipe_for(sampling)
        if sampling.source is not None:
            encode_images(pipe, sampling.source, numbers)
        of_batch = [sampling.of_image(batch[0]) for batch in batches]

        def denoised(place: int) -> Tensors:
            on_batch(batches[place])
            steps, final = self.denoise(pipe, batches[place], encoded[place], of_batch[place], on_step)
            return {"steps": torch.stack(steps, dim=1), "final": final}

        made = by_batch(batches, denoised, ())
        latents: dict[int, Tensor] = {}
        images: dict[int, np.ndarray] = {}
        for batch, each in zip(batches, made, strict=True):
            latents |= zip(batch, each["steps"], strict=True)
        if decode:
            for batch, each, sampled in zip(batches, made, of_batch, strict=True):
                images |= zip(batch, self.decode(batch, each["final"], sampled), strict=True)
        in_order = [latents[number] for number in numbers]
        one_shape = len({each.shape for each in in_order}) == 1
        return Generated(
            joined([images[number] for number in numbers]) if decode else None,
            torch.stack(in_order) if one_shape else in_order,
        )

    def start(self, numbers: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """The arguments of the pipeline that give the noise, or the images, that these prompts start from."""
        size, source = {"height": sampling.height, "width": sampling.width}, sampling.source
        if source is None:
            return {"latents": self.noise(numbers, sampling), **size}
        generators = [torch.Generator().manual_seed(sampling.seed + number) for number in numbers]
        start = {"image": source.images_of(numbers), "strength": source.strength, "generator": generators}
        return start if source.masks is None else start | {"mask_image": source.masks_of(numbers), **size}

    def denoise(
        self,
        pipe: Any,
        numbers: Sequence[int],
        text: Mapping[str, Any],
        sampling: Sampling,
        on_step: Callable[[int], object],
    ) -> tuple[list[Tensor], Tensor]:
        """The latents of a batch after every step, fp32 on the CPU, and the final latents as ``pipe`` returns them."""
        calls, steps = 0, list[Tensor]()

        def count() -> None:
            """Report the step: second-order samplers call the network 2n - 1 times for n steps, some others n + 1."""
            nonlocal calls
            on_step(min(calls * sampling.steps // len(pipe.scheduler.timesteps), sampling.steps_taken - 1))
            calls += 1

        def remember(step: int, values: Tensor) -> None:
            finite = torch.isfinite(values).flatten(1).all(dim=1)
            if not finite.all():
                prompt = numbers[int((~finite).nonzero()[0])]
                raise SdQuantError(
                    f"{self.engines[self.adapter.denoiser.name].name} gave a latent that is not finite for prompt "
                    f"{prompt} at step {step}; a lower quant_level or a calibration with more prompts may keep it in "
                    "range"
                )
            steps.append(values.float().cpu().clone())

        def on_step_end(pipeline, step: int, timestep, values: dict) -> dict:
            remember(step, values["latents"])
            return values

        hook: dict[str, Any] = {"callback_on_step_end": on_step_end}
        if "callback_on_step_end" not in inspect.signature(type(pipe).__call__).parameters:
            hook = {"callback": lambda step, timestep, values: remember(step, values)}
        self.adapter.denoiser.on_call = count
        self.adapter.denoiser.through = calls_of(
            sampling, pipe, lambda: len(steps), self.adapter.denoiser.part.contract.batched
        )
        final = pipe(
            **text,
            num_inference_steps=sampling.steps,
            guidance_scale=sampling.guidance_scale,
            output_type="latent",
            **self.start(numbers, sampling),
            **hook,
        )[0]
        return steps, final
