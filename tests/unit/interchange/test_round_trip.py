"""What is written of an assignment is what is read: the same codes, the same scales, inputs rounded the same.

It needs no consumer's package but gguf. ``test_<format>`` holds the readers against those packages, bit for bit;
``tests.programs`` has the programs load what is written.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sd_quant.errors import ConfigError
from sd_quant.files.tensors import lazy
from sd_quant.interchange import FORMATS, IN_BLOCKS, PER_ROW, READERS, TARGETS, weights
from sd_quant.interchange.holding import check_bf16, inputs_of
from sd_quant.interchange.nunchaku import MODULATIONS
from sd_quant.interchange.weights import high_precision, write_file
from sd_quant.models.checkpoint import denoiser_weights
from sd_quant.numbers import relative_error
from sd_quant.quantization import formats
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.rotation import rotated

from .conftest import CASES, PLAIN, recipe_of

pytestmark = pytest.mark.commit

IN_FP16 = {"diffusers_modelopt", "diffusers_nunchaku_lite", "nunchaku"}


def test_every_format_that_is_read_and_written_is_a_case():
    assert {name for name, *_ in CASES} == READERS.keys() & TARGETS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, family, fmt, options",
    [pytest.param(*case, marks=pytest.mark.consumer) if FORMATS[case[0]].package else case for case in CASES],
)
@torch.no_grad()
def test_what_is_read_is_what_was_written(tiny, tmp_path, name, family, fmt, options):
    if FORMATS[name].package is not None:
        pytest.importorskip(FORMATS[name].package)
    case = tiny(family)
    assignment = case.assignment(recipe_of(fmt, **options), name)
    read = case.read(case.written(assignment, name, tmp_path), name)
    held = [row for row in assignment.values() if row.format]
    others = {each for each in read.layers if name == "nunchaku" and each.endswith(MODULATIONS)}  # rounded to nearest
    assert read.layers.keys() - others == {row.name for row in held} and held
    weights = denoiser_weights(case.checkpoint)
    for row in held:
        weight = rewritten(weights[f"{row.name}.weight"], row)
        codes, scales = row.codes_and_scales(weight)
        branch = 0 if row.low_rank is None else row.low_rank[0].float() @ row.low_rank[1].float()
        found = rotated(read.layers[row.name].weight.read().float() - branch, row.rotation)
        fmt = formats.FORMATS[row.format]
        expected = fmt.dequantize(codes, *scales)  # where zeros of both signs are one
        assert torch.equal(fmt.dequantize(fmt.quantize(found, *scales), *scales), expected), row.name
        # in fp16 in ModelOpt's files, as nunchaku's branches are, and NVFP4's two scales in our graphs alone
        in_bf16 = name == "nunchaku" and family == "flux"
        tolerance = 5e-3 if in_bf16 else 1e-3 if name in IN_FP16 or row.format == "nvfp4" else 2e-6
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
        assert_inputs(read.layers[row.name].inputs, row, name)


def assert_inputs(inputs, row: LayerAssignment, name: str) -> None:
    """An input is moved half-way to what its codes stand for: it has the same, and 1 / scale may be rounded."""
    if row.activation_format is None or inputs_of(row, TARGETS[name]) == PER_ROW:
        code = {"fp8": "float8_e4m3fn", "int4_per_row": "int4"}.get(row.format, "int8")
        told = f"{code}, a scale a row{f', rotated by {row.rotation}' if row.rotation else ''}"
        assert inputs is None or str(inputs).removeprefix("smoothed, ") == told
        return
    if "uint4" in str(inputs):  # of a GELU's positive numbers, see ``test_nunchaku``
        return
    factor = row.pre_quant_scale.half().float() if row.multiplies else torch.ones(row.weight_shape[1])
    x = torch.randn(7, row.weight_shape[1], generator=torch.Generator().manual_seed(0)) * row.activation_amax / 2
    rounded = row.rounded_input(x)
    in_blocks = FORMATS[name].formats[row.format] == IN_BLOCKS  # scales in fp32, and none of all
    if in_blocks:  # and clips nothing
        x, rounded = x / 8, row.rounded_input(x / 8)
    x = x if in_blocks or row.activation_format == "nvfp4" else (x + rounded) / 2
    found = in_rows(inputs, x / factor, len(row.weight_shape))
    nvfp4 = 0.15 if in_blocks else 0.02
    of_blocks = {"int4": 0.05}.get(row.activation_format, 0.01)
    integers = of_blocks if in_blocks else 3e-3 if name == "diffusers_modelopt" else 1e-5
    tolerance = nvfp4 if row.activation_format == "nvfp4" else integers
    assert relative_error(rounded, found) < tolerance, row.name


def in_rows(inputs, x: Tensor, axes: int) -> Tensor:
    """``inputs`` of rows [n, in], for a convolution as pixels."""
    return inputs(x) if axes == 2 else inputs(x.T[None, :, :, None])[0, :, :, 0].T


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, family, fmt, options",
    [
        ("comfyui", "sdxl", "fp8", PLAIN | {"per_channel": False}),
        pytest.param("gguf", "flux", "int4", PLAIN | {"activation": None}, marks=pytest.mark.consumer),
        ("diffusers_torchao", "flux", "int8", PLAIN | {"per_channel": False}),
        ("modelopt_export", "flux", "fp8", PLAIN | {"per_channel": False}),
    ],
)
def test_what_is_not_quantized_is_in_bf16_if_the_checkpoint_is_exported_so(tiny, tmp_path, name, family, fmt, options):
    if FORMATS[name].package is not None:
        pytest.importorskip(FORMATS[name].package)
    case = tiny(family)
    case = replace(case, checkpoint=replace(case.checkpoint, dtypes="bf16"))
    check_bf16(FORMATS[name], case.checkpoint)
    assignment = case.assignment(recipe_of(fmt, **options), name)
    read, weights = case.read(case.written(assignment, name, tmp_path), name), denoiser_weights(case.checkpoint)
    coded = {f"{row.name}.weight" for row in assignment.values() if row.format}
    plain = read.parameters.keys() - coded
    assert any(read.parameters[each].dtype == torch.bfloat16 for each in plain)
    for each in plain:
        assert torch.equal(read.parameters[each].read().bfloat16(), weights[each].bfloat16()), each


def test_bf16_is_refused_where_a_format_has_none(tiny):
    sdxl, flux = (replace(tiny(family).checkpoint, dtypes="bf16") for family in ("sdxl", "flux"))
    for name in ("nunchaku", "diffusers_modelopt", "onnx"):
        with pytest.raises(
            ConfigError, match=f"bf16, expected fp16 with hand_over={name}, which has no bf16; comfyui, "
        ):
            check_bf16(FORMATS[name], sdxl)
    check_bf16(FORMATS["nunchaku"], flux)
    check_bf16(FORMATS["diffusers_modelopt"], replace(sdxl, dtypes={"vae": "bf16"}))


# Weights in high precision: smoothed where something in front of them is, and only there

QUERY = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


def test_a_weight_is_divided_only_where_its_input_is_multiplied(tiny):
    case = tiny("sdxl")
    weight = case.checkpoint.components["unet"][f"{QUERY}.weight"]
    row = LayerAssignment(QUERY, "qkv", tuple(weight.shape), pre_quant_scale=torch.full((weight.shape[1],), 4.0))
    folded = replace(row, folded_into="norm")
    for layer, expected in ((row, weight), (folded, weight / 4)):
        found = high_precision(case.checkpoint, {QUERY: layer})[f"{QUERY}.weight"].read()
        assert found.dtype == torch.float16 and torch.equal(found, expected.half())
    assert torch.equal(rewritten(weight, folded), weight / 4)


def test_attention_has_no_weight_of_its_own(tiny):
    case = tiny("sdxl")
    attention = QUERY.removesuffix(".to_q")
    rows = {attention: LayerAssignment(attention, "attention", (), activation_format="fp8")}
    plain, found = high_precision(case.checkpoint, {}), high_precision(case.checkpoint, rows)
    assert found.keys() == plain.keys() == set(case.checkpoint.components["unet"])
    assert all(torch.equal(found[name].read(), plain[name].read()) for name in plain if name.startswith(attention))


def test_every_tensor_that_is_written_is_a_step_of_the_progress(tmp_path, monkeypatch):
    steps = []

    @contextmanager
    def counting(total: int, what: str):
        steps.extend((total, what))
        yield lambda: steps.append("one")

    monkeypatch.setattr(weights, "progress", counting)
    write_file(tmp_path / "a.safetensors", {name: lazy(torch.ones(2)) for name in "ab"})
    assert steps == [2, "write a.safetensors", "one", "one"]
