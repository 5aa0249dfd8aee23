"""What a job refuses once its checkpoint is open, and the last lines that a run prints."""

import os
from types import SimpleNamespace

import pytest

from sd_quant.config import QuantizeJob
from sd_quant.errors import ConfigError
from sd_quant.knobs import read
from sd_quant.report.record import RECORD, parsed
from sd_quant.report.summary import RECOMMENDATION, REPORT
from sd_quant.stages import job_folder, opening

from ..config.composition import composed

pytestmark = pytest.mark.commit


def test_a_pipeline_that_no_server_loads_is_refused_before_calibration(monkeypatch, tmp_path):
    knobs = ("model=diffusers", "model.path=checkpoints/sd3_mini", "quantize=fp8", "hand_over=[modelopt_export]")
    family = SimpleNamespace(
        PIPELINES=("SanaPipeline",), NETWORKS={"transformer": "SanaTransformer2DModel"}, DENOISER="transformer"
    )
    parts = {"transformer": SimpleNamespace(component="transformer")}
    loaded = SimpleNamespace(checkpoint=SimpleNamespace(family=family, parts=lambda: parts))
    for name, stand_in in (("load", loaded), ("limit_of", None)):
        monkeypatch.setattr(opening, name, lambda *_, stand_in=stand_in: stand_in)
    monkeypatch.setattr(opening, "write_observed", lambda *_: pytest.fail("it goes on"))
    job = read(QuantizeJob, composed("quantize", *knobs))
    with pytest.raises(ConfigError, match="modelopt_export is for servers, and none loads this pipeline"):
        opening.opened(job, tmp_path)


def test_another_part_that_the_engine_cannot_execute_is_refused_before_the_first_step():
    """The denoiser is simulated instead."""
    mapping = composed("quantize", "quantize=nvfp4", "infer=openvino", "export_trt=none")
    opening.check_runtimes(read(QuantizeJob, mapping))
    mapping["quantize"]["parts"] = {"vae": "int8", "clip1": "nvfp4"}
    with pytest.raises(ConfigError, match="^quantize.parts gives clip1 the preset nvfp4, which infer.engine=openvino"):
        opening.check_runtimes(read(QuantizeJob, mapping))


def test_a_report_is_drawn_once_for_a_record(tmp_path, monkeypatch, capsys):
    drawn = []

    def rebuild(directory):
        drawn.append(directory)
        (directory / REPORT).write_text("page")
        (directory / RECOMMENDATION).write_text('{"command": "infer run=here", "sentence": "Ship it: it is fast."}')

    monkeypatch.setattr(job_folder, "run_table", lambda record: "the table")
    monkeypatch.setattr("sd_quant.report.rebuild.rebuild", rebuild)
    (tmp_path / RECORD).write_text("{}")
    for _ in range(2):
        job_folder.closing_words(parsed(None), tmp_path)
        *_, page, command, last = capsys.readouterr().out.splitlines()
        assert drawn == [tmp_path] and page == f"report: file://{tmp_path}/report.html"
        assert (command, last) == ("images with it: infer run=here", "Ship it: it is fast.")
    later = (tmp_path / REPORT).stat().st_mtime_ns + 1
    os.utime(tmp_path / RECORD, ns=(later, later))  # such as by a hand-over
    job_folder.closing_words(parsed(None), tmp_path)
    for name in (REPORT, RECOMMENDATION):
        (tmp_path / name).unlink()
        job_folder.closing_words(parsed(None), tmp_path)
    assert len(drawn) == 4
    assert "alpha" not in capsys.readouterr().out
    auto = {"inputs": 19, "lower": 17, "error": 0.022, "error_auto": 0.0205}
    job_folder.closing_words(parsed({"overrides": ["alpha=0.8", "keep=3"], "auto": auto}), tmp_path)
    what = "2.20% with the given alpha, 2.05% with auto; lower in 17 of 19 inputs tried"
    printed = capsys.readouterr().out
    assert f"alpha=auto lowers the expected error of layers ({what}): sd-quant quantize" in printed
    assert ": sd-quant quantize keep=3 alpha=auto\n" in printed
