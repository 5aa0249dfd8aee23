"""What each knob of a recipe does to the pictures: every combination, on the same prompts and seeds.

One statistics pass serves all of them. Each recipe is exported and run in OpenVINO, and its pictures are compared with
full precision's in torch. Recipes that differ by a knob which changes nothing at their level are run once. A finished
recipe is kept on disk, so a cancelled run goes on where it was.

    python benchmarks/quality.py --out outputs/benchmarks/quality
"""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

from sd_quant.calibration.collection import calibrate
from sd_quant.calibration.prompts import read_prompts
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.config import REPOSITORY
from sd_quant.engines import load_engine
from sd_quant.export.parts import trace_part
from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import copy_of
from sd_quant.files import sha256, write_json, write_text
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.metrics.fidelity import fidelity
from sd_quant.models.unet import layer_roles, shared_inputs
from sd_quant.progress import progress
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.percentile import COLLECT_METHODS
from sd_quant.quantization.recipe import Recipe

CHECKPOINT = REPOSITORY / "checkpoints/sdxl_mini.nemo"
CALIBRATION = REPOSITORY / "conf/model/prompts/sdxl_mini.txt"
EVALUATION = Path(__file__).parent / "prompts/sdxl_mini.txt"
COLUMNS = (
    "level", "range", "percentile", "alpha", "smoothing", "PSNR dB", "worst", "SSIM", "LPIPS", "SQNR dB, step 1", "10",
    "20",
)  # fmt: skip


def recipes() -> list[Recipe]:
    """First how the ranges of convolutions are chosen, then the grid of the other knobs with the default choice."""
    ranges = [
        *(Recipe(3.0, 0.8, collect_method=method) for method in COLLECT_METHODS),
        Recipe(3.0, 0.8, collect_method="min-mean", percentile_calibrator="modelopt"),  # what NeMo computes
        *(Recipe(3.0, 0.8, observer=observer) for observer in ("percentile", "entropy", "mse")),
        Recipe(3.0, "auto", observer="mse"),
    ]
    levels, alphas, percentiles = (1.0, 2.0, 2.5, 3.0), (0.5, 0.8, 1.0, "auto"), (1.0, 0.4)
    smoothings = ("folded", "modelopt")
    grid = [
        Recipe(level, alpha, percentile, smoothing=smoothing)
        for level, alpha, percentile, smoothing in itertools.product(levels, alphas, percentiles, smoothings)
        if level > 1 or (alpha, smoothing) == (0.8, "folded")  # at level 1 there is nothing to smooth
    ]
    return list(dict.fromkeys([*ranges, *grid]))


def range_of(recipe: Recipe) -> str:
    """How the range of a convolution's input is chosen, in the knobs' words."""
    if recipe.observer != "min_max":
        return recipe.observer
    literal = ", modelopt" if recipe.percentile_calibrator == "modelopt" else ""
    return f"{recipe.collect_method}{literal}"


def label(recipe: Recipe) -> str:
    parts = (f"{recipe.quant_level:g}", recipe.alpha, f"{recipe.percentile:g}", range_of(recipe), recipe.smoothing)
    return "_".join(map(str, parts)).replace(", ", "-")


def table(records: list[dict]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for record in records:
        recipe, found = Recipe(**record["recipe"]), record["fidelity"]
        sqnr, smoothed = found["latent_sqnr_db"], recipe.quant_level > 1
        cells = [
            f"{recipe.quant_level:g}",
            range_of(recipe),
            f"{recipe.percentile:g}",
            str(recipe.alpha) if smoothed else "–",
            recipe.smoothing if smoothed else "–",
            f"{found['psnr']['mean']:.2f}",
            f"{found['psnr']['min']:.2f}",
            f"{found['ssim']['mean']:.4f}",
            f"{found['lpips']['mean']:.4f}",
            *(f"{sqnr[step]:.1f}" for step in (0, len(sqnr) // 2 - 1, -1)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--calib-size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "outputs/benchmarks/quality")
    arguments = parser.parse_args()
    prompts = read_prompts(EVALUATION)[: arguments.prompts]
    sampling = Sampling(20, 5.0, 64, 64, arguments.batch, 123)
    checkpoint = open_nemo(CHECKPOINT)
    model = load_model(checkpoint)
    roles, source, contract = (
        layer_roles(model.modules["unet"]),
        checkpoint.components["unet"],
        model.contracts["unet_xl"],
    )
    reference = pipeline_of(checkpoint, model.torch_engines())(prompts, sampling)
    statistics = calibrate(
        model,
        [name for name, role in roles.items() if role != "excluded"],
        read_prompts(CALIBRATION)[: arguments.calib_size],
        dataclasses.replace(sampling, batch_size=1, seed=42),
        checkpoint_sha256=sha256(CHECKPOINT),
        cache=REPOSITORY / "outputs/cache/statistics",
    )
    graph = trace_part(checkpoint, "unet_xl")
    records = []
    with progress(len(recipes()), "recipes") as advance:
        for recipe in recipes():
            folder = arguments.out / label(recipe)
            if not (folder / "record.json").exists():
                assignment = derive(
                    roles, lambda name: source[f"{name}.weight"], statistics.layers, recipe, shared_inputs(roles)
                )
                write_onnx(copy_of(graph), folder / "unet.onnx", inputs=len(contract.inputs), prefix="unet.",
                           read=lambda name: source[name.removeprefix("unet.")], assignment=assignment)  # fmt: skip
                engines = model.torch_engines() | {"unet_xl": load_engine("openvino", folder / "unet.onnx")}
                found = pipeline_of(checkpoint, engines)(prompts, sampling)
                closeness = fidelity(reference.images, found.images, reference.latents, found.latents)
                write_json(folder / "record.json", {"recipe": dataclasses.asdict(recipe), "fidelity": closeness})
            records.append(json.loads((folder / "record.json").read_text(encoding="utf-8")))
            write_text(arguments.out / "quality.md", table(records))
            advance()
    print(table(records))


if __name__ == "__main__":
    main()
