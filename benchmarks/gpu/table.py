"""SDXL's UNet on this GPU, by torch in fp16, INT8 and FP8 and by TensorRT, and FLUX's transformer, in one table.

    python -m benchmarks.gpu.table --out outputs/benchmarks/gpu

What is wanted most comes first: level 3 in FP8 and INT8 at batch 1, FLUX in bf16 and FP8, then other batches, whole
pictures, other ways and levels, and plans last. Each row has a time in which it has to end, learnt from the rows
before. One that crashes, hangs or does not fit into ``--seconds`` is named with its reason, and the next begins. The
table is written after every row. What a processor can do before is kept by ``benchmarks.gpu.bundle``.

The road not taken is NVIDIA's own harness (demoDiffusion), which measures no other side.
"""

import argparse
import fnmatch
import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_quant.files import write_json, write_text

from .common import add_options
from .supervise import DONE, Answer, Task, Worker, do_all

OPENING = 25.0  # seconds: torch's import, the network, eager's first call
COMPILING = 45.0  # a network, block by block
OVER_COMPILED, OVER_EAGER, SECONDS_A_PICTURE = 1.35, 2.0, 0.75  # what SDXL in FP8 is to reach on a Hopper card
PRECISIONS = {"sdxl": "fp16", "flux": "bf16"}  # of the baselines
FP8, INT8 = "fp8 level 3", "int8 level 3"
WHOLE = "fp16 compiled as a whole, max-autotune"

# What others have published, to stand beside: another machine, other software, other lengths of loop.
PUBLISHED = (
    "NeMo's documentation, H100, TensorRT 9.3, batch 1/2/4: fp16 1724/3004/5657 ms, INT8 1407/2403/4253 ms a picture; "
    "the framework 3056/4832/8434 ms",
    "NVIDIA's article, RTX 6000 Ada, 50 steps, against torch.compile in fp16: INT8 1.72x, FP8 1.95x",
    "MLPerf Inference, SDXL offline, 20 steps, a GPU: H100 2.263, H200 2.399, B200 4.071 pictures a second",
)


def row(side: str, batch: int = 1, told: bool = False) -> Task:
    """A row of the table; ``told``: with a loop and its longest kernels. Seconds as an H100 took."""
    compiling = COMPILING
    if side.startswith("fp16 eager"):
        compiling = 0.0
    elif "max-autotune" in side:
        compiling *= 8 if side == WHOLE else 2
    elif ", " in side:  # most of its kernels are those of the recipe's first row
        compiling = COMPILING / 4
    if batch > 1:
        compiling += COMPILING / 2  # of the baseline, for other shapes
    options = {"kind": "row", "side": side, "batch": batch, "told": told}
    return Task(f"{side} at batch {batch}", compiling + (8.0 if told else 4.0) * batch, options)


def flux_rows() -> list[Task]:
    """FLUX's rows, with their longest kernels. Seconds as an H100 took, the third's guessed."""
    seconds = {"bf16 compiled": 48.0, "fp8 level 3": 25.0, "bf16 eager": 8.0, "fp8 level 3, eager": 20.0}
    options = {"kind": "row", "batch": 1, "told": True}
    return [Task(f"flux {side} at batch 1", each, options | {"side": f"flux {side}"}) for side, each in seconds.items()]


def picture(side: str, batch: int) -> Task:
    options = {"kind": "picture", "side": side, "batch": batch}
    return Task(f"pictures by {side} at batch {batch}", COMPILING + 15.0 * batch, options)


def plan(library: str, recipe: str | None, batch: int) -> Task:
    options = {"kind": "plan", "library": library, "recipe": recipe, "batch": batch}
    return Task(f"{library} {recipe or 'fp16'} at batch {batch}", 240.0, options)


