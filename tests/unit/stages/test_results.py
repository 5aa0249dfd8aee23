"""Sizes and counts of a record, of files and of layers made by hand."""

from types import SimpleNamespace

import onnx
import pytest
import torch
from onnx.helper import make_graph, make_model, make_node

from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.stages.results import same_steps
from sd_quant.stages.run_record import count_layers, count_smoothing, sizes

pytestmark = pytest.mark.commit

FILES = {  # bytes
    "onnx/unet/unet.onnx": 10, "onnx/unet/unet.onnx.data": 300, "plan/unet.plan": 5, "onnx/vae/vae.onnx": 70,
    "full_precision/onnx/unet/unet.onnx": 20, "full_precision/onnx/unet/unet.onnx.data": 2000, "onnx/text/text.onnx": 7,
}  # fmt: skip


def test_sizes_are_those_of_a_parts_own_files(tmp_path):
    """A graph counts with the weights beside it; in fp32 a number has four bytes.

    A part that is not exported has none, whatever else lies in the folder.
    """
    for name, size in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    parts = dict.fromkeys(("unet", "vae"), SimpleNamespace(refused=None))
    parts["text"] = SimpleNamespace(refused="it draws random numbers")
    none = {"value": None, "reason": "not exported: it draws random numbers"}
    assert sizes(parts, {"unet": 1000, "vae": 35, "text": 35}, tmp_path) == {
        "unet": {"onnx_full_precision": 2020, "onnx_quantized": 310, "plan": 5, "weights_fp32": 4000},
        "vae": {
            "onnx_full_precision": 70,
            "onnx_quantized": {"value": None, "reason": "not quantized"},
            "plan": {"value": None, "reason": "no plan was asked for"},
            "weights_fp32": 140,
        },
        "text": {"onnx_full_precision": none, "onnx_quantized": none, "plan": none, "weights_fp32": 140},
    }


def test_layers_count_by_their_formats_wherever_they_are_smoothed(tmp_path):
    """``k`` stays in high precision and reads what ``q`` reads, so both are divided by what the norm multiplies."""
    vector = {"pre_quant_scale": torch.ones(4)}
    rows = [
        LayerAssignment("norm", "norm", (4,), output_scale=torch.ones(4)),
        LayerAssignment("q", "qkv", (4, 4), "int8", "int8", **vector, folded_into="norm"),
        LayerAssignment("k", "qkv", (4, 4), **vector, folded_into="norm"),
        LayerAssignment("out", "linear", (4, 4), "int8", "int8", **vector),
        LayerAssignment("conv", "conv", (4, 4, 3, 3), "int8", "int8"),
        LayerAssignment("conv_in", "excluded", (4, 4, 3, 3)),
        LayerAssignment("attn", "attention", (), None, "int8"),
    ]
    nodes = [make_node("Mul", ["x", "x"], ["out.smoothed"]), make_node("Mul", ["x", "x"], ["y"])]
    assignment = {row.name: row for row in rows}
    assert count_layers(assignment) == {"quantized": 3, "high_precision": 2}
    counts = {"smoothed_layers": 2, "folded_layers": 1}
    assert count_smoothing(assignment, tmp_path / "unet.onnx") == counts | {"multiplications": 0}  # without a graph
    onnx.save(make_model(make_graph(nodes, "unet", [], [])), tmp_path / "unet.onnx")
    assert count_smoothing(assignment, tmp_path / "unet.onnx") == counts | {"multiplications": 1}


def test_latents_of_other_steps_are_compared_behind_the_last():
    full, quantized = torch.arange(6.0).reshape(2, 3, 1), torch.arange(4.0).reshape(2, 2, 1)
    assert same_steps(full, full) == (full, full)
    assert [[each.tolist() for each in side] for side in same_steps(full, quantized)] == [
        [[[2.0]], [[5.0]]], [[[1.0]], [[3.0]]]
    ]  # fmt: skip
