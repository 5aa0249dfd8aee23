"""The waiting time of a new user: for the quickstart's job, the next one, and the same one again.

    python benchmarks/quickstart.py
    python benchmarks/quickstart.py --against <folder of another checkout>

Each is a process of its own, as a user starts it: the first with an empty cache and without the files that importing
and drawing leave, the second with another alpha and what the first has left, the third with the first one's folder.
Plans are built beside images and parity, so the stages add up to more than the job.
With ``--against`` the jobs of another version of this project are run in turn with ours, by its own code in this
environment, and the ratio is printed. Everything from the command to the prompt counts, imports included; the seconds
of a stage are the record's. The second job takes full-precision images from the cache.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from sd_quant.places import HOME, input_path

JOBS = {
    "quickstart": ("run", "alpha=0.8"),
    "another recipe": ("other", "alpha=0.5"),
    "the same again": ("run", "alpha=0.8"),
}


def run(checkout: Path, folder: Path, name: str, more: Sequence[str]) -> tuple[float, Mapping[str, float]]:
    """Seconds of the job's process, and of its stages. Raises CalledProcessError when it fails."""
    directory, knob = JOBS[name]
    places = (f"cache.dir={folder}/cache", f"hydra.run.dir={folder}/{directory}")
    environment = os.environ | {"PYTHONPATH": str(checkout), "MPLCONFIGDIR": f"{folder}/matplotlib"}
    command = [sys.executable, "quantize.py", "quant_level=3", knob, *more, *places]
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=checkout, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    stages = json.loads((folder / directory / "metrics.json").read_text(encoding="utf-8"))["stages"]
    return seconds, {stage: entry["seconds"] for stage, entry in stages.items()}


def line(seconds: float, stages: Mapping[str, float]) -> str:
    parts = [f"{stage} {spent:.1f}" for stage, spent in stages.items() if spent >= 0.5]
    return f"{seconds:.1f} s ({', '.join(parts)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--against", type=input_path, help="a checkout of another version")
    parser.add_argument("more", nargs="*", help="of the command, such as infer.steps=5")
    options = parser.parse_args()
    checkouts = {"ours": HOME} | ({"theirs": options.against} if options.against else {})
    with TemporaryDirectory() as temporary:
        folders = {side: Path(temporary) / side for side in checkouts}
        for folder in folders.values():
            folder.mkdir()
        for name in JOBS:
            found = {side: run(checkout, folders[side], name, options.more) for side, checkout in checkouts.items()}
            for side, (seconds, stages) in found.items():
                again = name == "the same again"
                shown = f"{seconds:.1f} s" if again else line(seconds, stages)
                print(f"{name}, {side}: {shown}", flush=True)
            if options.against:
                print(f"{name}: theirs / ours {found['theirs'][0] / found['ours'][0]:.2f}x", flush=True)


if __name__ == "__main__":
    main()
