"""The effect of each part of a recipe on fidelity, on the same prompts and seeds.

One statistics pass serves all recipes. Each recipe is exported and run in OpenVINO, and its images are compared with
those of full precision in torch. Finished recipes are kept on disk, so a cancelled run continues with the others.

Recipes are chosen on one set of prompts and reported on another. A default has to gain on both checkpoints:

    python benchmarks/quality.py --prompts benchmarks/prompts/sdxl_mini_report.txt \\
        --out outputs/benchmarks/quality/report
    python examples/sdxl_mini/second.py train && python examples/sdxl_mini/second.py pack
    python benchmarks/quality.py --checkpoint outputs/sdxl_mini_second/sdxl_mini_second.nemo \\
        --calibration benchmarks/prompts/second_calibration.txt --prompts benchmarks/prompts/second_report.txt \\
        --out outputs/benchmarks/quality/second
"""

import dataclasses
from dataclasses import replace
from pathlib import Path

from common import paired, recipe_parser, reference_of, subject_of
from measurer import markdown

from sd_quant.engines import load_engine
from sd_quant.engines.base import Engine
from sd_quant.export.parts import trace_part, write_part
from sd_quant.export.tracing import copy_of
from sd_quant.files import write_text
from sd_quant.quantization.recipe import BY_ROLE, Enable, Pair, Recipe

COLUMNS = ("recipe", "PSNR, dB", "against the first", "worst", "SSIM", "LPIPS", "SQNR dB, step 1", "10", "20")
INT8, FP8 = Pair("int8", "int8"), Pair("fp8", "fp8")
PLAIN = Recipe(3.0, 0.8)
NEMO = replace(
    PLAIN, collect_method="min-mean", percentile_calibrator="modelopt", smoothing="modelopt"
)  # conf/quantize/nemo.yaml
DEFAULT = Recipe(3.0, "auto", observer=BY_ROLE, shift=True)  # as conf/quantize/int8.yaml has it
RECIPES = {
    "the default": DEFAULT,
    # what each step adds alone to plain INT8, and together
    "plain: alpha=0.8 observer=min_max shift=false": PLAIN,
    "plain with alpha=auto": replace(PLAIN, alpha="auto"),
    "plain with observer=by_role": replace(PLAIN, observer=BY_ROLE),
    "plain with shift": replace(PLAIN, shift=True),
    "plain with alpha=auto observer=by_role": replace(PLAIN, alpha="auto", observer=BY_ROLE),
    "plain with NeMo's calibrator": replace(NEMO, smoothing="folded"),
    "quantize=nemo": NEMO,
    "plain with collect_method=default": replace(PLAIN, collect_method="default"),
    "plain with collect_method=global_min": replace(PLAIN, collect_method="global_min"),
    "plain with alpha=auto observer=mse": replace(PLAIN, alpha="auto", observer="mse"),
    # the default with one knob changed
    **{f"alpha={alpha}": replace(DEFAULT, alpha=alpha) for alpha in (0.5, 0.8, 1.0)},
    "smoothing=none": replace(DEFAULT, alpha=None, smoothing="none"),
    "smoothing=modelopt": replace(DEFAULT, smoothing="modelopt"),
    **{f"observer={name}": replace(DEFAULT, observer=name) for name in ("min_max", "mse")},
    "collect_method=default": replace(DEFAULT, collect_method="default"),
    "percentile=0.4": replace(DEFAULT, percentile=0.4),
    **{f"quant_level={level:g}": replace(DEFAULT, quant_level=level) for level in (1.0, 2.0, 2.5)},
    "quant_level=4": replace(DEFAULT, quant_level=4.0, enable=Enable(INT8, INT8, "int8")),
    # the presets with one scale per tensor, whose ranges may clip nothing that was seen
    **{
        f"{preset} collect_method={method}": Recipe(
            3.0, None, enable=enable, smoothing="none", per_channel=False, collect_method=method
        )
        for preset, enable in (("fp8", Enable(FP8, FP8, None)), ("int8_per_tensor", Enable(INT8, INT8, None)))
        for method in ("mean-max", "default")
    },
}


def table(found: dict[str, dict]) -> str:
    first, lines = next(iter(found.values()))["psnr"]["values"], list[list[str]]()
    for name, closeness in found.items():
        sqnr, psnr = closeness["latent_sqnr_db"], closeness["psnr"]
        cells = [
            name,
            f"{psnr['mean']:.2f}",
            paired(psnr["values"], first) if psnr["values"] is not first else "",
            f"{psnr['min']:.2f}",
            f"{closeness['ssim']['mean']:.4f}",
            f"{closeness['lpips']['mean']:.4f}",
            *(f"{sqnr[step]:.1f}" for step in (0, len(sqnr) // 2 - 1, -1)),
        ]
        lines.append(cells)
    return markdown(COLUMNS, lines)


def main() -> None:
    parser = recipe_parser(__doc__, "quality")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME")
    options = parser.parse_args()
    subject = subject_of(options)
    checkpoint, part, reference = subject.model.checkpoint, subject.denoiser, reference_of(subject, options)
    graph, statistics = trace_part(checkpoint, part), subject.statistics(options.steps)

    def in_openvino(name: str, folder: Path) -> Engine:
        assignment = subject.assignment(statistics, RECIPES[name])
        write_part(copy_of(graph), checkpoint, part, folder / "unet.onnx", assignment)
        return load_engine("openvino", folder / "unet.onnx")

    rows = {name: {"recipe": dataclasses.asdict(RECIPES[name])} for name in options.recipes}
    text = table(reference.of_rows(rows, in_openvino, options.out))
    write_text(options.out / "quality.md", text)
    print(text)


if __name__ == "__main__":
    main()
