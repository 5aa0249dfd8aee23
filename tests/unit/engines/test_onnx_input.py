import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from sd_quant.engines.onnx_input import onnx_files, structure_of
from sd_quant.errors import ArtifactError

pytestmark = pytest.mark.commit


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "link", "absent"])
def test_external_weights_outside_the_folder_are_refused(tiny, location):
    """And weights that are missing."""
    (tiny.path.parent / "link").symlink_to("/etc/hostname")
    model = onnx.load(tiny.path, load_external_data=False)
    entry = next(e for t in model.graph.initializer for e in t.external_data if e.key == "location")
    entry.value = location
    tiny.path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="'absent', which is not" if location == "absent" else "outside its own"):
        onnx_files(tiny.path)


@pytest.mark.parametrize(
    ("name", "dims", "entries"),
    [
        *(("w_int8", dims, {}) for dims in ([2**40, 32], [-64, -32])),
        *(("w_int8", None, {"length": length}) for length in ("1", str(2**40))),
        *(("w_int8", None, {"offset": offset}) for offset in ("1", "-1", "9" * 5000)),
        *(("w_scale", dims, {}) for dims in ([2**40], [2**32, 2**32])),
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


def test_a_structure_has_all_but_constants(tmp_path):
    """Zero points are no constants: a shifted input is multiplied by other kernels."""

    def structure(codes=0, scale=0.5, zero_point=0, rows=4, operation="MatMul") -> str:
        tensors = {
            "codes": np.full((rows, 4), codes, np.int8), "scale": np.float16([scale] * 4),
            "zero_point": np.full(4, zero_point, np.int8), "bias": np.full(4, scale, np.float32),
        }  # fmt: skip
        weights = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
        nodes = [helper.make_node(operation, ["x", "codes"], ["y"])]
        model = helper.make_model(helper.make_graph(nodes, "graph", [], [], weights))
        helper.set_model_props(model, {"made": str(codes)})
        (tmp_path / "unet.onnx").write_bytes(model.SerializeToString())
        return structure_of(tmp_path / "unet.onnx")

    assert structure() == structure(codes=7, scale=0.25)
    assert len({structure(), structure(zero_point=3), structure(rows=8), structure(operation="Gemm")}) == 4
