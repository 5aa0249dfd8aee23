"""Find the GPUs of a cluster whose compute capability is too low for a job, by the GPUs' names in the cluster.

An unknown name, such as a site's own, passes: a job that starts on a GPU without support for its formats stops with an
error. Alternative not taken: to request GPUs known to be new enough, which would exclude GPUs of unknown names.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sd_quant.engines import RUNTIMES
from sd_quant.errors import ConfigError
from sd_quant.quantization.formats import FORMATS, min_compute_capability

# By a word of a GPU's name: https://developer.nvidia.com/cuda-gpus and /cuda/gpus/legacy. "RTX 6000" alone is a name of
# three generations.
COMPUTE_CAPABILITY = {
    "p100": 60, "p40": 61, "v100": 70, "t4": 75, "a100": 80, "a800": 80, "a30": 80, "a2": 86, "a10": 86, "a10g": 86,
    "a16": 86, "a40": 86, "a6000": 86, "3090": 86, "l4": 89, "l40": 89, "l40s": 89, "4090": 89, "h20": 90, "h100": 90,
    "h200": 90, "gh200": 90, "b200": 100, "gb200": 100, "b300": 103, "gb300": 103, "5090": 120,
}  # fmt: skip


@dataclass(frozen=True)
class Need:
    """Compute capability that a job's number formats need from its GPU."""

    compute_capability: int = 0  # 89 for 8.9
    required: bool = False  # False: on an older GPU the job takes another engine

    def too_old(self, name: str) -> bool:
        """Check whether the GPU ``name``, such as ``nvidia_a100-sxm4-80gb``, is known to have too low a capability."""
        words = re.split(r"[^a-z0-9]+", name.lower())
        return any(COMPUTE_CAPABILITY.get(word, math.inf) < self.compute_capability for word in words)


def need_of(job: Any) -> Need:
    """Return what a job needs from its GPU; ``Need()``, nothing, if it has no formats or its engine uses no GPU."""
    if not hasattr(job, "formats"):
        return Need()
    formats, runtime = job.formats(), RUNTIMES[job.infer.engine]
    automatic = job.infer.chosen_because is not None  # here, which may be a machine without a GPU
    if automatic or runtime.file == "plan":
        return Need(min_compute_capability(set().union(*formats.values())), not automatic)
    if runtime.file is None:
        capabilities = (FORMATS[name].torch_compute_capability or (0, 0) for name in formats["inputs"])
        major, minor = max(capabilities, default=(0, 0))
        return Need(10 * major + minor, True)
    return Need()


def places_too_old(needs: Mapping[str, Need], places: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Return, by job, those ``places`` (nodes, with names of their GPUs) whose GPUs are all too old; [] if all are.

    Raises ConfigError, naming the job, if all places are too old for a job that requires its capability.
    """
    with_gpus = {place: names for place, names in places.items() if names}
    found = {
        job: sorted(place for place, names in with_gpus.items() if all(map(need.too_old, names)))
        for job, need in needs.items()
    }
    for job, old in found.items():
        if with_gpus and len(old) == len(with_gpus):
            if needs[job].required:
                there = sorted(set().union(*with_gpus.values()))
                raise ConfigError(
                    f"job {job} takes a GPU of compute capability {needs[job].compute_capability / 10:g}, and the "
                    f"cluster has {', '.join(there)}; choose another preset or engine"
                )
            found[job] = []
    return found
