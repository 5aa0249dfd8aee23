"""Compare bits, reuse of calls and less guidance on one scale: the front of bits alone and that of all levers.

    python benchmarks/levers.py --model sdxl_mini
    python benchmarks/levers.py --model sd3_mini

runs sweeps of ``quantize.py`` with one set of prompts, and prints two tables: every recipe with its control, its twin
and its interaction; and the best recipe of bits alone and of all levers at each speed, chosen on one half of the
prompts and compared on the other, pair by pair. Speed-ups are those that the sweeps have timed together. A sweep that
is there is continued.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sd_quant.metrics.intervals import mean_interval
from sd_quant.places import HOME, input_path
from sd_quant.report.levers import TITLES, decibels, differences, lever_cells, plus_minus
from sd_quant.report.record import DONE, at
from sd_quant.report.summary import Job, Sweep, read_sweep
from sd_quant.report.table import as_markdown, table_of_texts

PROMPTS = "benchmarks/prompts/sdxl_mini_report.txt"
SWEEPS = {  # by name: the knobs that vary
    "reuse": ("quant_level=0,3", "infer.reuse=null,0.2,0.3,0.4"),
    "weights": ("quantize=int8_weight_only", "quant_level=3", "infer.reuse=null,0.4"),
    "guidance": ("quant_level=3", "infer.guidance_until={levels}"),
}
CANDIDATES = "candidates"  # the schedules among which INT8 has chosen, one after the other
LEVELS = {"sdxl_mini": "0.5", "sd3_mini": "0.15"}  # of noise
SPEEDS = (1.3, 1.6, 2.0)


@dataclass(frozen=True)
class Recipe:
    """A finished job of one of the sweeps."""

    name: str
    job: Job
    images: list[float]  # PSNR of each image in dB
    speedup: float

    @property
    def of_bits_alone(self) -> bool:
        return not at(self.job.record, "levers")


def sweep(model: str, name: str, knobs: Sequence[str], options: argparse.Namespace) -> Sweep:
    """Run the sweep in its folder, or continue it."""
    folder = options.work / model / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "quantize.py", "-m", f"model={model}", *knobs, f"infer.prompts={options.prompts}",
        f"hydra.sweep.dir={folder}", "export_trt=none", f"cache.dir={options.work}/cache", *options.knobs,
    ]  # fmt: skip
    with folder.with_suffix(".log").open("a") as log:
        if subprocess.run(command, cwd=HOME, stdout=log, stderr=log).returncode:
            sys.exit(f"the sweep failed; {log.name} says why")
    return read_sweep(folder)


def recipes_of(found: Sweep) -> list[Recipe]:
    return [
        Recipe(job.name, job, decibels(at(job.record, "fidelity")), row["image_speedup"])
        for job, row in zip(found.jobs, found.rows, strict=True)
        if job.status == DONE and row["image_speedup"]
    ]


def best(recipes: Sequence[Recipe], speed: float, choosing: slice) -> Recipe | None:
    """The closest to the reference of those that are as fast, by the prompts that choose."""
    fast = [each for each in recipes if each.speedup >= speed]
    return max(fast, key=lambda each: mean_interval(each.images[choosing]).value, default=None)


def front(recipes: Sequence[Recipe]) -> list[list[str]]:
    """A line for each speed: the best of bits alone, the best of all, and the difference on the other prompts."""
    lines, even, odd = [], slice(0, None, 2), slice(1, None, 2)
    for speed in SPEEDS:
        bits, every = best([each for each in recipes if each.of_bits_alone], speed, even), best(recipes, speed, even)
        cells = [
            f"{each.name}, {each.speedup:.2f}x, {plus_minus(each.images[odd])} dB" if each else "none is as fast"
            for each in (bits, every)
        ]
        gain = differences(every.images[odd], bits.images[odd]) if bits and every else []
        lines.append([f"{speed:g}x", *cells, plus_minus(gain, "{:+.1f}")])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl_mini", choices=LEVELS, help="as in model= (%(default)s)")
    parser.add_argument("--work", type=input_path, default="outputs/benchmark_levers", help="(%(default)s)")
    parser.add_argument("--prompts", default=PROMPTS, help="(%(default)s)")
    parser.add_argument("--sweeps", nargs="+", default=list(SWEEPS), choices=SWEEPS, help="(all)")
    parser.add_argument("--knobs", nargs="*", default=["infer.batch_size=8"], help="of all jobs (%(default)s)")
    options = parser.parse_args()
    options.work = Path(options.work)
    recipes: list[Recipe] = []
    for name in options.sweeps:
        knobs = [knob.format(levels=LEVELS[options.model]) for knob in SWEEPS[name]]
        recipes += recipes_of(sweep(options.model, name, knobs, options))
    if "reuse" in options.sweeps:
        most = next(each.job.record for each in recipes if each.name == "quant_level=3,reuse=0.4")
        schedules = at(most, "levers", "chosen", "candidates") or {}
        knobs = ["quant_level=3", f"infer.schedule={','.join(schedules)}"]
        recipes += recipes_of(sweep(options.model, CANDIDATES, knobs, options))
    with_levers = [each.job for each in recipes if not each.of_bits_alone]
    print(as_markdown(table_of_texts(TITLES, list(map(lever_cells, with_levers)))))
    for each in recipes:
        if each.of_bits_alone:
            print(f"{each.name}: {each.speedup:.2f}x, {plus_minus(each.images)} dB")
    titles = ["speed-up of an image", "best of bits alone", "best of all levers", "gain, dB"]
    print(as_markdown(table_of_texts(titles, front(recipes))))


if __name__ == "__main__":
    main()
