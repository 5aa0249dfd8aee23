"""Inputs scaled per token: what the exported graph costs, and what OpenVINO's own dynamic quantization costs.

    python benchmarks/dynamic_inputs.py

A linear with INT8 weights, one scale per channel, as OpenVINO computes it: unquantized, with a static scale of its
input (``int8``), with each token divided by its largest magnitude in front of a static scale and multiplied behind the
product (``int8_dynamic``, as ``sd_quant.export.qdq`` writes it), and from a graph with quantized weights alone, whose
inputs OpenVINO quantizes in groups (DYNAMIC_QUANTIZATION_GROUP_SIZE; a group of a whole row is a scale per token). All
are called in turn. The error is to the formula of ``int8_dynamic``; a static scale is another function.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import openvino
import torch
from openvino import opset13 as opset

from sd_quant.engines.openvino import FP32

SHAPES = {  # tokens, inputs and outputs of a linear
    "SD3 medium, feed-forward in": (4096, 1536, 6144),
    "SD3 medium, feed-forward out": (4096, 6144, 1536),
    "PixArt-Sigma, feed-forward in": (4096, 1152, 4608),
    "sd3_mini, feed-forward in": (64, 128, 512),
}
CODE = 127  # the largest


def weights_of(inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A weight [out, in], its codes and its scales [out, 1]."""
    weight = np.random.default_rng(0).normal(size=(outputs, inputs)).astype(np.float32) / np.sqrt(inputs, dtype="f4")
    scale = np.abs(weight).max(1, keepdims=True) / CODE
    return weight, np.round(weight / scale).astype(np.int8), scale


def model(tokens: int, inputs: int, outputs: int, how: str) -> openvino.Model:
    weight, codes, scale = weights_of(inputs, outputs)
    x = opset.parameter([1, tokens, inputs], np.float32)
    dequantized = opset.multiply(opset.convert(opset.constant(codes), "f32"), opset.constant(scale))

    def rounded(value, amax: float):
        ends = [opset.constant(np.float32(end)) for end in (-amax * (CODE + 1) / CODE, amax)]
        return opset.fake_quantize(value, *ends, *ends, 256)

    if how == "unquantized":
        product = opset.matmul(x, opset.constant(weight), False, True)
    elif how == "static":
        product = opset.matmul(rounded(x, 5.0), dequantized, False, True)
    elif how == "per token":
        largest = opset.reduce_max(opset.abs(x), opset.constant(np.array([-1])), keep_dims=True)
        largest = opset.maximum(largest, opset.constant(np.float32(1e-6)))
        product = opset.multiply(
            opset.matmul(rounded(opset.divide(x, largest), 1.0), dequantized, False, True), largest
        )
    else:
        product = opset.matmul(x, dequantized, False, True)
    return openvino.Model([product], [x])


def rows_of(inputs: int) -> dict[str, tuple[str, dict]]:
    """The graph and the settings of each row."""
    rows: dict[str, tuple[str, dict]] = {
        "unquantized": ("unquantized", {}),
        "unquantized in bf16": ("unquantized", {"INFERENCE_PRECISION_HINT": "bf16"}),
        "`int8`": ("static", {}),
        "`int8_dynamic`": ("per token", {}),
    }
    for group in (128, inputs):
        rows[f"OpenVINO's, groups of {group}"] = ("weights", {"DYNAMIC_QUANTIZATION_GROUP_SIZE": group})
    return rows


def per_token(x: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The formula."""
    largest = np.abs(x).max(-1, keepdims=True)
    return (np.round(x / largest * CODE) @ codes.T.astype(np.float32)) * largest / CODE * scale.T


def measured(tokens: int, inputs: int, outputs: int, seconds: float) -> dict[str, tuple[float, float]]:
    """Median milliseconds and relative error of each row."""
    x = np.random.default_rng(1).normal(size=(1, tokens, inputs)).astype(np.float32)
    settings = FP32 | {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    calls: dict[str, Callable] = {}
    for name, (how, own) in rows_of(inputs).items():
        calls[name] = openvino.compile_model(model(tokens, inputs, outputs, how), "CPU", settings | own)
    wanted = per_token(x, *weights_of(inputs, outputs)[1:])
    errors = {name: np.linalg.norm(call(x)[0] - wanted) / np.linalg.norm(wanted) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken["`int8`"]) < 3:
        for name, call in calls.items():
            start = time.perf_counter()
            call(x, share_inputs=True)
            taken[name].append(1000 * (time.perf_counter() - start))
    return {name: (statistics.median(times), errors[name]) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=10, help="of calls for each linear (%(default)s)")
    parser.add_argument("--tokens", type=int, help="in place of each linear's own")
    options = parser.parse_args()
    print("| linear, tokens x inputs to outputs | | a call | over unquantized | error |\n|---|---|---|---|---|")
    for label, (tokens, inputs, outputs) in SHAPES.items():
        tokens = options.tokens or tokens
        found = measured(tokens, inputs, outputs, options.seconds)
        reference = found["unquantized"][0]
        for name, (milliseconds, error) in found.items():
            which = f"{label}, {tokens} x {inputs} to {outputs}" if name == "unquantized" else ""
            cells = [which, name, f"{milliseconds:.3g} ms", f"{reference / milliseconds:.2f}x", f"{error:.2g}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
