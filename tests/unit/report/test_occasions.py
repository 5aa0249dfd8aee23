"""Intervals widened by a machine's earlier timings, whose true speed-up changes by the hour."""

import math

import numpy as np
import pytest

from sd_quant.report import occasions
from sd_quant.report.occasions import CALL, IMAGE, RECIPES, between, count_occasion, history_of, read_history
from sd_quant.report.run_table import run_table
from sd_quant.report.timing import Timed, log_speedup_over
from tests.nested import with_values

from .sweeps import QUIET, record_of, report_of

pytestmark = pytest.mark.commit

MACHINE = {"cpu": "a processor", "cpu_int8": [], "usable_cores": 2, "threads": 2, "gpus": [], "memory_bytes": 2**34}
FULL = {"cpu_copy_gb_per_second": 10.0, "cpu_int8_tops": 2.0, "cpu_fp32_tflops": None}


def occasion(hour: float, speedups: dict[str, float], error: float = 0.02) -> dict:
    """Speed-ups of engines, and of images with them, whose standard error is so much of them."""
    ends = {
        name: [value, value * math.exp(-1.96 * error), value * math.exp(1.96 * error)]
        for name, value in speedups.items()
    }
    return {"time": 3600 * hour, "probes": [FULL], "speedups": {name: {CALL: e, IMAGE: e} for name, e in ends.items()}}


def timed(speedup: float, seed: int = 0, known: dict | None = None) -> Timed:
    noise = np.exp(0.06 * np.random.default_rng(seed).normal(size=(2, 40)))
    return Timed("block", (20 * noise[0]).tolist(), (20 / speedup * noise[1]).tolist(), 0.5, 60.0, between=known or {})


def drawn_hours(apart: float, hours: int, seed: int) -> list[float]:
    return (1.4 * np.exp(apart * np.random.default_rng(seed).normal(size=hours))).tolist()


@pytest.mark.parametrize("apart", [0.08, 0.0])
def test_the_interval_of_one_hour_holds_the_figure_of_another(apart):
    """Each interval knows the eight hours before it. The error of one hour's own figure is about 1.5 %."""
    held = {"own": 0, "widened": 0}
    for seed in range(60):
        truths = drawn_hours(apart, 10, seed)
        figures = [timed(truth, 100 * seed + hour) for hour, truth in enumerate(truths)]
        history = [occasion(hour, {"a": each.denoiser_speedup().value}, 0.015) for hour, each in enumerate(figures[:8])]
        widened, other = timed(truths[8], 100 * seed + 8, between(history)), figures[9].denoiser_speedup().value
        held["own"] += figures[8].denoiser_speedup().holds(other)
        held["widened"] += widened.denoiser_speedup().holds(other)
    assert held["widened"] / 60 >= 0.85
    # of a machine that changes between hours, and of one that does not
    assert held["own"] / 60 < 0.6 if apart else held["widened"] <= held["own"] + 6


def test_what_differs_between_occasions_is_not_their_own_error():
    histories = [
        [occasion(hour, {name: drawn_hours(apart, 300, seed)[hour] for name, seed in (("a", 1), ("b", 2))}, error)
         for hour in range(200)]
        for apart, error in ((0.1, 0.02), (0.1, 0.08), (0.02, 0.2))
    ]  # fmt: skip
    precise, noisy, all_noise = (between(history) for history in histories)
    assert precise[CALL]["deviation"] == pytest.approx(0.098, abs=0.01) and precise[CALL]["degrees"] == 199
    assert noisy[IMAGE]["deviation"] == pytest.approx(0.06, abs=0.02) and all_noise[CALL]["deviation"] == 0
    assert precise[RECIPES]["deviation"] == pytest.approx(0.1 * math.sqrt(2), abs=0.02)  # of two that vary apart


def test_recipes_that_change_together_stay_apart_where_their_speedups_do_not():
    history = [occasion(hour, {"a": 2 * each, "b": each}) for hour, each in enumerate(drawn_hours(0.1, 20, 3))]
    known = between(history)
    assert known[CALL]["deviation"] > 0.05 and known[RECIPES]["deviation"] == 0
    slow, fast = timed(1.4, 0, known), timed(1.6, 1, known)
    assert log_speedup_over(fast, slow, 0.95).low > 0
    assert slow.image_speedup().low < 1.1 < timed(1.4).image_speedup().low


