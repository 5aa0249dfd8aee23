"""Results that jobs of one model share through the cache, and how they divide the work where several begin at once."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_quant.cache import Cache
from sd_quant.engines import RUNTIMES
from sd_quant.files import digest, read_regular, temporary_folder
from sd_quant.report.record import weights_sha256
from sd_quant.source import source_digest

FOUND = "found.json"
TOGETHER = 16  # entries into which many measurements are divided, and the most measurements of an entry


@dataclass(frozen=True)
class Shared:
    """The cache, as a job uses it."""

    facts: dict  # of the job, which keys are made of
    directory: Path  # for temporary files
    cache: Cache

    def made_of(self, *modules: str) -> dict[str, Any]:
        """What every result depends on: the model, the code of these ``modules``, packages and the machine."""
        packages = dict.fromkeys(("torch", "diffusers", "transformers", *(row.package for row in RUNTIMES.values())))
        return {
            "checkpoint": weights_sha256(self.facts),
            "source": source_digest("checkpoints.kinds", *modules),
            "versions": {name: self.facts["versions"].get(name) for name in packages},
            # processors round differently
            "machine": [self.facts["machine"][name] for name in ("cpu", "usable_cores", "gpus")],
        }

    def found(self, kind: str, origin: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """The result of this ``origin``: from the cache, or else what ``make`` returns, which JSON can hold."""
        return self.all_found(kind, {"one": origin}, lambda name: make())["one"]

    def all_found(
        self, kind: str, origins: Mapping[str, Mapping[str, Any]], make: Callable[[str], Any]
    ) -> dict[str, Any]:
        """The results of several origins by name, as ``found``; jobs that want the same make them together."""
        with temporary_folder(self.directory) as temporary:
            folder = Path(temporary)

            def write(name: str, made: Path) -> None:
                (made / FOUND).write_text(json.dumps({"found": make(name)}), encoding="utf-8")

            self.cache.provide_all(kind, origins, folder, write)
            return {name: json.loads(read_regular(folder / name / FOUND))["found"] for name in origins}

    def measured(
        self,
        origin: Mapping[str, Any],
        choices: Mapping[str, Collection[str]],
        error: Callable[[Collection[str]], float],
    ) -> dict[str, float]:
        """The ``error`` with each choice of layers quantized: with an ``origin`` a ``sensitivity.Measure``."""
        names, size = list(choices), min(TOGETHER, max(1, len(choices) // TOGETHER))
        parts = {str(first): names[first : first + size] for first in range(0, len(names), size)}
        origins = {
            part: {**origin, "quantized": {each: digest(*choices[each]) for each in own}} for part, own in parts.items()
        }
        found = self.all_found(
            "sensitivities", origins, lambda part: {each: error(choices[each]) for each in parts[part]}
        )
        return {name: value for part in parts for name, value in found[part].items()}
