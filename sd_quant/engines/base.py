"""What every engine is: a callable from named tensors to named tensors.

The road not taken is a base class with buffers to allocate, bind and copy, as NeMo's and demoDiffusion's engines have:
their outputs lie in the engine's memory, where a second call overwrites them. Here outputs own their memory.
"""

import math
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
    """A loaded network."""

    name: str  # that of its runtime in sd_quant.engines.RUNTIMES
    inputs: dict[str, torch.dtype]  # names of the inputs in their order, and the dtypes to which they are cast
    device: torch.device  # where it computes and leaves its outputs; inputs that are there already are not copied

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs for ``inputs`` from any device and of any dtype; the outputs are on the engine's own device.

        Raises ValueError for missing or unknown names and for shapes that the graph, or the profile of a plan, does
        not take.
        """
        ...

    def close(self) -> None:
        """Free the engine's memory; it cannot be called afterwards."""
        ...


def cast_inputs(
    expected: dict[str, torch.dtype], given: dict[str, torch.Tensor], device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """The tensors in the expected order and dtype, contiguous on ``device``.

    Raises ValueError unless the names agree.
    """
    if expected.keys() != given.keys():
        raise ValueError(f"the engine takes inputs {sorted(expected)} but was given {sorted(given)}")
    return {name: given[name].detach().to(device, dtype).contiguous() for name, dtype in expected.items()}


def onnx_files(path: Path) -> list[Path]:
    """The ONNX file and the files that hold its weights.

    Raises ArtifactError unless ``path`` is a graph whose files are all present and inside its folder. Runtimes are
    lenient, so this is called before any of them reads the file: TensorRT's parser takes the text "hello" for a network
    with no layers.
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
    tensors = list(_tensors(model.graph))
    locations = {_location(tensor) for tensor in tensors if uses_external_data(tensor)}
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
    for tensor in tensors:
        if not _is_whole(tensor, folder):
            raise ArtifactError(
                f"{path} claims more numbers for {ascii(tensor.name):.200} than it holds; export it again"
            )
    return [path, *(path.parent / location for location in sorted(locations))]


def _is_whole(tensor: onnx.TensorProto, folder: Path) -> bool:
    """Whether as many bytes are stored as its dimensions claim, which a runtime may allocate before it looks."""
    numbers = math.prod(tensor.dims)
    if any(side < 0 for side in tensor.dims):
        return False
    if not uses_external_data(tensor):  # in fields of small numbers, four bits may be all of one
        return numbers <= 2 * tensor.ByteSize()
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        least = -(-numbers * _bits(tensor.data_type) // 8)
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", least))
    except (KeyError, TypeError, ValueError):
        return False
    return offset >= 0 and least <= length <= (folder / _location(tensor)).stat().st_size - offset


def _bits(data_type: int) -> int:
    """Of one number as it is stored. Raises KeyError for a type that onnx does not know."""
    halves: tuple[int, ...] = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.FLOAT4E2M1)
    return 4 if data_type in halves else 8 * onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize


def _location(tensor: onnx.TensorProto) -> str:
    """The file that holds the tensor's data, the last where several are given, as onnx reads it.

    onnx's own ExternalDataInfo warns and raises for damaged entries.
    """
    return os.fsdecode({entry.key: entry.value for entry in tensor.external_data}.get("location", ""))


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """All tensors of a graph: initializers and attributes, of subgraphs too."""
    yield from graph.initializer
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)
        for subgraph in (attribute.g, *attribute.graphs):
            yield from _tensors(subgraph)
