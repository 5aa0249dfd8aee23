"""A quantized denoiser in other tools' own formats: a target is one row of facts here and one file beside it.

The facts say which layers of an assignment the target's format can hold and how its consumer computes their inputs.
``adapted`` makes of them the assignment that the file holds, so that writer and simulation read the same rows. The
writers import what they need; a row imports nothing, so what cannot be is refused at once. To add a target, write
``sd_quant/hand_over/<name>.py`` with a function ``write(checkpoint, assignment, folder)`` and one row in ``TARGETS``;
where inputs are computed per row, with a function ``per_row(rotation)`` too, see ``rounding_of_rows``.

The road not taken is a converter of exported files: codes would be taken apart again that the assignment has whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module

from sd_quant.engines import RUNTIMES
from sd_quant.quantization.formats import FORMATS

AS_ASSIGNED, STATIC, PER_ROW, FP16 = "as the recipe says", "static", "per row", "fp16"  # how inputs are computed
OWN_INPUTS = (PER_ROW, FP16)  # in the consumer's own way, whatever the recipe says


@dataclass(frozen=True)
class Target:
    """What a format of somebody else holds, and who reads it."""

    name: str
    consumer: str  # what opens the result
    tried: tuple[str, ...]  # the packages with which a test opened it
    formats: Mapping[str, str]  # of weights, each with how its inputs are computed
    # the consumer's code that opens the result, with {folder}, and {absent} for what it is to do without; or what a
    # person does, step by step
    loading: str | tuple[str, ...]
    broken: Mapping[str, str] = field(default_factory=dict)  # versions of packages that cannot open it, and what fails
    convolutions: frozenset[str] = frozenset()  # formats that hold them; they may have four axes then
    multiplied: frozenset[str] = frozenset()  # formats whose inputs may be multiplied by a pre_quant_scale
    low_rank: bool = False  # whether a branch beside the weight is held
    zero_point: bool = False  # whether inputs may be shifted
    per_token: frozenset[str] = frozenset()  # formats whose inputs may be scaled per token; "static" is "per row" then
    rotated: frozenset[str] = frozenset()  # formats whose weights may be those of rotated inputs, which it rotates
    per_channel: Mapping[str, bool] = field(default_factory=dict)  # formats that want one range, or one per channel
    attention: bool = False  # whether attention's products are held
    half: bool = False  # whether ranges are kept in fp16
    in_fp32: frozenset[str] = frozenset()  # formats in blocks whose two scales are multiplied in fp32
    block: int = 1  # a weight's inputs are a multiple of it
    excluded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # ends of names that a format cannot hold
    runtime: str | None = None  # of ``RUNTIMES``, which has to execute what is held
    package: str | None = None  # which writes the files, where that is none that is always there; an extra's name too
    families: frozenset[str] | None = None  # None: all
    others: bool | None = True  # a pipeline's folder, with the other networks' weights or without; None: no folder
    pads: bool = False  # whether a text is padded as the checkpoint was trained; False: it has CLIP's 77 tokens
    left_out: tuple[str, ...] = ()  # what else of the pipeline is not there

    def takes_per_token(self, name: str) -> bool:
        """Whether a layer in the format ``name`` may have inputs that a recipe scales per token."""
        return name in self.per_token or self.formats.get(name) in OWN_INPUTS


SDXL = frozenset({"sdxl"})
UNETS = SDXL | {"sd15", "sd21"}
DIFFUSERS = ("diffusers==0.42.1", "accelerate==1.15.0")  # without accelerate it loads nothing quantized


def exported(name: str, consumer: str, tried: tuple[str, ...], loading: str, runtime: str) -> Target:
    """A pipeline of exported graphs, which hold all that a runtime executes."""
    every = frozenset(FORMATS)
    return Target(
        name, consumer, tried, dict.fromkeys(FORMATS, AS_ASSIGNED), loading, convolutions=every, multiplied=every,
        low_rank=True, zero_point=True, per_token=every, rotated=every, attention=True, runtime=runtime,
        families=UNETS, others=False, pads=True,
        left_out=("the autoencoder's encoder, for images to begin with", "prompts of more than 77 tokens"),
    )  # fmt: skip


TARGETS: dict[str, Target] = {
    row.name: row
    for row in (
        Target(
            "comfyui", "ComfyUI", ("comfy-kitchen==0.2.40",),  # whose kernels and layouts ComfyUI calls
            {"fp8": STATIC, "int8": PER_ROW, "nvfp4": AS_ASSIGNED},
            ("Copy `sdxl.safetensors` to `ComfyUI/models/checkpoints`.", "Open it with the node Load Checkpoint."),
            multiplied=frozenset({"nvfp4"}), rotated=frozenset({"int8"}), per_channel={"fp8": False},
            in_fp32=frozenset({"nvfp4"}),
            excluded={"nvfp4": ("attn2.to_k", "attn2.to_v")},  # ComfyUI reads the model's kind off their shape
            families=SDXL, others=None,
        ),
        Target(
            "diffusers_modelopt", "diffusers with ModelOpt", (*DIFFUSERS, "nvidia-modelopt==0.47.0"),
            {"int8": AS_ASSIGNED, "fp8": AS_ASSIGNED},
            "import modelopt.torch.opt as mto\nimport torch\nfrom diffusers import DiffusionPipeline\n\n"
            "mto.enable_huggingface_checkpointing()\n"
            "pipeline = DiffusionPipeline.from_pretrained({folder!r}{absent}, torch_dtype=torch.float16)",
            convolutions=frozenset({"int8", "fp8"}), multiplied=frozenset({"int8", "fp8"}), zero_point=True, half=True,
        ),
        Target(
            "diffusers_torchao", "diffusers with torchao", (*DIFFUSERS, "torchao==0.18.0"), {"int8": STATIC},
            "import torch\nfrom diffusers import DiffusionPipeline\n\n"
            "pipeline = DiffusionPipeline.from_pretrained({folder!r}{absent}, torch_dtype=torch.bfloat16)",
            multiplied=frozenset({"int8"}), per_token=frozenset({"int8"}),
            broken={"torchao<0.18": "its tensors take no description of static inputs"},
        ),
        Target(
            "diffusers_sdnq", "diffusers with SDNQ", (*DIFFUSERS, "sdnq==0.2.8"),
            {"int8": FP16, "fp8": FP16, "int4": FP16},
            "import torch\nfrom diffusers import DiffusionPipeline\n\n"
            "pipeline = DiffusionPipeline.from_pretrained({folder!r}{absent}, torch_dtype=torch.float16)",
            convolutions=frozenset({"int8", "fp8"}), low_rank=True,
            broken={"sdnq<0.2.2": "diffusers refuses older ones"},
        ),
        Target(
            "gguf", "ComfyUI-GGUF", ("gguf==0.19.0",),  # whose reader and dequantizers it calls
            {"int8": FP16, "int4": FP16},
            ("Copy `unet_xl.gguf` to `ComfyUI/models/unet`.", "Open it with the node Unet Loader (GGUF)."),
            block=32, families=SDXL, others=None, package="gguf",
        ),
        exported(
            "openvino", "optimum-intel", ("optimum-intel==2.2.0", "openvino==2026.4.1"),
            "from optimum.intel import OVDiffusionPipeline\n\n"
            'settings = {{"INFERENCE_PRECISION_HINT": "f32"}}\n'
            "pipeline = OVDiffusionPipeline.from_pretrained({folder!r}, ov_config=settings)",
            runtime="openvino",
        ),
        exported(
            "onnx", "optimum-onnx", ("optimum-onnx==0.1.0", "onnxruntime==1.31.1"),
            "from optimum.onnxruntime import ORTDiffusionPipeline\n\n"
            "pipeline = ORTDiffusionPipeline.from_pretrained({folder!r})",
            runtime="onnxruntime",
        ),
    )
}  # fmt: skip


def writer(target: Target) -> Callable:
    """The target's ``write(checkpoint, assignment, folder)``, of an assignment as ``adapted`` makes it."""
    return import_module(f"{__name__}.{target.name}").write


def rounding_of_rows(target: Target, rotation: int) -> Callable:
    """What the target's consumer makes of an input [..., in] of an INT8 linear: what its codes stand for.

    ``rotation`` is how many inputs it rotates together before; the codes are rotated back.
    """
    return import_module(f"{__name__}.{target.name}").per_row(rotation)


def refused(target: Target, where: str, name: str) -> str | None:
    """Why the runtime of the target cannot execute the format ``name`` in ``where``, or None."""
    return RUNTIMES[target.runtime].refuses(where, FORMATS[name]) if target.runtime else None
