"""The table of programs: its rows, the kept ones, and the environment in which a program is run."""

import csv
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
ENVIRONMENTS = REPOSITORY / "outputs" / "program_environments"
SHARED = {"comfyui_server": "comfyui"}  # scripts that run in another's environment
RECORD = REPOSITORY / "benchmarks" / "results" / "programs.tsv"


@dataclass
class Row:
    """A line of the table."""

    program: str
    target: str
    family: str
    preset: str
    versions: str = ""
    opened: str = ""  # the node, function or flag
    missing: int | str = ""  # parameters that the program did not find
    left: int | str = ""  # tensors of the file that it did not take
    quantized: int | str = ""  # layers that the program holds as quantized
    of: int = 0  # layers that the file holds as quantized
    inputs: str = ""  # rounded, or as they are
    layer: float | str = ""  # the largest relative error of a layer
    call: float | str = ""  # the relative error of a call of the denoiser
    unrounded: float | str = ""  # the same, where the program can be told to leave inputs as they are
    image: float | str = ""  # PSNR of the worst image against ours, dB
    verdict: str = ""  # ok, loaded, FAILED, or not run
    far: str = ""  # how far it came, where it does not compute

    @property
    def name(self) -> tuple[str, ...]:
        return self.program, self.target, self.family, self.preset


# The rank of a verdict: ``loaded`` is a program whose kernels need other hardware
RANKS = {"ok": 3, "loaded": 2, "not run": 1, "FAILED": 0}


def python_of(script: str) -> tuple[Path, dict[str, str]]:
    """The interpreter with the environment variables for a script; its environment is made where it is not yet."""
    script = SHARED.get(script, script)
    requirements = HERE / f"requirements-{script}.txt"
    if not requirements.is_file():
        return Path(sys.executable), {"PYTHONPATH": str(Path(sys.prefix) / "consumers")}
    alone = {"PYTHONPATH": ""}  # nothing of the project's: pip would leave out what it finds there
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    folder = ENVIRONMENTS / script
    python, made = folder / "bin" / "python", folder / "requirements.sha256"
    if not made.is_file() or made.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "-r", requirements], check=True, env=os.environ | alone)
        made.write_text(wanted)
    return python, alone


def facts_of(
    script: str, source: Path | None, cases: Sequence[Mapping[str, Any]], work: Path
) -> tuple[dict[str, str], list[Mapping[str, Any]]]:
    """The versions and the facts of each case from a program's script, which is run once; a dead one says so in them.
    Raises CalledProcessError where no environment can be made."""
    python, variables = python_of(script)
    facts, request, printed = (work / name for name in ("facts.json", "request.json", "printed.txt"))
    text = {"source": source and str(source), "facts": str(facts), "cases": list(map(dict, cases))}
    request.write_text(json.dumps(text), encoding="utf-8")
    command = [python, HERE / f"{script}.py", request]
    with printed.open("w", encoding="utf-8") as file:
        ended = subprocess.run(command, cwd=work, env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT)
    found = json.loads(facts.read_text(encoding="utf-8")) if facts.is_file() else {"versions": {}, "cases": {}}
    last = printed.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    died = {"far": f"the script ended with {ended.returncode}: {last[:200]}"}
    return found["versions"], [found["cases"].get(case["name"], died) for case in cases]


def listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def with_facts(row: Row, fact: Mapping[str, Any], absent: Collection[str] = ()) -> Row:
    """The row with what the program said."""
    return replace(
        row, opened=fact.get("opened", ""), far=fact.get("far", ""), quantized=fact.get("quantized", ""),
        missing=len({*fact.get("missing", [])} - {*absent}), left=len(fact.get("left", [])),
    )  # fmt: skip


def kept() -> dict[tuple[str, ...], dict[str, str]]:
    if not RECORD.is_file():
        return {}
    with RECORD.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {(row["program"], row["target"], row["family"], row["preset"]): row for row in rows}


def shown(value: object) -> str:
    if not isinstance(value, float) or math.isnan(value):
        return str(value)
    return f"{value:.1f}" if value >= 1 else f"{value:.1e}"  # dB, or a relative error


def save(rows: list[Row]) -> None:
    """Writes the table: the new rows in place of the kept ones of the same programs."""
    programs = {row.program for row in rows}
    lines = {name: row for name, row in kept().items() if row["program"] not in programs}
    lines |= {row.name: {key: shown(value) for key, value in vars(row).items()} for row in rows}
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__annotations__), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines[name] for name in sorted(lines))


def is_worse(row: Row, before: Mapping[str, str] | None) -> bool:
    """Whether a program that ran has a worse verdict than in the kept row; a new row is compared with ``loaded``."""
    return row.verdict != "not run" and RANKS[row.verdict] < RANKS[before["verdict"] if before else "loaded"]
