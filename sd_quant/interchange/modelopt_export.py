"""A folder of ModelOpt's export for servers (``export_hf_checkpoint``): SGLang, vLLM-Omni, TensorRT-LLM's visual_gen.

A quantized linear [N, K] has quantized values and scales; all scales multiply:

| ``quant_algo``            | X.weight               | X.weight_scale  | others, one number each      | inputs        |
|---------------------------|------------------------|-----------------|------------------------------|---------------|
| FP8                       | E4M3 [N, K]            | one number      | input_scale                  | static        |
| FP8_PER_CHANNEL_PER_TOKEN | the same               | [N]             |                              | a scale a row |
| NVFP4                     | E2M1 as uint8 [N, K/2] | E4M3 [N, K/16]  | weight_scale_2, input_scale  | blocks of 16  |
| W4A16_NVFP4               | the same               | the same        | weight_scale_2               | as they are   |
| NVFP4_AWQ                 | the same               | the same        | ..., and pre_quant_scale [K] | blocks of 16  |

The even number of two in a byte is in the low half; block scales lie in rows, unpadded. ``quantization_config`` in
config.json has ``quant_algo``, for MIXED_PRECISION by layer too; ``config_groups``, without which TensorRT-LLM
quantizes weights again; and ``ignore``, patterns of unquantized linears. diffusers does not open the folder.

FP8 and NVFP4 with static inputs are written, a mix of both for vLLM-Omni only; so is FP8 by row, without
``config_groups``. A block of zeros has the scale 2^-9, ModelOpt's is 1.

Servers match ``ignore`` differently: SGLang the whole name, with ``*`` for any characters; vLLM-Omni a name, a part of
one, or a pattern; TensorRT-LLM a name or a module around it. Each has own names for q, k and v together, SGLang in
Qwen-Image and Z-Image. So every entry ends in ``*``, as ``proj_out`` is also a part of
``single_transformer_blocks.0.proj_out``; no entry matches a quantized layer; and joint names are listed too.

A ``runtime.diffusion_step_policy`` (vLLM-Omni's pull request 6560: steps that multiply unquantized inputs) is refused.

Alternative not taken: ``export_hf_checkpoint``, which needs all weights at once and quantizes anew.
"""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.checks import listing
from sd_quant.files.tensors import Readable
from sd_quant.interchange import DIFFUSERS, STATIC, ForeignFormat, Server
from sd_quant.interchange.denoiser import Inputs, QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.holding import groups_of
from sd_quant.interchange.inputs import Multiplied, Nvfp4, RowFloat8, StaticFloat8
from sd_quant.interchange.layouts import E4M3, FP32, INPUTS, NUMBERS, OF_ALL, TWO_IN_A_BYTE, UINT8, Layout, Piece
from sd_quant.interchange.stored import FLOAT_SCALES, FP8, Folder, LayerTensors, Shape, quantization_config, told
from sd_quant.interchange.weights import Assignment, quantized, with_coded_weights, write_folder
from sd_quant.models.checkpoint import Checkpoint, empty_denoiser
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import nvfp4

