"""Files for ComfyUI, quantized by comfy-kitchen, whose kernels ComfyUI calls, and what these compute of them."""

import json
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from sd_quant.candidates import READERS
from sd_quant.candidates.comfyui import METHODS, Codes, check_codes, read, recognizes
from sd_quant.candidates.comfyui_inputs import Float8, Mxfp8, Nvfp4, Rotated
from sd_quant.candidates.other_names import PREFIX, Rows
from sd_quant.checkpoints.archive import whole_file
from sd_quant.checkpoints.safetensors_file import read_safetensors
from sd_quant.errors import ArtifactError
from sd_quant.numbers import relative_error

from .single_files import authors_state, error_of_network, in_diffusers, loaded, opened, read_all

pytestmark = pytest.mark.consumer
kitchen = pytest.importorskip("comfy_kitchen")
from comfy_kitchen.tensor import (  # noqa: E402
    QuantizedTensor,
    TensorCoreFP8Layout,
    TensorCoreMXFP8Layout,
    TensorCoreNVFP4Layout,
    TensorWiseINT8Layout,
)

FP8, INT8 = TensorCoreFP8Layout.__name__, TensorWiseINT8Layout.__name__
NVFP4, MXFP8 = TensorCoreNVFP4Layout.__name__, TensorCoreMXFP8Layout.__name__
STATIC = torch.tensor(0.013)
# how a weight is quantized: layout, its options, the mark, further tensors
CASES: dict[str, tuple[str, dict, dict, dict[str, Tensor]]] = {
    "fp8": (FP8, {}, {"format": "float8_e4m3fn"}, {"input_scale": STATIC}),
    "fp8-cast-inputs": (FP8, {}, {"format": "float8_e4m3fn"}, {}),
    "fp8-high-inputs": (FP8, {}, {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}, {}),
    "e5m2": (FP8, {"dtype": torch.float8_e5m2}, {"format": "float8_e5m2"}, {"input_scale": STATIC}),
    "int8-rows": (INT8, {"per_channel": True}, {"format": "int8_tensorwise"}, {}),
    "int8-one-scale": (INT8, {}, {"format": "int8_tensorwise"}, {}),
    "int8-rotated": (
        INT8, {"per_channel": True, "convrot": True, "convrot_groupsize": 16},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}, {},
    ),
    "nvfp4": (NVFP4, {}, {"format": "nvfp4"}, {"input_scale": STATIC / 10}),
    "nvfp4-dynamic": (NVFP4, {}, {"format": "nvfp4"}, {}),
    "mxfp8": (MXFP8, {}, {"format": "mxfp8"}, {}),
}  # fmt: skip
INPUT_OPTIONS = {FP8: {"scale": torch.ones(())}, NVFP4: {}, MXFP8: {}}  # where a file says no scale


def chosen(name: str, tensor: Tensor) -> bool:
    return name.endswith(".weight") and tensor.ndim == 2 and min(tensor.shape) >= 16 and "embed" not in name


def quantized(state: dict[str, Tensor], case: str) -> tuple[dict[str, Tensor], dict[str, QuantizedTensor]]:
    """A file's tensors, and the quantized ones as comfy-kitchen has them, by layer."""
    layout, options, mark, further = CASES[case]
    found: dict[str, Tensor] = {}
    weights: dict[str, QuantizedTensor] = {}
    for name, tensor in state.items():
        if not chosen(name, tensor):
            found[name] = tensor.half() if tensor.ndim > 1 else tensor
            continue
        layer = name.removesuffix(".weight")
        weights[layer] = QuantizedTensor.from_float(tensor.float(), layout, **options)
        stored = weights[layer].state_dict(name)
        found |= {each: stored[each].view(torch.uint8) if "e8m0" in str(stored[each].dtype) else stored[each]
                  for each in stored}  # fmt: skip
        found[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)
        found |= {f"{layer}.{each}": scale.clone() for each, scale in further.items()}
    assert len(weights) > 10
    return found, weights


def dequantized(state: dict[str, Tensor], weights: dict[str, QuantizedTensor]) -> dict[str, Tensor]:
    """By comfy-kitchen; padding is cut off."""
    ours = {f"{layer}.weight": weight.dequantize() for layer, weight in weights.items()}
    return {
        name: ours[name][: tensor.shape[0], : tensor.shape[1]] if name in ours else
        (tensor.half() if tensor.ndim > 1 else tensor).float()
        for name, tensor in state.items()
    }  # fmt: skip


