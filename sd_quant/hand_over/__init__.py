"""A quantized denoiser in other tools' own formats: a target is one row of facts here and one file beside it.

The facts say which layers of an assignment the target's format can hold and how its consumer computes their inputs.
``adapted`` makes of them the assignment that the file holds, so that writer and simulation read the same rows. The
writers import what they need; a row imports nothing, so what cannot be is refused at once. To add a target, write
``sd_quant/hand_over/<name>.py`` with a function ``write(checkpoint, assignment, folder)`` and one row in ``TARGETS``.

The road not taken is a converter of exported files: codes would be taken apart again that the assignment has whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sd_quant.quantization.formats import FORMATS

STATIC, PER_ROW, FP16 = "static", "per row", "fp16"  # how a consumer quantizes a layer's inputs, FP16: it does not
OF_THE_RECIPE = "as the recipe says"
EVERY_FORMAT = {name: OF_THE_RECIPE for name in FORMATS}


@dataclass(frozen=True)
class Target:
    """What a format of somebody else holds, and who reads it."""

    name: str
    consumer: str  # what opens the result
    tried: str  # the versions with which a test opened it
    formats: Mapping[str, str]  # of weights, each with how its inputs are computed
    loading: str  # the consumer's code that opens the result, with {folder}
    convolutions: frozenset[str] = frozenset()  # formats that hold them; they may have four axes then
    multiplied: frozenset[str] = frozenset()  # formats whose inputs may be multiplied by a pre_quant_scale
    low_rank: bool = False  # whether a branch beside the weight is held
    zero_point: bool = False  # whether inputs may be shifted
    per_channel: Mapping[str, bool] = field(default_factory=dict)  # formats that want one range, or one per channel
    attention: bool = False  # whether attention's products are held
    excluded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # ends of names that a format cannot hold
    families: frozenset[str] | None = None  # None: all
    others: bool | None = True  # a pipeline's folder, with the other networks' weights or without; None: no folder
    module: str = ""  # with ``write``; by default the file of the target's name beside this one


SDXL = frozenset({"sdxl"})
UNETS = SDXL | {"sd15", "sd21"}
TARGETS: dict[str, Target] = {
    row.name: row
    for row in (
        Target(
            "comfyui", "ComfyUI", "comfy-kitchen 0.2.40, whose kernels and layouts ComfyUI calls",
            {"fp8": STATIC, "int8": PER_ROW, "nvfp4": OF_THE_RECIPE},
            "# copy {folder}/sdxl.safetensors to ComfyUI/models/checkpoints and open it with Load Checkpoint",
            multiplied=frozenset({"nvfp4"}), per_channel={"fp8": False},
            excluded={"nvfp4": ("attn2.to_k", "attn2.to_v")},  # ComfyUI reads the model's kind off their shape
            families=SDXL, others=None,
        ),
        Target(
            "diffusers_modelopt", "diffusers with ModelOpt", "diffusers 0.42.1 and nvidia-modelopt 0.47.0",
            {"int8": OF_THE_RECIPE, "fp8": OF_THE_RECIPE},
            "import modelopt.torch.opt as mto\nfrom diffusers import DiffusionPipeline\n\n"
            "mto.enable_huggingface_checkpointing()\npipeline = DiffusionPipeline.from_pretrained({folder!r})",
            convolutions=frozenset({"int8", "fp8"}), multiplied=frozenset({"int8", "fp8"}), zero_point=True,
        ),
        Target(
            "diffusers_torchao", "diffusers with torchao", "diffusers 0.42.1 and torchao 0.18.0", {"int8": STATIC},
            "import torch\nfrom diffusers import DiffusionPipeline\n\n"
            "pipeline = DiffusionPipeline.from_pretrained({folder!r}, torch_dtype=torch.bfloat16)",
            multiplied=frozenset({"int8"}),
        ),
        Target(
            "diffusers_sdnq", "diffusers with SDNQ", "diffusers 0.42.1 and sdnq 0.2.8",
            {"int8": FP16, "fp8": FP16, "int4": FP16},
            "import torch\nfrom diffusers import DiffusionPipeline  # pip install sdnq\n\n"
            "pipeline = DiffusionPipeline.from_pretrained({folder!r}, torch_dtype=torch.float16)",
            convolutions=frozenset({"int8", "fp8"}), low_rank=True,
        ),
        Target(
            "gguf", "ComfyUI-GGUF", "gguf 0.19.0, whose reader and dequantizers it calls",
            {"int8": FP16, "int4": FP16},
            "# copy {folder}/unet_xl.gguf to ComfyUI/models/unet and open it with Unet Loader (GGUF)",
            families=SDXL, others=None,
        ),
        Target(
            "openvino", "optimum-intel", "optimum-intel 2.2.0, see tests/hand_over", EVERY_FORMAT,
            "from optimum.intel import OVDiffusionPipeline\n\n"
            'settings = {{"INFERENCE_PRECISION_HINT": "f32"}}\n'
            "pipeline = OVDiffusionPipeline.from_pretrained({folder!r}, ov_config=settings)",
            convolutions=frozenset(FORMATS), multiplied=frozenset(FORMATS), low_rank=True, zero_point=True,
            attention=True, families=UNETS, others=False, module="openvino_pipeline",
        ),
        Target(
            "onnx", "optimum-onnx", "optimum-onnx 0.1.0, see tests/hand_over", EVERY_FORMAT,
            "from optimum.onnxruntime import ORTDiffusionPipeline\n\n"
            "pipeline = ORTDiffusionPipeline.from_pretrained({folder!r})",
            convolutions=frozenset(FORMATS), multiplied=frozenset(FORMATS), low_rank=True, zero_point=True,
            attention=True, families=UNETS, others=False, module="onnx_pipeline",
        ),
    )
}  # fmt: skip


def writer(target: Target) -> Callable:
    """The target's ``write(checkpoint, assignment, folder)``."""
    from importlib import import_module

    return import_module(f"{__name__}.{target.module or target.name}").write
