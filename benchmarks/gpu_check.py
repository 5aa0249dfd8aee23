"""What only a GPU can show, from a checkout and whatever is installed: its tests and its table, in one folder.

    make gpu-check

It needs no network and writes ``outputs/gpu_check/<time>``: environment.json, tests.txt, and what gpu_table.py leaves.
What is missing is named, and what needs it left out. Without a GPU it says so and claims nothing.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = {  # package to what it is for
    "torch": "everything",
    "diffusers": "everything",
    "yaml": "everything",
    "pytest": "the tests",
    "modelopt": "the simulation beside the native layers",
    "triton": "the kernel of INT8 products and of convolutions of codes",
    "lightning": "the tests of calibration",
    "tensorrt": "plans",
}
TABLE_SECONDS = 330  # of 8 minutes; what has begun by then is finished


def missing() -> dict[str, str]:
    return {name: use for name, use in NEEDED.items() if importlib.util.find_spec(name) is None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_check" / time.strftime("%Y-%m-%d_%H-%M-%S"))
    chosen = parser.parse_args()
    lacking = missing()
    for name, use in lacking.items():
        print(f"{name} is not installed; it is for {use}")
    if "everything" in lacking.values():
        return 4
    import torch

    from sd_quant.files import write_json, write_text
    from sd_quant.report.provenance import machine, versions

    if not torch.cuda.is_available():
        print("there is no NVIDIA GPU on this machine: nothing was measured, and nothing is claimed")
        return 0
    here = {
        "machine": machine(),
        "versions": versions(
            "torch", "diffusers", "transformers", "triton", "nvidia-modelopt", "tensorrt", "lightning"
        ),
        "missing": lacking,
    }
    write_json(chosen.out / "environment.json", here)
    environment, codes = os.environ | {"PYTHONPATH": str(ROOT)}, []
    if "pytest" not in lacking:
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "not slow", "-p", "no:cacheprovider"]
        tests = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)  # fmt: skip
        print(tests.stdout)
        write_text(chosen.out / "tests.txt", tests.stdout)
        codes.append(tests.returncode)
    command = [sys.executable, "benchmarks/gpu_table.py", "--seconds", str(TABLE_SECONDS), "--out", str(chosen.out)]
    codes.append(subprocess.run(command, cwd=ROOT, env=environment).returncode)
    print(f"written: {chosen.out}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
