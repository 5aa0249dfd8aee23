"""Bits for the whole pipeline: ``fit`` against the best choice of one format for each part, at equal bytes.

    python benchmarks/fit.py --model sdxl_mini
    python benchmarks/fit.py --model sd3_mini

A size is a share of the way from the fewest bytes of all weights to those of full precision; ``fit`` is tried once more
with 15 % less. Formats are chosen on calibration prompts, and images are made of the report prompts, simulated in
torch; differences are paired by image.
"""

from typing import Any

import numpy as np
from common import cells_of, image_parser, report, with_interval
from measurer import markdown

import sd_quant
from sd_quant.calibration.prompts import read_prompts
from sd_quant.metrics.fidelity import fidelity
from sd_quant.stages.fit import Fitted, Group, Labels, Limited, assigned, fit, measure_presets, offers_of
from sd_quant.stages.load import with_recipe


def main() -> None:
    parser = image_parser(__doc__, images=32, calib_size=None)  # the model's own prompts
    parser.add_argument("--quantize", default="int8_weight_only", help="preset of the denoiser (%(default)s)")
    parser.add_argument("--choices", nargs="+", default=["svdquant_w4a16"], help="other presets (%(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.2, 0.4], help="(%(default)s)")
    options = parser.parse_args()
    model, prompts = sd_quant.open(options.model), read_prompts(options.prompts)[: options.images]
    statistics = model.calibrate(**({} if options.calib_size is None else {"calib_size": options.calib_size}))
    knobs = {"steps": options.steps, "batch_size": options.batch}
    job = model.job(options.quantize, {"quant_level": 3, "fit": 1, "choices": options.choices}, knobs)
    loaded = with_recipe(model.session, job.model, job.infer, job.quantize)
    offers = offers_of(loaded)
    measured = measure_presets(loaded, statistics, offers)
    least, whole = (sum(getattr(offer, size) for offer in offers.values()) for size in ("least", "whole"))
    full, figures, lines = model.generate(prompts, knobs), {}, list[list[str]]()

    def scored(name: str, labels: Labels) -> dict[str, Any]:
        """Make and compare the images, and add the row."""
        images = model.generate(prompts, knobs, assigned(loaded, statistics, offers, labels))
        found = fidelity(full.images, images.images, full.latents, images.latents)
        size = sum(offers[part].bytes_with(labels[part]) for part in offers)
        lines.append([f"{size / 1e6:.2f} of {whole / 1e6:.2f} MB", name, *cells_of(found)])
        figures[f"{name}, {size} bytes"] = {"fidelity": found, "bytes": size, "labels": labels}
        return found

    def fitted(limit: int) -> Fitted:
        return fit(loaded, statistics, Limited(offers, [Group(list(offers), 0, limit)], limit), measured, options.out)

    for share in options.shares:
        limit = round(least + share * (whole - least))
        found = fitted(limit)
        apart = found.labels_with("by part") if "by part" in found.solved.candidates else None
        one = {part: next(iter(own.values()), "") for part, own in (apart or {}).items()}
        uniform = scored(f"one a part: {', '.join(filter(None, one.values()))}", apart) if apart else None
        for allowed in (limit, round(0.85 * limit)):
            if allowed > least:
                found = fitted(allowed)
                own = scored(found.solved.taken, found.labels_with(found.solved.taken))
                if uniform:
                    gains = np.subtract(own["psnr"]["values"], uniform["psnr"]["values"])
                    lines.append(["", "difference", with_interval(gains, "{:+.2f}"), "", ""])
    print(markdown(["weights", "formats", "PSNR, dB", "worst", "LPIPS"], lines))
    report(options, figures)


if __name__ == "__main__":
    main()
