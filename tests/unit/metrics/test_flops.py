import pytest
import torch
from torch import nn

from sd_quant.metrics.flops import operations

pytestmark = pytest.mark.commit


class Attention(nn.Module):
    def forward(self, query):
        return nn.functional.scaled_dot_product_attention(query, query, query)


def test_two_operations_for_each_multiplication_with_its_addition():
    with torch.device("meta"):
        module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 10))
        total, of = operations(module, {"input": torch.empty(2, 3, 4, 4)})
        attention, _ = operations(Attention(), {"query": torch.empty(1, 2, 16, 8)})
    assert of["0"] == 2 * (2 * 8 * 4 * 4) * (3 * 3 * 3)
    assert of["2"] == 2 * 2 * 128 * 10
    assert total == of["0"] + of["2"]
    assert attention == 2 * 2 * (2 * 16 * 16 * 8)  # two products, two heads
