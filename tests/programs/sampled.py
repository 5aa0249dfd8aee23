"""Images of the shipped SDXL by a program's own sampler, against ours from its noise levels.

Noise and texts are given. The program samples with its rounded inputs and once more with weights that it dequantized.
Only the second must be ours: with INT8 two of our own images have 48 dB to each other if the noise differs by 2e-7. The
checkpoint is not calibrated, so its recipes need weights alone.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.config.recipe import own_recipe
from sd_quant.interchange import TARGETS
from sd_quant.interchange.denoiser import QuantizedDenoiser
from sd_quant.interchange.inputs import Multiplied
from sd_quant.models.checkpoint import build_module, denoiser_part
from sd_quant.models.text_encoders import padded
from sd_quant.numbers import relative_error

from ..unit.tiny import Tiny
from .pictures import PROMPTS, decibels
from .rows import REPOSITORY, Row, facts_of, listed, with_facts

CHECKPOINT, TOKENS = REPOSITORY / "checkpoints" / "sdxl_mini.nemo", 80
PRESETS = {"comfyui": "int8_dynamic", "gguf": "int8_weight_only"}
STEPS, GUIDANCE, SIZE = 12, 5.0, 64
BETAS = (0.00085, 0.012)
LEAST_PSNR, UNROUNDED = 40.0, 1e-5


@dataclass(frozen=True)
class Shipped(Tiny):
    """The shipped checkpoint with its pipeline."""

    @cached_property
    def pipe(self) -> Any:
        """diffusers' own, which the checkpoint's is derived from."""
        own = self.checkpoint.called(lambda component, network: build_module(self.checkpoint, component)).pipe
        return diffusers.StableDiffusionXLPipeline(**own.components, add_watermarker=False)

    @cached_property
    def given(self) -> dict[str, Tensor]:
        """Noise, and what the text encoders make of the prompts."""
        context, negative, pooled, negative_pooled = self.pipe.encode_prompt(
            PROMPTS, device="cpu", negative_prompt=[""] * len(PROMPTS)
        )
        noise = torch.randn(len(PROMPTS), 4, SIZE // 8, SIZE // 8, generator=torch.Generator().manual_seed(0))
        found = {"noise": noise, "pooled": pooled, "negative pooled": negative_pooled}
        found |= {"context": padded(context, TOKENS), "negative context": padded(negative, TOKENS)}
        return {name: each.contiguous() for name, each in found.items()}

    def sample(self, denoiser: nn.Module, sigmas: Tensor) -> Tensor:
        """Latents by Euler's method from these noise levels, with the nearest of the trained ones as times."""
        part, given = denoiser_part(self.checkpoint).wrap(denoiser), self.given
        first, last = (beta**0.5 for beta in BETAS)
        kept = torch.cumprod(1 - torch.linspace(first, last, 1000, dtype=torch.float64) ** 2, 0)
        trained = ((1 - kept) / kept).log() / 2
        sizes = torch.tensor([[SIZE, SIZE, 0, 0, SIZE, SIZE]] * len(PROMPTS), dtype=torch.float32)
        x = given["noise"] * (1 + sigmas[0] ** 2).sqrt()
        for sigma, following in zip(sigmas, sigmas[1:], strict=False):
            time = (trained - sigma.double().log()).abs().argmin().float().reshape(1)
            noise, plain = (
                part(x / (1 + sigma**2).sqrt(), time, given[f"{start}context"], given[f"{start}pooled"], sizes)
                for start in ("", "negative ")
            )
            x = x + (plain + GUIDANCE * (noise - plain)) * (following - sigma)
        return x

    def images(self, latents: Tensor) -> np.ndarray:
        decoded = self.pipe.vae.decode(latents / self.pipe.vae.config.scaling_factor).sample
        return (255 * (decoded / 2 + 0.5).clamp(0, 1)).round().byte().permute(0, 2, 3, 1).numpy()


@torch.no_grad()
def sampled_row(name: str, script: str, target: str, source: Path, work: Path) -> Row:
    """The row of a program's images of the shipped checkpoint."""
    shipped = Shipped(open_checkpoint(CHECKPOINT, "sdxl", io="diffusers", max_sequence_length=None))
    recipe = own_recipe(PRESETS[target])
    assert recipe is not None
    assignment = shipped.assignment(replace(recipe, smoothing="none", alpha=None), target)
    config, given, output = work / "unet" / "config.json", work / "given.safetensors", work / "output.safetensors"
    config.parent.mkdir(parents=True)
    path = TARGETS[target].module.write(shipped.checkpoint, assignment, work)
    config.write_text(shipped.pipe.unet.to_json_string(), encoding="utf-8")
    save_file(shipped.given, given)
    image = {"given": str(given), "steps": STEPS, "guidance": GUIDANCE, "width": SIZE, "height": SIZE}
    image["count"] = len(PROMPTS)
    case = {"name": "image", "target": target, "family": "sdxl", "path": str(path), "pipeline": str(work),
            "output": str(output), "image": image}  # fmt: skip
    versions, (fact,) = facts_of(script, source, [case], work)
    read = shipped.read(path, target)
    row = Row(name, target, "sdxl_mini", PRESETS[target], listed(versions), of=len(read.layers), verdict="FAILED")
    row = with_facts(row, fact)
    if output.is_file():
        made = load_file(output)
        if "exact" in made:
            ours = shipped.sample(shipped.network(weights_alone(read)), made["sigmas"])
            row.unrounded = relative_error(ours, made["exact"])
        rounded = shipped.sample(shipped.network(read), made["sigmas"])
        row.image = min(decibels(shipped.images(rounded), shipped.images(made["output"])))
        right = float(row.unrounded or 0) <= UNROUNDED and row.image >= LEAST_PSNR
        row.verdict = "ok" if right and row.missing == row.left == 0 and row.quantized == row.of else "FAILED"
    return row


def weights_alone(denoiser: QuantizedDenoiser) -> QuantizedDenoiser:
    """Without rounding of inputs; smoothing factors still multiply inputs."""
    layers = {
        name: replace(each, inputs=replace(each.inputs, then=None) if isinstance(each.inputs, Multiplied) else None)
        for name, each in denoiser.layers.items()
    }
    return replace(denoiser, layers=layers, rounded={})
