"""Tiny random pipelines in folders, opened without the ladder, which takes minutes and has tests of its own."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sd_quant.cache import Cache
from sd_quant.observed import observing
from sd_quant.observed.checkpoint import ObservedCheckpoint
from sd_quant.observed.part import Rung
from sd_quant.observed.watching import Asked
from tests.zoo import CASES, write


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list) -> None:
    for item in items:
        if {"observe", "look"} & {*getattr(item, "fixturenames", ())}:  # whole pipelines
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Callable[[str], Path]:
    """``tiny_folder(case)``: the pipeline of a case of ``tests.zoo`` as a folder, written once."""
    home = tmp_path_factory.mktemp("tiny_pipelines")

    @cache
    def folder(case: str) -> Path:
        write(case, home / case.replace(", ", "_"))
        return home / case.replace(", ", "_")

    return folder


def refused(build: Callable, calls: Any, weights: Any, method: str = "forward", **_: Any) -> Rung:
    """What ``climb`` returns for a network that cannot be exported."""
    return Rung("refused", method=method, cause="not tried")


@pytest.fixture(scope="session")
def observe(tiny_folder, tmp_path_factory) -> Callable[..., ObservedCheckpoint]:
    """``observe(case)``: the pipeline, watched once, with no network exported. Others of its arguments in ``changes``.

    A test that counts how often something is watched gives a ``cache`` of its own.
    """
    once = Cache(tmp_path_factory.mktemp("observed"), 1e9)

    def opened(case: str, **changes: Any) -> ObservedCheckpoint:
        known = CASES[case]
        given = {
            "path": tiny_folder(case), "width": known.width, "height": known.height, "scale": 5.0,
            "arguments": {**known.arguments, **known.drawn(known.width, known.height)},
            "excluded": (), "denoiser": None, "cache": once,
        }  # fmt: skip
        given |= changes
        asked = Asked(*(given.pop(name) for name in ("width", "height", "scale", "arguments")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(observing, "climb", refused)
            return observing.open_observed(asked=asked, **given)

    unchanged = cache(opened)
    return lambda case, **changes: opened(case, **changes) if changes else unchanged(case)
