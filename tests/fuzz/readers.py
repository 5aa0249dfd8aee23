"""Every reader of files that come from strangers: a small sound input for each, and how it is damaged."""

from pathlib import Path

from .harness import Reader
from .of_artifacts import cache_entry, onnx_graph, plan_record
from .of_checkpoints import archives, nemo, observed, pipeline, safetensors, weights
from .of_denoisers import denoisers
from .of_images import images, lora, noise
from .of_prompts_and_statistics import prompts, statistics
from .of_records import configuration, records, report


def make_readers(scratch: Path) -> list[Reader]:
    """With their sound inputs made below ``scratch``."""
    scratch.mkdir(parents=True, exist_ok=True)
    return [
        archives(), weights(), nemo(scratch), safetensors(), pipeline(scratch), observed(scratch / "observed"),
        prompts(), statistics(scratch), records(), report(), configuration(), onnx_graph(), noise(), lora(), images(),
        plan_record(), cache_entry(), *denoisers(scratch / "denoisers"),
    ]  # fmt: skip
