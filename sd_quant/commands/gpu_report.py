"""Run plans and torch's engines on this machine's GPU, and write their figures to one JSON file, to be sent as it is.

Runs ``quantize`` on the shipped checkpoint and on SDXL at full size with random weights, in every format that this GPU
multiplies, on every engine that is installed. A run is a process of its own, because a crash in a GPU's library ends
its process; the report has the reason of each failure. A repeated command goes on where the last one stopped.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sd_quant.commands.doctor import gpu_in_use, usable_gpu, why_not_here
from sd_quant.config.recipe import presets
from sd_quant.engines import COMPILED, PLAN_BUILDERS, RUNTIMES, WITHOUT_A_GPU, why_not
from sd_quant.errors import ResourceError, SdQuantError
from sd_quant.files import write_json
from sd_quant.places import output_path, shown
from sd_quant.process import cores
from sd_quant.quantization.formats import FORMATS
from sd_quant.report import provenance
from sd_quant.report.gpu_report import SCHEMA, GpuReport, contradiction_of, row_of, without_names
from sd_quant.report.record import DONE, RECORD

CHECKPOINTS = {  # the knobs of a run on each
    "mini": ["infer.num_prompts=8"],
    "full": ["model=sdxl_nemo", "model.path=full.nemo", "calib_size=2", "quantize.n_steps=2", "infer.num_prompts=2",
             "infer.steps=4"],
}  # fmt: skip
PRESETS = [name for name in FORMATS if name in presets()]  # presets with one format for weights and inputs
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")
FAILED, NOT_RUN = "failed", "not run"
NO_GPU = ("GPU", "0.0", "none", "none")  # in place of a GPU's properties in a rehearsal


@dataclass(frozen=True)
class Job:
    """One run of ``quantize``: a checkpoint, an engine and a format."""

    checkpoint: str
    engine: str
    fmt: str

    @property
    def name(self) -> str:
        return f"{self.checkpoint}_{self.engine}_{self.fmt}"

    def words(self) -> list[str]:
        """Return the arguments of ``python -m sd_quant``, for a process in the folder of the report."""
        runtime = [f"infer={self.engine}"]
        if self.engine in PLAN_BUILDERS:
            runtime += [f"export_trt={self.engine}", "compiled_baseline=true", "infer.cuda_graph=true"]
        else:
            runtime += ["export_trt=none", *(["infer.cuda_graph=true"] if self.engine == COMPILED else [])]
        own = [*CHECKPOINTS[self.checkpoint], f"hydra.run.dir={self.name}"]
        return ["quantize", f"quantize={self.fmt}", "quant_level=3", *runtime, *own]


def main() -> None:
    """Do all jobs and write the report. Raises SdQuantError, after the report is written, where a job failed."""
    parser = argparse.ArgumentParser("sd-quant gpu-report", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="outputs/gpu_report", help="folder of report and runs (%(default)s)")
    parser.add_argument("--checkpoints", nargs="+", choices=CHECKPOINTS, default=[*CHECKPOINTS], help="(both)")
    parser.add_argument("--formats", nargs="+", choices=PRESETS, default=PRESETS, help="(those that this GPU can)")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: OpenVINO stands in for the engines")
    given = parser.parse_args()
    out, gpu = output_path(given.out), usable_gpu()
    if gpu is None and not given.rehearse:
        raise ResourceError(
            "there is no NVIDIA GPU that torch can use, expected one that nvidia-smi lists and a torch for CUDA; see "
            "sd-quant doctor, or add --rehearse to try the command on the processor"
        )
    engines = [WITHOUT_A_GPU] if given.rehearse else [COMPILED, *PLAN_BUILDERS]
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for checkpoint in given.checkpoints:
        for job in (Job(checkpoint, engine, fmt) for engine in engines for fmt in given.formats):
            rows.append({"checkpoint": checkpoint, "engine": job.engine, "format": job.fmt, **done(job, out, gpu)})
            print(f"{checkpoint} {job.engine} {job.fmt}: {in_words(rows[-1])}", flush=True)
            write_json(out / "gpu_report.json", report_of(rows, given.rehearse))  # what stops the next leaves these
    print(f"report: {shown(out / 'gpu_report.json')}; docs/gpu.md says where to send it")
    if failed := [f"{row['checkpoint']} {row['engine']} {row['format']}" for row in rows if row["ended"] == FAILED]:
        raise SdQuantError(f"{len(failed)} of {len(rows)} rows failed: {', '.join(failed)}; the report has the reasons")


def done(job: Job, out: Path, gpu: str | None) -> dict[str, Any]:
    """Run a job in the folder ``out`` and return its measurements, or the reason why it has none."""
    if (reason := unable(job, gpu)) is not None:
        return {"ended": NOT_RUN, "reason": without_names(reason, ())}
    reason = None
    if job.checkpoint == "full" and not (out / "full.nemo").is_file():
        reason = failure_of(out, "full", "sd_quant.checkpoints.synthetic", "full.nemo")
    if (reason := reason or failure_of(out, job.name, "sd_quant", *job.words())) is not None:
        return {"ended": FAILED, "reason": reason}
    row = row_of(json.loads((out / job.name / RECORD).read_text(encoding="utf-8")), job.engine)
    if (reason := contradiction_of(row)) is not None:  # such as a run that had to simulate, which has no latency
        return {"ended": FAILED, "reason": without_names(f"its record cannot be sent: {reason}", names_here())}
    return row


def unable(job: Job, gpu: str | None) -> str | None:
    """Return why the job's engine cannot multiply numbers of its format on this machine; None if it can."""
    used = dict.fromkeys(("weights", "inputs"), [job.fmt])
    reason = why_not_here(job.engine, gpu, {job.fmt}) or why_not(job.engine, used)
    if reason or RUNTIMES[job.engine].file is not None:
        return reason
    needed = FORMATS[job.fmt].torch_compute_capability
    if needed is None or gpu is None or int(gpu.removeprefix("SM")) < 10 * needed[0] + needed[1]:
        return f"torch multiplies no {job.fmt} on {gpu}"
    return None


