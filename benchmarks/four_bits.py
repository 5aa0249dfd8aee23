"""The effect of each part of the four-bit presets on fidelity: presets with one knob changed.

One statistics pass serves all. Images are made by the simulation in fp32, so that quantization alone
makes a difference; ``quality.py`` makes those of INT8 in OpenVINO. Finished rows are kept on disk, so a cancelled run
continues with the others. Variants were chosen on other prompts than those that are reported:

    python benchmarks/four_bits.py --prompts benchmarks/prompts/sdxl_mini_report.txt \\
        --out outputs/benchmarks/four_bits/report
    python benchmarks/four_bits.py --checkpoint outputs/sdxl_mini_second/sdxl_mini_second.nemo \\
        --calibration benchmarks/prompts/second_calibration.txt --prompts benchmarks/prompts/second_report.txt \\
        --out outputs/benchmarks/four_bits/second

``--recipes`` puts any presets with any overrides into one table, each compared with the first:

    python benchmarks/four_bits.py --model sd3_mini --prompts benchmarks/prompts/sdxl_mini_report.txt \\
        --recipes int4_w4a4 rotated_w4a4 "rotated_w4a4 quantize.rank=32" --out outputs/benchmarks/four_bits/sd3
"""

from common import job_with, recipe_of, recipe_parser, reference_of, simulated, subject_of
from quality import table

from sd_quant.config import QuantizeJob
from sd_quant.errors import ConfigError
from sd_quant.files import write_text
from sd_quant.places import CONF
from sd_quant.quantization.formats import FORMATS

LEVEL = "quant_level=3"
AS_BEFORE = ["quantize.branch_rounds=0", "quantize.rounding=nearest", "quantize.scale_search=false"]
VARIANTS = {
    "as it is": [],
    "branch_rounds=3": ["quantize.branch_rounds=3"],
    "branch_rounds=0": AS_BEFORE[:1],
    "branch_rounds=0 rounding=nearest": AS_BEFORE[:2],
    "branch_rounds=0 rounding=nearest scale_search=false": AS_BEFORE,
    "branch_rounds=0 scale_search=false": [AS_BEFORE[0], AS_BEFORE[2]],
    "nothing excluded": ["quantize.exclude.sdxl=[]"],
    "nothing excluded, branch_rounds=0 rounding=nearest scale_search=false": ["quantize.exclude.sdxl=[]", *AS_BEFORE],
}  # fmt: skip


def presets() -> list[str]:
    """Those with weights of four bits."""
    names = sorted(path.stem for path in (CONF / "quantize").glob("*.yaml"))
    return [name for name in names if FORMATS[recipe_of(name, LEVEL).enable.linear.weight].bits == 4]


def main() -> None:
    parser = recipe_parser(__doc__, "four_bits")
    parser.add_argument("--presets", nargs="+", choices=presets(), default=presets(), metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--recipes", nargs="+", metavar="'PRESET OVERRIDES'", help="instead of presets and variants")
    options = parser.parse_args()
    tables = [[(preset, name, VARIANTS[name]) for name in options.variants] for preset in options.presets]
    if options.recipes:
        tables = [[(text.split()[0], text, text.split()[1:]) for text in options.recipes]]
    subject, jobs, lines = subject_of(options), dict[str, QuantizeJob](), []
    reference, denoiser_of = reference_of(subject, options), simulated(subject, jobs.__getitem__, options.steps)
    for rows in tables:
        jobs.clear()
        for preset, name, knobs in rows:
            row = name if options.recipes else f"{preset}, {name}"
            try:
                jobs[row] = job_with(preset, f"model={options.model}", LEVEL, *knobs)
            except ConfigError as error:  # rounds of a branch that a preset has not
                if options.recipes:
                    raise
                print(f"{row}: left out, {error}")
        lines.append(table(reference.of_rows(dict.fromkeys(jobs, {}), denoiser_of, options.out)))
        write_text(options.out / "four_bits.md", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
