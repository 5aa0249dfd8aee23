import onnx
import pytest
import torch

from sd_quant.engines import RUNTIMES, Runtime, load_engine
from sd_quant.engines.base import cast_inputs, onnx_files
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


def test_external_weights_belong_to_the_file(tiny):
    assert [file.name for file in onnx_files(tiny.path)] == ["tiny.onnx", "weights.bin"]


def test_missing_external_weights_are_refused(tiny):
    (tiny.path.parent / "weights.bin").unlink()
    with pytest.raises(ArtifactError, match="weights.bin"):
        onnx_files(tiny.path)


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "link"])
def test_external_weights_outside_the_folder_are_refused(tiny, location):
    (tiny.path.parent / "link").symlink_to("/etc/hostname")
    model = onnx.load(tiny.path, load_external_data=False)
    entry = next(e for t in model.graph.initializer for e in t.external_data if e.key == "location")
    entry.value = location
    tiny.path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="outside its own folder"):
        onnx_files(tiny.path)


@pytest.mark.parametrize(
    ("name", "dims", "entries"),
    [
        ("w_int8", [2**40, 32], {}),
        ("w_int8", [-64, -32], {}),
        ("w_int8", None, {"length": "1"}),
        ("w_int8", None, {"length": str(2**40)}),
        ("w_int8", None, {"offset": "1"}),
        ("w_int8", None, {"offset": "-1"}),
        ("w_int8", None, {"offset": "9" * 5000}),
        ("w_scale", [2**40], {}),
        ("w_scale", [2**32, 2**32], {}),
    ],
)
def test_weights_that_are_smaller_than_they_claim_are_refused(tiny, name, dims, entries):
    """Runtimes allocate what is claimed: of a file of four kilobytes, terabytes."""
    model = onnx.load(tiny.path, load_external_data=False)
    [tensor] = [tensor for tensor in model.graph.initializer if tensor.name == name]
    if dims:
        tensor.dims[:] = dims
    for key, value in entries.items():
        entry = next((entry for entry in tensor.external_data if entry.key == key), None) or tensor.external_data.add()
        entry.key, entry.value = key, value
    tiny.path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match=f"tiny.onnx claims more numbers for '{name}' than it holds"):
        onnx_files(tiny.path)


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
