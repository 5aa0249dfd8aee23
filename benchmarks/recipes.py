"""The time of k recipes: a calibration for each, against one statistics pass and a derivation for each.

We derive the defaults of ``int8``, with shifted inputs of convolutions. The reference is NVIDIA's way: a copy of the
UNet, ``mtq.quantize`` with SmoothQuant on the layers of the level, and the whole pipeline on every prompt as its
forward loop. ModelOpt has no alpha=auto; a calibration with the fixed alpha stands for it. Calibrations and statistics
passes alternate, so that drift of the machine affects both alike. Every calibration that is not extrapolated is
compared with our result, because times count only for equal results.

    python benchmarks/recipes.py --prompts 32 --steps 20 --references 2
"""

import argparse
import contextlib
import copy
import io
import warnings
from dataclasses import replace
from itertools import product
from statistics import median

import numpy as np
import torch
from common import Subject, load, modelopt_config, parser, report, timed
from quality import DEFAULT
from torch import Tensor, nn

from sd_quant.engines.torch import TorchEngine
from sd_quant.errors import SdQuantError
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.quantization.assignment import FIXED_ALPHA, LayerAssignment
from sd_quant.quantization.recipe import Recipe, reason_kept
from sd_quant.quantization.statistics import Statistics

TOLERANCE = 1e-5  # relative
DERIVATIONS = 5  # of each recipe; a single one is too short to time


def fixed(alpha: float | str) -> float:
    return FIXED_ALPHA if alpha == "auto" else float(alpha)


