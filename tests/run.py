"""``python -m tests.run NAME [options]``: what tries the package or its tests for longer than the tests do."""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Tool:
    """``module`` has the function ``run(wanted)``, whose answer is the exit code; it is imported when it is called."""

    module: str
    summary: str
    options: Callable[[argparse.ArgumentParser], object]


def of_mutations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    parser.add_argument("--touched", metavar="BASE", help="those alone whose file or tests changed since this revision")
    parser.add_argument("--nightly", action="store_true", help="run nightly cases of the faults' tests too")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further fault is begun")
    parser.add_argument("--workers", type=int, default=1, help="how many to try at a time, each in its own copy")
    parser.add_argument("--list", action="store_true", help="name the faults and what each changes, and run nothing")


def of_faults(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=60, help="runs that end by SIGKILL, of all commands in turn")
    parser.add_argument("--cancels", type=int, default=8, help="runs of the main job that end by SIGINT and SIGTERM")
    parser.add_argument("--disk", nargs="*", default=["calibrate", "export", "plans", "images", "parity"],
                        help="its stages in which the disk is full; the others write next to nothing")  # fmt: skip
    parser.add_argument("--races", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--places", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these commands, such as 'main job' and judge")
    parser.add_argument("--shipped", action="store_true", help="what ships, in place of a pipeline that a test makes")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")


def of_fuzzing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inputs", type=int, default=20_000, help="of all readers together, by their weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", help="only this one; may be repeated")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "sd_quant_fuzz", help="for failures")


def of_fuzz(parser: argparse.ArgumentParser) -> None:
    of_fuzzing(parser)
    parser.add_argument("--replay", type=Path, help="a folder of --keep, to be read again")
    parser.add_argument("--seconds", type=float, default=10, help="of the processor, that one input may take")


def of_learning(parser: argparse.ArgumentParser) -> None:
    of_fuzzing(parser)
    parser.add_argument("--corpus", type=Path, default=HERE / "fuzz/corpus.json")


def of_pairs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1000, help="at most")


def of_programs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="these programs alone")
    parser.add_argument("--keep", action="store_true", help="write their rows into benchmarks/results/programs.tsv")


TOOLS = {
    "mutations": Tool("tests.mutations.run", "Which test notices which deliberate fault.", of_mutations),
    "fuzz": Tool("tests.fuzz.run", "Many damaged and hostile inputs to every reader of files.", of_fuzz),
    "learn": Tool("tests.fuzz.learn", "The same, and inputs that lead somewhere new are changed again.", of_learning),
    "faults": Tool("tests.faults.run", "Every command killed, starved, raced and put into hard places.", of_faults),
    "pairs": Tool("tests.pairs.run", "Every knob at the ends of its range, in all pairs.", of_pairs),
    "programs": Tool("tests.programs.check", "What is handed over, opened by the programs it is for.", of_programs),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    commands = parser.add_subparsers(dest="tool", required=True, metavar="NAME")
    for name, tool in TOOLS.items():
        tool.options(commands.add_parser(name, help=tool.summary, description=tool.summary))
    wanted = parser.parse_args(arguments)
    if wanted.tool == "mutations":
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: threads do not outlive a fork
    return import_module(TOOLS[wanted.tool].module).run(wanted)


if __name__ == "__main__":
    sys.exit(main())