FACTS = ForeignFormat(
    "modelopt_export",
    reads="a folder that ModelOpt exported for servers",
    bf16=True,
    consumer="SGLang, vLLM-Omni and TensorRT-LLM",
    tried=DIFFUSERS,  # its BFLQuantizationConfig reads the tensors of NVFP4
    formats={"fp8": STATIC, "nvfp4": STATIC},
    per_channel={"fp8": False},
    per_token=frozenset({"fp8"}),
    block=16,
    one_range=frozenset({"fp8", "nvfp4"}),
    families=frozenset({"flux", "diffusers"}),
    fused={
        ("to_q", "to_k", "to_v"): ("to_qkv", "qkv_proj"),
        ("add_q_proj", "add_k_proj", "add_v_proj"): ("add_kv_proj", "add_qkv_proj", "to_added_qkv"),
        ("w1", "w3"): ("w13",),
        ("net.0.proj",): ("up_proj", "fc_in"),  # single layers with another name
        ("net.2",): ("down_proj", "fc_out"),
        ("attn1.to_q",): ("to_q",), ("attn1.to_k",): ("to_k",), ("attn1.to_v",): ("to_v",),
        ("attn1.to_out.0",): ("to_out",),
    },
    servers={
        "SGLang": Server(
            "0.5.23",
            "sglang serve --model-path {folder} --transformer-path {folder}/{component}",
            gpus={"fp8": "SM89 or newer", "nvfp4": "SM100 or newer"},
            pipelines=frozenset({
                "FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline", "QwenImagePipeline", "QwenImageEditPipeline",
                "QwenImageEditPlusPipeline", "ZImagePipeline", "WanPipeline", "WanImageToVideoPipeline",
                "HunyuanVideoPipeline", "LTX2Pipeline", "GlmImagePipeline", "Krea2Pipeline", "Ideogram4Pipeline",
            }),
            # on one GPU; with more, the feed-forwards are quantized
            plain={"FluxPipeline": ("*.norm*", "transformer_blocks.*.ff.*", "transformer_blocks.*.ff_context.*")},
        ),
        "vLLM-Omni": Server(
            "0.30.0",
            "vllm serve {folder} --omni",
            gpus={"fp8": "SM89 or newer", "nvfp4": "Blackwell"},
            pipelines=frozenset({
                "FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline", "QwenImagePipeline", "ZImagePipeline",
                "WanPipeline", "LTX2Pipeline", "GlmImagePipeline",
            }),
            mixed=True,
            per_token=True,
            plain={
                "FluxPipeline": ("transformer_blocks.*", "*.norm.linear"),
                "QwenImagePipeline": ("*.img_mod.1", "*.txt_mod.1"),
            },
        ),
        "TensorRT-LLM": Server(
            "of August 2026",
            "trtllm-serve {folder}",
            gpus={"fp8": "SM89 or newer", "nvfp4": "SM100 or newer"},
            pipelines=frozenset({
                "FluxPipeline", "Flux2Pipeline", "QwenImagePipeline", "WanPipeline", "LTX2Pipeline",
                "HunyuanVideo15Pipeline", "Cosmos3OmniPipeline", "GlmImagePipeline",
            }),
            one_config=True,
        ),
    },
)  # fmt: skip
MAKER, NVFP4 = "ModelOpt", "nvfp4"
METHOD = "modelopt"
MIXED = "MIXED_PRECISION"
CODES = {torch.float8_e4m3fn: FP8, torch.int8: "int8", torch.uint8: NVFP4}
ENDS = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
BLOCK = nvfp4.BLOCK
MOST_STEPS = 100_000
KINDS = {  # code format of each ``quant_algo`` that is read
    "FP8": FP8, "FP8_PER_CHANNEL_PER_TOKEN": FP8, "NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "NVFP4_AWQ": NVFP4,
}  # fmt: skip
PER_TOKEN, HALF_INPUTS = "FP8_PER_CHANNEL_PER_TOKEN", "W4A16_NVFP4"
# Entries of SGLang's own converters on the order of NVFP4's bytes or scales, or on inputs; ModelOpt writes none
ORDER: Mapping[str, str | bool] = {
    "swap_weight_nibbles": False, "checkpoint_uses_packed_qkv": False, "dynamic_input_scale": False,
    "checkpoint_weight_scale_layout": "linear", "weight_scale_layout": "linear",
}  # fmt: skip


def layouts_of(scale: str, double: str, *more: Piece) -> dict[str, Layout]:
    """Return ModelOpt's layouts by format; ``scale`` and ``double`` are suffixes of scales, ``more`` other tensors."""
    found = {
        kind: Layout(kind, "1 for a row", (
            Piece("weight", "N K", (dtype,), NUMBERS), Piece(scale, "|1|N _|N", FLOAT_SCALES, OF_ALL), *more,
        ))
        for dtype, kind in CODES.items()
    }  # fmt: skip
    weight, scales = (
        Piece("weight", "N K/2", (UINT8,), NUMBERS, packing=TWO_IN_A_BYTE),
        Piece(scale, f"N K/{BLOCK}", (E4M3,)),
    )
    pieces = (weight, scales, Piece(double, "|1", FLOAT_SCALES, OF_ALL), *more)
    return found | {NVFP4: Layout(NVFP4, f"1 for {BLOCK} numbers", pieces, columns=BLOCK)}


LAYOUTS = layouts_of(
    "weight_scale", "weight_scale_2", Piece("input_scale", "|1|1 1", FLOAT_SCALES, INPUTS, optional=True)
)
BY_ROW = Layout(FP8, "1 for a row", (Piece("weight", "N K", (E4M3,), NUMBERS), Piece("weight_scale", "N", (FP32,))))


# Reading


