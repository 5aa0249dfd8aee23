"""Draws pictures from a handed-over folder, with nothing but what its consumer installs: no module of this project.

It is run by ``check`` in the consumer's own environment, as ``python draw.py <request.json>``. The request names the
``target``, the ``folder``, the ``prompts``, the ``settings`` of the runtime, the call's ``options``, the files of the
``latents`` to start from and of the ``pictures`` to write, both .npy, and the file of the ``facts`` to write, JSON.
"""

import json
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


def open_openvino(folder: str, settings: dict):
    from optimum.intel import OVStableDiffusionXLPipeline

    return OVStableDiffusionXLPipeline.from_pretrained(folder, ov_config=settings)


def openvino_layers(compiled) -> dict[str, int]:
    """Convolutions and matrix products of the compiled UNet, by the precision of their kernels."""
    kinds = ("Convolution", "FullyConnected", "MatMul")
    infos = [layer.get_rt_info() for layer in compiled.get_runtime_model().get_ops()]
    infos = [info for info in infos if info["layerType"].astype(str) in kinds]
    return Counter(info["primitiveType"].astype(str).rpartition("_")[2].lower() for info in infos)


def openvino_facts(pipe, settings: dict) -> dict:
    import openvino

    by_default = {name: value for name, value in settings.items() if name != "LP_TRANSFORMS_MODE"}
    compiled = openvino.Core().compile_model(pipe.unet.model, "CPU", by_default)
    return {
        "UNet's layers by kernel with these settings": openvino_layers(pipe.unet.request),
        "UNet's layers by kernel without LP_TRANSFORMS_MODE": openvino_layers(compiled),
    }


def open_onnx(folder: str, settings: dict):
    from onnxruntime import SessionOptions
    from optimum.onnxruntime import ORTStableDiffusionXLPipeline

    options = SessionOptions()
    for name, value in settings.items():
        options.add_session_config_entry(name, value)
    return ORTStableDiffusionXLPipeline.from_pretrained(folder, session_options=options)


def onnx_facts(folder: str, settings: dict) -> dict:
    import onnx
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.log_severity_level = 3  # it warns that a file optimized for this processor is for no other
    for name, value in settings.items():
        options.add_session_config_entry(name, value)
    with TemporaryDirectory() as temporary:
        options.optimized_model_filepath = str(Path(temporary) / "optimized.onnx")
        InferenceSession(Path(folder) / "unet/model.onnx", options, providers=["CPUExecutionProvider"])
        nodes = onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    kinds = Counter(node.op_type for node in nodes)
    counted = INTEGER_KERNELS | {"Conv", "MatMul", "FusedConv", "FusedMatMul", "Gemm", "NhwcFusedConv"}
    return {"UNet's layers by kernel": {kind: count for kind, count in kinds.items() if kind in counted}}


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    folder, settings = request["folder"], request["settings"]
    pipe = {"openvino": open_openvino, "onnx": open_onnx}[request["target"]](folder, settings)
    pipe.set_progress_bar_config(disable=True)
    latents = torch.from_numpy(np.load(request["latents"]))
    options = {"latents": latents, "output_type": "np", **request["options"]}
    pictures = pipe(request["prompts"], **options).images
    start = time.perf_counter()
    again = pipe(request["prompts"], **options).images
    seconds = time.perf_counter() - start
    np.save(request["pictures"], (pictures * 255).round().astype(np.uint8))
    facts = {
        "versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES[request["target"]]),
        "class": type(pipe).__name__,
        "seconds a picture": round(seconds / len(pictures), 3),
        "drawn twice it is the same": bool(np.array_equal(pictures, again)),
    }
    if request["target"] == "openvino":
        facts |= openvino_facts(pipe, settings)
        # the road to the fastest kernels; with optimum-intel 2.2.0 it is one prompt's, as its VAE gets no other batch
        pipe.reshape(1, options["height"], options["width"], 1)
        pipe.compile()
        options["latents"] = latents[:1]
        pipe(request["prompts"][0], **options)
        start = time.perf_counter()
        fixed = pipe(request["prompts"][0], **options).images
        facts["seconds a picture, reshaped"] = round(time.perf_counter() - start, 3)
        facts["a reshaped pipeline's pixels differ by"] = round(float(np.abs(fixed[0] - pictures[0]).mean()), 5)
    else:
        facts |= onnx_facts(folder, settings)
    Path(request["facts"]).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
