"""The latency that OpenVINO saves when it compiles for the shapes of a call instead of for dynamic shapes.

The shipped checkpoint's UNet, unquantized and with the default recipe, is called both ways in turn, for one image with
guidance and for several. Both ways have the same file and the same threads; the outputs are compared too.

    python benchmarks/shapes.py
"""

import tempfile
from pathlib import Path
from statistics import median

import torch
from common import drawn_inputs, load, parser, recipe_of, report
from graphs import export

from sd_quant.engines import openvino
from sd_quant.engines.base import cast_inputs
from sd_quant.metrics.latency import measure_in_turn
from sd_quant.numbers import relative_error


def main() -> None:
    arguments = parser(__doc__, prompts=8)
    arguments.add_argument("--images", type=int, nargs="+", default=[1, 8], help="a call, each twice for guidance")
    arguments.add_argument("--repeats", type=int, default=100)
    options = arguments.parse_args()
    subject = load(options.prompts)
    statistics = subject.statistics(subject.sampling(options.steps, batch_size=8))
    recipe = recipe_of("int8", "quant_level=3")
    assignments = {"unquantized": {}, "int8, level 3": subject.assignment(statistics, recipe)}
    contract, latent, figures = subject.model.contracts["unet_xl"], subject.size // 8, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in export(subject, assignments, Path(folder)).items():
            for images in options.images:
                static, dynamic = openvino.load(path), openvino.load(path)
                inputs = drawn_inputs(contract, 2 * images, latent)
                arrays = [tensor.numpy() for tensor in cast_inputs(dynamic.inputs, inputs).values()]
                compiled = dynamic.compiled  # before any call: for dynamic shapes
                calls = {"static": lambda: static(**inputs), "dynamic": lambda: compiled(arrays, share_inputs=True)}  # noqa: B023
                error = relative_error(calls["static"]()["out"], torch.from_numpy(calls["dynamic"]()[0]))
                measured = measure_in_turn(calls, 10, options.repeats)
                times = {way: median(found["samples_ms"]) for way, found in measured.items()}
                figures[f"{name}, {images} images"] = times | {"relative_error": error}
                print(f"{name}, images a call: {images}: static {times['static']:.2f} ms, dynamic "
                      f"{times['dynamic']:.2f} ms, {times['dynamic'] / times['static']:.2f}x; outputs differ by "
                      f"{error:.1e}", flush=True)  # fmt: skip
    report(options, figures)


if __name__ == "__main__":
    main()
