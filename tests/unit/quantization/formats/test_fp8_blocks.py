"""FP8 in blocks against ModelOpt's tensor; ``interchange.test_servers`` has transformers' decoder of such files."""

import pytest
import torch
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.row_chunks import row_chunks, rows_per_chunk
from tests.layers import drawn

pytestmark = pytest.mark.commit

ANY = torch.tensor(0.0)  # an amax, which is not used
WEIGHTS, INPUTS = FORMATS["fp8_128x128"], FORMATS["fp8_128"]
SQUARE = {-1: 128, -2: 128}


def spread(rows: int = 300) -> torch.Tensor:
    return drawn(rows, 512) * torch.logspace(0, 3, rows)[:, None]


def test_a_weights_codes_are_modelopts_with_its_scales_rounded_to_fp16():
    x = spread()
    (scale,) = WEIGHTS.scales(x, ANY)
    _, theirs = FP8QTensor.quantize(x, block_sizes=SQUARE)
    torch.testing.assert_close(scale[::128], theirs, rtol=2**-11, atol=0)
    assert all(torch.equal(each, each[:1].expand_as(each)) for each in scale.split(128))  # the last has 44 rows
    stored, _ = FP8QTensor.quantize(x.clamp(-1e4, 1e4), scales=scale[::128], block_sizes=SQUARE)
    assert torch.equal(WEIGHTS.quantize(x, scale).float(), stored._quantized_data.float())


def test_inputs_have_a_scale_for_each_row():
    x = spread()
    (scale,) = INPUTS.scales(x, ANY)
    _, theirs = FP8QTensor.quantize(x, block_sizes={-1: 128})
    torch.testing.assert_close(scale, theirs, rtol=2**-11, atol=0)
    assert not torch.equal(scale[0], scale[1]) and not torch.equal(scale[:, 0], scale[:, 1])


def test_a_chunk_of_rows_holds_whole_blocks():
    """Or a weight would be rounded otherwise chunk by chunk, as errors are measured, than as a whole."""
    weight = drawn(300, 4096) * torch.logspace(-2, 2, 300)[:, None]
    assert rows_per_chunk(weight) == 64 and rows_per_chunk(weight, WEIGHTS.block_rows) == 128
    layer = LayerAssignment("a", "ffn", (300, 4096), WEIGHTS.name, INPUTS.name, weight_amax=weight.abs().max()[None])
    pieces = [part.rounded_weight(chunk) for chunk, part in row_chunks(weight, layer)]
    assert torch.equal(torch.cat(pieces), layer.rounded_weight(weight))
