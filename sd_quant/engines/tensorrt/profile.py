"""The optimization profile of a part: the shapes of its plan, from the names of the axes in its ONNX file."""

from collections.abc import Sequence
from pathlib import Path

import onnx

from sd_quant.engines.tensorrt.build import Profile
from sd_quant.export.parts import SAMPLES_PER_IMAGE
from sd_quant.models.parts import axes


def profile_of(
    onnx_path: Path,
    part: str,
    batch: int,
    limits: tuple[int, int] | None,
    size: tuple[int, int],
    sizes: Sequence[tuple[int, int]] = (),
    *,
    guided: bool,
) -> Profile:
    """The smallest, most likely and largest shape of every input.

    ``size``, width and height in pixels, is the most likely one of the images, ``sizes`` are others. A profile has a
    range for each axis, so it includes every width between the smallest and the largest with every height.
    ``batch`` is the most likely number of images, ``limits`` are the smallest and the largest; None: this batch only.
    With guidance a denoiser's batches are doubled, if its graph computes both samples in one call; the smallest stays
    as it is, for calls without guidance.
    """
    model = onnx.load(onnx_path, load_external_data=False)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    samples = int(properties.get(SAMPLES_PER_IMAGE, 2 if part == "unet_xl" else 1)) if guided else 1
    likely_batch = batch * samples
    batches = (likely_batch,) * 3 if limits is None else (limits[0], likely_batch, limits[1] * samples)
    widths, heights = zip(size, *sizes, strict=True)
    corners = (min(widths), min(heights)), size, (max(widths), max(heights))
    ranges = [axes(samples, *corner) for samples, corner in zip(batches, corners, strict=True)]
    shapes = {}
    for value in model.graph.input:
        names = [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        smallest, likely, largest = (tuple(sized.get(axis, axis) for axis in names) for sized in ranges)
        shapes[value.name] = smallest, likely, largest
    return shapes
