"""Graphs traced by processes of their own while the model is calibrated.

A trace takes the network's structure alone and one core for half a minute, of Python that no thread can run beside. The
denoiser has a process and the other parts share one. They leave graphs in the cache, where the export finds them, or
waits for them at the cache's lock. A process that fails leaves nothing, and the export traces that part itself and says
what is wrong. They have the lowest priority, because threads of torch that wait for each other lose most by sharing a
core. The road not taken is to calibrate with a thread less meanwhile: on two cores that takes 7 seconds more, and a
trace is only 4 seconds earlier (benchmarks/quickstart.py).
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sd_quant.cache import Cache
from sd_quant.config import Model
from sd_quant.devices import threads
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.stages.export_onnx import graph_origin, provide_graph
from sd_quant.stages.load import open_model

LOWEST_PRIORITY = 19


@contextmanager
def traced_ahead(model: Model, checkpoint: Checkpoint, checkpoint_sha256: str, cache: Cache) -> Iterator[None]:
    """While the block runs, parts are traced whose graphs the ``cache`` lacks; none where a job has one thread only."""
    parts = checkpoint.parts() if cache.directory is not None and threads() > 1 else ()
    missing = [part for part in parts if not cache.holds("graph", graph_origin(checkpoint, checkpoint_sha256, part))]
    denoiser = [part for part in missing if part == checkpoint.family.DENOISER]
    with ExitStack() as processes:
        for group in (denoiser, [part for part in missing if part not in denoiser]):
            if group:
                processes.callback(end, start(model, checkpoint_sha256, cache, group))
        yield


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def start(model: Model, checkpoint_sha256: str, cache: Cache, parts: list[str]) -> subprocess.Popen:
    """A process that traces these parts."""
    request = {
        "model": dataclasses.asdict(model),
        "sha256": checkpoint_sha256,
        "cache": [str(cache.directory), cache.limit_bytes],
        "parts": parts,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        text=True,
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        json.dump(request, pipe)
    return process


def main() -> None:
    """What such a process does: the request comes on standard input."""
    request = json.load(sys.stdin)
    os.nice(LOWEST_PRIORITY)
    directory, limit_bytes = request["cache"]
    checkpoint, cache = open_model(Model(**request["model"])), Cache(Path(directory), limit_bytes)
    for part in request["parts"]:
        with tempfile.TemporaryDirectory() as folder:
            provide_graph(checkpoint, request["sha256"], part, Path(folder), cache)


if __name__ == "__main__":
    main()
