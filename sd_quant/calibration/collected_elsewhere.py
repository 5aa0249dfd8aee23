"""Statistics that were collected elsewhere: ``calibration=<entry or folder>`` in place of a pass.

Who has no GPU takes what the cache of somebody who has one holds. Entries describe themselves, so nothing else has to
be sent. They come from a stranger: what the header says is compared with this checkpoint's UNet before a number is
read, so no file makes us allocate more than that UNet's statistics take. The digest finds damage and descriptions that
were altered. It is no signature: who computes it anew can claim any ranges, and spoil the pictures but nothing else.

The road not taken is to demand the origin that a pass would have here, as the cache does. The same weights in another
file have another hash, and another device is the very reason to share: the layers have to fit, all else is told.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sd_quant.calibration.store import FORM, content_digest, unpack
from sd_quant.checkpoints.archive import whole_file
from sd_quant.checkpoints.safetensors_file import read_header
from sd_quant.checkpoints.tensors import StoredTensor
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.models.parts import Contract, axes
from sd_quant.quantization.statistics import CALLS, ROWS, Statistics, kind_of, merge, width_of

LOG = logging.getLogger(__name__)
SIZES = range(64, 4097, 64)  # of pictures, in pixels

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # of tensors by name: dtype and shape


@dataclass(frozen=True, slots=True)
class Entry:
    """A file as its header describes it, well-formed and not yet compared with anything."""

    path: Path
    segment: range
    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]


def read_shared(
    path: Path,
    layers: Mapping[str, nn.Module],
    contract: Contract,
    here: Mapping[str, Any],
    calib_size: int,
    guides: bool = True,
) -> Statistics:
    """Statistics of the first ``calib_size`` prompts from an entry, or from a folder of entries.

    ``layers`` are the denoiser's to calibrate by name, their weights on any device, meta too; ``contract`` is the
    denoiser's, ``guides`` says whether guidance doubles its samples, ``here`` is the ``origin`` that a pass on this
    machine would have.
    Raises ConfigError when there is no entry, or none of so many prompts or of so many steps; ArtifactError when one is
    damaged, no statistics, of another form or of another UNet.
    """
    found = [open_entry(file) for file in entries_at(path)]
    origins = {entry.metadata["origin"] for entry in found}
    if len(origins) > 1:
        raise ArtifactError(f"{path} holds statistics of {len(origins)} origins, expected one; give a folder for each")
    there = json.loads(origins.pop())
    sampling, steps = there["sampling"], here["sampling"]["steps"]
    if sampling["steps"] != steps:
        raise ConfigError(
            f"{path} holds statistics of {sampling['steps']} denoising steps and quantize.n_steps is {steps}; "
            f"set quantize.n_steps={sampling['steps']}"
        )
    entries = {entry.segment: entry for entry in found}
    ways = sums(entries)
    if not ways:
        raise ConfigError(f"{path} holds no statistics of the first prompt; give the folder with all entries")
    if calib_size not in ways:
        sizes = " or ".join(map(str, sorted(ways)))
        raise ConfigError(
            f"{path} holds {sizes} prompts, whose statistics cannot be divided, and calib_size is {calib_size}; "
            f"set calib_size={sizes}"
        )
    halves = 2 if guides and sampling["guidance_scale"] > 1 else 1
    calls = contract.shapes(**axes(halves, sampling["width"], sampling["height"]))
    statistics = merge([read_entry(entries[segment], layers, calls, steps) for segment in ways[calib_size]])
    LOG.info("statistics of prompts 1 to %d come from %s", calib_size, path)
    if there["checkpoint"] != here["checkpoint"]:
        LOG.warning(
            "these statistics were collected with another checkpoint file, of SHA-256 %.66r; its %d layers fit",
            there["checkpoint"], len(layers),
        )  # fmt: skip
    if others := differences(there, here):
        LOG.info("these statistics were collected otherwise than here: %s", ", ".join(others))
    return statistics


def entries_at(path: Path) -> list[Path]:
    """The file, or every entry of the folder. Raises ConfigError when there is none."""
    files = [file for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path]) if file.is_file()]
    if not files:
        raise ConfigError(f"calibration names {path}, where no statistics are; give an entry of a cache or its folder")
    return files


def open_entry(path: Path) -> Entry:
    """Raises ArtifactError when the header is damaged or describes no statistics, ConfigError when it is unreadable."""
    try:
        tensors, metadata = read_header(whole_file(path))
        origin, prompts = json.loads(metadata["origin"]), json.loads(metadata["prompts"])
        if origin["form"] != FORM:
            found = f"{origin['form']!r:.80}"
            raise ArtifactError(f"{path} has form {found}, expected {FORM}; collect it again with this version")
        sampling, segment = origin["sampling"], range(prompts["first"], prompts["last"] + 1)
        sound = (
            type(metadata["digest"]) is type(origin["checkpoint"]) is str
            and type(sampling["steps"]) is int
            and sampling["guidance_scale"] >= 0
            and sampling["height"] in SIZES
            and sampling["width"] in SIZES
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


def sums(segments: Iterable[range]) -> dict[int, list[range]]:
    """Each number of prompts, from the first one on, that segments add up to, with the fewest that do."""
    ways: dict[int, list[range]] = {0: []}
    for segment in sorted(segments, key=lambda segment: segment.start):
        if segment.start in ways:
            way = [*ways[segment.start], segment]
            ways[segment.stop] = min(ways.get(segment.stop, way), way, key=len)
    del ways[0]
    return ways


def read_entry(
    entry: Entry, layers: Mapping[str, nn.Module], calls: Mapping[str, tuple[int, ...]], steps: int
) -> Statistics:
    """``calls`` are the shapes of one call's inputs. Raises ArtifactError when the tensors are others, or damaged."""
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in entry.tensors.items()}
    expected = layout(layers, calls, entry.segment.stop, steps, found)
    if wrong := [name for name in expected | found if found.get(name) != expected.get(name)]:
        count, first = len({name.rpartition("|")[0] for name in wrong}), wrong[0]
        raise ArtifactError(
            f"{entry.path} is of another UNet: beside the {len(layers)} layers of this checkpoint's, {count} layers or "
            f"inputs are missing, unknown or of another shape, the first is {first!r:.200}, {shown(found.get(first))} "
            f"instead of {shown(expected.get(first))}; give statistics that fit, or collect them with calibration=null"
        )
    tensors = {name: tensor.read() for name, tensor in entry.tensors.items()}
    if content_digest(entry.metadata["origin"], entry.metadata["prompts"], tensors) != entry.metadata["digest"]:
        raise ArtifactError(f"{entry.path} is damaged or was altered: its digest is of other content; fetch it again")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all() or (name.endswith("|amax") and (tensor < 0).any()):
            raise ArtifactError(f"{entry.path} holds negative or infinite values in {name!r}; collect it again")
    return unpack(tensors)


