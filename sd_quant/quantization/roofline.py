"""The time of a layer on a GPU that is not here, predicted from its data sheet: no measurement.

Each product takes the longer of two times, that of its operations at a part of the GPU's peak, and that of its bytes at
the memory's bandwidth, and what a kernel takes to start (Williams et al. 2009, "Roofline"). A low-rank branch is two
more products in fp16, a rotation one more. Quantizing an input, smoothing and scales per token are taken to be fused
into other kernels, at no time; attention's products, norms and everything else are left out.

Codes are multiplied as codes where weight and input are of one type for which the GPU has instructions, and else in
fp16, after they are decoded.

The peaks are dense ones, with sums in fp32, from NVIDIA's data sheets (H100, H200, L40S, A100 80 GB, HGX B200; all SXM
but the L40S) and white papers of the GeForce GPUs (Ada, RTX Blackwell). The parts of Hopper's peaks are estimates made
for docs/gpu.md (INT8 by a Triton kernel, FP8 by cuBLASLt); COMMON and LAUNCH are guesses for all others.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from sd_quant.errors import ConfigError
from sd_quant.models.layer_calls import LayerCall
from sd_quant.quantization.arithmetic import Arithmetic, bytes_read
from sd_quant.quantization.budget import HALF
from sd_quant.quantization.formats import FORMATS, min_compute_capability

FP16, FP8, FP4, INT8 = "FLOAT16", "FLOAT8E4M3FN", "FLOAT4E2M1", "INT8"  # names of onnx.TensorProto
COMMON = 0.7  # part of a peak that a product reaches
LAUNCH = 3.0  # microseconds from one kernel to the next, of a CUDA graph
OF_HOPPER = {FP16: 0.78, FP8: 0.66, INT8: 0.42}


@dataclass(frozen=True)
class Gpu:
    """Facts of a GPU. ``tflops``: 10^12 operations a second by the type that is multiplied."""

    compute_capability: int  # 90 for 9.0
    tflops: Mapping[str, float]
    bandwidth: float  # 10^9 bytes a second
    reached: Mapping[str, float] = field(default_factory=dict)  # parts of the peaks, by type; otherwise COMMON
    launch: float = LAUNCH  # microseconds


HOPPER = {FP16: 989.0, FP8: 1979.0, INT8: 1979.0}
GPUS: dict[str, Gpu] = {
    "a100": Gpu(80, {FP16: 312, INT8: 624}, 2039),
    "l40s": Gpu(89, {FP16: 362, FP8: 733, INT8: 733}, 864),
    "rtx_4090": Gpu(89, {FP16: 165.2, FP8: 330.3, INT8: 660.6}, 1008),
    "h100": Gpu(90, HOPPER, 3350, OF_HOPPER),
    "h200": Gpu(90, HOPPER, 4800, OF_HOPPER),
    # 7.7 TB/s is HGX's with 180 GB; 8 TB/s is published too, and INT8 is half as fast on the B300
    "b200": Gpu(100, {FP16: 2250, FP8: 4500, INT8: 4500, FP4: 9000}, 7700),
    "rtx_5090": Gpu(120, {FP16: 209.5, FP8: 419, INT8: 838, FP4: 1676}, 1792),
}


def check_gpu_multiplies(name: str, formats: Collection[str], knob: str) -> None:
    """Raises ConfigError, with the GPUs that can, where the GPU ``name`` has not all of the ``formats``."""
    able = [other for other, gpu in GPUS.items() if min_compute_capability(formats) <= gpu.compute_capability]
    if name not in able:
        have = GPUS[name].compute_capability
        lacking = [each for each in sorted(formats) if FORMATS[each].min_compute_capability > have]
        raise ConfigError(
            f"{knob} is {name}, of compute capability {have / 10:g}, expected a GPU that has {' and '.join(lacking)}: "
            f"{', '.join(able)}; choose one of these, or leave these formats out"
        )


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
