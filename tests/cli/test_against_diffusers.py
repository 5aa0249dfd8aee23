"""The picture of a ``.nemo`` is that of diffusers' own pipeline of the same weights.

The archive is converted to a folder, ``from_pretrained`` loads it, networks, tokenizers and all, and makes an image in
fp32; ours makes it of the archive with the torch engines. diffusers is given NeMo's sampler, the three zeros behind the
text that NeMo pads with, and the same seed. The networks run the same code, so what differs is rounding.
"""

import pytest
import torch
from diffusers import StableDiffusionXLPipeline

from sd_quant.checkpoints.convert import convert
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, scheduler
from sd_quant.models.text_encoders import padded
from sd_quant.numbers import relative_error

pytestmark = pytest.mark.nightly

PROMPT = "a glossy icon of a lighthouse"
STEPS, GUIDANCE, SIZE, SEED = 4, 5.0, 64, 42


@torch.no_grad()
def by_diffusers(folder) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [steps, 4, h, w] and the image [H, W, 3], 0..1."""
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.scheduler = scheduler()
    pipeline.set_progress_bar_config(disable=True)
    context, unconditional, pooled, unconditional_pooled = pipeline.encode_prompt(PROMPT, device="cpu")
    steps = []

    def remember(pipeline, step, timestep, values):
        steps.append(values["latents"].clone())
        return values

    image = pipeline(
        prompt_embeds=padded(context, CONTEXT_TOKENS), pooled_prompt_embeds=pooled,
        negative_prompt_embeds=padded(unconditional, CONTEXT_TOKENS),
        negative_pooled_prompt_embeds=unconditional_pooled, num_inference_steps=STEPS, guidance_scale=GUIDANCE,
        height=SIZE, width=SIZE, generator=torch.Generator().manual_seed(SEED), callback_on_step_end=remember,
        output_type="np",
    ).images[0]  # fmt: skip
    return torch.cat(steps), torch.from_numpy(image)


def test_a_picture_is_that_of_diffusers_own_pipeline(checkpoint, tmp_path):
    """To what two orders of fp32 sums differ in over four guided steps."""
    opened = open_nemo(checkpoint)
    sampling = Sampling(STEPS, GUIDANCE, SIZE, SIZE, 1, SEED)
    made = pipeline_of(opened, load_model(opened).torch_engines())([PROMPT], sampling)
    convert(checkpoint, tmp_path / "folder")
    latents, image = by_diffusers(tmp_path / "folder")
    errors = [relative_error(theirs, ours) for theirs, ours in zip(latents, made.latents[0], strict=True)]
    assert len(errors) == STEPS and max(errors) < 1e-5
    assert (torch.from_numpy(made.images[0]) - (255 * image).round()).abs().max() <= 1
