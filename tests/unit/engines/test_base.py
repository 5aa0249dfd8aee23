import pytest
import torch

from sd_quant.engines import RUNTIMES, Runtime, load_engine
from sd_quant.engines.base import cast_inputs
from sd_quant.errors import ArtifactError, ConfigError, ResourceError


def test_inputs_are_cast_and_ordered_as_declared():
    given = {"b": torch.ones(2, dtype=torch.float64), "a": torch.ones(3, 2).T}
    cast = cast_inputs({"a": torch.float16, "b": torch.int64}, given)
    assert [(name, tensor.dtype) for name, tensor in cast.items()] == [("a", torch.float16), ("b", torch.int64)]
    assert cast["a"].is_contiguous()


@pytest.mark.parametrize("names", [[], ["x", "z"], ["X"]])
def test_missing_and_unknown_inputs_are_refused(names):
    with pytest.raises(ValueError, match=r"takes inputs \['x'\]"):
        cast_inputs({"x": torch.float32}, {name: torch.ones(1) for name in names})


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 64])
def test_what_is_not_onnx_is_refused_by_every_engine_that_reads_onnx(tmp_path, content):
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    for name in ("openvino", "onnxruntime"):
        with pytest.raises(ArtifactError, match="broken.onnx"):
            load_engine(name, path)


def test_a_missing_file_is_an_artifact_error(tmp_path):
    for name in (name for name, runtime in RUNTIMES.items() if runtime.load):
        with pytest.raises(ArtifactError, match="nowhere"):
            load_engine(name, tmp_path / "nowhere")


def test_unknown_engine_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean openvino"):
        load_engine("open_vino", tmp_path)


def test_a_runtime_that_is_not_installed_names_its_extra(tmp_path, monkeypatch):
    row = Runtime("not_there", "onnx", "cpu", "not_there", "not_there", load="sd_quant.engines.not_there:load")
    monkeypatch.setitem(RUNTIMES, "not_there", row)
    with pytest.raises(ResourceError, match=r"sd-quant\[not_there\]"):
        load_engine("not_there", tmp_path)
