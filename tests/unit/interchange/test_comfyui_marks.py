"""ComfyUI's marks of four and six bits: codes by hand, and bit for bit what comfy-kitchen makes of its own weights."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_safetensors
from sd_quant.files.tensors import lazy
from sd_quant.interchange.comfyui import read
from sd_quant.interchange.comfyui_marks import INT4, METHODS, Codes, check_codes, rotation, unpacked
from sd_quant.interchange.layouts import fitting
from sd_quant.interchange.stored import LayerTensors
from sd_quant.interchange.weights import codes_and_scales
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.names.authors import PREFIX, Rows
from sd_quant.numbers import relative_error
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.rotation import rotated, rotation_matrix

from .comfyui_files import authors_layers, chosen, mark_of, save
from .conftest import recipe_of
from .single_files import authors_state, in_diffusers, read_all

pytestmark = pytest.mark.commit

consumer = pytest.mark.consumer
W4A4, W4A8, AWQ = "TensorCoreConvRotW4A4Layout", "AsymW4A8Int8Layout", "TensorCoreAWQW4A16Layout"
NAMES = {W4A4: "convrot_w4a4", W4A8: "asym_w4a8_int8", AWQ: "awq_w4a16"}
# how a weight is quantized: layout, its options, the mark without its format
CASES: dict[str, tuple[str, dict, dict]] = {
    "w4a4": (W4A4, {"convrot_groupsize": 16}, {"convrot_groupsize": 16}),
    "w4a4-params": (W4A4, {"convrot_groupsize": 64}, {"params": {"convrot_groupsize": 64}, "quant_group_size": 64}),
    "codebook": (W4A8, {"convrot_groupsize": 16}, {"convrot_groupsize": 16, "group_size": 16, "convrot": True}),
    "no-codebook": (W4A8, {"convrot_groupsize": 16, "codebook": False}, {"convrot_groupsize": 16}),
    "correction": (W4A8, {"convrot_groupsize": 16, "symmetric": False}, {"convrot_groupsize": 16}),
    "groups-of-8": (
        W4A8, {"convrot_groupsize": 4, "group_size": 8, "scale_dtype": torch.float32},
        {"params": {"convrot_groupsize": 4, "group_size": 8}},
    ),
    "six-bits": (W4A8, {"convrot_groupsize": 64, "bits": 6}, {"convrot_groupsize": 64}),
    "awq": (AWQ, {}, {"group_size": 64}),
    "awq-groups-of-32": (AWQ, {"group_size": 32}, {"group_size": 32}),
}  # fmt: skip


def by_kitchen(weight: Tensor, layout: str, **options):
    """comfy-kitchen's ``QuantizedTensor``; it quantizes no AWQ, whose zero points are any numbers."""
    tensor = pytest.importorskip("comfy_kitchen.tensor")
    if layout != AWQ:
        return tensor.QuantizedTensor.from_float(weight, layout, **options)
    rows, columns = weight.shape
    groups = weight.unflatten(1, (-1, options.get("group_size", 64)))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    codes = ((groups - low) / scale).round().to(torch.uint8).view(rows, columns)
    params = tensor.TensorCoreAWQW4A16Layout.Params(
        scale=scale[..., 0].T.contiguous(), zeros=(low + 8 * scale)[..., 0].T.contiguous(), orig_dtype=torch.float32,
        orig_shape=(rows, columns), group_size=groups.shape[-1],
    )  # fmt: skip
    return tensor.QuantizedTensor((codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), layout, params)


def pieces_of(weight, layer: str) -> dict[str, Tensor]:
    return {f"{layer}.{key}": each for key, each in weight.state_dict("weight").items() if each is not None}


def mark(case: str) -> dict:
    layout, _, entries = CASES[case]
    return {"format": NAMES[layout]} | entries


def codes_of(tensors: dict, entries: dict, shape: tuple[int, int], first: int = 0, last: int | None = None) -> Codes:
    stored = LayerTensors(Path("x"), "a", {name.removeprefix("a."): lazily(each) for name, each in tensors.items()})
    codes = Codes(stored, entries, shape, Rows("a.weight", first, last or shape[0], shape[0]))
    assert unpacked(stored, entries) == shape
    check_codes(codes)
    return codes


def lazily(tensor):
    return lazy(tensor) if isinstance(tensor, Tensor) else tensor


# By hand


