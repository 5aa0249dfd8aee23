"""Latency and error of INT8 in OpenVINO on this processor, with int8 kernels and with codes that are dequantized first.

The shipped checkpoint's UNet is called for one image with guidance. A processor with VNNI runs int8 kernels. Without it
their sums saturate, so codes are dequantized; the last column shows the error that this avoids: the distance of each
output to that of ONNX Runtime, which runs the same file with wide sums. Two exact computations differ a little too,
where a value lies between two codes.

    python benchmarks/saturation.py
"""

import tempfile
from pathlib import Path
from statistics import median
from unittest.mock import patch

from common import calls_of, drawn_inputs, load, parser, recipe_of, report
from graphs import export

from sd_quant.engines import onnxruntime, openvino
from sd_quant.metrics.latency import measure_in_turn
from sd_quant.numbers import relative_error


def main() -> None:
    arguments = parser(__doc__, prompts=8)
    arguments.add_argument("--repeats", type=int, default=100)
    options = arguments.parse_args()
    subject = load(options.prompts)
    statistics = subject.statistics(subject.sampling(options.steps, batch_size=8))
    assignments = {"unquantized": {}, "int8": subject.assignment(statistics, recipe_of("int8", "quant_level=3"))}
    inputs = drawn_inputs(subject.model.contracts["unet_xl"], 2, subject.size // 8)
    print(f"this processor's sums of INT8 products saturate: {openvino.saturates()}")
    with tempfile.TemporaryDirectory() as folder:
        paths = export(subject, assignments, Path(folder))
        engines = {"unquantized": openvino.load(paths["unquantized"])}
        for name, answer in {"int8 kernels": False, "dequantized": True}.items():
            with patch.object(openvino, "saturates", lambda answer=answer: answer):
                engines[name] = openvino.load(paths["int8"])
        reference = onnxruntime.load(paths["int8"])(**inputs)["out"]
        errors = {name: relative_error(reference, engine(**inputs)["out"]) for name, engine in engines.items()}
        measured = measure_in_turn(calls_of(engines, inputs), 10, options.repeats)
    times = {name: median(found["samples_ms"]) for name, found in measured.items()}
    for name, milliseconds in times.items():
        ratio = times["unquantized"] / milliseconds
        print(f"{name:13} {milliseconds:6.2f} ms, {ratio:.2f}x, from ONNX Runtime's output {errors[name]:.4f}")
    report(options, {"saturates": openvino.saturates(), "latency_ms": times, "relative_error": errors})


if __name__ == "__main__":
    main()
