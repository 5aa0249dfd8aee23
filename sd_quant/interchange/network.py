"""The network that a candidate's consumer computes, in torch and fp32: its weights, and its layers' inputs."""

from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from sd_quant.files.tensors import Readable
from sd_quant.interchange.candidate import Candidate, Inputs, needed
from sd_quant.models.checkpoint import Checkpoint, denoiser_of


def with_candidate(part: nn.Module, checkpoint: Checkpoint, candidate: Candidate) -> nn.Module:
    """``part``, the wrapped denoiser of ``checkpoint`` with weights, becomes the candidate's in place.

    One of the candidate's weights is read at a time.
    """
    network = denoiser_of(checkpoint, part)
    for name, tensor in needed(network).items():
        layer = candidate.layers.get(name.removesuffix(".weight"))
        source = candidate.parameters[name] if layer is None else layer.weight
        tensor.copy_(source.read())
    for name, layer in candidate.layers.items():
        if layer.inputs is not None:
            quantize_inputs(network.get_submodule(name), layer.inputs, layer.branch)
    for name, inputs in candidate.rounded.items():
        quantize_inputs(network.get_submodule(name), inputs, None)
    return part


def quantize_inputs(
    layer: nn.Module, inputs: Inputs, branch: tuple[Readable, Readable] | None
) -> list[RemovableHandle]:
    """``layer`` multiplies what ``inputs`` make of its input; a ``branch`` gets back what they take from it.

    Returns the handles that undo it.
    """
    up, down = (None, None) if branch is None else (each.read().float() for each in branch)
    taken: list[Tensor] = []

    def before(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs(arguments[0])
        if branch is not None:
            taken.append(arguments[0] - x)
        return (x, *arguments[1:])

    def after(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + linear(linear(taken.pop(), down.to(output)), up.to(output))

    handles = [layer.register_forward_pre_hook(before)]
    return handles if branch is None else [*handles, layer.register_forward_hook(after)]
