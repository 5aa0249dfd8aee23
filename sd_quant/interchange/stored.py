"""Tensors of a denoiser's file, or of a diffusers folder, grouped by layer, and the checks that all readers share.

A layer ``X`` has tensors such as ``X.weight`` and ``X.weight.absmax``. Any other tensor is a parameter of the network,
or refused as unknown. Alternative not taken: a class per stored weight format; formats have only the checks of names,
shapes and finite values in common.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import listing
from sd_quant.files.folders import WEIGHTS, read_json, stored_weights
from sd_quant.files.safetensors import read_header
from sd_quant.files.schema import check_schema
from sd_quant.files.tensors import LazyTensor, Readable, StoredTensor, size_of
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer, checked_whole
from sd_quant.knobs import BOUNDED
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser
from sd_quant.names.diffusers import DENOISERS, TIED

FLOAT_SCALES = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # of weights, by their names
FP8 = "float8_e4m3fn"
CONFIG, FILE = "config.json", f"{WEIGHTS['diffusers']}.safetensors"
FORMER_PREFIX, MADE = "text_model.", "embeddings.position_ids"  # of CLIP before transformers 5
Shape = tuple[int, ...]
Config = TypeVar("Config")  # a dataclass


@dataclass(frozen=True)
class LayerTensors:
    """Tensors of one layer by name suffix. Methods raise ArtifactError for a missing or unsuitable tensor."""

    path: Path
    layer: str
    tensors: Mapping[str, StoredTensor]

    def __contains__(self, end: str) -> bool:
        return end in self.tensors

    def checked(self, end: str, shapes: Collection[Shape] | None, dtypes: Collection[torch.dtype]) -> StoredTensor:
        """Return the tensor ``end``. Raises ArtifactError unless ``shapes`` (None: any) and ``dtypes`` allow it."""
        if (tensor := self.tensors.get(end)) is None:
            raise ArtifactError(
                f"{self.path}: layer {shown(self.layer)} has no {end!r} beside its others; fetch the file again"
            )
        if (shapes is not None and tuple(tensor.shape) not in shapes) or tensor.dtype not in dtypes:
            wanted = [tensor.shape] if shapes is None else shapes
            raise ArtifactError(
                f"{self.path}: {self.name(end)} is {list(tensor.shape)} in {plain(tensor.dtype)}, expected "
                f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(wanted))} in "
                f"{' or '.join(map(plain, dtypes))}; give a quantization of the very model that it is compared with"
            )
        return tensor

    def finite(self, end: str) -> Tensor:
        """Return the tensor ``end`` in its own dtype. Raises ArtifactError for NaN and infinity."""
        return finite(self.tensors[end].read(), self.path, f"{self.layer}.{end}")

    def number(self, end: str, positive: bool = False, dtypes: Collection[torch.dtype] = FLOAT_SCALES) -> float:
        """Return the single number in the tensor ``end``; with ``positive``, one above 0 that fp32 can divide by."""
        if prod(self.tensors[end].shape) != 1 or self.tensors[end].dtype not in dtypes:
            self.checked(end, [()], dtypes)
        number = float(self.finite(end).float())
        if positive and not (number > 0 and 1 / number < torch.finfo(torch.float32).max):
            raise ArtifactError(
                f"{self.path}: {self.name(end)} is {number:g}, expected a number above 0 that fp32 can divide by"
            )
        return number

    def size(self, begins: str = "", but: Collection[str] = ()) -> int:
        """Return the bytes of the tensors whose suffixes begin with ``begins``, without those in ``but``."""
        return size_of(tensor for end, tensor in self.tensors.items() if end.startswith(begins) and end not in but)

    def refuse(self, ends: Collection[str], reason: str) -> None:
        """Raise ArtifactError, with the ``reason``, for a tensor with one of the suffixes ``ends``."""
        if found := [f"{self.layer}.{end}" for end in self.tensors if end in ends]:
            raise ArtifactError(f"{self.path} holds {listing(found)}, {reason}; fetch it again")

    def name(self, end: str) -> str:
        return shown(f"{self.layer}.{end}")

    def decoded(self, shape: Shape, decode: Callable[[], Tensor], dtype: torch.dtype = torch.float32) -> LazyTensor:
        """Return the weight that ``decode`` computes, checked for NaN and infinity at each read."""
        return LazyTensor(shape, dtype, lambda: finite(decode(), self.path, f"{self.layer}.weight"))


def finite(values: Tensor, path: Path, name: str) -> Tensor:
    """Return ``values``. Raises ArtifactError for NaN and infinity."""
    if not bool(torch.isfinite(values.float()).all()):
        raise ArtifactError(
            f"{path}: {shown(name)} holds NaN or infinite numbers, expected finite ones; fetch the file again"
        )
    return values


def weight_shapes(checkpoint: Checkpoint) -> dict[str, Shape]:
    """Return the weight shape of every linear and two-dimensional convolution by layer name."""
    return {
        name: tuple(module.weight.shape)
        for name, module in empty_denoiser(checkpoint).named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def by_layer(
    path: Path, tensors: Mapping[str, StoredTensor], layers: Collection[str], marks: Collection[str]
) -> tuple[dict[str, LayerTensors], dict[str, StoredTensor]]:
    """Return the tensors of each quantized layer, and all other tensors.

    ``marks`` are name suffixes, behind the layer's name and a dot, that only quantized layers have. A layer's
    ``weight`` is among its tensors, its bias is not.
    """
    found: dict[str, LayerTensors] = {}
    for layer in layers:
        own = {mark: tensors[name] for mark in marks if (name := f"{layer}.{mark}") in tensors}
        if own and (weight := tensors.get(f"{layer}.weight")) is not None:
            own["weight"] = weight
        if own:
            found[layer] = LayerTensors(path, layer, own)
    used = {f"{layer}.{end}" for layer, own in found.items() for end in own.tensors}
    return found, {name: tensor for name, tensor in tensors.items() if name not in used}


def with_layers(denoiser: QuantizedDenoiser, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return ``denoiser``. Raises ArtifactError without a quantized layer or with other tensors than needed."""
    if not denoiser.layers:
        raise ArtifactError(
            f"{denoiser.path} holds no layer that {denoiser.maker} has quantized; expected a quantized denoiser, so "
            "check the path"
        )
    return checked_whole(denoiser, checkpoint)


