"""Simulate layer assignments in torch (fake quantization) with NVIDIA ModelOpt's quantizers and our scales.

ModelOpt computes INT8 and FP8. Its 4-bit formats require CUDA, so for other formats its quantizers call our arithmetic
as a backend. An input's shift is the quantizer's bias, a low-rank branch a forward hook, quantized attention an
attention processor. Without hooks, processors and backend the result is an ordinary ModelOpt model for ``mto.save``.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.files import atomic_path
from sd_quant.quantization.assignment import LayerAssignment, rounded_by
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.formats.blocks import per_channel
from sd_quant.quantization.rotation import rotated
from sd_quant.simulation.rewrite import rewrite

BACKEND = "sd_quant"
ROUNDED = "rounded_"  # prefix of the buffers with a weight's codes and scales, if they have been chosen


@dataclass(frozen=True, slots=True)
class LayerQuantizer:
    """What one quantizer of a layer computes, apart from smoothing: format, rotation, scaling per token."""

    format: str
    rotation: int = 0
    per_token: bool = False

    @property
    def modelopts(self) -> bool:
        """Whether ModelOpt's own code computes this quantization, instead of our backend."""
        return FORMATS[self.format].modelopt_num_bits is not None and not self.rotation and not self.per_token

    def config(self, axis: int | None) -> dict:
        """Return ModelOpt's configuration of the quantizer: one range for each index of ``axis``; None: one in all."""
        if self.modelopts:
            return {"num_bits": FORMATS[self.format].modelopt_num_bits, "axis": axis}
        return {"num_bits": 8, "axis": axis, "backend": BACKEND, "backend_extra_args": asdict(self)}

    def amax(self, amax, scale):
        """Return the amax with which ModelOpt computes our ``scale``; for our own backend, ``amax`` unchanged."""
        return scale * FORMATS[self.format].largest_code if self.modelopts else amax


def quantizers(layer: LayerAssignment) -> dict[str, LayerQuantizer]:
    """Return the quantizers of a layer by attribute name in ModelOpt's modules: weight_quantizer, input_quantizer."""
    made = {}
    if layer.format is not None:
        made["weight_quantizer"] = LayerQuantizer(layer.format, layer.rotation)
    if layer.activation_format is not None and layer.role != "attention":
        made["input_quantizer"] = LayerQuantizer(layer.activation_format, layer.rotation, layer.per_token)
    return made


def quantizer_configs(layer: LayerAssignment) -> dict[str, dict]:
    """Return ModelOpt's configuration of each quantizer of a layer, by attribute name as in ``quantizers``."""
    configs = {}
    for name, quantizer in quantizers(layer).items():
        configs[name] = quantizer.config(layer.weight_axis if name == "weight_quantizer" else None)
        if layer.activation_zero_point and name == "input_quantizer":
            configs[name]["bias"] = {0: None, "type": "static"}  # its value is set later; the axis is not used
    return configs


def fake_quantize_by_backend(x: Tensor, quantizer) -> Tensor:
    """Act as ModelOpt's backend: fake-quantize ``x`` along its last axis, a convolution's weight along [C, KH, KW]."""
    how = LayerQuantizer(**quantizer.backend_extra_args)
    rounded = [buffer for name, buffer in quantizer.named_buffers(recurse=False) if name.startswith(ROUNDED)]
    if rounded:
        return rotated(FORMATS[how.format].dequantize(*rounded), how.rotation).view(x.shape).to(x)
    flat = x.flatten(1) if x.ndim == 4 else x
    amax = quantizer.amax.float()
    amax = amax.flatten(1) if amax.ndim == 4 else amax
    return rounded_by(how.format, flat, amax, how.per_token, how.rotation).view(x.shape).to(x)


