"""diffusers and torchao load what is written, and compute what the simulation computes."""

import json

import pytest
import torch
from safetensors import safe_open

from sd_quant.hand_over import diffusers_torchao
from sd_quant.hand_over.weights import codes_and_scales
from sd_quant.models.checkpoint import denoiser_of
from sd_quant.numbers import relative_error
from sd_quant.quantization.recipe import Recipe

from .conftest import layer_errors, network_error

TARGET = "diffusers_torchao"
pytestmark = pytest.mark.consumer
pytest.importorskip("torchao")
CASES = {  # of the smoothed, some linears multiply
    "sdxl-folded": ("sdxl", {}),
    "sdxl-modelopt": ("sdxl", {"smoothing": "modelopt", "per_channel": False}),
    "sdxl-per-token": ("sdxl", {"smoothing": "modelopt", "per_token": True}),
    "flux-folded": ("flux", {}),
    "sd3-folded": ("sd3", {}),
    "sd3-per-token": ("sd3", {"per_token": True}),
}


@pytest.fixture(scope="module", params=CASES)
def written(request, tiny, tmp_path_factory):
    family, options = CASES[request.param]
    case = tiny(family)
    recipe = Recipe(3.0, 0.8, collect_method="min-max", **{"smoothing": "folded", "per_channel": True, **options})
    assignment = case.assignment(recipe, TARGET)
    return case, assignment, case.written(assignment, TARGET, tmp_path_factory.mktemp("torchao"))


def test_layers_and_the_network_are_the_simulation(written):
    from torchao.quantization import Int8Tensor

    case, assignment, folder = written
    theirs, simulated = case.loaded(folder), case.simulated(assignment, TARGET)
    layers = {name: layer for name, layer in assignment.items() if layer.format}
    held = {name for name, module in theirs.named_modules() if isinstance(getattr(module, "weight", 0), Int8Tensor)}
    assert held == layers.keys()
    assert any(layer.multiplies for layer in layers.values())
    for name, layer in layers.items():
        weight = theirs.get_submodule(name).weight
        codes, scales = codes_and_scales(case.checkpoint, layer)
        assert torch.equal(weight.qdata, codes) and torch.equal(weight.scale, scales.expand_as(weight.scale))
        assert (weight.act_pre_scale is not None) == layer.multiplies
        assert (weight.act_quant_scale is None) == layer.per_token
        granularity = type(weight.act_quant_kwargs.granularity).__name__
        assert granularity == ("PerRow" if layer.per_token else "PerTensor")
    errors = layer_errors(case, simulated, theirs, assignment)
    assert max(errors.values()) < 1e-5
    whole, unquantized = network_error(case, simulated, theirs), network_error(case, case.part(), theirs)
    # an input within rounding of a half may get the neighbouring code, and changes those behind it
    if not any(layer.per_token for layer in layers.values()):  # of these see below
        assert whole < 0.2 * unquantized, unquantized


@torch.no_grad()
def test_a_network_whose_inputs_come_per_token_is_as_far_from_full_precision(tiny, tmp_path):
    """Not the same: the largest of a row is half-way between two codes where it is negative, -127.5."""
    case = tiny("sdxl")
    assignment = case.assignment(Recipe(3.0, 0.8, collect_method="min-max", per_token=True), TARGET)
    theirs = case.wrapped(case.loaded(case.written(assignment, TARGET, tmp_path)))
    simulated, exact = case.simulated(assignment, TARGET), case.part()
    for seed in range(7, 10):
        inputs = case.inputs(seed)
        expected = exact(**inputs)
        ours, found = relative_error(expected, simulated(**inputs)), relative_error(expected, theirs(**inputs))
        assert found == pytest.approx(ours, rel=0.2)


def test_the_file_is_what_torchao_itself_would_write(written):
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    case, assignment, folder = written
    name = next(name for name, layer in assignment.items() if layer.format and layer.multiplies)
    weight = case.loaded(folder).get_submodule(name).weight
    expected, metadata = flatten_tensor_state_dict({f"{name}.weight": weight.data})
    with safe_open(folder / case.component / diffusers_torchao.FILE, framework="pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}._weight_")}
        theirs, ours = (json.loads(data[f"{name}.weight"]) for data in (metadata, file.metadata()))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    assert set(ours.pop("_tensor_data_names")) == set(theirs.pop("_tensor_data_names"))
    assert ours == theirs


def test_it_loads_in_the_precision_that_diffusers_advises(tiny, tmp_path):
    case = tiny("sdxl")
    assignment = case.assignment(Recipe(3.0, 0.8, collect_method="min-max"), TARGET)
    case.written(assignment, TARGET, tmp_path)
    inputs = {name: tensor.bfloat16() for name, tensor in case.inputs(7).items()}
    with torch.no_grad():
        theirs = case.wrapped(case.loaded(tmp_path, torch.bfloat16))(**inputs)
        ours = case.simulated(assignment, TARGET)(**case.inputs(7))
    error = (theirs - ours).norm() / ours.norm()
    assert theirs.dtype == torch.bfloat16 and error < 0.1


def test_ranks_are_those_of_the_inputs(tiny):
    case = tiny("sdxl")
    found = diffusers_torchao.input_ranks(
        case.checkpoint, [name for name, role in case.roles.items() if role != "excluded"]
    )
    expected = {}
    part = case.part()
    denoiser = denoiser_of(case.checkpoint, part)
    for name in found:
        denoiser.get_submodule(name).register_forward_pre_hook(
            lambda layer, inputs, name=name: expected.update({name: inputs[0].ndim})
        )
    with torch.no_grad():
        part(**case.inputs(0))
    assert found == expected and set(found.values()) == {3, 4}
