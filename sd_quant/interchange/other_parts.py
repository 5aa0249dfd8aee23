"""Quantized text encoders and autoencoders in a foreign format.

Each is written and read like the denoiser, from a checkpoint with the part in the denoiser's place. A part that the
consumer cannot open quantized is written in high precision, with the reason. Alternative not taken: separate writers
and readers, as only names of files differ.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from sd_quant.files.tensors import size_of
from sd_quant.interchange import READERS, ForeignFormat, format_of
from sd_quant.interchange.denoiser import QuantizedDenoiser, checked_whole
from sd_quant.interchange.holding import held, not_held
from sd_quant.interchange.stored import CONFIG, quantization_config, stored_tensors
from sd_quant.models.checkpoint import Checkpoint, empty_modules, in_place
from sd_quant.names.diffusers import DENOISERS
from sd_quant.quantization.assignment import LayerAssignment


def adapted_part(
    assignment: Mapping[str, LayerAssignment], target: ForeignFormat, checkpoint: Checkpoint, part: str
) -> dict[str, LayerAssignment]:
    """Return the layer assignments of a text encoder or VAE; layers that ``target`` cannot store are unquantized."""
    reason = why_plain(target, checkpoint, checkpoint.parts()[part].component)
    if reason is not None:
        return {name: not_held(layer, reason) for name, layer in assignment.items()}
    return {name: held(layer, target) for name, layer in assignment.items()}


def why_plain(target: ForeignFormat, checkpoint: Checkpoint, component: str) -> str | None:
    """Return why ``target`` needs the network ``component`` in high precision; None: layers may be quantized."""
    kind = checkpoint.family.NETWORKS[component]
    if not any(fnmatchcase(kind, pattern) for pattern in target.networks):
        return f"{target.consumer} opens no quantized {kind}"
    if target.others and is_upcast(checkpoint, component):
        return "diffusers casts this pipeline's autoencoder to fp32 (force_upcast), and refuses that of a quantized one"
    return None


def is_upcast(checkpoint: Checkpoint, component: str) -> bool:
    """Return whether diffusers casts the network from fp16 to fp32 before it calls it, as it does SDXL's VAE."""
    import diffusers

    casts = any(hasattr(getattr(diffusers, name, None), "upcast_vae") for name in checkpoint.family.PIPELINES)
    return casts and bool(getattr(empty_modules(checkpoint)[component].config, "force_upcast", False))


# Reading


def read_parts(path: Path, checkpoint: Checkpoint) -> dict[str, QuantizedDenoiser]:
    """Return the denoiser and the quantized other parts in a third-party checkpoint, by part; no weight is read.

    Each part has the format of its own folder; the denoiser may be unquantized beside quantized parts. Raises the
    errors of ``format_of`` and of the formats' readers.
    """
    parts = {part: read_part(path, checkpoint, part) for part in quantized_parts(path, checkpoint)}
    denoiser, path = checkpoint.family.DENOISER, place_of(path, checkpoint, checkpoint.family.DENOISER)
    if parts and not any(each.recognizes(path) for each in READERS.values()):
        tensors = stored_tensors(path, checkpoint)
        plain = QuantizedDenoiser(path, "diffusers", "nobody", {}, tensors, size_of(tensors.values()))
        return {denoiser: checked_whole(plain, checkpoint), **parts}
    return {denoiser: format_of(path).module.read(path, checkpoint), **parts}


def quantized_parts(path: Path, checkpoint: Checkpoint) -> list[str]:
    """Return the names of quantized networks other than the denoiser in a pipeline's folder."""
    others = {name: part for name, part in checkpoint.parts().items() if name != checkpoint.family.DENOISER}
    return [
        name
        for name, part in others.items()
        if ((folder := path / part.component) / CONFIG).is_file()
        and (quantization_config(folder) is not None or any(each.recognizes(folder) for each in READERS.values()))
    ]


def place_of(path: Path, checkpoint: Checkpoint, part: str) -> Path:
    """Return the folder of ``part`` in the pipeline's folder ``path``, or ``path`` if readers find it from there."""
    component = checkpoint.parts()[part].component
    folder, found = path / component, part == checkpoint.family.DENOISER and component in DENOISERS
    return path if found or not (folder / CONFIG).is_file() else folder


def read_part(path: Path, checkpoint: Checkpoint, part: str) -> QuantizedDenoiser:
    folder = path / checkpoint.parts()[part].component
    return format_of(folder).module.read(folder, in_place(checkpoint, part))
