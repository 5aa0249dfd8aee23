"""A graph written to its file, with its weights in that file or in one beside it."""

from pathlib import Path

import onnx_ir as ir

from sd_quant.files import atomic_path, temporary_folder

# A single file is put together in memory, several times over; beyond this the weights go to a file beside the graph.
LARGEST_SINGLE_FILE = 2**28


def save(model: ir.Model, path: Path) -> None:
    """Write ``model`` to ``path``, with large weights in ``<path>.data``. The graph's file is there only when both are.

    Both are written in a temporary folder under their own names, because a graph holds the name of its data file.
    Raises what reading a weight raises.
    """
    external = sum(value.const_value.nbytes for value in model.graph.initializers.values()) > LARGEST_SINGLE_FILE
    data = path.with_name(path.name + ".data")
    with atomic_path(path) as graph, temporary_folder(path.parent) as folder:
        staged = Path(folder)
        try:
            ir.save(model, staged / path.name, external_data=data.name if external else None)
        except ir.serde.SerdeError as error:
            raise root_cause(error) from error
        if external:
            with atomic_path(data) as weights:
                (staged / data.name).replace(weights)
        (staged / path.name).replace(graph)


def root_cause(error: BaseException) -> BaseException:
    """What went wrong while a weight was read; the serializer wraps it in errors of its own."""
    return error if error.__cause__ is None else root_cause(error.__cause__)
