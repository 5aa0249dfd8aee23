"""Every reader of files that come from strangers: a small sound input for each, and how it is damaged."""

from pathlib import Path

from . import of_checkpoints, of_runs
from .harness import Reader
from .of_denoisers import denoisers


def make_readers(scratch: Path) -> list[Reader]:
    """With their sound inputs made below ``scratch``."""
    scratch.mkdir(parents=True, exist_ok=True)
    return [
        of_checkpoints.archives(), of_checkpoints.weights(), of_checkpoints.nemo(scratch), of_checkpoints.safetensors(),
        of_checkpoints.pipeline(scratch), of_checkpoints.observed(scratch / "observed"), of_runs.prompts(),
        of_runs.statistics(scratch), of_runs.records(), of_runs.report(), of_runs.configuration(),
        of_runs.onnx_graph(), of_runs.noise(), of_runs.lora(), of_runs.images(), of_runs.plan_record(),
        of_runs.cache_entry(), *denoisers(scratch / "denoisers"),
    ]  # fmt: skip
