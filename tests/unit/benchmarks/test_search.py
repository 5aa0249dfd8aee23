"""What the benchmark of the search takes for the best of a finished sweep."""

import json

import pytest

from sd_quant.files import write_json
from sd_quant.report.record import RECORD
from sd_quant.report.summary import SWEEP

from ..report.sweeps import record_of, write_plan

pytestmark = pytest.mark.commit

SHOWN = {"a": (40.0, 1.1), "b": (35.0, 1.4), "c": (34.99, 1.5), "d": (31.0, 1.6), "e": (20.0, 1.7)}


def test_the_best_is_the_most_faithful_that_reaches_the_target_and_its_ties(benchmark, tmp_path, monkeypatch, capsys):
    module = benchmark("search")
    for number, (name, (decibels, speedup)) in enumerate(SHOWN.items()):
        record = record_of(decibels, speedup, 0.5)
        record["fidelity"]["psnr"]["values"] = [decibels + 0.01 * number, decibels - 0.01 * number]
        write_json(tmp_path / name / RECORD, record)
    write_plan(tmp_path, {name: {"level": number} for number, name in enumerate(SHOWN)}, verdict={"speedup": 1.3})
    grid, known, best = module.finished(tmp_path, None)
    assert [job["name"] for job in grid] == [*SHOWN] == [*known] and best == {"b", "c"}
    assert [name for name, each in known.items() if each.shortfall > 0] == ["a"] and not known["e"].passes
    assert module.finished(tmp_path, 1.55)[2] == {"d"}
    with pytest.raises(SystemExit, match="no job of .* passes the floor and surely reaches 1.65x the speed"):
        module.finished(tmp_path, 1.65)
    monkeypatch.setattr("sys.argv", ["search", str(tmp_path), "--seeds", "2", "--speedups", "1.3"])
    with pytest.raises(SystemExit):  # of five jobs a fifth is one
        module.main()
    assert f"| {tmp_path.name}, 1.3x | 5 | 2 | 1.0 | " in capsys.readouterr().out
    plan = json.loads((tmp_path / SWEEP).read_text())
    write_json(tmp_path / SWEEP, plan | {"verdict": {}})
    with pytest.raises(SystemExit, match="is without a target; give a whole grid and --speedups$"):
        module.finished(tmp_path, None)
