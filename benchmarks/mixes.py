"""A preset for each layer within a limit, against the best single preset within it, in images.

Limits are bytes of weights: parts of the way from the least that the layers can take to what they take unquantized.
Presets are chosen by images of calibration prompts, as ``quantize.budget`` does, and compared in images of others, all
by torch's simulation. The best single preset is the one whose images of these other prompts are best, which favours it.

    python benchmarks/mixes.py --model sdxl_mini --prompts benchmarks/prompts/sdxl_mini_report.txt \\
        --out outputs/benchmarks/mixes/sdxl_mini
    python benchmarks/mixes.py --model sd3_mini --prompts benchmarks/prompts/sdxl_mini_report.txt \\
        --out outputs/benchmarks/mixes/sd3_mini
"""

from statistics import fmean

from common import job_with, paired, recipe_parser, reference_of, subject_of
from measurer import markdown

from sd_quant.files import write_text
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import KEPT
from sd_quant.stages.fit_budget import Fitted, assign_chosen, byte_costs, fit_budget, measure_presets, recipes_of
from sd_quant.stages.load import units_of, with_recipe
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
    units, recipes, measured = units_of(loaded), recipes_of(loaded), measure_presets(loaded, statistics)
    fits: dict[str, Fitted] = {}
    singles: dict[str, list[str]] = {}  # the presets for all layers that are within the same limit
    costs = byte_costs(loaded, units, recipes)
    least, whole = sum(min(each.values()) for each in costs), sum(each[KEPT] for each in costs)
    for part in options.parts:
        share, row = int(least + part * (whole - least)), f"{part:g}"
        fits[row] = fit_budget(loaded, statistics, measured, share, options.out)
        print(f"{row}: {fits[row].sentence()}", flush=True)
        singles[row] = [
            label for label in options.presets if sum(each.get(label, each[KEPT]) for each in costs) <= share
        ]

    def assignment_of(row: str) -> dict[str, LayerAssignment]:
        if row in fits:
            return fits[row].assignment
        names = [name for unit in units for name in unit]
        return assign_chosen(loaded, statistics, dict.fromkeys(names, row))

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
        entry = fitted.entry()
        layers = ", ".join(f"{count} {label}" for label, count in entry["layers"].items() if count)
        limit = f"{row}: {entry['limit_bytes']} bytes"
        lines.append([limit, f"{layers} ({entry['taken']})", f"{fmean(psnr[row]):.2f}", *against])
    text = markdown(["preset alone", "dB"], [[name, f"{fmean(psnr[name]):.2f}"] for name in options.presets])
    text += "\n" + markdown(["limit", "layers", "dB", "best single preset within it", "difference, dB"], lines)
    write_text(options.out / "mixes.md", text)
    print(text)


if __name__ == "__main__":
    main()
