"""Files for ComfyUI, quantized by comfy-kitchen, whose kernels ComfyUI calls, and what these compute of them."""

import json
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_header, read_safetensors
from sd_quant.files.tensors import lazy
from sd_quant.interchange import READERS
from sd_quant.interchange.comfyui import METADATA, read
from sd_quant.interchange.comfyui_marks import METHODS, Marked, e8m0
from sd_quant.interchange.denoiser import QuantizedLayer
from sd_quant.interchange.diffusers_bfl import scaled_layers
from sd_quant.interchange.stored import LayerTensors
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.names.authors import PREFIX, Rows
from sd_quant.names.nemo import PREFIX as NETWORKS
from sd_quant.names.sgm import PREFIXES
from sd_quant.numbers import relative_error
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.rotation import rotated

from ..tiny import changed
from .conftest import PER_ROW_FP8, PLAIN, assert_equal, recipe_of
from .single_files import authors_state, in_authors_rows, in_diffusers, read_all

pytestmark = pytest.mark.commit

# Files, and comfy-kitchen as ComfyUI opens them

MARK = ".comfy_quant"
LAYOUTS = {  # comfy-kitchen's, by the formats of marks
    "float8_e4m3fn": "TensorCoreFP8Layout", "float8_e5m2": "TensorCoreFP8Layout",
    "int8_tensorwise": "TensorWiseINT8Layout", "nvfp4": "TensorCoreNVFP4Layout", "mxfp8": "TensorCoreMXFP8Layout",
    "convrot_w4a4": "TensorCoreConvRotW4A4Layout", "asym_w4a8_int8": "AsymW4A8Int8Layout",
    "awq_w4a16": "TensorCoreAWQW4A16Layout",
}  # fmt: skip
STATIC = torch.tensor(0.013)


class Case(NamedTuple):
    """How comfy-kitchen quantizes a weight: the format of its mark, options, and what else the file has of it."""

    format: str
    options: dict = {}
    entries: dict = {}  # of the mark
    further: dict[str, Tensor] = {}


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
        found |= stored_pieces(weight, name) | {f"{layer}{MARK}": mark_of({"format": case.format} | case.entries)}
        found |= {f"{layer}.{each}": scale.clone() for each, scale in case.further.items()}
    assert len(weights) > 10
    return found, weights


def dequantized(state: dict[str, Tensor], weights: dict[str, tuple]) -> dict[str, Tensor]:
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


consumer = pytest.mark.consumer
INPUT_OPTIONS = {"nvfp4": {}, "mxfp8": {}}  # where a file says no scale


@pytest.fixture(scope="module")
def sdxl(tiny):
    return tiny("sdxl").checkpoint


@pytest.fixture(scope="module")
def tensors_in(sdxl):
    state = authors_state(sdxl)
    quantize = cache(lambda *cases: quantized(state, *cases)[0])
    return lambda *cases: dict(quantize(*cases))


@pytest.fixture
def opened(sdxl, tmp_path):
    def save_and_read(tensors, prefix: str = "", metadata=None):
        save(tmp_path / "a.safetensors", tensors, prefix, metadata)
        return read(tmp_path / "a.safetensors", sdxl)

    return save_and_read


@pytest.fixture
def unrotated(monkeypatch):
    """A rotation sums in another order than comfy-kitchen's; without it all numbers are the same."""
    pytest.importorskip("comfy_kitchen")
    monkeypatch.setattr("sd_quant.interchange.layouts.rotated", lambda weight, group: weight)
    for module in ("quantization", "convrot_w4a4"):
        name = f"comfy_kitchen.backends.eager.{module}._rotate_weight"
        monkeypatch.setattr(name, lambda weight, matrix, group: weight)


@consumer
@pytest.mark.parametrize("family", ["sdxl", "sd21", "flux", "sd3"])
def test_every_weight_is_what_comfy_kitchen_makes_of_it(tiny, family, tmp_path, unrotated):
    checkpoint = tiny(family).checkpoint
    state = authors_state(checkpoint)
    tensors, weights = quantized(state, *CASES)
    assert len(weights) > len(CASES) or family == "sd3"
    save(tmp_path / "a.safetensors", tensors)
    candidate = read(tmp_path / "a.safetensors", checkpoint)
    assert_equal(read_all(candidate), in_diffusers(empty_denoiser(checkpoint), dequantized(state, weights)))
    assert len(candidate.layers) >= len(weights)
    assert candidate.stored_bytes == sum(each.nbytes for each in tensors.values())
    stored = sum(each.nbytes for name, each in tensors.items() if name.rpartition(".")[0] in weights and
                 name.rpartition(".")[2].startswith("weight"))  # fmt: skip
    assert 0 <= stored - sum(layer.stored_bytes for layer in candidate.layers.values()) < 3 * len(candidate.layers)


