"""diffusers and its quantization libraries load what is written, and compute what our reader says of it."""

import modelopt.torch.opt as mto
import pytest
import torch

from sd_quant.interchange.weights import codes_and_scales
from sd_quant.quantization.formats import FORMATS

from .cases import CASES

pytestmark = pytest.mark.commit

consumer = pytest.mark.consumer
MODELOPT, SDNQ, TORCHAO = "diffusers_modelopt", "diffusers_sdnq", "diffusers_torchao"
NEEDED = {MODELOPT: "accelerate", SDNQ: "sdnq", TORCHAO: "torchao"}


@pytest.fixture
def written(written_once):
    def write(target: str, family: str, fmt: str, options: dict):
        pytest.importorskip(NEEDED[target])
        if target == MODELOPT:
            mto.enable_huggingface_checkpointing()
        return written_once(target, family, fmt, **options)

    return write


@consumer
@pytest.mark.parametrize("target, family, fmt, options", [case for case in CASES if case[0] in NEEDED])
def test_layers_and_the_network_are_those_of_the_reader(written, target, family, fmt, options):
    case, assignment, folder = written(target, family, fmt, options)
    read = case.read(folder, target)
    theirs, ours = case.loaded(folder), case.network(read)
    layers = {name: layer for name, layer in assignment.items() if layer.format}
    # weights of ModelOpt are read in the file's fp16
    assert max(case.error_of_layers(ours, theirs, read).values()) < (5e-4 if target == MODELOPT else 1e-5)
    if target == SDNQ:
        assert case.error(ours, theirs) < 1e-5
    else:  # an input within rounding of a half may get the other code, and changes those behind it: as far, elsewhere
        exact = case.denoiser()
        assert case.error(exact, theirs) == pytest.approx(case.error(exact, ours), rel=0.25)
    for name, layer in layers.items():
        if target != MODELOPT:
            CHECKS[target](layer, theirs.get_submodule(name), *codes_and_scales(case.checkpoint, layer))


def check_sdnq(layer, module, codes, scales) -> None:
    found = module.sdnq_dequantizer(weight=module.weight, scale=module.scale, skip_compile=True)
    assert torch.equal(found.flatten(1), FORMATS[layer.format].dequantize(codes, scales)), layer.name
    assert (module.svd_up is None) == (layer.low_rank is None)


def check_torchao(layer, module, codes, scales) -> None:
    weight = module.weight
    assert torch.equal(weight.qdata, codes) and torch.equal(weight.scale, scales.expand_as(weight.scale))
    if layer.activation_format is None and layer.format == "int8":
        assert weight.act_quant_kwargs is None
        return
    if layer.format == "fp8":
        assert type(weight.act_quant_kwargs.granularity).__name__ == "PerRow"
        return
    assert (weight.act_pre_scale is not None) == layer.multiplies
    assert (weight.act_quant_scale is None) == layer.per_token
    granularity = type(weight.act_quant_kwargs.granularity).__name__
    assert granularity == ("PerRow" if layer.per_token else "PerTensor")


CHECKS = {SDNQ: check_sdnq, TORCHAO: check_torchao}


@consumer
def test_fp16_keeps_every_scale_of_sdnq(written):
    """diffusers casts scales to the dtype that it is told to load: ours are fp16's numbers, and not bfloat16's."""
    case, assignment, folder = written(SDNQ, "sd21", "int8", {"activation": None, "alpha": None})
    name = next(name for name, layer in assignment.items() if layer.format)
    dtypes = torch.float32, torch.float16, torch.bfloat16
    expected, half, brain = (case.loaded(folder, dtype).get_submodule(name).scale for dtype in dtypes)
    assert torch.equal(half, expected) and not torch.equal(brain, expected)


@consumer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_of_zeros_stays_zeros_in_torchao(written, dtype):
    """SDXL's empty prompt is one. torchao by itself divides it by a scale of zero, and images are black."""
    options = {"smoothing": "none", "alpha": None, "per_channel": True, "per_token": True}
    case, assignment, folder = written(TORCHAO, "sdxl", "fp8", options)
    layer = case.loaded(folder, dtype).get_submodule(next(name for name, row in assignment.items() if row.format))
    x = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    bias = 0 if layer.bias is None else layer.bias
    assert torch.equal(layer(x)[0], torch.zeros_like(layer(x)[0]) + bias) and layer(x).isfinite().all()
    layer.weight.act_quant_kwargs.hp_value_lb = None
    assert layer(x)[0].isnan().all()


@consumer
def test_bfloat16_keeps_every_scale_of_torchao_and_its_own_quantizer_does_not(written):
    """It computes a scale in the weight's dtype; that of a file stays fp32, whatever dtype is loaded."""
    options = {"smoothing": "none", "alpha": None, "per_channel": True, "per_token": True}
    case, assignment, folder = written(TORCHAO, "flux", "fp8", options)
    from torchao.quantization.quantize_.workflows import Float8Tensor

    name = next(name for name, layer in assignment.items() if layer.format)
    dtypes = torch.float32, torch.bfloat16
    expected, brain = (case.loaded(folder, dtype).get_submodule(name).weight for dtype in dtypes)
    assert torch.equal(brain.scale, expected.scale) and brain.scale.dtype == torch.float32
    theirs = Float8Tensor.from_hp(case.denoiser().get_submodule(name).weight.detach().bfloat16()).scale
    assert torch.equal(theirs, theirs.bfloat16().float()) and not torch.equal(expected.scale, theirs)
    assert 5e-4 < ((theirs - expected.scale).abs() / expected.scale).max() < 8e-3
