"""An SDXL UNet with a conv and an attention level, one layer a block: every role of layer, a second to run."""

import copy
import gc
import math
import os
import resource
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from sd_quant import process
from sd_quant.calibration.hooks import collect, draw
from sd_quant.models.sdxl import FAMILY, NemoUnetPart
from sd_quant.models.unet import shared_inputs
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import Statistics

from . import small_nemo
from .cadence.marks import pytest_addoption, pytest_collection_modifyitems, skip_if_late  # noqa: F401  hooks

POOLED, PROMPTS = 32, 2

# SDNQ reads these when it is imported, by whichever test is first: it would compile for each shape, for seconds, and
# with OpenVINO multiply FP8 as 256 numbers at even distances.
os.environ |= {"SDNQ_USE_TORCH_COMPILE": "0", "SDNQ_USE_OPENVINO_MM": "0"}
gc.disable()  # until all is imported, which is millions of objects that stay


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else extensions complain of what nobody collected


def pytest_runtest_logreport(report) -> None:
    if report.failed:  # at once: a run that is stopped prints no summary
        print(f"\nfailed: {report.nodeid}", flush=True)


# A shell that starts the tests in the background has them ignore Ctrl-C, and so would everything that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    skip_if_late(item)
    for marker in item.iter_markers("needs"):
        if missing := lacking(**marker.kwargs):
            pytest.skip(missing)


def lacking(cores: int = 1, memory_gb: float = 0, files: int = 0) -> str | None:
    """What of these this process cannot have, in a sentence; None where it can have all."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for needed, found, what in (
        (cores, process.cores(), "cores"),
        (memory_gb, round(process.available_memory_bytes() / 1e9, 1), "GB of memory"),
        (files, math.inf if limit == resource.RLIM_INFINITY else limit, "open files"),
    ):
        if found < needed:
            return f"needs {needed} {what}, found {found}"
    return None


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def int8_kernels():
    """Asked for by tests of what OpenVINO multiplies in INT8."""
    if pytest.importorskip("sd_quant.engines.openvino").saturates():
        pytest.skip("this processor has no VNNI, without which OpenVINO's INT8 kernels saturate and are not used")


@pytest.fixture(scope="session")
def small_config() -> dict:
    """NeMo's ``model:`` section; the pooled text is 32 wide and a size id has 8 features."""
    return small_nemo.config(POOLED, context_dim=48)


@pytest.fixture(scope="session")
def build_unet(small_config) -> Callable[[], nn.Module]:
    return partial(small_nemo.unet, small_config)


@pytest.fixture(scope="session")
def unet_inputs(small_config) -> Callable[..., dict[str, Tensor]]:
    return partial(small_nemo.inputs, small_config)


@dataclass(frozen=True)
class Calibrated:
    """``part()`` is a fresh UNet with the weights that the statistics belong to."""

    part: Callable[[], NemoUnetPart]
    calls: list[dict[str, Tensor]]
    roles: dict[str, str]
    statistics: Statistics

    def run(self, part: nn.Module) -> None:
        for inputs in self.calls:
            part(**inputs)

    def output(self, unet: nn.Module) -> Tensor:
        """What the part answers to the first call with this UNet."""
        part = self.part()
        part.unet = unet
        return part(**self.calls[0])

    def assignment(
        self, alpha: float | str, quant_level: float = 3.0, smoothing: str = "folded", kept: Collection[str] = ()
    ) -> dict[str, LayerAssignment]:
        """``min-max`` over one step is the max calibrator, which is what ModelOpt has."""
        return self.derived(Recipe(quant_level, alpha, collect_method="min-max", smoothing=smoothing), kept)

    def in_format(self, fmt: str, **given) -> dict[str, LayerAssignment]:
        """All layers in one format."""
        pair = Pair(fmt, fmt)
        enable = Enable(pair, pair, None)
        per_channel = fmt == "int8"
        return self.derived(Recipe(3.0, 0.8, collect_method="min-max", enable=enable, per_channel=per_channel, **given))

    def derived(self, recipe: Recipe, kept: Collection[str] = ()) -> dict[str, LayerAssignment]:
        weights = self.part().unet
        weight_of = lambda name: weights.get_submodule(name).weight  # noqa: E731
        return derive(
            self.roles,
            weight_of,
            self.statistics.layers,
            recipe,
            shared_inputs(self.roles),
            dict.fromkeys(kept, "kept"),
        )


@pytest.fixture(scope="session")
def calibrate() -> Callable[[NemoUnetPart, list[dict[str, Tensor]]], Calibrated]:
    """Collects statistics as calibration does, each call a prompt of its own at one step."""

    def run(part: NemoUnetPart, calls: list[dict[str, Tensor]]) -> Calibrated:
        pristine, roles, now = copy.deepcopy(part), FAMILY.layer_roles(part.unet), {}
        layers = {name: part.unet.get_submodule(name) for name, role in roles.items() if role != "excluded"}
        wanted = draw(layers, range(len(calls)), 1, seed=0)
        with collect(part, layers, range(len(calls)), 1, lambda: (0, [now["call"]]), wanted) as statistics:
            for now["call"], inputs in enumerate(calls):
                part(**inputs)
        return Calibrated(lambda: copy.deepcopy(pristine), calls, roles, statistics)

    return run


@pytest.fixture(scope="session")
def calibrated(build_unet, unet_inputs, calibrate) -> Calibrated:
    """Of the small UNet over two prompts."""
    return calibrate(
        NemoUnetPart(build_unet(), POOLED), [unet_inputs(batch=2, seed=prompt) for prompt in range(PROMPTS)]
    )
