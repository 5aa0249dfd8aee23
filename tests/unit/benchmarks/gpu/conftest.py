import pytest
import torch

from benchmarks.gpu import flux, sides
from sd_quant.devices import CPU


@pytest.fixture(scope="session")
def unet(small_config):
    return sides.build(small_config, CPU, torch.float32)


@pytest.fixture(scope="session")
def transformer():
    return flux.build(flux.SMALL, CPU, torch.float32)


@pytest.fixture(scope="session")
def assignments(unet):
    with torch.no_grad():
        found = sides.Assignments(unet, 64, None)
        for name in sides.RECIPES:
            found[name]
    return found


@pytest.fixture(scope="session")
def networks(unet, assignments, transformer):
    """Each with its assignments, by the name that sides have for it."""
    return {"sdxl": (unet, assignments), "flux": (transformer, sides.Assignments(transformer, 64, None))}
