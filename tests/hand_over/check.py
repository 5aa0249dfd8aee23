"""The folders that are handed over to other tools, loaded by those tools in environments of their own.

``make hand-over-check`` quantizes the shipped checkpoint, hands it over to each target, and has the consumer's own
class draw pictures of it, which are compared with those that the simulation draws in torch: the same prompts, noise and
sampler. Environments are made with pip under ``outputs``, once for each list of requirements. It is no part of the
tests, because consumers need older packages than the project does, 2 GB of them.

A picture of the consumer has to have at least ``LEAST_PSNR`` dB against the simulation's, and to be nearer to it than
the unquantized picture is. Both compute the same codes, but the consumer's other weights and numbers between layers are
fp16, and what rounds the other way in one layer changes all behind it (see ``inference.parity``), so they differ.
Measured in torch without quantization, the worse of the two pictures has 31.6 dB where the text is not padded as NeMo
pads it, 28.9 dB with four times the size ids, 26.5 dB with the text encoders' last state for the last but one, 25.4 dB
with timesteps 40 later and 21.7 dB with the pooled text reversed; honest consumers had 36 dB and more.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from diffusers import StableDiffusionXLPipeline

import sd_quant
from sd_quant.checkpoints.nemo_and_diffusers import write_diffusers
from sd_quant.engines.openvino import saturates
from sd_quant.hand_over import onnx_pipeline, openvino_pipeline
from sd_quant.metrics.fidelity import psnr
from sd_quant.models.checkpoint import Checkpoint, build_module, denoiser_part
from sd_quant.models.sdxl import padded
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.simulation.modelopt import simulate

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / "outputs" / "hand_over_environments"
PROMPTS = ["a glossy icon of a rocket", "a glossy icon of a red apple"]
CALL = {"height": 64, "width": 64, "num_inference_steps": 8, "guidance_scale": 5.0}
LEAST_PSNR = 33.0
Assignment = Mapping[str, LayerAssignment]
WRITERS: dict[str, Callable[[Checkpoint, Assignment, Path], None]] = {
    "openvino": openvino_pipeline.write,
    "onnx": onnx_pipeline.write,
}


def environment(target: str) -> Path:
    """The interpreter of the consumer's environment, which is made unless it has this list of requirements already."""
    requirements = HERE / f"requirements-{target}.txt"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    folder = ENVIRONMENTS / target
    python, made = folder / "bin" / "python", folder / "requirements.sha256"
    if not made.is_file() or made.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "-r", requirements], check=True)
        made.write_text(wanted)
    return python


def settings_of(target: str) -> dict[str, str]:
    """What the consumer tells its runtime, so that it computes what the codes stand for on this processor."""
    if target == "onnx":
        return {"session.x64quantprecision": "1"}
    return {"INFERENCE_PRECISION_HINT": "f32"} | ({"LP_TRANSFORMS_MODE": "NO"} if saturates() else {})


def quantized_checkpoint() -> tuple[Checkpoint, Assignment]:
    """The shipped checkpoint, and how a short calibration quantizes it at level 3."""
    model = sd_quant.open("sdxl_mini")
    quantized = model.quantize(model.calibrate(calib_size=4, n_steps=4), "int8", quant_level=3, alpha=0.8)
    return model.checkpoint, quantized.assignment


def hand_over(target: str, checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> None:
    """Write what the consumer loads. The frame of the folder is here that of diffusers."""
    write_diffusers(folder, checkpoint)
    WRITERS[target](checkpoint, assignment, folder)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()


@torch.inference_mode()
def pictures_in_torch(checkpoint: Checkpoint, assignment: Assignment, folder: Path, latents: np.ndarray) -> np.ndarray:
    """Pictures by torch, uint8 [N, H, W, 3], in diffusers' pipeline of the ``folder``, quantized by simulation."""
    networks = {component: build_module(checkpoint, component) for component in checkpoint.components}
    part = denoiser_part(checkpoint)
    tokens = part.contract.inputs["context"][1]
    if assignment:
        simulate(networks[part.component], assignment)

    def pad(unet, arguments, named):
        return arguments, named | {"encoder_hidden_states": padded(named["encoder_hidden_states"], tokens)}

    networks[part.component].register_forward_pre_hook(pad, with_kwargs=True)
    pipe = StableDiffusionXLPipeline.from_pretrained(folder, **networks, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    pictures = pipe(PROMPTS, latents=torch.from_numpy(latents), output_type="np", **CALL).images
    return (pictures * 255).round().astype(np.uint8)


def draw(target: str, folder: Path, work: Path, latents: Path) -> tuple[np.ndarray, dict[str, object]]:
    """Pictures by the consumer, and what it told of itself. Raises CalledProcessError when it fails."""
    request = {
        "target": target, "folder": str(folder), "prompts": PROMPTS, "settings": settings_of(target), "options": CALL,
        "latents": str(latents), "pictures": str(work / f"{target}.npy"), "facts": str(work / f"{target}.json"),
    }  # fmt: skip
    path = work / f"{target}_request.json"
    path.write_text(json.dumps(request), encoding="utf-8")
    subprocess.run([environment(target), HERE / "draw.py", path], check=True, cwd=work)
    facts = json.loads(Path(request["facts"]).read_text(encoding="utf-8"))
    return np.load(request["pictures"]), {"settings": request["settings"], **facts}


def decibels(reference: np.ndarray, pictures: np.ndarray) -> list[float]:
    """PSNR of each picture, infinite for identical ones."""
    return [float("inf") if score is None else score for score in psnr(reference, pictures)]


def shown(scores: list[float]) -> str:
    return ", ".join(f"{score:.1f} dB" for score in scores)


def main(targets: list[str]) -> int:
    """Check the ``targets``, all by default, and print one line per fact. 1 when one failed, else 0."""
    failed = False
    torch.set_num_threads(1)
    checkpoint, assignment = quantized_checkpoint()
    print(f"layers in INT8: {sum(layer.format is not None for layer in assignment.values())}", flush=True)
    with TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_diffusers(work / "diffusers", checkpoint)
        latents = np.random.default_rng(0).standard_normal((len(PROMPTS), 4, 8, 8), np.float32)
        np.save(work / "latents.npy", latents)
        simulated, full = (
            pictures_in_torch(checkpoint, each, work / "diffusers", latents) for each in (assignment, {})
        )
        cost = decibels(full, simulated)
        print(f"torch: simulation against full precision: {shown(cost)}", flush=True)
        for target in targets or list(WRITERS):
            try:
                hand_over(target, checkpoint, assignment, work / target)
                pictures, facts = draw(target, work / target, work, work / "latents.npy")
            except (subprocess.CalledProcessError, sd_quant.errors.SdQuantError) as error:
                print(f"{target}: FAILED: {error}", flush=True)
                failed = True
                continue
            size = sum(file.stat().st_size for file in (work / target).rglob("*") if file.is_file())
            scores = decibels(simulated, pictures)
            right = all(score > max(LEAST_PSNR, other) for score, other in zip(scores, cost, strict=True))
            failed |= not right
            facts |= {
                "MB in the folder": round(size / 1e6, 1),
                "against full precision": shown(decibels(full, pictures)),
            }
            for name, fact in facts.items():
                print(f"{target}: {name}: {fact}")
            print(f"{target}: against the simulation: {shown(scores)}: {'ok' if right else 'FAILED'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
