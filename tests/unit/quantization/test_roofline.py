"""Predicted times, worked by hand."""

import pytest

from sd_quant.errors import ConfigError
from sd_quant.models.layer_calls import LayerCall
from sd_quant.quantization.arithmetic import Arithmetic
from sd_quant.quantization.gpus import COMMON, FP16, GPUS, INT8, LAUNCH, Gpu, check_gpu_multiplies
from sd_quant.quantization.roofline import predicted_seconds

pytestmark = pytest.mark.commit

LARGE = LayerCall((2, 4096, 1280), (2, 4096, 5120), (5120, 1280), True)  # a feed-forward of SDXL
SMALL = LayerCall((2, 1, 1280), (2, 1, 1280), (1280, 1280), True)
PER_CHANNEL = Arithmetic("int8", "int8", True)


FP8, NVFP4, INT4 = Arithmetic("fp8", "fp8", False), Arithmetic("nvfp4", "nvfp4", False), Arithmetic("int4", None, False)
OPERATIONS, WEIGHT, INPUTS_AND_OUTPUTS = 2 * 8192 * 1280 * 5120, 1280 * 1280, 2 * 2 * 2 * 1280


@pytest.mark.parametrize(
    "gpu, call, arithmetic, seconds, within",
    [
        ("h100", LARGE, None, OPERATIONS / (0.78 * 989e12), 1e-6),
        ("h100", LARGE, PER_CHANNEL, OPERATIONS / (0.42 * 1979e12), 1e-6),
        ("h200", LARGE, FP8, OPERATIONS / (0.66 * 1979e12), 1e-6),
        ("rtx_4090", LARGE, FP8, OPERATIONS / (COMMON * 330.3e12), 1e-6),
        ("b200", LARGE, NVFP4, OPERATIONS / (COMMON * 9000e12), 0.5),  # where bytes may take longer
        ("h100", SMALL, None, (2 * WEIGHT + INPUTS_AND_OUTPUTS) / 3.35e12, 1e-6),
        ("h100", SMALL, PER_CHANNEL, (WEIGHT + 2 * 1280 + INPUTS_AND_OUTPUTS) / 3.35e12, 1e-6),
        ("l40s", SMALL, INT4, (WEIGHT // 2 + 2 * WEIGHT // 64 + INPUTS_AND_OUTPUTS) / 864e9, 1e-6),
    ],
)
def test_many_rows_take_the_time_of_their_operations_and_few_that_of_their_bytes(
    gpu, call, arithmetic, seconds, within
):
    assert predicted_seconds(GPUS[gpu], call, arithmetic) == pytest.approx(LAUNCH * 1e-6 + seconds, rel=within)


@pytest.mark.parametrize(
    "arithmetic", [Arithmetic("int8", None, True), Arithmetic("int4", "int4", False), Arithmetic("int8", "fp8", True)]
)
def test_what_no_instruction_multiplies_is_multiplied_in_fp16(arithmetic):
    assert predicted_seconds(GPUS["h100"], LARGE, arithmetic) == predicted_seconds(GPUS["h100"], LARGE, None)


def test_a_branch_and_a_rotation_are_products_of_their_own():
    gpu = Gpu(90, {FP16: 1.0, INT8: 2.0}, 1e9, {FP16: 1.0, INT8: 1.0}, launch=0.0)  # whose memory takes no time
    plain = predicted_seconds(gpu, LARGE, PER_CHANNEL)
    branch = predicted_seconds(gpu, LARGE, Arithmetic("int8", "int8", True, rank=32)) - plain
    assert branch == pytest.approx(2 * 8192 * 32 * (1280 + 5120) / 1e12)
    rotation = predicted_seconds(gpu, LARGE, Arithmetic("int8", "int8", True, rotation=256)) - plain
    assert rotation == pytest.approx(2 * 8192 * 1280 * 256 / 1e12)
    slow = Gpu(90, gpu.tflops, 1e9, gpu.reached, launch=5.0)
    assert predicted_seconds(slow, LARGE, Arithmetic("int8", "int8", True, rank=32)) == pytest.approx(
        plain + branch + 3 * 5e-6
    )


def test_a_convolution_reads_its_image_once():
    conv = LayerCall((2, 320, 128, 128), (2, 320, 128, 128), (320, 320, 3, 3), True, ((1, 1), (1, 1), (1, 1), 1))
    gpu = Gpu(90, {FP16: 1e9}, 1.0, launch=0.0)  # 10^9 bytes a second
    moved = 2 * (2 * 2 * 320 * 128 * 128 + 320 * 320 * 9)
    assert predicted_seconds(gpu, conv, None) == pytest.approx(moved / 1e9)


def test_a_gpu_without_a_format_is_refused_with_those_that_have_it():
    check_gpu_multiplies("l40s", {"int8", "fp8"}, "quantize.times")
    with pytest.raises(ConfigError) as caught:
        check_gpu_multiplies("h100", {"int8", "nvfp4"}, "quantize.times")
    assert str(caught.value) == (
        "quantize.times is h100, of compute capability 9.0, expected a GPU that has nvfp4: b200, rtx_5090; choose one "
        "of these, or leave these formats out"
    )
    with pytest.raises(ConfigError, match=r"a100, of compute capability 8\.0, expected a GPU that has fp8: l40s, rtx"):
        check_gpu_multiplies("a100", {"fp8"}, "quantize.times")


def test_every_gpu_multiplies_the_codes_of_formats_that_it_has():
    """A type without a peak would silently be multiplied in fp16."""
    for gpu in GPUS.values():
        assert {FP16, INT8} <= gpu.tflops.keys()
        assert ("FLOAT8E4M3FN" in gpu.tflops) == (gpu.compute_capability >= 89)
        assert ("FLOAT4E2M1" in gpu.tflops) == (gpu.compute_capability >= 100)
