"""A denoiser quantized by another tool or by a run here: dequantized weights, input rounding and the network.

A text encoder or VAE may take the denoiser's place, see ``models.checkpoint.OtherNetwork``. Layers have diffusers'
names; those of a text encoder have transformers' names.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from sd_quant.errors import ArtifactError
from sd_quant.files.checks import problems_in
from sd_quant.files.tensors import Readable
from sd_quant.interchange.inputs import Inputs, smoothed
from sd_quant.models.checkpoint import Checkpoint, InPlace, denoiser_of, denoiser_part, empty_call, empty_denoiser
from sd_quant.names.diffusers import TIED

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # dtypes of what is not quantized


@dataclass(frozen=True)
class QuantizedLayer:
    """A linear or convolution with a quantized weight."""

    format: str  # the weight's format, in the tool's terms: Q4_K, float8_e4m3fn, nf4
    scales: str  # how many numbers share one: "1 for 32 numbers", "1 for a row", "1 for all"
    stored_bytes: int  # all that is stored for the weight: codes, scales, a low-rank branch
    weight: Readable  # the floating-point weight that is multiplied, in diffusers' shape, with the branch added
    inputs: Inputs | None = None  # None: inputs stay as they are
    # up [out, rank] and down [rank, in]; part of ``weight``, but multiplied with smoothed inputs that are not rounded
    branch: tuple[Readable, Readable] | None = None

    @property
    def bits(self) -> float:
        """Stored bits per weight, with scales and a low-rank branch."""
        return 8 * self.stored_bytes / prod(self.weight.shape)


@dataclass(frozen=True)
class QuantizedDenoiser:
    """A denoiser with quantized layers; weights are read on demand."""

    path: Path  # the file or folder that was read, or the checkpoint of an assignment
    format: str  # a name of ``interchange.FORMATS``
    maker: str  # the tool with its version, as far as the file says, for people: "GGUF 3", "SDNQ 0.2.8"
    layers: Mapping[str, QuantizedLayer]
    parameters: Mapping[str, Readable] = field(repr=False)  # all others
    stored_bytes: int = 0  # of all parameters, quantized weights included
    marks: tuple[str, ...] = ()  # tensors that say how it samples, see ``sampling``
    # rounding of inputs of modules other than quantized layers, such as norms
    rounded: Mapping[str, Inputs] = field(default_factory=dict, repr=False)
    # Opens the network with the tool's own library; None if it is not installed or cannot compute on a CPU.
    # May raise anything.
    runtime: Callable[[], nn.Module] | None = field(default=None, repr=False)

    @property
    def bits(self) -> float:
        """Stored bits per weight, averaged over all parameters."""
        count = sum(prod(layer.weight.shape) for layer in self.layers.values())
        count += sum(prod(each.shape) for each in self.parameters.values())
        return 8 * self.stored_bytes / count


def checked_whole(
    denoiser: QuantizedDenoiser, checkpoint: Checkpoint, unknown: Collection[str] = ()
) -> QuantizedDenoiser:
    """Return ``denoiser``. Raises ArtifactError unless its tensors are exactly those of the denoiser of ``checkpoint``.

    ``unknown`` are further names in the denoiser's file that its reader does not understand.
    """
    expected = {name: tuple(each.shape) for name, each in needed(empty_denoiser(checkpoint)).items()}
    found: dict[str, Readable] = {f"{name}.weight": layer.weight for name, layer in denoiser.layers.items()}
    found |= denoiser.parameters
    problems = {
        "missing": [name for name in expected if name not in found],
        "unknown": [*unknown, *(name for name in found if name not in expected)],
        "of another shape": [
            f"{name} {list(found[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in found and tuple(found[name].shape) != shape
        ],
        "in no floating point": [
            f"{name} {each.dtype}" for name, each in found.items() if name in expected and each.dtype not in FLOATS
        ],
    }
    if told := problems_in(problems):
        part = checkpoint.part if isinstance(checkpoint, InPlace) else "denoiser"
        raise ArtifactError(
            f"{denoiser.path} ({denoiser.maker}) does not hold the {part} of the full-precision "
            f"model, {len(expected)} tensors ({told}); give a quantization of that very model"
        )
    return denoiser


def needed(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's state dict, with a tied tensor only under the name that it has in files."""
    return {name: tensor for name, tensor in network.state_dict().items() if name not in TIED}


def with_denoiser(part: nn.Module, checkpoint: Checkpoint, denoiser: QuantizedDenoiser) -> nn.Module:
    """Change ``part``, the wrapped denoiser of ``checkpoint``, in place to compute ``denoiser`` in fp32.

    Returns ``part``. One quantized weight is read at a time.
    """
    network = denoiser_of(checkpoint, part)
    for name, tensor in needed(network).items():
        layer = denoiser.layers.get(name.removesuffix(".weight"))
        source = denoiser.parameters[name] if layer is None else layer.weight
        tensor.copy_(source.read())
    modules = dict(network.named_modules())  # of a decoder without the encoder
    for name, layer in denoiser.layers.items():
        if layer.inputs is not None and name in modules:
            quantize_inputs(modules[name], layer.inputs, layer.branch)
    for name, inputs in denoiser.rounded.items():
        quantize_inputs(modules[name], inputs, None)
    return part


def quantize_inputs(
    layer: nn.Module, inputs: Inputs, branch: tuple[Readable, Readable] | None
) -> list[RemovableHandle]:
    """Register hooks on ``layer`` that round its inputs by ``inputs``, and return the hooks' handles.

    The weight includes the low-rank ``branch``; as its inputs are not rounded, up @ down @ (rounding error) is added.
    """
    up, down = (None, None) if branch is None else (each.read().float() for each in branch)
    taken: list[Tensor] = []

    def before(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs(arguments[0])
        if branch is not None:
            taken.append(smoothed(inputs, arguments[0]) - x)
        return (x, *arguments[1:])

    def after(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + linear(linear(taken.pop(), down.to(output)), up.to(output))

    handles = [layer.register_forward_pre_hook(before)]
    return handles if branch is None else [*handles, layer.register_forward_hook(after)]


def input_ranks(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the number of axes of each linear's input, from a run on the meta device that reads no weight."""
    from sd_quant.export.tracing import example_shapes

    contract = denoiser_part(checkpoint).contract
    module, inputs = empty_call(checkpoint, checkpoint.family.DENOISER, example_shapes(contract))
    ranks: dict[str, int] = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda layer, inputs: ranks.update({name: inputs[0].ndim})

    for name, layer in denoiser_of(checkpoint, module).named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(remember(name))
    with torch.device("meta"), torch.no_grad():
        module(**inputs)
    return ranks
