"""The longest time without output of each command, on a machine that other processes keep busy.

    python benchmarks/silence.py

Prints for each command its seconds, its longest silence and the line before that. The exit code is 1 where a command
fails or is silent for more than 20 s (``sd_quant.progress`` prints a line after 15).
"""

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from verdict import neighbour

from sd_quant.places import HOME

MOST = 20.0  # seconds
SMALL = ("calib_size=4", "infer.steps=8")


def commands(folder: Path) -> dict[str, list[str]]:
    """Each with its arguments, in an order in which the later ones find what they start from."""
    run, cache = f"{folder}/run", f"cache.dir={folder}/cache"
    return {
        "quantize": ["quantize.py", "quant_level=3", cache, f"hydra.run.dir={run}"],
        "a sweep": ["quantize.py", "-m", "alpha=0.5,auto", cache, *SMALL, f"hydra.sweep.dir={folder}/sweep"],
        "hand_over": ["hand_over.py", f"run={run}", "to=[comfyui,diffusers_modelopt,onnx]", cache],
        "infer": ["infer.py", f"run={run}", f"infer.out_path={folder}/images"],
        "export_trt": ["export_trt.py", f"run={run}", f"infer.out_path={folder}/plans"],
        "judge": ["judge.py", f"candidates=[{run}]", cache, f"hydra.run.dir={folder}/judged"],
        "convert": ["-m", "sd_quant", "convert", "checkpoints/sdxl_mini.nemo", f"{folder}/diffusers"],
        "report": ["-m", "sd_quant", "report", run],
    }  # fmt: skip


def longest_silence(arguments: list[str]) -> tuple[int, float, float, str]:
    """The exit code, the seconds in all, those of the longest silence, and the line before it."""
    begun = last = time.monotonic()
    line, longest, before = "its start", 0.0, ""
    command = [sys.executable, "-u", *arguments]
    with subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for said in chain(process.stdout, [""]):  # the last silence ends with the process
            if (silence := time.monotonic() - last) > longest:
                longest, before = silence, line
            last, line = time.monotonic(), said.strip() or line
    return process.returncode, time.monotonic() - begun, longest, before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--neighbours", type=int, default=2, help="busy processes beside it (%(default)s)")
    parser.add_argument("--only", nargs="+", help="some of the commands; what they start from is then missing")
    chosen = parser.parse_args()
    silent = False
    print("| command | exit code | seconds | longest silence | behind |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as beside:
        for _ in range(chosen.neighbours):
            beside.enter_context(neighbour(True))
        for name, arguments in commands(Path(folder)).items():
            if chosen.only and name not in chosen.only:
                continue
            code, seconds, longest, line = longest_silence(arguments)
            silent |= longest > MOST or code != 0
            print(f"| {name} | {code} | {seconds:.0f} | {longest:.1f} s | {line[:60]} |", flush=True)
    return int(silent)


if __name__ == "__main__":
    sys.exit(main())
