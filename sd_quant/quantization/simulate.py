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
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS, fake_quantize, fp8, int8
from sd_quant.quantization.formats.int8 import per_channel

BACKEND = "sd_quant"
NATIVE = {"int8": (8, int8.QMAX), "fp8": ((4, 3), fp8.QMAX)}  # what ModelOpt computes anywhere: num_bits, largest code


def attributes(form: str, axis: int | None) -> dict:
    """ModelOpt's of one quantizer."""
    if form in NATIVE:
        return {"num_bits": NATIVE[form][0], "axis": axis}
    return {"num_bits": 8, "axis": None, "backend": BACKEND, "backend_extra_args": {"format": form}}


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
    form = FORMATS[quantizer.backend_extra_args["format"]]
    flat = x.flatten(1) if x.ndim == 4 else x
    return fake_quantize(form, flat, quantizer.amax.float()).view(x.shape).to(x)


def add_low_rank(up: Tensor, down: Tensor) -> Callable[[nn.Module, tuple, Tensor], Tensor]:
    def hook(layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        x = inputs[0]
        if layer.input_quantizer.pre_quant_scale is not None:
            x = x * layer.input_quantizer.pre_quant_scale
        return output + (x @ down.T.to(x)) @ up.T.to(x)

    return hook


@torch.no_grad()
def rewrite(module: nn.Module, assignment: Mapping[str, LayerAssignment]) -> None:
    """In place: weights and norms with smoothing in them, not yet rounded, and attention with quantized products."""
    for layer in assignment.values():
        target = module.get_submodule(layer.name)
        if layer.role != "attention":
            for parameter in target.parameters(recurse=False):
                parameter.copy_(rewritten(parameter, layer))
        elif layer.activation_format is not None:
            target.set_processor(QuantizedAttention(layer))


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
            amax = layer.weight_amax
            if layer.format in NATIVE:
                amax = layer.weight_scale * NATIVE[layer.format][1]
            target.weight_quantizer.amax = (per_channel(amax, weight) if layer.weight_axis == 0 else amax[0]).to(weight)
        if layer.activation_format is not None:
            peak = layer.activation_amax
            if layer.activation_format in NATIVE:
                peak = layer.activation_scale * NATIVE[layer.activation_format][1]
            target.input_quantizer.amax = torch.tensor(peak).to(weight)
    return module


class QuantizedAttention:
    """A processor of diffusers' attention whose two matrix products take quantized numbers.

    What a softmax returns lies in 0..1, so its range is 1 without calibration. (ModelOpt gives it the scale 1, which in
    E4M3 turns what is below 2^-10 into zero: half of everything from about 1000 tokens on.)
    """

    def __init__(self, layer: LayerAssignment):
        """Scales are numbers of Python's: nothing waits for a GPU in a call, and a graph of CUDA can record it."""
        self.form = FORMATS[layer.activation_format]
        self.scales = [self.form.scales(torch.empty(0), torch.tensor(amax))[0].item() for amax in layer.attention_amax]
        self.scales.append(self.form.scales(torch.empty(0), torch.tensor(1.0))[0].item())

    def __call__(self, attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_) -> Tensor:
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        found = attention.to_q(hidden_states), attention.to_k(text), attention.to_v(text)
        query, key, value = (attention.head_to_batch_dim(part) for part in found)
        root = query.shape[-1] ** -0.25

        def near(x: Tensor, number: float) -> Tensor:
            scale = torch.full((), number, device=x.device)
            return self.form.dequantize(self.form.quantize(x, scale), scale).to(x)

        of_query, of_key, of_value, of_softmax = self.scales
        scores = near(query * root, of_query) @ near(key * root, of_key).transpose(1, 2)
        mixed = near(scores.softmax(-1), of_softmax) @ near(value, of_value)
        return attention.to_out[1](attention.to_out[0](attention.batch_to_head_dim(mixed)))


def restorable(assignment: Mapping[str, LayerAssignment]) -> bool:
    """Whether ModelOpt alone can hold all of it: hooks, processors and formats of ours would be lost in its file."""
    return all(
        {layer.format, layer.activation_format} <= {None, *NATIVE}
        and layer.low_rank is None
        and layer.attention_amax is None
        for layer in assignment.values()
    )


def save_quantized(module: nn.Module, path: Path) -> None:
    """ModelOpt's own checkpoint format; torch would put the name of a path that it is given into the file."""
    import modelopt.torch.opt as mto

    with atomic_path(path) as temporary, temporary.open("wb") as file:
        mto.save(module, file)