def test_the_low_half_of_a_byte_is_first_and_signed():
    """Where NVFP4's is second, and AWQ's unsigned."""
    weight = torch.tensor([[0x70, 0x98, 0x21, -1]], dtype=torch.int16).to(torch.int8).repeat(2, 8)
    signed = codes_of({"a.weight": weight, "a.weight_scale": torch.tensor([1.0, 2])},
                      {"format": "convrot_w4a4", "convrot_groupsize": 4}, (2, 64))  # fmt: skip
    expected = torch.tensor([0, 7, -8, -7, 1, 2, -1, -1.0]).repeat(8) * torch.tensor([[1.0], [2]])
    torch.testing.assert_close(rotated(signed.read(), 4), expected)
    scales = {"a.weight_scale": torch.full((1, 2), 0.5), "a.weight_zeros": torch.tensor([[4.0, 1]])}
    unsigned = codes_of({"a.weight": weight} | scales, {"format": "awq_w4a16"}, (2, 64))
    expected = torch.tensor([0, 7, 8, 9, 1, 2, 15, 15.0]).repeat(8) / 2 - 4 + torch.tensor([[4.0], [1]])
    assert torch.equal(unsigned.read(), expected)


def w4a8(**tensors: Tensor) -> dict[str, Tensor]:
    """A row of 32 codes, all of which are 12, or 44 of 63."""
    found = {
        "a.weight": torch.full((1, 16), -52, dtype=torch.int8), "a.weight_s_channel": torch.tensor([0.5]),
        "a.weight_s_rel": torch.tensor([[32.0, 2.6]]).to(torch.float8_e4m3fn),
    }  # fmt: skip
    return found | {f"a.{name}": tensor for name, tensor in tensors.items()}


W4A8_MARK = {"format": "asym_w4a8_int8", "convrot_groupsize": 4}


def test_levels_are_rounded_to_int8_before_the_channels_scale():
    """128 is clamped to 127; 4 * 2.5 has no fraction, a level of the codebook has."""
    plain = codes_of(w4a8(), W4A8_MARK, (1, 32)).read()
    torch.testing.assert_close(rotated(plain, 4)[:, [0, 16]], torch.tensor([[63.5, 5.0]]))
    codebook = torch.zeros(16).index_fill(0, torch.tensor(12), 1.3)  # 41.6 and 3.25
    levels = codes_of(w4a8(weight_codebook=codebook), W4A8_MARK, (1, 32)).read()
    torch.testing.assert_close(rotated(levels, 4)[:, [0, 16]], torch.tensor([[21.0, 1.5]]))
    bits = {"weight": torch.cat([w4a8()["a.weight"], torch.full((1, 8), -86, dtype=torch.int8)], 1)}
    six = codes_of(w4a8(**bits), W4A8_MARK, (1, 32)).read()  # 12 + 2 * 16 - 32
    torch.testing.assert_close(rotated(six, 4)[:, [0, 16]], torch.tensor([[63.5, 15.0]]))
    corrected = w4a8(weight_correction=torch.tensor([[1.0], [3.0]]))
    shifted = codes_of(corrected, W4A8_MARK, (1, 32))
    torch.testing.assert_close(rotated(shifted.read(), 4)[:, [0, 16]], torch.tensor([[64.5, 8.0]]))
    assert METHODS["asym_w4a8_int8"].inputs(shifted) is None


def test_scales_of_groups_may_be_bytes():
    tensors = w4a8()
    as_bytes = tensors | {"a.weight_s_rel": tensors["a.weight_s_rel"].view(torch.uint8)}
    assert torch.equal(codes_of(tensors, W4A8_MARK, (1, 32)).read(), codes_of(as_bytes, W4A8_MARK, (1, 32)).read())


