"""Times of the layers that may be quantized: which layers, by which source, and which budgets they allow."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from sd_quant.engines.torch import TorchEngine
from sd_quant.errors import ConfigError
from sd_quant.inference import timed_layers
from sd_quant.models.layer_calls import LayerCall
from sd_quant.quantization.gpus import GPUS
from sd_quant.quantization.recipe import reason_kept
from sd_quant.quantization.recipe_check import is_excluded
from sd_quant.quantization.roofline import predicted_seconds
from sd_quant.simulation.native import NativeConv
from sd_quant.stages import layer_times as stage
from sd_quant.stages.load import Loaded, with_recipe
from sd_quant.stages.session import Session, open_unchecked
from tests.presets import job

pytestmark = pytest.mark.slow
FEW = "quantize.exclude.sdxl=[up_blocks.*,mid_block.*,down_blocks.1.*,down_blocks.2.*]"  # of which two are alike


@cache
def opened() -> Session:
    return open_unchecked(job().model)


@cache
def loaded(*overrides: str) -> Loaded:
    """The shipped SDXL."""
    made = job("quantize=int8", "infer=openvino", *overrides)
    return with_recipe(opened(), made.model, made.infer, made.quantize)


def labels(given: Loaded) -> dict:
    return {"int8": given.recipe, "unquantized": None}


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(stage, "measured_seconds", lambda *given: timed_layers.measured_seconds(*given, seconds=0))


def quantizable(given: Loaded) -> set[str]:
    level = given.recipe.quant_level
    return {
        name
        for name, role in given.roles.items()
        if reason_kept(role, level) is None and not is_excluded(name, given.exclude)
    }


def test_every_layer_that_may_be_quantized_is_measured_once_by_its_size(fast, monkeypatch, tmp_path):
    """And the file gives the same times back, but not to a job of another size."""
    given = loaded("quant_level=1", FEW)
    ways = stage.timed_layers(given, labels(given)).ways
    count = []
    written = timed_layers.Alone.write
    monkeypatch.setattr(timed_layers.Alone, "write", lambda *given: (count.append(given), written(*given))[1])
    times = stage.layer_times(given, labels(given), stage.MEASURED)
    assert len(count) == sum(len(each) + 1 for each in ways.values()) == 6 and len(quantizable(given)) == 3
    for label in labels(given):
        assert times[label].keys() == quantizable(given) and min(times[label].values()) > 0
    timed = stage.timed_layers(given, labels(given))
    rows = [(label, row, times[label][name]) for label, name, row in timed.rows()]
    stage.write_times(rows, stage.conditions_of(given), tmp_path / stage.TIMES)
    again = stage.layer_times(given, labels(given), str(tmp_path / stage.TIMES))
    for label in labels(given):
        assert again[label] == pytest.approx(times[label])
    other = loaded("quant_level=1", FEW, "infer.width=128")
    with pytest.raises(ConfigError, match="measured with width 64, expected 128, this job's; measure again"):
        stage.layer_times(other, labels(other), str(tmp_path / stage.TIMES))
    more = loaded("quant_level=1")
    with pytest.raises(ConfigError, match=r"no time of down_blocks\.1\.resnets\.0\.conv1 \(128x64x3x3, 32 rows\) comp"):
        stage.layer_times(more, labels(more), str(tmp_path / stage.TIMES))


def test_a_gpus_times_are_those_of_the_formula_for_both_halves_of_guidance():
    given = loaded("quant_level=3")
    times = stage.layer_times(given, labels(given), "h100")
    name = "mid_block.attentions.0.transformer_blocks.0.ff.net.2"
    call = LayerCall((2, 4, 512), (2, 4, 128), (128, 512), True)
    assert times["unquantized"][name] == predicted_seconds(GPUS["h100"], call, None)
    assert times["int8"][name] < times["unquantized"][name]
    assert times["int8"].keys() == quantizable(given)
    with pytest.raises(ConfigError, match=r"quantize\.times is a100, .*expected a GPU that has fp8: l40s, rtx_4090"):
        stage.layer_times(given, {"fp8": job("quantize=fp8").quantize}, "a100")


def test_an_engine_that_cannot_compute_a_format_measures_nothing():
    given = loaded("quant_level=3")
    with pytest.raises(ConfigError, match=r"infer\.engine=openvino cannot compute these layers, because OpenVINO"):
        stage.layer_times(given, {"mxfp8": job("quantize=mxfp8", "quant_level=3").quantize}, stage.MEASURED)


def test_torch_times_layers_of_codes(monkeypatch):
    given = loaded("quant_level=1")
    torch_given = replace(given, infer=replace(given.infer, engine="torch_native"))
    seen = []

    def measured(ways, dtype, opens, advance):
        call, (way, *_) = next(iter(ways.items()))
        for arithmetic, with_layer in ((way, True), (None, True), (None, False)):
            alone = timed_layers.Alone(call, dtype)
            engine = opens(alone, arithmetic, with_layer)
            seen.append((engine, engine(**alone.inputs(engine))))
        return {(call, way): 1.0 for call, each in ways.items() for way in each}

    monkeypatch.setattr(stage, "measured_seconds", measured)
    times = stage.layer_times(torch_given, labels(given), stage.MEASURED)
    assert set(times["int8"].values()) == {1.0}
    (quantized, _), (_, outputs), _ = seen
    assert isinstance(quantized, TorchEngine) and isinstance(quantized.module.layers[0], NativeConv)
    assert {tuple(output.shape) for output in outputs.values()} == {(1, 1, 1, 1)}


def test_a_network_that_reads_numbers_is_refused(monkeypatch):
    def fails(*given):
        raise NotImplementedError("aten::_local_scalar_dense")

    monkeypatch.setattr(stage, "layer_calls", fails)
    with pytest.raises(ConfigError, match=r"because unet_xl cannot be called without numbers.*use quantize\.budget$"):
        stage.layer_times(loaded("quant_level=1"), {}, "h100")


TIMES = {"int8": {"a": 2e-3, "b": 3e-3, "c": 4e-3}, "fp16": {"a": 3e-3, "b": 2e-3, "c": 9e-3}}
UNITS = [("a", "b"), ("c",)]
TWO = {"int8": SimpleNamespace(), "fp16": None}


def test_the_least_time_is_that_of_units_that_choose_together():
    assert stage.time_costs(TIMES, UNITS)[0] == pytest.approx({"int8": 5e-3, "fp16": 5e-3})
    assert stage.least_seconds(TIMES, UNITS) == pytest.approx(9e-3)
    assert stage.least_seconds(TIMES, [("a",), ("b",), ("c",)]) == pytest.approx(8e-3)


@pytest.mark.parametrize("budget", [8.99, 14.0])
def test_a_budget_that_nothing_meets_or_everything_does_is_refused_with_both_ends(budget):
    stage.check_time_limit(9.01, TWO, TIMES, UNITS)
    with pytest.raises(ConfigError) as caught:
        stage.check_time_limit(budget, TWO, TIMES, UNITS)
    assert str(caught.value) == (
        f"quantize.budget_ms is {budget:g}, expected from 9 ms, the least of these layers with int8, to below 14 ms, "
        "which they take unquantized"
    )


def test_formats_that_save_no_time_are_refused():
    slower = {"int8": TIMES["fp16"], "fp16": TIMES["fp16"]}
    with pytest.raises(
        ConfigError, match="expected null, because no layer is faster with int8 than unquantized, 14 ms"
    ):
        stage.check_time_limit(20.0, TWO, slower, UNITS)


def test_a_job_keeps_what_it_measured(monkeypatch, tmp_path):
    given = loaded("quant_level=1", "quantize.budget_ms=1")
    names = sorted(quantizable(given))
    times = {
        label: dict.fromkeys(names, share * 2e-3 / len(names)) for label, share in (("int8", 0.3), ("unquantized", 1))
    }
    monkeypatch.setattr(stage, "measured", lambda loaded, timed: times)
    units = [(name,) for name in names]
    assert stage.times_of_job(given, labels(given), units, tmp_path) == times
    again = stage.layer_times(given, labels(given), str(tmp_path / "times.csv"))
    assert again["int8"] == pytest.approx(times["int8"])
    predicted = replace(given, recipe=replace(given.recipe, budget_ms=1e-6, times="h100"))
    with pytest.raises(ConfigError, match=r"quantize\.budget_ms is 1e-06, expected from .* ms, the least of these"):
        stage.times_of_job(predicted, labels(given), units, tmp_path / "elsewhere")