def tasks() -> list[Task]:
    """All rows, by worth."""
    first = [row("fp16 compiled", told=True), row(FP8, told=True), row(INT8, told=True)]
    autotuned = "max-autotune"
    return [
        *first,
        *flux_rows(),
        row(FP8, 4, told=True),
        picture(FP8, 4),
        row(FP8, 2, told=True),
        picture(FP8, 1),
        row(f"{FP8}, {autotuned}"),
        row(WHOLE),
        row(f"{INT8}, {autotuned}"),
        *(row(INT8, batch, told=True) for batch in (4, 2)),
        *(row(f"{FP8}, {way}") for way in ("torch's products", "the kernel's products")),
        row("fp8 level 3, scales per row"),
        *(row(f"{fmt} level {level}") for level in (2.5, 1) for fmt in ("fp8", "int8")),
        row("fp8 level 4"),
        *(
            plan(library, recipe, batch)
            for library in libraries()
            for batch in (1, 2, 4)
            for recipe in (None, FP8, INT8)
        ),
    ]


def libraries() -> Iterator[str]:
    for name in ("tensorrt", "tensorrt_rtx"):
        if importlib.util.find_spec(name) and importlib.util.find_spec("onnx"):
            yield name


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_options(parser)
    parser.add_argument("--seconds", type=float, default=480, help="in which all ends (%(default)s)")
    parser.add_argument("--least", type=float, default=60, help="seconds that every row may take (%(default)s)")
    parser.add_argument("--rows", nargs="+", default=["*"], help="only rows whose name matches, such as 'fp8*batch 1'")
    parser.add_argument("--list", action="store_true", help="name the rows in their order, with the seconds expected")
    parser.add_argument("--rehearse", action="store_true", help="with a row that crashes and one that hangs")
    parser.add_argument("--out", type=Path, help="a folder for table.md and table.json")
    return parser.parse_args()


def chosen_tasks(chosen: argparse.Namespace) -> list[Task]:
    found = [task for task in tasks() if any(fnmatch.fnmatch(task.name, pattern) for pattern in chosen.rows)]
    if chosen.on_cpu:  # where the kernel does not run
        found = [task for task in found if "the kernel's products" not in task.name]
    if chosen.rehearse:
        found[1:1] = [
            Task("a row that crashes", 1.0, {"kind": "crash"}),
            Task("a row that hangs", 1.0, {"kind": "hang"}),
        ]
    return found


# --------------------------------------------------------------------------------------------------- what is written


