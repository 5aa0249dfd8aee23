"""Choose a recipe on the bench's checkpoints but one, and report it on that one, for each of them.

    make bench-checkpoints
    python benchmarks/bench.py --recipes "the default" alpha=0.5 alpha=0.8
    python benchmarks/bench.py --recipes svdquant_nvfp4 "svdquant_nvfp4 quantize.rank=16" "svdquant_nvfp4 damping=3"

A recipe of ``quality.py`` runs in OpenVINO; any preset, with any overrides and GPTQ's damping, is simulated in torch.

A recipe counts as better if it gains on the checkpoints that it was not chosen on, on average, and loses no more than
0.1 dB on any. It is chosen by the images of one set of captions and reported by those of another; neither is among the
captions that calibration sees. Rows are kept, so a cancelled run continues with the others.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import numpy as np
from common import PROMPTS, FullPrecision, Subject, job_with, open_subject, paired, simulated, with_interval
from measurer import markdown
from quality import RECIPES

from sd_quant.calibration.prompts import read_prompts
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.config import QuantizeJob
from sd_quant.engines import load_engine
from sd_quant.engines.base import Engine
from sd_quant.errors import ConfigError
from sd_quant.export.parts import trace_part, write_part
from sd_quant.export.tracing import copy_of
from sd_quant.files import write_text
from sd_quant.inference.loading import load_model
from sd_quant.places import HOME
from sd_quant.quantization import rounding
from sd_quant.report.provenance import fingerprint

FOLDER, SECOND = HOME / "outputs/bench", HOME / "outputs/sdxl_mini_second/sdxl_mini_second.nemo"
MANIFEST = "checkpoints.json"  # the family and the hash of each
MADE = "make bench-checkpoints"
# beside those of the manifest: the checkpoint, its prompts for calibration, choice and report
KNOWN = {
    "sdxl_mini": ("sdxl_mini", None, None, "sdxl_mini.txt", "sdxl_mini_report.txt"),
    "sd3_mini": ("sd3_mini", None, None, "sdxl_mini.txt", "sdxl_mini_report.txt"),
    "second": ("sdxl_mini", SECOND, "second_calibration.txt", "second.txt", "second_report.txt"),
}
CALIBRATED, IMAGES, SIZE, SEED = 32, 64, 64, 7
PARTS = {
    "sdxl": ["unet_xl", "vae", "clip1", "clip2"], "sd15": ["unet", "vae", "text_encoder"],
    "sd21": ["unet", "vae", "text_encoder"], "pixart": ["transformer", "vae", "text_encoder"],
    "sd3": ["transformer", "vae", "text_encoder", "text_encoder_2"],
}  # fmt: skip
DAMPING, KNOWN_DAMPING = "damping=", rounding.DAMPING
TOKENS = {"sd3": 3, "pixart": 24}  # of T5, as in training
Prompts = list[str]


def manifest_of(bench: Path) -> dict[str, dict[str, str]]:
    """The family and the hash of each checkpoint that was made. Exits where there is none."""
    path = bench / MANIFEST
    if not path.is_file():
        raise SystemExit(f"{path} is missing: the checkpoints of the bench are made by `{MADE}`")
    return json.loads(path.read_text(encoding="utf-8"))


def opened(name: str, bench: Path) -> tuple[Subject, Prompts, Prompts]:
    """A checkpoint with its prompts for calibration, and those for choosing and reporting.

    Exits in a sentence where its files are missing, incomplete, or of another hash than when it was made.
    """
    if name in KNOWN:
        model, path, calibration, *prompts = KNOWN[name]
        if path is not None and not path.is_file():
            raise SystemExit(f"{path} is missing: it is made by `{MADE}`")
        subject = open_subject(path, calibration and PROMPTS / calibration, CALIBRATED, model)
        chosen, reported = (read_prompts(PROMPTS / file)[:IMAGES] for file in prompts)
        return subject, chosen, reported
    made, path = manifest_of(bench).get(name), bench / name
    if made is None or not path.is_dir():
        raise SystemExit(f"the checkpoint {name} of the bench is missing in {bench}: make it by `{MADE}`")
    if (found := fingerprint(path)["sha256"]) != made["sha256"]:
        raise SystemExit(
            f"{path} has the hash {found[:12]}, expected {made['sha256'][:12]}: its files are incomplete or altered; "
            f"remove the folder and make it again by `{MADE}`"
        )
    family = made["family"]
    checkpoint = open_checkpoint(
        path, family, io=None, max_sequence_length=TOKENS.get(family), parts=PARTS[family], loras=[]
    )
    model, captions = load_model(checkpoint), (path / "captions.txt").read_text(encoding="utf-8").splitlines()
    drawn = [captions[index] for index in np.random.default_rng(SEED).permutation(len(captions))]
    roles = checkpoint.family.layer_roles(model.denoiser)
    sets = [drawn[start : start + IMAGES] for start in (IMAGES, 2 * IMAGES)]
    return Subject(model, roles, drawn[:CALIBRATED], SIZE, path, family), *sets


def job_of(row: str) -> QuantizeJob:
    """The job of a preset with overrides; ``damping``, which is no knob, is set where GPTQ reads it."""
    words = row.split()
    given = [word.partition("=")[2] for word in words if word.startswith(DAMPING)]
    rounding.DAMPING = float(given[0]) if given else KNOWN_DAMPING
    return job_with(*(word for word in words if not word.startswith(DAMPING)), "quant_level=3")


def measured(name: str, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """The PSNR of each image by recipe, for choosing and for reporting."""
    subject, *sets = opened(name, options.bench)
    graph, statistics = trace_part(subject.model.checkpoint, subject.denoiser), subject.statistics(options.steps)
    in_torch = simulated(subject, job_of, options.steps)

    def denoiser_of(recipe: str, folder: Path) -> Engine:
        if recipe not in RECIPES:
            return in_torch(recipe, folder)
        assignment = subject.assignment(statistics, RECIPES[recipe])
        write_part(copy_of(graph), subject.model.checkpoint, subject.denoiser, folder / "denoiser.onnx", assignment)
        return load_engine("openvino", folder / "denoiser.onnx")

    found: dict[str, dict[str, list[float]]] = {recipe: {} for recipe in options.recipes}
    for what, prompts in zip(("choice", "report"), sets, strict=True):
        reference = FullPrecision(subject, prompts[: options.images], options.steps)
        rows = reference.of_rows({recipe: {} for recipe in options.recipes}, denoiser_of, options.out / name / what)
        for recipe, fidelity in rows.items():
            found[recipe][what] = fidelity["psnr"]["values"]
    return found


def tables(found: Mapping[str, dict[str, dict[str, list[float]]]], recipes: list[str]) -> str:
    """Each recipe by checkpoint on the prompts for reporting, what is chosen on all checkpoints but one, and means."""
    first, *others = recipes
    lines, gains = [], dict[str, list[float]]()
    for name, by_recipe in found.items():
        values = {recipe: by_recipe[recipe]["report"] for recipe in recipes}
        means = {recipe: fmean(values[recipe]) for recipe in recipes}
        cells = [f"{means[first]:.2f}, {min(values[first]):.2f}"]
        cells += [f"{paired(values[recipe], values[first])}, {min(values[recipe]):.2f}" for recipe in others]
        chosen = max(recipes, key=lambda recipe: fmean(
            fmean(other[recipe]["choice"]) - fmean(other[first]["choice"])
            for other_name, other in found.items() if other_name != name
        ) if len(found) > 1 else 0.0)  # fmt: skip
        lines.append([name, *cells, chosen, paired(values[chosen], values[first]) if chosen != first else ""])
        for recipe in (*others, "chosen"):
            gains.setdefault(recipe, []).append(means[chosen if recipe == "chosen" else recipe] - means[first])
    if len(found) > 1:
        shown = [f"{with_interval(values, '{:+.2f}')}, least {min(values):+.2f}" for values in gains.values()]
        lines.append(["mean of the checkpoints", "", *shown[:-1], "", shown[-1]])
    head = ("checkpoint", f"{first}: dB, worst", *(f"{each}: against it, worst" for each in others))
    return markdown((*head, "chosen on the others", "gains here"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["the default", "alpha=0.5"], metavar="'NAME OVERRIDES'")
    parser.add_argument("--checkpoints", nargs="+", help="(all that were made)", metavar="NAME")
    parser.add_argument("--images", type=int, default=IMAGES, help="of each set (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of denoising (%(default)s)")
    parser.add_argument("--bench", type=Path, default=FOLDER, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=HOME / "outputs/benchmarks/bench", help="(%(default)s)")
    options = parser.parse_args()
    names = options.checkpoints or [*KNOWN, *manifest_of(options.bench)]
    found = {}
    for name in names:
        try:
            found[name] = measured(name, options)
        except ConfigError as error:  # blocks that do not divide its layers
            print(f"{name} is left out: {error}", flush=True)
    text = tables(found, options.recipes)
    write_text(options.out / "bench.md", text)
    print(text)


if __name__ == "__main__":
    main()
