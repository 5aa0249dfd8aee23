"""Cache of calibration statistics on disk, in a folder named by a hash of all they depend on except the prompts.

An entry is a safetensors file, which executes nothing when read, with the statistics of consecutive prompts. A larger
calib_size continues where a smaller one ended, and a smaller one uses the entries up to a snapshot of a larger one. The
header contains the origin (what the statistics depend on, except the prompts), the prompts, and a digest of both and of
the tensors. Prompts of an entry that is damaged or of another origin are calibrated again.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from sd_quant.cache import locked
from sd_quant.errors import SdQuantError
from sd_quant.files import digest
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_header, write_safetensors
from sd_quant.files.tensors import bytes_of, lazy
from sd_quant.quantization.statistics import LayerStatistics, Peak, Sample, Statistics

LOG = logging.getLogger(__name__)
VERSION = 2  # of an entry's layout, in the header as "form"; entries of another version are not read


class Entries:
    """The cache entries of one origin, that is, of everything that statistics depend on except the prompts."""

    def __init__(self, directory: Path, origin: Mapping[str, object], prompts: Sequence[str]):
        self.origin = json.dumps({"form": VERSION, **origin}, sort_keys=True)
        self.folder, self.prompts = directory / digest(self.origin)[:32], prompts

    def path(self, segment: range) -> Path:
        """Return the file of the entry for the prompts of ``segment``."""
        return self.folder / f"{segment.start:05}-{segment.stop:05}.safetensors"

    def metadata(self, segment: range, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return an entry's header: ``origin`` and ``prompts`` as JSON, and a ``digest`` of these and the tensors."""
        texts = list(self.prompts[segment.start : segment.stop])
        prompts = json.dumps({"first": segment.start, "last": segment.stop - 1, "texts": texts})
        return {"digest": content_digest(self.origin, prompts, tensors), "origin": self.origin, "prompts": prompts}

    def longest(self, start: int, stop: int) -> tuple[range, Statistics] | None:
        """Read the longest undamaged entry that begins at prompt ``start`` and ends at most at ``stop``, or None."""
        names = [path.stem.partition("-")[2] for path in self.folder.glob(f"{start:05}-*.safetensors")]
        ends = [int(name) for name in names if name.isdecimal()]
        for end in sorted((end for end in ends if start < end <= stop), reverse=True):
            if (statistics := self.read(range(start, end))) is not None:
                return range(start, end), statistics
        return None

    def read(self, segment: range) -> Statistics | None:
        """Read the statistics of these prompts; None, with a warning, if the entry is damaged or of another origin."""
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
    def claimed(self, segment: range) -> Iterator[bool]:
        """Lock ``segment`` in the ``with`` block, maybe after another process; yield whether it has no entry yet."""
        with locked(self.lock(segment), "waiting for another process, which calibrates the same"):
            yield self.longest(segment.start, segment.stop) is None

    def lock(self, segment: range) -> Path:
        return self.folder / f".{self.path(segment).stem}.lock"

    def write(self, segment: range, statistics: Statistics) -> None:
        """Write an entry. The caller must hold the segment's lock; partial files of killed processes are deleted."""
        for abandoned in self.folder.glob(f".{self.path(segment).name}.*.part"):
            abandoned.unlink()
        # ordered as the safetensors library does, so that equal statistics are equal bytes
        tensors = dict(sorted(pack(statistics).items(), key=lambda item: (-item[1].element_size(), item[0])))
        stored = {name: lazy(tensor) for name, tensor in tensors.items()}
        write_safetensors(self.path(segment), stored, metadata=self.metadata(segment, tensors))


def content_digest(origin: str, prompts: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Compute the SHA-256 of an entry's origin, prompts and tensors (names, dtypes, shapes and bytes)."""
    content = hashlib.sha256(digest(origin, prompts).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        content.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content.update(bytes_of(tensor))
    return content.hexdigest()


def pack(statistics: Statistics) -> dict[str, torch.Tensor]:
    """Convert to named tensors: ``linear|<layer>|amax``, ``conv|<layer>|rows``, ``call|<input>|priority``, ...

    ``peak|<part>|<place>`` is a scalar, the largest magnitude of a part's activations. Names of a further denoiser
    begin with ``<part>:``.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in statistics.layers.items():
        found = {"amax": layer.amax, "rows": layer.rows.values, "priority": layer.rows.priority, "folds": layer.folds}
        tensors |= {f"{layer.kind}|{name}|{key}": each.contiguous() for key, each in found.items() if each is not None}
    for name, sample in statistics.calls.items():
        tensors |= {f"call|{name}|rows": sample.values.contiguous(), f"call|{name}|priority": sample.priority}
    for part, own in statistics.parts.items():
        tensors |= {key.replace("|", f"|{part}:", 1): tensor for key, tensor in pack(own).items()}
    for part, peak in statistics.peaks.items():
        tensors[f"peak|{part}|{peak.place}"] = torch.tensor(peak.largest, dtype=torch.float64)
    return tensors


def unpack(tensors: Mapping[str, torch.Tensor]) -> Statistics:
    """Convert the tensors of ``pack`` back to statistics. The order of layers is not kept."""
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
    return statistics
