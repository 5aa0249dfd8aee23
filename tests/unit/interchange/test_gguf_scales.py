"""What is said of the scales of ggml's types, for which its package need not be installed."""

import pytest

from sd_quant.interchange.gguf import QUANTIZED, Blocks, stored_layer

pytestmark = pytest.mark.commit

GGML = {  # how many numbers share a scale, and bits of a number with its scales, by ggml's own descriptions
    "Q4_0": (32, 4.5), "Q4_1": (32, 5), "Q5_0": (32, 5.5), "Q5_1": (32, 6), "Q8_0": (32, 8.5), "Q2_K": (16, 2.625),
    "Q3_K": (16, 3.4375), "Q4_K": (32, 4.5), "Q5_K": (32, 5.5), "Q6_K": (16, 6.5625), "IQ4_NL": (32, 4.5),
    "IQ4_XS": (32, 4.25),
}  # fmt: skip


@pytest.mark.parametrize("kind", QUANTIZED.values(), ids=lambda kind: kind.name)
def test_a_scale_is_said_to_be_for_as_many_numbers_as_share_it(kind):
    blocks = Blocks(None, "a", 0, (6, 512), kind)
    layer, (share, bits) = stored_layer([blocks], blocks), GGML[kind.name]
    assert (layer.format, layer.scales, layer.bits) == (kind.name, f"1 for {share} numbers", bits)
