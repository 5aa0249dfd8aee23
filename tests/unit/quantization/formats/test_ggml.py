"""ggml's blocks against its package's decoder, bit for bit, and against other tools' encoders."""

import sys
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from sd_quant.interchange.gguf import FILE_TYPES, WRITTEN, blocks_of
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import weight_bytes
from sd_quant.quantization.formats import FORMATS, dividing, ggml
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.rounding import with_rounded_weight
from tests.layers import drawn, statistics_of

pytestmark = pytest.mark.commit

NAMES = [name for name, fmt in FORMATS.items() if ".ggml:" in fmt.module]
K_QUANTS = [name for name in NAMES if FORMATS[name].block == 256]
IN_GGUF = [name for name in NAMES if name in WRITTEN]


def uneven() -> Tensor:
    """Rows of very different size, of one sign, with zeros for whole blocks and for parts, and in a few magnitudes."""
    x = drawn(24, 1024) * torch.logspace(-6, 1, 24)[:, None]
    x[3, 256:512] = x[4, 300:340] = x[20, 512:544] = 0
    x[5], x[6] = x[5].abs(), -x[6].abs() - 1
    return x


def searched(weight: Tensor, name: str) -> tuple[Tensor, ...]:
    """Codes and scales as a recipe with a search has them."""
    pair = Pair(name, None)
    recipe = Recipe(3.0, None, enable=Enable(pair, pair, None), scale_search=True)
    layer = LayerAssignment("layer", "ffn", tuple(weight.shape), name, weight_amax=weight.abs().amax().view(1))
    return with_rounded_weight(layer, weight, statistics_of(drawn(16, weight.shape[1])), recipe).rounded


def test_a_line_worked_by_hand():
    """Of -1, 0, 1 and 2 in Q4_1: scale 3 / 15. All above zero in Q4_K: the minimum is zero, and 2 is code 15."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    scale, least = FORMATS["q4_1"].scales(x, x)
    assert least.item() == -1 and scale.item() == pytest.approx(0.2, rel=1e-3)
    assert FORMATS["q4_1"].quantize(x, scale, least)[0, :4].tolist() == [0, 5, 10, 15]
    d, dmin, s, m = FORMATS["q4_k"].scales(x.abs().repeat(1, 8) + 0.5, x)
    assert dmin.item() == 0 and not m.any() and s.tolist() == [8 * [63]]
    assert (d * 63).item() == pytest.approx(2.5 / 15, rel=1e-2)


@pytest.mark.parametrize("name, code", [("q5_0", -16), ("q6_k", -32)])
def test_the_number_of_largest_magnitude_has_the_code_farthest_from_zero(name, code):
    fmt = FORMATS[name]
    for sign in (1, -1):
        x = sign * torch.linspace(-1, 2, 256).view(1, -1)
        codes = fmt.quantize(x, *fmt.scales(x, x))
        assert codes[0, -1] == code and codes.dtype == torch.int8


def test_a_weight_that_blocks_of_256_do_not_divide_has_llama_cpps_other_format():
    assert [dividing(name, 512) for name in K_QUANTS] == K_QUANTS
    assert [dividing(name, 640) for name in K_QUANTS] == ["q5_0", "q5_1", "q8_0"]
    assert dividing("int4", 96) == "int4" and dividing("q5_0", 640) == "q5_0"


@pytest.mark.consumer
@pytest.mark.parametrize("name", [*IN_GGUF, "int8", "int4"])
def test_its_bytes_are_decoded_to_our_numbers(name):
    gguf = pytest.importorskip("gguf")
    fmt, x = FORMATS[name], uneven()
    amax = x.abs().amax(1, keepdim=True)
    for scales in fmt.tried_scales(x, amax) if fmt.block else [fmt.scales(x, amax)]:
        codes = fmt.quantize(x, *scales)
        stored = blocks_of(WRITTEN[name], codes, *scales)
        assert stored.shape[-1] == (fmt.block_bytes or WRITTEN[name].size)
        assert name not in NAMES or stored.numel() == weight_bytes(x.shape, name, False, 0)
        kind = gguf.GGMLQuantizationType[WRITTEN[name].name]
        found = torch.from_numpy(np.array(gguf.quants.dequantize(stored.flatten(1).numpy(), kind)))
        assert torch.equal(found, fmt.dequantize(codes, *scales))


@pytest.mark.consumer
def test_a_file_of_each_type_has_a_name_of_llama_cpps():
    known = pytest.importorskip("gguf").LlamaFileType.__members__
    assert all(f"MOSTLY_{FILE_TYPES.get(kind.name, kind.name)}" in known for kind in WRITTEN.values())


def encoded_by_others(name: str, x: Tensor) -> dict[str, Tensor]:
    """The numbers that the package gguf and auto-round make of ``x``, each by its own encoder."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    packing = pytest.importorskip("auto_round.export.export_to_gguf.packing")
    stored = {"auto-round": packing.ggml_quant(x.clone(), name, device="cpu")}
    if name not in K_QUANTS:
        stored["gguf"] = gguf.quants.quantize(x.numpy(), kind)
    return {
        tool: torch.from_numpy(np.array(gguf.quants.dequantize(np.asarray(each).reshape(len(x), -1), kind)))
        for tool, each in stored.items()
    }


@pytest.mark.slow
@pytest.mark.consumer
@pytest.mark.parametrize("name", IN_GGUF)
def test_the_search_errs_less_than_other_encoders(name, monkeypatch):
    """Of Gaussian numbers. Measured: 0.798, 0.888, 0.808, 0.877, 0.992, 0.981, 0.915 of auto-round's squared error."""
    if "datasets" not in sys.modules:  # auto-round imports it, for calibration alone
        monkeypatch.setitem(sys.modules, "datasets", MagicMock())
    x = 0.02 * drawn(256, 1024)
    codes, *scales = searched(x, name)
    ours = (FORMATS[name].dequantize(codes, *scales) - x).double().square().sum()
    for tool, theirs in encoded_by_others(name, x).items():
        assert ours < (theirs - x).double().square().sum(), tool


def test_least_squares_of_a_line():
    x, codes = drawn(5, 3, 32), torch.randint(0, 16, (5, 3, 32), generator=torch.Generator().manual_seed(0)).float()
    scale, least = ggml.Q4_1.line.fitted(x, codes)
    columns = torch.stack([codes, torch.ones_like(codes)], -1)
    expected = torch.linalg.lstsq(columns, x[..., None]).solution
    torch.testing.assert_close(torch.cat([scale, least], -1)[..., None], expected, rtol=1e-4, atol=1e-5)