def recognizes(path: Path) -> bool:
    """Return whether a denoiser's config has ModelOpt's ``quant_algo``, with or without a state file beside it."""
    config = quantization_config(path) or {}
    return config.get("quant_method") == METHOD and "quant_algo" in config


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in a folder of a pipeline or of the denoiser alone.

    Raises ArtifactError unless it is the whole denoiser of its config, and for a ``quant_algo`` or an order of
    numbers and scales without a decoder here.
    """
    folder = Folder(path, checkpoint)
    config, (found, others) = folder.config, folder.by_layer(ENDS)
    for key, own in ORDER.items():
        if config.get(key) not in (None, own):
            raise ArtifactError(
                f"{path}: its {key} is {told(config[key])}, expected {told(own)} as in what ModelOpt exports; give the "
                "folder that this was converted from"
            )
    ignored = folder.ignored_names("ignore")
    if both := [name for name in found if any(fnmatchcase(name, pattern) for pattern in ignored)]:
        raise ArtifactError(
            f"{path} quantizes layers that its ignore excludes ({listing(both)}), so servers would not load them; "
            "export it again"
        )
    layers = {name: layer_of(own, folder.shapes[name], algo_of(path, config, name)) for name, own in found.items()}
    if config.get("runtime") is not None:
        raise ArtifactError(
            f"{path}: its runtime is {told(config['runtime'])}, expected none: steps that multiply unquantized inputs "
            "are not judged; give the folder without it in quantization_config, in which all steps are alike"
        )
    return folder.whole(FACTS.name, MAKER, layers, others)


def algo_of(path: Path, config: Mapping[str, Any], layer: str) -> str:
    """Return the ``quant_algo`` of a layer. Raises ArtifactError for a ``quant_algo`` without a decoder here."""
    algo: object = config.get("quant_algo")
    if algo == MIXED:
        own = config.get("quantized_layers")
        entry = own.get(layer) if isinstance(own, Mapping) else None
        algo = entry.get("quant_algo") if isinstance(entry, Mapping) else None
    if not isinstance(algo, str) or algo not in KINDS:
        raise ArtifactError(
            f"{path}: the quant_algo of {listing([layer])} is {told(algo)}, expected one of {', '.join(KINDS)}; give "
            "another export"
        )
    return algo


def layer_of(stored: LayerTensors, shape: Shape, algo: str) -> QuantizedLayer:
    """Return a layer quantized by ``algo``. Raises ArtifactError for tensors that do not fit it or ``shape``."""
    kind = CODES[stored.checked("weight", None, (torch.float8_e4m3fn, torch.uint8)).dtype]
    if kind != KINDS[algo]:
        raise ArtifactError(
            f"{stored.path}: {listing([stored.layer])} has codes of {kind}, and its quant_algo is {algo}; fetch the "
            "whole folder again"
        )
    inputs: Inputs | None = None
    if algo == PER_TOKEN:
        inputs = RowFloat8()
    elif algo != HALF_INPUTS:
        if "input_scale" not in stored:
            raise ArtifactError(
                f"{stored.path}: {listing([stored.layer])} has no input_scale, which {algo} requires; servers refuse "
                "it or take 1, so export it again after calibration"
            )
        number = stored.number("input_scale", positive=True)
        inputs = Nvfp4(number) if kind == NVFP4 else StaticFloat8(number)
    if "pre_quant_scale" in stored:
        inputs = multiplied(stored, "pre_quant_scale", shape, inputs)
    return with_codes(stored, shape, LAYOUTS, inputs)


def multiplied(stored: LayerTensors, end: str, shape: Shape, then: Inputs | None) -> Multiplied:
    convolution = len(shape) == 4
    fitting = [(shape[1], 1, 1), (1, shape[1], 1, 1)] if convolution else [(shape[1],), (1, shape[1])]
    stored.checked(end, fitting, FLOAT_SCALES)
    return Multiplied(stored.finite(end).flatten(), convolution, then)


def with_codes(
    stored: LayerTensors, shape: Shape, layouts: Mapping[str, Layout], inputs: Inputs | None, dtype: torch.dtype = FP32
) -> QuantizedLayer:
    """Return a layer in that of ``layouts`` which fits its codes: ModelOpt's FP8QTensor, INT8QTensor or NVFP4QTensor.

    Raises ArtifactError for tensors that do not fit its ``shape``.
    """
    kind = CODES[stored.checked("weight", None, CODES).dtype]
    if (kind == NVFP4) != (layouts[NVFP4].pieces[2].end in stored):
        raise ArtifactError(
            f"{stored.path}: ModelOpt's {listing([stored.layer])} has codes of {kind} with other scales than these "
            "have; give a checkpoint in FP8, INT8 or NVFP4"
        )
    return layouts[kind].layer(stored, shape, stored.size("weight"), inputs, dtype)


# Writing

FP8_ALGO, NVFP4_ALGO = "FP8", "NVFP4"
SIZES: Mapping[str, tuple[int, Mapping[str, int]]] = {FP8_ALGO: (8, {}), NVFP4_ALGO: (4, {"group_size": BLOCK})}  # bits
GROUPS = {
    algo: dict.fromkeys(
        ("input_activations", "weights"), {"dynamic": False, "num_bits": bits, "type": "float", **group}
    )
    for algo, (bits, group) in SIZES.items()
}
PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # whose layout it is; vLLM-Omni knows the layout by this name too


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Write the denoiser into the pipeline ``folder``: its weights, and ``quantization_config`` in its config.

    Raises ConfigError if no ``ignore`` has one meaning for all servers or no ``quant_algo`` fits, ResourceError if the
    disk is full.
    """
    layers = quantized(assignment)
    linears = [name for name, each in empty_denoiser(checkpoint).named_modules() if isinstance(each, nn.Linear)]
    config = config_of(layers, linears)  # first, because it may be refused
    return write_folder(checkpoint, folder, with_coded_weights(checkpoint, assignment, tensors_of), config)


