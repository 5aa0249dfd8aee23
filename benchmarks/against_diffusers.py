"""Compares the pipeline of a ``.nemo`` with diffusers' own, built from the same weights.

    python benchmarks/against_diffusers.py --checkpoint <file>.nemo --size 256

The archive is converted to a folder, ``StableDiffusionXLPipeline.from_pretrained`` loads it, networks, tokenizers and
all, and makes an image in fp32; then ours makes it from the archive with the torch engines. diffusers is given NeMo's
sampler, the three zeros behind the text that NeMo pads with, and the same seed: what is compared is how weights, text,
sizes and guidance become an image. The networks run the same code, so what differs is rounding.
"""

import argparse
import gc
import json
import tempfile
from pathlib import Path

import torch
from diffusers import StableDiffusionXLPipeline

from sd_quant.checkpoints.convert import convert
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.engines.pool import Pool, Variant
from sd_quant.inference.loading import load_part, pipeline_of
from sd_quant.inference.pipeline import Generated, Sampling
from sd_quant.metrics.memory import peak_memory_bytes
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, scheduler
from sd_quant.models.text_encoders import padded
from sd_quant.numbers import relative_error
from sd_quant.places import input_path

PROMPT = "a glossy icon of a lighthouse"


def ours(checkpoint: Path, sampling: Sampling) -> Generated:
    opened = open_nemo(checkpoint)
    pool = Pool(lambda part: load_part(opened, part), most=1)
    pipeline = pipeline_of(opened, Variant(pool, {part: part for part in opened.parts()}))
    generated = pipeline([PROMPT], sampling)
    pool.close()
    return generated


@torch.no_grad()
def diffusers_own(folder: Path, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
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
        negative_pooled_prompt_embeds=unconditional_pooled, num_inference_steps=sampling.steps,
        guidance_scale=sampling.guidance_scale, height=sampling.height, width=sampling.width,
        generator=torch.Generator().manual_seed(sampling.seed), callback_on_step_end=remember, output_type="np",
    ).images[0]  # fmt: skip
    return torch.cat(steps), torch.from_numpy(image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=input_path, default="checkpoints/sdxl_mini.nemo")
    parser.add_argument("--size", type=int, default=64, help="of the image (%(default)s)")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", type=input_path, help="where the folder, as large as the checkpoint, is for a while")
    options = parser.parse_args()
    sampling = Sampling(options.steps, 5.0, options.size, options.size, 1, 42)
    generated = ours(options.checkpoint, sampling)
    gc.collect()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        folder = Path(work) / "folder"
        convert(options.checkpoint, folder)
        latents, image = diffusers_own(folder, sampling)
    found = {
        "latents": [relative_error(theirs, mine) for theirs, mine in zip(latents, generated.latents[0], strict=True)],
        "picture_worst_of_255": (torch.from_numpy(generated.images[0]) - (255 * image).round()).abs().max().item(),
        "peak_memory_bytes": peak_memory_bytes(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
