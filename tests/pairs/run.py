"""``python -m tests.run pairs``: every knob at the ends of its range, in all pairs, through the command.

A row sets every knob of ``ends`` to one of its values, so one job tries some thousand pairs. Rows are drawn until each
pair of values has been in one, or is refused by the checks alone. A job has to end well, or with one sentence that
refuses it. The road not taken is a tool for covering arrays, which would have to be told in its own language what two
knobs may not be together; here the configuration's own checks are asked.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from sd_quant.composition import job_of
from sd_quant.config import QuantizeJob
from sd_quant.errors import SdQuantError
from sd_quant.places import CONF

from ..cli.forking import forked
from ..zoo.families import sd15
from .ends import DEPENDING, ENDS

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]
FIRST: Row = {name: values[0] for name, values in ENDS.items()}


def arguments(row: Row, folder: Path) -> list[str]:
    knobs = [f"{name}={value.replace('{folder}', str(folder))}" for name, value in row.items()]
    return ["model=sd15", f"model.path={folder}/model", *knobs]


def allowed(row: Row, folder: Path) -> bool:
    """Whether the configuration's checks let the job start."""
    try:
        job_of(QuantizeJob, compose("quantize", arguments(row, folder)))
    except (SdQuantError, HydraException):
        return False
    return True


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(sorted(row.items()), 2))


def every_pair() -> set[Pair]:
    return {tuple(sorted(((a, x), (b, y)))) for a, b in combinations(ENDS, 2) for x in ENDS[a] for y in ENDS[b]}


def rows(draw: random.Random, folder: Path, missing: set[Pair]) -> Iterator[Row]:
    """Rows until none of the pairs is ``missing``: whoever takes them removes those that have been tried. A pair that
    the checks refuse in all rows is removed here."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert allowed(FIRST, folder)
        while missing:
            (a, x), (b, y) = draw.choice(sorted(missing))
            row = next((row for row in starts(a, x, b, y, draw) if allowed(row, folder)), None)
            if row is None:
                missing.discard(((a, x), (b, y)))
                continue
            others = ENDS.keys() - {a, b} - set(DEPENDING)
            if not {a, b} & set(DEPENDING):
                others.add(draw.choice(DEPENDING))
            for name in draw.sample(sorted(others), len(others)):
                gains = {value: len(pairs_of(row | {name: value}) & missing) for value in ENDS[name]}
                best = max(gains, key=lambda value: gains[value])
                if gains[best] > gains[row[name]] and allowed(row | {name: best}, folder):
                    row[name] = best
            missing.discard(((a, x), (b, y)))
            yield row


def starts(a: str, x: str, b: str, y: str, draw: random.Random) -> Iterator[Row]:
    """Rows with both values: the first values elsewhere, and then with others that these may need."""
    row = FIRST | {a: x, b: y}
    yield row
    others = sorted(ENDS.keys() - {a, b})
    for name in others:
        yield from (row | {name: value} for value in ENDS[name][1:])
    for _ in range(100):
        yield row | {name: draw.choice(ENDS[name]) for name in draw.sample(others, 3)}


def problem(code: int, stdout: str, stderr: str) -> str | None:
    """What is wrong with how the job ended, or None."""
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    if "Traceback" in stdout + stderr or "Warning" in stderr:
        return f"ended with {code} and a traceback: {(stdout + stderr)[-1500:]}"
    if code == 0:
        return None if not errors else f"ended with 0 and {errors[0]}"
    return None if code in (1, 2, 3, 4) and len(errors) == 1 else f"ended with {code}: {stderr[-1500:]}"


def run(wanted: argparse.Namespace) -> int:
    start, codes, wrong = time.monotonic(), Counter(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sd15(folder / "model")
        missing = every_pair()
        total = len(missing)
        with forked(folder) as command:
            for number, row in enumerate(rows(random.Random(wanted.seed), folder, missing)):
                if number >= wanted.jobs:
                    break
                begun = time.monotonic()
                ended = command("quantize.py", *arguments(row, folder), f"hydra.run.dir={folder}/run{number}")
                codes[ended.returncode] += 1
                if ended.returncode == 0:
                    missing -= pairs_of(row)
                told = next((line for line in ended.stderr.splitlines() if line.startswith("error: ")), "")
                seconds = time.monotonic() - begun
                print(f"job {number + 1}: {ended.returncode} in {seconds:.0f} s, {len(missing)} of {total} pairs left "
                      f"{told[:200]}", flush=True)  # fmt: skip
                if found := problem(ended.returncode, ended.stdout, ended.stderr):
                    wrong.append(found)
                    changed = {name: value for name, value in row.items() if value != FIRST[name]}
                    print(f"WRONG: {json.dumps(changed)}\n{found}", flush=True)
    print(f"{codes.total()} jobs ended with {dict(codes)}, {len(wrong)} of them wrongly; "
          f"{time.monotonic() - start:.0f} s")  # fmt: skip
    return 1 if wrong else 0
