"""The optimization profile of a part: the shapes that a plan takes, from the axis names in its ONNX file."""

from pathlib import Path

import onnx

from sd_quant.engines.tensorrt.build import Profile
from sd_quant.export.parts import SAMPLES_PER_IMAGE
from sd_quant.models.parts import axes


def profile_of(
    onnx_path: Path, part: str, batch: int, limits: tuple[int, int] | None, width: int, height: int, *, guided: bool
) -> Profile:
    """Least, best and most of every input's shape, by name, for a ``batch`` of so many images of so many pixels.

    ``limits`` are the smallest and the largest batch; None makes a plan for this batch alone. A denoiser's batches are
    doubled for guidance, where the graph says that it is called so; its smallest stays undoubled, for use without.
    """
    model = onnx.load(onnx_path, load_external_data=False)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    samples = int(properties.get(SAMPLES_PER_IMAGE, 2 if part == "unet_xl" else 1)) if guided else 1
    best = batch * samples
    sizes = (best, best, best) if limits is None else (limits[0], best, limits[1] * samples)
    shapes = {}
    for value in model.graph.input:
        names = [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        least, likely, most = (tuple(axes(size, width, height).get(axis, axis) for axis in names) for size in sizes)
        shapes[value.name] = least, likely, most
    return shapes
