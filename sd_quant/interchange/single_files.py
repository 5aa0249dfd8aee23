"""A denoiser in one file, by its authors' names or diffusers': linears whose weights are codes, and all other tensors.

The road not taken is a converter of names, which would have to know what codes are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import Readable, StoredTensor
from sd_quant.interchange.denoiser import QuantizedLayer, needed
from sd_quant.interchange.stored import LayerTensors, Shape, shown
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser
from sd_quant.names.authors import Rows, joined, places_in, rows_of


@dataclass(frozen=True)
class Coded:
    """A linear in a file whose weight is codes."""

    own: LayerTensors
    unpacked: Shape  # of the weight's numbers, of which bytes may hold several
    multiple: int  # to which both sides of these are padded
    layer: Callable[[Shape, Sequence[Rows]], QuantizedLayer]  # with a weight of a shape, in parts of the stored one


def placed(
    path: Path, checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], coded: Mapping[str, Coded], tool: str
) -> tuple[dict[str, QuantizedLayer], dict[str, Readable], list[str]]:
    """Layers and parameters of the denoiser by diffusers' names, and names of the file that are none of it.

    ``tensors`` have the file's names without a prefix, those of ``coded`` layers among them, but for scales and marks.
    Raises ArtifactError for the denoiser of another family or size, and for codes that ``tool`` does not multiply.
    """
    network = empty_denoiser(checkpoint)
    modules = dict(network.named_modules())
    shapes = {name: tuple(each.shape) for name, each in needed(network).items()}
    codes = {f"{layer}.weight": each for layer, each in coded.items()}
    numbers = {name: codes[name].unpacked if name in codes else each.shape for name, each in tensors.items()}
    multiples = {name: each.multiple for name, each in codes.items()}
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
