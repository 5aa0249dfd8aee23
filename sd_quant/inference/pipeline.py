"""Pictures from engines: the ordinary diffusers SDXL pipeline with its networks swapped.

Scheduler, guidance and image processing stay diffusers' own. What is NeMo's: text context padded to 80 tokens (inside
the text engines), an unconditional embedding of zeros, and size ids in the order original, crop, target. Text is
encoded before the pipeline is called, so negative and positive prompts never share an engine's output buffer.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor

from sd_quant.engines.base import Engine
from sd_quant.errors import SdQuantError
from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH

LOG = logging.getLogger(__name__)


class UnetAdapter(torch.nn.Module):
    """Looks like ``UNet2DConditionModel`` to the pipeline, calls an engine with NeMo's names.

    ``on_step`` is told the denoising step of each call before it is computed; see ``denoising_step``.
    """

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, engines: Mapping[str, Engine], config, scheduler):
        super().__init__()
        self.engines, self.config, self.scheduler = engines, config, scheduler
        self.on_step: Callable[[int], object] = lambda step: None
        added_width = config.projection_class_embeddings_input_dim
        self.add_embedding = SimpleNamespace(linear_1=SimpleNamespace(in_features=added_width))

    def forward(self, sample, timestep, encoder_hidden_states, added_cond_kwargs, return_dict=False, **_):
        self.on_step(denoising_step(self.scheduler))
        output = self.engines["unet_xl"](
            x=sample,
            timesteps=timestep.to(torch.float32).expand(len(sample)),
            context=encoder_hidden_states,
            y=vector_condition(**added_cond_kwargs, width=self.config.addition_time_embed_dim),
        )
        return (output["out"].to(sample),)


class VaeConfig:
    """What the pipeline asks of the VAE when it stops at the latents: how many pixels one of them is."""

    def __init__(self, config):
        self.config = config


class PooledWidth:
    """What the pipeline asks of the second text encoder when it is given embeddings instead of prompts."""

    def __init__(self, width: int):
        self.config, self.dtype = SimpleNamespace(projection_dim=width), torch.float32


def denoising_step(scheduler) -> int:
    """Which of the ``num_inference_steps`` comes next, counted by the scheduler.

    Samplers of second order (Heun, DPM2) list 2n - 1 timesteps for n steps: both calls of a step count as that step.
    """
    return (scheduler.step_index or 0) * scheduler.num_inference_steps // len(scheduler.timesteps)


def vector_condition(text_embeds: Tensor, time_ids: Tensor, width: int) -> Tensor:
    """NeMo's ``y`` [B, P + 6 * width]: pooled text, then ``width`` sinusoids of each size id (cosines first)."""
    sizes = get_timestep_embedding(time_ids.flatten(), width, flip_sin_to_cos=True, downscale_freq_shift=0)
    return torch.cat([text_embeds, sizes.view(len(text_embeds), -1)], dim=-1)


@dataclass(slots=True)
class Sampling:
    """How pictures are made. The n-th picture starts from noise of ``seed + n``, whatever the batch size."""

    steps: int
    guidance_scale: float
    height: int
    width: int
    batch_size: int
    seed: int


@dataclass(slots=True)
class Generated:
    """``images`` uint8 [N, H, W, 3], or None when only latents were wanted; ``latents`` fp32 [N, steps, 4, h, w]."""

    images: np.ndarray | None
    latents: Tensor