def test_too_few_occasions_or_too_near_ones_say_nothing():
    of_this_hour = {"reason": occasions.OF_THIS_HOUR}
    few = [occasion(hour, {"a": 1.0 + hour / 10}) for hour in range(4)]
    assert between([]) == between(few[:3]) == of_this_hour and between(few)[CALL]["degrees"] == 3
    assert between([each | {"time": number * 599} for number, each in enumerate(few)]) == of_this_hour
    shared = [occasion(hour, {name: 1 + hour / 10 for name in "abcdef"}) for hour in range(2)]
    assert between(shared) == of_this_hour  # one change of the machine, seen six times


def test_a_history_is_of_one_machine_is_bounded_and_grows_by_each_timing(tmp_path, monkeypatch):
    monkeypatch.setattr(occasions, "MOST", 5)
    file, rounds = history_of(tmp_path, MACHINE), {}
    for hour in range(7):
        monkeypatch.setattr(occasions.time, "time", lambda hour=hour: 3600.0 * hour)
        rounds = QUIET | {"probes": [FULL | {"cpu_int8_tops": 1.0 + hour}]}
        count_occasion(rounds, {"a": timed(1.4 + hour / 50)}, file)
    assert [each["time"] for each in read_history(file)] == [3600.0 * hour for hour in range(2, 7)]
    assert rounds["shown"] == {"cpu_copy_gb_per_second": 10.0, "cpu_int8_tops": pytest.approx(5.6)}
    assert rounds["between"][CALL]["occasions"] == 5
    others = MACHINE | {"cpu": "another"}, MACHINE | {"threads": 1}
    for other in (*(history_of(tmp_path, each) for each in others), history_of(None, MACHINE)):
        count_occasion(elsewhere := {**QUIET}, {}, other)
        assert elsewhere["between"] == {"reason": occasions.OF_THIS_HOUR} and elsewhere["shown"] == {}


NO_INTERVAL = '{"occasions": [{"time": 1, "probes": [], "speedups": {"a": {"call": [1, 0, 2]}}}]}'


def test_a_damaged_history_begins_anew_and_a_cache_that_cannot_be_written_is_no_error(tmp_path, caplog):
    file = history_of(tmp_path, MACHINE)
    file.parent.mkdir()
    for damaged in ("{", "[]", '{"occasions": 3}', '{"occasions": [{"time": 1}]}', "[" * 100_000, NO_INTERVAL):
        file.write_text(damaged)
        caplog.clear()
        assert read_history(file) == [] and "is left aside" in caplog.text, damaged[:9]
        count_occasion({**QUIET}, {"a": timed(1.4)}, file)
        assert [each["speedups"].keys() for each in read_history(file)] == [{"a"}]
    (tmp_path / "a/occasions").parent.mkdir()
    (tmp_path / "a/occasions").write_text("a file in the folder's place")
    count_occasion({**QUIET}, {"a": timed(1.4)}, history_of(tmp_path / "a", MACHINE))
    assert "cannot be written" in caplog.text


def test_a_slowed_machine_is_told_and_what_the_intervals_hold_for_and_a_sweep_has_the_widened_one(timed, without_plots):
    slow = {"probes": [FULL, FULL | {"cpu_copy_gb_per_second": 8.0}], "shown": FULL}
    told = "something outside the run slowed this machine: its memory bandwidth"
    known = {"between": {CALL: {"deviation": 0.081, "degrees": 5, "occasions": 6}}}
    hour, any_hour = {"between": {"reason": occasions.OF_THIS_HOUR}}, "standard deviation of 8.1% between 6 earlier"

    def texts(conditions) -> list[str]:
        """The page of a sweep and the table of a run."""
        record = with_values(record_of(34.0, 1.3, 0.6), {"latency.openvino.unet_xl.2.rounds": QUIET | conditions})
        page = report_of(timed({"level=1": 2.0}, rounds=QUIET | conditions)).read_text()
        return [page, " ".join(run_table(record).split())]

    for conditions, also in ((hour, "of this hour"), (known, any_hour)):
        assert all(told in text and also in text and "BUSY: while" in text for text in texts(slow | conditions))
    for text in texts(slow | {"probes": [FULL, FULL | {"cpu_copy_gb_per_second": 9.5}]}):
        assert "slowed" not in text and "± of speed-ups" not in text
    known = {kind: {"deviation": 0.1, "degrees": 5, "occasions": 6} for kind in (CALL, IMAGE)}
    own, wide = (timed({"level=1": 2.0}, rounds=QUIET | {"between": each}).rows[0] for each in ({}, known))
    for column in ("denoiser_speedup", "image_speedup"):
        assert wide[column] == own[column]
        assert math.log(wide[f"{column}_high"] / wide[column]) == pytest.approx(2.571 * math.sqrt(2) * 0.1, rel=0.01)
