"""diffusers with nunchaku_lite: SVDQuant's linears under diffusers' own names, for nunchaku's kernels.

The config lists the exact names of the replaced linears; every other parameter has diffusers' name, and missing or
additional keys are refused (``check_strict_state_dict_match``):

    {"quant_method": "nunchaku_lite", "compute_dtype": "float16",
     "svdq_w4a4": {"precision": "int4", "group_size": 64, "rank": 32, "targets": [...]},
     "awq_w4a16": {"precision": "int4", "group_size": 64, "targets": [...]}}

A linear's tensors are those of ``nunchaku_linears``, without ``smooth_factor_orig``; NVFP4's have ``wcscales`` and
``wtscale``. All branches have one rank, padded with zeros, and both sides of a weight are multiples of 128. Nothing is
fused, and no input is shifted. Source: diffusers 0.42.1 (``quantizers/nunchaku``); its kernels need a GPU and are code
of a repository (``DIFFUSERS_TRUST_REMOTE_KERNELS``).

W4A4 linears are written, in fp16, which holds scales of INT4 exactly. W4A16 is only read.
"""

from pathlib import Path

import torch

from sd_quant.errors import ArtifactError
from sd_quant.files import refusing
from sd_quant.files.tensors import Readable, lazy
from sd_quant.interchange import IN_BLOCKS, ForeignFormat
from sd_quant.interchange import nunchaku_linears as svdquant
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer
from sd_quant.interchange.stored import Folder, shown, told
from sd_quant.interchange.weights import Assignment, high_precision, write_folder
from sd_quant.knobs import BOUNDED
from sd_quant.models.checkpoint import Checkpoint

FACTS = ForeignFormat(
    "diffusers_nunchaku_lite",
    reads="a diffusers folder quantized for nunchaku_lite",
    method="nunchaku_lite",
    consumer="diffusers with nunchaku's kernels",
    formats={"int4": IN_BLOCKS, "nvfp4": IN_BLOCKS},
    loading="import torch\nfrom diffusers import DiffusionPipeline\n\n"
    "pipeline = DiffusionPipeline.from_pretrained({folder!r}{absent}, torch_dtype=torch.float16).to('cuda')",
    untried="Nobody has run it: it follows the source of diffusers 0.42.1 and nunchaku 1.3.0dev, and diffusers' loader "
    "takes every tensor, without kernels. It needs `pip install diffusers==0.42.1 accelerate kernels` and "
    "`DIFFUSERS_TRUST_REMOTE_KERNELS=true`, which runs code of rootonchair/nunchaku-lite-kernels. INT4 needs an NVIDIA "
    "GPU of SM75, 80, 86 or 89, so no Hopper, NVFP4 one of SM120 or 121.",
    multiplied=frozenset({"int4", "nvfp4"}),
    low_rank=True,
    multiples={"int4": 128, "nvfp4": 128},
)
W4A4, W4A16 = "svdq_w4a4", "awq_w4a16"


def read(path: Path, checkpoint: Checkpoint) -> QuantizedDenoiser:
    """Return the denoiser as nunchaku computes it. Raises ArtifactError if config and tensors differ."""
    folder = Folder(path, checkpoint)
    targets, shapes = targets_of(folder), folder.shapes
    linears = svdquant.linears_of(path, folder.tensors)
    layers: dict[str, QuantizedLayer] = {}
    rest: dict[str, Readable] = dict(folder.tensors)
    for name, (kind, precision, rank) in targets.items():
        if name not in linears or len(shapes.get(name, ())) != 2:
            raise ArtifactError(
                f"{path} lists {shown(name)} as a target of {kind}, which is no quantized linear of the model; "
                "give a quantization of that very model"
            )
        rows, columns = shapes[name]
        for end in linears[name].tensors:
            rest.pop(f"{name}.{end}")
        if kind == W4A16:
            layers[name] = svdquant.w4a16_layer(linears[name], rows, columns)
            bias: Readable | None = linears[name].tensors.get("bias")
        else:
            stored = svdquant.stored_w4a4(linears[name], rows, columns)
            if (stored.format, stored.rank) != (precision, rank):
                raise ArtifactError(
                    f"{path} has {shown(name)} as {precision} with rank {told(rank)} in its config and "
                    f"{stored.format} with rank {stored.rank} in its weights; fetch both again, together"
                )
            layers[name], bias = svdquant.w4a4_layer([stored], slice(None))
        rest |= {} if bias is None else {f"{name}.bias": bias}
    return folder.whole(FACTS.name, FACTS.method, layers, rest)


def targets_of(folder: Folder) -> dict[str, tuple[str, str, int | None]]:
    """Return W4A4 or W4A16, precision and rank by linear, from the config. Raises ArtifactError for a broken config."""
    found: dict[str, tuple[str, str, int | None]] = {}
    advice = "expected the config that diffusers 0.42.1 reads"
    with refusing(f"{folder.path} has a broken quantization_config", KeyError, TypeError, ValueError, advice=advice):
        for kind, known in ((W4A4, svdquant.BLOCKS), (W4A16, {"int4": svdquant.BLOCKS["int4"]})):
            section = folder.config.get(kind)
            if section is None:
                continue
            precision, rank, names = section["precision"], section["rank"] if kind == W4A4 else None, section["targets"]
            if known.get(precision) != section["group_size"]:
                raise ValueError(f"{BOUNDED.repr(precision)} in groups of {BOUNDED.repr(section['group_size'])}")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"targets {BOUNDED.repr(names)}")
            for name in names:
                if name in found:
                    raise ValueError(f"{shown(name)} is listed twice")
                found[name] = kind, precision, rank
    return found


# Writing


def write(checkpoint: Checkpoint, assignment: Assignment, folder: Path) -> Path:
    """Write the denoiser and its config into the pipeline ``folder``. Raises ConfigError for two weight formats."""
    weights = high_precision(checkpoint, assignment)
    linears, precision = svdquant.written(FACTS.name, checkpoint, assignment, weights)
    rank = svdquant.common_rank(linears.values())
    tensors: dict[str, Readable] = {
        name: tensor for name, tensor in weights.items() if name.rpartition(".")[0] not in linears
    }
    for name, linear in linears.items():
        own: dict[str, Readable] = dict(svdquant.w4a4_tensors(linear, rank, torch.float16))
        if precision == "nvfp4":
            own["wtscale"] = lazy(torch.ones(1, dtype=torch.float16))
        tensors |= {f"{name}.{end}": each for end, each in own.items()}
    section = {"precision": precision, "group_size": svdquant.BLOCKS[precision], "rank": rank, "targets": list(linears)}
    quantization = {"quant_method": FACTS.method, "compute_dtype": "float16", W4A4: section}
    return write_folder(checkpoint, folder, tensors, quantization)
