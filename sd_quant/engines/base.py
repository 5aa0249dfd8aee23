"""What every engine is: a callable from named tensors to named tensors.

The road not taken is a base class with buffers to allocate, bind and copy (NeMo's and demoDiffusion's engines): who
calls those holds live engine memory, and the second call overwrites the first answer. Here outputs own their memory.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import onnx
import torch
from google.protobuf.message import DecodeError
from onnx.external_data_helper import uses_external_data

from sd_quant.devices import CPU
from sd_quant.errors import ArtifactError
from sd_quant.text import one_line


class Engine(Protocol):
    """A loaded network. Shapes are the graph's own; a batch outside the profile of a plan is a ValueError."""

    name: str  # the key in sd_quant.engines.ENGINES
    inputs: dict[str, torch.dtype]
    device: torch.device  # where it computes and leaves its outputs; what is there already is taken without a copy

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs from any device and of any dtype, cast to the declared one; outputs on the engine's own device.

        Raises ValueError for missing or unknown names and for shapes that the graph does not take.
        """
        ...

    def close(self) -> None:
        """Give the memory back; the engine cannot be called afterwards."""
        ...


def cast_inputs(
    expected: dict[str, torch.dtype], given: dict[str, torch.Tensor], device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """The tensors in the expected order and dtype, contiguous on ``device``. ValueError unless the names agree."""
    if expected.keys() != given.keys():
        raise ValueError(f"the engine takes inputs {sorted(expected)} but was given {sorted(given)}")
    return {name: given[name].detach().to(device, dtype).contiguous() for name, dtype in expected.items()}


def onnx_files(path: Path) -> list[Path]:
    """The ONNX file and the files that hold its weights, all of them present and inside its folder.

    Read before any runtime sees the file, because runtimes are lenient: TensorRT's parser takes the text "hello" for a
    network with no layers. Raises ArtifactError.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}); export it with: python quantize.py") from error
    except DecodeError as error:
        raise ArtifactError(f"{path} is not an ONNX file ({one_line(error)}); export it again") from error
    if not model.graph.output:
        raise ArtifactError(f"{path} holds a graph with no outputs; export it again")
    folder = path.resolve().parent
    locations = {_location(tensor) for tensor in _tensors(model.graph) if uses_external_data(tensor)}
    for location in sorted(locations):
        shown = f"{ascii(location):.200}"  # it comes from the file
        try:
            target = (folder / location).resolve()
            inside, there = target.is_relative_to(folder), target.is_file()
        except (OSError, ValueError):  # a name too long for any file, or with a null character
            inside, there = True, False
        if not inside:
            raise ArtifactError(f"{path} takes weights from {shown}, outside its own folder; export it again")
        if not there:
            raise ArtifactError(f"{path} takes weights from {shown}, which is not beside it; copy both files")
    return [path, *(path.parent / location for location in sorted(locations))]


def _location(tensor: onnx.TensorProto) -> str:
    """The last one that is given counts, as for onnx, whose ExternalDataInfo warns and raises where it is damaged."""
    return os.fsdecode({entry.key: entry.value for entry in tensor.external_data}.get("location", ""))


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for subgraph in (attribute.g, *attribute.graphs):
            yield from _tensors(subgraph)
