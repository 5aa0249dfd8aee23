"""A pipeline's folder whose denoiser diffusers restores with ModelOpt's quantizers in it.

ModelOpt's checkpointing for Hugging Face reads ``modelopt_state.pth`` beside the weights, inserts the quantizers that
it describes, and loads their ranges with the weights: they are buffers of the state dict. A weight is stored as what
its codes stand for, in fp16, of which the quantizer makes the same codes. No ``quantization_config`` is written:
diffusers 0.42 passes ModelOpt 0.47 an empty one, which it cannot read.
"""

from pathlib import Path

import torch
from torch import Tensor

from sd_quant.files import atomic_path
from sd_quant.files.safetensors import write_safetensors
from sd_quant.files.tensors import LazyTensor, Readable, lazy
from sd_quant.interchange.weights import Assignment, high_precision, quantized
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser
from sd_quant.progress import progress
from sd_quant.quantization.assignment import LayerAssignment, rewritten
from sd_quant.quantization.formats import FORMATS
from sd_quant.simulation.modelopt import simulate

WEIGHTS, STATE = "diffusion_pytorch_model.safetensors", "modelopt_state.pth"


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> None:
    """Write the denoiser into its folder in ``folder``, a pipeline's; one weight is in memory at a time.

    Raises ResourceError when the disk is full.
    """
    import modelopt.torch.opt as mto

    component = denoiser_part(checkpoint).component
    network = simulate(empty_denoiser(checkpoint), assignment)
    parameters = checkpoint.components[component].parameters
    tensors: dict[str, Readable] = dict(high_precision(checkpoint, assignment))
    for layer in quantized(assignment).values():
        name = f"{layer.name}.weight"
        tensors[name] = of_codes(parameters[name], layer)
    buffers = {name: buffer for name, buffer in network.state_dict().items() if name not in tensors}
    tensors |= {name: lazy(buffer.half()) for name, buffer in buffers.items()}
    with progress(len(tensors), f"write {component}") as advance:
        write_safetensors(folder / component / WEIGHTS, tensors, advance)
    with atomic_path(folder / component / STATE) as temporary:
        torch.save(mto.modelopt_state(network), temporary)


def of_codes(source: Readable, layer: LayerAssignment) -> LazyTensor:
    """A quantized weight as the numbers that its codes stand for, in fp16."""

    def read() -> Tensor:
        weight = rewritten(source.read(), layer)
        codes, scales = layer.codes_and_scales(weight)
        return FORMATS[layer.format].dequantize(codes, *scales).half()

    return LazyTensor(tuple(source.shape), torch.float16, read)
