"""Check, before a runtime reads an ONNX file, that it is complete and that its weights are in its own folder.

Alternative not taken: ``onnx.checker``, which does not read external weights and takes seconds for a large graph.
"""

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import uses_external_data

from sd_quant.errors import ArtifactError
from sd_quant.files import check_downloaded, read_regular
from sd_quant.text import one_line

HALVES = {onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.FLOAT4E2M1}  # of a byte
FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}


def onnx_files(path: Path) -> list[Path]:
    """Return the ONNX file and the files of its external weights, after checking them.

    Raises ArtifactError for a file that is no ONNX graph, and for weights that are missing, truncated or in another
    folder. Runtimes check less: TensorRT's parser reads the text "hello" as a network without layers.
    """
    model = _model(path)
    if not model.graph.output:
        raise ArtifactError(f"{path} is empty or holds a graph with no outputs; export it again")
    folder = path.resolve().parent
    tensors = list(_tensors(model.graph))
    locations = sorted({_location(tensor) for tensor in tensors if uses_external_data(tensor)})
    for location in locations:
        shown = f"{ascii(location):.200}"  # untrusted text
        try:
            target = (folder / location).resolve()
            inside, there = target.is_relative_to(folder), target.is_file()
        except (OSError, ValueError):  # a name too long for any file, or with a null character
            inside, there = True, False
        if not inside:
            raise ArtifactError(f"{path} takes weights from {shown}, outside its own folder; export it again")
        if not there:
            raise ArtifactError(f"{path} takes weights from {shown}, which is not beside it; copy both files")
        check_downloaded(target)
    for tensor in tensors:
        if not _is_whole(tensor, folder):
            name = f"{ascii(tensor.name):.200}"
            raise ArtifactError(f"{path} claims more numbers for {name} than it holds; export it again")
    return [path, *(path.parent / location for location in locations)]


def structure_of(path: Path) -> str:
    """Return a digest of an ONNX graph without its weights; a runtime takes equal time for files with equal digests.

    Integer tensors of at most one axis are included, because runtimes choose other kernels for nonzero zero points.
    Raises ArtifactError for a file that is not ONNX.
    """
    model = _model(path)
    del model.metadata_props[:]
    for tensor in _tensors(model.graph):
        if len(tensor.dims) > 1 or tensor.data_type in FLOATS:
            tensor.CopyFrom(onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type))
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def _model(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load_model_from_string(read_regular(path, math.inf))
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}); give the command that made it again") from error
    except DecodeError as error:
        raise ArtifactError(f"{path} is not an ONNX file ({one_line(error)}); export it again") from error


def _is_whole(tensor: onnx.TensorProto, folder: Path) -> bool:
    """Return whether the file has as many bytes for ``tensor`` as its shape requires; runtimes may not check this."""
    numbers = math.prod(tensor.dims)
    if any(side < 0 for side in tensor.dims):
        return False
    if not uses_external_data(tensor):  # a number may take as little as four bits
        return numbers <= 2 * tensor.ByteSize()
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        stored = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize  # raises KeyError for an unknown type
        least = -(-numbers * (4 if tensor.data_type in HALVES else 8 * stored) // 8)
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", least))
    except (KeyError, TypeError, ValueError):
        return False
    return offset >= 0 and least <= length <= (folder / _location(tensor)).stat().st_size - offset


def _location(tensor: onnx.TensorProto) -> str:
    """Return the file name of a tensor's external data, or "" without one; of repeated entries the last counts."""
    return os.fsdecode({entry.key: entry.value for entry in tensor.external_data}.get("location", ""))


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a graph and its subgraphs: initializers and attributes."""
    yield from graph.initializer
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)
        for subgraph in (attribute.g, *attribute.graphs):
            yield from _tensors(subgraph)
