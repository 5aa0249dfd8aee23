"""Draws pictures from a handed-over folder, with nothing but what its consumer installs: no module of this project.

It is run in the consumer's own environment, as ``python draw.py <request.json>``. The request has the ``code`` that
opens the result, to be run in ``folder``, the ``target``, the ``prompts``, the call's ``options``, the files of the
``latents`` to start from and of the ``pictures`` to write, both .npy, and the file of the ``facts`` to write, JSON.
OpenVINO GenAI's environment has neither torch nor diffusers.
"""

import json
import os
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

INTEGER_KERNELS = {"ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearConv", "QLinearMatMul"}
PACKAGES = {
    "openvino": ("optimum-intel", "openvino", "diffusers", "transformers", "torch"),
    "onnx": ("optimum-onnx", "onnxruntime", "diffusers", "transformers", "torch"),
    "genai": ("openvino-genai", "openvino-tokenizers", "openvino"),
}


def denoiser_of(pipe: Any) -> str:
    return "unet" if getattr(pipe, "unet", None) is not None else "transformer"


def openvino_kernels(pipe: Any) -> Counter:
    """Convolutions and matrix products of the compiled denoiser, by the precision of their kernels."""
    kinds = ("Convolution", "FullyConnected", "MatMul")
    infos = [layer.get_rt_info() for layer in getattr(pipe, denoiser_of(pipe)).request.get_runtime_model().get_ops()]
    infos = [info for info in infos if info["layerType"].astype(str) in kinds]
    return Counter(info["primitiveType"].astype(str).rpartition("_")[2].lower() for info in infos)


def onnx_kernels(pipe: Any) -> dict[str, int]:
    """The nodes of the denoiser as ONNX Runtime optimizes it, by their kind."""
    import onnx
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.log_severity_level = 3  # it warns that a file optimized for this processor is for no other
    with TemporaryDirectory() as temporary:
        options.optimized_model_filepath = str(Path(temporary) / "optimized.onnx")
        InferenceSession(f"onnx/{denoiser_of(pipe)}/model.onnx", options, providers=["CPUExecutionProvider"])
        nodes = onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    counted = INTEGER_KERNELS | {"Conv", "MatMul", "FusedConv", "FusedMatMul", "Gemm", "NhwcFusedConv"}
    return {kind: count for kind, count in Counter(node.op_type for node in nodes).items() if kind in counted}


def by_diffusers(pipe: Any, request: dict) -> np.ndarray:
    import torch

    torch.set_num_threads(1)
    pipe.set_progress_bar_config(disable=True)
    dtype = getattr(getattr(pipe, denoiser_of(pipe)), "dtype", torch.float32)
    latents = torch.from_numpy(np.load(request["latents"])).to(dtype)
    if hasattr(pipe, "_pack_latents"):  # Flux's
        latents = pipe._pack_latents(latents, *latents.shape)
    pictures = pipe(request["prompts"], latents=latents, output_type="np", **request["options"]).images
    return (pictures * 255).round().astype(np.uint8)


def by_genai(pipe: Any, request: dict) -> np.ndarray:
    """GenAI takes one prompt at a time, and the noise from a generator of random numbers."""
    import openvino
    import openvino_genai

    class Given(openvino_genai.Generator):
        """The ``noise`` [C, h, w] of one picture in place of random numbers."""

        def __init__(self, noise: np.ndarray):
            super().__init__()
            self.noise = noise

        def next(self) -> float:
            raise NotImplementedError("a picture takes all of its noise at once")

        def randn_tensor(self, shape: openvino.Shape) -> openvino.Tensor:
            return openvino.Tensor(self.noise.reshape(tuple(shape)).copy())

        def seed(self, new_seed: int) -> None:
            """Noise given as tensors needs no random generator."""

    drawn = [
        pipe.generate(prompt, generator=Given(noise), **request["options"]).data.copy()  # it is written over
        for prompt, noise in zip(request["prompts"], np.load(request["latents"]), strict=True)
    ]
    return np.concatenate(drawn)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.chdir(request["folder"])
    opened: dict = {}
    exec(request["code"], opened)
    pipe, target = opened["pipeline"], request["target"]
    genai = type(pipe).__module__.startswith("openvino_genai")
    np.save(request["pictures"], (by_genai if genai else by_diffusers)(pipe, request))
    packages = PACKAGES.get("genai" if genai else target, ())
    facts = {"class": type(pipe).__name__, "versions": ", ".join(f"{name} {version(name)}" for name in packages)}
    if packages and not genai:
        facts["kernels"] = (openvino_kernels if target == "openvino" else onnx_kernels)(pipe)
    Path(request["facts"]).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
