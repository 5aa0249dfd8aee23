"""The assignment in torch: NVIDIA ModelOpt's quantizers, set to our scales instead of calibrated again.

INT8 and FP8 are computed by ModelOpt itself. Its formats of four bits need CUDA, so those are ours, called by the same
quantizers as a backend. A low-rank branch is a hook that adds its product, and quantized attention a processor.
Where nothing of ours is needed the result is an ordinary ModelOpt model: ``mto.save`` writes it and ``mto.restore``
takes it back.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.files import atomic_path
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, fake_quantize
from sd_quant.quantization.formats.int8 import per_channel
from sd_quant.simulation.rewrite import rewrite

BACKEND = "sd_quant"


def attributes(name: str, axis: int | None) -> dict:
    """ModelOpt's attributes of one quantizer for the format of this ``name``."""
    num_bits = FORMATS[name].modelopt_num_bits
    if num_bits is not None:
        return {"num_bits": num_bits, "axis": axis}
    return {"num_bits": 8, "axis": None, "backend": BACKEND, "backend_extra_args": {"format": name}}


def quantizer_amax(name: str, amax, scale):
    """The amax that gives ModelOpt's own quantizer our ``scale``; for our backend the ``amax`` as it is."""
    fmt = FORMATS[name]
    return amax if fmt.modelopt_num_bits is None else scale * fmt.largest_code


def modelopt_config(assignment: Mapping[str, LayerAssignment]) -> dict:
    """Deny all, then enable each assigned layer by its exact name. No algorithm: the scales are already known."""
    rules: list[dict] = [{"quantizer_name": "*", "enable": False}]
    for layer in assignment.values():
        if layer.format is not None:
            cfg = attributes(layer.format, layer.weight_axis)
            rules.append({"quantizer_name": f"{layer.name}.weight_quantizer", "cfg": cfg})
            if layer.activation_format is not None:
                cfg = attributes(layer.activation_format, None)
                rules.append({"quantizer_name": f"{layer.name}.input_quantizer", "cfg": cfg})
    return {"quant_cfg": rules, "algorithm": None}


def blocked(x: Tensor, quantizer) -> Tensor:
    """ModelOpt's backend for formats that it has not here; blocks lie along the inputs of each output."""
    fmt = FORMATS[quantizer.backend_extra_args["format"]]
    flat = x.flatten(1) if x.ndim == 4 else x
    return fake_quantize(fmt, flat, quantizer.amax.float()).view(x.shape).to(x)


def add_low_rank(up: Tensor, down: Tensor) -> Callable[[nn.Module, tuple, Tensor], Tensor]:
    def hook(layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        x = inputs[0]
        if layer.input_quantizer.pre_quant_scale is not None:
            x = x * layer.input_quantizer.pre_quant_scale
        return output + (x @ down.T.to(x)) @ up.T.to(x)

    return hook


@torch.no_grad()
def simulate(module: nn.Module, assignment: Mapping[str, LayerAssignment]) -> nn.Module:
    """``module`` with fake quantization in place (it is changed). Weights are smoothed, not yet rounded."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints how many it inserted
        warnings.filterwarnings("ignore", "transformers .* is not tested")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.quantization.extensions import get_cuda_ext, get_cuda_ext_fp8
        from modelopt.torch.quantization.nn import is_registered_quant_backend, register_quant_backend

        if not is_registered_quant_backend(BACKEND):
            register_quant_backend(BACKEND, blocked)
        # On a GPU it would compile kernels, for minutes. Without them it computes there as on a processor, in torch.
        get_cuda_ext.extension = get_cuda_ext_fp8.extension = None
        module = mtq.quantize(module, modelopt_config(assignment))
    rewrite(module, assignment)
    for layer in (layer for layer in assignment.values() if layer.role != "attention"):
        target = module.get_submodule(layer.name)
        weight = target.get_parameter("weight")
        if layer.multiplies:
            target.input_quantizer._enable_pre_quant_scale = True
            target.input_quantizer.pre_quant_scale = layer.pre_quant_scale.half().to(weight)  # as in the graph
        if layer.low_rank is not None:
            target.register_forward_hook(add_low_rank(*layer.low_rank))
        if layer.format is not None:
            amax = quantizer_amax(layer.format, layer.weight_amax, layer.weight_scale)
            target.weight_quantizer.amax = (per_channel(amax, weight) if layer.weight_axis == 0 else amax[0]).to(weight)
        if layer.activation_format is not None:
            amax = quantizer_amax(layer.activation_format, layer.activation_amax, layer.activation_scale)
            target.input_quantizer.amax = torch.tensor(amax).to(weight)
    return module


def restorable(assignment: Mapping[str, LayerAssignment]) -> bool:
    """Whether ModelOpt alone can hold all of it: hooks, processors and formats of ours would be lost in its file."""
    return all(
        all(FORMATS[name].modelopt_num_bits is not None for name in (layer.format, layer.activation_format) if name)
        and layer.low_rank is None
        and layer.attention_amax is None
        for layer in assignment.values()
    )


def save_quantized(module: nn.Module, path: Path) -> None:
    """ModelOpt's own checkpoint format; torch would put the name of a path that it is given into the file."""
    import modelopt.torch.opt as mto

    with atomic_path(path) as temporary, temporary.open("wb") as file:
        mto.save(module, file)
