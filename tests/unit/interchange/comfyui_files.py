"""Files of ComfyUI's kind of tiny checkpoints, and comfy-kitchen, whose kernels ComfyUI calls, as it opens them."""

import json
from dataclasses import dataclass, field
from itertools import cycle

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sd_quant.interchange.denoiser import needed
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.names.authors import authors_places

MARK = ".comfy_quant"
LAYOUTS = {  # comfy-kitchen's, by the formats of marks
    "float8_e4m3fn": "TensorCoreFP8Layout", "float8_e5m2": "TensorCoreFP8Layout",
    "int8_tensorwise": "TensorWiseINT8Layout", "nvfp4": "TensorCoreNVFP4Layout", "mxfp8": "TensorCoreMXFP8Layout",
    "convrot_w4a4": "TensorCoreConvRotW4A4Layout", "asym_w4a8_int8": "AsymW4A8Int8Layout",
    "awq_w4a16": "TensorCoreAWQW4A16Layout",
}  # fmt: skip
STATIC = torch.tensor(0.013)


@dataclass(frozen=True)
class Case:
    """How comfy-kitchen quantizes a weight: the format of its mark, options, and what else the file has of it."""

    format: str
    options: dict = field(default_factory=dict)
    entries: dict = field(default_factory=dict)  # of the mark
    further: dict[str, Tensor] = field(default_factory=dict)

    @property
    def mark(self) -> dict:
        return {"format": self.format} | self.entries

    @property
    def rotates(self) -> bool:
        return "convrot_groupsize" in self.options


W4A8 = "asym_w4a8_int8"
CASES = {
    "fp8": Case("float8_e4m3fn", further={"input_scale": STATIC}),
    "fp8-cast-inputs": Case("float8_e4m3fn"),
    "fp8-high-inputs": Case("float8_e4m3fn", entries={"full_precision_matrix_mult": True}),
    "e5m2": Case("float8_e5m2", {"dtype": torch.float8_e5m2}, further={"input_scale": STATIC}),
    "int8-rows": Case("int8_tensorwise", {"per_channel": True}),
    "int8-one-scale": Case("int8_tensorwise"),
    "int8-rotated": Case(
        "int8_tensorwise",
        {"per_channel": True, "convrot": True, "convrot_groupsize": 16},
        {"convrot": True, "convrot_groupsize": 16},
    ),
    "nvfp4": Case("nvfp4", further={"input_scale": STATIC / 10}),
    "nvfp4-dynamic": Case("nvfp4"),
    "mxfp8": Case("mxfp8"),
    "w4a4": Case("convrot_w4a4", {"convrot_groupsize": 16}, {"convrot_groupsize": 16}),
    "w4a4-params": Case(
        "convrot_w4a4", {"convrot_groupsize": 64}, {"params": {"convrot_groupsize": 64}, "quant_group_size": 64}
    ),
    "codebook": Case(W4A8, {"convrot_groupsize": 16}, {"convrot_groupsize": 16, "group_size": 16, "convrot": True}),
    "no-codebook": Case(W4A8, {"convrot_groupsize": 16, "codebook": False}, {"convrot_groupsize": 16}),
    "correction": Case(W4A8, {"convrot_groupsize": 16, "symmetric": False}, {"convrot_groupsize": 16}),
    "groups-of-8": Case(
        W4A8,
        {"convrot_groupsize": 4, "group_size": 8, "scale_dtype": torch.float32},
        {"params": {"convrot_groupsize": 4, "group_size": 8}},
    ),
    "six-bits": Case(W4A8, {"convrot_groupsize": 64, "bits": 6}, {"convrot_groupsize": 64}),
    "awq": Case("awq_w4a16", {}, {"group_size": 64}),
    "awq-groups-of-32": Case("awq_w4a16", {"group_size": 32}, {"group_size": 32}),
}


def kitchen():
    return pytest.importorskip("comfy_kitchen.tensor")


def by_kitchen(weight: Tensor, fmt: str, **options):
    """comfy-kitchen's ``QuantizedTensor``; it quantizes no AWQ, whose zero points are any numbers."""
    if fmt != "awq_w4a16":
        return kitchen().QuantizedTensor.from_float(weight, LAYOUTS[fmt], **options)
    rows, columns = weight.shape
    groups = weight.unflatten(1, (-1, options.get("group_size", 64)))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    codes = ((groups - low) / scale).round().to(torch.uint8).view(rows, columns)
    params = kitchen().TensorCoreAWQW4A16Layout.Params(
        scale=scale[..., 0].T.contiguous(), zeros=(low + 8 * scale)[..., 0].T.contiguous(), orig_dtype=torch.float32,
        orig_shape=(rows, columns), group_size=groups.shape[-1],
    )  # fmt: skip
    return kitchen().QuantizedTensor((codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), LAYOUTS[fmt], params)


def stored_pieces(weight, name: str) -> dict[str, Tensor]:
    """A file has no dtype for powers of two, so their exponents are bytes."""
    pieces = {key: each for key, each in weight.state_dict(name).items() if each is not None}
    return {key: each.view(torch.uint8) if "e8m0" in str(each.dtype) else each for key, each in pieces.items()}


def quantized(state: dict[str, Tensor], *cases: str) -> tuple[dict[str, Tensor], dict[str, tuple]]:
    """A file's tensors, whose layers are the ``cases`` in turn; case and quantized weight by layer."""
    found: dict[str, Tensor] = {}
    weights: dict[str, tuple] = {}
    following = cycle(cases)
    for name, tensor in state.items():
        if not chosen(name, tensor):
            found[name] = tensor.half() if tensor.ndim > 1 else tensor
            continue
        layer, case = name.removesuffix(".weight"), CASES[next(following)]
        weight = by_kitchen(tensor.float(), case.format, **case.options)
        weights[layer] = case, weight
        found |= stored_pieces(weight, name) | {f"{layer}{MARK}": mark_of(case.mark)}
        found |= {f"{layer}.{each}": scale.clone() for each, scale in case.further.items()}
    assert len(weights) > 10
    return found, weights


def dequantized(state: dict[str, Tensor], weights: dict[str, tuple]) -> dict[str, Tensor]:
    """By comfy-kitchen; padding is cut off."""
    found = {name: (each.half() if each.ndim > 1 else each).float() for name, each in state.items()}
    for layer, (_, weight) in weights.items():
        rows, columns = state[f"{layer}.weight"].shape
        found[f"{layer}.weight"] = weight.dequantize()[:rows, :columns]
    return found


def marks_of(state: dict[str, Tensor]) -> dict[str, dict]:
    return {name.removesuffix(MARK): json.loads(bytes(each.tolist())) for name, each in state.items()
            if name.endswith(MARK)}  # fmt: skip


def chosen(name: str, tensor: Tensor) -> bool:
    return name.endswith(".weight") and tensor.ndim == 2 and min(tensor.shape) >= 16 and "embed" not in name


def mark_of(mark: dict | bytes) -> Tensor:
    return torch.tensor(list(mark if isinstance(mark, bytes) else json.dumps(mark).encode()), dtype=torch.uint8)


def save(path, tensors, prefix: str = "", metadata=None) -> None:
    save_file({prefix + name: each.contiguous() for name, each in tensors.items()}, path, metadata)


def authors_layers(checkpoint) -> dict[str, str]:
    """The authors' layer, or the first of them, by the name that a layer of diffusers has."""
    network = empty_denoiser(checkpoint)
    places = authors_places(network, {name: tuple(each.shape) for name, each in needed(network).items()})
    end = ".weight"
    return {name.removesuffix(end): parts[0].name.removesuffix(end) for name, parts in places.items()}
