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
from typing import Any

import numpy as np

import sd_quant
from benchmarks.common import PROMPTS, report
from sd_quant.calibration.prompts import read_prompts
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.intervals import mean_interval
from sd_quant.stages.chosen_by_images import image_errors
from sd_quant.stages.fit_pipeline import (
    Group,
    Labels,
    assigned,
    by_layer,
    by_part,
    offers_of,
    price,
)
from sd_quant.stages.load import with_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl_mini", help="as in model= (%(default)s)")
    parser.add_argument("--prompts", default=str(PROMPTS / "sdxl_mini_report.txt"), help="(%(default)s)")
    parser.add_argument("--images", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--calib-size", type=int, help="prompts of the statistics; by default the model's own")
    parser.add_argument("--steps", type=int, default=20, help="of denoising (%(default)s)")
    parser.add_argument("--quantize", default="int8_weight_only", help="preset of the denoiser (%(default)s)")
    parser.add_argument("--choices", nargs="+", default=["svdquant_w4a16"], help="other presets (%(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.2, 0.4], help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    chosen = parser.parse_args()
    model, prompts = sd_quant.open(chosen.model), read_prompts(Path(chosen.prompts))[: chosen.images]
    statistics = model.calibrate(**({} if chosen.calib_size is None else {"calib_size": chosen.calib_size}))
    knobs = {"steps": chosen.steps, "batch_size": 8}
    job = model.job(
        chosen.quantize,
        {"quant_level": 3, "fit": 1, "choices": chosen.choices},
        {"steps": chosen.steps, "batch_size": 8},
    )
    loaded = with_recipe(model.session, job.model, job.infer, job.quantize)
    offers, (error_of, calls) = offers_of(loaded), image_errors(loaded)
    priced = price(loaded, statistics, offers, calls, error_of)
    least, whole = (sum(getattr(offer, size) for offer in offers.values()) for size in ("least", "whole"))
    full, figures = model.generate(prompts, knobs), {}

    def scored(name: str, labels: Labels) -> dict[str, Any]:
        """Make and compare the images, and print the row."""
        images = model.generate(prompts, knobs, assigned(loaded, statistics, offers, labels))
        found = fidelity(full.images, images.images, full.latents, images.latents)
        interval, size = (
            mean_interval(found["psnr"]["values"]),
            sum(offers[part].bytes_with(labels[part]) for part in offers),
        )
        print(
            f"| {size / 1e6:.2f} of {whole / 1e6:.2f} MB | {name} | {interval.value:.2f} ± "
            f"{interval.high - interval.value:.2f} | {found['psnr']['min']:.2f} | {found['lpips']['mean']:.4f} |",
            flush=True,
        )
        figures[f"{name}, {size} bytes"] = {"fidelity": found, "bytes": size, "labels": labels}
        return found

    print("| weights | formats | PSNR, dB | worst | LPIPS |\n|---|---|---|---|---|")
    for share in chosen.shares:
        limit = round(least + share * (whole - least))
        apart = by_part([Group(list(offers), 0, limit)], priced, loaded.denoiser)
        one = {part: next(iter(own.values()), "") for part, own in (apart or {}).items()}
        uniform = scored(f"one a part: {', '.join(filter(None, one.values()))}", apart) if apart else None
        for allowed in (limit, round(0.85 * limit)):
            if allowed > least:
                own = scored("by layer", by_layer([Group(list(offers), 0, allowed)], priced))
                if uniform:
                    print(f"| | difference | {gain(own, uniform)} | | |", flush=True)
    report(chosen, figures)


def gain(own: Mapping[str, Any], uniform: Mapping[str, Any]) -> str:
    """The mean of paired differences in dB, with its interval."""
    interval = mean_interval(list(np.subtract(own["psnr"]["values"], uniform["psnr"]["values"])))
    return f"{interval.value:+.2f} ± {interval.high - interval.value:.2f}"


if __name__ == "__main__":
    main()
