"""Times of the layers that may be quantized, with each recipe that they may have, for ``quantize.budget_ms``.

They are measured by the job's engine on this machine, come from a file of such times, or are predicted for a GPU.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sd_quant.config import Infer
from sd_quant.config.recipe import MEASURED
from sd_quant.devices import best_device, threads
from sd_quant.engines import RUNTIMES, why_not
from sd_quant.engines.base import Engine
from sd_quant.engines.torch import TorchEngine, compiled, dtype_on, placed
from sd_quant.errors import ConfigError
from sd_quant.inference.timed_calls import samples_per_call
from sd_quant.inference.timed_layers import Alone, measured_seconds
from sd_quant.models.layer_calls import LayerCall, layer_calls
from sd_quant.places import input_path
from sd_quant.progress import progress
from sd_quant.quantization.arithmetic import Arithmetic, absorbed_by_others, arithmetic_of
from sd_quant.quantization.budget import KEPT
from sd_quant.quantization.gpus import GPUS, check_gpu_multiplies
from sd_quant.quantization.recipe import Recipe
from sd_quant.quantization.roofline import predicted_seconds
from sd_quant.report.provenance import processor, versions
from sd_quant.report.times_file import Conditions, Layer, read_times, write_times
from sd_quant.simulation.native import with_native_layers
from sd_quant.stages.fit_budget import Recipes, Units, labels_for, recipes_of
from sd_quant.stages.generate import sampling_of
from sd_quant.stages.load import Loaded, units_of
from sd_quant.stages.open_parts import open_file, replayed
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
TIMES = "times.csv"
Times = dict[str, dict[str, float]]  # seconds by label and layer


@dataclass(frozen=True)
class Timed:
    """The layers that may be quantized: their products in one call, and what they compute by each label."""

    calls: Mapping[str, Sequence[LayerCall]]  # by layer; none of a layer that is not called
    arithmetic: Mapping[str, Mapping[str, Arithmetic | None]]  # by label and layer

    @property
    def ways(self) -> dict[LayerCall, list[Arithmetic | None]]:
        """The different ways to compute each of the different calls."""
        ways: dict[LayerCall, dict[Arithmetic | None, None]] = {}
        for layers in self.arithmetic.values():
            for name, arithmetic in layers.items():
                for call in self.calls[name]:
                    ways.setdefault(call, {})[arithmetic] = None
        return {call: list(each) for call, each in ways.items()}

    def times(self, seconds: Callable[[LayerCall, Arithmetic | None], float]) -> Times:
        """Seconds by label and layer, from those of a call in one way."""
        return {
            label: {name: sum(seconds(call, each) for call in self.calls[name]) for name, each in layers.items()}
            for label, layers in self.arithmetic.items()
        }

    def row(self, label: str, name: str) -> Layer:
        """The layer in a table of times."""
        calls, computes = self.calls[name], self.arithmetic[label][name]
        shape = "x".join(map(str, calls[0].weight_shape)) if calls else ""
        return Layer(name, str(computes or KEPT), shape, sum(call.rows for call in calls))

    def rows(self) -> list[tuple[str, str, Layer]]:
        """Label, name and row of each layer that is called."""
        return [
            (label, name, self.row(label, name))
            for label, layers in self.arithmetic.items()
            for name in layers
            if self.calls[name]
        ]


def samples_of(loaded: Loaded) -> int:
    """Samples in one call of the denoiser, both halves of guidance included."""
    return samples_per_call(loaded.checkpoint, loaded.denoiser, sampling_of(loaded.infer))


def timed_layers(loaded: Loaded) -> Timed:
    """The layers that may be quantized, in a call of the job's size and batch, with each label. Nothing is computed.

    Raises ConfigError where the network cannot be called without numbers.
    """
    part, infer = loaded.parts[loaded.denoiser], loaded.infer
    shapes = part.contract.shapes_for(samples_of(loaded), infer.width, infer.height)
    try:
        calls = layer_calls(loaded.checkpoint, loaded.denoiser, shapes)
    except Exception as error:  # whatever the code of a network raises where nothing is computed
        raise ConfigError(
            f"quantize.budget_ms is {loaded.recipe.budget_ms}, expected null, because {loaded.denoiser} cannot be "
            f"called without numbers, to find the shapes of its layers ({one_line(error)}); use quantize.budget"
        ) from error
    names = [name for unit in units_of(loaded) for name in unit]

    def computed(label: str, recipe: Recipe | None) -> dict[str, Arithmetic | None]:
        absorbed = absorbed_by_others(recipe, loaded.shared_inputs) if recipe else set()
        return {
            name: arithmetic_of(
                loaded.recipe_with(name, label), loaded.roles[name], loaded.shapes[name], name in absorbed
            )
            for name in names
        }

    arithmetic = {label: computed(label, recipe) for label, recipe in recipes_of(loaded).items()}
    return Timed({name: calls.get(name, ()) for name in names}, arithmetic)


def layer_times(loaded: Loaded, source: str) -> Times:
    """Seconds of each layer that may be quantized in one call of the denoiser, by label and layer.

    ``source`` is MEASURED, the name of a GPU, or a file that an earlier run measured. A layer that is not called takes
    none. Raises ConfigError for a GPU without a format, a file of other layers or another machine, and an engine that
    cannot compute a layer.
    """
    timed = timed_layers(loaded)
    if source in GPUS:
        return predicted(timed, source)
    if source == MEASURED:
        return measured(loaded, timed)
    return from_file(timed, input_path(source), conditions_of(loaded))


def formats_of(timed: Timed) -> dict[str, set[str]]:
    """The formats of weights and inputs."""
    kinds = [each for layers in timed.arithmetic.values() for each in layers.values() if each]
    return {
        "weights": {each.weight for each in kinds},
        "inputs": {each.activation for each in kinds if each.activation},
    }


def predicted(timed: Timed, name: str) -> Times:
    """Times on the GPU of this ``name``. Raises ConfigError where it lacks a format."""
    check_gpu_multiplies(name, set().union(*formats_of(timed).values()), "quantize.times")
    return timed.times(lambda call, arithmetic: predicted_seconds(GPUS[name], call, arithmetic))


def from_file(timed: Timed, path: Path, conditions: Conditions | None) -> Times:
    """Times of a file. Raises ConfigError unless it has all of them, measured in these ``conditions`` (None: any)."""
    rows = timed.rows()
    found = read_times(path, [row for _, _, row in rows], conditions)
    times = {label: dict.fromkeys(layers, 0.0) for label, layers in timed.arithmetic.items()}
    for label, name, row in rows:
        times[label][name] = found[row]
    return times


def measured(loaded: Loaded, timed: Timed) -> Times:
    """Times by the job's engine, here and now. Raises ConfigError for an engine that cannot compute a format."""
    engine = loaded.infer.engine
    if reason := why_not(engine, formats_of(timed)):
        raise ConfigError(
            f"quantize.times is measured, and infer.engine={engine} cannot compute these layers, because {reason}; "
            f"set quantize.times to a GPU ({', '.join(GPUS)}), choose other formats, or another engine"
        )
    ways = timed.ways
    count = sum(map(len, ways.values()))
    LOG.info("%d different layers are timed by %s, in %d ways", len(ways), engine, count)
    with TemporaryDirectory() as folder, progress(len(ways), "times of layers") as advance:
        opens, dtype = opener(loaded, Path(folder))
        seconds = measured_seconds(ways, dtype, opens, advance)
    return timed.times(lambda call, arithmetic: seconds[call, arithmetic])


