"""The time of a layer on a GPU that is not here, predicted from its data sheet: no measurement.

Each product takes the longer of two times, that of its operations at the part of the GPU's peak that is reached, and
that of its bytes at the memory's bandwidth, and what a kernel takes to start (Williams et al. 2009, "Roofline"). A
low-rank branch is two more products in fp16, a rotation one more. Quantizing an input, smoothing and scales per token
are taken to be fused into other kernels, at no time; attention's products, norms and everything else are left out.

Codes are multiplied as codes where weight and input are of one type for which the GPU has instructions, and else in
fp16, after they are decoded.
"""

from collections.abc import Iterator
from math import prod

from sd_quant.models.layer_calls import LayerCall
from sd_quant.quantization.arithmetic import Arithmetic, bytes_read
from sd_quant.quantization.budget import HALF
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.gpus import COMMON, FP16, Gpu


def multiplied(gpu: Gpu, arithmetic: Arithmetic | None) -> str:
    """The type that the GPU multiplies: that of the codes where both are of one that it has, else fp16."""
    if arithmetic is None or arithmetic.activation is None:
        return FP16
    weight, activation = (FORMATS[name].onnx_type for name in (arithmetic.weight, arithmetic.activation))
    return weight if weight == activation and weight in gpu.tflops else FP16


def products(gpu: Gpu, call: LayerCall, arithmetic: Arithmetic | None) -> Iterator[tuple[str, int, int]]:
    """The type, operations and bytes of each product of a layer's call."""
    inputs, outputs = prod(call.input_shape), prod(call.output_shape)
    weight = bytes_read(arithmetic, call.weight_shape)
    yield multiplied(gpu, arithmetic), call.operations, weight + HALF * (inputs + outputs)
    if arithmetic is not None and arithmetic.rank:
        rank, rows = arithmetic.rank, call.rows
        yield FP16, 2 * rows * rank * call.inputs, HALF * (rank * call.inputs + inputs + rows * rank)
        yield FP16, 2 * rows * rank * call.outputs, HALF * (rank * call.outputs + rows * rank + outputs)
    if arithmetic is not None and arithmetic.rotation:
        yield FP16, 2 * inputs * arithmetic.rotation, HALF * (2 * inputs + arithmetic.rotation**2)


def predicted_seconds(gpu: Gpu, call: LayerCall, arithmetic: Arithmetic | None) -> float:
    """Seconds of one call of a layer on the ``gpu``; None: unquantized, in fp16."""
    seconds = 0.0
    for kind, operations, moved in products(gpu, call, arithmetic):
        reached = gpu.reached.get(kind, COMMON) * gpu.tflops[kind] * 1e12
        seconds += gpu.launch * 1e-6 + max(operations / reached, moved / (gpu.bandwidth * 1e9))
    return seconds
