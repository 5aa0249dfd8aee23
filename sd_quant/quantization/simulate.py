"""The assignment in torch: NVIDIA ModelOpt's quantizers, set to our scales instead of calibrated again.

The result is an ordinary ModelOpt model: ``mto.save`` writes it and ``mto.restore`` takes it back.
"""

import contextlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from sd_quant.files import atomic_path
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.int8 import QMAX, per_channel


def modelopt_config(assignment: Mapping[str, LayerAssignment]) -> dict:
    """Deny all, then enable each assigned layer by its exact name. No algorithm: the scales are already known."""
    rules: list[dict] = [{"quantizer_name": "*", "enable": False}]
    for layer in assignment.values():
        if layer.format == "int8":
            rules += [
                {"quantizer_name": f"{layer.name}.weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}},
                {"quantizer_name": f"{layer.name}.input_quantizer", "cfg": {"num_bits": 8, "axis": None}},
            ]
    return {"quant_cfg": rules, "algorithm": None}


@torch.no_grad()
def simulate(module: nn.Module, assignment: Mapping[str, LayerAssignment]) -> nn.Module:
    """``module`` with fake quantization in place (it is changed). Weights are smoothed, not yet rounded."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints how many it inserted
        warnings.filterwarnings("ignore", "transformers .* is not tested")
        import modelopt.torch.quantization as mtq

        module = mtq.quantize(module, modelopt_config(assignment))
    for layer in assignment.values():
        target = module.get_submodule(layer.name)
        for parameter in target.parameters(recurse=False):
            parameter.copy_(rewritten(parameter, layer))
        weight = target.get_parameter("weight")
        if layer.multiplies:
            target.input_quantizer._enable_pre_quant_scale = True
            target.input_quantizer.pre_quant_scale = layer.pre_quant_scale.half().to(weight)  # as in the graph
        if layer.format == "int8":
            target.weight_quantizer.amax = per_channel(layer.weight_scale * QMAX, weight).to(weight)
            target.input_quantizer.amax = torch.tensor(layer.activation_scale * QMAX).to(weight)
    return module


def save_quantized(module: nn.Module, path: Path) -> None:
    """ModelOpt's own checkpoint format."""
    import modelopt.torch.opt as mto

    with atomic_path(path) as temporary:
        mto.save(module, temporary)
