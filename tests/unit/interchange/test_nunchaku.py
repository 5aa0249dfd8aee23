"""nunchaku's files: names and shapes as its loaders want them, fused linears against comfy-kitchen, AWQ, and traps.

nunchaku's package is not on PyPI; ``tests.programs`` runs its loaders from their source. Its products are
comfy-kitchen's, row by row, with the tiles taken apart.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sd_quant.errors import ConfigError
from sd_quant.files.tensors import lazy
from sd_quant.interchange import TARGETS
from sd_quant.interchange import nunchaku_tiles as tiles
from sd_quant.interchange.holding import adapted
from sd_quant.interchange.nunchaku import modulation, new_name, old_name, shifted
from sd_quant.interchange.nunchaku_linears import SHIFT, in_chunks, interleaved, w4a16_layer, w4a16_tensors
from sd_quant.interchange.stored import LayerTensors
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import rewritten

from .conftest import recipe_of

pytestmark = pytest.mark.commit

NAME = "nunchaku"
FAMILIES = {"sdxl_wide": {"rank": 0.1}, "flux": {"rank": 0.1}}


@pytest.fixture(scope="module")
def made(written_once):
    return lambda family, fmt="int4": written_once(NAME, family, fmt, **FAMILIES[family])


def metadata_of(path: Path) -> Mapping[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


# What a file holds; ``tests.programs`` has nunchaku's loaders open it

# By deepcompressor's names in a block: layers of four bits, of W4A16, and in high precision
FEED_FORWARD, MODULATION = "mlp_fc1 mlp_fc2", {"qweight", "wscales", "wzeros"}
OF_A_BLOCK = {
    "transformer_blocks.0": (
        f"qkv_proj out_proj {FEED_FORWARD} qkv_proj_context out_proj_context mlp_context_fc1 mlp_context_fc2",
        "norm1.linear norm1_context.linear", "norm_q norm_k norm_added_q norm_added_k",
    ),
    "single_transformer_blocks.0": (f"qkv_proj out_proj {FEED_FORWARD}", "norm.linear", "norm_q norm_k"),
    "down_blocks.1.attentions.0.transformer_blocks.0": (
        "attn1.to_qkv attn1.to_out.0 attn2.to_q attn2.to_out.0 ff.net.0.proj ff.net.2", "",
        "attn2.to_k attn2.to_v norm1 norm2 norm3",
    ),
}  # fmt: skip


def by_layer(names: Iterable[str]) -> dict[str, set[str]]:
    """Ends of names by layer; ``test_round_trip`` misses a bias."""
    found: dict[str, set[str]] = {}
    for name in names:
        layer, _, end = name.rpartition(".")
        found.setdefault(layer, set()).update({end} - {"bias"})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fmt, name, numbers, scale_dtype, group", [
    ("int4", "int4", "int4", None, 64),
    ("nvfp4", "fp4", "fp4_e2m1_all", "fp8_e4m3_nan", 16),
])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_has_the_names_shapes_and_dtypes_that_nunchaku_loads(
    made, family, fmt, name, numbers, scale_dtype, group
):
    """Strictly: SDXL's loader refuses what is missing or too much, Flux's also another dtype."""
    case, assignment, path = made(family, fmt)
    metadata = metadata_of(path)
    assert metadata.keys() == {"format", "model_class", "config", "comfy_config", "quantization_config"}
    assert json.loads(metadata["comfy_config"]) == {}
    config = json.loads(metadata["quantization_config"])
    activation = {"dtype": numbers, "scale_dtype": scale_dtype, "group_size": group}
    weight = activation | {"scale_dtype": scale_dtype and [None, scale_dtype]}
    assert config == {"method": "svdquant", "rank": config["rank"], "weight": weight, "activation": activation}
    dtype = torch.bfloat16 if family == "flux" else torch.float16
    assert metadata["model_class"] == {
        "sdxl_wide": "NunchakuSDXLUNet2DConditionModel", "flux": "NunchakuFluxTransformer2dModel",
    }[family]  # fmt: skip
    assert path.name == f"svdq-{name}_r{config['rank']}-{'flux.1' if family == 'flux' else 'sdxl'}.safetensors"
    with torch.device("meta"):
        network = case.kind.from_config(json.loads(metadata["config"]))
    stored, of_block = load_file(path), "transformer_blocks."
    outside = [{key for key in names if of_block not in key} for names in (stored, network.state_dict())]
    assert outside[0] == outside[1]
    assert {each.dtype for each in stored.values() if each.is_floating_point()} - {torch.float8_e4m3fn} == {dtype}
    four_bits = {"qweight", "wscales", "smooth", "smooth_orig", "lora_down", "lora_up"}
    four_bits |= {"wcscales"} if fmt == "nvfp4" else set()
    for block, kinds in OF_A_BLOCK.items():
        found = by_layer(key.removeprefix(f"{block}.") for key in stored if key.startswith(f"{block}."))
        ends = zip(kinds, (four_bits, MODULATION, {"weight"}), strict=True)
        assert not found or found == {layer: each for layers, each in ends for layer in layers.split()}


def test_names_of_deepcompressor_and_nunchaku_are_translated_both_ways():
    for old, new in (
        ("single_transformer_blocks.3.out_proj.smooth", "single_transformer_blocks.3.attn.to_out.smooth_factor"),
        ("single_transformer_blocks.3.mlp_fc2.qweight", "single_transformer_blocks.3.mlp_fc2.qweight"),
        ("transformer_blocks.0.mlp_fc2.smooth_orig", "transformer_blocks.0.ff.net.2.smooth_factor_orig"),
        ("transformer_blocks.0.qkv_proj_context.lora_up", "transformer_blocks.0.attn.add_qkv_proj.proj_up"),
        ("transformer_blocks.0.norm1.linear.wzeros", "transformer_blocks.0.norm1.linear.wzeros"),
        ("proj_out.weight", "proj_out.weight"),
    ):
        assert (new_name(old), new_name(new), old_name(new)) == (new, new, old)


# Products, by comfy-kitchen in place of nunchaku's kernels, which need a GPU


def by_kitchen(x: Tensor, own: dict[str, Tensor], unsigned: bool) -> Tensor:
    """The product of a layer's tensors, whose branch reads inputs as they come."""
    kitchen = pytest.importorskip("comfy_kitchen.backends.eager.svdquant")
    weight, (rows, half) = own["qweight"], own["qweight"].shape
    wscales, down, up = own["wscales"].float(), own["lora_down"].float(), own["lora_up"].float()
    factors = tiles.vector_from_tiles(own["smooth"].float())
    natural = tiles.down(down.shape[1], down.shape[0]).natural(down).T
    shifted = x + SHIFT if unsigned else x
    codes, scales, lora = kitchen.quantize_svdquant_w4a4(shifted, factors, natural, 64, unsigned, lora_x=x)
    packed = kitchen._pack_int4_row_major(tiles.unpacked(tiles.codes(rows, 2 * half), weight).view(torch.int8))
    natural = tiles.scales(rows, half // 32).natural(wscales).T.contiguous()
    bias = tiles.vector_from_tiles(own["bias"].float()) if "bias" in own else None
    up = tiles.up(rows, up.shape[1]).natural(up)
    return kitchen.scaled_mm_svdquant_w4a4(codes, packed, scales, natural, lora, up, bias, unsigned)


@pytest.mark.slow
@pytest.mark.consumer
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_linears_compute_what_comfy_kitchen_computes(tiny, tmp_path, family):
    """Every linear of the file beside those of diffusers that it stands for, with the inputs that it has there."""
    case = tiny(family)
    assignment = case.assignment(recipe_of("int4", **FAMILIES[family]), NAME)
    for name, row in assignment.items():
        if row.format:  # inputs are multiplied, alike for what is fused
            factors = torch.rand(row.weight_shape[1], generator=torch.Generator().manual_seed(0)) + 0.5
            assignment[name] = replace(row, pre_quant_scale=factors, folded_into=None)
    path = case.written(assignment, NAME, tmp_path)
    stored, ours = load_file(path), case.network(case.read(path, NAME)).eval()
    random = torch.Generator().manual_seed(0)
    seen = 0
    for key in (key for key in stored if key.endswith(".lora_down")):
        old = key.removesuffix(".lora_down")
        name = new_name(f"{old}.qweight").removesuffix(".qweight")
        own = {end.removeprefix(f"{old}."): each for end, each in stored.items() if end.startswith(f"{old}.")}
        x = torch.randn(64, 2 * own["qweight"].shape[1], generator=random)
        head, _, last = name.rpartition(".")
        unsigned = family == "flux" and name.endswith(("ff.net.2", "ff_context.net.2", "mlp_fc2"))
        x = F.gelu(x, approximate="tanh") if unsigned else x
        theirs = by_kitchen(x, own, unsigned)
        single = "single_" in name
        if last in ("to_qkv", "add_qkv_proj"):
            names = [f"{head}.{last.replace('qkv', letter)}" for letter in "qkv"]
            mine = torch.cat([ours.get_submodule(each)(x) for each in names], -1)
        elif single and last == "mlp_fc1":
            mine = ours.get_submodule(f"{head}.proj_mlp")(x)
        elif single:  # columns: the other ones read zeros, and give what their input of zeros gives
            block = name.removesuffix(".mlp_fc2").removesuffix(".attn.to_out")
            layer = ours.get_submodule(f"{block}.proj_out")
            others = torch.zeros(64, layer.in_features - x.shape[1])
            mine = layer(torch.cat([others, x] if last == "mlp_fc2" else [x, others], -1))
            if last == "to_out":
                mine = mine - layer(torch.zeros(64, layer.in_features))
        else:
            mine = ours.get_submodule(name)(x)
        assert relative_error(theirs, mine) < 1e-4, name
        seen += 1
    assert seen == {"sdxl_wide": 8 * 6, "flux": 2 * 8 + 2 * 4}[family]


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, layer",
    [
        ("sdxl_wide", "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_qkv"),
        ("flux", "transformer_blocks.0.qkv_proj_context"),
    ],
)
def test_a_weight_of_nvfp4_is_what_the_formula_says(made, family, layer):
    """Each number of the file by its place in memory: no library has the product."""
    case, _, path = made(family, "nvfp4")
    stored = {end: load_file(path)[f"{layer}.{end}"] for end in ("qweight", "wscales", "wcscales")}
    rows, half = stored["qweight"].shape
    n, k = torch.arange(rows)[:, None], torch.arange(2 * half)
    nibbles = torch.stack([stored["qweight"].view(torch.uint8) & 15, stored["qweight"].view(torch.uint8) >> 4], -1)
    codes = nibbles.flatten()[8 * word(n, k, 2 * half) + k % 8].long()
    of_block = stored["wscales"].view(torch.uint8).flatten()[micro_scale(n, k // 16, 2 * half)]
    expected = E2M1[codes & 7] * (1 - 2.0 * (codes >> 3)) * of_block.view(torch.float8_e4m3fn).float()
    expected *= stored["wcscales"].float()[scale(n, 0, 1)]
    read, fused = case.read(path, NAME), new_name(f"{layer}.qweight").removesuffix(".qweight")
    for letter, third in zip("qkv", expected.chunk(3), strict=True):
        own = read.layers[fused.replace("qkv", letter)]
        up, down = (each.read().float() for each in own.branch)
        assert relative_error(third, own.weight.read() - up @ down) < 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_the_bias_takes_back_what_kernels_add(made):
    """The branch reads inputs that are not shifted: with the shift of the whole weight the biases would be far off."""
    case, assignment, path = made("flux")
    read, full = case.read(path, NAME), case.denoiser()
    stored = load_file(path)
    for name in (name for name in read.layers if name.endswith("norm.linear") or "norm1" in name):
        bias = rewritten(full.get_submodule(name).bias, assignment[name])  # which absorbs a smoothing
        assert ((read.parameters[f"{name}.bias"].read() - bias).abs() <= 0.005 * (1 + bias.abs())).all(), name
    for name in ("transformer_blocks.0.ff.net.2", "single_transformer_blocks.1.proj_out"):
        bias = full.get_submodule(name).bias
        assert (read.parameters[f"{name}.bias"].read() - bias).abs().max() < 0.005
        assert "uint4" in str(read.layers[name].inputs)
    raw = tiles.vector_from_tiles(stored["transformer_blocks.0.mlp_fc2.bias"].float())
    layer, bias = read.layers["transformer_blocks.0.ff.net.2"], full.get_submodule("transformer_blocks.0.ff.net.2").bias
    up, down = (each.read() for each in layer.branch)
    of_all, of_branch = (weight @ layer.inputs.factor * SHIFT for weight in (layer.weight.read(), up @ down))
    assert (raw - bias + of_all - of_branch).abs().max() < 0.005 < 0.05 < (raw - bias + of_all).abs().max()
    assert torch.equal(stored["single_transformer_blocks.0.out_proj.bias"].float(), torch.zeros(128))


def own(tensors: Mapping[str, Tensor]) -> LayerTensors:
    return LayerTensors(Path("a"), "norm", {name: lazy(each) for name, each in tensors.items()})


@pytest.mark.parametrize("chunks", [3, 6])
def test_a_modulation_comes_back_within_half_a_step_and_its_rows_take_turns(chunks):
    """Stored row r is row (r mod S) N / S + r div S."""
    rows = torch.arange(128 * chunks)
    assert torch.equal(interleaved(rows[:, None], chunks)[:, 0], rows % chunks * 128 + rows // chunks)
    weight = torch.randn(128 * chunks, 128, generator=torch.Generator().manual_seed(0))
    tensors = {name: each.read() for name, each in w4a16_tensors(lazy(weight), chunks, torch.bfloat16).items()}
    read = w4a16_layer(own(tensors), *weight.shape, chunks).weight.read()
    step = weight.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True) / 7
    assert ((read - weight).unflatten(1, (-1, 64)).abs() <= 0.52 * step).all()


@pytest.fixture
def svdquant_w4a16(monkeypatch):
    """A file of auto-round's as a module. The package itself would import transformers' and a dozen more."""
    package = find_spec("auto_round")
    if package is None:
        pytest.skip("auto_round is not installed")
    for name in ("auto_round", "auto_round.data_type", "auto_round.data_type.mxfp"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    path = Path(package.origin).parent / "export/svdquant_w4a16.py"
    spec = spec_from_file_location("svdquant_w4a16", path)
    monkeypatch.setitem(sys.modules, spec.name, module := module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@pytest.mark.consumer
@pytest.mark.parametrize("chunks", [3, 6])
def test_auto_rounds_modulation_is_read_and_its_codes_are_packed_alike(svdquant_w4a16, chunks):
    theirs, random = svdquant_w4a16, torch.Generator().manual_seed(0)
    weight = torch.randn(1024 * chunks, 1024, generator=random).bfloat16()
    bias = torch.randn(1024 * chunks, generator=random).bfloat16()
    packed = theirs.quantize_adanorm_w4a16_rtn(weight, bias, splits=chunks)
    pieces = {"qweight": packed.qweight, "wscales": packed.wscales, "wzeros": packed.wzeros, "bias": packed.bias}
    layer, read = modulation(own(pieces), *weight.shape)
    codes = (theirs.unpack_adanorm_w4a16(packed) + 7).float()
    scales, zeros = (each.float().T.repeat_interleave(64, 1) for each in (packed.wscales, packed.wzeros))
    assert torch.equal(layer.weight.read(), in_chunks(codes * scales + zeros, chunks))
    assert relative_error(weight.float(), layer.weight.read()) < 0.2
    assert (read.read() - bias.float()).abs().max() < 0.02  # bf16 holds 1 + bias no better
    assert torch.equal(interleaved(shifted(bias.float(), chunks, 1), chunks).bfloat16(), packed.bias)
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=random)
    ours = tiles.packed(tiles.awq_codes(N, K), codes).view(torch.int32).view(N // 4, K // 2)
    assert torch.equal(ours, theirs._pack_code_rows(codes.to(torch.int32)))


@pytest.mark.slow
def test_a_run_that_leaves_a_layer_or_smooths_fused_ones_apart_is_refused(made):
    _, assignment, _ = made("sdxl_wide")
    name = next(name for name in assignment if name.endswith("attn1.to_out.0"))
    key = next(name for name in assignment if name.endswith("attn1.to_k"))
    alone = {"pre_quant_scale": torch.ones(128), "folded_into": None}
    for layer, change, words in (
        (name, {"format": None, "reason": "too sensitive"}, rf"1 are not, such as {name} \(too sensitive"),
        (key, alone, "3 are not.*multiplied by another vector; smoothing=folded has one"),
    ):
        with pytest.raises(ConfigError, match=words):
            adapted(assignment | {layer: replace(assignment[layer], **change)}, TARGETS[NAME])


# Where tiles put each number: flat formulas, and the packers of cache-dit and auto-round, bit for bit

N, K, R = 256, 384, 48
ROW, COLUMN, GROUP, MICRO, RANK = (torch.arange(size) for size in (N, K, K // 64, K // 16, R))


def word(n, k, columns: int = K):
    """The place of an int32 of eight codes."""
    place = ((n // 128 * (columns // 64) + k // 64) * 8 + n % 128 // 16) * 8 + n % 8
    return (place * 4 + k % 32 // 8) * 4 + n % 16 // 8 * 2 + k % 64 // 32


def in_sixteens(outer, r, inner_outer, inner, rank: int = R):
    """The place of a number of the branch, whose tiles are 16 by 16."""
    place = ((outer // 16 * (rank // 16) + r // 16) * 8 + inner_outer % 8) * 4 + inner % 8 // 2
    return ((place * 2 + inner_outer % 16 // 8) * 2 + inner % 16 // 8) * 2 + inner % 2


def scale(n, g, groups: int = K // 64):
    """The place of a scale of INT4, and of a number of a vector, whose group is one."""
    place = ((n // 128 * groups + g) * 8 + n % 128 // 16) * 4 + n % 8 // 2
    return (place * 2 + n % 16 // 8) * 2 + n % 2


def micro_scale(n, g, columns: int = K):
    place = ((n // 128 * (columns // 64) + g // 4) * 8 + n % 8) * 4 + n % 32 // 8
    return (place * 4 + n % 128 // 32) * 4 + g % 4


def awq(n, k):
    """The place of a code: an int16 has four."""
    place = (n // 4 * (K // 64) + k // 64) * 4 + n % 4
    return ((place * 2 + k % 64 // 32) * 8 + k % 8) * 4 + k % 32 // 8


@pytest.mark.parametrize(
    "layout, places",
    [
        (tiles.codes(N, K), 8 * word(ROW[:, None], COLUMN) + COLUMN % 8),
        (tiles.scales(N, K // 64), scale(ROW[:, None], GROUP)),
        (tiles.micro_scales(N, K // 16), micro_scale(ROW[:, None], MICRO)),
        (tiles.down(R, K), in_sixteens(COLUMN, RANK[:, None], RANK[:, None], COLUMN)),
        (tiles.up(N, R), in_sixteens(ROW[:, None], RANK, ROW[:, None], RANK)),
        (tiles.awq_codes(N, K), awq(ROW[:, None], COLUMN)),
    ],
    ids=["codes", "scales", "micro_scales", "down", "up", "awq"],
)
def test_a_number_lies_where_the_formula_says(layout, places):
    matrix = torch.arange(layout.shape[0] * layout.shape[1]).view(layout.shape)
    stored = layout.tiled(matrix)
    assert torch.equal(stored[places], matrix) and torch.equal(layout.natural(stored), matrix)


@pytest.mark.consumer
def test_cache_dit_packs_alike():
    pytest.importorskip("cache_dit")
    from cache_dit.quantization.svdquant.packing import SVDQWeightPacker

    packer, generator = SVDQWeightPacker(bits=4), torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (N, K), dtype=torch.int32, generator=generator)
    scales, vector, micro, down, up = (
        torch.randn(shape, generator=generator).half() for shape in ((N, K // 64), (N,), (N, K // 16), (R, K), (N, R))
    )
    ours = tiles.packed(tiles.codes(N, K), codes.to(torch.int8)).view(torch.int8).view(N, K // 2)
    assert torch.equal(ours, packer.pack_weight(codes))
    theirs = packer.pack_scale(packer.pad_scale(scales.view(N, 1, -1, 1), 64), 64)
    assert torch.equal(tiles.scales(N, K // 64).tiled(scales), theirs.flatten())
    theirs = packer.pack_scale(packer.pad_scale(vector.view(-1, 1), -1), -1)
    assert torch.equal(tiles.vector_in_tiles(vector), theirs.flatten())
    theirs = packer.pack_micro_scale(packer.pad_scale(micro.abs().view(N, 1, -1, 1), 16), 16)
    ours = tiles.micro_scales(N, K // 16).tiled(micro.abs().to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(ours, theirs.view(torch.uint8).flatten())
    for layout, matrix, is_down in ((tiles.down(R, K), down, True), (tiles.up(N, R), up, False)):
        theirs = packer.pack_lowrank_weight(packer.pad_lowrank_weight(matrix, down=is_down), down=is_down)
        assert torch.equal(layout.tiled(matrix), theirs.flatten())


# Folders for nunchaku_lite; ``tests.programs`` has diffusers load one


@pytest.mark.slow
def test_a_folder_for_nunchaku_lite_holds_what_diffusers_config_says(written_once):
    case, assignment, folder = written_once("diffusers_nunchaku_lite", "flux", "int4", rank=0.1, smoothing="modelopt")
    config = json.loads((folder / case.component / "config.json").read_text())["quantization_config"]
    section = {"precision": "int4", "group_size": 64, "rank": 16}
    section["targets"] = [row.name for row in assignment.values() if row.format]
    assert config | {"quant_method": "nunchaku_lite", "compute_dtype": "float16"} == config
    assert config["svdq_w4a4"] | section == config["svdq_w4a4"]
    (file,) = (folder / case.component).glob("*.safetensors")
    tensors = load_file(file)
    assert not any(name.endswith(("smooth_factor_orig", "wcscales", "wtscale")) for name in tensors)
    assert all(f"{name}.weight" not in tensors for name in section["targets"])
