"""What a job says of its class of processors is held against its figures, and one run of two classes."""

import json

import onnx
import pytest
import torch

from sd_quant.errors import ConfigError

pytestmark = pytest.mark.commit


TRUE = {"said": {}, "quantized_layers": 150, "int8_layers": 150, "own_speedup": 1.2, "speedup": 1.21}
SAID = {
    "FLOAT": "FLOAT: openvino computes 150 of 150 quantized layers in floating point; metrics.json names them.",
    "SLOWER": "SLOWER: unet_xl at batch 2 on openvino takes 1.75 times as long quantized as unquantized.",
}
OLD = {"said": SAID, "int8_layers": 0, "own_speedup": 0.57, "speedup": 0.58}


@pytest.fixture
def processors(benchmark):
    return benchmark("processors")


@pytest.mark.parametrize("changed, found", [
    ({}, []),
    (OLD, []),
    ({"int8_layers": 0}, ["says that 150 of 150 layers are INT8, and OpenVINO executes 0"]),
    (OLD | {"int8_layers": 150}, ["says that 0 of 150 layers are INT8, and OpenVINO executes 150"]),
    ({"own_speedup": 0.9}, ["does not say SLOWER, and its own rounds give 0.90x"]),
    ({"speedup": 0.8}, ["does not say SLOWER, and timed again give 0.80x"]),
    ({"own_speedup": 0.98, "speedup": 0.95}, []),  # within what a latency varies by
    (OLD | {"own_speedup": 1.2}, ["says SLOWER, and its own rounds give 1.20x"]),
])  # fmt: skip
def test_what_is_said_is_held_against_what_is_executed_and_timed(processors, changed, found):
    assert processors.falsehoods(TRUE | changed) == found


def test_a_class_that_does_not_exist_is_refused(processors, monkeypatch):
    monkeypatch.setattr("sys.argv", ["processors", "--classes", "AVX2", "AVX3"])
    expected = "--classes has AVX3, expected some of AVX2, AVX2_VNNI, AVX512_CORE, AVX512_CORE_VNNI, AVX512_CORE_AMX"
    with pytest.raises(ConfigError) as refused:
        processors.main()
    assert str(refused.value) == expected and refused.value.exit_code == 2


def test_times_without_a_median_leave_the_ratio_of_the_rounds(processors, tmp_path):
    times = {name: {"p50_ms": None, "reason": "disturbed"} for name in ("full_precision", "quantized")}
    parity = {name: {"relative_error": 0.1, "tolerance": 0.2} for name in ("quantized_layers", "unet_xl_quantized")}
    job = {"parity": parity, "executed": {"of": 150}, "fidelity": {"psnr": {"mean": 15.0}}}
    job["latency"] = {"openvino": {"unet_xl": {"2": {**times, "speedup": 1.2}}}}
    graph = processors.artifact(tmp_path / "run", "onnx", "unet_xl")
    graph.parent.mkdir(parents=True)
    onnx.save(onnx.ModelProto(), graph)
    (tmp_path / "run/metrics.json").write_text(json.dumps(job))
    (tmp_path / "run/layers.csv").write_text("name,format\nconv_in,int8\n")
    torch.save({"int8": torch.ones(1)}, tmp_path / "outputs.pt")
    record = processors.record_of("AVX2", tmp_path, "", {"int8_layers": 150, "speedup": 1.2}, None)
    assert record["own_speedup"] == 1.2 and not record["falsehoods"]


@pytest.mark.release
def test_two_classes_run(processors, script, tmp_path):
    here = [name for name in processors.CLASSES if not processors.lacking(name, processors.flags_here())]
    if not here:
        pytest.skip("this processor is older than AVX2, or no x86")
    result = script("processors", "--classes", *dict.fromkeys((here[0], here[-1])), "--quick", "--out", tmp_path)
    assert "Traceback" not in result.stderr, result.stderr
    assert result.returncode in (0, 1), result.stdout + result.stderr  # 1 where a busy machine's latencies contradict
    records = json.loads((tmp_path / "processors.json").read_text())
    for each in records:
        assert "failed" not in each and not [found for found in each["falsehoods"] if "OpenVINO executes" in found]
        assert each["int8_layers"] == (0 if each["saturates"] else each["quantized_layers"])
    assert (tmp_path / "processors.md").read_text() in result.stdout and (tmp_path / "processors.csv").is_file()