def is_wanted(row: Mapping[str, Any]) -> bool:
    return row["ended"] == DONE and "p50_ms" in row


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The targets beside the results, for every batch and for whole images."""
    told, done = [], [row for row in rows if is_wanted(row)]
    for network, precision in PRECISIONS.items():
        quantized = [row for row in done if row["network"] == network and row.get("recipe")]
        for batch in sorted({row["batch"] for row in quantized}):
            sides = [row for row in quantized if row["batch"] == batch]
            best = max(sides, key=lambda row: row["over_compiled"])
            line = (
                f"batch {batch}: {best['name']} is the fastest quantized row, {interval_of(best, 'over_compiled')} the "
                f"speed of compiled {precision} and {interval_of(best, 'over_eager')} that of eager"
            )
            if network == "sdxl":  # nothing was promised of others
                reached = best["over_compiled"] >= OVER_COMPILED and best["over_eager"] >= OVER_EAGER
                line += f"; wanted {OVER_COMPILED}x and {OVER_EAGER}x: " + ("reached" if reached else "not reached")
            told.append(line)
    pictures = [row for row in rows if row.get("seconds_a_picture")]
    if pictures:
        best = min(pictures, key=lambda row: row["seconds_a_picture"])
        reached = best["seconds_a_picture"] <= SECONDS_A_PICTURE
        told.append(
            f"{best['name']}: {best['seconds_a_picture']:.2f} s a picture of {best['steps']} steps, compiled fp16 "
            f"{best['compiled_seconds_a_picture']:.2f} s; wanted {SECONDS_A_PICTURE} s: "
            + ("reached" if reached else "not reached")
        )
    return told + [f"DOUBTED: {row['name']}: {doubt}" for row in rows for doubt in row.get("doubts", ())]


def interval_of(row: Mapping[str, Any], key: str) -> str:
    low, high = row[f"{key}_interval"]
    return f"{row[key]:.2f}x ({low:.2f} to {high:.2f})"


COLUMNS = {  # of the table: what they are called, and how they are written
    "name": "{}",
    "p50_ms": "{:.2f}",
    "eager_ms": "{:.2f}",
    "compiled_ms": "{:.2f}",
    "over_compiled": "{:.2f}x",
    "over_eager": "{:.2f}x",
    "error": "{:.2g}",
    "simulation_error": "{:.2g}",
    "memory_gb": "{:.1f}",
    "loop_ms": "{:.0f}",
    "pictures_a_second": "{:.2f}",
    "share_of_fp16_peak": "{:.2f}",
    "share_of_int8_peak": "{:.2f}",
    "share_of_fp8_peak": "{:.2f}",
    "seconds": "{:.0f}",
}


def markdown(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    done = [row for row in rows if is_wanted(row)]
    columns = [column for column in COLUMNS if any(row.get(column) is not None for row in done)]
    lines = [columns, ["---"] * len(columns)]
    lines += [[COLUMNS[column].format(row[column]) if row.get(column) is not None else "–" for column in columns]
              for row in done]  # fmt: skip
    told = [f"| {' | '.join(line)} |" for line in lines]
    told += ["", *(f"- {line}" for line in verdict(rows))]
    told += [f"- {row['name']}: {row['ended']}, {row['reason']}" for row in rows if row["ended"] != DONE]
    told += ["", *(f"- {key}: {value}" for key, value in about.items()), "", "Published elsewhere:", ""]
    told += [f"- {line}" for line in PUBLISHED]
    for each in rows:
        if pictures := {key: value for key, value in each.items() if key.endswith("_ms") and "text_ms" in each}:
            told += ["", f"{each['name']}: " + ", ".join(f"{key} {value:.1f}" for key, value in pictures.items())]
        if each.get("kernels"):
            told += ["", f"Longest kernels of {each['name']}, ms a call:", ""]
            told += [f"- {found['ms']:.2f} in {found['calls']}: `{found['kernel']}`" for found in each["kernels"]]
    return "\n".join([*told, ""])


def main() -> int:
    chosen, start = options(), time.monotonic()
    if chosen.list:
        for task in chosen_tasks(chosen):
            print(f"{task.seconds:5.0f} s  {task.name}")
        return 0
    import torch

    from sd_quant.report.provenance import machine, versions

    if not torch.cuda.is_available() and not chosen.on_cpu:
        print("there is no NVIDIA GPU on this machine; --on-cpu tries the script without one")
        return 4
    rows: list[dict[str, Any]] = []
    about = {"machine": machine(), "versions": versions("torch", "triton", "diffusers", "tensorrt", "tensorrt_rtx")}

    def told(task: Task, answer: Answer) -> None:
        seconds = time.monotonic() - start - sum(row["seconds"] for row in rows)
        about.update({key: value for key, value in answer.pop("about", {}).items() if value})
        rows.append({"name": task.name, **task.options, **answer, "seconds": seconds})
        what = f"{answer['p50_ms']:.2f} ms" if "p50_ms" in answer else answer.get("reason", "")
        print(f"{task.name}: {answer['ended']}, {what} ({seconds:.0f} s)", flush=True)
        if chosen.out:  # after every row, so that what stops the next leaves these
            write_json(chosen.out / "table.json", {"rows": rows, "verdict": verdict(rows), **about})
            write_text(chosen.out / "table.md", markdown(rows, about))

    command = [sys.executable, "-m", "benchmarks.gpu.worker", *worker_options(chosen)]
    do_all(Worker(command, OPENING), chosen_tasks(chosen), start + chosen.seconds, chosen.least, told)
    print("\n".join(verdict(rows)))
    print(f"{time.monotonic() - start:.0f} s" + (f"; written: {chosen.out}" if chosen.out else ""))
    wrong = [row for row in rows if row["ended"] not in (DONE, "not begun") or row.get("doubts")]
    return 1 if wrong or not any(is_wanted(row) for row in rows) else 0


def worker_options(chosen: argparse.Namespace) -> list[str]:
    """The options that the worker is given, as it reads them."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    given = []
    for action in parser._actions:
        value = getattr(chosen, action.dest, None)
        if action.dest != "help" and value not in (None, False):
            given += [action.option_strings[0], *([] if value is True else [str(value)])]
    return given


if __name__ == "__main__":
    sys.exit(main())
