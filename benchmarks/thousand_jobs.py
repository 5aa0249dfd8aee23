"""What a sweep of a thousand jobs costs beside their work: planning, launching, the report, files and memory.

    python quantize.py quant_level=3 alpha=0.8 export_trt=none hydra.run.dir=outputs/one_run
    python benchmarks/thousand_jobs.py --run outputs/one_run
    python benchmarks/thousand_jobs.py --run outputs/one_run --launch hydra/launcher=one_host hydra.launcher.n_jobs=2

The jobs are done before the command begins, so it does everything but their work: each folder holds the files of one
real run, as links, and a record that differs in knobs, fingerprint, scores and times. Measured, each in a process of
its own: composing and checking all jobs, the report, and the whole command. What is left of the whole for each job is
the launcher's, which ``--launch`` chooses.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import re
import shutil
import sys
from functools import partial
from pathlib import Path

from measurer import add_row, run_process

from sd_quant.commands.quantize import main as quantize
from sd_quant.composition import composing, job_of
from sd_quant.files import write_json
from sd_quant.places import HOME, input_path
from sd_quant.report.provenance import made_of
from sd_quant.report.record import RECORD
from sd_quant.report.summary import SWEEP
from sd_quant.stages.job_folder import fingerprint_of, inputs_of
from sd_quant.sweep import plan_of

WAITED = re.compile(r"waited (\d+) s for it")  # of ``cache.locked``, in a job's log


def knobs_of(jobs: int) -> list[str]:
    """Vary so many jobs, a multiple of 20."""
    alphas = ",".join(f"{(number + 1) / (jobs // 20 + 1):.3f}" for number in range(jobs // 20))
    percentiles = ",".join(f"{1 - number / 20:.2f}" for number in range(10))
    return ["quant_level=2,3", f"alpha={alphas}", f"percentile={percentiles}", "timing.budget_s=0", "export_trt=none"]


def planned(knobs: list[str]) -> tuple[dict, list]:
    with composing(quantize.name):
        plan, _, jobs = plan_of(quantize.name, knobs, partial(job_of, quantize.job))
    return plan, jobs


def fill(folder: Path, run: Path, knobs: list[str]) -> int:
    """Write the sweep as its jobs would have left it; returns the number of a job's files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plan, jobs = planned(knobs)
    write_json(folder / SWEEP, plan)
    record, made = json.loads((run / RECORD).read_text(encoding="utf-8")), made_of(inputs_of(jobs[0]))
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    linked = [file for file in files if file.name != RECORD and file.suffix != ".log" and file.parts[0] != ".hydra"]
    draw = random.Random(0)
    for entry, job in zip(plan["jobs"], jobs, strict=True):
        target = folder / entry["name"]
        for file in linked:  # not what the command writes in place: it would write into the run
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.link(run / file, target / file)
        own = copy.deepcopy(record)
        own["knobs"] |= {"alpha": job.quantize.alpha, "quant_level": job.quantize.quant_level}
        own["fingerprint"] = fingerprint_of(job, made)
        psnr, shift = own["fidelity"]["psnr"], draw.gauss(0, 2)
        psnr["values"] = [value + shift for value in psnr["values"]]
        psnr |= {"mean": psnr["mean"] + shift, "min": psnr["min"] + shift}
        write_json(target / RECORD, own)
    return len(files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--run", type=input_path, required=True, help="the folder of a run, whose files the jobs have")
    parser.add_argument("--jobs", type=int, default=1000, help="a multiple of 20 (%(default)s)")
    parser.add_argument("--launch", nargs="*", default=[], help="overrides that choose a launcher")
    parser.add_argument("--work", type=input_path, default="outputs/thousand_jobs", help="(%(default)s)")
    add_row(parser)
    options = parser.parse_args()
    knobs, sweep = knobs_of(options.jobs), options.work / "sweep"
    if options.row:
        planned(knobs)
        return
    files = fill(sweep, options.run, knobs)
    print(f"{options.jobs} jobs of {files} files each", flush=True)
    steps = {
        "composing and checking": [*sys.argv, "--row", "plan"],
        "report": ["-m", "sd_quant.report", str(sweep)],
        "the whole command": [HOME / "quantize.py", "-m", *knobs, *options.launch, f"hydra.sweep.dir={sweep}"],
    }
    found = {}
    for name, command in steps.items():
        found[name] = run_process(command, options.work / "log")[1]
        seconds, peak = (found[name][key] for key in ("process_seconds", "peak_memory_bytes"))
        print(f"{name}: {seconds:.1f} s, {peak / 1e9:.2f} GB", flush=True)
    plan, report, whole = (each["process_seconds"] for each in found.values())
    print(f"a job that is done before: {(whole - plan - report) / options.jobs:.3f} s")
    waits = [float(wait) for log in sweep.glob("*/quantize.log") for wait in WAITED.findall(log.read_text())]
    print(f"waited for locks: {sum(waits):.0f} s in all, {max(waits, default=0):.0f} s at most")
    print(f"report.html: {(sweep / 'report.html').stat().st_size / 1e6:.1f} MB")
    write_json(options.work / "figures.json", found)


if __name__ == "__main__":
    main()
