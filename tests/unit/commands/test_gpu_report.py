"""``sd-quant gpu-report``, with a GPU that is not there: its runs leave records as they would."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

from sd_quant.commands import gpu_report
from sd_quant.errors import ResourceError, SdQuantError
from sd_quant.report.gpu_report import read_report
from tests.nested import with_values

from ..report.sweeps import record_of_plan

pytestmark = pytest.mark.commit
NO_PLANS = {
    *(("tensorrt", fmt) for fmt in ("nvfp4", "mxfp4", "mxfp8")),
    *(("tensorrt_rtx", fmt) for fmt in gpu_report.PRESETS),
}
H20 = ["NVIDIA H20", "9.0", "550.1", "97871 MiB"]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A Hopper GPU with mainline TensorRT. Returns the commands that are run, and what fails by a word in it."""
    found = SimpleNamespace(commands=[], fails={}, changes={})
    monkeypatch.setattr(gpu_report, "usable_gpu", lambda: "SM90")
    monkeypatch.setattr(gpu_report, "gpu_in_use", lambda: H20)
    monkeypatch.setattr(gpu_report, "clocks", lambda: {"clocks.sm": "1980 MHz"}.items())
    monkeypatch.setattr(gpu_report.provenance, "processor", lambda: {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz"})
    monkeypatch.setattr(
        gpu_report, "why_not_here",
        lambda engine, gpu, used: f"{engine} has no {gpu}" if (engine, *used) in NO_PLANS else None,
    )  # fmt: skip

    def run(command, cwd, stdout, **options):
        assert cwd == tmp_path
        found.commands.append(command[1:])
        for word, (code, text) in found.fails.items():
            if any(word in each for each in command):
                stdout.write(text)
                return SimpleNamespace(returncode=code)
        if "sd_quant.checkpoints.synthetic" in command:
            (cwd / command[-1]).touch()
        else:
            folder = cwd / command[-1].removeprefix("hydra.run.dir=")
            folder.mkdir()
            made = with_values(record_of_plan(), found.changes)
            if "infer=torch_compiled" in command:
                made["latency"]["torch_compiled"] = made["latency"].pop("tensorrt")
            (folder / "metrics.json").write_text(json.dumps(made))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gpu_report.subprocess, "run", run)
    found.report = lambda: read_report((tmp_path / "gpu_report.json").read_bytes(), "it")
    monkeypatch.setattr(sys, "argv", ["gpu-report", "--out", str(tmp_path)])
    return found


def test_every_checkpoint_runs_on_every_engine_and_format_of_the_gpu(machine):
    gpu_report.main()
    report, runs = machine.report(), [command for command in machine.commands if "quantize" in command]
    ended = {(row.checkpoint, row.engine, row.format): row.ended for row in report.rows}
    assert len(ended) == 2 * 3 * len(gpu_report.PRESETS) and len(runs) == 8
    assert {key for key, each in ended.items() if each == "done"} == {
        (checkpoint, engine, fmt)
        for checkpoint in ("mini", "full") for engine in ("torch_compiled", "tensorrt") for fmt in ("fp8", "int8")
    }  # fmt: skip
    assert (report.gpu.name, report.processor) == ("NVIDIA H20", "Intel(R) Xeon(R) CPU @ 2.20GHz")
    assert report.gpu.clocks == {"clocks.sm": "1980 MHz"} and not report.rehearsal
    reasons = {row.reason for row in report.rows if row.ended == "not run"}
    assert {"torch multiplies no nvfp4 on SM90", "tensorrt has no SM90", "tensorrt_rtx has no SM90"} <= reasons
    of_plans = next(command for command in runs if "infer=tensorrt" in command)
    assert {"export_trt=tensorrt", "compiled_baseline=true", "infer.cuda_graph=true", "quant_level=3"} <= {*of_plans}
    plan = next(row for row in report.rows if row.engine == "tensorrt" and row.ended == "done")
    assert [each.what for each in plan.parity] == ["vae with torch"]
    assert sum("sd_quant.checkpoints.synthetic" in command for command in machine.commands) == 1


UNTIMED = {"latency.tensorrt.unet_xl.2.quantized": {"p50_ms": None, "reason": "simulated: no product in /home"}}


@pytest.mark.parametrize(("what", "said", "reasons"), [
    ({"fails": {"full_tensorrt_fp8": (1, "19:01 load\nerror: /tmp/x.plan cannot be built\n"),
                "mini_torch_compiled_int8": (-11, "")}},
     "2 of 30 rows failed: mini torch_compiled int8, full tensorrt fp8",
     ["exit code -11: no output", "exit code 1: error: <path> cannot be built"]),
    ({"changes": UNTIMED}, "8 of 30 rows failed", 8 * [".*its record cannot be sent: denoiser.quantized_ms: Input.*"]),
])  # fmt: skip
def test_a_run_that_fails_is_a_row_with_its_reason_and_the_others_go_on(machine, what, said, reasons):
    vars(machine).update(what)
    with pytest.raises(SdQuantError, match=said):
        gpu_report.main()
    failed = [row.reason for row in machine.report().rows if row.ended == "failed"]
    assert all(re.fullmatch(*pair) for pair in zip(reasons, failed, strict=True))


def test_cancelling_stops_and_leaves_the_rows_before(machine):
    machine.fails = {"mini_torch_compiled_fp8": (130, "error: cancelled\n")}
    with pytest.raises(KeyboardInterrupt):
        gpu_report.main()
    assert [(row.format, row.ended) for row in machine.report().rows] == [("int8", "done")]


def test_without_a_gpu_nothing_is_run_and_torch_multiplies_no_fp8_on_ampere(machine, monkeypatch):
    job = gpu_report.Job("mini", "torch_compiled", "fp8")
    assert [gpu_report.unable(job, gpu) for gpu in ("SM86", "SM89")] == ["torch multiplies no fp8 on SM86", None]
    monkeypatch.setattr(gpu_report, "usable_gpu", lambda: None)
    with pytest.raises(ResourceError, match="there is no NVIDIA GPU that torch can use.*--rehearse"):
        gpu_report.main()
    assert not machine.commands
