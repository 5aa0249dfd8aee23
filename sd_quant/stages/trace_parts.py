"""The process of ``trace_ahead``: traces parts into the cache. The request comes on standard input."""

import json
import sys
import tempfile
from pathlib import Path

import diffusers.models.unets.unet_2d_condition  # noqa: F401, what is imported before the request comes
import onnxscript.optimizer  # noqa: F401
import transformers.models.clip.modeling_clip  # noqa: F401

from sd_quant.cache import Cache
from sd_quant.config import Model
from sd_quant.stages.export_onnx import provide_graph
from sd_quant.stages.session import open_unchecked


def main() -> None:
    text = sys.stdin.read()
    if not text:  # the job has ended, or has nothing to trace
        return
    request = json.loads(text)
    directory, limit_bytes = request["cache"]
    checkpoint, cache = open_unchecked(Model(**request["model"])).checkpoint, Cache(Path(directory), limit_bytes)
    for part in request["parts"]:
        with tempfile.TemporaryDirectory() as folder:
            provide_graph(checkpoint, request["sha256"], part, Path(folder), cache)


if __name__ == "__main__":
    main()
