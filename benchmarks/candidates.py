"""Quantizations of the shipped checkpoint by other people's own tools, for ``judge.py``.

    make .venv/.sd-quant-consumers      # the tools, in a folder of their own
    PYTHONPATH=.venv/consumers python benchmarks/candidates.py --out outputs/candidates
    python judge.py 'candidates=[<those that it prints>]' infer.batch_size=8 \\
        infer.prompts=benchmarks/prompts/sdxl_mini_report.txt

Each tool quantizes by its own code and saves by its own code, or, where a format is one of files that others convert
(GGUF, ComfyUI), by the functions that its readers call. Nothing of ours chooses a code or a scale. Each takes the
layers that it takes by default: linears, and convolutions where the tool has them. What is honest about it: all start
from the same weights, fp16 as they are shipped, and none but ModelOpt is calibrated, because none other asks for it.
What is unfair: the checkpoint is small, so blocks of 64 or 256 numbers are a larger part of a row than in SDXL.
A tool that is not installed is left out, and said to be.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor, nn

from sd_quant.calibration.prompts import read_prompts
from sd_quant.checkpoints.convert import convert
from sd_quant.names.sgm import sgm_names
from sd_quant.places import input_path

SHIPPED = "checkpoints/sdxl_mini.nemo"
PREFIX = "model.diffusion_model."  # in a checkpoint for ComfyUI
SMALLEST = 32  # side of a matrix that single files hold quantized
CALIBRATION = "conf/model/prompts/general.txt"
CALIBRATION_PROMPTS, CALIBRATION_STEPS = 8, 10


def open_unet(pipeline: Path, **options) -> UNet2DConditionModel:
    return UNet2DConditionModel.from_pretrained(pipeline / "unet", torch_dtype=torch.float16, **options).eval()


def authors_state(pipeline: Path) -> dict[str, Tensor]:
    """The UNet's weights by Stability AI's keys, as files for ComfyUI have them."""
    state = open_unet(pipeline).state_dict()
    return {key: state[name] for name, key in sgm_names(state).items()}


def is_matrix(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and min(tensor.shape) >= SMALLEST


def gguf_file(kind: str) -> Callable[[Path, Path], Path]:
    """By ``gguf.quants.quantize``: matrices in blocks, convolutions in fp16 and vectors in fp32, as ComfyUI-GGUF."""

    def make(pipeline: Path, target: Path) -> Path:
        import gguf

        types = gguf.GGMLQuantizationType
        path = target.with_suffix(".gguf")
        writer = gguf.GGUFWriter(path, "sdxl")
        for name, tensor in authors_state(pipeline).items():
            stored = types[kind if is_matrix(tensor) else "F16" if tensor.ndim > 1 else "F32"]
            if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0]:
                stored = types["F16"]
            array = gguf.quants.quantize(tensor.float().numpy().astype(np.float32), stored)
            writer.add_tensor(name, array, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def comfy_file(layout: str, mark: str, **options) -> Callable[[Path, Path], Path]:
    """By comfy-kitchen's layouts, whose kernels ComfyUI calls."""

    def make(pipeline: Path, target: Path) -> Path:
        import comfy_kitchen.tensor as kitchen

        tensors: dict[str, Tensor] = {}
        for name, tensor in authors_state(pipeline).items():
            if not is_matrix(tensor) or name.endswith(("attn2.to_k.weight", "attn2.to_v.weight")):
                tensors[PREFIX + name] = tensor
                continue
            quantized = kitchen.QuantizedTensor.from_float(tensor.float(), getattr(kitchen, layout).__name__, **options)
            stored = quantized.state_dict(PREFIX + name)
            tensors |= {each: stored[each].view(torch.uint8) if "e8m0" in str(stored[each].dtype) else stored[each]
                        for each in stored}  # fmt: skip
            text = list(json.dumps({"format": mark}).encode())
            tensors[f"{PREFIX}{name.removesuffix('weight')}comfy_quant"] = torch.tensor(text, dtype=torch.uint8)
        path = target.with_suffix(".safetensors")
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)
        return path

    return make


def cast_file(pipeline: Path, target: Path) -> Path:
    """As many files on the hubs: every matrix and kernel cast to FP8, without scales."""
    tensors = {
        PREFIX + name: tensor.to(torch.float8_e4m3fn) if tensor.ndim > 1 else tensor
        for name, tensor in authors_state(pipeline).items()
    }
    save_file(tensors, path := target.with_suffix(".safetensors"))
    return path


def diffusers_folder(config: Callable[[], object]) -> Callable[[Path, Path], Path]:
    """By diffusers' own way: ``from_pretrained`` with a tool's config, and ``save_pretrained``."""

    def make(pipeline: Path, target: Path) -> Path:
        open_unet(pipeline, quantization_config=config()).save_pretrained(target)
        return target

    return make


