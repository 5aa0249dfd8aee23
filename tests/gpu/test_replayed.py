"""Calls recorded as a CUDA graph and replayed. Skipped, with the reason, where there is no GPU."""

import pytest
import torch
from torch import nn

from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine, compiled, placed
from sd_quant.models.parts import Contract

pytestmark = [
    pytest.mark.commit,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine"),
]

HALF = torch.float16
CONTRACT = Contract({"input": ("batch", 64)}, ("y",), {"input": HALF}, HALF)


@pytest.mark.parametrize("whole", [False, True])
@torch.no_grad()
def test_a_replayed_call_gives_what_the_call_gives(whole):
    torch.manual_seed(0)
    module = placed(nn.Linear(64, 32).requires_grad_(False), torch.device("cuda"), HALF)
    plain = TorchEngine(module, CONTRACT)
    engine = Replayed(TorchEngine(compiled(module) if whole else module, CONTRACT))
    for batch in (3, 3, 5, 3):
        given = torch.randn(batch, 64)
        torch.testing.assert_close(engine(input=given)["y"], plain(input=given)["y"], rtol=2e-3, atol=2e-3)
    first = engine(input=torch.ones(3, 64))["y"]
    kept = first.clone()
    engine(input=torch.zeros(3, 64))
    assert torch.equal(first, kept)
    engine.close()
