"""GPUs for which times of layers are predicted (``roofline``). No torch is imported, because knobs name them.

The peaks are dense ones, without sparsity and with sums in fp32, as NVIDIA's data sheets have them (A100 80 GB, H100,
H200 and HGX B200, all SXM, and L40S; where a sheet has sparse figures alone, half of them) and its white papers of the
GeForce GPUs (Ada, RTX Blackwell). What a product reaches of them is estimated: on Hopper for fp16 and FP8 by cuBLASLt
and for INT8 by a Triton kernel; elsewhere COMMON, which is a guess, as LAUNCH is.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sd_quant.errors import ConfigError
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
            f"{knob} is {name}, of compute capability {have / 10:.1f}, expected a GPU that has "
            f"{' and '.join(lacking)}: {', '.join(able)}; choose one of these, or leave these formats out"
        )
