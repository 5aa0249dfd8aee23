"""Bits for the whole pipeline: ``fit`` against the best choice of one format for each part, at equal bytes.

    python benchmarks/fit.py --model sdxl_mini
    python benchmarks/fit.py --model sd3_mini

A size is a share of the way from the fewest bytes of all weights to those of full precision; ``fit`` is tried once more
with 15 % less. Formats are chosen on calibration prompts, and images are made of the report prompts, simulated in
torch; differences are paired by image.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import sd_quant
from benchmarks.common import PROMPTS, report
from sd_quant.calibration.prompts import read_prompts
from sd_quant.inference.memory import working_bytes
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.intervals import mean_interval
from sd_quant.stages.fit_pipeline import assign_labels, fit_pipeline, offers_of
from sd_quant.stages.load import Loaded, with_recipe
from sd_quant.stages.resources import workload_of
from sd_quant.stages.variants import Assignments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl_mini", help="as in model= (%(default)s)")
    parser.add_argument("--prompts", default=str(PROMPTS / "sdxl_mini_report.txt"), help="(%(default)s)")
    parser.add_argument("--images", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--calib-size", type=int, help="prompts of the statistics; by default the model's own")
    parser.add_argument("--steps", type=int, default=20, help="of denoising (%(default)s)")
    parser.add_argument("--quantize", default="svdquant_w4a16", help="preset of the denoiser (%(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.2, 0.4], help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    chosen = parser.parse_args()
    model, prompts = sd_quant.open(chosen.model), read_prompts(Path(chosen.prompts))[: chosen.images]
    statistics = model.calibrate(**({} if chosen.calib_size is None else {"calib_size": chosen.calib_size}))
    knobs = {"steps": chosen.steps, "batch_size": 8}

    def loaded_for(weight_bytes: int) -> Loaded:
        job = model.job(chosen.quantize, {"quant_level": 3, "fit": 1}, knobs)
        beside = max(working_bytes(model.parameters, workload_of(job.infer)).values())
        job = model.job(chosen.quantize, {"quant_level": 3, "fit": weight_bytes + round(beside)}, knobs)
        return with_recipe(model.session, job.model, job.infer, job.quantize)

    offers = offers_of(loaded_for(1))
    least, whole = (sum(getattr(offer, size) for offer in offers.values()) for size in ("least", "whole"))
    full, figures = model.generate(prompts, knobs), {}

    def scored(name: str, weight_bytes: int, assignments: Assignments) -> dict[str, Any]:
        images = model.generate(prompts, knobs, assignments)
        found = fidelity(full.images, images.images, full.latents, images.latents)
        interval = mean_interval(found["psnr"]["values"])
        print(
            f"| {weight_bytes / 1e6:.2f} of {whole / 1e6:.2f} MB | {name} | {interval.value:.2f} ± "
            f"{interval.high - interval.value:.2f} | {found['psnr']['min']:.2f} | {found['lpips']['mean']:.4f} |",
            flush=True,
        )
        figures[f"{name}, {weight_bytes}"] = found
        return found

    print("| weights | formats | PSNR, dB | worst | LPIPS |\n|---|---|---|---|---|")
    for share in chosen.shares:
        limit = round(least + share * (whole - least))
        uniform: dict[str, Any] = {}
        for allowed in (limit, round(0.85 * limit)):
            if allowed <= least:
                continue
            loaded = loaded_for(allowed)
            with TemporaryDirectory() as folder:
                fitted = fit_pipeline(loaded, statistics, Path(folder))
            entry, one = fitted.entry["candidates"], fitted.entry["candidates"].get("by part")
            if allowed == limit and one is not None:
                labels = {part: label for part, found in one["formats"].items() for label in found}
                apart = {
                    part: assign_labels(loaded, statistics, offers[part], offers[part].all_in(label))
                    for part, label in labels.items()
                    if label != "unquantized"
                }
                named = ", ".join(f"{part} {label}" for part, label in labels.items())
                uniform = scored(f"a format a part: {named}", sum(one["weight_bytes"].values()), apart)
            own = scored(
                f"fit, {fitted.entry['taken']}",
                sum(entry[fitted.entry["taken"]]["weight_bytes"].values()),
                {loaded.denoiser: fitted.assignment, **fitted.parts},
            )
            if uniform:
                print(f"| | difference | {gain(own, uniform)} | | |", flush=True)
    report(chosen, figures)


def gain(own: Mapping[str, Any], uniform: Mapping[str, Any]) -> str:
    """The mean of paired differences in dB, with its interval."""
    interval = mean_interval(list(np.subtract(own["psnr"]["values"], uniform["psnr"]["values"])))
    return f"{interval.value:+.2f} ± {interval.high - interval.value:.2f}"


if __name__ == "__main__":
    main()