def shown(name: str) -> str:
    """Return a name from a file in quotes, printable and shortened."""
    return repr(listing([name]))


def plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def told(value: object) -> str:
    """Return a value from a file for a message: a plain value shortened, else only its type, as it may be deep."""
    return str(value)[:80] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def fits(value: Any, template: Any) -> bool:
    """Return whether a JSON value equals ``template``, or one of a tuple of templates.

    A type matches its values, ``object`` all values. Mappings are compared by key; a missing entry is None.
    """
    if isinstance(template, tuple):
        return any(fits(value, each) for each in template)
    if isinstance(template, dict):
        known = isinstance(value, dict) and value.keys() <= template.keys()
        return known and all(fits(value.get(key), each) for key, each in template.items())
    if isinstance(template, type):
        return template is object or type(value) is template
    return type(value) is type(template) and value == template


def header_of(path: Path) -> tuple[Mapping[str, StoredTensor], Mapping[str, str]]:
    """Return tensors and metadata of a safetensors file; empty mappings for any other ``path``."""
    try:
        return read_header(whole_file(path))
    except (SdQuantError, OSError, ValueError):
        return {}, {}


# diffusers' folders


def denoiser_folder(path: Path) -> Path | None:
    """Return the denoiser's folder in ``path``, or ``path`` itself; None without a config."""
    folders = [path / name for name in DENOISERS if (path / name / CONFIG).is_file()]
    return folders[0] if folders else path if (path / CONFIG).is_file() else None


def holds(path: Path, name: str) -> bool:
    """Return whether a file of this name lies beside a denoiser's weights."""
    try:
        folder = denoiser_folder(path) if path.is_dir() else None
        return folder is not None and (folder / name).is_file()
    except OSError:
        return False


def quantization_config(path: Path) -> Mapping[str, object] | None:
    """Return ``quantization_config`` of the denoiser's config; None without such an object."""
    try:
        folder = denoiser_folder(path) if path.is_dir() else None
        found = read_json(folder, CONFIG).get("quantization_config") if folder is not None else None
    except (SdQuantError, OSError):
        return None
    return found if isinstance(found, Mapping) else None


def quantized_by(path: Path, method: str) -> bool:
    """Return whether ``path`` is a folder whose config names ``method`` as its quantization method."""
    return (quantization_config(path) or {}).get("quant_method") == method


def weights_name(network: nn.Module) -> str:
    """Return the stem of a network's weight files: transformers' ``model`` or ``diffusion_pytorch_model``."""
    return WEIGHTS.get(type(network).__module__.partition(".")[0], WEIGHTS["diffusers"])


