"""A preset for each layer within a limit, against the best single preset within it, in images.

Limits are bytes of weights: parts of the way from the least that the layers can take to what they take unquantized.
Presets are chosen by images of calibration prompts, as ``quantize.budget`` does, and compared in images of others, all
by torch's simulation. The best single preset is the one whose images of these other prompts are best, which favours it.

    python benchmarks/mixes.py --model sdxl_mini --prompts benchmarks/prompts/sdxl_mini_report.txt \\
        --out outputs/benchmarks/mixes/sdxl_mini
    python benchmarks/mixes.py --model sd3_mini --prompts benchmarks/prompts/sdxl_mini_report.txt \\
        --out outputs/benchmarks/mixes/sd3_mini
"""

from collections import Counter
from dataclasses import replace
from statistics import fmean

from common import job_with, paired, recipe_parser, reference_of, subject_of
from measurer import markdown

from sd_quant.files import write_text
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.stages.fit import Fitted, Group, assign_chosen, fit, limit_of, measure_presets
from sd_quant.stages.load import with_recipe
from sd_quant.stages.open_parts import open_simulated
from sd_quant.stages.session import Session

PRESETS = ["int8", "fp8_per_row", "svdquant_w4a16", "int4_w4a4", "nvfp4"]  # the first is the job's


def main() -> None:
    parser = recipe_parser(__doc__, "mixes")
    parser.add_argument("--presets", nargs="+", default=PRESETS, metavar="NAME")
    parser.add_argument("--parts", type=float, nargs="+", default=[0.1, 0.25, 0.5])
    options = parser.parse_args()
    subject = subject_of(options)
    checkpoint = subject.model.checkpoint
    choices = f"quantize.choices=[{','.join(options.presets[1:])}]"
    limit = "quantize.budget=0.4"  # any, so that presets are mixed
    job = job_with(options.presets[0], f"model={options.model}", "quant_level=3", limit, choices)
    loaded = with_recipe(Session(checkpoint), job.model, job.infer, job.quantize)
    statistics, reference = subject.statistics(options.steps), reference_of(subject, options)
    limited = limit_of(loaded)
    [(denoiser, offer)], measured = limited.offers.items(), measure_presets(loaded, statistics, limited.offers)
    fits: dict[str, Fitted] = {}
    singles: dict[str, list[str]] = {}  # the presets for all layers that are within the same limit
    for part in options.parts:
        most, row = int(offer.least + part * (offer.whole - offer.least)), f"{part:g}"
        given = replace(limited, limit=most, groups=[Group([denoiser], 0, most)])
        fits[row] = fit(loaded, statistics, given, measured, options.out)
        print(f"{row}: {fits[row].sentence()}", flush=True)
        singles[row] = [label for label in options.presets if offer.bytes_with(offer.all_in(label)) <= most]

    def assignment_of(row: str) -> dict[str, LayerAssignment]:
        if row in fits:
            return fits[row].assignment
        return assign_chosen(loaded, statistics, offer.all_in(row))

    found = reference.of_rows(
        dict.fromkeys([*options.presets, *fits], {}),
        lambda row, _: open_simulated(checkpoint, assignment_of(row)),
        options.out,
    )
    psnr = {row: each["psnr"]["values"] for row, each in found.items()}
    lines = []
    for row, fitted in fits.items():
        best = max(singles[row], key=lambda label: fmean(psnr[label]), default=None)
        against = [best, paired(psnr[row], psnr[best])] if best else ["none", ""]
        layers = ", ".join(f"{count} {label}" for label, count in Counter(fitted.labels.values()).items())
        limit = f"{row}: {fitted.limited.limit} bytes"
        lines.append([limit, f"{layers} ({fitted.solved.taken})", f"{fmean(psnr[row]):.2f}", *against])
    text = markdown(["preset alone", "dB"], [[name, f"{fmean(psnr[name]):.2f}"] for name in options.presets])
    text += "\n" + markdown(["limit", "layers", "dB", "best single preset within it", "difference, dB"], lines)
    write_text(options.out / "mixes.md", text)
    print(text)


if __name__ == "__main__":
    main()
