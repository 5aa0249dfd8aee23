"""The latency of a convolution's shifted input, in each form that ONNX has for it, against a symmetric input.

Every graph is three residual blocks of SiLU, convolution and addition. All forms compute asymmetric quantization with
zeros around the image; they differ in where the zero point went:

    zero_point   QuantizeLinear and DequantizeLinear have it, which TensorRT refuses
    map          Sub, and a constant map behind the convolution, which holds for one size of image
    convolution  Sub, and that map computed by a convolution of ones
    pad          Sub, Pad in front of QuantizeLinear, another bias
    pad_codes    Sub, Pad behind QuantizeLinear, another bias: the form that sd-quant exports

    python benchmarks/shift.py --engine openvino

All forms of one size are called in turn. Ratios are medians to the symmetric graph.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from common import report
from onnx import TensorProto, helper, numpy_helper

from sd_quant.engines import load_engine

FORMS = ("symmetric", "zero_point", "map", "convolution", "pad", "pad_codes")
SIZES = ((64, 8), (128, 4), (320, 32), (640, 32), (320, 64), (1280, 16))  # channels; height and width
SCALE, ZERO_POINT = np.float16(0.02), -114
SHIFT = np.float16(-ZERO_POINT * np.float32(SCALE))
BLOCKS = 3


def graph(form: str, channels: int, size: int, dynamic: bool) -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    nodes, constants = [], []

    def constant(name: str, value) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(op_type: str, inputs: list[str], name: str, **attributes) -> str:
        nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def block(x: str, p: str) -> str:
        codes = generator.integers(-127, 128, (channels, channels, 3, 3)).astype(np.int8)
        scales = (generator.random(channels) * 1e-3 + 1e-3).astype(np.float16)
        bias = generator.normal(size=channels).astype(np.float16)
        taps = (codes * scales.astype(np.float32)[:, None, None, None]).sum(1, keepdims=True)
        taps *= -ZERO_POINT * np.float32(SCALE)
        padding, of_shift = [1, 1, 1, 1], taps.sum((1, 2, 3))
        value = node("Mul", [x, node("Sigmoid", [x], f"{p}.sigmoid")], f"{p}.silu")
        scale = constant(f"{p}.scale", SCALE)
        zero = constant(f"{p}.zero", np.int8(ZERO_POINT if form == "zero_point" else 0))
        sides = constant(f"{p}.sides", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)) if "pad" in form else ""
        if form not in ("symmetric", "zero_point"):
            value = node("Sub", [value, constant(f"{p}.shift", SHIFT)], f"{p}.shifted")
        outside = constant(f"{p}.outside", -SHIFT) if sides else ""
        if form == "pad":
            value = node("Pad", [value, sides, outside], f"{p}.padded")
        value = node("QuantizeLinear", [value, scale, zero], f"{p}.quantized")
        if form == "pad_codes":
            outside = node("QuantizeLinear", [outside, scale, zero], f"{p}.outside_quantized")
            value = node("Pad", [value, sides, outside], f"{p}.padded")
        if sides:
            padding, bias = [0, 0, 0, 0], (bias + of_shift).astype(np.float16)
        value = node("DequantizeLinear", [value, scale, zero], f"{p}.dequantized")
        stored = [constant(f"{p}.codes", codes), constant(f"{p}.scales", scales)]
        stored.append(constant(f"{p}.zeros", np.zeros(channels, np.int8)))  # ONNX Runtime adds one, for all channels
        weight = node("DequantizeLinear", stored, f"{p}.weight", axis=0)
        value = node("Conv", [value, weight, constant(f"{p}.bias", bias)], f"{p}.conv", pads=padding)
        if form == "map":
            ones = torch.ones(1, 1, size, size)
            answer = torch.nn.functional.conv2d(ones, torch.from_numpy(taps), padding=1).numpy()
            value = node("Add", [value, constant(f"{p}.map", answer.astype(np.float16))], f"{p}.with_map")
        if form == "convolution":
            shape = node("Shape", [x], f"{p}.shape", start=2, end=4)
            shape = node("Concat", [constant(f"{p}.one", np.ones(2, np.int64)), shape], f"{p}.of_ones", axis=0)
            one = numpy_helper.from_array(np.ones(1, np.float16))
            ones = node("ConstantOfShape", [shape], f"{p}.ones", value=one)
            answer = [ones, constant(f"{p}.taps", taps.astype(np.float16))]
            value = node("Add", [value, node("Conv", answer, f"{p}.map", pads=[1] * 4)], f"{p}.with_map")
        return node("Add", [x, value], f"{p}.sum")

    x = "x"
    for index in range(BLOCKS):
        x = block(x, f"block{index}")
    shape = [1, channels, *(("height", "width") if dynamic else (size, size))]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape)] for name in ("x", x)]
    made = helper.make_graph(nodes, "shift", *ends, constants)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def in_turn(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The median time of each call in ms, called in a new random order until the time is over."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times["symmetric"]) < 3:
        for name in random.sample(list(calls), len(calls)):
            start = time.perf_counter()
            calls[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["openvino", "onnxruntime"], default="openvino")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes")
    parser.add_argument("--seconds", type=float, default=8, help="for all forms of one size")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    rows = []
    print("| channels, size | image | symmetric | " + " | ".join(FORMS[1:]) + " |")
    print("|---" * (len(FORMS) + 2) + "|")
    for channels, size in SIZES[: options.sizes]:
        x = torch.randn(1, channels, size, size).half()
        for dynamic in (False, True):
            forms = [form for form in FORMS if not (dynamic and form == "map")]
            with tempfile.TemporaryDirectory() as folder:
                engines = {}
                for form in forms:
                    onnx.save(graph(form, channels, size, dynamic), Path(folder) / f"{form}.onnx")
                    engines[form] = load_engine(options.engine, Path(folder) / f"{form}.onnx")
                calls = {form: lambda engine=engine, x=x: engine(x=x) for form, engine in engines.items()}
                latency = in_turn(calls, options.seconds)
            image = "any size" if dynamic else "fixed"
            rows.append({"channels": channels, "size": size, "image": image, "latency_ms": latency})
            ratios = [f"{latency[form] / latency['symmetric']:.3f}" if form in latency else "–" for form in FORMS[1:]]
            print(
                f"| {channels}, {size}x{size} | {image} | {latency['symmetric']:.2f} ms | {' | '.join(ratios)} |",
                flush=True,
            )
    report(options, {"rows": rows})


if __name__ == "__main__":
    main()
