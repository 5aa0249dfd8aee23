"""The shapes of layers' calls, found without numbers, against those that hooks see in a call with numbers."""

import pytest
import torch
from torch import nn

from sd_quant.models.checkpoint import denoiser_of, denoiser_part
from sd_quant.models.layer_calls import LayerCall, WatchingProducts, layer_calls
from sd_quant.models.parts import axes

from ..tiny import tiny  # noqa: F401  a fixture

pytestmark = pytest.mark.commit

SIZES = {"batch": 2, "width": 64, "height": 128}  # as ``Tiny.inputs``


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_shapes_are_those_of_a_real_call(tiny, name):  # noqa: F811
    case = tiny(name)
    part, seen = case.part(), {}
    network = denoiser_of(case.checkpoint, part)
    for layer_name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):

            def note(layer, inputs, output, layer_name=layer_name):
                seen.setdefault(layer_name, []).append((tuple(inputs[0].shape), tuple(output.shape)))

            layer.register_forward_hook(note)
    with torch.no_grad():
        part(**case.inputs())
    shapes = denoiser_part(case.checkpoint).contract.shapes(**axes(**SIZES))
    found = layer_calls(case.checkpoint, case.checkpoint.family.DENOISER, shapes)
    assert {name: [(call.input_shape, call.output_shape) for call in calls] for name, calls in found.items()} == seen
    assert case.roles.keys() <= found.keys()
    for name, (call, *_) in found.items():
        layer = network.get_submodule(name)
        assert call.weight_shape == tuple(layer.weight.shape) and call.bias == (layer.bias is not None)
        if isinstance(layer, nn.Conv2d):
            assert call.geometry == (layer.stride, layer.padding, layer.dilation, layer.groups)


def test_rows_and_operations_worked_by_hand():
    conv = LayerCall((2, 8, 6, 4), (2, 16, 3, 2), (16, 8, 3, 3), True, ((2, 2), (1, 1), (1, 1), 1))
    assert (conv.rows, conv.inputs, conv.outputs, conv.operations) == (12, 72, 16, 2 * 12 * 72 * 16)
    linear = LayerCall((2, 5, 8), (2, 5, 16), (16, 8), False)
    assert (linear.rows, linear.inputs, linear.outputs) == (10, 8, 16)


def test_a_layer_that_is_called_twice_and_a_weight_that_code_multiplies_are_seen():
    layer, other = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
    with WatchingProducts({id(layer.weight): "layer", id(other.weight): "other"}) as watching:
        x = layer(torch.ones(3, 4))
        layer(torch.ones(5, 4))
        nn.functional.linear(input=x, weight=other.weight)
        nn.Linear(8, 2)(x)  # has no name
    assert watching.calls == {
        "layer": [LayerCall((3, 4), (3, 8), (8, 4), True), LayerCall((5, 4), (5, 8), (8, 4), True)],
        "other": [LayerCall((3, 8), (3, 4), (4, 8), False)],
    }
