"""Times of the layers that may be quantized: which layers, by which source, and which budgets they allow."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

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
from sd_quant.stages.load import Loaded

from . import sdxl

pytestmark = [pytest.mark.commit, pytest.mark.slow]
LABELS = ("int8", "unquantized")
FEW = "quantize.exclude.sdxl=[up_blocks.*,mid_block.*,down_blocks.1.*,down_blocks.2.*]"  # of which two are alike


loaded = partial(sdxl.loaded, "infer=openvino", preset="int8")


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


@pytest.mark.nightly
def test_every_layer_that_may_be_quantized_is_measured_once_by_its_size(fast, monkeypatch, tmp_path):
    """And the file gives the same times back, but not to a job of another size."""
    given = loaded("quant_level=1", FEW)
    ways = stage.timed_layers(given).ways
    count = []
    written = timed_layers.Alone.write
    monkeypatch.setattr(timed_layers.Alone, "write", lambda *given: (count.append(given), written(*given))[1])
    times = stage.layer_times(given, stage.MEASURED)
    assert len(count) == sum(len(each) + 1 for each in ways.values()) == 6 and len(quantizable(given)) == 3
    for label in LABELS:
        assert times[label].keys() == quantizable(given) and min(times[label].values()) > 0
    timed = stage.timed_layers(given)
    rows = [(label, row, times[label][name]) for label, name, row in timed.rows()]
    stage.write_times(rows, stage.conditions_of(given), tmp_path / stage.TIMES)
    again = stage.layer_times(given, str(tmp_path / stage.TIMES))
    assert again == {label: pytest.approx(times[label]) for label in LABELS}
    other = loaded("quant_level=1", FEW, "infer.width=128")
    with pytest.raises(ConfigError, match="measured with width 64, expected 128, this job's; measure again"):
        stage.layer_times(other, str(tmp_path / stage.TIMES))
    more = loaded("quant_level=1")
    with pytest.raises(ConfigError, match=r"no time of down_blocks\.1\.resnets\.0\.conv1 \(128x64x3x3, 32 rows\) comp"):
        stage.layer_times(more, str(tmp_path / stage.TIMES))


def test_a_gpus_times_are_those_of_the_formula_for_both_halves_of_guidance():
    given = loaded("quant_level=3")
    times = stage.layer_times(given, "h100")
    name = "mid_block.attentions.0.transformer_blocks.0.ff.net.2"
    call = LayerCall((2, 4, 512), (2, 4, 128), (128, 512), True)
    assert times["unquantized"][name] == predicted_seconds(GPUS["h100"], call, None)
    assert times["int8"][name] < times["unquantized"][name]
    assert times["int8"].keys() == quantizable(given)
    with pytest.raises(ConfigError, match=r"quantize\.times is a100, .*expected a GPU that has fp8: l40s, rtx_4090"):
        stage.layer_times(loaded("quant_level=3", "quantize.budget_ms=1", "quantize.choices=[fp8]"), "a100")


def test_an_engine_that_cannot_compute_a_format_measures_nothing():
    given = loaded("quant_level=3", "quantize.budget_ms=1", "quantize.choices=[mxfp8]")
    with pytest.raises(ConfigError, match=r"infer\.engine=openvino cannot compute these layers, because OpenVINO"):
        stage.layer_times(given, stage.MEASURED)


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
    times = stage.layer_times(torch_given, stage.MEASURED)
    assert set(times["int8"].values()) == {1.0}
    (quantized, _), (_, outputs), _ = seen
    assert isinstance(quantized, TorchEngine) and isinstance(quantized.module.layers[0], NativeConv)
    assert {tuple(output.shape) for output in outputs.values()} == {(1, 1, 1, 1)}


def test_a_network_that_reads_numbers_is_refused(monkeypatch):
    fails = Mock(side_effect=NotImplementedError("aten::_local_scalar_dense"))
    monkeypatch.setattr(stage, "layer_calls", fails)
    with pytest.raises(ConfigError, match=r"because unet_xl cannot be called without numbers.*use quantize\.budget$"):
        stage.layer_times(loaded("quant_level=1"), "h100")


TIMES = {"int8": {"a": 2e-3, "b": 3e-3, "c": 4e-3}, "unquantized": {"a": 3e-3, "b": 2e-3, "c": 9e-3}}
UNITS = [("a", "b"), ("c",)]


def limited(budget_ms: float) -> SimpleNamespace:
    """Layers of which all may have INT8."""
    return SimpleNamespace(
        recipe=SimpleNamespace(budget_ms=budget_ms), offered={"int8": SimpleNamespace(recipe=1)},
        recipe_with=lambda name, label: label == "int8",
    )  # fmt: skip


@pytest.fixture
def two_units(answering):
    answering(stage, units_of=UNITS)


def test_a_unit_costs_what_its_layers_do_together():
    given = limited(1.0)
    costs = stage.time_costs(TIMES, given, UNITS, stage.recipes_of(given))
    assert costs == [pytest.approx({"int8": 5, "unquantized": 5}), pytest.approx({"int8": 4, "unquantized": 9})]
    given.recipe_with = lambda name, label: None
    assert stage.time_costs(TIMES, given, UNITS, stage.recipes_of(given))[1] == pytest.approx({"unquantized": 9})


@pytest.mark.parametrize("budget", [8.99, 14.0])
def test_a_budget_that_nothing_meets_or_everything_does_is_refused_with_both_ends(budget, two_units):
    stage.check_time_limit(limited(9.01), TIMES)
    with pytest.raises(ConfigError) as caught:
        stage.check_time_limit(limited(budget), TIMES)
    assert str(caught.value) == (
        f"quantize.budget_ms is {budget:g}, expected from 9 ms, the least of these layers with int8, to below 14 ms, "
        "which they take unquantized"
    )


def test_presets_that_save_no_time_are_refused(two_units):
    slower = dict.fromkeys(TIMES, TIMES["unquantized"])
    sentence = "expected null, because no layer is faster with int8 than unquantized, 14 ms"
    with pytest.raises(ConfigError, match=sentence):
        stage.check_time_limit(limited(20.0), slower)


def test_a_job_keeps_what_it_measured(answering, tmp_path):
    given = loaded("quant_level=1", "quantize.budget_ms=1", "quantize.choices=[]")
    names = sorted(quantizable(given))
    times = {
        label: dict.fromkeys(names, share * 2e-3 / len(names)) for label, share in (("int8", 0.3), ("unquantized", 1))
    }
    answering(stage, measured=times)
    assert stage.times_of_job(given, tmp_path) == times
    again = stage.layer_times(given, str(tmp_path / "times.csv"))
    assert again["int8"] == pytest.approx(times["int8"])
    predicted = replace(given, recipe=replace(given.recipe, budget_ms=1e-6, times="h100"))
    with pytest.raises(ConfigError, match=r"quantize\.budget_ms is 1e-06, expected from .* ms, the least of these"):
        stage.times_of_job(predicted, tmp_path / "elsewhere")
