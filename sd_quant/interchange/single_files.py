"""A denoiser in one file with the original checkpoint's or diffusers' names: quantized linears and other tensors.

Alternative not taken: a separate converter of names, which would have to understand quantized weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from torch import nn

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import Readable, StoredTensor
from sd_quant.interchange.denoiser import Inputs, QuantizedLayer, needed
from sd_quant.interchange.layouts import Layout
from sd_quant.interchange.stored import LayerTensors, Shape, shown
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser
from sd_quant.names.authors import Rows, joined, places_in, rows_of


@dataclass(frozen=True)
class Coded:
    """A linear with a quantized weight in a file. A format is a subclass with its own ``layout`` and ``inputs``."""

    counted: ClassVar[str] = ""  # the beginning of ends of names of tensors that are stored for the weight
    own: LayerTensors

    @property
    def layout(self) -> Layout:
        raise NotImplementedError

    def inputs(self, shape: Shape) -> Inputs | None:
        """Return the rounding of inputs of a weight of this ``shape``."""
        raise NotImplementedError

    def unpacked(self) -> Shape:
        """Return the shape of the quantized weight; a stored byte may hold several numbers."""
        return self.layout.unpacked(tuple(self.own.tensors["weight"].shape))

    def layer(self, shape: Shape, parts: Sequence[Rows]) -> QuantizedLayer:
        """Return the layer with a weight of ``shape``, which is the rows ``parts`` of the stored weight."""
        layer = self.layout.layer(self.own, shape, self.own.size(self.counted), None, parts=parts)
        return replace(layer, inputs=self.inputs(shape))


def placed(
    path: Path, checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], coded: Mapping[str, Coded], tool: str
) -> tuple[dict[str, QuantizedLayer], dict[str, Readable], list[str]]:
    """Return layers and parameters of the denoiser by diffusers' names, and unknown names of the file.

    ``tensors`` are the file's without scales and marks, ``coded`` its quantized linears, by names without a prefix.
    Raises ArtifactError for another denoiser, and for quantized layers other than linears, which ``tool`` refuses.
    """
    network = empty_denoiser(checkpoint)
    modules = dict(network.named_modules())
    shapes = {name: tuple(each.shape) for name, each in needed(network).items()}
    codes = {f"{layer}.weight": each for layer, each in coded.items()}
    numbers = {name: codes[name].unpacked() if name in codes else each.shape for name, each in tensors.items()}
    multiples = {name: each.layout.multiple for name, each in codes.items()}
    places, unknown = places_in(path, network, shapes, numbers, multiples)
    layers: dict[str, QuantizedLayer] = {}
    parameters: dict[str, Readable] = {}
    for name, parts in places.items():
        layer, stored = name.removesuffix(".weight"), codes.get(parts[0].name)
        if stored is None:
            parameters[name] = joined([rows_of(tensors[rows.name], rows) for rows in parts])
        elif isinstance(modules.get(layer), nn.Linear):
            layers[layer] = stored.layer(shapes[name], parts)
        else:
            told = shown(parts[0].name.removesuffix(".weight"))
            raise ArtifactError(
                f"{path} has {told} quantized, which is no linear; {tool} quantizes linears only, so give a file that "
                "it opens"
            )
    return layers, parameters, unknown
