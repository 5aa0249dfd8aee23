"""Caches statistics on disk, in a folder named by a hash of everything but the prompts that they depend on.

An entry is a safetensors file, which executes nothing when read, with the statistics of consecutive prompts. A larger
calib_size continues where a smaller one ended, and a smaller one uses entries of a larger one's snapshots. The header
has the origin, the prompts, and a digest of both and of the tensors. An entry that is damaged or of another origin is
not used; its prompts are calibrated again.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from sd_quant.cache import first_free
from sd_quant.errors import SdQuantError
from sd_quant.files import digest
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_header, write_safetensors
from sd_quant.files.tensors import bytes_of, lazy
from sd_quant.quantization.statistics import LayerStatistics, Peak, Sample, Statistics

LOG = logging.getLogger(__name__)
VERSION = 2  # of an entry's layout, in the header as "form"; entries of another version are not read


class Entries:
    """The entries of one origin: everything but the prompts that statistics depend on."""

    def __init__(self, directory: Path, origin: Mapping[str, object], prompts: Sequence[str]):
        self.origin = json.dumps({"form": VERSION, **origin}, sort_keys=True)
        self.folder, self.prompts = directory / digest(self.origin)[:32], prompts

    def path(self, segment: range) -> Path:
        """The file of the entry for these prompts."""
        return self.folder / f"{segment.start:05}-{segment.stop:05}.safetensors"

    def metadata(self, segment: range, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The header of an entry: ``origin`` and ``prompts`` as JSON, and a ``digest`` of these and of the tensors."""
        texts = list(self.prompts[segment.start : segment.stop])
        prompts = json.dumps({"first": segment.start, "last": segment.stop - 1, "texts": texts})
        return {"digest": content_digest(self.origin, prompts, tensors), "origin": self.origin, "prompts": prompts}

    def longest(self, start: int, stop: int) -> tuple[range, Statistics] | None:
        """The longest undamaged entry from prompt ``start`` on that ends at ``stop`` or before, or None."""
        names = [path.stem.partition("-")[2] for path in self.folder.glob(f"{start:05}-*.safetensors")]
        ends = [int(name) for name in names if name.isdecimal()]
        for end in sorted((end for end in ends if start < end <= stop), reverse=True):
            if (statistics := self.read(range(start, end))) is not None:
                return range(start, end), statistics
        return None

    def read(self, segment: range) -> Statistics | None:
        """The statistics of these prompts; None, with a warning, when the entry is damaged or of another origin."""
        path = self.path(segment)
        try:
            stored, metadata = read_header(whole_file(path))
            tensors = {name: tensor.read() for name, tensor in stored.items()}
        except (OSError, SdQuantError) as error:
            LOG.warning("the cached statistics %s cannot be read (%s); they are collected again", path, error)
            return None
        if metadata != self.metadata(segment, tensors):
            LOG.warning("the cached statistics %s are damaged or of another origin; they are collected again", path)
            return None
        return unpack(tensors)

    @contextmanager
    def claimed(self, segments: Sequence[range]) -> Iterator[range | None]:
        """Hold in the block the lock of the first of ``segments`` without an entry and without another process at it.

        Yields the segment; None where another process has made it meanwhile, if need be after a wait for the first.
        """
        absent = [segment for segment in segments if segment == segments[0] or not self.path(segment).exists()]
        locks = [self.lock(segment) for segment in absent]
        with first_free(locks, "waiting for another process, which calibrates the same") as number:
            segment = absent[number]
            first = number == 0  # whose entry may be there and damaged
            made = self.longest(segment.start, segment.stop) if first else self.path(segment).exists()
            yield None if made else segment

    def lock(self, segment: range) -> Path:
        return self.folder / f".{self.path(segment).stem}.lock"

    def write(self, segment: range, statistics: Statistics) -> None:
        """Write an entry. The caller holds the segment's lock, so partial files are of killed processes."""
        for abandoned in self.folder.glob(f".{self.path(segment).name}.*.part"):
            abandoned.unlink()
        # ordered as the safetensors library does, so that equal statistics are equal bytes
        tensors = dict(sorted(pack(statistics).items(), key=lambda item: (-item[1].element_size(), item[0])))
        stored = {name: lazy(tensor) for name, tensor in tensors.items()}
        write_safetensors(self.path(segment), stored, metadata=self.metadata(segment, tensors))


def content_digest(origin: str, prompts: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of an entry's origin and prompts and of its tensors: names, dtypes, shapes and bytes."""
    content = hashlib.sha256(digest(origin, prompts).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        content.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content.update(bytes_of(tensor))
    return content.hexdigest()


def pack(statistics: Statistics) -> dict[str, torch.Tensor]:
    """The tensors of an entry: ``linear|<layer>|amax``, ``conv|<layer>|rows``, ``call|<input>|priority``, ...

    ``hessian|<layer>,<layer>|blocks`` is the Hessian of layers that read one tensor, ``peak|<part>|<place>`` the
    largest magnitude of a part's activations, a number. Names of another denoiser begin with ``<part>:``.
    """
    tensors: dict[str, torch.Tensor] = {}
    readers: dict[int, list[str]] = {}
    for name, layer in statistics.layers.items():
        found = {"amax": layer.amax, "rows": layer.rows.values, "priority": layer.rows.priority, "folds": layer.folds}
        tensors |= {f"{layer.kind}|{name}|{key}": each.contiguous() for key, each in found.items() if each is not None}
        if layer.hessian is not None:
            readers.setdefault(id(layer.hessian), []).append(name)
    for names in readers.values():
        tensors[f"hessian|{','.join(sorted(names))}|blocks"] = statistics.layers[names[0]].hessian.contiguous()
    for name, sample in statistics.calls.items():
        tensors |= {f"call|{name}|rows": sample.values.contiguous(), f"call|{name}|priority": sample.priority}
    for part, own in statistics.parts.items():
        tensors |= {key.replace("|", f"|{part}:", 1): tensor for key, tensor in pack(own).items()}
    for part, peak in statistics.peaks.items():
        tensors[f"peak|{part}|{peak.place}"] = torch.tensor(peak.largest, dtype=torch.float64)
    return tensors


def unpack(tensors: Mapping[str, torch.Tensor]) -> Statistics:
    """The statistics in the tensors of ``pack``. The order of layers is not kept."""
    statistics, own = Statistics({}, {}), {key: each for key, each in tensors.items() if ":" not in key.split("|")[1]}
    for begin in dict.fromkeys(key[key.index("|") : key.index(":") + 1] for key in tensors if key not in own):
        of_part = {key.replace(begin, "|", 1): tensor for key, tensor in tensors.items() if begin in key}
        statistics.parts[begin[1:-1]] = unpack(of_part)
    tensors = own
    for key in tensors:
        kind, name, what = key.split("|")
        if kind == "peak":
            statistics.peaks[name] = Peak(what, tensors[key].item())
            continue
        if what != "rows":
            continue
        sample = Sample(tensors[key], tensors[f"{kind}|{name}|priority"])
        if kind == "call":
            statistics.calls[name] = sample
        else:
            folds = tensors.get(f"{kind}|{name}|folds")
            statistics.layers[name] = LayerStatistics(kind, tensors[f"{kind}|{name}|amax"], sample, folds)
    for key in tensors:
        kind, names, _ = key.split("|")
        for name in names.split(",") if kind == "hessian" else ():
            statistics.layers[name].hessian = tensors[key]
    return statistics