def save(path, tensors, prefix: str = "", metadata=None) -> None:
    save_file({prefix + name: each.contiguous() for name, each in tensors.items()}, path, metadata)


@pytest.fixture(scope="module", params=["sdxl", "sd21", "flux", "sd3"])
def checkpoint(request, tmp_path_factory):
    return opened(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory):
    return opened(tmp_path_factory.mktemp("tiny"), "sdxl")


@pytest.mark.parametrize("case", CASES)
def test_every_weight_is_what_comfy_kitchen_makes_of_it(checkpoint, case, tmp_path):
    """Bit for bit, where a rotation is multiplied in pieces to fp32's own error."""
    state = authors_state(checkpoint)
    tensors, weights = quantized(state, case)
    save(tmp_path / "a.safetensors", tensors)
    candidate = read(tmp_path / "a.safetensors", checkpoint)
    expected = in_diffusers(checkpoint, dequantized(state, weights))
    found = read_all(candidate)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if case == "int8-rotated":
            torch.testing.assert_close(tensor.float(), expected[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(tensor.float(), expected[name]), name
    assert len(candidate.layers) >= len(weights)
    assert {layer.format for layer in candidate.layers.values()} == {CASES[case][2]["format"]}
    assert candidate.stored_bytes == sum(each.nbytes for each in tensors.values())
    marked = [f"{layer}.weight{end}" for layer in weights for end in ("", "_scale", "_scale_2")]
    stored = sum(tensors[name].nbytes for name in marked if name in tensors)
    assert 0 <= stored - sum(layer.stored_bytes for layer in candidate.layers.values()) < 3 * len(candidate.layers)


def comfyui_linear(weight: QuantizedTensor, case: str, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """ComfyUI's ``MixedPrecisionOps.Linear.forward``."""
    layout, options, mark, further = CASES[case]

    def forward(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if layout == INT8:
            y = F.linear(flat, weight, bias)
        elif mark.get("full_precision_matrix_mult"):
            y = F.linear(flat, weight.dequantize(), bias)
        else:
            given = {name.removeprefix("input_"): scale for name, scale in further.items()} or INPUT_OPTIONS[layout]
            kind = {name: value for name, value in options.items() if name == "dtype"}
            theirs = QuantizedTensor.from_float(flat, layout, **given, **kind).dequantize()
            dense = weight.dequantize()
            rows = dense.shape[0] if bias is None else len(bias)
            y = F.linear(theirs[: len(flat), : x.shape[-1]], dense[:rows, : x.shape[-1]], bias)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    return forward


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_linear_and_the_network_compute_what_comfy_kitchen_does(sdxl, case, tmp_path):
    """A linear to 1e-5, the network to 1e-6; of INT8, whose codes comfy-kitchen sums as integers, to 1e-2.

    What fp32 rounds otherwise turns some codes of the next layers.
    """
    state = authors_state(sdxl)
    tensors, weights = quantized(state, case)
    save(tmp_path / "a.safetensors", tensors, PREFIX)
    candidate = read(tmp_path / "a.safetensors", sdxl)
    theirs = loaded(sdxl, in_diffusers(sdxl, dequantized(state, weights)))
    by_codes = in_diffusers(sdxl, {name: torch.full_like(each, float(index)) for index, (name, each) in
                                   enumerate(state.items())})  # fmt: skip
    names = list(state)
    random = torch.Generator().manual_seed(0)
    for name, layer in candidate.layers.items():
        module = theirs.get_submodule(name)
        theirs_layer = weights[names[int(by_codes[f"{name}.weight"].flatten()[0])].removesuffix(".weight")]
        module.forward = comfyui_linear(theirs_layer, case, module.bias)
        x = torch.randn(2, 5, module.in_features, generator=random) * 2
        x[0, 0] = 0
        inputs = layer.inputs or (lambda x: x)
        assert (layer.inputs is None) == ("high" in case)
        ours = F.linear(inputs(x), layer.weight.read(), module.bias)
        assert relative_error(module.forward(x), ours) < 1e-5, name
        if layer.inputs is not None:
            assert relative_error(x, inputs(x)) > 1e-4 and str(layer.inputs)
    assert error_of_network(sdxl, candidate, theirs) < (1e-2 if case.startswith("int8") else 1e-6)


@pytest.mark.parametrize(
    "inputs", [Nvfp4(), Nvfp4(0.5), Mxfp8(), Rotated(4), Float8(torch.float8_e4m3fn, 0.1)], ids=str
)
def test_inputs_of_zeros_stay_zeros(inputs):
    """comfy-kitchen's NVFP4 divides them by a scale of 0."""
    assert torch.equal(inputs(torch.zeros(2, 3, 32)), torch.zeros(2, 3, 32))


def test_inputs_are_multiplied_before_they_are_quantized(sdxl, tmp_path):
    state = authors_state(sdxl)
    tensors, _ = quantized(state, "nvfp4")
    name = "output_blocks.0.1.transformer_blocks.0.ff.net.2"
    factor = torch.rand(state[f"{name}.weight"].shape[1]) + 0.5
    save(tmp_path / "a.safetensors", tensors | {f"{name}.pre_quant_scale": factor})
    candidate = read(tmp_path / "a.safetensors", sdxl)
    layer = candidate.layers["up_blocks.0.attentions.0.transformer_blocks.0.ff.net.2"]
    x = torch.randn(3, len(factor))
    expected = QuantizedTensor.from_float(x * factor, NVFP4, scale=STATIC / 10).dequantize()[:3]
    torch.testing.assert_close(layer.inputs(x), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", ["fp8", "fp8-high-inputs", "nvfp4"])
def test_marks_may_stand_in_the_header(sdxl, case, tmp_path):
    tensors, _ = quantized(authors_state(sdxl), case)
    save(tmp_path / "a.safetensors", tensors)
    expected = read(tmp_path / "a.safetensors", sdxl)
    for prefix in ("", PREFIX):
        plain = {name: each for name, each in tensors.items() if not name.endswith("comfy_quant")}
        marks = {prefix + name.removesuffix(".comfy_quant"): CASES[case][2] for name in tensors.keys() - plain.keys()}
        others = {"text_encoders.a": {"format": "of no interest"}} if prefix else {}
        text = json.dumps({"format_version": "1.0", "layers": marks | others})
        save(tmp_path / "b.safetensors", plain, prefix, {"_quantization_metadata": text})
        found = read(tmp_path / "b.safetensors", sdxl)
        assert same(found, expected)


def same(one, other) -> bool:
    a, b = read_all(one), read_all(other)
    return (
        a.keys() == b.keys()
        and all(torch.equal(a[name], b[name]) for name in a)
        and {name: str(layer.inputs) for name, layer in one.layers.items()}
        == {name: str(layer.inputs) for name, layer in other.layers.items()}
    )


def old_file(tensors: dict[str, Tensor], mark: Tensor) -> dict[str, Tensor]:
    """As files were before there were marks of layers."""
    names = {"weight_scale": "scale_weight", "input_scale": "scale_input"}
    found = {"scaled_fp8": mark}
    for name, tensor in tensors.items():
        head, _, end = name.rpartition(".")
        if end != "comfy_quant":
            found[f"{head}.{names.get(end, end)}"] = tensor
    return found


@pytest.mark.parametrize(("case", "numbers"), [("fp8", 0), ("fp8-cast-inputs", 1), ("fp8-high-inputs", 2)])
def test_the_older_way_means_the_same(sdxl, case, numbers, tmp_path):
    tensors, _ = quantized(authors_state(sdxl), case)
    save(tmp_path / "a.safetensors", tensors)
    mark = torch.zeros(numbers, dtype=torch.float8_e4m3fn)
    save(tmp_path / "b.safetensors", old_file(tensors, mark), PREFIX)
    assert same(read(tmp_path / "b.safetensors", sdxl), read(tmp_path / "a.safetensors", sdxl))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_plain_cast_is_multiplied_as_it_is_stored(checkpoint, dtype, tmp_path):
    state = {name: each.to(dtype) for name, each in authors_state(checkpoint).items()}
    others = {"first_stage_model.a": torch.ones(3), "conditioner.b": torch.ones(2), "cond_stage_model.c": torch.ones(1)}
    tensors = {PREFIX + name: each for name, each in state.items()} | others
    save(tmp_path / "a.safetensors", tensors)
    candidate = read(tmp_path / "a.safetensors", checkpoint)
    expected = in_diffusers(checkpoint, {name: each.float() for name, each in state.items()})
    found = read_all(candidate)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert {(layer.format, layer.scales, layer.inputs, layer.bits) for layer in candidate.layers.values()} == {
        (str(dtype).removeprefix("torch."), "none", None, 8.0)
    }
    modules = {name for name, module in loaded(checkpoint, expected).named_modules() if isinstance(module, nn.Conv2d)}
    assert modules <= candidate.layers.keys() and candidate.bits == 8


def test_a_file_of_nothing_quantized_is_a_candidate(sdxl, tmp_path):
    save(tmp_path / "a.safetensors", {name: each.half() for name, each in authors_state(sdxl).items()})
    assert recognizes(tmp_path / "a.safetensors") and READERS["comfyui"].recognizes(tmp_path / "a.safetensors")
    candidate = read(tmp_path / "a.safetensors", sdxl)
    assert not candidate.layers and candidate.bits == 16


def test_what_is_no_denoiser_is_not_recognized(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"transformer_blocks.0.a.qweight": torch.ones(1), "single_transformer_blocks.0.b": torch.ones(1)},
              tmp_path / "b.safetensors")  # fmt: skip
    (tmp_path / "c.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0[[[[[[[[")
    for name in ("a.safetensors", "b.safetensors", "c.safetensors", "none", ".", "\0"):
        assert not recognizes(tmp_path / name)


def refusal(path, checkpoint) -> str:
    with pytest.raises(ArtifactError) as error:
        read(path, checkpoint)
    assert str(error.value).isprintable() and len(str(error.value)) < 1500
    return str(error.value)


LAYER = "output_blocks.0.1.transformer_blocks.0.ff.net.2"


def mark_of(mark: dict | bytes) -> Tensor:
    return torch.tensor(list(mark if isinstance(mark, bytes) else json.dumps(mark).encode()), dtype=torch.uint8)


def rotating(group: object) -> Tensor:
    return mark_of({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group})


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("fp8", {"comfy_quant": mark_of({"format": "awq_w4a16"})}, "awq_w4a16'"),
        ("fp8", {"comfy_quant": mark_of({"format": ["fp8"]})}, "formats that are not read here"),
        ("fp8", {"comfy_quant": mark_of({"format": "float8_e4m3fn", "convrot": True})}, "entries that are not known"),
        ("fp8", {"comfy_quant": mark_of(b'{"format": 1, "format": 2}')}, "is not JSON"),
        ("fp8", {"comfy_quant": mark_of(b"[1]")}, "is no object"),
        ("fp8", {"comfy_quant": torch.zeros(9000, dtype=torch.uint8)}, "expected JSON in at most 4096 bytes"),
        ("fp8", {"comfy_quant": None}, "1 unknown: .*weight_scale|2 unknown"),
        ("fp8", {"comfy_quant": mark_of({"format": "int8_tensorwise"})}, "1 unknown: .*input_scale|is stored as"),
        ("fp8", {"weight_scale": None}, "has no weight_scale"),
        ("fp8", {"weight_scale": torch.ones(3)}, r"has weight_scale torch.float32 \[3\]; expected \[\]"),
        ("fp8", {"weight_scale": torch.ones((), dtype=torch.int8)}, "has weight_scale torch.int8"),
        ("fp8", {"weight_scale": torch.tensor(float("nan"))}, None),
        ("fp8", {"input_scale": torch.tensor(float("inf"))}, "is inf; expected a finite number above 0"),
        ("fp8", {"input_scale": torch.tensor(0.0)}, "is 0; expected"),
        ("fp8", {"input_scale": torch.tensor(1e-45)}, "expected a finite number above 0"),
        ("fp8", {"pre_quant_scale": torch.ones(2)}, "1 unknown"),
        ("fp8", {"weight": torch.ones(1, 1).to(torch.float8_e4m3fn)}, "of another size"),
        ("nvfp4", {"weight_scale": torch.ones(4, 4).to(torch.float8_e4m3fn)}, "has weight_scale"),
        ("nvfp4", {"weight_scale_2": None}, "has no weight_scale_2"),
        ("int8-rotated", {"comfy_quant": rotating(1024)}, "convrot_groupsize 1024"),
        ("int8-rotated", {"comfy_quant": rotating(8)}, "convrot_groupsize 8"),
        ("int8-rotated", {"comfy_quant": rotating("4")}, "convrot_groupsize '4'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(sdxl, case, changes, reason, tmp_path):
    tensors, _ = quantized(authors_state(sdxl), case)
    for end, tensor in changes.items():
        tensors.pop(f"{LAYER}.{end}", None)
        if tensor is not None:
            tensors[f"{LAYER}.{end}"] = tensor
    save(tmp_path / "a.safetensors", tensors)
    if reason is None:  # only numbers show it
        candidate = read(tmp_path / "a.safetensors", sdxl)
        with pytest.raises(ArtifactError, match=f"{LAYER}.*not finite"):
            read_all(candidate)
        return
    said = refusal(tmp_path / "a.safetensors", sdxl)
    assert re.search(reason, said), said
    assert LAYER in said or "of another size" in said or "formats" in said


def test_two_meanings_are_refused(sdxl, tmp_path):
    tensors, _ = quantized(authors_state(sdxl), "fp8")
    save(tmp_path / "a.safetensors", tensors | {"scaled_fp8": torch.zeros(1)})
    assert "two meanings" in refusal(tmp_path / "a.safetensors", sdxl)
    text = json.dumps({"layers": {LAYER: {"format": "float8_e5m2"}}})
    save(tmp_path / "a.safetensors", tensors, metadata={"_quantization_metadata": text})
    assert f"1 layers in two ways ({LAYER})" in refusal(tmp_path / "a.safetensors", sdxl)
    old = old_file(tensors, torch.zeros(1))
    save(tmp_path / "a.safetensors", old, metadata={"_quantization_metadata": text})
    assert "two meanings" in refusal(tmp_path / "a.safetensors", sdxl)
    text = json.dumps({"layers": {LAYER: {"format": "float8_e4m3fn"}}})
    save(tmp_path / "a.safetensors", tensors, PREFIX, {"_quantization_metadata": text})
    assert "without the prefix" in refusal(tmp_path / "a.safetensors", sdxl)


def test_marks_of_what_is_no_linear_or_not_there_are_refused(sdxl, tmp_path):
    tensors, _ = quantized(authors_state(sdxl), "fp8")
    for layer, reason in {"input_blocks.0.0": "which is no linear", "nothing": "nothing.weight, marked"}.items():
        more = {f"{layer}.comfy_quant": mark_of({"format": "float8_e4m3fn"}), f"{layer}.weight_scale": torch.ones(())}
        save(tmp_path / "a.safetensors", tensors | more)
        assert reason in refusal(tmp_path / "a.safetensors", sdxl)


def test_older_files_in_another_type_are_refused(sdxl, tmp_path):
    """ComfyUI casts their codes to E4M3, which leaves other numbers."""
    tensors, _ = quantized(authors_state(sdxl), "e5m2")
    save(tmp_path / "a.safetensors", old_file(tensors, torch.zeros(1, dtype=torch.float8_e5m2)))
    assert "is stored as torch.float8_e5m2; expected torch.float8_e4m3fn" in refusal(tmp_path / "a.safetensors", sdxl)


def test_padding_is_cut_off(tmp_path):
    """NVFP4's to multiples of 16, MXFP8's to 32: of sides that no checkpoint here has."""
    weight = torch.randn(150, 90)
    for layout, name in ((NVFP4, "nvfp4"), (MXFP8, "mxfp8")):
        stored = QuantizedTensor.from_float(weight, layout)
        tensors = {each.removeprefix("_"): tensor.view(torch.uint8) if "e8m0" in str(tensor.dtype) else tensor
                   for each, tensor in stored.state_dict("_weight").items()}  # fmt: skip
        save_file(tensors, tmp_path / "a.safetensors")
        located = read_safetensors(whole_file(tmp_path / "a.safetensors"))
        assert located["weight"].shape[0] % METHODS[name].multiple == 0
        for first, last in ((0, 150), (40, 110)):
            codes = Codes(tmp_path, "a", {"format": name}, located, (150, 90), Rows("a.weight", first, last, 150))
            check_codes(codes)
            assert torch.equal(codes.read(), stored.dequantize()[first:last, :90])
        x = torch.randn(3, 90)
        inputs = METHODS[name].inputs(codes)
        assert torch.equal(inputs(x), QuantizedTensor.from_float(x, layout).dequantize()[:3, :90])
