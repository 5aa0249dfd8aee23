import pytest
import torch

from benchmarks.gpu import sides
from sd_quant.devices import CPU


@pytest.fixture(scope="session")
def part(small_config):
    return sides.build(small_config, CPU, torch.float32)


@pytest.fixture(scope="session")
def assignments(part):
    with torch.no_grad():
        found = sides.Assignments(part, 64, None)
        for name in sides.RECIPES:
            found[name]
    return found