def bitsandbytes(**options) -> Callable[[Path, Path], Path]:
    def make(pipeline: Path, target: Path) -> Path:
        from diffusers.quantizers.bitsandbytes import bnb_quantizer

        for kind in (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer):
            kind.validate_environment = lambda *_, **__: None  # diffusers asks for a GPU; bitsandbytes does without
            kind.update_device_map = lambda *_: {"": "cpu"}
        return diffusers_folder(lambda: diffusers.BitsAndBytesConfig(**options))(pipeline, target)

    return make


def sdnq(**options) -> Callable[[Path, Path], Path]:
    def config() -> object:
        os.environ |= {"SDNQ_USE_TORCH_COMPILE": "0", "SDNQ_USE_OPENVINO_MM": "0"}
        from sdnq import SDNQConfig

        return SDNQConfig(**options)

    return diffusers_folder(config)


def torchao(name: str, **options) -> Callable[[Path, Path], Path]:
    def config() -> object:
        import torchao.quantization as ao

        return diffusers.TorchAoConfig(getattr(ao, name)(**options))

    return diffusers_folder(config)


def quanto(weights: str) -> Callable[[Path, Path], Path]:
    return diffusers_folder(lambda: diffusers.QuantoConfig(weights_dtype=weights))


def modelopt(config: str) -> Callable[[Path, Path], Path]:
    """By ``mtq.quantize``, calibrated on images of our calibration prompts, and saved as a Hugging Face folder."""

    def make(pipeline: Path, target: Path) -> Path:
        import modelopt.torch.opt as mto
        import modelopt.torch.quantization as mtq

        mto.enable_huggingface_checkpointing()
        pipe = DiffusionPipeline.from_pretrained(pipeline, torch_dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)
        prompts = read_prompts(input_path(CALIBRATION))[:CALIBRATION_PROMPTS]

        def calibrate(unet: nn.Module) -> None:
            for seed, prompt in enumerate(prompts):
                generator, sampling = torch.Generator().manual_seed(seed), {"height": 64, "width": 64}
                sampling |= {"num_inference_steps": CALIBRATION_STEPS, "guidance_scale": 5.0}
                pipe(prompt, generator=generator, output_type="latent", **sampling)

        mtq.quantize(pipe.unet, getattr(mtq, config), calibrate)
        pipe.unet.half().save_pretrained(target)
        return target

    return make


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MAKERS: dict[str, Callable[[Path, Path], Path]] = {
    **{f"gguf-{kind}": gguf_file(kind) for kind in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")},
    "comfyui-fp8": comfy_file("TensorCoreFP8Layout", "float8_e4m3fn"),
    "comfyui-int8": comfy_file("TensorWiseINT8Layout", "int8_tensorwise", per_channel=True),
    "comfyui-nvfp4": comfy_file("TensorCoreNVFP4Layout", "nvfp4"),
    "comfyui-fp8-cast": cast_file,
    "sdnq-int8": sdnq(weights_dtype="int8"),
    "sdnq-uint4": sdnq(weights_dtype="uint4"),
    "sdnq-uint4-svd": sdnq(weights_dtype="uint4", use_svd=True, svd_rank=16),
    "sdnq-fp8": sdnq(weights_dtype="float8_e4m3fn"),
    "torchao-int8": torchao("Int8WeightOnlyConfig"),
    "torchao-int8-inputs": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao-fp8": torchao("Float8WeightOnlyConfig"),
    "quanto-int8": quanto("int8"),
    "quanto-int4": quanto("int4"),
    "bitsandbytes-nf4": bitsandbytes(**NF4),
    "bitsandbytes-nf4-nested": bitsandbytes(**NF4, bnb_4bit_use_double_quant=True),
    "bitsandbytes-int8": bitsandbytes(load_in_8bit=True),
    "modelopt-int8": modelopt("INT8_DEFAULT_CFG"),
    "modelopt-int8-smoothquant": modelopt("INT8_SMOOTHQUANT_CFG"),
    "modelopt-fp8": modelopt("FP8_DEFAULT_CFG"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for the candidates")
    parser.add_argument("--only", default="", help="the beginning of the names of those that are made")
    options = parser.parse_args()
    pipeline = options.out / "full_precision"
    if not pipeline.exists():
        convert(input_path(SHIPPED), pipeline)
    made = []
    for name, make in MAKERS.items():
        if not name.startswith(options.only):
            continue
        found = [path for path in (options.out / name, *options.out.glob(f"{name}.*")) if path.exists()]
        try:
            made.append(found[0] if found else make(pipeline, options.out / name))
        except ImportError as error:
            print(f"{name}: left out, {error}", flush=True)
        else:
            print(f"{name}: {made[-1]}", flush=True)
    print(f"candidates=[{','.join(map(str, made))}]")


if __name__ == "__main__":
    main()
