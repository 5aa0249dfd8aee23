"""What a layer computes by a recipe, against the assignment that is derived from the same recipe."""

import pytest
import torch

from sd_quant.quantization.arithmetic import Arithmetic, absorbed_by_others, arithmetic_of, bytes_read
from sd_quant.quantization.arithmetic import stand_in as stand_in_of
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from tests.presets import recipe_of

from ..tiny import tiny  # noqa: F401  a fixture

pytestmark = pytest.mark.commit

NEAREST = ("quantize.rounding=nearest", "quantize.scale_search=false")  # which takes no time


def computed(layer: LayerAssignment) -> Arithmetic:
    """What a row computes."""
    shift = layer.activation_zero_point != 0
    return Arithmetic(
        layer.format, layer.activation_format, layer.weight_axis == 0, layer.per_token, layer.rotation, layer.rank,
        layer.multiplies, shift,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "knobs"),
    [
        ("int8", ["alpha=0.5"]), ("int8", ["alpha=0.5", "smoothing=modelopt"]), ("int8_dynamic", ["alpha=0.5"]),
        ("int8_weight_only", []), ("int8_per_tensor", []), ("nvfp4", [*NEAREST, "quantize.branch_rounds=0"]),
        ("svdquant_w4a16", ["alpha=0.5", "quantize.rank=8", *NEAREST, "quantize.branch_rounds=0"]),
        ("int8_dynamic", ["alpha=null", "smoothing=none", "quantize.rotation=16"]),
    ],
)  # fmt: skip
def test_it_is_that_of_the_derived_assignment(tiny, preset, knobs):  # noqa: F811
    case, recipe = tiny("sd15"), recipe_of(preset, "quant_level=3", *knobs)
    network = case.denoiser()
    inputs = case.checkpoint.family.shared_inputs([name for name, role in case.roles.items() if role != "conv"])
    derived = derive(
        case.roles, lambda name: network.get_submodule(name).weight, case.statistics.layers, recipe, inputs,
        bias_of=lambda name: network.get_submodule(name).bias, gain_of=lambda name: network.get_submodule(name).weight,
    )  # fmt: skip
    absorbed = absorbed_by_others(recipe, list(inputs))
    rows = {name: layer for name, layer in derived.items() if layer.format}
    assert rows
    for name, layer in rows.items():
        found = arithmetic_of(recipe, layer.role, layer.weight_shape, name in absorbed)
        # the sample decides which convolutions are shifted, of those that may be
        assert found in (computed(layer), Arithmetic(**fields(computed(layer)) | {"shift": True})), name
        assert arithmetic_of(None, layer.role, layer.weight_shape, False) is None


def fields(arithmetic: Arithmetic) -> dict:
    return {name: getattr(arithmetic, name) for name in Arithmetic.__dataclass_fields__}


@pytest.mark.parametrize(
    "arithmetic",
    [
        Arithmetic("int8", "int8", True, shift=True), Arithmetic("int8", "int8", False, per_token=True, rotation=16),
        Arithmetic("int4", None, False, rank=3, multiplies=True), Arithmetic("nvfp4", "nvfp4", False),
    ],
    ids=str,
)  # fmt: skip
def test_a_stand_in_computes_it(arithmetic):
    from sd_quant.models.layer_calls import LayerCall

    conv = arithmetic.shift
    shape = (16, 64, 3, 3) if conv else (16, 64)
    call = LayerCall((2, 64, 8, 8), (2, 16, 8, 8), shape, True, (1, 1, 1, 1) if conv else ())
    row = stand_in_of("layer", call, arithmetic, torch.randn(shape))
    assert computed(row) == arithmetic
    codes, _ = row.codes_and_scales(torch.randn(shape))
    assert codes.shape == shape


def test_bytes_worked_by_hand_and_names_of_a_table():
    assert bytes_read(None, (8, 64)) == 2 * 8 * 64
    assert bytes_read(Arithmetic("int8", "int8", True, rank=4), (8, 64)) == 8 * 64 + 2 * 8
    assert bytes_read(Arithmetic("int4", None, False), (8, 64)) == 8 * 64 // 2 + 2 * 8
    named = Arithmetic("int8", None, True, rank=32, multiplies=True)
    assert str(named) == "int8 - per_channel multiplies rank=32"
    assert named.formats == {"int8"}
