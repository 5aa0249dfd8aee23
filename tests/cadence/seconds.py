"""Seconds of test files: what continuous integration writes, what is on record, and what has changed since.

``python -m tests.cadence.seconds`` shows the change of the newest run below outputs/ci since the one before it, or
since the record where it is the only one; ``--keep`` makes it the record, benchmarks/results/test_seconds.tsv. Seconds
of cases add up over both workers of pytest.
"""

import argparse
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

HOME = Path(__file__).resolve().parents[2]
RUNS = HOME / "outputs/ci"
RECORD = HOME / "benchmarks/results/test_seconds.tsv"
SECONDS = "seconds.tsv"
LATE = "left out for time"  # the reason with which such a case is skipped
HEADING = "part\tfile\tseconds\n"

Seconds = dict[tuple[str, str], float]  # by part of continuous integration and file of cases


@dataclass(frozen=True)
class Case:
    file: str
    name: str
    seconds: float
    late: bool = False  # skipped, because its part had no more time


def cases_of(junit: Path) -> list[Case]:
    """The cases in a file of pytest's ``--junitxml``; none where pytest wrote none."""
    found = []
    for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
        name, late = case.get("name", ""), any(each.get("message") == LATE for each in case.iter("skipped"))
        file = file_of(case.get("classname") or name)  # a file that is skipped whole has a name alone
        found.append(Case(file, name, float(case.get("time", 0)), late))
    return found


def file_of(classname: str) -> str:
    """``tests.unit.test_text`` or, of a class in it, ``tests.unit.test_text.TestIt`` as a path."""
    module = re.match(r".*?\.test_\w+", classname)
    return f"{(module[0] if module else classname).replace('.', '/')}.py"


def sums(part: str, cases: Collection[Case]) -> Seconds:
    """Seconds by part and file. A file of which a case was left out for time is missing."""
    total: Counter = Counter()
    for case in cases:
        total[part, case.file] += case.seconds
    return {(part, file): total[part, file] for file in {c.file for c in cases} - {c.file for c in cases if c.late}}


def read(path: Path) -> Seconds:
    """Seconds of a file that ``write`` made; empty where there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
    return {(part, file): float(seconds) for part, file, seconds in (line.split("\t") for line in lines)}


def write(path: Path, seconds: Seconds) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(f"{part}\t{file}\t{value:.1f}\n" for (part, file), value in sorted(seconds.items()))
    path.write_text(HEADING + rows, encoding="utf-8")


def change(before: Seconds, after: Seconds, rows: int = 10) -> list[str]:
    """Sums by part, and the files that changed most, of what both have run or is new in a part that both have run."""
    lines = []
    for part in dict.fromkeys(part for part, _ in after):
        old, new = ({file: s for (p, file), s in each.items() if p == part} for each in (before, after))
        same = [file for file in new if file in old]
        lines.append(
            f"{part}: {sum(new.values()):.0f} s in {len(new)} files; of the {len(same)} that ran before "
            f"{sum(new[file] for file in same):.0f} s, then {sum(old[file] for file in same):.0f} s"
        )
        changes = {file: seconds - old.get(file, 0.0) for file, seconds in new.items()} if old else {}
        for file in sorted(changes, key=lambda file: -abs(changes[file]))[:rows]:
            if abs(changes[file]) >= 1:
                lines.append(f"  {changes[file]:+7.1f} s  {file}{'' if file in old else ' (new)'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cadence.seconds", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="make the newest run the record of the files that it ran")
    keep = parser.parse_args().keep
    runs = sorted(RUNS.glob(f"*/{SECONDS}"))
    if not runs:
        raise SystemExit(f"no run of continuous integration lies below {RUNS}; bash .ci/run makes one")
    print("\n".join(change(read(runs[-2] if len(runs) > 1 else RECORD), read(runs[-1]))))
    if keep:
        write(RECORD, read(RECORD) | read(runs[-1]))


if __name__ == "__main__":
    main()
