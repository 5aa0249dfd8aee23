"""One condition of all tests here: a GPU."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    """All tests here are skipped, with the reason, where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU on this machine")
    return torch.device("cuda")