def tensors_of(checkpoint: Checkpoint, layer: LayerAssignment) -> dict[str, Readable]:
    """Return the tensors of a quantized linear by name."""
    layout = BY_ROW if algo_written(layer) == PER_TOKEN else LAYOUTS[NVFP4 if layer.format == "nvfp4" else FP8]
    return layout.tensors(checkpoint, layer)


def algo_written(layer: LayerAssignment) -> str:
    """Return the ``quant_algo`` of a quantized layer."""
    if layer.format == "nvfp4":
        return NVFP4_ALGO
    return PER_TOKEN if layer.per_token else FP8_ALGO


def config_of(layers: Mapping[str, LayerAssignment], linears: Collection[str]) -> dict[str, Any]:
    """Build the ``quantization_config`` of the quantized ``layers`` among all ``linears`` of a network."""
    by_algo: dict[str, list[str]] = {}
    for layer in layers.values():
        by_algo.setdefault(algo_written(layer), []).append(layer.name)
    mixed = len(by_algo) > 1
    if mixed and PER_TOKEN in by_algo:
        raise ConfigError(
            f"{len(by_algo[PER_TOKEN])} layers in fp8 have inputs that are scaled per token and others are in another "
            "format, which no server loads together; set quantize.per_token=false"
        )
    found: dict[str, Any] = {}
    if PER_TOKEN not in by_algo:
        found["config_groups"] = {
            f"group_{index}": GROUPS[algo] | {"targets": sorted(names) if mixed else ["Linear"]}
            for index, (algo, names) in enumerate(by_algo.items())
        }
    if mixed:
        algos = {name: algo_written(layer) for name, layer in layers.items()}
        found["quantized_layers"] = {name: {"quant_algo": algo, **SIZES[algo][1]} for name, algo in algos.items()}
    found["ignore"] = [] if mixed else ignored(linears, layers)
    return found | {"quant_algo": MIXED if mixed else next(iter(by_algo)), "producer": PRODUCER, "quant_method": METHOD}


def ignored(linears: Collection[str], layers: Collection[str]) -> list[str]:
    """Return few patterns that match the ``linears`` outside the quantized ``layers``, and no quantized layer.

    ``a*`` matches a module and names that begin like it, ``a.*`` modules in it. Raises ConfigError for an
    unquantized layer whose name begins a quantized one's, because vLLM-Omni finds the first in the second.
    """
    kept, found = [name for name in linears if name not in layers], list[str]()
    for name in kept:
        if any(fnmatchcase(name, pattern) for pattern in found):
            continue
        words = name.split(".")
        begins = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        tried = [pattern for begin in begins for pattern in (f"{begin}*", f"{begin}.*")][:-1]
        free = [pattern for pattern in tried if not any(layer.startswith(pattern[:-1]) for layer in layers)]
        if not free:
            others = listing([layer for layer in layers if layer.startswith(name)], 3)
            raise ConfigError(
                f"{name} stays in high precision and {others} does not, which no list of exclusions says to all "
                "servers; quantize both, or neither with quantize.exclude"
            )
        found.append(free[0])
    for begin, ends, _ in groups_of(kept, FACTS.fused):
        joint = [begin + name for name in FACTS.fused[tuple(ends)]]
        found += [f"{name}*" for name in joint if not any(fnmatchcase(name, pattern) for pattern in found)]
    return sorted(found)
