"""Rows of a script, each measured in a process of its own: its time and peak memory are its own.

A row is named ``<function>:<arguments>``, such as ``pass:int8:3``. Its process is the script's own command with
``--row <name>`` behind it. Figures are kept as JSON as they come, so an interrupted run continues with those that are
missing. A process that the kernel kills for lack of memory is a result too; one that fails otherwise is measured again.
The parent imports no torch: it sits beside what is measured and has to be small.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_quant.files import write_json
from sd_quant.places import HOME
from sd_quant.process import peak_memory_bytes

KILLED = "killed"
Figures = dict[str, Any]


class RowFailed(Exception):
    """A process failed; ``found`` says how."""

    def __init__(self, found: Figures):
        super().__init__(found["failed"])
        self.found = found


def add_row(parser: argparse.ArgumentParser) -> None:
    """The option of a row's process."""
    parser.add_argument("--row", help=argparse.SUPPRESS)


def serve(functions: Mapping[str, Callable[..., Figures]], options: argparse.Namespace) -> None:
    """A row's process: call its function with the options and its arguments, and print the figures.

    Those that the function does not measure itself, the seconds of its call and the peak, are added.
    """
    name, *arguments = options.row.split(":")
    start = time.perf_counter()
    found = functions[name](options, *arguments)
    usual = {"seconds": time.perf_counter() - start, "peak_memory_bytes": peak_memory_bytes()}
    print(json.dumps(usual | found), flush=True)


def run_process(command: Sequence[object], log: Path, env: Mapping[str, str] = {}) -> tuple[str, Figures]:
    """The output of a process, and its seconds and peak as the kernel counts them. Raises RowFailed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(HOME), os.environ.get("PYTHONPATH")]))
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=errors, text=True,
            env=os.environ | {"PYTHONPATH": path} | env,
        )  # fmt: skip
        try:
            printed = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if process.returncode is None:
                process.kill()
    found = {"process_seconds": time.perf_counter() - start, "peak_memory_bytes": usage.ru_maxrss * 1024}
    if process.returncode == -signal.SIGKILL:
        raise RowFailed({"failed": KILLED} | found)
    if process.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise RowFailed({"failed": " ".join(last)[:600] or f"exit status {process.returncode}"} | found)
    return printed, found


class Rows:
    """The figures so far, in ``rows.json`` of a folder, of one subject."""

    def __init__(self, work: Path, subject: Figures | None = None):
        self.work, self.file, self.subject = work, work / "rows.json", {"subject": subject} if subject else {}
        self.found: dict[str, Figures] = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        if self.found.pop("subject", subject) != subject:
            raise SystemExit(f"{self.file} has figures of another subject; delete it or choose another --work")

    def measure(self, name: str, work: Callable[[], Figures] | None = None, **note: object) -> Figures:
        """The figures of ``work``, by default of the row's process; those that are known are not measured again."""
        known = self.found.get(name)
        if known is None or known.get("failed") not in (None, KILLED):
            try:
                found = work() if work else self.process(name)
            except RowFailed as failure:
                found = failure.found
            self.found[name] = known = found | note
            write_json(self.file, self.subject | self.found)
            print(f"{name}: {json.dumps(known)}", flush=True)
        return known

    def process(self, row: str) -> Figures:
        """The figures of the row's process. Raises RowFailed."""
        log = self.work / "logs" / f"{row.replace(':', '_').replace('/', '_')}.txt"
        printed, found = run_process([*sys.argv, "--row", row], log)
        return found | json.loads(next(text for text in reversed(printed.splitlines()) if text.startswith("{")))


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; nothing without lines."""
    shown = (header, ["---"] * len(header), *lines) if lines else ()
    return "".join(f"| {' | '.join(cells)} |\n" for cells in shown)