@consumer
def test_inputs_are_multiplied_before_they_are_quantized(opened, tensors_in):
    tensors = tensors_in("nvfp4")
    factor = torch.rand(2 * tensors[f"{LAYER}.weight"].shape[1]) + 0.5
    candidate = opened(tensors | {f"{LAYER}.pre_quant_scale": factor})
    layer = candidate.layers["up_blocks.0.attentions.0.transformer_blocks.0.ff.net.2"]
    x = torch.randn(3, len(factor))
    expected = by_kitchen(x * factor, "nvfp4", scale=STATIC / 10).dequantize()[:3]
    torch.testing.assert_close(layer.inputs(x), expected, rtol=1e-6, atol=1e-7)


@consumer
def test_marks_may_stand_in_the_header(opened, tensors_in):
    tensors = tensors_in("fp8", "fp8-high-inputs", "nvfp4")
    expected = all_of(opened(tensors))
    end = ".comfy_quant"
    marks = {name.removesuffix(end): tensors.pop(name).tolist() for name in list(tensors) if name.endswith(end)}
    for prefix in ("", PREFIX):
        layers = {prefix + name: json.loads(bytes(mark)) for name, mark in marks.items()}
        others = {"text_encoders.a": {"format": "of no interest"}} if prefix else {}
        assert_same(all_of(opened(tensors, prefix, in_header(layers | others))), expected)


def in_header(marks: dict[str, dict]) -> dict[str, str]:
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": marks})}


def all_of(candidate) -> tuple[dict[str, Tensor], dict[str, str]]:
    return read_all(candidate), {name: str(layer.inputs) for name, layer in candidate.layers.items()}


def assert_same(found, expected) -> None:
    assert_equal(found[0], expected[0])
    assert found[1] == expected[1]


def old_file(tensors: dict[str, Tensor], mark: Tensor) -> dict[str, Tensor]:
    names = {"weight_scale": "scale_weight", "input_scale": "scale_input"}
    found = {"scaled_fp8": mark}
    for name, tensor in tensors.items():
        head, _, end = name.rpartition(".")
        if end != "comfy_quant":
            found[f"{head}.{names.get(end, end)}"] = tensor
    return found


