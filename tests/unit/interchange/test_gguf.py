"""GGUF files of ggml's own package, read here and by it; networks restored by diffusers' converters and linears."""

import struct

import numpy as np
import pytest
import torch

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.interchange import TARGETS
from sd_quant.interchange.gguf import QUANTIZED, read, read_header
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.names.authors import PREFIX, Rows
from sd_quant.quantization.formats import FORMATS

from .conftest import PLAIN, assert_equal, recipe_of
from .single_files import authors_state, in_diffusers, read_all

pytestmark = pytest.mark.consumer
gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType
KINDS = {kind.name: number for number, kind in QUANTIZED.items()}
WHICH = {"sdxl": "Q8_0", "sd15": "Q5_1", "sd21": "Q4_1", "flux": "Q4_0", "sd3": "Q5_0"}


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Valid ones of any type: every bit pattern is a code, and scales in fp16 are small."""
    random = np.random.default_rng(seed)
    size = QUANTIZED[KINDS[kind]].size
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // QUANTIZED[KINDS[kind]].block, size), np.uint8)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
              "Q6_K": (208,)}.get(kind, (0,))  # fmt: skip
    for place in places:
        scales = random.uniform(-1e-2, 1e-2, blocks.shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(path, state, kind: str, prefix: str = "", entries=lambda writer: None) -> None:
    """As ComfyUI-GGUF's converter: matrices in blocks, what no block divides in rows of 256, vectors in fp32."""
    writer = gguf.GGUFWriter(path, "flux")
    entries(writer)
    for name, tensor in state.items():
        array, stored = tensor.float().numpy(), Type.F32
        if tensor.ndim > 1 and array.size % 256 == 0 and array.size > 512:
            stored = Type[kind]
            if array.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0]:
                writer.add_array(f"comfy.gguf.orig_shape.{prefix}{name}", [int(side) for side in array.shape])
                array = array.reshape(-1, 256)
        elif tensor.ndim > 1:
            stored = Type.BF16 if array.size % 2 else Type.F16
        writer.add_tensor(prefix + name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    finish(writer)


def finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_by_gguf(path, state) -> dict[str, torch.Tensor]:
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name = tensor.name.removeprefix(PREFIX)
        numbers = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        found[name] = torch.from_numpy(np.array(numbers)).float().reshape(state[name].shape)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_decoded_as_ggml_does(kind, tmp_path):
    shape = (6, 512)
    blocks = random_blocks(kind, shape)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "sdxl")
    writer.add_tensor("before", np.ones(5, np.float32))
    writer.add_tensor("a", blocks, raw_dtype=Type[kind])
    finish(writer)
    found = read_header(whole_file(tmp_path / "a.gguf"))[0]["a"]
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, Type[kind]))
    assert found.shape == shape and found.size == blocks.size and expected.std() > 0
    assert torch.equal(found.read(), expected)
    assert torch.equal(found.rows(Rows("a", 2, 5, 6)).read(), expected[2:5])


@pytest.mark.parametrize("prefix, family", zip(["", PREFIX, "", PREFIX, ""], WHICH, strict=True))
def test_a_whole_network_is_what_ggml_and_diffusers_make_of_it(tiny, prefix, family, tmp_path):
    """Every weight bit for bit; with diffusers' own linears, which multiply scales in fp16, the output to 2e-3."""
    case, path = tiny(family), tmp_path / "a.gguf"
    state = authors_state(case.checkpoint)
    write(path, state, WHICH[family], prefix)
    candidate = case.read(path, "gguf")
    assert_equal(read_all(candidate), in_diffusers(empty_denoiser(case.checkpoint), read_by_gguf(path, state)))
    bits = 8 * QUANTIZED[KINDS[WHICH[family]]].size / 32
    assert {(layer.format, layer.inputs, layer.bits) for layer in candidate.layers.values()} == {
        (WHICH[family], None, bits)
    }
    assert len(candidate.layers) > 20
    assert candidate.stored_bytes == sum(each.n_bytes for each in gguf.GGUFReader(path).tensors)
    ours, theirs = case.network(candidate), candidate.runtime()
    assert any(type(module).__name__ == "GGUFLinear" for module in theirs.modules())
    assert 0 < case.error(theirs, ours) < 2e-3


@pytest.fixture(scope="module")
def sdxl(tiny):
    return tiny("sdxl").checkpoint