def layout(
    layers: Mapping[str, nn.Module], calls: Mapping[str, tuple[int, ...]], prompts: int, steps: int, found: Layout
) -> Layout:
    """What statistics look like, with as many rows of each sample as ``found`` has, if that many are allowed."""

    def rows(sample: str, most: int) -> int:
        _, shape = found.get(f"{sample}|priority", (None, ()))
        return min(max(sum(shape[:1]), 1), most)

    expected: Layout = {}
    for name, layer in layers.items():
        kind, width = kind_of(layer), width_of(layer)
        sample = f"{kind}|{name}"
        count = rows(sample, ROWS)
        expected[f"{sample}|amax"] = torch.float32, (prompts, steps) if kind == "conv" else (steps, width)
        expected[f"{sample}|rows"] = torch.float16, (count, width)
        expected[f"{sample}|priority"] = torch.float64, (count,)
    count = rows(f"call|{next(iter(calls))}", CALLS)  # every input is of the same calls
    for name, shape in calls.items():
        expected[f"call|{name}|rows"] = torch.float32, (count, *shape)
        expected[f"call|{name}|priority"] = torch.float64, (count,)
    return expected


def shown(tensor: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return f"{tensor[0]} {list(tensor[1])}" if tensor else "nothing"


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What is not the same in two origins, the checkpoint aside: ``sampling.seed 7 (here 42)``."""
    first, second = facts(there), facts(here)
    return [
        f"{name} {first.get(name)!r:.24} (here {value!r:.24})"
        for name, value in second.items()
        if name != "checkpoint" and first.get(name) != value
    ]


def facts(origin: Mapping[str, Any]) -> dict[str, str | float]:
    """The texts and numbers of an origin, those of a group as ``group.name``."""
    flat: dict[str, Any] = {}
    for name, value in origin.items():
        flat |= {f"{name}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {name: value}
    return {name: value for name, value in flat.items() if isinstance(value, str | float | int)}
