import pytest
import torch

from sd_quant import devices
from sd_quant.devices import best_device, full_precision

pytestmark = pytest.mark.commit


def test_scores_are_computed_in_fp32_and_nothing_else_changes():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled
    with full_precision() as device:
        assert device == best_device()
        assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled) == (False, before[1])
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled) == before


@pytest.mark.parametrize("torchs, cores, expected", [(4, 8, 4), (8, 2, 2), (1, 8, 1)])
def test_all_runtimes_have_torchs_threads_within_what_the_process_has(monkeypatch, torchs, cores, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    monkeypatch.setattr(devices, "cores", lambda: cores)
    assert devices.threads() == expected
