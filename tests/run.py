"""``python -m tests.run NAME [options]``: what tries the package or its tests for longer than the tests do."""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
MODULES = {"learn": "tests.fuzz.learn", "programs": "tests.programs.check"}  # of the others tests.NAME.run


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    commands = parser.add_subparsers(dest="tool", required=True, metavar="NAME")

    def tool(name: str, summary: str) -> Callable[..., argparse.Action]:
        """Add a tool to the command line; return the function that adds an option to it."""
        return commands.add_parser(name, help=summary, description=summary).add_argument

    option = tool("mutations", "Which test notices which deliberate fault.")
    option("--only", nargs="+", metavar="NAME", help="these faults alone")
    option("--touched", metavar="BASE", help="those alone whose file or tests changed since this revision")
    option("--nightly", action="store_true", help="run nightly cases of the faults' tests too")
    option("--seconds", type=float, default=math.inf, help="after which no further fault is begun")
    option("--workers", type=int, default=1, help="how many to try at a time, each in its own copy")

    for name, summary in (
        ("fuzz", "Many damaged and hostile inputs to every reader of files."),
        ("learn", "The same, and inputs that lead somewhere new are changed again."),
    ):
        option = tool(name, summary)
        option("--inputs", type=int, default=20_000, help="of all readers together, by their weights")
        option("--seed", type=int, default=0)
        option("--reader", action="append", help="only this one; may be repeated")
        option("--keep", type=Path, default=Path(tempfile.gettempdir()) / "sd_quant_fuzz", help="for failures")
        option("--replay", type=Path, help="a folder of --keep, to be read again")
        option("--seconds", type=float, default=10, help="of the processor, that one input may take")
    option("--corpus", type=Path, default=HERE / "fuzz/corpus.json")

    option = tool("faults", "Every command killed, starved, raced and put into hard places.")
    option("--kills", type=int, default=60, help="runs that end by SIGKILL, of all commands in turn")
    option("--cancels", type=int, default=8, help="runs of the main job that end by SIGINT and SIGTERM")
    option("--disk", nargs="*", default=["calibrate", "export", "plans", "images", "parity"],
           help="its stages in which the disk is full; the others write next to nothing")  # fmt: skip
    option("--races", action=argparse.BooleanOptionalAction, default=True)
    option("--places", action=argparse.BooleanOptionalAction, default=True)
    option("--only", nargs="+", metavar="NAME", help="these commands, such as 'main job' and judge")
    option("--shipped", action="store_true", help="what ships, in place of a pipeline that a test makes")
    option("--seed", type=int, default=0, help="of the random moments")

    option = tool("pairs", "Every knob at the ends of its range, in all pairs.")
    option("--seed", type=int, default=0)
    option("--jobs", type=int, default=1000, help="at most")

    option = tool("programs", "What is handed over, opened by the programs it is for.")
    option("names", nargs="*", metavar="NAME", help="these programs alone")
    option("--keep", action="store_true", help="write their rows into benchmarks/results/programs.tsv")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the tool's ``run``, whose module is imported when it is called."""
    wanted = parsed(arguments)
    if wanted.tool == "mutations":
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: threads do not outlive a fork
    return import_module(MODULES.get(wanted.tool, f"tests.{wanted.tool}.run")).run(wanted)


if __name__ == "__main__":
    sys.exit(main())
