"""nunchaku's safetensors file: a Flux or SDXL denoiser in SVDQuant's W4A4, its linears fused as nunchaku runs them.

The header's metadata has ``model_class``, the network's ``config`` and ``quantization_config``, all JSON in strings. A
linear's tensors are those of ``nunchaku_linears`` under deepcompressor's older names: ``lora_down``, ``lora_up``,
``smooth``, ``smooth_orig``. nunchaku's loader renames them and breaks new names (``.smooth`` is in ``.smooth_factor``),
so the old ones are written; both are read.

| diffusers' linear                  | SDXL                | Flux, double blocks         | Flux, single blocks        |
|------------------------------------|---------------------|-----------------------------|----------------------------|
| to_q, to_k, to_v of self-attention | rows of attn1.to_qkv| rows of qkv_proj            | rows of qkv_proj           |
| attn.add_q_proj, add_k_, add_v_    |                     | rows of qkv_proj_context    |                            |
| to_out.0, to_add_out               | the same            | out_proj, out_proj_context  |                            |
| attn2.to_q                         | the same            |                             |                            |
| ff.net.0.proj, ff.net.2            | the same            | mlp_fc1, mlp_fc2            |                            |
| ff_context                         |                     | mlp_context_fc1, _fc2       |                            |
| proj_mlp                           |                     |                             | mlp_fc1                    |
| proj_out                           | not quantized       |                             | columns: out_proj, mlp_fc2 |
| norm1(_context).linear, norm.linear|                     | W4A16, six chunks           | W4A16, three chunks        |

All of these are quantized in every block: a result with one in high precision is refused. Other tensors are as in
diffusers. All branches have one rank; q, k and v share ``smooth`` and ``lora_down``, which has theirs stacked: that is
exact and triples the rank. Modulations of Flux are rounded to nearest, 1 is added to biases of scales. Inputs of Flux's
``mlp_fc2`` are shifted in INT4. nunchaku takes the precision from the GPU, not from the file. Its loader of Flux wants
bfloat16, SDXL's has no ``wtscale``: ``wcscales`` hold NVFP4's common scales.

Sources: nunchaku 1.3.0dev (92e4695), ``models/unets/unet_sdxl.py``, ``models/transformers/transformer_flux_v2.py``.
Alternative not taken: decomposing the stacked weights anew, as their codes were chosen together with their branches.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.checks import renamed
from sd_quant.files.safetensors import FORMAT, read_header
from sd_quant.files.tensors import LazyTensor, Readable, StoredTensor, in_dtype, lazy, size_of
from sd_quant.interchange import IN_BLOCKS, ForeignFormat
from sd_quant.interchange import nunchaku_linears as svdquant
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.stored import FLOAT_SCALES, LayerTensors, Shape, header_of, told, weight_shapes, with_layers
from sd_quant.interchange.weights import Assignment, high_precision, write_file
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_denoiser
from sd_quant.quantization.formats import FORMATS

FACTS = ForeignFormat(
    "nunchaku",
    reads="a safetensors file for nunchaku, of Flux or SDXL",
    bf16=frozenset({"FluxTransformer2DModel"}),
    consumer="nunchaku",
    formats={"int4": IN_BLOCKS, "nvfp4": IN_BLOCKS},
    loading={
        "sdxl": (
            "`unet = NunchakuSDXLUNet2DConditionModel.from_pretrained(<file>, torch_dtype=torch.float16)`, of "
            "`nunchaku.models.unets.unet_sdxl`.",
            "`unet=unet` for diffusers' pipeline.",
        ),
        "flux": (
            "`transformer = NunchakuFluxTransformer2DModelV2.from_pretrained(<file>)`, of `nunchaku`.",
            "`transformer=transformer` for diffusers' pipeline in bfloat16.",
        ),
    },
    untried="Nobody has run it: nunchaku's loader (92e4695) takes every tensor, without kernels. INT4 needs an NVIDIA "
    "GPU of SM75, 80, 86 or 89, so no Hopper, NVFP4 one of SM120 or 121.",
    multiplied=frozenset({"int4", "nvfp4"}),
    low_rank=True,
    multiples={"int4": 128, "nvfp4": 128},
    families=frozenset({"sdxl", "flux"}),
    others=None,
    left_out=("of Flux: fp16, in place of which all is bfloat16, and of its modulations 12 bits, rounded to nearest",),
    traps={
        "": ("`pip install nunchaku` installs another project; take a wheel of GitHub's releases of nunchaku.",),
        "int4": ("On SM120 and 121 nunchaku expects NVFP4, whatever the file says, and refuses INT4 for its sizes.",),
        "nvfp4": ("On any GPU but SM120 and 121 nunchaku expects INT4, and refuses NVFP4 for its sizes.",),
    },
    always=True,
    layers=(
        "*.attn1.to_[qkv]", "*.attn1.to_out.0", "*.attn2.to_q", "*.attn2.to_out.0", "*.ff.net.0.proj", "*.ff.net.2",
        "*.attn.to_[qkv]", "*.attn.add_[qkv]_proj", "*.attn.to_out.0", "*.attn.to_add_out",
        "*.ff_context.net.0.proj", "*.ff_context.net.2", "single_transformer_blocks.*.proj_*",
    ),
    fused={
        ("attn1.to_q", "attn1.to_k", "attn1.to_v"): ("attn1.to_qkv",),
        ("attn.to_q", "attn.to_k", "attn.to_v"): ("attn.to_qkv",),
        ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"): ("attn.add_qkv_proj",),
    },
)  # fmt: skip
SINGLE, DOUBLE = "single_transformer_blocks", "transformer_blocks"  # of Flux
CLASSES = {  # nunchaku's, by diffusers'; both of Flux read the same files
    "UNet2DConditionModel": ("NunchakuSDXLUNet2DConditionModel",),
    "FluxTransformer2DModel": ("NunchakuFluxTransformer2dModel", "NunchakuFluxTransformer2DModelV2"),
}
NAMES = {"UNet2DConditionModel": "sdxl", "FluxTransformer2DModel": "flux.1"}  # of written files
DTYPES = {"UNet2DConditionModel": torch.float16, "FluxTransformer2DModel": torch.bfloat16}
MODULATIONS = ("norm1.linear", "norm1_context.linear", "norm.linear")
FUSED = {"to_qkv": ("to_q", "to_k", "to_v"), "add_qkv_proj": ("add_q_proj", "add_k_proj", "add_v_proj")}
SHIFTED = ("ff.net.2", "ff_context.net.2", "mlp_fc2")  # Flux's, behind a GELU
ENDS = {"lora_down": "proj_down", "lora_up": "proj_up", "smooth": "smooth_factor", "smooth_orig": "smooth_factor_orig"}
NORMS = {name: f"attn.{name}" for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")}
IN_BLOCK = {  # names in a block of Flux: deepcompressor's, and those that nunchaku gives them
    SINGLE: {"qkv_proj": "attn.to_qkv", "out_proj": "attn.to_out"} | NORMS,
    DOUBLE: {
        "qkv_proj": "attn.to_qkv", "qkv_proj_context": "attn.add_qkv_proj", "out_proj": "attn.to_out.0",
        "out_proj_context": "attn.to_add_out", "mlp_fc1": "ff.net.0.proj", "mlp_fc2": "ff.net.2",
        "mlp_context_fc1": "ff_context.net.0.proj", "mlp_context_fc2": "ff_context.net.2",
    } | NORMS,
}  # fmt: skip


# Names


def new_name(key: str, ends: Mapping[str, str] = ENDS, in_block: Mapping[str, Mapping[str, str]] = IN_BLOCK) -> str:
    """Translate a tensor's name from deepcompressor's to that of nunchaku's modules; a new name is unchanged.

    ``ends`` and ``in_block`` translate the suffix and the name within a block of Flux.
    """
    owner, _, end = key.rpartition(".")
    blocks, _, rest = owner.partition(".")
    if blocks in in_block:
        index, _, name = rest.partition(".")
        owner = f"{blocks}.{index}.{in_block[blocks].get(name, name)}"
    return f"{owner}.{ends.get(end, end)}"


def old_name(key: str) -> str:
    """Translate a name back to deepcompressor's, the inverse of ``new_name``."""
    ends, *blocks = ({new: old for old, new in names.items()} for names in (ENDS, *IN_BLOCK.values()))
    return new_name(key, ends, dict(zip(IN_BLOCK, blocks, strict=True)))


