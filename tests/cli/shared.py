"""Helpers of the command-line tests: a short job, readers of what jobs and sweeps leave, a cache to start with."""

import csv
import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

QUICK = (
    "calib_size=2", "quantize.n_steps=2", "infer.steps=2", "infer.prompts=[a rocket]", "infer.num_timed_runs=1",
    "infer.num_warmup_runs=0", "timing.budget_s=0", "export_trt=none",
)  # fmt: skip
PROMPTS = ["a glossy icon of a rocket", "a glossy icon of a teapot"]
SAMPLING = ("infer.steps=5", "infer.num_timed_runs=3", "infer.num_warmup_runs=1")  # of those prompts, by the main job
JOBS = ["quant_level=1", "quant_level=2", "quant_level=3"]
# Columns that another run has otherwise.
TIMES = ("_ms", "_speedup", "_speedup_low", "_speedup_high", "_time", "seconds", "memory_bytes", "recommended")


def well(result: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """Asserts that a command has ended well."""
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def prompts_knob(prompts: Iterable[str]) -> str:
    return f"infer.prompts=[{','.join(prompts)}]"


def json_of(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def record_of(job: Path) -> dict:
    return json_of(job / "metrics.json")


def onnx_path(job: Path, part: str) -> Path:
    return job / "onnx" / part / f"{part}.onnx"


def rows_of(table: Path) -> list[dict]:
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def pixels(path: Path) -> np.ndarray:
    """Pixels of an image as signed numbers, so that they can be subtracted."""
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def images_in(folder: Path) -> dict[str, np.ndarray]:
    return {path.stem: pixels(path) for path in sorted(folder.glob("0*.png"))}


def without_times(table: Path) -> list[dict]:
    """The rows of a sweep's table."""
    return [{name: value for name, value in row.items() if not name.endswith(TIMES)} for row in rows_of(table)]


def link_cache(source: Path, target: Path) -> Path:
    """What is in one cache, or in one folder of it, is in another."""
    return shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"), copy_function=os.link)


def same(rows: list[dict], expected: list[dict]) -> bool:
    """Up to rounding: a worker with fewer cores adds the same numbers up in another order. Seen: 1e-5 of a value."""
    return [row.keys() for row in rows] == [row.keys() for row in expected] and all(
        equal(value, other[name]) for row, other in zip(rows, expected, strict=True) for name, value in row.items()
    )


def equal(value: str, other: str) -> bool:
    with suppress(ValueError):
        return float(value) == pytest.approx(float(other), rel=1e-3)
    return value == other
