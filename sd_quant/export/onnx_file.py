"""Write an ONNX graph to a file, with its weights in the same file or in a ``.data`` file in the same folder."""

from pathlib import Path

import onnx_ir as ir

from sd_quant.files import atomic_path, temporary_folder

LARGEST_SINGLE_FILE = 2**28  # bytes of weights; a single file is assembled in memory, in several copies


def save(model: ir.Model, path: Path) -> None:
    """Write ``model`` to ``path``, with large weights in ``<path>.data``. The graph file appears last.

    Both files are first written to a temporary folder under their final names, because a graph names its data file.
    Exceptions raised while reading a weight are passed on unwrapped.
    """
    external = sum(value.const_value.nbytes for value in model.graph.initializers.values()) > LARGEST_SINGLE_FILE
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


def share_weights(path: Path, beside: Path) -> None:
    """Drop weights of the graph at ``path`` that the graph ``beside`` has, too, and refer to the latter's data file.

    ``path`` must then move to that folder. It is unchanged if the weights that differ are too large for one file.
    """
    model, others = ir.load(path), ir.load(beside).graph.initializers
    own = 0
    for name, value in model.graph.initializers.items():
        stored = others[name].const_value if name in others else None
        same = isinstance(stored, ir.ExternalTensor) and value.const_value.tobytes() == stored.tobytes()
        value.const_value = stored if same else ir.Tensor(value.const_value.numpy(), name=name)
        own += 0 if same else value.const_value.nbytes
    if own <= LARGEST_SINGLE_FILE:
        with atomic_path(path) as temporary:
            ir.save(model, temporary)
        path.with_name(path.name + ".data").unlink(missing_ok=True)
