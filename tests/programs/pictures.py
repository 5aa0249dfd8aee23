"""The same images by a consumer, from the code that its card prints, and by torch.

Prompts, noise, sampler and pipeline are the same: diffusers'. Its networks are the consumer's on one side. On the other
they are ours: with what our reader reads in the consumer's files, or simulated where the consumer is ModelOpt or runs a
graph.
"""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline

from sd_quant.interchange import TARGETS
from sd_quant.interchange.denoiser import with_denoiser
from sd_quant.interchange.exported_parts import simulate_graph
from sd_quant.metrics.fidelity import psnr
from sd_quant.models.checkpoint import Checkpoint, build_module, denoiser_part
from sd_quant.models.text_encoders import padded
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.stages.targets import absent

HERE = Path(__file__).resolve().parent
PROMPTS = ["a glossy icon of a rocket", "a glossy icon of a red apple"]
CALL = {"height": 64, "width": 64, "num_inference_steps": 8, "guidance_scale": 5.0}
SIMULATOR = "diffusers_modelopt"  # whose library simulates assignments too, so images can be equal
LATENTS = np.random.default_rng(0).standard_normal((len(PROMPTS), 4, 8, 8), np.float32)


def printed_code(folder: Path, number: int = 0) -> str:
    """The code of a result's README, or that of another tool behind it."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)[number]


def by_consumer(
    python: Path | str, code: str, folder: Path, work: Path, call: Mapping = CALL, latents: np.ndarray = LATENTS
) -> tuple[np.ndarray, dict[str, object]]:
    """Pictures, uint8 [N, H, W, 3], by what the ``code`` opens, and what that told of itself. Raises CalledProcessError
    when it fails."""
    np.save(work / "latents.npy", latents)
    request = {
        "code": code, "target": folder.name, "folder": str(folder.parent), "prompts": PROMPTS, "options": dict(call),
        **{name: str(work / f"{name}.npy") for name in ("latents", "pictures")}, "facts": str(work / "facts.json"),
    }  # fmt: skip
    path = work / "request.json"
    path.write_text(json.dumps(request), encoding="utf-8")
    subprocess.run([python, HERE / "draw.py", path], check=True, cwd=work)
    return np.load(request["pictures"]), json.loads(Path(request["facts"]).read_text(encoding="utf-8"))


@torch.inference_mode()
def in_torch(
    checkpoint: Checkpoint,
    folder: Path,
    pads: bool,
    rows: Mapping[str, LayerAssignment] = {},
    target: str = "",
    call: Mapping = CALL,
    latents: np.ndarray = LATENTS,
) -> np.ndarray:
    """The same images by torch in the ``folder``'s pipeline, whose denoiser is a target's, with its ``rows``. ``pads``
    says whether the text is padded as the checkpoint was trained."""
    networks = {component: build_module(checkpoint, component) for component in checkpoint.components}
    part = denoiser_part(checkpoint)
    network = networks[part.component]
    if target and (TARGETS[target].runtime or target == SIMULATOR):
        simulate_graph(network, rows)
        quantizers = [each for name, each in network.named_modules() if name.endswith("_quantizer")]
        for buffer in (buffer for each in quantizers for buffer in each.buffers() if target == SIMULATOR):
            buffer.copy_(buffer.half())  # as they are in its file
    elif target:
        embedding = network.add_time_proj  # which NeMo's inputs have passed already, and diffusers' have not
        with_denoiser(part.wrap(network), checkpoint, TARGETS[target].module.read(folder, checkpoint))
        network.add_time_proj = embedding

    def pad(unet, arguments, named):
        tokens = part.contract.inputs["context"][1]
        return arguments, named | {"encoder_hidden_states": padded(named["encoder_hidden_states"], tokens)}

    if pads and checkpoint.family.PADDED:
        networks[part.component].register_forward_pre_hook(pad, with_kwargs=True)
    pipe = DiffusionPipeline.from_pretrained(folder, **networks, **dict.fromkeys(absent(checkpoint)))
    pipe.set_progress_bar_config(disable=True)
    noise = torch.from_numpy(latents)
    packed = pipe._pack_latents(noise, *noise.shape) if hasattr(pipe, "_pack_latents") else noise
    pictures = pipe(PROMPTS, latents=packed, output_type="np", **call).images
    return (pictures * 255).round().astype(np.uint8)


def decibels(reference: np.ndarray, pictures: np.ndarray) -> list[float]:
    """PSNR of each picture, infinite for identical ones."""
    return [float("inf") if score is None else score for score in psnr(reference, pictures)]
