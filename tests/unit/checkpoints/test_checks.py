import pytest
import torch

from sd_quant.checkpoints import checks
from sd_quant.checkpoints.checks import bounded_modules


def test_modules_are_counted_only_while_it_lasts(monkeypatch):
    monkeypatch.setattr(checks, "MAX_MODULES", 10)
    with pytest.raises(ValueError, match="more than 10 modules"), bounded_modules():
        torch.nn.Sequential(*(torch.nn.Identity() for _ in range(11)))
    torch.nn.Sequential(*(torch.nn.Identity() for _ in range(11)))
    with bounded_modules():
        torch.nn.Sequential(*(torch.nn.Identity() for _ in range(10)))
