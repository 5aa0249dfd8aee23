"""Draws pictures from a handed-over folder, with nothing but what its consumer installs: no module of this project.

It is run in the consumer's own environment, as ``python draw.py <request.json>``. The request has the ``code`` that
opens the result, to be run in ``folder``, the ``target``, the ``prompts``, the call's ``options``, the files of the
``latents`` to start from and of the ``pictures`` to write, both .npy, and the file of the ``facts`` to write, JSON.
"""

import json
import os
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

INTEGER_KERNELS = {"ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv", "QLinearMatMul"}
PACKAGES = {
    "openvino": ("optimum-intel", "openvino", "diffusers", "transformers", "torch"),
    "onnx": ("optimum-onnx", "onnxruntime", "diffusers", "transformers", "torch"),
}


def denoiser_of(pipe) -> str:
    return "unet" if getattr(pipe, "unet", None) is not None else "transformer"


def openvino_facts(pipe) -> dict:
    """Convolutions and matrix products of the compiled denoiser, by the precision of their kernels."""
    kinds = ("Convolution", "FullyConnected", "MatMul")
    infos = [layer.get_rt_info() for layer in getattr(pipe, denoiser_of(pipe)).request.get_runtime_model().get_ops()]
    infos = [info for info in infos if info["layerType"].astype(str) in kinds]
    return {
        "the denoiser's layers by kernel": Counter(
            info["primitiveType"].astype(str).rpartition("_")[2].lower() for info in infos
        )
    }


def onnx_facts(pipe) -> dict:
    """The nodes of the denoiser as ONNX Runtime optimizes it, by their kind."""
    import onnx
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.log_severity_level = 3  # it warns that a file optimized for this processor is for no other
    with TemporaryDirectory() as temporary:
        options.optimized_model_filepath = str(Path(temporary) / "optimized.onnx")
        InferenceSession(f"onnx/{denoiser_of(pipe)}/model.onnx", options, providers=["CPUExecutionProvider"])
        nodes = onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    kinds = Counter(node.op_type for node in nodes)
    counted = INTEGER_KERNELS | {"Conv", "MatMul", "FusedConv", "FusedMatMul", "Gemm", "NhwcFusedConv"}
    return {"the denoiser's layers by kernel": {kind: count for kind, count in kinds.items() if kind in counted}}


FACTS = {"openvino": openvino_facts, "onnx": onnx_facts}


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    os.chdir(request["folder"])
    opened: dict = {}
    exec(request["code"], opened)
    pipe, target = opened["pipeline"], request["target"]
    pipe.set_progress_bar_config(disable=True)
    options = {"output_type": "np", **request["options"]}

    def draw() -> np.ndarray:
        dtype = getattr(getattr(pipe, denoiser_of(pipe)), "dtype", torch.float32)
        latents = torch.from_numpy(np.load(request["latents"])).to(dtype)
        if hasattr(pipe, "_pack_latents"):  # Flux's
            latents = pipe._pack_latents(latents, *latents.shape)
        return pipe(request["prompts"], latents=latents, **options).images

    pictures = draw()
    start = time.perf_counter()
    again = draw()
    seconds = time.perf_counter() - start
    np.save(request["pictures"], (pictures * 255).round().astype(np.uint8))
    facts = {
        "class": type(pipe).__name__,
        "seconds a picture": round(seconds / len(pictures), 3),
        "drawn twice it is the same": bool(np.array_equal(pictures, again)),
    }
    if target in PACKAGES:
        facts["versions"] = ", ".join(f"{name} {version(name)}" for name in PACKAGES[target])
        facts |= FACTS[target](pipe)
    Path(request["facts"]).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