def place_of(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return where the file has diffusers' linear ``name``, as two tuples of names.

    First the file's linears that share its inputs between them (``mlp_fc2``, ...), then the diffusers linears whose
    outputs one linear of the file concatenates, such as query, key and value in ``to_qkv``.
    """
    head, _, last = name.rpartition(".")
    for fused, members in FUSED.items():
        if last in members and not head.endswith("attn2"):
            return (f"{head}.{fused}",), tuple(f"{head}.{member}" for member in members)
    if name.startswith(SINGLE):
        stored = {"proj_mlp": ("mlp_fc1",), "proj_out": ("attn.to_out", "mlp_fc2")}
        if last in stored:
            return tuple(f"{head}.{each}" for each in stored[last]), (name,)
    return (name,), (name,)


def shift_of(name: str) -> float:
    """Return the number that nunchaku's kernel adds to INT4 inputs of its linear ``name``; 0 for none."""
    return svdquant.SHIFT if name.startswith((SINGLE, DOUBLE)) and name.endswith(SHIFTED) else 0.0


# Reading


def recognizes(path: Path) -> bool:
    """Return whether ``path`` is a safetensors file whose ``model_class`` is nunchaku's."""
    _, metadata = header_of(path)
    return str(metadata.get("model_class")).startswith("Nunchaku")


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser in ``path`` as nunchaku's kernels compute it."""
    found, metadata = read_header(whole_file(path))
    kind = check_class(path, metadata.get("model_class"), checkpoint)
    tensors = cast(dict[str, StoredTensor], renamed(path, found, new_name))
    linears, shapes = svdquant.linears_of(path, tensors), weight_shapes(checkpoint)
    layers: dict[str, QuantizedLayer] = {}
    parameters: dict[str, Readable] = {}
    used: set[str] = set()
    for name in shapes:
        names, members = place_of(name)
        if len(shapes[name]) != 2 or not all(stored in linears for stored in names):
            continue
        used.update(names)
        own = [linears[stored] for stored in names]
        layers[name], bias = (
            modulation(own[0], *shapes[name])
            if name.endswith(MODULATIONS) and "wzeros" in own[0]
            else placed(own, name, members, shapes)
        )
        parameters |= {} if bias is None else {f"{name}.bias": bias}
    taken = {f"{stored}.{end}" for stored in used for end in linears[stored].tensors}
    rest = {key: each for key, each in tensors.items() if key not in taken}
    denoiser = QuantizedDenoiser(path, FACTS.name, kind, layers, rest | parameters, size_of(found.values()))
    return with_layers(denoiser, checkpoint)


def check_class(path: Path, named: object, checkpoint: Checkpoint) -> str:
    """Return the class ``named``. Raises ArtifactError unless it is nunchaku's for the checkpoint's denoiser."""
    kind = checkpoint.family.NETWORKS[denoiser_part(checkpoint).component]
    if named not in CLASSES.get(kind, ()):
        known = " or ".join(name for names in CLASSES.values() for name in names)
        expected = CLASSES[kind][0] if kind in CLASSES else f"{known}, which a {kind} is not"
        raise ArtifactError(f"{path} is of {told(named)}, expected {expected}; give a quantization of that very model")
    return str(named)


def placed(
    own: Sequence[LayerTensors], name: str, members: Sequence[str], shapes: Mapping[str, Shape]
) -> tuple[QuantizedLayer, LazyTensor | None]:
    """Return diffusers' W4A4 linear ``name`` from ``own``, which joins ``members`` in a file, and its bias, if any."""
    rows, columns = shapes[name]
    heights = [shapes[member][0] for member in members]
    start = sum(heights[: members.index(name)])
    widths = [columns] if len(own) == 1 else [rows, columns - rows]
    parts = [
        svdquant.stored_w4a4(each, sum(heights), width, shift_of(each.layer))
        for each, width in zip(own, widths, strict=True)
    ]
    return svdquant.w4a4_layer(parts, slice(start, start + rows))


def modulation(own: LayerTensors, rows: int, columns: int) -> tuple[QuantizedLayer, LazyTensor | None]:
    """Return a modulation, the linear of an adaptive norm, [rows, columns] in W4A16, and its bias, if any."""
    chunks = max(1, rows // columns)
    layer = svdquant.w4a16_layer(own, rows, columns, chunks)
    if "bias" not in own:
        return layer, None
    own.checked("bias", [(rows,)], FLOAT_SCALES)
    return layer, LazyTensor(
        (rows,), torch.float32, lambda: shifted(svdquant.in_chunks(own.finite("bias"), chunks), chunks, -1)
    )


def shifted(bias: Tensor, chunks: int, by: float) -> Tensor:
    """Return a modulation's bias, fp32, chunk after chunk, with ``by`` added to the chunks that are scales."""
    parts = bias.float().unflatten(0, (chunks, -1)).clone()
    parts[sorted({1, chunks - 2})] += by
    return parts.flatten()


# Writing


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Write the denoiser to one file in ``folder``, with nunchaku's name. Raises ConfigError for two formats."""
    network = empty_denoiser(checkpoint)
    kind = checkpoint.family.NETWORKS[denoiser_part(checkpoint).component]
    dtype, weights = DTYPES[kind], high_precision(checkpoint, assignment)
    rows, fmt = svdquant.written(FACTS.name, checkpoint, assignment, weights)
    linears: dict[str, svdquant.Written] = {}
    for name in rows:
        names, members = place_of(name)
        if len(names) == 2:
            hidden = rows[name].rows
            of_attention, of_mlp = names
            zeros = lazy(torch.zeros(hidden))
            linears[of_attention] = replace(columns_of(rows[name], slice(0, hidden)), bias=zeros)
            linears[of_mlp] = columns_of(rows[name], slice(hidden, None))
        else:
            linears[names[0]] = joined([rows[member] for member in members])
    rank = svdquant.common_rank(linears.values())
    tensors: dict[str, Readable] = {}
    for key, tensor in weights.items():
        owner, _, end = key.rpartition(".")
        if kind == "FluxTransformer2DModel" and owner.endswith(MODULATIONS):
            chunks = tensor.shape[0] // weights[f"{owner}.weight"].shape[1]
            tensors |= of_modulation(owner, end, tensor, chunks, dtype)
        elif owner not in rows:
            tensors[key] = in_dtype(tensor, dtype) if tensor.dtype.is_floating_point else tensor
    for name, linear in linears.items():
        own = svdquant.w4a4_tensors(with_shift(linear, shift_of(name), dtype), rank, dtype)
        own["smooth_factor_orig"] = own["smooth_factor"]
        tensors |= {f"{name}.{end}": each for end, each in own.items()}
    precision = {"int4": "int4", "nvfp4": "fp4"}[fmt]
    path = folder / f"svdq-{precision}_r{rank}-{NAMES[kind]}.safetensors"
    metadata = FORMAT | {
        "model_class": CLASSES[kind][0],
        "config": network.to_json_string(),
        "quantization_config": json.dumps(quantization_config(fmt, rank)),
        "comfy_config": "{}",
    }
    return write_file(path, {old_name(key): each for key, each in tensors.items()}, metadata)


def quantization_config(fmt: str, rank: int) -> dict[str, object]:
    """Build the ``quantization_config`` of the file's metadata."""
    int4 = fmt == "int4"
    common = {"dtype": "int4" if int4 else "fp4_e2m1_all", "group_size": svdquant.BLOCKS[fmt]}
    weight = common | {"scale_dtype": None if int4 else [None, "fp8_e4m3_nan"]}
    activation = common | {"scale_dtype": None if int4 else "fp8_e4m3_nan"}
    return {"method": "svdquant", "rank": rank, "weight": weight, "activation": activation}


def of_modulation(owner: str, end: str, tensor: Readable, chunks: int, dtype: torch.dtype) -> dict[str, Readable]:
    """Return the stored tensors of the modulation ``owner``: of its weight, or of its bias, as ``end`` says."""
    if end == "weight":
        return {f"{owner}.{name}": each for name, each in svdquant.w4a16_tensors(tensor, chunks, dtype).items()}
    read = tensor.read
    shape = tuple(tensor.shape)
    return {
        f"{owner}.{end}": LazyTensor(
            shape, dtype, lambda: svdquant.interleaved(shifted(read(), chunks, 1), chunks).to(dtype)
        )
    }


def with_shift(linear: svdquant.Written, shift: float, dtype: torch.dtype) -> svdquant.Written:
    """Return the linear with a bias that compensates the shift that the kernel adds to INT4 inputs."""
    if not shift or linear.format != "int4" or linear.bias is None:
        return linear
    bias = linear.bias

    def read() -> Tensor:
        codes, scales, _ = linear.read()
        smooth = svdquant.smooth_of(linear, dtype).float()
        weight = FORMATS[linear.format].dequantize(codes, scales.to(dtype).float())
        return bias.read().float() - weight @ (shift / smooth)

    return replace(linear, bias=LazyTensor((linear.rows,), torch.float32, read))


def joined(linears: Sequence[svdquant.Written]) -> svdquant.Written:
    """Stack the rows of several linears with one input and one smoothing vector to one linear."""
    first = linears[0]
    if len(linears) == 1:
        return first

    def read() -> tuple[Tensor, ...]:
        return tuple(torch.cat(pieces) for pieces in zip(*(linear.read() for linear in linears), strict=True))

    rows = sum(linear.rows for linear in linears)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = LazyTensor((rows,), torch.float32, lambda: torch.cat([each.read().float() for each in biases]))
    return replace(
        first, rows=rows, read=read, branch=joined_branch([each.branch for each in linears if each.branch is not None]),
        bias=bias if biases else None,
    )  # fmt: skip


def joined_branch(branches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Return the low-rank branch of stacked linears, exactly."""
    if not branches:
        return None
    ups, downs = zip(*branches, strict=True)
    return torch.block_diag(*ups), torch.cat(downs)


def columns_of(linear: svdquant.Written, columns: slice) -> svdquant.Written:
    """Return the part of a linear that multiplies the inputs ``columns``, which are whole blocks."""
    block = svdquant.BLOCKS[linear.format]
    blocks = slice(columns.start // block, None if columns.stop is None else columns.stop // block)

    def read() -> tuple[Tensor, ...]:
        codes, scales, common = linear.read()
        return codes[:, columns].contiguous(), scales[:, blocks], common

    scale, branch = linear.pre_quant_scale, linear.branch
    return replace(
        linear,
        columns=len(range(*columns.indices(linear.columns))),
        read=read,
        pre_quant_scale=None if scale is None else scale[columns],
        branch=None if branch is None else (branch[0], branch[1][:, columns]),
    )
