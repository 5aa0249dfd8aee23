"""The options of both the table and its worker."""

import argparse
import tempfile
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=1024, help="of a picture, in pixels (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of a loop (%(default)s)")
    parser.add_argument("--picture-steps", type=int, default=30, help="of a whole picture (%(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each side (%(default)s)")
    parser.add_argument("--model", type=Path, help="a model_config.yaml of another size")
    parser.add_argument(
        "--scales", type=Path, help="assignments that bundle.py has kept; without them they are derived"
    )
    parser.add_argument("--plans", type=Path, default=Path(tempfile.gettempdir()) / "sd_quant_plans", help="for plans")
    parser.add_argument("--no-compile", action="store_true", help="nothing is compiled: only to try the scripts")
    parser.add_argument(
        "--on-cpu", action="store_true", help="all the same, in fp32: slow, and only to try the scripts"
    )
