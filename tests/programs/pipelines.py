"""Rows of the programs that make images of a whole pipeline: optimum-intel, OpenVINO GenAI and optimum-onnx.

The command quantizes and hands over the two shipped checkpoints and a tiny Flux. Each program makes images with the
code of the result's README. Programs need 2 GB of older packages than the project.

An image needs ``LEAST_PSNR`` dB against the simulation's: codes are the same, but other roundings between layers
change all behind them (see ``inference.parity``). In torch without quantization the worse picture of the shipped SDXL
has 31.6 dB without NeMo's padding of the text, 28.9 dB with four times the size ids, 26.5 dB with the text encoders'
last state for the last but one, 25.4 dB with timesteps 40 later and 21.7 dB with the pooled text reversed.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from sd_quant.config import run_job
from sd_quant.engines.openvino import saturates
from sd_quant.metrics.memory import StageTimer
from sd_quant.stages.choose import chosen_again
from sd_quant.stages.session import open_unchecked
from sd_quant.stages.targets import rows_of

from ..zoo.families import flux
from .pictures import CALL, LATENTS, PROMPTS, by_consumer, decibels, in_torch, printed_code
from .rows import REPOSITORY, Row, python_of

TARGETS = ("openvino", "onnx")
LEAST_PSNR = 33.0
KNOBS = ("quant_level=3", "alpha=0.8", "export_trt=none", "timing.budget_s=0")
QUICK = ("calib_size=8", "quantize.n_steps=8", "infer.steps=8")


def flux_of_transformers_4(folder: Path) -> None:
    """A tiny Flux, its tokenizers described as transformers before version 5 does, which optimum-onnx needs."""
    flux(folder)
    index = json.loads((folder / "model_index.json").read_text())
    for name, kind in (("tokenizer", "CLIPTokenizerFast"), ("tokenizer_2", "T5TokenizerFast")):
        index[name][1], path = kind, folder / name / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config.pop("extra_special_tokens", None)
        path.write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps(index))


@dataclass(frozen=True)
class Case:
    """A checkpoint that is handed over, and a call of its pipelines that all consumers understand."""

    knobs: tuple[str, ...]
    call: Mapping[str, object]
    latents: np.ndarray
    make: Callable[[Path], None] | None = None  # writes the checkpoint; None: it is shipped
    genai: Mapping[str, object] | None = None  # another call, which GenAI is compared with optimum-intel by
    least_psnr: float = LEAST_PSNR


CASES = {
    "sdxl_mini": Case(("model=sdxl_mini",), CALL, LATENTS),
    # In 8 steps the simulation is 28 dB from full precision, in 20 40 dB, and consumers are as far from it. GenAI
    # passes 77 zeros for a T5 that is missing, with which the checkpoint was not trained.
    "sd3_mini": Case(
        ("model=sd3_mini", "calib_size=8"),
        CALL | {"num_inference_steps": 20, "max_sequence_length": 3},
        LATENTS,
        genai=CALL | {"max_sequence_length": 77},
    ),
    "flux": Case(
        ("model=flux", "model.width=64", "model.height=64", "model.max_sequence_length=16", *QUICK),
        {"height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 3.5, "max_sequence_length": 64},
        np.random.default_rng(0).standard_normal((len(PROMPTS), 16, 8, 8), np.float32),
        flux_of_transformers_4,
        # GenAI 2026.4.1 shifts the times between the first and the last by Flux.2's rule, so one step is compared.
        genai={"height": 64, "width": 64, "num_inference_steps": 1, "guidance_scale": 3.5, "max_sequence_length": 64},
        least_psnr=45.0,  # twice the guidance is 33.5 dB, another schedule 36.5 dB
    ),
}


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


def code_of_genai(folder: Path) -> str:
    """The same of the README's second code, once the tokenizers are made as it says before."""
    command = re.search(r"^ +(for tokenizer in .*)$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    path = f"{python_of('openvino')[0].parent}:{os.environ['PATH']}"
    quiet = {"env": os.environ | {"PATH": path}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["sh", "-ec", command[1]], check=True, cwd=folder.parent, **quiet)
    code = printed_code(folder, 1)
    return code.replace('"f32"', '"f32", LP_TRANSFORMS_MODE="NO"') if saturates() else code


def code_of_bound(folder: Path) -> str:
    """optimum-onnx with the outputs bound to memory of its own, as its GPU providers have them by default."""
    return code_of(folder).replace("('onnx'", "('onnx', use_io_binding=True")


PIPELINES = {  # by target and program: the environment, and what makes the code
    "openvino": {"optimum-intel": ("openvino", code_of), "OpenVINO GenAI": ("genai", code_of_genai)},
    "onnx": {"optimum-onnx": ("onnx", code_of), "optimum-onnx, bound": ("onnx", code_of_bound)},
}


def handed_over(name: str, targets: list[str], work: Path) -> Path:
    """A run of the case in the folder ``work``, by the command."""
    case, run = CASES[name], work / "run"
    knobs = [*case.knobs, *KNOBS]
    if case.make is not None:
        case.make(work / "checkpoint")
        knobs.append(f"model.path={work / 'checkpoint'}")
    asked = f"hand_over=[{','.join(targets)}]"
    subprocess.run([sys.executable, "quantize.py", *knobs, asked, f"hydra.run.dir={run}"], check=True, cwd=REPOSITORY)
    return run


def rows_of_case(name: str, targets: list[str], run: Path, work: Path) -> Iterator[Row]:
    """The rows of what a run of the case has handed over."""
    case, job = CASES[name], run_job(str(run))
    loaded, assignments = chosen_again(job, run, StageTimer(), open_unchecked(job.model), work)
    for target in targets:
        folder = run / "hand_over" / target
        rows = rows_of([target], assignments, loaded.checkpoint)[target][loaded.denoiser]
        simulated = in_torch(loaded.checkpoint, folder, True, rows, target, case.call, case.latents)
        for program, (place, code) in PIPELINES[target].items():
            row = Row(program, target, name, "int8", of=sum(each.format is not None for each in rows.values()))
            call, reference, row.opened = case.call, simulated, "the code of the README"

            def drawn(place: str, code: str, call: Mapping[str, object], folder: Path = folder):
                return by_consumer(python_of(place)[0], code, folder, work, call, case.latents)

            try:
                if place == "genai" and case.genai is not None:
                    call, row.opened = case.genai, f"{row.opened}, against optimum-intel"
                    reference, _ = drawn("openvino", code_of(folder), call)
                pictures, facts = drawn(place, code(folder), call)
            except subprocess.CalledProcessError as error:
                yield replace(row, opened="", verdict="FAILED", far=str(error))
                continue
            row.image, row.versions = min(decibels(reference, pictures)), str(facts["versions"])
            row.quantized = ", ".join(f"{count} {kind}" for kind, count in facts.get("kernels", {}).items())
            yield replace(row, verdict="ok" if row.image > case.least_psnr else "FAILED")


def pipeline_rows(programs: Collection[str]) -> Iterator[Row]:
    """The rows of these programs."""
    targets = [target for target, rows in PIPELINES.items() if set(rows) & set(programs)]
    for name in CASES if targets else ():
        with TemporaryDirectory() as temporary:
            work = Path(temporary)
            yield from rows_of_case(name, targets, handed_over(name, targets, work), work)
