"""Two assignments share a cached file exactly when nothing that is written in it differs; what is delivered opens."""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from sd_quant.cache import Cache
from sd_quant.export import onnx_file
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.stages import export_onnx
from sd_quant.stages.export_onnx import REPORTED, assignment_digest, delivered_files, export_parts, files_of_a_run

pytestmark = pytest.mark.commit

LAYER = LayerAssignment("layer", "ffn", (2, 4), "int8", "int8")
OTHER = {
    "name": "other", "weight_shape": (4, 2), "format": "int4", "activation_format": None, "weight_axis": 0,
    "weight_amax": torch.ones(2), "activation_amax": 1.0, "activation_zero_point": -110, "per_token": True,
    "rotation": 4, "bias": torch.ones(2), "pre_quant_scale": torch.ones(4), "folded_into": "norm",
    "output_scale": torch.ones(2), "output_shift": torch.ones(2),
    "rounded": (torch.ones(2, 4).to(torch.int8), torch.ones(2, 1)),
    "low_rank": (torch.ones(2, 1).half(), torch.ones(1, 4).half()),
    "attention_amax": (torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(2)), "key_mean": torch.ones(2, 16),
}  # fmt: skip


def test_every_field_is_either_written_or_reported():
    assert {field.name for field in fields(LAYER)} == OTHER.keys() | REPORTED


@pytest.mark.parametrize("name", OTHER)
def test_what_is_written_makes_another_file(name):
    changed = replace(LAYER, **{name: OTHER[name]})
    assert assignment_digest({"layer": changed}) != assignment_digest({"layer": LAYER})


def test_so_does_another_number_of_a_tensor_but_not_what_is_only_reported():
    up, down = OTHER["low_rank"]
    one, other = (replace(LAYER, low_rank=(up, factor)) for factor in (down, 2 * down))
    assert assignment_digest({"layer": one}) != assignment_digest({"layer": other})
    reported = replace(one, reason="kept", alpha=0.5, output_error=0.1)
    assert assignment_digest({"layer": reported}) == assignment_digest({"layer": one})


# ---------------------------------------------------------------------------------------------------- what is delivered


def product(name: str) -> ir.Model:
    """x times a weight."""
    x = ir.Value(name="x", shape=ir.Shape([2, 64]), type=ir.TensorType(ir.DataType.FLOAT))
    weight = ir.Value(name=f"{name}.weight", const_value=ir.tensor(np.ones((64, 64), np.float32)))
    node = ir.node("MatMul", [x, weight])
    (output,) = node.outputs
    output.name, output.shape, output.type = "y", ir.Shape([2, 64]), ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], [output], nodes=[node], initializers=[weight], opset_imports={"": 20}, name=name)
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    ("refused", "quantized", "delivered", "written"),
    [
        ((), ["unet"], ["unet", "vae", "text"], ["text", "vae", "full_precision/unet", "unet"]),
        ((), ["unet", "text"], ["unet", "vae", "text"],
         ["full_precision/text", "text", "vae", "full_precision/unet", "unet"]),
        (("vae",), ["unet"], ["unet", "text"], ["text", "full_precision/unet", "unet"]),
        (("unet",), ["unet"], ["vae", "text"], ["text", "vae"]),
        (("unet", "vae", "text"), ["unet"], [], []),
    ],
)  # fmt: skip
def test_parts_that_are_refused_have_no_files_and_each_quantized_one_is_behind_its_unquantized_twin(
    refused, quantized, delivered, written
):
    parts = {name: SimpleNamespace(refused="because" if name in refused else None) for name in ("unet", "vae", "text")}
    checkpoint = SimpleNamespace(parts=lambda: parts, family=SimpleNamespace(DENOISER="unet"))
    assignments = dict.fromkeys(quantized, {"layer": LAYER})
    files = delivered_files(checkpoint, assignments, Path("run"))
    assert [file.part for file in files] == delivered
    assert {file.part: bool(file.assignment) for file in files} == {part: part in quantized for part in delivered}
    of_a_run = files_of_a_run(checkpoint, assignments, Path("run"))
    assert [str((file.directory / file.part).relative_to("run")) for file in of_a_run] == written
    for file in of_a_run:
        assert file.delivered == ("full_precision" not in file.directory.parts)
        assert bool(file.assignment) == (file.delivered and file.part in quantized)


def test_weights_beside_a_graph_are_read_by_onnx_itself(tmp_path, monkeypatch):
    """Which refuses a file that is in the cache under another name, as the unquantized denoiser's is."""
    parts = {name: SimpleNamespace(contract=name, identity="", refused=None) for name in ("unet", "vae")}
    checkpoint = SimpleNamespace(parts=lambda: parts, family=SimpleNamespace(DENOISER="unet"))
    monkeypatch.setattr(onnx_file, "LARGEST_SINGLE_FILE", 0)
    monkeypatch.setattr(export_onnx, "trace_part", lambda checkpoint, part: product(part))
    monkeypatch.setattr(
        export_onnx, "write_part", lambda graph, checkpoint, part, path, chosen: onnx_file.save(product(part), path)
    )
    for run in (tmp_path / "one", tmp_path / "two"):
        files = files_of_a_run(checkpoint, {"unet": {"layer": LAYER}}, run)
        export_parts(checkpoint, "hash", files, Cache(tmp_path / "cache", 1e9))
        for part in parts:
            onnx.checker.check_model(run / f"onnx/{part}/{part}.onnx", full_check=True)
    links = {path.relative_to(tmp_path): path.stat().st_nlink for path in tmp_path.rglob("*.data")}
    assert {str(path): names for path, names in links.items() if names > 1 and path.parts[0] != "cache"} == {
        f"{run}/full_precision/onnx/unet/unet.onnx.data": 3 for run in ("one", "two")
    }