@pytest.fixture
def sound(sdxl, tmp_path):
    write(tmp_path / "a.gguf", authors_state(sdxl), "Q8_0")
    return tmp_path / "a.gguf"


def test_a_damaged_file_is_refused(sound, sdxl, tmp_path):
    written = sound.read_bytes()
    name = struct.pack("<Q", 17) + b"time_embed.0.bias"
    offset = written.index(name) + len(name) + 4 + 8 + 4
    for place, content, reason in (
        (4, struct.pack("<I", 1), "version 1, 2 or 3 expected"),
        (4, struct.pack(">I", 3), "its numbers are big-endian"),
        (8, struct.pack("<Q", 2**63), "tensors and"),
        (24, struct.pack("<Q", 2**62), "within the header"),
        (offset, struct.pack("<Q", 0), "overlap"),
        (len(written) - 40, None, "bytes described"),
        (500, None, "within the header"),
    ):
        behind = b"" if content is None else content + written[place + len(content) :]
        sound.write_bytes(written[:place] + behind)
        with pytest.raises(ArtifactError, match=reason):
            read(sound, sdxl)
    sound.write_bytes(written)
    tensor = next(each for each in gguf.GGUFReader(sound).tensors if each.name == "time_embed.2.weight")
    at = int(tensor.data_offset) + 34  # a scale
    sound.write_bytes(written[:at] + struct.pack("<e", float("inf")) + written[at + 2 :])
    with pytest.raises(ArtifactError, match="'time_embed.2.weight' holds NaN or infinite numbers"):
        read(sound, sdxl).layers["time_embedding.linear_2"].weight.read()
    writer = gguf.GGUFWriter(sound, "sdxl")
    writer.add_tensor("a.weight", np.zeros((2, 66), np.uint8), raw_dtype=Type.TQ2_0)
    finish(writer)
    with pytest.raises(ArtifactError, match=r"not read here \(a.weight 35\)"):
        read(sound, sdxl)
    shape = "comfy.gguf.orig_shape.time_embed.0.weight"
    write(sound, authors_state(sdxl), "Q8_0", entries=lambda writer: writer.add_array(shape, [3, 5]))
    with pytest.raises(ArtifactError, match=r"has the original shape \[3, 5\]"):
        read(sound, sdxl)


def test_kernels_of_one_pixel_are_matrices_where_the_model_has_linears(sound, sdxl, tmp_path):
    """As stable-diffusion.cpp writes them."""
    state = authors_state(sdxl)
    kernels = [name for name in state if name.endswith((".proj_in.weight", ".proj_out.weight"))]
    write(tmp_path / "b.gguf", state | {name: state[name][..., None, None] for name in kernels}, "Q8_0")
    expected, found = (read_all(read(path, sdxl)) for path in (sound, tmp_path / "b.gguf"))
    shapes = [{name: each.shape for name, each in tensors.items()} for tensors in (expected, found)]
    assert kernels and shapes[0] == shapes[1]


# Written files. ``tests.programs`` has ComfyUI-GGUF and stable-diffusion.cpp open them

SEARCHED = PLAIN | {"scale_search": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, fmt, options",
    [
        ("sdxl", "int8", PLAIN | {"per_channel": False}), ("sd21", "int4", PLAIN), ("sdxl", "q4_k", SEARCHED),
        ("sd3", "q5_k", SEARCHED), ("flux", "q6_k", SEARCHED),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_file_has_the_types_of_its_assignment(tiny, tmp_path, family, fmt, options):
    case = tiny(family)
    assignment = case.assignment(recipe_of(fmt, None, **options), "gguf")
    path = TARGETS["gguf"].module.write(case.checkpoint, assignment, tmp_path)
    assert list(tmp_path.iterdir()) == [path] and path.name == f"{case.checkpoint.family.DENOISER}.gguf"
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.quantization_version").contents() == 2
    assert not any(key.startswith("comfy.gguf.orig_shape") for key in reader.fields)
    kinds = {tensor.name.removeprefix(PREFIX): tensor.tensor_type.name for tensor in reader.tensors}
    assert {kinds[tensor.name.removeprefix(PREFIX)] for tensor in reader.tensors if len(tensor.shape) == 1} == {"F32"}
    quantized = {"int8": {"Q8_0"}, "int4": {"Q4_0"}}.get(fmt) or {fmt.upper(), FORMATS[fmt].narrow.upper()}
    assert set(kinds.values()) == {"F32", "F16", *quantized}
