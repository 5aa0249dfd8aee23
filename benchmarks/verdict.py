"""Whether the verdict of a sweep holds: the same sweep five times, two of them beside a busy process.

    python benchmarks/verdict.py

Prints what each sweep recommended and with what it was tied, and for each recipe the lowest and the highest speed-up
of the five. It asks for two things: the same recommendation five times, or a tie that contains it; and that one file,
opened six times and timed in the same rounds as if it were six, differs from itself by less than 2 %. A last table
compares the time of an image that is put together from the rounds with that of whole images, made in turn.

The neighbour is a process that adds numbers on one of the machine's processors from the sweep's start to its end.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common import job_of_run

from sd_quant.config import QuantizeJob, artifact
from sd_quant.engines import load_engine
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.timed_calls import image_call
from sd_quant.metrics.intervals import Interval, ratio_interval
from sd_quant.metrics.latency import Stopping, measure_in_turn, ratio
from sd_quant.places import HOME, input_path
from sd_quant.report.recommendation import Recommendation, recommend
from sd_quant.report.record import at
from sd_quant.report.summary import Sweep, read_sweep, rows
from sd_quant.report.timing import busy_because
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.latency import part_rounds
from sd_quant.stages.load import open_model

COMMAND, KNOBS = ("quantize.py", "-m", "export_trt=none"), ("quant_level=1,2,3", "alpha=0.5,0.8")
BESIDE = (False, True, False, True, False)  # whether a busy process runs beside the sweep
NEIGHBOUR = "number = 0\nwhile True: number += 1"
MOST_APART = 0.02


@contextmanager
def neighbour(there: bool) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) if there else None
    try:
        yield
    finally:
        if process:
            process.kill()
            process.wait()


def sweep(folder: Path, beside: bool, knobs: Sequence[str]) -> tuple[Sweep, float]:
    """The sweep in ``folder``, which is run unless it is there, and the seconds that its run took."""
    command = [sys.executable, *COMMAND, *knobs, f"hydra.sweep.dir={folder}", f"cache.dir={folder.parent}/cache"]
    started = time.perf_counter()
    with neighbour(beside), folder.with_suffix(".log").open("a") as log:
        if subprocess.run(command, cwd=HOME, stdout=log, stderr=log).returncode:
            sys.exit(f"the sweep failed; {log.name} says why")
    return read_sweep(folder), time.perf_counter() - started


def same_or_tied(verdicts: list[Recommendation]) -> bool:
    """Whether one recipe, or the unquantized engine, is recommended by all or in the tie of those that are not."""
    return any(all(each.job == job or job in each.tied for each in verdicts) for job in {each.job for each in verdicts})


def opened(folder: Path) -> tuple[QuantizeJob, dict]:
    job = job_of_run(folder)
    return job, {part: load_engine(job.infer.engine, artifact(folder, "onnx", part)) for part in job.model.parts}


def one_file_often(folder: Path, times: int) -> tuple[float, list[Interval]]:
    """Of one file, opened this often and timed in the same rounds: how far the openings scatter, which is the standard
    deviation of their latencies as a share of them, and the ratio of each to the first."""
    job, _ = opened(folder)
    checkpoint, path = open_model(job.model), artifact(folder, "onnx", job.model.parts[0])
    engines = {str(number): load_engine(job.infer.engine, path) for number in range(times)}
    stopping = Stopping(200, 1, 0)
    samples = part_rounds(checkpoint, engines, checkpoint.family.DENOISER, job.infer, stopping).samples
    ratios = [ratio_interval(samples[name], samples["0"]) for name in samples]
    return statistics.stdev(math.log(each.value) for each in ratios), ratios[1:]


def whole_images(folder: Path, repeats: int) -> Interval:
    """The speed-up of whole images, unquantized and quantized in turn."""
    job, engines = opened(folder)
    checkpoint, prompts, sampling = open_model(job.model), job.infer.prompt_list(), sampling_of(job.infer)
    denoiser = checkpoint.family.DENOISER
    full = load_engine(job.infer.engine, artifact(folder / "full_precision", "onnx", denoiser))
    variants = {"full": engines | {denoiser: full}, "quantized": engines}
    calls = {name: image_call(pipeline_of(checkpoint, each), prompts, sampling) for name, each in variants.items()}
    times = measure_in_turn(calls, 2, repeats)
    return ratio(times["full"], times["quantized"])


def shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--work", type=input_path, default="outputs/benchmark_verdict", help="(%(default)s)")
    parser.add_argument("--knobs", nargs="+", default=KNOBS, help="of the sweep (%(default)s)")
    parser.add_argument("--sweeps", type=int, default=len(BESIDE), help="how many (%(default)s)")
    parser.add_argument("--images", type=int, default=40, help="whole images of the last table (%(default)s)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    verdicts, tables = [], []
    print("| sweep | beside | it says of the machine | recommended | tied | timed together, s | whole sweep, s |")
    print("|---|---|---|---|---|---|---|")
    for number, beside in enumerate(BESIDE[: options.sweeps]):
        done, seconds = sweep(options.work / f"sweep_{number}", beside, options.knobs)
        tables.append(rows(done))
        verdicts.append(recommend(done, tables[-1], lambda row: row["job"]))
        blocks = at(done.timing, "blocks") or []
        busy = "; ".join(filter(None, (busy_because(block["rounds"]) for block in blocks))) or "quiet"
        timed = sum(block["seconds"] for block in blocks)
        print(
            f"| {number + 1} | {'a busy process' if beside else 'nothing'} | {busy} | "
            f"{verdicts[-1].job or 'the unquantized engine'} | {', '.join(verdicts[-1].tied) or '–'} | {timed:.0f} | "
            f"{seconds:.0f} |", flush=True,
        )  # fmt: skip

    print("\n| recipe | speed-up of an image, all sweeps | lowest to highest | widest interval |\n|---|---|---|---|")
    for same in zip(*tables, strict=True):
        ratios = [row["image_speedup"] for row in same]
        widest = max((row["image_speedup_high"] - row["image_speedup_low"]) / row["image_speedup"] for row in same)
        apart = max(ratios) / min(ratios) - 1
        print(f"| {same[0]['job']} | {', '.join(f'{each:.3f}' for each in ratios)} | {apart:.1%} | ±{widest / 2:.1%} |")

    folders = [job.directory for job in done.jobs]
    scatter, ratios = one_file_often(folders[-1], 6)
    print(f"\nOne file opened six times scatters by {scatter:.2%}; to the first: {', '.join(map(shown, ratios))}")
    print("\n| recipe | image, put together from rounds | whole images in turn |\n|---|---|---|")
    for job in done.jobs:
        whole = whole_images(job.directory, options.images)
        print(f"| {job.name} | {shown(job.timed.image_speedup())} | {shown(whole)} |", flush=True)
    holds, equal = same_or_tied(verdicts), all(abs(each.value - 1) < MOST_APART for each in ratios)
    print(f"\nthe verdict {'holds' if holds else 'DOES NOT HOLD'}, one file is {'equal to' if equal else 'NOT'} itself")
    sys.exit(0 if holds and equal else 1)


if __name__ == "__main__":
    main()
