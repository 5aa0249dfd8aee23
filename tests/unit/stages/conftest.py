"""The checkpoint that ships, opened once, and functions that give a known answer."""

from types import ModuleType

import pytest

from .sdxl import opened


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
