"""A call of a tiny denoiser that its pipeline could make: programs compute positions themselves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sd_quant.models.checkpoint import denoiser_part
from sd_quant.models.parts import axes

from ..unit.tiny import Tiny

WIDTH, HEIGHT = 256, 288  # in pixels: ComfyUI 0.33.0 divides by zero where both sides of PixArt have less than 528


@dataclass(frozen=True)
class Called(Tiny):
    """A tiny checkpoint whose random inputs have the positions of pixels, and a mask that hides words of one text."""

    def inputs(self, seed: int = 7) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(seed)
        shapes = denoiser_part(self.checkpoint).contract.shapes(**axes(batch=2, width=WIDTH, height=HEIGHT))
        found = {
            name: torch.randn(shape, generator=random) if len(shape) > 1 else torch.full(shape, 0.5)
            for name, shape in shapes.items()
        }
        patches = torch.arange(HEIGHT / 16), torch.arange(WIDTH / 16)  # of 2 x 2 latents
        fixed = {
            "img_ids": torch.cartesian_prod(torch.zeros(1), *patches),
            "txt_ids": torch.zeros(shapes.get("txt_ids", 0)),
        }
        if mask := shapes.get("encoder_attention_mask"):
            fixed["encoder_attention_mask"] = (torch.arange(mask[1]) < torch.tensor([[mask[1]], [5]])).float()
        return found | {name: each for name, each in fixed.items() if name in found}