@consumer
@pytest.mark.parametrize(("case", "numbers"), [("fp8", 0), ("fp8-cast-inputs", 1), ("fp8-high-inputs", 2)])
def test_the_older_way_means_the_same(opened, tensors_in, case, numbers):
    expected = all_of(opened(tensors_in(case)))
    mark = torch.zeros(numbers, dtype=torch.float8_e4m3fn)
    assert_same(all_of(opened(old_file(tensors_in(case), mark), PREFIX)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family, dtype", [("sdxl", torch.float8_e4m3fn), ("flux", torch.float8_e5m2)])
def test_a_plain_cast_is_multiplied_as_it_is_stored(tiny, family, dtype, tmp_path):
    checkpoint = tiny(family).checkpoint
    state = {name: each.to(dtype) for name, each in authors_state(checkpoint).items()}
    others = {"first_stage_model.a": torch.ones(3), "conditioner.b": torch.ones(2), "cond_stage_model.c": torch.ones(1)}
    save(tmp_path / "a.safetensors", {PREFIX + name: each for name, each in state.items()} | others)
    candidate = read(tmp_path / "a.safetensors", checkpoint)
    network = empty_denoiser(checkpoint)
    assert_equal(read_all(candidate), in_diffusers(network, {name: each.float() for name, each in state.items()}))
    assert {(layer.format, layer.scales, layer.inputs, layer.bits) for layer in candidate.layers.values()} == {
        (str(dtype).removeprefix("torch."), "none", None, 8.0)
    }
    convolutions = {name for name, module in network.named_modules() if isinstance(module, nn.Conv2d)}
    assert convolutions <= candidate.layers.keys() and candidate.bits == 8
    save(tmp_path / "b.safetensors", {name: each.half() for name, each in authors_state(checkpoint).items()})
    plain = read(tmp_path / "b.safetensors", checkpoint)
    assert READERS["comfyui"].recognizes(plain.path) and not plain.layers and plain.bits == 16


LAYER = "output_blocks.0.1.transformer_blocks.0.ff.net.2"


def fp8_mark(layer: str) -> dict[str, Tensor]:
    return {f"{layer}.comfy_quant": mark_of({"format": "float8_e4m3fn"}), f"{layer}.weight_scale": torch.ones(())}


ROTATING = {"format": "int8_tensorwise", "convrot": True}
IN_E5M2 = in_header({LAYER: {"format": "float8_e5m2"}})
OLD = torch.zeros(1)


@consumer
@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("fp8", {"comfy_quant": mark_of({"format": "svdquant_w4a4"})}, "that are not read here .*svdquant_w4a4'"),
        ("fp8", {"comfy_quant": mark_of({"format": ["fp8"]})}, "formats that are not read here"),
        ("fp8", {"comfy_quant": mark_of({"format": "float8_e4m3fn", "convrot": True})}, "entries that are not known"),
        ("fp8", {"comfy_quant": mark_of(b'{"format": 1, "format": 2}')}, f"{LAYER}.* is not JSON"),
        ("fp8", {"comfy_quant": mark_of(b"[1]")}, f"{LAYER}.* holds a list; expected an object"),
        ("fp8", {"comfy_quant": torch.zeros(9000, dtype=torch.uint8)}, "expected JSON in at most 4096 bytes"),
        ("fp8", {"comfy_quant": None}, "1 unknown: .*weight_scale|2 unknown"),
        ("fp8", {"comfy_quant": mark_of({"format": "int8_tensorwise"})}, "1 unknown: .*input_scale|in float8_e4m3fn"),
        ("fp8", {"input_scale": torch.tensor(1e-45)}, f"{LAYER}.* expected a number above 0"),
        ("fp8", {"pre_quant_scale": torch.ones(2)}, "1 unknown"),
        ("fp8", {"weight": torch.ones(1, 1).to(torch.float8_e4m3fn)}, "of another size"),
        ("int8-rotated", {"comfy_quant": mark_of(ROTATING | {"convrot_groupsize": 8})}, "convrot_groupsize 8"),
        ("int8-rotated", {"comfy_quant": mark_of(ROTATING | {"convrot_groupsize": "4"})}, "convrot_groupsize '4'"),
        # what has two meanings or none
        ("fp8", lambda tensors: (tensors | {"scaled_fp8": OLD},), "two meanings"),
        ("fp8", lambda tensors: (tensors, "", IN_E5M2), rf"layers in two ways \(1: {LAYER}\)"),
        ("fp8", lambda tensors: (old_file(tensors, OLD), "", IN_E5M2), "two meanings"),
        ("fp8", lambda tensors: (tensors, PREFIX, IN_E5M2), "without the prefix"),
        ("fp8", lambda tensors: (tensors, "", {"_quantization_metadata": '{"format_version": "1.1", "layers": {}}'}),
         "has the format_version '1.1', expected '1.0'"),
        ("fp8", lambda tensors: (tensors | fp8_mark("input_blocks.0.0"),), "which is no linear"),
        ("fp8", lambda tensors: (tensors | fp8_mark("nothing"),), "nothing.weight, marked"),
        # ComfyUI casts codes of an older file in another type to E4M3, which leaves other numbers
        ("e5m2", lambda tensors: (old_file(tensors, OLD.to(torch.float8_e5m2)),), "in float8_e5m2, expected"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(opened, tensors_in, case, changes, reason):
    given = (tensors_in(case),)
    if callable(changes):
        given = changes(*given)
    else:
        changed = given[0] | {f"{LAYER}.{end}": tensor for end, tensor in changes.items()}
        given = ({name: each for name, each in changed.items() if each is not None},)
    with pytest.raises(ArtifactError, match=reason) as error:
        opened(*given)
    assert str(error.value).isprintable() and len(str(error.value)) < 1500


@consumer
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_rows_and_products_of_a_weight_are_those_of_the_whole_and_padding_is_cut_off(name, tmp_path):
    """NVFP4's to multiples of 16, MXFP8's to 32: of sides that no checkpoint here has.

    Integers are summed by comfy-kitchen's product; of floats, ComfyUI multiplies what it has quantized and dequantized.
    """
    case = CASES[name]
    padded = METHODS[case.format].layout.multiple > 1
    rows, columns = (150, 90) if padded else (256, 192)
    stored = by_kitchen(torch.randn(rows, columns), case.format, **case.options)
    save_file(stored_pieces(stored, "weight") | case.further, tmp_path / "a.safetensors")
    located = LayerTensors(tmp_path, "a", read_safetensors(whole_file(tmp_path / "a.safetensors")))
    whole = case.format in ("int8_tensorwise", "convrot_w4a4", W4A8, "awq_w4a16")
    high = "full_precision_matrix_mult" in case.entries or "symmetric" in case.options
    scales = {end.removeprefix("input_"): scale for end, scale in case.further.items()}
    scales = scales or INPUT_OPTIONS.get(case.format, {"scale": torch.ones(())})
    x = torch.randn(10, columns) * 2
    x[0] = 0
    given = x if whole or high else by_kitchen(x, case.format, **scales, **case.options).dequantize()[:10, :columns]
    theirs = F.linear(given, stored if whole else stored.dequantize()[:rows, :columns])
    for first, last in ((0, rows), (40, 110)):
        layer = Marked(located, {"format": case.format} | case.entries).layer(
            (last - first, columns), [Rows("a.weight", first, last, rows)]
        )
        ours, expected = layer.weight.read(), stored.dequantize()[first:last, :columns]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6 if "convrot_groupsize" in case.options else 0)
        assert layer.format == case.format
        assert (layer.inputs is None) == (high or case.format == "awq_w4a16")
        rounded = x if layer.inputs is None else layer.inputs(x)
        assert relative_error(theirs[:, first:last], F.linear(rounded, ours)) < 1e-5
        assert layer.inputs is None or relative_error(x, rounded) > 1e-4 and str(layer.inputs)
    if padded:
        x = torch.randn(3, columns)
        inputs = by_kitchen(x, case.format, **scales).dequantize()[:3, :columns]
        assert torch.equal(layer.inputs(x), inputs)


def layer_of(tensors: dict[str, Tensor], entries: dict, shape: tuple[int, int] = (1, 32)) -> QuantizedLayer:
    stored = LayerTensors(Path("x"), "a", {name: lazy(each) for name, each in tensors.items()})
    marked = Marked(stored, entries)
    assert marked.unpacked() == shape
    return marked.layer(shape, [Rows("a.weight", 0, shape[0], shape[0])])


# Codes of four and six bits by hand


W4A8_MARK = {"format": W4A8, "convrot_groupsize": 4}
W4A8_TENSORS = {  # a row of 32 codes, all of which are 12, or 44 of 63
    "weight": torch.full((1, 16), -52, dtype=torch.int8), "weight_s_channel": torch.tensor([0.5]),
    "weight_s_rel": torch.tensor([[32.0, 2.6]]).to(torch.float8_e4m3fn),
}  # fmt: skip
SIX = torch.cat([W4A8_TENSORS["weight"], torch.full((1, 8), -86, dtype=torch.int8)], 1)
W4A4_MARK = {"format": "convrot_w4a4", "convrot_groupsize": 4}
W4A4_TENSORS = {"weight": torch.ones(2, 32, dtype=torch.int8), "weight_scale": torch.ones(2)}


@pytest.mark.parametrize(
    "tensors, expected, inputs",
    [
        ({}, [63.5, 5.0], "int8"),  # 128 is clamped to 127; 4 * 2.5 has no fraction, a level of the codebook has
        ({"weight_s_rel": W4A8_TENSORS["weight_s_rel"].view(torch.uint8)}, [63.5, 5.0], "int8"),
        ({"weight_codebook": torch.zeros(16).index_fill(0, torch.tensor(12), 1.3)}, [21.0, 1.5], "int8"),  # 41.6, 3.25
        ({"weight": SIX}, [63.5, 15.0], "int8"),  # 12 + 2 * 16 - 32
        ({"weight_correction": torch.tensor([[1.0], [3.0]])}, [64.5, 8.0], None),
    ],
    ids=["codes", "scales in bytes", "codebook", "six bits", "correction"],
)
def test_levels_are_rounded_to_int8_before_the_channels_scale(tensors, expected, inputs):
    layer = layer_of(W4A8_TENSORS | tensors, W4A8_MARK)
    torch.testing.assert_close(rotated(layer.weight.read(), 4)[:, [0, 16]], torch.tensor([expected]))
    assert (layer.inputs and str(layer.inputs)) == (inputs and f"{inputs}, a scale a row, rotated by 4")


@pytest.mark.parametrize(
    "tensors, entries, words",
    [
        *(({}, {"group_size": size}, f"group_size {size}") for size in (3, 24, True, 10**9)),
        ({}, {"convrot_groupsize": 8}, "convrot_groupsize 8"),
        ({}, {"convrot": False}, "rotates all the same"),
        ({"weight": SIX, "weight_codebook": torch.ones(16)}, {}, "six bits"),
        ({"weight": SIX, "weight_s_rel": torch.ones(1, 4)}, {"group_size": 8}, "groups of 8"),
        *((W4A4_TENSORS, W4A4_MARK | each, "linear_dtype") for each in (  # products that no kernel has
            {"linear_dtype": "int2"}, {"linear_dtype": 8}, {"quant_group_size": 32},
        )),
    ],
)  # fmt: skip
def test_marks_of_what_comfyui_does_not_compute_are_refused(tensors, entries, words):
    for more, name in (({}, "int4"), ({"linear_dtype": "int8"}, "int8")):
        inputs = layer_of(W4A4_TENSORS, W4A4_MARK | more, (2, 64)).inputs
        assert str(inputs) == f"{name}, a scale a row, rotated by 4"
    shape, usual = ((2, 64), {}) if tensors is W4A4_TENSORS else ((1, 32), W4A8_TENSORS)
    with pytest.raises(ArtifactError, match=words):
        layer_of(usual | tensors, W4A8_MARK | entries, shape).weight.read()


# Written files. What ComfyUI reads off a file before it opens it is written down from its ``model_detection.py``,
# ``utils.py`` and ``ops.py``; ComfyUI itself opens some of these files in ``tests.programs``

DIFFUSERS = ("down_blocks.", "up_blocks.", "transformer_blocks.", "single_transformer_blocks.")
# by family: a tensor that ComfyUI tells the model by, and others that it reads a size off: [rows, columns] as they are
DETECTED = {
    "sd15": ("input_blocks.0.0.weight", ["input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"]),
    "sd21": ("input_blocks.0.0.weight", ["input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"]),
    "sdxl": ("input_blocks.0.0.weight", ["input_blocks.3.1.transformer_blocks.0.attn2.to_k.weight",
                                         "label_emb.0.0.weight"]),
    "sd3": ("joint_blocks.0.context_block.attn.qkv.weight",
            ["y_embedder.mlp.0.weight", "x_embedder.proj.weight", "context_embedder.weight",
             "final_layer.linear.weight"]),
    "flux": ("double_blocks.0.img_attn.norm.key_norm.scale",
             ["img_in.weight", "txt_in.weight", "vector_in.in_layer.weight"]),
    "pixart": ("t_block.1.weight", ["y_embedder.y_proj.fc1.weight", "final_layer.linear.weight"]),
}  # fmt: skip


def stored_in(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The denoiser's tensors without prefix, and the metadata."""
    tensors, metadata = read_header(whole_file(path))
    names = [name for name in tensors if name.startswith(PREFIX)] or list(tensors)
    return {name.removeprefix(PREFIX): tensors[name].read() for name in names}, metadata


@pytest.mark.slow
@pytest.mark.parametrize("family", DETECTED)
def test_comfyui_tells_the_model_and_finds_the_marks(written_once, family):
    """In NVFP4, which halves a width, and with every layer that a recipe may quantize."""
    case, _, path = written_once("comfyui", family, "nvfp4", **PLAIN)
    state, metadata = stored_in(path)
    marks, (told, sized) = marks_of(state), DETECTED[family]
    assert METADATA not in metadata and marks  # names in it have the prefix in one of ComfyUI's loaders alone
    assert told in state and not any(name.startswith(DIFFUSERS) for name in state)  # with these it loses marks
    assert {state[name].dtype for name in sized} == {torch.float16}
    shapes = case.denoiser().state_dict().values()
    assert state[sized[0]].shape[1] in {each.shape[1] for each in shapes if each.ndim > 1}
    packed = {name.removesuffix(".weight") for name, each in state.items()
              if name.endswith(".weight") and each.dtype == torch.uint8}  # fmt: skip
    assert family != "flux" or "single_blocks.0.linear2" in marks  # and no other ends in proj_out
    assert packed == marks.keys() and all(f"{layer}.input_scale" in state for layer in marks)
    assert path.name == {"sdxl": "sdxl"}.get(family, case.component) + ".safetensors"


@pytest.mark.slow
def test_the_same_assignment_gives_the_same_bytes(tiny, tmp_path):
    case = tiny("sdxl")
    assignment = case.assignment(recipe_of("int8", **PLAIN), "comfyui")
    first, second = (case.written(assignment, "comfyui", tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    starts = [next(start for start in PREFIXES if name.startswith(start)) for name in read_header(whole_file(first))[0]]
    assert tuple(dict.fromkeys(starts)) == PREFIXES[: len(NETWORKS)]  # in another process too


def test_a_block_of_zeros_has_the_exponent_0():
    """And not 2^-24, which it has in a graph. Of ones it is 2^-8: 1 / 448 rounded up."""
    weight = torch.ones(2, 64)
    weight[1, 32:] = 0
    fmt = FORMATS["mxfp8"]
    scales = fmt.scales(weight, torch.zeros(()))
    assert e8m0(fmt.quantize(weight, *scales), *scales).tolist() == [[119, 119], [119, 0]]


@pytest.mark.slow
def test_inputs_that_a_recipe_leaves_alone_are_marked(written_once):
    """Without ``full_precision_matrix_mult`` ComfyUI would round them, with a scale that it computes itself."""
    path = written_once("comfyui", "sd3", "mxfp8", **PLAIN | {"activation": None})[2]
    marks = marks_of(stored_in(path)[0]).values()
    assert marks and all(mark == {"format": "mxfp8", "full_precision_matrix_mult": True} for mark in marks)


# Files of scaled weights under diffusers' names and under the authors', as diffusers decodes them

BFL = "diffusers_bfl"


@pytest.mark.parametrize("fmt, options", [("fp8", PER_ROW_FP8), ("nvfp4", PLAIN)])
def test_weights_are_what_diffusers_decodes(written_once, fmt, options):
    from diffusers.quantizers.bfl import utils

    case, _, file = written_once(BFL, "flux", fmt, **options)
    stored = load_file(file)
    for name, layer in case.read(file, BFL).layers.items():
        scales = [stored[each] for end in ("", "_2") if (each := f"{name}.weight_scale{end}") in stored]
        decode = utils.dequantize_nvfp4 if layer.format == "nvfp4" else utils.dequantize_fp8r
        assert torch.equal(layer.weight.read(), decode(stored[f"{name}.weight"], *scales)), name
        assert layer.format != "nvfp4" or layer.inputs.common == stored[f"{name}.input_scale"].item()


@pytest.mark.slow
@pytest.mark.parametrize("family, prefix", [("flux", ""), ("sd3", PREFIX), ("sd21", PREFIX)])
def test_authors_names_are_read_as_diffusers_are(written_once, tmp_path, family, prefix):
    case, _, file = written_once(BFL, family, "fp8", **PER_ROW_FP8)
    tensors = load_file(file)
    scales = {name.removesuffix("_scale"): each for name, each in tensors.items() if name.endswith("_scale")}
    state = in_authors_rows(case.checkpoint, tensors)  # stacked as those who trained the model stack them
    state |= {f"{name}_scale": each for name, each in in_authors_rows(case.checkpoint, scales).items()}
    save(tmp_path / "authors.safetensors", state, prefix)
    assert_same(*(all_of(case.read(path, BFL)) for path in (tmp_path / "authors.safetensors", file)))


def test_scales_with_comfyui_marks_are_comfyui_files(written_once, tmp_path):
    _, _, file = written_once(BFL, "flux", "fp8", **PER_ROW_FP8)
    mark = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    marked = changed(
        file, tmp_path, lambda tensors: tensors.update({"transformer_blocks.0.attn.to_q.comfy_quant": mark})
    )
    assert [name for name, row in READERS.items() if row.recognizes(marked)] == ["comfyui"]


def test_inputs_of_odd_sides_stay(tmp_path):
    """diffusers multiplies codes where both sides are multiples of 16, and dequantized weights elsewhere."""
    file = tmp_path / "a.safetensors"
    save_file({"a.weight": torch.ones(24, 32).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(24)}, file)
    own = scaled_layers(file, read_safetensors(whole_file(file)))["a"]
    assert own.layer((24, 32), [Rows("a.weight", 0, 24, 24)]).inputs is None
    assert own.layer((16, 32), [Rows("a.weight", 0, 16, 24)]).inputs is not None
