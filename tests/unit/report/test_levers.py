import pytest

from sd_quant.report.levers import BEATS, LOSES, TITLES, UNTOLD, against_control, lever_cells
from sd_quant.report.record import parsed
from sd_quant.report.run_table import run_table
from sd_quant.report.summary import timed_alone
from tests.nested import with_values

from .sweeps import record_of

pytestmark = pytest.mark.commit

SPREAD = [0.3 * (number % 5 - 2) for number in range(24)]


def scores(mean: float) -> dict:
    return {"psnr": {"mean": mean, "values": [mean + each for each in SPREAD]}}


def record(own: float = 36, control: float | None = 30) -> dict:
    levers = {
        "steps": 20, "schedule": "ccrccr", "calls": 14,
        "share": 0.7, "twin": scores(38), "bits_alone": scores(37), "calls_alone": scores(44),
        "control": control and {"steps": 12, "fidelity": scores(control)},
        "reason": None if control else "the recipe saves no step's time of full precision",
    }  # fmt: skip
    changes = {"fidelity": scores(own), "latency.openvino.image.1.quantized.calls_share": 0.7}
    return parsed(with_values(record_of(own, 1.5, 0.6), changes) | {"levers": levers})


def cells_of(record: dict) -> dict[str, str]:
    return dict(zip(TITLES, lever_cells("reuse=0.3", record, timed_alone("reuse=0.3", record)), strict=True))


@pytest.mark.parametrize(
    ("control", "verdict", "gain"), [(30, BEATS, 6), (40, LOSES, -4), (36.0, UNTOLD, 0), (None, None, None)]
)
def test_a_recipe_beats_the_control_if_it_is_closer(control, verdict, gain):
    """They are compared prompt by prompt; a single prompt shows nothing."""
    of = record(control=control)
    found, cells = against_control(of), cells_of(of)
    assert (found and found[0]) == verdict
    if not found:
        assert "saves no step's time" in cells["control"]
        return
    assert found[1].value == pytest.approx(gain) and found[1].high - found[1].low < 0.1
    assert cells["against it"].startswith(f"{verdict} (") and cells["control"].startswith("12 steps")
    for each in (of["fidelity"], of["levers"]["control"]["fidelity"]):
        del each["psnr"]["values"][1:]
    assert against_control(of)[0] == UNTOLD


def test_time_is_told_apart_by_what_saved_it():
    """A call is twice as fast, and 0.7 of the calls are made; half as much time as that of all calls is elsewhere."""
    of = record()
    expected = {
        "speed-up": f"{1.5 / (0.35 + 0.5):.2f}x", "of that by bits": f"{1.5 / (0.5 + 0.5):.2f}x",
        "by calls": f"{1.5 / (0.7 + 0.5):.2f}x", "calls": "14", "schedule": "ccrccr",
    }  # fmt: skip
    assert expected.items() <= cells_of(of).items()
    assert "against it" in run_table(of) and "bits and other" not in run_table(of | {"levers": None})


def test_precise_steps_have_their_gain():
    of = record()
    of["levers"]["precise"] = {"schedule": "cchh", "gain_db": [3.0, 2.0, 4.0]}
    cell = "cchh: +3.0 ± 1.0 dB"
    assert cells_of(of)["precise steps"] == cell and all(word in run_table(of) for word in cell.split())
    assert cells_of(record())["precise steps"] == "–"