@pytest.mark.parametrize(
    "tensors, entries, words",
    [
        ({}, {"group_size": 3}, "group_size 3"),
        ({}, {"group_size": 24}, "group_size 24"),
        ({}, {"group_size": "16"}, "group_size '16'"),
        ({}, {"group_size": True}, "group_size True"),
        ({}, {"group_size": 10**9}, "group_size 1000000000"),
        ({}, {"convrot_groupsize": 8}, "convrot_groupsize 8"),
        ({}, {"convrot": False}, "rotates all the same"),
        ({"a.weight": torch.ones(1, 20, dtype=torch.int8)}, {}, r"weight' is \[1, 20\]"),
        ({"a.weight": torch.ones(1, 24, dtype=torch.int8), "a.weight_codebook": torch.ones(16)}, {}, "six bits"),
        ({"a.weight": torch.ones(1, 24, dtype=torch.int8), "a.weight_s_rel": torch.ones(1, 4)}, {"group_size": 8},
         "groups of 8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tensors, entries, words):
    with pytest.raises(ArtifactError, match=words):
        codes_of(w4a8() | tensors, W4A8_MARK | entries, (1, 32))


@pytest.mark.parametrize("name, end", [(name, end) for name, row in METHODS.items() for end in row.shapes])
def test_a_damaged_tensor_of_any_mark_is_refused_by_name(name, end):
    row, tensors, entries = METHODS[name], {}, {"format": name, "convrot_groupsize": 4}
    for each, text in {"weight": f"N K/{1 + row.packed}", **row.shapes}.items():
        shape = fitting(text.replace("g", str(row.group)), (64, 64))[0]
        dtypes = {"weight": (row.dtype,), **row.dtypes}.get(each, (torch.float32,))
        tensors[f"a.{each}"] = torch.ones(shape).to(dtypes[0])
    codes_of(tensors, entries, (64, 64))
    sound = tensors.pop(f"a.{end}")
    damages = {f"{end}' is .* in float64, expected": sound.double()}
    if end != "weight":
        damages[rf"{end}' is \[2, .* in .*, expected \["] = sound.expand(2, 3, *sound.shape)
    for words, damaged in damages.items():
        with pytest.raises(ArtifactError, match=words):
            codes_of(tensors | {f"a.{end}": damaged}, entries, (64, 64))
    if end in row.needs:
        with pytest.raises(ArtifactError, match=f"has no '{end}'"):
            codes_of(tensors, entries, (64, 64))


@pytest.mark.parametrize("entries", [{"linear_dtype": "int2"}, {"linear_dtype": 8}, {"quant_group_size": 32}])
def test_products_that_no_kernel_has_are_refused(entries):
    tensors = {"a.weight": torch.ones(2, 32, dtype=torch.int8), "a.weight_scale": torch.ones(2)}
    with pytest.raises(ArtifactError, match="linear_dtype"):
        codes_of(tensors, {"format": "convrot_w4a4", "convrot_groupsize": 4} | entries, (2, 64))


def test_inputs_are_int8_where_the_mark_says_so():
    tensors = {"a.weight": torch.ones(2, 32, dtype=torch.int8), "a.weight_scale": torch.ones(2)}
    entries = {"format": "convrot_w4a4", "convrot_groupsize": 64}
    told = [
        str(METHODS["convrot_w4a4"].inputs(codes_of(tensors, entries | more, (2, 64))))
        for more in ({}, {"linear_dtype": "int8"})
    ]
    assert told == ["int4, a scale a row, rotated by 64", "int8, a scale a row, rotated by 64"]


# comfy-kitchen's


@consumer
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_weights_and_layers_are_those_of_comfy_kitchen(case, tmp_path):
    """Weights before they are rotated back bit for bit; a rotation, which sums in another order, to 1e-6."""
    layout, options, _ = CASES[case]
    torch.manual_seed(0)
    weight = by_kitchen(torch.randn(96, 192) * torch.rand(96, 1), layout, **options)
    save(tmp_path / "a.safetensors", pieces_of(weight, "a"))
    expected, tensors = weight.dequantize(), read_safetensors(whole_file(tmp_path / "a.safetensors"))
    for first, last in ((0, 96), (10, 70)):
        codes = codes_of(tensors, mark(case), (96, 192), first, last)
        found = codes.read()
        torch.testing.assert_close(found, expected[first:last], rtol=0, atol=0 if layout == AWQ else 1e-6)
        group = rotation(codes)
        assert bool(group) == (layout != AWQ)
    whole = codes_of(tensors, mark(case), (96, 192))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd_quant.interchange.comfyui_marks.rotated", lambda weight, group: weight)
        patch.setattr("comfy_kitchen.backends.eager.w4a8_int8.rotate_int8_convrot_weight", lambda weight, group: weight)
        patch.setattr("comfy_kitchen.backends.eager.convrot_w4a4._rotate_weight", lambda weight, matrix, group: weight)
        assert torch.equal(whole.read(), weight.dequantize())
    x, bias = torch.randn(2, 5, 192) * 2, torch.randn(96)
    x[0, 0] = 0
    inputs = METHODS[NAMES[layout]].inputs(whole)
    ours = F.linear(x if inputs is None else inputs(x), whole.read(), bias)
    assert relative_error(F.linear(x.flatten(0, 1), weight, bias).view_as(ours), ours) < 1e-5
    assert (inputs is None) == (case == "correction" or layout == AWQ)


@consumer
def test_int4_inputs_are_rounded_bit_for_bit():
    kernels = pytest.importorskip("comfy_kitchen.backends.eager.convrot_w4a4")
    x = torch.randn(50, 256) * torch.logspace(-4, 4, 50)[:, None]
    x[0] = 0
    codes, scales = kernels._quantize_signed_int4_rowwise_unpacked(x)
    assert torch.equal(INT4(x), codes * scales[:, None]) and codes.min() == -7
    assert torch.equal(rotation_matrix(256), kernels._build_hadamard(256))


@consumer
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_files_with_every_mark(tiny, tmp_path, family):
    """Flux's names have q, k and v in one weight."""
    checkpoint = tiny(family).checkpoint
    state, authors = authors_state(checkpoint), authors_layers(checkpoint)
    tensors, weights, cases = {}, {}, list(CASES)
    for name, tensor in state.items():
        if not chosen(name, tensor) or tensor.shape[1] % 64:
            tensors[name] = tensor
            continue
        layer, case = name.removesuffix(".weight"), cases[len(weights) % len(cases)]
        layout, options, _ = CASES[case]
        weights[layer] = case, by_kitchen(tensor.float(), layout, **options)
        tensors |= pieces_of(weights[layer][1], layer) | {f"{layer}.comfy_quant": mark_of(mark(case))}
    assert len(weights) >= len(cases)
    save(tmp_path / "a.safetensors", tensors)
    candidate = read(tmp_path / "a.safetensors", checkpoint)
    state |= {f"{layer}.weight": weight.dequantize() for layer, (_, weight) in weights.items()}
    expected = in_diffusers(empty_denoiser(checkpoint), state)
    for name, found in read_all(candidate).items():
        torch.testing.assert_close(found, expected[name].float(), rtol=0, atol=1e-6)
    for name, layer in candidate.layers.items():
        case, _ = weights[authors[name]]
        assert layer.format == NAMES[CASES[case][0]]
        assert (6 if case == "six-bits" else 4) < layer.bits < 9
    assert candidate.stored_bytes == sum(each.nbytes for each in tensors.values())


@consumer
@torch.no_grad()
def test_comfy_kitchen_computes_what_is_written_of_int4(tiny, tmp_path):
    """Weights bit for bit those of our codes; a layer that is packed and would hide the model's kind is not."""
    tensor = pytest.importorskip("comfy_kitchen.tensor")
    case = tiny("sdxl")
    assignment = case.assignment(recipe_of("int4", activation=None, alpha=None), "comfyui")
    stored = load_file(case.written(assignment, "comfyui", tmp_path))
    layers = {layer.name: layer for layer in assignment.values() if layer.format}
    assert layers and not any(name.endswith(("attn2.to_k", "attn2.to_v")) for name in layers)
    ends = {PREFIX + first: name for name, first in authors_layers(case.checkpoint).items()}
    marks = {name.removesuffix(".comfy_quant") for name in stored if name.endswith(".comfy_quant")}
    assert {ends[name] for name in marks} == layers.keys()
    for name in marks:
        assert json.loads(bytes(stored[f"{name}.comfy_quant"].tolist())) == {"format": "awq_w4a16"}
        layer = layers[ends[name]]
        params = tensor.TensorCoreAWQW4A16Layout.Params(
            scale=stored[f"{name}.weight_scale"].float(), zeros=stored[f"{name}.weight_zeros"].float(),
            orig_dtype=torch.float32, orig_shape=layer.weight_shape,
        )  # fmt: skip
        weight = tensor.QuantizedTensor(stored[f"{name}.weight"], AWQ, params)
        expected = FORMATS["int4"].dequantize(*codes_and_scales(case.checkpoint, layer))
        assert torch.equal(weight.dequantize(), expected)
        x = torch.randn(3, layer.weight_shape[1])
        torch.testing.assert_close(F.linear(x, weight), F.linear(x, expected))