def opener(loaded: Loaded, folder: Path) -> tuple[Callable[[Alone, Arithmetic | None, bool], Engine], torch.dtype]:
    """A function that opens single layers by the job's engine, with files in ``folder``; and the dtype of weights."""
    infer, contract = loaded.infer, loaded.parts[loaded.denoiser].contract
    if RUNTIMES[infer.engine].file is None:
        return partial(by_torch, infer=infer), dtype_on(best_device(), infer.precision, contract)

    def from_files(alone: Alone, arithmetic: Arithmetic | None, with_layer: bool) -> Engine:
        path = folder / f"{len(list(folder.iterdir()))}.onnx"
        alone.write(path, arithmetic, with_layer)
        return open_file(path, infer)

    return from_files, contract.weights


def by_torch(alone: Alone, arithmetic: Arithmetic | None, with_layer: bool, infer: Infer) -> Engine:
    """The engine of a single layer that torch computes, in the layer's dtype."""
    device, module = best_device(), alone.module(with_layer)
    module.register_parameter("any", torch.nn.Parameter(torch.zeros(1), requires_grad=False))  # tells device and dtype
    if arithmetic is not None:
        with_native_layers(module, alone.assignment(module, arithmetic), device)
    engine = TorchEngine(placed(module, device, alone.dtype), alone.contract)
    if RUNTIMES[infer.engine].compiled:
        compiled(engine.module)
    return replayed(engine, infer)