def stored_tensors(path: Path, checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the denoiser's tensors by the names in its files. Raises the errors of ``stored_weights``.

    Those of a text encoder have the names of the installed transformers; buffers that it computes are left out.
    """
    network = empty_denoiser(checkpoint)
    stored = stored_weights(denoiser_folder(path), weights_name(network))
    if not any(name.startswith(FORMER_PREFIX) for name in network.state_dict()):
        stored = {name.removeprefix(FORMER_PREFIX): tensor for name, tensor in stored.items()}
    for name, tied in TIED.items():
        if name in stored:
            stored.setdefault(tied, stored.pop(name))
    return {name: tensor for name, tensor in stored.items() if not name.endswith(MADE)}


@dataclass(frozen=True)
class Folder:
    """A folder of diffusers with the denoiser of ``checkpoint``: a pipeline's or the denoiser's own."""

    path: Path
    checkpoint: Checkpoint

    @property
    def place(self) -> Path:
        """The folder of the denoiser's config and weights."""
        return denoiser_folder(self.path)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The config's ``quantization_config``, or an empty mapping."""
        return quantization_config(self.path) or {}

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        return stored_tensors(self.path, self.checkpoint)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        return weight_shapes(self.checkpoint)

    def by_layer(
        self, marks: Collection[str], layers: Collection[str] | None = None
    ) -> tuple[dict[str, LayerTensors], dict[str, StoredTensor]]:
        return by_layer(self.path, self.tensors, self.shapes if layers is None else layers, marks)

    def whole(
        self, name: str, maker: str, layers: Mapping[str, QuantizedLayer], others: Mapping[str, Readable], **more: Any
    ) -> QuantizedDenoiser:
        """Return the denoiser of quantized ``layers`` and ``others``. Raises ArtifactError if it is not whole."""
        size = size_of(self.tensors.values())
        return with_layers(QuantizedDenoiser(self.path, name, maker, layers, others, size, **more), self.checkpoint)

    def maker(self, name: str, entry: str) -> str:
        """Return the tool's ``name``, with its version if the config's ``entry`` has one."""
        version = self.config.get(entry)
        return f"{name} {version}" if isinstance(version, str) and re.fullmatch(r"[\w.+-]{1,30}", version) else name

    def checked(self, given: Mapping[str, object], usual: Config) -> Config:
        """Return the dataclass ``usual``, updated from ``given``. Raises ConfigError for a wrong type or range."""
        known = vars(usual)
        config = known | {name: given[name] for name in known if name in given}
        try:
            check_schema(type(usual), config, "quantization_config.")
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}; give a folder that its tool has saved") from error
        return type(usual)(**config)

    def ignored_names(self, *keys: str) -> list[str]:
        """Return names in the config's first nonempty entry of ``keys``. Raises ArtifactError for another type."""
        names: Any = next((self.config[key] for key in keys if self.config.get(key)), [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ArtifactError(f"{self.path}: {keys[0]} in its config is no list of names; make the folder again")
        return names

    def exceptions(self, key: str) -> Mapping[str, Mapping[str, object]]:
        """Return configs by layer name or pattern in the entry ``key``. Raises ConfigError for any other type."""
        found = self.config.get(key) or {}
        if not isinstance(found, Mapping) or not all(isinstance(config, Mapping) for config in found.values()):
            raise ConfigError(
                f"{self.path}: quantization_config.{key} is {BOUNDED.repr(found)}, expected configs by layers' names; "
                "give a folder that its tool has saved"
            )
        return found

    def opened_by(
        self, package: str, dtype: torch.dtype = torch.float32, **environment: str
    ) -> Callable[[], nn.Module] | None:
        """Return a function that opens the denoiser with diffusers and ``package``; None without that package.

        The network's class is that of the pipeline's family. ``environment`` has variables for the import of
        ``package``, unless they are set already.
        """
        if find_spec(package) is None:
            return None

        def load() -> nn.Module:
            import diffusers

            for name, value in environment.items():
                os.environ.setdefault(name, value)
            kind = self.checkpoint.family.NETWORKS[denoiser_part(self.checkpoint).component]
            found = read_json(self.place, CONFIG).get("_class_name")
            if found != kind:
                raise ArtifactError(
                    f"{self.place / CONFIG} is of a {str(found)[:100]!r}, expected {kind}; give that one's"
                )
            network = getattr(diffusers, kind).from_pretrained(
                self.place, torch_dtype=dtype, use_safetensors=True, local_files_only=True
            )
            return network.eval()

        return load
