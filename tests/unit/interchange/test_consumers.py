"""Zeros and scales in 16 bits in SDNQ and torchao, which diffusers loads our folders with; see ``tests.programs``."""

import pytest
import torch

pytestmark = pytest.mark.consumer

SDNQ, TORCHAO = "diffusers_sdnq", "diffusers_torchao"
BY_ROW = {"smoothing": "none", "alpha": None, "per_channel": True, "per_token": True}


@pytest.fixture
def written(written_once):
    def write(target: str, family: str, fmt: str, options: dict):
        pytest.importorskip(target.removeprefix("diffusers_"))
        return written_once(target, family, fmt, **options)

    return write


def test_fp16_keeps_every_scale_of_sdnq(written):
    """diffusers casts scales to the dtype that it is told to load: ours are fp16's numbers, and not bfloat16's."""
    case, assignment, folder = written(SDNQ, "sd21", "int8", {"activation": None, "alpha": None})
    name = next(name for name, layer in assignment.items() if layer.format)
    dtypes = torch.float32, torch.float16, torch.bfloat16
    expected, half, brain = (case.loaded(folder, dtype).get_submodule(name).scale for dtype in dtypes)
    assert torch.equal(half, expected) and not torch.equal(brain, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_of_zeros_stays_zeros_in_torchao(written, dtype):
    """SDXL's empty prompt is one. torchao by itself divides it by a scale of zero, and images are black."""
    case, assignment, folder = written(TORCHAO, "sdxl", "fp8", BY_ROW)
    layer = case.loaded(folder, dtype).get_submodule(next(name for name, row in assignment.items() if row.format))
    x = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    bias = 0 if layer.bias is None else layer.bias
    assert torch.equal(layer(x)[0], torch.zeros_like(layer(x)[0]) + bias) and layer(x).isfinite().all()
    layer.weight.act_quant_kwargs.hp_value_lb = None
    assert layer(x)[0].isnan().all()


def test_bfloat16_keeps_every_scale_of_torchao_and_its_own_quantizer_does_not(written):
    """It computes a scale in the weight's dtype; that of a file stays fp32, whatever dtype is loaded."""
    case, assignment, folder = written(TORCHAO, "flux", "fp8", BY_ROW)
    from torchao.quantization.quantize_.workflows import Float8Tensor

    name = next(name for name, layer in assignment.items() if layer.format)
    dtypes = torch.float32, torch.bfloat16
    expected, brain = (case.loaded(folder, dtype).get_submodule(name).weight for dtype in dtypes)
    assert torch.equal(brain.scale, expected.scale) and brain.scale.dtype == torch.float32
    theirs = Float8Tensor.from_hp(case.denoiser().get_submodule(name).weight.detach().bfloat16()).scale
    assert torch.equal(theirs, theirs.bfloat16().float()) and not torch.equal(expected.scale, theirs)
    assert 5e-4 < ((theirs - expected.scale).abs() / expected.scale).max() < 8e-3
