"""What several files here share: knobs of a job that is soon done, a sweep's jobs and table, a cache to start with."""

import csv
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

QUICK = (
    "calib_size=2", "quantize.n_steps=2", "infer.steps=2", "infer.prompts=[a rocket]", "infer.num_timed_runs=1",
    "infer.num_warmup_runs=0", "timing.budget_s=0", "memory_of_parts=false",
    "export_trt=none",
)  # fmt: skip
JOBS = ["quant_level=1", "quant_level=2", "quant_level=3"]
TIMES = (
    "_ms", "_speedup", "_speedup_low", "_speedup_high", "_time", "seconds", "memory_bytes",
)  # columns that another run has otherwise  # fmt: skip


def without_times(table: Path) -> list[dict]:
    """The rows of a sweep's table."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if not name.endswith(TIMES)} for row in rows]


def link_cache(source: Path, target: Path) -> None:
    """What is in one cache, or in one folder of it, is in another."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"), copy_function=os.link)


def same(rows: list[dict], expected: list[dict]) -> bool:
    """Up to rounding: a worker with fewer cores adds the same numbers up in another order. Seen: 1e-5 of a value."""
    return len(rows) == len(expected) and all(
        row.keys() == other.keys() and all(equal(row[name], other[name]) for name in row)
        for row, other in zip(rows, expected, strict=True)
    )


def equal(value: str, other: str) -> bool:
    with suppress(ValueError):
        return float(value) == pytest.approx(float(other), rel=1e-3)
    return value == other