def conditions_of(loaded: Loaded) -> Conditions:
    """What decides measured times on this machine."""
    infer, here = loaded.infer, processor()
    runtime = RUNTIMES[infer.engine]
    on_gpu = runtime.device != "cpu" and best_device().type == "cuda"
    dtype = str(loaded.parts[loaded.denoiser].contract.weights).removeprefix("torch.")
    return Conditions(
        torch.cuda.get_device_name() if on_gpu else str(here["cpu"] or ""),
        "" if on_gpu else " ".join(here["cpu_int8"]),
        infer.engine,
        versions(runtime.package)[runtime.package] or "",
        str(threads()),
        f"{infer.precision} {dtype}",
        str(infer.width),
        str(infer.height),
        str(samples_of(loaded)),
    )


def times_of_job(loaded: Loaded, directory: Path) -> Times:
    """The times by which ``quantize.budget_ms`` is met, which is given. Measured ones are written to ``directory``.

    Raises as ``layer_times``, and ConfigError for a budget that cannot be met or in which nothing has to be quantized.
    """
    source = loaded.recipe.times or MEASURED
    times = layer_times(loaded, source)
    if source == MEASURED:
        rows = [(label, row, times[label][name]) for label, name, row in timed_layers(loaded).rows()]
        write_times(rows, conditions_of(loaded), directory / TIMES)
    check_time_limit(loaded, times)
    return times


def time_costs(times: Times, loaded: Loaded, units: Units, recipes: Recipes) -> list[dict[str, float]]:
    """Milliseconds of each of the ``units`` of layers by label, without labels that none of its layers can have."""
    return [
        {label: 1000 * sum(times[label][name] for name in unit) for label in labels_for(loaded, unit, recipes)}
        for unit in units
    ]


def check_time_limit(loaded: Loaded, times: Times) -> None:
    """Raises ConfigError for a budget that no choice meets, or that is met with nothing quantized."""
    budget_ms, costs = loaded.recipe.budget_ms, time_costs(times, loaded, units_of(loaded), recipes_of(loaded))
    least, whole = (sum(each) for each in zip(*((min(unit.values()), unit[KEPT]) for unit in costs), strict=True))
    presets = " or ".join(loaded.offered)
    if least >= whole:
        raise ConfigError(
            f"quantize.budget_ms is {budget_ms:g}, expected null, because no layer is faster with {presets} than "
            f"unquantized, {whole:.4g} ms in all; choose other presets, or quantize.budget"
        )
    if not least <= budget_ms < whole:
        raise ConfigError(
            f"quantize.budget_ms is {budget_ms:g}, expected from {least:.4g} ms, the least of these layers with "
            f"{presets}, to below {whole:.4g} ms, which they take unquantized"
        )
