"""Recipes, what targets write of tiny checkpoints, and auto-round's packers."""

import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Enable, Pair, Recipe

from ..tiny import tiny  # noqa: F401 a fixture


def recipe_of(name: str, activation: str | None = "same", **options: object) -> Recipe:
    """``name`` for weights, and for inputs unless told otherwise; where it is in blocks, convolutions are INT8."""
    pair = Pair(name, name if activation == "same" else activation)
    conv = pair if FORMATS[name].static_scale else Pair("int8", None)
    knobs = {"alpha": 0.8, "smoothing": "folded", "per_channel": name == "int8"} | options
    return Recipe(3.0, collect_method="min-max", enable=Enable(conv, pair, None), **knobs)


@pytest.fixture(scope="session")
def written_once(tiny, tmp_path_factory):  # noqa: F811
    """``written_once(target, family, format, **options)``: a tiny checkpoint, its assignment, and what is written."""

    @cache
    @torch.no_grad()
    def write(target: str, family: str, fmt: str, **options: object):
        case = tiny(family)
        assignment = case.assignment(recipe_of(fmt, **options), target)
        return case, assignment, case.written(assignment, target, tmp_path_factory.mktemp(target))

    return write


@pytest.fixture
def auto_round(monkeypatch):
    """Returns a file of auto-round's as a module. The package itself would import transformers' and a dozen more."""
    package = find_spec("auto_round")
    if package is None:
        pytest.skip("auto_round is not installed")
    quantizers = SimpleNamespace(quant_element=None, quant_mx_rceil=None)  # which packing does not call
    for name in ("auto_round", "auto_round.data_type"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "auto_round.data_type.mxfp", quantizers)

    def opened(name: str) -> ModuleType:
        spec = spec_from_file_location(name, Path(package.origin).parent / "export" / f"{name}.py")
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return opened