def recalibrate(subject: Subject, sampling: Sampling, level: float, alpha: float, prompts: int | None = None):
    """The UNet as ModelOpt calibrates it for one recipe."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.inference_mode():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq

        part, model = copy.deepcopy(subject.model.parts["unet_xl"]), subject.model
        engine = TorchEngine(part, model.contracts["unet_xl"])
        pipeline = pipeline_of(model.checkpoint, model.torch_engines() | {"unet_xl": engine})
        chosen = {
            name: LayerAssignment(name, role, (), format="int8", activation_format="int8", weight_axis=0)
            for name, role in subject.roles.items()
            if reason_kept(role, level) is None
        }
        config = modelopt_config(chosen) | {"algorithm": {"method": "smoothquant", "alpha": alpha}}
        mtq.quantize(part.unet, config, lambda unet: pipeline(subject.prompts[:prompts], sampling, decode=False))
    return part.unet


def difference(ours: Tensor | float, theirs: Tensor) -> float:
    """The largest relative difference of any element."""
    theirs = theirs.float().flatten()
    return ((torch.as_tensor(ours).flatten() - theirs).abs() / theirs.abs()).max().item()


def differences(subject: Subject, statistics: Statistics, level: float, alpha: float, unet: nn.Module) -> dict:
    """Largest relative difference to the calibrated UNet, with smoothing as ModelOpt does it.

    A convolution has the max calibrator there, which no collect_method is: its range is the statistics' largest.
    """
    found: dict[str, list[float]] = {"pre_quant_scale": [], "input_amax": [], "weight_amax": []}
    for layer in subject.assignment(statistics, Recipe(level, alpha, smoothing="modelopt")).values():
        if layer.format is None:
            continue
        module = unet.get_submodule(layer.name)
        amax = statistics.layers[layer.name].amax.max() if layer.role == "conv" else layer.activation_amax
        found["input_amax"].append(difference(amax, module.input_quantizer.amax))
        found["weight_amax"].append(difference(layer.weight_amax, module.weight_quantizer.amax))
        if layer.pre_quant_scale is not None:
            found["pre_quant_scale"].append(difference(layer.pre_quant_scale, module.input_quantizer.pre_quant_scale))
    return {name: max(values) for name, values in found.items()}


def run(options: argparse.Namespace) -> dict:
    subject = load(options.prompts)
    sampling = subject.sampling(options.steps)
    recipes = list(product(options.levels, options.alphas))
    recalibrate(subject, subject.sampling(2), *recipes[0][:1], FIXED_ALPHA, prompts=1)  # imports what both ways import
    subject.statistics(subject.sampling(2), prompts=1)

    references, passes = [], []
    for index in np.linspace(0, len(recipes) - 1, options.references).round().astype(int):
        level, alpha = recipes[index][0], fixed(recipes[index][1])
        unet, seconds = timed(lambda level=level, alpha=alpha: recalibrate(subject, sampling, level, alpha))
        statistics, pass_seconds = timed(lambda: subject.statistics(sampling))
        passes.append(pass_seconds)
        equality = differences(subject, statistics, level, alpha, unet)
        if not all(value <= TOLERANCE for value in equality.values()):
            raise SdQuantError(f"level {level:g}, alpha {alpha}: ModelOpt's calibration differs from ours: {equality}")
        references.append({"level": level, "alpha": alpha, "seconds": seconds, "difference": equality})
        print(f"level {level:g} alpha {alpha}: recalibrated in {seconds:.1f} s, a statistics pass {pass_seconds:.1f} s")
        print(f"  equal to ours; the largest relative differences: {equality}", flush=True)

    derivations = []
    for level, alpha in recipes:
        recipe = replace(DEFAULT, quant_level=level, alpha=alpha)
        seconds = [timed(lambda: subject.assignment(statistics, recipe))[1] for _ in range(DERIVATIONS)]  # noqa: B023
        derivations.append({"level": level, "alpha": alpha, "seconds": seconds})
    return {"references": references, "statistics_seconds": passes, "derivations": derivations}


def summary(found: dict, recipes: int) -> dict:
    """Sums and ratios from medians. Recipes that were not recalibrated are taken to cost the median calibration."""
    measured = [reference["seconds"] for reference in found["references"]]
    calibration, statistics = median(measured), median(found["statistics_seconds"])
    cost = [(entry["alpha"] == "auto", median(entry["seconds"])) for entry in found["derivations"]]
    derived = sum(seconds for _, seconds in cost)
    reference = sum(measured) + (recipes - len(measured)) * calibration
    further = {kind: [s for auto, s in cost if auto == (kind == "auto")] for kind in ("fixed", "auto")}
    return {
        "recipes": recipes,
        "recalibrated": len(measured),
        "reference_seconds": reference,
        "ours_seconds": statistics + derived,
        "ratio": reference / (statistics + derived),
        "calibration_seconds": calibration,
        "statistics_seconds": statistics,
        "further_recipe": {
            kind: {"seconds": median(values), "share_of_calibration": median(values) / calibration}
            for kind, values in further.items()
            if values
        },
    }


def main() -> None:
    arguments = parser(__doc__, prompts=32)
    arguments.add_argument("--levels", type=float, nargs="+", default=[2.5, 3.0])
    arguments.add_argument("--alphas", nargs="+", default=["0.5", "0.8", "1.0", "auto"])
    arguments.add_argument("--references", type=int, default=2, help="recipes that are really recalibrated")
    options = arguments.parse_args()
    options.alphas = [alpha if alpha == "auto" else float(alpha) for alpha in options.alphas]
    recipes = len(options.levels) * len(options.alphas)
    found = run(options)
    total = summary(found, recipes)
    extrapolated = recipes - total["recalibrated"]
    print(f"\n{recipes} recipes, {options.prompts} prompts, {options.steps} steps")
    print(f"recalibrating each  {total['reference_seconds']:8.1f} s   ({extrapolated} of them extrapolated)")
    print(f"deriving            {total['ours_seconds']:8.1f} s   (one pass of {total['statistics_seconds']:.1f} s)")
    print(f"ratio               {total['ratio']:8.2f}")
    for kind, cost in total["further_recipe"].items():
        share = f"{cost['share_of_calibration']:.2%} of a calibration"
        print(f"a further recipe, {kind:5} alpha: {1000 * cost['seconds']:.0f} ms, {share}")
    report(options, found | {"summary": total})


if __name__ == "__main__":
    main()
