"""The network that a candidate's consumer computes, in torch and fp32: its weights, and its layers' inputs."""

from torch import Tensor, nn

from sd_quant.candidates.candidate import Candidate, Inputs, needed
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
    of_layers = {name: layer.inputs for name, layer in candidate.layers.items() if layer.inputs is not None}
    for name, inputs in {**of_layers, **candidate.rounded}.items():
        network.get_submodule(name).register_forward_pre_hook(before(inputs))
    return part


def before(inputs: Inputs):
    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs(arguments[0]), *arguments[1:])

    return hook