class Pipeline:
    """Engines for ``unet_xl``, ``vae``, ``clip1``, ``clip2`` joined to a text-to-image pipeline.

    All text is encoded first, then every picture is denoised, then all are decoded; so ``engines`` may be a mapping
    that opens an engine when it is asked for and closes the one before.
    """

    def __init__(self, engines: Mapping[str, Engine], tokenizers, unet_config, vae_config, scheduler):
        self.engines, self.tokenizers = engines, tokenizers
        self.unet, self.vae_config = UnetAdapter(engines, unet_config, scheduler), vae_config
        pooled = unet_config.projection_class_embeddings_input_dim - 6 * unet_config.addition_time_embed_dim
        self.diffusers = StableDiffusionXLPipeline(
            vae=VaeConfig(vae_config), text_encoder=None, text_encoder_2=PooledWidth(pooled), tokenizer=None,
            tokenizer_2=None, unet=self.unet, scheduler=scheduler, add_watermarker=False,
        )  # fmt: skip
        self.diffusers.set_progress_bar_config(disable=True)

    def warn_of_long(self, prompts: Sequence[str]) -> None:
        lengths = [len(ids) for ids in self.tokenizers[0](list(prompts), truncation=False, verbose=False)["input_ids"]]
        longer = sum(length > CONTEXT_LENGTH for length in lengths)
        if longer:
            LOG.warning(
                "%d of %d prompts are longer than CLIP's %d tokens (the longest has %d); the rest of them is not read",
                longer, len(prompts), CONTEXT_LENGTH, max(lengths),
            )  # fmt: skip

    def encode(self, batches: Sequence[list[str]]) -> list[tuple[Tensor, Tensor]]:
        """Of each batch of prompts the text context, fp32 [B, 80, C], and the pooled vector, fp32 [B, P]."""
        encoded = []
        for tokenizer, part in zip(self.tokenizers, ("clip1", "clip2"), strict=True):
            encoded.append([
                self.engines[part](input_ids=torch.tensor(
                    tokenizer(prompts, padding="max_length", truncation=True, max_length=CONTEXT_LENGTH)["input_ids"]
                ))
                for prompts in batches
            ])  # fmt: skip
        return [
            (torch.cat([first["z"], second["z"]], dim=-1).float().cpu(), second["z_pooled"].float().cpu())
            for first, second in zip(*encoded, strict=True)
        ]

    def decode(self, latents: Tensor) -> np.ndarray:
        """uint8 [B, H, W, 3] of latents [B, 4, h, w]."""
        picture = self.engines["vae"](z=latents / self.vae_config.scaling_factor)["dec"].float().cpu()
        return (self.diffusers.image_processor.postprocess(picture, output_type="np") * 255).round().astype(np.uint8)

    def noise(self, indices: Sequence[int], sampling: Sampling) -> Tensor:
        """fp32 [B, 4, h, w], each picture's from its own seed, the same on every device."""
        factor = self.diffusers.vae_scale_factor
        shape = (self.unet.config.in_channels, sampling.height // factor, sampling.width // factor)
        seeded = [torch.Generator().manual_seed(sampling.seed + index) for index in indices]
        return torch.stack([torch.randn(shape, generator=generator) for generator in seeded])

    def __call__(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        *,
        numbers: Sequence[int] | None = None,
        decode: bool = True,
        on_batch: Callable[[Sequence[int]], object] = lambda numbers: None,
        on_step: Callable[[int], object] = lambda step: None,
    ) -> Generated:
        """One picture per prompt, or of the prompts whose ``numbers`` are given; each has its number's own noise.

        ``on_batch`` hears which prompts come next, ``on_step`` which step.

        Raises SdQuantError when a latent becomes NaN or infinite, naming prompt and step.
        """
        self.unet.on_step = on_step
        self.warn_of_long(prompts)
        numbers = range(len(prompts)) if numbers is None else numbers
        batches = [
            numbers[start : start + sampling.batch_size] for start in range(0, len(numbers), sampling.batch_size)
        ]
        encoded = self.encode([[prompts[index] for index in indices] for indices in batches])
        latents, finished = [], []
        for indices, (context, pooled) in zip(batches, encoded, strict=True):
            on_batch(indices)
            steps: list[Tensor] = []

            def remember(pipeline, step, timestep, values, indices=indices, steps=steps):
                finite = torch.isfinite(values["latents"]).flatten(1).all(dim=1)
                if not finite.all():
                    prompt = indices[int((~finite).nonzero()[0])]
                    raise SdQuantError(
                        f"{self.engines['unet_xl'].name} gave a latent that is not finite for prompt {prompt} at step "
                        f"{step}; a lower quant_level or a calibration with more prompts may keep it in range"
                    )
                steps.append(values["latents"].float().cpu().clone())
                return values

            finished.append(
                self.diffusers(
                    prompt_embeds=context,
                    negative_prompt_embeds=torch.zeros_like(context),
                    pooled_prompt_embeds=pooled,
                    negative_pooled_prompt_embeds=torch.zeros_like(pooled),
                    num_inference_steps=sampling.steps,
                    guidance_scale=sampling.guidance_scale,
                    height=sampling.height,
                    width=sampling.width,
                    latents=self.noise(indices, sampling),
                    callback_on_step_end=remember,
                    output_type="latent",
                ).images
            )
            latents.append(torch.stack(steps, dim=1))
        images = np.concatenate([self.decode(each) for each in finished]) if decode else None
        return Generated(images, torch.cat(latents))
