"""What is handed over to optimum-intel and optimum-onnx, loaded by those in environments of their own.

``make hand-over-check`` quantizes the shipped checkpoint by the command, which hands it over, and has each consumer
draw pictures with the code of the result's README, which are compared with the simulation's. Environments are made with
pip under ``outputs``, once for each list of requirements: consumers need older packages than the project, 2 GB of them.

A picture of the consumer has to have at least ``LEAST_PSNR`` dB against the simulation's. Both compute the same codes,
but the consumer's numbers between layers are others, and what rounds the other way in one layer changes all behind it
(see ``inference.parity``), so they differ. Measured in torch without quantization, the worse of the two pictures has
31.6 dB where the text is not padded as NeMo pads it, 28.9 dB with four times the size ids, 26.5 dB with the text
encoders' last state for the last but one, 25.4 dB with timesteps 40 later and 21.7 dB with the pooled text reversed.
"""

import hashlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sd_quant.config import run_job
from sd_quant.engines.openvino import saturates
from sd_quant.metrics.memory import StageTimer
from sd_quant.stages.hand_over import assignment_of, rows_of
from sd_quant.stages.session import open_unchecked

from .pictures import HERE, by_consumer, decibels, in_torch, printed_code

REPOSITORY = HERE.parents[1]
ENVIRONMENTS = REPOSITORY / "outputs" / "hand_over_environments"
TARGETS = ("openvino", "onnx")
LEAST_PSNR = 33.0
KNOBS = ("quant_level=3", "alpha=0.8", "export_trt=none", "timing.budget_s=0")


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


def code_of(folder: Path) -> str:
    """The code of the README, told of a processor that saturates as docs/hand_over.md says."""
    code = printed_code(folder)
    if not saturates():
        return code
    if folder.name == "openvino":
        return code.replace('"f32"', '"f32", "LP_TRANSFORMS_MODE": "NO"')
    options = "import onnxruntime\noptions = onnxruntime.SessionOptions()\n"
    options += 'options.add_session_config_entry("session.x64quantprecision", "1")\n'
    return options + code.replace("('onnx'", "('onnx', session_options=options")


def shown(scores: list[float]) -> str:
    return ", ".join(f"{score:.1f} dB" for score in scores)


def main(targets: list[str]) -> int:
    """Check the ``targets``, all by default, and print one line per fact. 1 when one failed, else 0."""
    failed, targets = False, targets or list(TARGETS)
    torch.set_num_threads(1)
    with TemporaryDirectory() as temporary:
        work, run = Path(temporary), Path(temporary) / "run"
        asked = f"hand_over=[{','.join(targets)}]"
        command = [sys.executable, "quantize.py", *KNOBS, asked, f"hydra.run.dir={run}"]
        subprocess.run(command, check=True, cwd=REPOSITORY)
        job = run_job(str(run))
        loaded, assignment = assignment_of(job, run, StageTimer(), open_unchecked(job.model), work)
        for target in targets:
            folder, rows = run / "hand_over" / target, rows_of([target], assignment)[target]
            simulated = in_torch(loaded.checkpoint, folder, True, rows, target)
            full = in_torch(loaded.checkpoint, folder, True)
            try:
                pictures, facts = by_consumer(environment(target), code_of(folder), folder, work)
            except subprocess.CalledProcessError as error:
                print(f"{target}: FAILED: {error}", flush=True)
                failed = True
                continue
            facts["simulation against full precision"] = shown(decibels(full, simulated))
            facts["against full precision"] = shown(decibels(full, pictures))
            scores = decibels(simulated, pictures)
            right = min(scores) > LEAST_PSNR
            failed |= not right
            for name, fact in facts.items():
                print(f"{target}: {name}: {fact}")
            print(f"{target}: against the simulation: {shown(scores)}: {'ok' if right else 'FAILED'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
