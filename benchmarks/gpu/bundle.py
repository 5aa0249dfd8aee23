"""Collects what a GPU machine without a network needs beside this repository in one folder: ``make gpu-bundle``.

Wheels of pure Python, which serve every Python from 3.11 on, named with their hashes in ``wheels.txt``: what diffusers
takes beyond torch, Triton, numpy, safetensors and transformers, and pytest. And the scales of SDXL's UNet in the table,
which a processor derives in some minutes, so that no minute of a GPU goes to it. ``benchmarks.gpu.check`` finds the
folder by itself. The road not taken is a bundle with ModelOpt and Lightning: 20 MB more, and no row needs them.

Pillow is no pure Python. diffusers imports it and the table makes no pictures, so where it is missing a few of its
names stand in for it.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "gpu_bundle"
WHEELS = Path(__file__).with_name("wheels.txt")
MOST_BYTES = 12_000_000
STAND_IN = {  # what diffusers asks of Pillow when it is imported
    "PIL/__init__.py": '__version__ = "9.1"\n',
    "PIL/Image.py": "class Image:\n    pass\n\n\nclass Resampling:\n"
    "    NEAREST = BOX = BILINEAR = HAMMING = BICUBIC = LANCZOS = 0\n",
    "PIL/ImageFilter.py": "",
    "PIL/ImageOps.py": "",
}


def wanted_wheels() -> dict[str, str]:
    """The SHA-256 of every wheel by its distribution's name and version."""
    lines = WHEELS.read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"(\S+) --hash=sha256:([0-9a-f]{64})", line) for line in lines]
    return {each[1]: each[2] for each in found if each}


def fetch_wheels(folder: Path) -> None:
    """Download what ``wheels.txt`` names. Raises CalledProcessError where pip refuses a hash or has no network."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--require-hashes", "--only-binary", ":all:", "--platform", "any", "--implementation", "py",
               "--dest", str(folder), "--requirement", str(WHEELS)]  # fmt: skip
    subprocess.run(command, check=True)


def unpack(bundle: Path, folder: Path, python: tuple[int, int] = sys.version_info[:2]) -> list[Path]:
    """Unpack the wheels of a bundle into ``folder`` and return what belongs at the front and the end of sys.path.

    Raises ValueError for a Python that they do not serve, and for a wheel with another hash than ``wheels.txt`` has.
    """
    if python < (3, 11):
        raise ValueError(f"this is Python {python[0]}.{python[1]}, expected 3.11 or later")
    hashes = set(wanted_wheels().values())
    for wheel in sorted((bundle / "wheels").glob("*.whl")):
        if hashlib.sha256(wheel.read_bytes()).hexdigest() not in hashes:
            raise ValueError(f"{wheel.name} is not in {WHEELS.name}; make the bundle again: make gpu-bundle")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "wheels")
    for name, text in STAND_IN.items():
        path = folder / "stand_in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [folder / "wheels", folder / "stand_in"]


def derive_scales(path: Path, model: Path | None, size: int) -> None:
    """Write the assignments of all recipes, derived here."""
    import torch

    from sd_quant.devices import CPU

    from .scales import save
    from .sides import RECIPES, Assignments, opened

    with torch.no_grad():
        unet = opened(model, CPU)
        assignments, found = Assignments(unet, size, None), {}
        for name in RECIPES:
            start = time.monotonic()
            found[name] = assignments[name]
            print(f"scales of {name}: {time.monotonic() - start:.0f} s", flush=True)
        save(path, found, RECIPES, unet.inner)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=BUNDLE, help="the folder (%(default)s)")
    parser.add_argument("--model", type=Path, help="a model_config.yaml of another size, to try the script")
    parser.add_argument("--size", type=int, default=1024, help="of a picture, in pixels (%(default)s)")
    chosen = parser.parse_args()
    (chosen.out / "wheels").mkdir(parents=True, exist_ok=True)
    fetch_wheels(chosen.out / "wheels")
    derive_scales(chosen.out / "scales.safetensors", chosen.model, chosen.size)
    total = sum(file.stat().st_size for file in chosen.out.rglob("*") if file.is_file())
    print(f"{chosen.out}: {total / 1e6:.1f} MB; take it along with the repository, and give there: make gpu-check")
    if total > MOST_BYTES:
        print(f"error: the bundle has {total} bytes, expected at most {MOST_BYTES}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