def failure_of(out: Path, name: str, module: str, *words: str) -> str | None:
    """Run ``python -m module words`` in ``out``, with output in ``<name>.log``; return why it failed, or None."""
    log, command = out / f"{name}.log", [sys.executable, "-m", module, *words]
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(command, cwd=out, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode
    if code == 0:
        return None
    if code == -2 or code == 130:
        raise KeyboardInterrupt
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "no output")
    return without_names(f"exit code {code}: {last}", names_here())


def names_here() -> list[str]:
    """Return the names of the host, the user and the home folder, which are removed from the report."""
    return [platform.node(), os.environ.get("USER", ""), os.path.basename(os.path.expanduser("~"))]


def report_of(rows: Sequence[dict[str, Any]], rehearsal: bool) -> dict[str, Any]:
    """Build the report, an object for JSON, from a row for each job, and check it against its schema."""
    name, capability, driver, memory = NO_GPU if rehearsal else gpu_in_use() or NO_GPU
    report = {
        "schema": SCHEMA, "made_by": "sd-quant gpu-report", "day": datetime.now(UTC).date().isoformat(),
        "rehearsal": rehearsal, "rows": rows,
        "gpu": {"name": name, "compute_capability": capability, "memory": memory, "driver": driver,
                "clocks": {} if rehearsal else dict(clocks())},
        "processor": without_names(provenance.processor()["cpu"] or platform.machine(), names_here()), "cores": cores(),
        "versions": provenance.versions(*provenance.PACKAGES),
    }  # fmt: skip
    GpuReport.model_validate(report)
    return report


def clocks() -> Iterator[tuple[str, str]]:
    """Yield the clocks and power limit of the GPU in use, as nvidia-smi prints them, where it knows them."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = ["nvidia-smi", "-i", first, f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        printed = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        found = zip(CLOCKS, printed.strip().split(", "), strict=False)
        yield from ((name, value) for name, value in found if "N/A" not in value)


def in_words(row: dict[str, Any]) -> str:
    """Return one line of text on how a job ended, with its latency and speed-up if they were measured."""
    if row["ended"] != DONE:
        return f"{row['ended']}, {row['reason']}"
    over = row["denoiser"]["over_compiled"] or row["denoiser"]["over_full_precision"]
    against = "compiled torch" if row["denoiser"]["over_compiled"] else "the unquantized engine"
    return f"{row['denoiser']['quantized_ms']:.2f} ms a call, {over['value']:.2f} times the speed of {against}"
