"""Runs what requires a GPU, with whatever is installed, and leaves the results in one folder: ``make gpu-check``.

It needs no network. First the table, most wanted rows first; then the tests that only a GPU can run, every engine and
kernel among them, in the time that is left. ``gpu_bundle``, where it is (``make gpu-bundle``), has what the machine
lacks. The results are in ``$OUT`` where that is set, else in ``outputs/gpu_check/<time>``: environment.json, table.md,
table.json, tests.txt. Without a GPU it says so and claims nothing.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .bundle import BUNDLE, ROOT, unpack

NEEDED = {  # package to what it is for
    "torch": "everything",
    "numpy": "everything",
    "safetensors": "everything",
    "transformers": "everything",
    "yaml": "everything",
    "mpmath": "everything",
    "tqdm": "everything",
    "diffusers": "everything",
    "triton": "convolutions of codes",
    "onnx": "plans",
    "tensorrt": "plans",
    "tensorrt_rtx": "plans",
    "modelopt": "tests of the simulation",
    "lightning": "tests of calibration",
    "hydra": "tests of the main job",
    "pytest": "tests",
}
LEAST_TESTS = 45.0  # seconds kept for the tests, when the table has taken its share
PARTS = ("table", "tests")


def missing() -> dict[str, str]:
    return {name: use for name, use in NEEDED.items() if importlib.util.find_spec(name) is None}


def out_folder() -> Path:
    given = os.environ.get("OUT")
    return Path(given) if given else ROOT / "outputs" / "gpu_check" / time.strftime("%Y-%m-%d_%H-%M-%S")


def with_bundle(folder: Path, bundle: Path) -> str:
    """Put a bundle's packages on this process's path and on that of its children; what was found, in words."""
    if not bundle.is_dir():
        return f"no bundle at {bundle}"
    front, end = unpack(bundle, folder)
    paths = [str(front), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if importlib.util.find_spec("PIL") is None:
        paths.append(str(end))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path[:0] = [str(front)]
    return f"{bundle}: {len(list((bundle / 'wheels').glob('*.whl')))} packages"


def tests(out: Path, seconds: float) -> int:
    """The tests that only a GPU can run, as many as the time allows; the exit code of pytest, or 1 where it was cut."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "not slow", "-p", "no:cacheprovider"]
    with (out / "tests.txt").open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {seconds:.0f} s\n")
            code = 1
    print((out / "tests.txt").read_text(encoding="utf-8")[-3000:])
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=470, help="in which all ends (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=out_folder(), help="(%(default)s)")
    parser.add_argument("--on-cpu", action="store_true", help="a rehearsal without a GPU")
    chosen, rest = parser.parse_known_args()  # the rest is for the table
    start, codes = time.monotonic(), []

    def left() -> float:
        return max(chosen.seconds - (time.monotonic() - start), 1.0)

    with tempfile.TemporaryDirectory() as name:
        bundle = with_bundle(Path(name), chosen.bundle)
        lacking = missing()
        print(bundle, flush=True)  # before what child processes print
        for package, use in lacking.items():
            print(f"{package} is not installed; it is for {use}", flush=True)
        if "everything" in lacking.values():
            return 4
        import torch

        from sd_quant.files import write_json
        from sd_quant.report.provenance import machine, versions

        if not torch.cuda.is_available() and not chosen.on_cpu:
            print("there is no NVIDIA GPU on this machine: nothing was measured, and nothing is claimed")
            return 0
        packages = ("torch", "diffusers", "transformers", "triton", "nvidia-modelopt", "tensorrt", "tensorrt-rtx")
        here = {"machine": machine(), "versions": versions(*packages), "missing": lacking, "bundle": bundle}
        write_json(chosen.out / "environment.json", here)
        if "table" in chosen.only:
            kept = LEAST_TESTS if "tests" in chosen.only and "pytest" not in lacking else 0.0
            scales = chosen.bundle / "scales.safetensors"
            given = [*(["--on-cpu"] if chosen.on_cpu else []), *(["--scales", str(scales)] if scales.is_file() else [])]
            command = [sys.executable, "-m", "benchmarks.gpu.table", "--out", str(chosen.out),
                       "--seconds", str(max(left() - kept, 1.0)), *given, *rest]  # fmt: skip
            codes.append(subprocess.run(command, cwd=ROOT).returncode)
        if "tests" in chosen.only and "pytest" not in lacking:
            codes.append(tests(chosen.out, left()))
        print(f"{time.monotonic() - start:.0f} s; written: {chosen.out}")
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
