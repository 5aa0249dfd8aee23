"""Tests that a sweep's recommendation is reproducible: its engines are timed five times, twice beside a busy process.

    python benchmarks/verdict.py

Prints the recommendation of each timing with its ties, and the speed-ups of each recipe. Recipes whose graphs differ in
constants alone are equally fast. So three things are required: such recipes are within 3 % of each other each time; the
recommendation is the same five times, or inside of a tie that contains it; and one file that is opened six times and
timed as six engines differs from itself by less than 2 %.

Three more tables compare a speed-up with other measurements of it: two recipes without the others beside them; each
engine alone in a process that calls it for some seconds; and whole images, made in turn.

The busy process adds numbers on one of the machine's processors.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from common import job_of_run

from sd_quant.config import QuantizeJob, artifact
from sd_quant.engines import load_engine
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.timed_calls import image_call, part_call, samples_per_call
from sd_quant.metrics.intervals import Interval, ratio_interval
from sd_quant.metrics.latency import measure_in_turn, ratio, wall_clock
from sd_quant.models.checkpoint import contracts_of
from sd_quant.places import HOME, input_path
from sd_quant.report.recommendation import Recommendation, recommend
from sd_quant.report.record import at
from sd_quant.report.summary import Sweep, read_sweep
from sd_quant.report.timing import busy_because
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.latency import denoiser_rounds
from sd_quant.stages.session import open_unchecked

COMMAND, KNOBS = ("quantize.py", "-m", "export_trt=none"), ("quant_level=3", "alpha=0.45,0.5,0.55,0.6")
BESIDE = (False, True, False, True, False)  # whether a busy process runs beside the sweep
NEIGHBOUR = "number = 0\nwhile True: number += 1"
MOST_APART, SAME_GRAPH = 0.02, 0.03


@contextmanager
def neighbour(there: bool) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) if there else None
    try:
        yield
    finally:
        if process:
            process.kill()
            process.wait()


def sweep(folder: Path, knobs: Sequence[str]) -> None:
    """Run the sweep in ``folder``, or continue it."""
    command = [sys.executable, *COMMAND, *knobs, f"hydra.sweep.dir={folder}", f"cache.dir={folder.parent}/cache"]
    with folder.with_suffix(".log").open("a") as log:
        if subprocess.run(command, cwd=HOME, stdout=log, stderr=log).returncode:
            sys.exit(f"the sweep failed; {log.name} says why")


def timed_again(folder: Path, beside: bool) -> tuple[Sweep, float]:
    """Time the sweep's engines again in a process of their own; the sweep, and the seconds that this took."""
    started = time.perf_counter()
    with neighbour(beside):
        subprocess.run(
            [sys.executable, "-m", "sd_quant.stages.time_sweep", folder],
            cwd=HOME,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return read_sweep(folder), time.perf_counter() - started


def same_or_tied(verdicts: list[Recommendation]) -> bool:
    """Whether all recommend one recipe, or the unquantized engine, or tie with it."""
    return any(all(each.job == job or job in each.tied for each in verdicts) for job in {each.job for each in verdicts})


def opened(folder: Path) -> tuple[QuantizeJob, dict]:
    job = job_of_run(folder)
    return job, {part: load_engine(job.infer.engine, artifact(folder, "onnx", part)) for part in job.model.parts}


def one_file_often(folder: Path, times: int) -> list[Interval]:
    """The ratios of one file to itself, opened ``times`` times and timed in the same rounds."""
    job, _ = opened(folder)
    checkpoint, path = open_unchecked(job.model).checkpoint, artifact(folder, "onnx", job.model.parts[0])
    engines = {str(number): load_engine(job.infer.engine, path) for number in range(times)}
    rounds = denoiser_rounds(checkpoint, engines, job.infer, replace(job.timing, budget_s=3 * job.timing.budget_s))
    samples = rounds.samples
    return [ratio_interval(samples[name], samples["0"], rounds.openings, list(samples.values())) for name in samples][
        1:
    ]


def without_others(folders: Sequence[Path]) -> list[Interval]:
    """The speed-ups of the denoisers of two jobs, without the others beside them."""
    job, _ = opened(folders[0])
    checkpoint, part, runtime = open_unchecked(job.model).checkpoint, job.model.parts[0], job.infer.engine
    engines = {"full": load_engine(runtime, artifact(folders[0] / "full_precision", "onnx", part))}
    engines |= {str(folder): load_engine(runtime, artifact(folder, "onnx", part)) for folder in folders}
    rounds = denoiser_rounds(checkpoint, engines, job.infer, job.timing)
    full, *others = beside = list(rounds.samples.values())
    return [ratio_interval(full, each, rounds.openings, beside) for each in others]


def alone(folder: Path, processes: int, seconds: float) -> list[float]:
    """Milliseconds of a call of the file in a folder, repeated for ``seconds`` in each of some processes."""
    code = f"import verdict; print(verdict.looped({str(folder)!r}, {seconds}))"
    command = [sys.executable, "-c", code]
    return [float(subprocess.check_output(command, cwd=Path(__file__).parent)) for _ in range(processes)]


def looped(folder: str, seconds: float) -> float:
    """The median milliseconds of a call; ``folder`` is a job's, or its full_precision."""
    job = job_of_run(Path(folder.removesuffix("/full_precision")))
    checkpoint, part, sampling = open_unchecked(job.model).checkpoint, job.model.parts[0], sampling_of(job.infer)
    engine = load_engine(job.infer.engine, artifact(Path(folder), "onnx", part))
    call = part_call(engine, contracts_of(checkpoint)[part], samples_per_call(checkpoint, part, sampling), sampling)
    wall_clock(call)
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        times.append(wall_clock(call))
    return statistics.median(times)


def whole_images(folder: Path, repeats: int) -> Interval:
    """The speed-up of whole images, unquantized and quantized in turn."""
    job, engines = opened(folder)
    checkpoint, prompts, sampling = (
        open_unchecked(job.model).checkpoint,
        job.infer.prompt_list(),
        sampling_of(job.infer),
    )
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
    parser.add_argument("--times", type=int, default=len(BESIDE), help="how often it is timed (%(default)s)")
    parser.add_argument("--processes", type=int, default=3, help="that call each engine alone (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="for which each of them does (%(default)s)")
    parser.add_argument("--images", type=int, default=40, help="whole images of the last table (%(default)s)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    folder, verdicts, tables = options.work / "sweep", [], []
    sweep(folder, options.knobs)
    print("| timed | beside | it says of the machine | openings | recommended | tied | seconds |")
    print("|---|---|---|---|---|---|---|")
    for number, beside in enumerate(BESIDE[: options.times]):
        done, seconds = timed_again(folder, beside)
        tables.append(done.rows)
        verdicts.append(recommend(done, lambda row: row["job"]))
        blocks = at(done.timing, "blocks") or []
        busy = "; ".join(filter(None, (busy_because(block["rounds"]) for block in blocks))) or "quiet"
        openings = ", ".join(str(len(block["rounds"]["openings"])) for block in blocks)
        print(
            f"| {number + 1} | {'a busy process' if beside else 'nothing'} | {busy} | {openings} | "
            f"{verdicts[-1].job or 'the unquantized engine'} | {', '.join(verdicts[-1].tied) or '–'} | {seconds:.0f} |",
            flush=True,
        )
    apart = [
        max(ratios) / min(ratios) - 1 for ratios in ([row["denoiser_speedup"] for row in table] for table in tables)
    ]
    print(f"\nThe recipes' denoisers are apart by {', '.join(f'{each:.1%}' for each in apart)}")
    print("\n| recipe | speed-up of an image, each time | lowest to highest | widest interval |\n|---|---|---|---|")
    for same in zip(*tables, strict=True):
        ratios, name = [row["image_speedup"] for row in same], same[0]["job"]
        widest = max((row["image_speedup_high"] - row["image_speedup_low"]) / row["image_speedup"] for row in same)
        each_time = ", ".join(f"{each:.3f}" for each in ratios)
        print(f"| {name} | {each_time} | {max(ratios) / min(ratios) - 1:.1%} | ±{widest / 2:.1%} |", flush=True)

    ratios = one_file_often(done.jobs[-1].directory, 6)
    print(f"\nOne file opened six times, to the first: {', '.join(map(shown, ratios))}", flush=True)
    print("\n| recipe | denoiser in the sweep | with one other beside it | alone in a process |\n|---|---|---|---|")
    pair, often = done.jobs[:2], (options.processes, options.seconds)
    full = alone(done.jobs[0].directory / "full_precision", *often)
    for job, found in zip(pair, without_others([job.directory for job in pair]), strict=True):
        calls = alone(job.directory, *often)
        each = ", ".join(f"{a:.2f} / {b:.2f}" for a, b in zip(full, calls, strict=True))
        ratio_alone = statistics.median(full) / statistics.median(calls)
        print(
            f"| {job.name} | {shown(job.timed.denoiser_speedup())} | {shown(found)} | {ratio_alone:.3f} ({each} ms) |",
            flush=True,
        )
    print("\n| recipe | image, put together from rounds | whole images in turn |\n|---|---|---|")
    for job in done.jobs:
        whole = whole_images(job.directory, options.images)
        print(f"| {job.name} | {shown(job.timed.image_speedup())} | {shown(whole)} |", flush=True)
    holds, equal = same_or_tied(verdicts), all(abs(each.value - 1) < MOST_APART for each in ratios)
    alike = options.knobs != KNOBS or max(apart) < SAME_GRAPH
    print(
        f"\nthe verdict {'holds' if holds else 'DOES NOT HOLD'}, one file is {'equal to' if equal else 'NOT'} itself, "
    )
    print(f"recipes of one graph are {'alike' if alike else 'NOT alike'}")
    sys.exit(0 if holds and equal and alike else 1)


if __name__ == "__main__":
    main()
