"""diffusers and SDNQ load what is written, and compute what the simulation computes."""

import pytest
import torch

from sd_quant.hand_over.weights import codes_and_scales
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Enable, Pair, Recipe

from .conftest import layer_errors, network_error

TARGET = "diffusers_sdnq"
pytestmark = pytest.mark.consumer
pytest.importorskip("sdnq")


def weights_in(name: str, **options) -> Recipe:
    """``name`` for convolutions too, unless it is in blocks."""
    pair = Pair(name, None)
    conv = pair if FORMATS[name].static_scale else Pair("int8", None)
    return Recipe(3.0, **{"alpha": None, **options}, collect_method="min-max", enable=Enable(conv, pair, None))


CASES = {
    "int8": ("sdxl", weights_in("int8")),
    "int8-folded": ("sdxl", weights_in("int8", alpha=0.8)),
    "fp8": ("sdxl", weights_in("fp8", per_channel=False)),
    "int4-rank": ("sdxl", weights_in("int4", rank=0.1)),  # with convolutions in int8
    "int4-gptq": ("pixart", weights_in("int4", rounding="gptq")),
    "flux-fp8": ("flux", weights_in("fp8")),
    "sd3-per-token": (  # whose inputs are fp16 here
        "sd3",
        Recipe(
            3.0,
            None,
            collect_method="min-max",
            per_token=True,
            enable=Enable(Pair("int8", "int8"), Pair("int8", "int8"), None),
        ),
    ),
}


@pytest.fixture(scope="module", params=CASES)
def written(request, tiny, tmp_path_factory):
    family, recipe = CASES[request.param]
    case = tiny(family)
    assignment = case.assignment(recipe, TARGET)
    return case, assignment, case.written(assignment, TARGET, tmp_path_factory.mktemp("sdnq"))


def test_layers_and_the_network_are_the_simulation(written):
    case, assignment, folder = written
    theirs, simulated = case.loaded(folder), case.simulated(assignment, TARGET)
    layers = {name: layer for name, layer in assignment.items() if layer.format}
    assert {name for name, module in theirs.named_modules() if hasattr(module, "sdnq_dequantizer")} == layers.keys()
    for name, layer in layers.items():
        module = theirs.get_submodule(name)
        codes, scales = codes_and_scales(case.checkpoint, layer)
        weight = FORMATS[layer.format].dequantize(codes, scales)
        found = module.sdnq_dequantizer(weight=module.weight, scale=module.scale, skip_compile=True)
        assert torch.equal(found.flatten(1), weight), name
        assert (module.svd_up is None) == (layer.low_rank is None)
    errors = layer_errors(case, simulated, theirs, assignment)
    whole = network_error(case, simulated, theirs)
    assert max(errors.values()) < 1e-5 and whole < 1e-5


def test_fp16_keeps_every_scale(tiny, tmp_path):
    """diffusers casts scales to the dtype that it is told to load: ours are fp16's numbers, and not bfloat16's."""
    case = tiny("sdxl")
    assignment = case.assignment(CASES["int8"][1], TARGET)
    case.written(assignment, TARGET, tmp_path)
    expected, half, brain = (case.loaded(tmp_path, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    name = next(name for name, layer in assignment.items() if layer.format)
    scale = expected.get_submodule(name).scale
    assert torch.equal(half.get_submodule(name).scale, scale)
    assert not torch.equal(brain.get_submodule(name).scale, scale)