def low_rank_hook(up: Tensor, down: Tensor) -> Callable[[nn.Module, tuple, Tensor], Tensor]:
    """Return a forward hook that adds ``(x @ down^T) @ up^T`` to a linear's output, for the smoothed input ``x``."""

    def hook(layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        x = inputs[0]
        if layer.input_quantizer.pre_quant_scale is not None:
            x = x * layer.input_quantizer.pre_quant_scale
        return output + (x @ down.T.to(x)) @ up.T.to(x)

    return hook


@torch.no_grad()
def simulate(module: nn.Module, assignment: Mapping[str, LayerAssignment]) -> nn.Module:
    """Insert ModelOpt's quantizers into ``module``, in place, and return ``module``.

    Weights are replaced by smoothed ones; the quantizers round them in every call. On the meta device only quantizers
    have values. Each quantizer is configured directly, because ModelOpt matches each rule with all modules' names.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints how many it inserted
        warnings.filterwarnings("ignore", "transformers .* is not tested")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.quantization.config import QuantizerAttributeConfig
        from modelopt.torch.quantization.extensions import get_cuda_ext, get_cuda_ext_fp8
        from modelopt.torch.quantization.nn import is_registered_quant_backend, register_quant_backend

        if not is_registered_quant_backend(BACKEND):
            register_quant_backend(BACKEND, fake_quantize_by_backend)
        # On a GPU ModelOpt would compile kernels for minutes. Without them it computes in torch, as on a CPU.
        get_cuda_ext.extension = get_cuda_ext_fp8.extension = None
        module = mtq.quantize(module, {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": None})
    rewrite(module, assignment)
    for layer in (layer for layer in assignment.values() if layer.role != "attention"):
        target, made = module.get_submodule(layer.name), quantizers(layer)
        weight = target.get_parameter("weight")
        for name, config in quantizer_configs(layer).items():
            target.get_submodule(name).set_from_attribute_config(QuantizerAttributeConfig(**config, enable=True))
        if layer.multiplies:
            target.input_quantizer._enable_pre_quant_scale = True
            target.input_quantizer.pre_quant_scale = like(layer.pre_quant_scale.half(), weight)  # as in the graph
        if layer.low_rank is not None:
            target.register_forward_hook(low_rank_hook(*layer.low_rank))
        if layer.format is not None:
            amax = made["weight_quantizer"].amax(layer.weight_amax, layer.weight_scale)
            if layer.rounded is not None:
                for index, part in enumerate(layer.rounded):
                    target.weight_quantizer.register_buffer(f"{ROUNDED}{index}", part)
            amax = per_channel(amax, weight) if layer.weight_axis == 0 else amax[0]
            target.weight_quantizer.amax = like(amax, weight)
            if layer.weight_axis == 0 and not FORMATS[layer.format].equal_levels and not weight.is_meta:
                weight.copy_(without_ties(weight, layer.rounded_weight(weight).to(weight), target.weight_quantizer))
        if layer.activation_format is not None:
            amax = made["input_quantizer"].amax(layer.activation_amax, layer.activation_scale)
            target.input_quantizer.amax = like(torch.tensor(amax), weight)
            if layer.activation_zero_point:
                target.input_quantizer.bias_value = like(torch.tensor(layer.shift), weight)
    return module


def without_ties(weight: Tensor, rounded: Tensor, quantizer) -> Tensor:
    """Return ``weight`` with values from ``rounded`` wherever ModelOpt's ``quantizer`` rounds to another value.

    ModelOpt multiplies by the reciprocal of a scale, so a weight half-way between two quantized values may be rounded
    the other way: an error of an eighth in FP8, as large as one by a wrong scale in a channel with few large weights.
    """
    other = (quantizer(weight) - rounded).abs() > rounded.abs() / 64  # less than a step, and more than fp32's rounding
    return torch.where(other, rounded, weight)


def like(number: Tensor, weight: Tensor) -> Tensor:
    """Convert ``number`` to the dtype of ``weight``, and move it to the same device except to the meta device."""
    return number.to(weight.dtype) if weight.is_meta else number.to(weight)


@contextmanager
def unrounded(quantizer) -> Iterator[None]:
    """Disable rounding of ``quantizer`` in the ``with`` block; smoothing (``pre_quant_scale``) stays on."""
    enabled = quantizer.is_enabled
    quantizer.disable()
    try:
        yield
    finally:
        if enabled:
            quantizer.enable()


def between_roundings(layer: nn.Module, x: Tensor) -> Tensor:
    """Move an input ``x`` of a simulated layer half-way to its dequantized value, so that small errors (of fp16) do not
    change its quantized value."""
    quantizer = layer.input_quantizer
    if not quantizer.is_enabled:
        return x
    rounded = quantizer(x)
    with unrounded(quantizer):
        smoothed = quantizer(x)
    factor = 1 if quantizer.pre_quant_scale is None else quantizer.pre_quant_scale
    return x + (rounded - smoothed) / (2 * factor)


def restorable(assignment: Mapping[str, LayerAssignment]) -> bool:
    """Return whether ModelOpt's checkpoint can store the assignment: it needs no hook, processor or backend of ours."""
    return all(
        all(quantizer.modelopts for quantizer in quantizers(layer).values())
        and layer.low_rank is None
        and layer.attention_amax is None
        for layer in assignment.values()
    )


def save_quantized(module: nn.Module, path: Path) -> None:
    """Write ``module`` as a ModelOpt checkpoint (``mto.save``), atomically."""
    import modelopt.torch.opt as mto

    # an open file, because torch writes the name of a path that it is given into the checkpoint
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        mto.save(module, file)
