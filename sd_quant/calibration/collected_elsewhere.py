"""Read calibration statistics that another machine collected: entries of its cache (``calibration=<entry or
folder>``).

Entries are not trusted. The shapes in the header are compared with those of this checkpoint's denoiser before any
tensor is read, so no file can make us allocate more than the statistics of this denoiser take. The digest detects
damage and altered metadata. It is not a signature: an attacker who recomputes it can claim any ranges, which spoils the
images and nothing else.

Alternative not taken: require the same origin (checkpoint hash, device, versions) as the local cache does. The same
weights in another file have another hash, and these entries are meant for use on another device. The layers have to
fit; other differences are logged.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sd_quant.calibration.store import VERSION, content_digest, unpack
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_header
from sd_quant.files.tensors import StoredTensor
from sd_quant.models.parts import Contract
from sd_quant.quantization.statistics import CALLS, ROWS, Statistics, layer_kind, merge, width_of

LOG = logging.getLogger(__name__)
MOST_PARTS = 16  # of a pipeline, whose peaks an entry may have
PLAUSIBLE_SIZES = range(64, 4097, 64)  # heights and widths of an image, in pixels

DtypesAndShapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # by the tensor's name


@dataclass(frozen=True, slots=True)
class Entry:
    """A cache entry (statistics of consecutive prompts) with a well-formed header, not yet compared with a denoiser."""

    path: Path
    segment: range  # numbers of its prompts
    metadata: Mapping[str, str]  # ``origin``, ``prompts`` and ``digest``, see ``store``
    tensors: Mapping[str, StoredTensor]  # not yet read


def read_statistics(
    path: Path,
    layers: Mapping[str, nn.Module],
    contract: Contract,
    here: Mapping[str, Any],
    calib_size: int,
    guides: bool = True,
    optional: Mapping[str, nn.Module] = {},
) -> Statistics:
    """Read the statistics of the first ``calib_size`` prompts from an entry or a folder of entries.

    ``layers`` are the denoiser's layers to calibrate, by name, and ``optional`` layers that entries may contain too;
    their weights may be on the meta device. ``contract`` has the denoiser's input shapes; ``guides``: guidance doubles
    its batch. ``here`` is the ``origin`` of a calibration on this machine.
    Raises ConfigError when no entry exists, or the number of prompts or steps differs; ArtifactError when an entry is
    damaged, of another format version, or of another denoiser.
    """
    files = [file for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path]) if file.is_file()]
    if not files:
        raise ConfigError(f"calibration names {path}, where no statistics are; give an entry of a cache or its folder")
    opened = [open_entry(file) for file in files]
    origins = {entry.metadata["origin"] for entry in opened}
    if len(origins) > 1:
        raise ArtifactError(f"{path} holds statistics of {len(origins)} origins, expected one; give a folder for each")
    there = json.loads(origins.pop())
    sampling, steps = there["sampling"], here["sampling"]["steps"]
    if sampling["steps"] != steps:
        raise ConfigError(
            f"{path} holds statistics of {sampling['steps']} denoising steps and quantize.n_steps is {steps}; "
            f"set quantize.n_steps={sampling['steps']}"
        )
    entries = {entry.segment: entry for entry in opened}
    by_size = chains(entries)
    if not by_size:
        raise ConfigError(f"{path} holds no statistics of the first prompt; give the folder with all entries")
    if calib_size not in by_size:
        sizes = " or ".join(map(str, sorted(by_size)))
        raise ConfigError(
            f"{path} holds {sizes} prompts, whose statistics cannot be divided, and calib_size is {calib_size}; "
            f"set calib_size={sizes}"
        )
    samples = 2 if guides and sampling["guidance_scale"] > 1 else 1
    calls = contract.shapes_for(samples, sampling["width"], sampling["height"])
    statistics = merge(
        [read_entry(entries[segment], layers, calls, steps, optional) for segment in by_size[calib_size]]
    )
    LOG.info("statistics of prompts 1 to %d come from %s", calib_size, path)
    if there["checkpoint"] != here["checkpoint"]:
        LOG.warning(
            "these statistics were collected with another checkpoint file, of SHA-256 %.66r; its %d layers fit",
            there["checkpoint"], len(layers),
        )  # fmt: skip
    if different := differences(there, here):
        LOG.info("these statistics were collected otherwise than here: %s", ", ".join(different))
    return statistics


def open_entry(path: Path) -> Entry:
    """Open an entry and read only its header.

    Raises ArtifactError when the header is damaged or describes no statistics, ConfigError when the file is unreadable.
    """
    try:
        tensors, metadata = read_header(whole_file(path))
        origin, prompts = json.loads(metadata["origin"]), json.loads(metadata["prompts"])
        if origin["form"] != VERSION:
            form = f"{origin['form']!r:.80}"
            raise ArtifactError(f"{path} has form {form}, expected {VERSION}; collect it again with this version")
        sampling, segment = origin["sampling"], range(prompts["first"], prompts["last"] + 1)
        sound = (
            type(metadata["digest"]) is type(origin["checkpoint"]) is str
            and type(sampling["steps"]) is int
            and sampling["guidance_scale"] >= 0
            and sampling["height"] in PLAUSIBLE_SIZES
            and sampling["width"] in PLAUSIBLE_SIZES
            and len(prompts["texts"]) == len(segment) > 0
        )
        if not sound:
            raise ValueError("an impossible value")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); allow it, or give another file") from error
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ArtifactError(f"{path} does not describe statistics ({reason}); give an entry of a cache") from error
    return Entry(path, segment, metadata, tensors)


def chains(segments: Iterable[range]) -> dict[int, list[range]]:
    """Map each possible n to the fewest ``segments`` that cover the prompts 0 to n - 1 without gaps, in order."""
    by_size: dict[int, list[range]] = {0: []}
    for segment in sorted(segments, key=lambda segment: segment.start):
        if segment.start in by_size:
            chain = [*by_size[segment.start], segment]
            by_size[segment.stop] = min(by_size.get(segment.stop, chain), chain, key=len)
    del by_size[0]
    return by_size


def read_entry(
    entry: Entry,
    layers: Mapping[str, nn.Module],
    calls: Mapping[str, tuple[int, ...]],
    steps: int,
    optional: Mapping[str, nn.Module] = {},
) -> Statistics:
    """Read the statistics of ``layers``, and of ``optional`` if there; ``calls``: input shapes of a denoiser call.

    Raises ArtifactError when the tensors do not fit these layers, shapes and number of steps, or are damaged.
    """
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in entry.tensors.items()}
    if entry.segment.start > 0 and not any(name.startswith("call|") for name in stored):
        calls = {}  # as when all images are of another size than the first one
    there = {name: layer for name, layer in optional.items() if f"{layer_kind(layer)}|{name}|amax" in stored}
    expected = expected_tensors({**layers, **there}, calls, entry.segment.stop, steps, stored)
    if wrong := [name for name in expected | stored if stored.get(name) != expected.get(name)]:
        count, first = len({name.rpartition("|")[0] for name in wrong}), wrong[0]
        both = (stored.get(first), expected.get(first))
        found, instead = (f"{each[0]} {list(each[1])}" if each else "nothing" for each in both)
        raise ArtifactError(
            f"{entry.path} is of another UNet: beside the {len(layers)} layers of this checkpoint's, {count} layers or "
            f"inputs are missing, unknown or of another shape, the first is {first!r:.200}, {found} "
            f"instead of {instead}; give statistics that fit, or collect them with calibration=null"
        )
    tensors = {name: tensor.read() for name, tensor in entry.tensors.items()}
    if content_digest(entry.metadata["origin"], entry.metadata["prompts"], tensors) != entry.metadata["digest"]:
        raise ArtifactError(f"{entry.path} is damaged or was altered: its digest is of other content; fetch it again")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all() or (name.endswith(("|amax", "|folds")) and (tensor < 0).any()):
            raise ArtifactError(f"{entry.path} holds negative or infinite values in {name!r}; collect it again")
    return unpack(tensors)


def expected_tensors(
    layers: Mapping[str, nn.Module],
    calls: Mapping[str, tuple[int, ...]],
    prompts: int,
    steps: int,
    stored: DtypesAndShapes,
) -> DtypesAndShapes:
    """Return the dtype and shape that each tensor must have; numbers of sampled rows are as ``stored``, limited."""

    def rows(sample: str, most: int) -> int:
        _, shape = stored.get(f"{sample}|priority", (None, ()))
        return min(max(sum(shape[:1]), 1), most)

    expected: DtypesAndShapes = {}
    for name, layer in layers.items():
        kind, width = layer_kind(layer), width_of(layer)
        sample = f"{kind}|{name}"
        count = rows(sample, ROWS)
        expected |= {
            f"{sample}|amax": (torch.float32, (prompts, steps) if kind == "conv" else (steps, width)),
            f"{sample}|rows": (torch.float16, (count, width)),
            f"{sample}|priority": (torch.float64, (count,)),
        }
        if kind == "linear":
            expected[f"{sample}|folds"] = torch.float32, (2, width)
    count = rows(f"call|{next(iter(calls), '')}", CALLS)  # the same calls for every input
    for name in [name for name in stored if name.count("|") == 2 and name.startswith("peak|")][:MOST_PARTS]:
        expected[name] = torch.float64, ()
    for name, shape in calls.items():
        expected[f"call|{name}|rows"] = torch.float32, (count, *shape)
        expected[f"call|{name}|priority"] = torch.float64, (count,)
    return expected


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """List, except for the checkpoint, how two origins (``store``) differ, such as ``sampling.seed 7 (here 42)``."""
    first, second = flattened(there), {"sampling.sizes": None} | flattened(here)  # absent where there is one size
    return [
        f"{name} {first.get(name)!r:.24} (here {value!r:.24})"
        for name, value in second.items()
        if name != "checkpoint" and first.get(name) != value
    ]


def flattened(origin: Mapping[str, Any]) -> dict[str, str | float | None]:
    """Flatten an origin to texts, numbers and None by name, ``group.name`` in a group; lists of texts are joined."""
    flat: dict[str, Any] = {}
    for name, value in origin.items():
        flat |= {f"{name}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {name: value}
    texts = {name: value for name, value in flat.items() if isinstance(value, list) and set(map(type, value)) <= {str}}
    flat |= {name: ", ".join(value) for name, value in texts.items()}
    return {name: value for name, value in flat.items() if isinstance(value, str | float | int | None)}
