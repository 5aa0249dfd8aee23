"""Sections of knobs: ``timing``, ``judge`` (third-party checkpoints), ``metrics`` (scores of images) and ``cache``."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sd_quant.files import check_writable
from sd_quant.knobs import CONFIDENCE, FROM_0, SHARE, Called, between, check, check_unused
from sd_quant.metrics import NAMED, scoring
from sd_quant.places import existing, folder_name, input_path, output_path
from sd_quant.report.record import CANDIDATE


@dataclass(slots=True)
class Timing:
    """When timing ends, after at least ``infer.num_timed_runs`` rounds, each of which times all compared engines."""

    half_width: Annotated[
        float, SHARE, "half the width of a speed-up's interval, as a share of it, at which timing may end"
    ]
    budget_s: Annotated[
        float, between(0, 1e9), "seconds per compared engine after which no round starts; of a sweep for five at most"
    ]


@dataclass(slots=True)
class Judge:
    """How third-party quantized checkpoints (candidates) are compared, see ``sd_quant.interchange``."""

    candidates: Annotated[list[str], Called("candidates"), "files and folders of third-party checkpoints, or our runs"]
    layers: Annotated[int, FROM_0, "layers of each, by their errors, that are put into the network one at a time"]
    runtimes: Annotated[bool, "whether a checkpoint's own library, if it is installed, makes images and is timed"]
    trust_runs: Annotated[bool, "whether the ONNX file of a run is executed: only for runs of your own"]
    confidence: Annotated[float, CONFIDENCE, "at which candidates are told apart, for all of them together"]

    def named(self) -> dict[str, Path]:
        """Return the path of each candidate by a unique name, which tables and result folders use.

        A name is the last part of the path. If two are equal, all get the parent folder in front, then a number too.
        """
        paths = [input_path(path) for path in self.candidates]
        plain = [Path(os.path.normpath(path)) for path in paths]
        longer = [f"{path.parent.name}-{path.name}" for path in plain]
        numbered = [f"{number}-{name}" for number, name in enumerate(longer, start=1)]
        forms = ([folder_name(name) for name in form] for form in ([path.name for path in plain], longer, numbered))
        names = next(names for names in forms if len(set(names)) == len(names))
        return dict(zip(names, paths, strict=True))

    def planned(self) -> list[dict]:
        """Return an entry of ``sweep.json``, the list of a sweep's jobs, for each candidate."""
        return [{"name": name, "varied": {CANDIDATE: name}} for name in self.named()]

    def check_files(self) -> None:
        """Raise ConfigError for a candidate that is missing, is a pipe or a device, or is listed twice."""
        for path in self.candidates:
            found = existing("candidates", path, "existing files and folders")
            check(found.is_file() or found.is_dir(), "candidates", path, "files and folders, and no pipe or device")
        once = len(set(map(input_path, self.candidates))) == len(self.candidates)
        check(once, "candidates", self.candidates, "each of them once")


@dataclass(slots=True)
class CacheFolder:
    """A folder of results that runs share: statistics, graphs, unquantized parts and plans, full-precision images."""

    dir: Annotated[str | None, "where it is kept; null: nothing is kept or reused"]
    limit_gb: Annotated[float, between(0, 1e9), "above it the least recently used entries are removed; statistics stay"]

    def check_files(self) -> None:
        if self.dir is not None:
            check_writable(output_path(self.dir), "cache.dir", "the cache")


@dataclass(slots=True)
class Metrics:
    """Optional scores: each is computed only if its files, which no package installs, are named or its switch is on."""

    clip_weights: Annotated[str | None, "for CLIP scores: a folder of transformers' CLIPModel"]
    pickscore_weights: Annotated[str | None, "for PickScore: a folder with PickScore_v1"]
    hps_weights: Annotated[str | None, "for HPSv2 or 2.1: HPS_v2_compressed.pt or HPS_v2.1_compressed.pt"]
    image_reward_weights: Annotated[str | None, "for ImageReward: a folder with ImageReward.pt and BERT's vocab.txt"]
    dino_weights: Annotated[str | None, "for the distance from full precision in features: a folder with DINOv2"]
    fid_references: Annotated[str | None, "for FID: a folder of photographs, or an .npz with mu and sigma"]
    ocr: Annotated[bool, "whether words that prompts ask for in quotes are read in the images"]

    def check_sizes(self, sizes: object) -> None:
        """Raise ConfigError for CLIP scores or FID, which need images of one size, unless ``sizes`` is None."""
        because = "this score needs images of one size, and infer.sizes is given"
        check_unused(self, "metrics.", (sizes is not None, dict.fromkeys(("clip_weights", "fid_references")), because))

    def check_files(self) -> None:
        for key, knob in NAMED.items():
            if given := getattr(self, knob):
                with scoring(key) as score:
                    if isinstance(given, str):
                        path = existing(f"metrics.{knob}", given, score.weights or "an existing path, or null")
                        if score.weights:
                            score.opener(path)
                    score.check_packages()
