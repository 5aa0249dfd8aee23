"""Write a graph to its file, with its weights in that file or in one beside it."""

from pathlib import Path

import onnx_ir as ir

from sd_quant.files import atomic_path, temporary_folder

LARGEST_SINGLE_FILE = 2**28  # bytes of weights; a single file is assembled in memory, in several copies


def save(model: ir.Model, path: Path, beside: Path | None = None) -> None:
    """Write ``model`` to ``path``, with large weights in ``<path>.data``. The graph appears last.

    Weights that the graph ``beside`` it has in its own data file are read from there. Both files are written in a
    temporary folder under their own names, because a graph holds the name of its data file.
    Raises what reading a weight raises.
    """
    if beside is not None:
        share_weights(model.graph, ir.load(beside).graph)
    own = [
        each
        for value in model.graph.initializers.values()
        if not isinstance(each := value.const_value, ir.ExternalTensor)
    ]
    external = sum(tensor.nbytes for tensor in own) > LARGEST_SINGLE_FILE
    data = path.with_name(path.name + ".data")
    with atomic_path(path) as graph, temporary_folder(path.parent) as folder:
        staged = Path(folder)
        try:
            ir.save(model, staged / path.name, external_data=data.name if external else None)
        except ir.serde.SerdeError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # the serializer wraps what reading a weight raises
                cause = cause.__cause__
            raise cause from error
        if external:
            with atomic_path(data) as weights:
                (staged / data.name).replace(weights)
        (staged / path.name).replace(graph)


def share_weights(graph: ir.Graph, other: ir.Graph) -> None:
    """Let ``graph`` refer to the data file of ``other`` for each weight that has the same name and bytes there."""
    for name, value in graph.initializers.items():
        theirs = other.initializers.get(name)
        stored = None if theirs is None else theirs.const_value
        if not isinstance(stored, ir.ExternalTensor) or (stored.dtype, stored.shape) != (value.dtype, value.shape):
            continue
        if value.const_value.tobytes() == stored.tobytes():
            value.const_value = stored
