"""The shipped SDXL, with a preset and without, opened once, and functions that give a known answer."""

from functools import cache
from types import ModuleType

import pytest

from sd_quant.stages.load import Loaded, with_recipe
from sd_quant.stages.session import Session, open_unchecked
from tests.presets import job


@cache
def loaded(*overrides: str, preset: str = "svdquant_w4a4") -> Loaded:
    made = job(f"quantize={preset}", "quant_level=3", *overrides)
    return with_recipe(opened(), made.model, made.infer, made.quantize)


@cache
def opened() -> Session:
    """The shipped SDXL, whose parameters and layers are counted once."""
    return open_unchecked(job().model)


@pytest.fixture(scope="session")
def checkpoint():
    return opened().checkpoint


@pytest.fixture
def answering(monkeypatch):
    """``answering(module, name=value)``: each function of these names gives its value, whatever it is asked."""

    def answering(module: ModuleType, **values: object) -> None:
        for name, value in values.items():
            monkeypatch.setattr(module, name, lambda *_, value=value, **__: value)

    return answering
