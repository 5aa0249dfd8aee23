"""What is written for servers is what ModelOpt exports, what bfl reads, and what each server's rules take.

The rules are restated here from the servers' sources: SGLang 0.5.23 (``modelopt_quant.py``, ``dits/flux.py``), vLLM as
of vLLM-Omni 0.30 (``modelopt.py``), TensorRT-LLM of August 2026 (``visual_gen/config.py``, ``transformer_flux.py``).
"""

import json
import random
import re
import shutil
from dataclasses import replace
from fnmatch import fnmatchcase

import modelopt.torch.quantization as mtq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.interchange import READERS, TARGETS
from sd_quant.interchange.holding import adapted
from sd_quant.interchange.modelopt_export import config_of, ignored, read
from sd_quant.interchange.servers import check_served, servers_of
from sd_quant.models.checkpoint import denoiser_weights
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS, nvfp4

from ..observed.conftest import observe, tiny_folder  # noqa: F401 fixtures
from ..tiny import Tiny, changed
from .conftest import recipe_of

pytestmark = pytest.mark.commit

TARGET = TARGETS["modelopt_export"]
PLAIN = {"smoothing": "none", "alpha": None}
RECIPES = {
    "fp8": recipe_of("fp8", per_channel=False, **PLAIN),
    "fp8_per_row": recipe_of("fp8", per_channel=True, per_token=True, **PLAIN),
    "nvfp4": recipe_of("nvfp4", **PLAIN),
    "chosen": recipe_of("nvfp4", rounding="gptq", scale_search=True, **PLAIN),
}
QKV, ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
slow = pytest.mark.slow


@pytest.fixture(scope="module", params=RECIPES)
def written(request, tiny, tmp_path_factory):
    """A tiny Flux, its assignment, and the folder of its transformer."""
    case = tiny("flux")
    assignment = case.assignment(RECIPES[request.param], "modelopt_export")
    folder = case.written(assignment, "modelopt_export", tmp_path_factory.mktemp(request.param))
    return case, {name: row for name, row in assignment.items() if row.format}, folder / "transformer"


def tensors_in(folder) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def config_in(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def layer_tensors(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of a layer by the ends of their names, without its bias."""
    found = {key.removeprefix(f"{name}."): each for key, each in tensors.items() if key.startswith(f"{name}.")}
    found.pop("bias", None)
    return found


# Oracles


def exported(case: Tiny, layers: dict[str, LayerAssignment], weights: dict[str, Tensor], folder) -> tuple[dict, dict]:
    """Tensors and config of ModelOpt's own exporter, given our ranges and these weights."""
    from modelopt.torch.export import export_hf_checkpoint

    by_row, entries = mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, [{"quantizer_name": "*", "enable": False}]
    for name, row in layers.items():
        base = by_row if row.per_token else mtq.FP8_DEFAULT_CFG if row.format == "fp8" else mtq.NVFP4_DEFAULT_CFG
        entries += [
            each | {"quantizer_name": f"{name}.{each['quantizer_name'][1:]}"} for each in base["quant_cfg"][1:3]
        ]
    network = mtq.quantize(case.kind.from_pretrained(case.folder), {"quant_cfg": entries, "algorithm": None})
    for name, row in layers.items():
        module = network.get_submodule(name)
        module.weight.data = weights[name]
        # of FP8, those of our scales, which fp16 holds
        weight_amax = row.weight_scale * 448 if row.format == "fp8" else row.weight_amax
        input_amax = row.activation_scale * 448 if row.format == "fp8" else row.activation_amax
        module.weight_quantizer.amax = weight_amax.reshape((-1, 1) if row.per_token else ())
        if not row.per_token:  # whose inputs have no range
            module.input_quantizer.amax = torch.tensor(input_amax)
    export_hf_checkpoint(network, export_dir=folder)
    return tensors_in(folder), config_in(folder)


@slow
@torch.no_grad()
def test_it_is_what_modelopt_exports_of_the_same_numbers(written, tmp_path):
    """All codes, scales and the config, given the numbers that our codes stand for, and their ranges."""
    case, layers, folder = written
    mine, config = config_in(folder), assert_tensors_are_modelopts(case, layers, folder, tmp_path)
    assert mine | {"ignore": None} == config | {"ignore": None} and list(mine) == list(config)
    linears = [name for name in case.roles]
    for name in linears:  # theirs are spelt without a star where they are whole names
        assert matches(name, mine["ignore"]) == matches(name, config["ignore"]) == (name not in layers), name


def assert_tensors_are_modelopts(case: Tiny, layers: dict[str, LayerAssignment], folder, place) -> dict:
    """And ModelOpt's config of them, given the numbers that our codes stand for, and their ranges."""
    ours, read_back = tensors_in(folder), case.read(folder, "modelopt_export")
    weights = {name: read_back.layers[name].weight.read() for name in layers}
    signed = torch.tensor(1e-30)  # in place of zero, whose sign ModelOpt drops
    weights = {name: each.where(each != 0, signed.copysign(each)) for name, each in weights.items()}
    theirs, config = exported(case, layers, weights, place)
    assert theirs.keys() == ours.keys()
    for name in layers:
        mine, their = layer_tensors(ours, name), layer_tensors(theirs, name)
        for end, tensor in mine.items():
            assert tensor.dtype == their[end].dtype and tensor.shape == their[end].shape, f"{name}.{end}"
            if layers[name].rounded is None or tensor.ndim == 0:  # of chosen codes, 4 may be a block's largest
                assert torch.equal(tensor.float(), their[end].float()), f"{name}.{end}"
    return config


@slow
@torch.no_grad()
def test_codes_of_the_weights_themselves_are_modelopts_but_for_ties(tiny, tmp_path):
    """Ours are rounded by a product of scales in fp16, as in graphs, which decides otherwise only within 2^-11."""
    case = tiny("flux")
    for fmt in ("fp8", "fp8_per_row", "nvfp4"):
        layers = {name: row for name, row in case.assignment(RECIPES[fmt], "modelopt_export").items() if row.format}
        original = denoiser_weights(case.checkpoint)
        weights = {name: original[f"{name}.weight"].float() for name in layers}
        theirs, _ = exported(case, layers, weights, tmp_path / fmt)
        ours = tensors_in(case.written(layers, "modelopt_export", tmp_path / f"ours_{fmt}") / "transformer")
        differing = total = 0
        for name in layers:
            mine, their = layer_tensors(ours, name), layer_tensors(theirs, name)
            for end in mine.keys() - {"weight"}:
                assert torch.equal(mine[end].float(), their[end].float()), f"{name}.{end}"
            differing += int((mine["weight"].view(torch.uint8) != their["weight"].view(torch.uint8)).sum())
            total += mine["weight"].numel()
        assert differing <= (1e-3 * total if fmt == "nvfp4" else 0), (fmt, differing, total)


@slow
@torch.no_grad()
def test_bfls_decoder_reads_the_same_weights(written):
    """The even number is in the low nibble, and both scales multiply: the other order decodes something else."""
    from diffusers.quantizers.bfl.utils import dequantize_nvfp4

    case, layers, folder = written
    ours, tensors = case.read(folder, "modelopt_export"), tensors_in(folder)
    for name, row in layers.items():
        found, original = layer_tensors(tensors, name), denoiser_weights(case.checkpoint)[f"{name}.weight"].float()
        if row.format == "fp8":
            decoded = found["weight"].float() * found["weight_scale"].reshape(-1, 1)
        else:
            codes, scales = found["weight"], (found["weight_scale"], found["weight_scale_2"])
            decoded = dequantize_nvfp4(codes, *scales)
            assert torch.dist(dequantize_nvfp4(codes >> 4 | codes << 4, *scales), original) > 0.9 * original.norm()
        torch.testing.assert_close(decoded, ours.layers[name].weight.read(), rtol=1e-6, atol=0)
        assert torch.dist(decoded, original) < 0.2 * original.norm()


@slow
@pytest.mark.consumer
@torch.no_grad()
def test_bfl_opens_the_file(tiny, tmp_path):
    pytest.importorskip("accelerate")
    from diffusers import BFLQuantizationConfig

    case = tiny("flux")
    folder = (
        case.written(case.assignment(RECIPES["nvfp4"], "modelopt_export"), "modelopt_export", tmp_path) / "transformer"
    )
    ours = case.read(folder, "modelopt_export")
    (file,) = folder.glob("*.safetensors")
    theirs = case.kind.from_single_file(
        str(file), config=str(case.folder), quantization_config=BFLQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32, local_files_only=True,
    )  # fmt: skip
    weights_alone = replace(ours, layers={name: replace(each, inputs=None) for name, each in ours.layers.items()})
    assert case.error(case.network(weights_alone), theirs.eval()) < 1e-5


# Servers' rules


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def by_sglang(name: str, ignore: list[str]) -> bool:
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) for pattern in ignore)


def by_vllm(name: str, ignore: list[str], parts: tuple[str, ...] = ()) -> bool:
    """A joint layer asks by its own name, and by its parts' for names that are listed whole; these have to agree."""
    begin, _, _ = name.rpartition(".")
    listed = {f"{begin}.{part}" in ignore for part in parts} or {name in ignore}
    if len(listed) > 1:
        raise ValueError(f"some but not all parts of {name}")
    return listed == {True} or any(pattern in name for pattern in ignore) or matches(name, ignore)


def by_tensorrt(name: str, ignore: list[str]) -> bool:
    """The name, or any module around it."""
    words = name.split(".")
    return any(matches(".".join(words[:count]), ignore) for count in range(1, len(words) + 1))


def disagreements(ignore: list[str], quantized: set[str], linears: list[str]) -> list[str]:
    """Layers that a server would take for what they are not, as they name them in FLUX.1, Qwen-Image and Z-Image."""
    found = []
    for name in linears:
        begin, _, last = name.rpartition(".")
        joint = {
            "to_q": ("to_qkv", "qkv_proj", QKV), "add_q_proj": ("add_kv_proj", "add_qkv_proj", ADDED),
            "w1": ("w13", "w13", ("w1", "w3")),
        }  # fmt: skip
        taken = {"SGLang": by_sglang(name, ignore)}
        if last in (*QKV, *ADDED, "w1", "w3"):
            if last in joint:
                vllm, tensorrt, parts = joint[last]
                taken["vLLM-Omni"] = by_vllm(f"{begin}.{vllm}", ignore, parts)
                taken["TensorRT-LLM"] = by_tensorrt(f"{begin}.{tensorrt}", ignore)
        else:
            theirs = name.replace(".net.0.proj", ".up_proj").replace(".net.2", ".down_proj")
            taken |= {"vLLM-Omni": by_vllm(name, ignore), "TensorRT-LLM": by_tensorrt(theirs, ignore)}
        found += [f"{server}: {name}" for server, excluded in taken.items() if excluded == (name in quantized)]
    return found


def flux_linears(double: int = 12, single: int = 12) -> list[str]:
    """FLUX.1's linears, of at least as many blocks that one number begins another."""
    ends = [f"attn.{end}" for end in (*QKV, *ADDED, "to_out.0", "to_add_out")]
    ends += [f"{ff}.net.{end}" for ff in ("ff", "ff_context") for end in ("0.proj", "2")]
    ends += ["norm1.linear", "norm1_context.linear"]
    names = [f"transformer_blocks.{block}.{end}" for block in range(double) for end in ends]
    ends = ["norm.linear", "proj_mlp", "proj_out", *(f"attn.{end}" for end in QKV)]
    names += [f"single_transformer_blocks.{block}.{end}" for block in range(single) for end in ends]
    embedders = [f"time_text_embed.{each}_embedder.linear_{n}" for each in ("timestep", "text") for n in (1, 2)]
    return [*embedders, "context_embedder", "x_embedder", *names, "norm_out.linear", "proj_out"]


def units(linears: list[str]) -> list[list[str]]:
    """The linears in groups that are quantized together."""
    joint = {**dict.fromkeys(QKV, "qkv"), **dict.fromkeys(ADDED, "added"), "w1": "w13", "w3": "w13"}
    groups: dict[str, list[str]] = {}
    for name in linears:
        begin, _, last = name.rpartition(".")
        groups.setdefault(f"{begin} {joint[last]}" if last in joint else name, []).append(name)
    return list(groups.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_exclusions_mean_the_same_to_every_server(seed):
    """Of any choice of layers, whole blocks among them."""
    linears, chance = flux_linears(), random.Random(seed)
    share = chance.choice((0.02, 0.3, 0.7, 0.98))
    quantized = {name for unit in units(linears) if chance.random() < share for name in unit}
    whole = [f"{kind}.{chance.randrange(12)}." for kind in ("transformer_blocks", "single_transformer_blocks")]
    quantized = {name for name in quantized if not name.startswith(tuple(whole))} | {
        "single_transformer_blocks.3.proj_out"
    }
    assert disagreements(ignored(linears, quantized), quantized, linears) == []


# Linears by diffusers' names, and SGLang's names for those that it calls otherwise: by ``param_names_mapping``, and the
# modules of ``dits/qwen_image.py`` and ``dits/zimage.py``, after which ``ignore`` is matched (sglang #23625)
QWEN = ["attn." + end for end in (*QKV, *ADDED, "to_out.0", "to_add_out")]
QWEN += [f"{stream}_{end}" for stream in ("img", "txt") for end in ("mod.1", "mlp.net.0.proj", "mlp.net.2")]
Z_IMAGE = [*(f"attention.{end}" for end in (*QKV, "to_out.0")), *(f"feed_forward.w{n}" for n in (1, 2, 3))]
SGLANG = {
    "QwenImagePipeline": (
        ["img_in", "txt_in", *(f"transformer_blocks.{n}.{end}" for n in range(12) for end in QWEN), "proj_out"],
        {r"\.add_[qkv]_proj$": ".to_added_qkv", r"_mod\.1$": "_mod"},
    ),
    "ZImagePipeline": (
        [
            f"{blocks}.{n}.{end}" for blocks, count in {"noise_refiner": 2, "context_refiner": 2, "layers": 12}.items()
            for n in range(count) for end in (*Z_IMAGE, "adaLN_modulation.0")
        ],
        {r"\.to_[qkv]$": ".to_qkv", r"\.w[13]$": ".w13"},
    ),
    "WanPipeline": (
        [
            f"blocks.{n}.{end}" for n in range(12)
            for end in (*(f"attn{m}.{p}" for m in (1, 2) for p in (*QKV, "to_out.0")), "ffn.net.0.proj", "ffn.net.2")
        ],
        {r"attn1\.to_": "to_", r"to_out\.0$": "to_out", r"net\.0\.proj$": "fc_in", r"net\.2$": "fc_out"},
    ),
}  # fmt: skip


def wrong_in_sglang(
    pipeline: str, ignore: list[str], quantized: set[str], linears: list[str] | None = None
) -> list[str]:
    """The linears of a pipeline that SGLang would take for what they are not."""
    names = {name: name for name in linears or SGLANG[pipeline][0]}
    for pattern, other in SGLANG[pipeline][1].items():
        names = {name: re.sub(pattern, other, theirs) for name, theirs in names.items()}
    return [name for name, theirs in names.items() if by_sglang(theirs, ignore) == (name in quantized)]


@pytest.mark.parametrize("pipeline", SGLANG)
@pytest.mark.parametrize("seed", range(6))
def test_the_exclusions_are_found_under_sglangs_own_names(pipeline, seed):
    linears, chance = SGLANG[pipeline][0], random.Random(seed)
    share = chance.choice((0.02, 0.3, 0.7, 0.98))
    quantized = {name for unit in units(linears) if chance.random() < share for name in unit}
    assert wrong_in_sglang(pipeline, ignored(linears, quantized), quantized) == []


def test_what_sglang_would_make_of_diffusers_names_alone():
    """A joint layer, which no part's name begins, and a modulation that lies in a sequence in diffusers."""
    name, linears = "QwenImagePipeline", set(SGLANG["QwenImagePipeline"][0])
    added = {each for each in linears if each.endswith(ADDED)}
    own_names = [each for each in ignored(linears, linears - added) if each[:-1] in linears]
    assert set(wrong_in_sglang(name, own_names, linears - added)) == added
    modulations = {each for each in linears if "_mod." in each}
    right = ignored(linears, linears - modulations)
    assert "transformer_blocks.3.img_mod*" in right and wrong_in_sglang(name, right, linears - modulations) == []
    whole = [each.replace("_mod*", "_mod.1*") for each in right]
    assert set(wrong_in_sglang(name, whole, linears - modulations)) == modulations


def test_what_each_server_would_make_of_other_lists():
    """A list without a layer, one with a quantized layer, and the traps of each rule."""
    linears = flux_linears()
    quantized = {name for name in linears if "block" in name and "norm" not in name}
    right = ignored(linears, quantized)
    assert disagreements(right, quantized, linears) == []
    for server in ("SGLang", "vLLM-Omni", "TensorRT-LLM"):
        missing = disagreements([each for each in right if each != "x_embedder*"], quantized, linears)
        assert f"{server}: x_embedder" in missing
        struck = disagreements([*right, "transformer_blocks.3.attn.to_out.0"], quantized, linears)
        assert f"{server}: transformer_blocks.3.attn.to_out.0" in struck
    bare = disagreements(["proj_out" if each == "proj_out*" else each for each in right], quantized, linears)
    assert bare and {each.split(".")[0] for each in bare} == {"vLLM-Omni: single_transformer_blocks"}
    quantized -= {name for name in linears if name.startswith("transformer_blocks.1.")}
    right = ignored(linears, quantized)
    assert "transformer_blocks.1.*" in right and disagreements(right, quantized, linears) == []
    loose = ["transformer_blocks.1*" if each == "transformer_blocks.1.*" else each for each in right]
    assert any("transformer_blocks.10." in each for each in disagreements(loose, quantized, linears))
    quantized -= {f"transformer_blocks.2.attn.{end}" for end in ADDED}
    right = ignored(linears, quantized)
    own_names = [each for each in right if not each.endswith(("add_kv_proj*", "add_qkv_proj*"))]
    assert disagreements(own_names, quantized, linears) == [
        "vLLM-Omni: transformer_blocks.2.attn.add_q_proj", "TensorRT-LLM: transformer_blocks.2.attn.add_q_proj"
    ]  # fmt: skip


def test_parts_of_a_joint_layer_that_disagree_raise_in_vllm():
    with pytest.raises(ValueError, match="some but not all"):
        by_vllm("a.attn.to_qkv", ["a.attn.to_q"], QKV)


def test_a_name_that_begins_a_quantized_one_is_refused():
    with pytest.raises(ConfigError, match=r"layers\.1 stays in high precision and layers\.10 does not"):
        ignored(["layers.1", "layers.10"], {"layers.10"})


@slow
def test_names_dtypes_shapes_and_directions_are_those_that_servers_register(written):
    """All scales multiply: TensorRT-LLM and bfl invert input_scale themselves. Joint layers have equal scales."""
    case, layers, folder = written
    tensors = tensors_in(folder)
    for name, row in layers.items():
        found, (rows, columns) = layer_tensors(tensors, name), row.weight_shape
        number = (torch.float32, ())
        expected = {"weight": (torch.float8_e4m3fn, (rows, columns)), "weight_scale": number, "input_scale": number}
        if row.per_token:
            expected = {"weight": expected["weight"], "weight_scale": (torch.float32, (rows,))}
        if row.format == "nvfp4":
            expected["weight"] = (torch.uint8, (rows, columns // 2))
            expected["weight_scale"] = (torch.float8_e4m3fn, (rows, columns // 16))
            expected["weight_scale_2"] = number
        assert {end: (each.dtype, tuple(each.shape)) for end, each in found.items()} == expected, name
        whole = 448 if row.format == "fp8" else 6 * 448
        scale = found["weight_scale" if row.format == "fp8" else "weight_scale_2"]
        torch.testing.assert_close(scale.reshape(-1), row.weight_amax / whole, rtol=1e-3, atol=0)
        if row.per_token:
            continue
        assert found["input_scale"].item() == pytest.approx(row.activation_amax / whole, rel=1e-3)
        begin, _, last = name.rpartition(".")
        for part in QKV if last in QKV else ADDED if last in ADDED else ():
            other = layer_tensors(tensors, f"{begin}.{part}")
            for end in ("input_scale", "weight_scale_2"):
                assert end not in found or torch.equal(found[end], other[end]), f"{begin}.{part}.{end}"
    assert {each.dtype for key, each in tensors.items() if key.endswith("bias")} == {torch.float16}


def as_bytes(tensor: Tensor) -> Tensor:
    """FP8 as bytes, which can be moved."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@slow
@pytest.mark.parametrize("written", ["fp8_per_row", "nvfp4"], indirect=True)
def test_scales_lie_in_the_order_of_rows_so_that_halves_can_be_swapped(written):
    """vLLM-Omni swaps the two halves of some first linears of feed-forwards, and has to swap both (#5848)."""
    from diffusers.quantizers.bfl.utils import dequantize_nvfp4

    case, layers, folder = written
    found = layer_tensors(tensors_in(folder), name := min(each for each in layers if each.endswith("net.0.proj")))
    codes, scale = (as_bytes(found[end]) for end in ("weight", "weight_scale"))

    def numbers(codes: Tensor, scale: Tensor) -> Tensor:
        if layers[name].per_token:
            return codes.view(torch.float8_e4m3fn).float() * scale[:, None]
        return dequantize_nvfp4(codes, scale.view(torch.float8_e4m3fn), found["weight_scale_2"])

    half = len(codes) // 2
    swapped = numbers(codes, scale).roll(half, 0)
    assert torch.equal(numbers(codes.roll(half, 0), scale.roll(half, 0)), swapped)
    assert torch.dist(numbers(codes.roll(half, 0), scale), swapped) > 0.02 * swapped.norm()


def stacked_by_vllm(parts: list[dict[str, Tensor]]) -> Tensor:
    """The weight that it multiplies of layers in FP8: of unequal scales the largest, by which codes are rounded again.

    As its ``requantize_with_max_scale`` has it, and SGLang's.
    """
    scales = torch.stack([part["weight_scale"] for part in parts])  # [parts], or [parts, out]
    codes = torch.stack([part["weight"].float() for part in parts])
    numbers = codes * scales.reshape(len(parts), -1, 1)
    if scales.ndim > 1 or (scales == scales[0]).all():
        return numbers
    return (numbers / scales.max()).to(torch.float8_e4m3fn).float() * scales.max()


@slow
@pytest.mark.parametrize("written", ["fp8", "fp8_per_row"], indirect=True)
@torch.no_grad()
def test_servers_round_nothing_again_of_query_key_and_value(written):
    """They have one scale, and a scale for each row is stacked with its row; two scales would be one more rounding."""
    case, layers, folder = written
    tensors, weights = tensors_in(folder), denoiser_weights(case.checkpoint)
    for begin in {name.removesuffix("to_q") for name in layers if name.endswith(".to_q")}:
        parts = [layer_tensors(tensors, begin + part) for part in QKV]
        original = torch.stack([weights[f"{begin}{part}.weight"].float() for part in QKV])
        own = torch.stack([each["weight"].float() * each["weight_scale"].reshape(-1, 1) for each in parts])
        lost = (torch.dist(stacked_by_vllm(parts), original) / torch.dist(own, original)).item()
        assert lost == 1, begin
        parts[0] |= {"weight_scale": parts[0]["weight_scale"] * 1.3}
        assert torch.equal(stacked_by_vllm(parts)[1:], own[1:]) == bool(parts[0]["weight_scale"].ndim)


def quantized_at_load(config: dict) -> bool:
    """TensorRT-LLM: without groups weights are taken for unquantized."""
    groups = list(config.get("config_groups", {}).values())
    return groups[0]["weights"]["dynamic"] if groups else True


@slow
def test_tensorrt_takes_the_weights_for_quantized(written):
    """And FP8 by row, of which ModelOpt writes no groups, for weights: it is said not to load that."""
    case, layers, folder = written
    config, told = config_in(folder), servers_of(TARGET, case.checkpoint, layers)
    if config["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN":
        assert quantized_at_load(config) and "input_scale" not in "".join(tensors_in(folder))
        assert told["TensorRT-LLM"] == told["SGLang"] == "it loads no fp8 whose inputs are scaled per token"
        single = {name: row for name, row in layers.items() if name.startswith("single") and "norm" not in name}
        assert servers_of(TARGET, case.checkpoint, single)["vLLM-Omni"] is None
        return
    assert told["TensorRT-LLM"] is None and not quantized_at_load(config)
    assert quantized_at_load({name: each for name, each in config.items() if name != "config_groups"})


# Holding


@slow
def test_one_global_scale_moves_a_chosen_scale_by_one_sixteenth_at_most(tiny):
    case = tiny("flux")
    joint = case.assignment(RECIPES["chosen"], "modelopt_export")
    name = "transformer_blocks.0.attn.to_k"
    own = nvfp4.rebased(*joint[name].rounded[1:], nvfp4.global_scale(joint[name].weight_amax / 1.7))
    ratio = own[0] * own[1] / (joint[name].rounded[1] * joint[name].rounded[2])
    inside = (joint[name].rounded[1] > 0.02) & (joint[name].rounded[1] < 200)
    assert (ratio[inside] - 1).abs().max() <= 1 / 16 and (ratio[inside] != 1).any()


def row(name: str, fmt: str | None = "nvfp4", amax: float = 1.0, inputs: float = 2.0) -> LayerAssignment:
    if fmt is None:
        return LayerAssignment(name, "qkv", (16, 32), reason="among the most sensitive layers")
    return LayerAssignment(name, "qkv", (16, 32), fmt, fmt, weight_amax=torch.tensor([amax]), activation_amax=inputs)


@pytest.mark.parametrize("other", [None, "fp8"])
def test_a_joint_layer_is_held_whole_or_not_at_all(other):
    rows = {each.name: each for each in (row("a.to_q"), row("a.to_k", other), row("a.to_v"), row("b.to_q"))}
    found = adapted(rows, TARGET)
    assert [name for name, each in found.items() if each.format] == ["b.to_q"]
    assert found["a.to_q"].reason == "modelopt_export joins it with layers in other formats"
    assert found["a.to_q"].weight_amax is None


def test_queries_of_another_tensor_keep_their_own_scale():
    rows = {each.name: each for each in (row("a.to_q", amax=3, inputs=9), row("a.to_k", amax=1), row("a.to_v", amax=2))}
    found = adapted(rows, TARGET)
    assert [each.weight_amax.item() for each in found.values()] == [3, 2, 2]
    codes = {name: replace(each, format="fp8", activation_format="fp8") for name, each in rows.items()}
    assert [each.weight_amax.item() for each in adapted(codes, TARGET).values()] == [3, 2, 2]
    by_row = {name: replace(each, per_token=True, weight_axis=0) for name, each in codes.items()}
    assert [each.weight_amax.item() for each in adapted(by_row, TARGET).values()] == [3, 1, 2]  # which stack


@pytest.mark.parametrize(
    "change, words",
    [
        ({"activation_format": None, "activation_amax": None}, "wants a scale of the inputs of nvfp4"),
        ({"format": "fp8", "activation_format": "fp8", "weight_axis": 0}, "holds only one scale for a weight in fp8"),
        ({"per_token": True}, "no inputs of nvfp4 that are scaled per token"),
        ({"weight_shape": (16, 24)}, "whose inputs are a multiple of 16"),
        ({"weight_shape": (16, 32, 3, 3)}, "holds no convolutions in nvfp4"),
        ({"pre_quant_scale": torch.ones(32)}, "cannot multiply the inputs of nvfp4"),
    ],
)
def test_what_is_not_held(change, words):
    rows = {"a": replace(row("a"), **change), "b": row("b")}
    assert words in adapted(rows, TARGET)["a"].reason


@slow
@torch.no_grad()
def test_two_formats_are_said_by_layer_and_read_so(tiny, tmp_path):
    case = tiny("flux")
    fp8, nvfp4_rows = (case.assignment(RECIPES[fmt], "modelopt_export") for fmt in ("fp8", "nvfp4"))
    rows = {name: (fp8 if ".0." in name else nvfp4_rows)[name] for name in fp8}
    folder = case.written(rows, "modelopt_export", tmp_path) / "transformer"
    config, read_back = config_in(folder), case.read(folder, "modelopt_export")
    assert config["quant_algo"] == "MIXED_PRECISION" and config["ignore"] == []
    held = {name: each.format for name, each in rows.items() if each.format}
    algos = {name: each["quant_algo"].lower() for name, each in config["quantized_layers"].items()}
    assert algos == held and len(set(held.values())) == 2
    targets = [set(group["targets"]) for group in config["config_groups"].values()]
    assert targets == [{name for name, fmt in held.items() if fmt == each} for each in ("fp8", "nvfp4")]
    assert {name: each.format.replace("float8_e4m3fn", "fp8") for name, each in read_back.layers.items()} == held
    refusals = servers_of(TARGET, case.checkpoint, rows)
    single = {name: each for name, each in rows.items() if name.startswith("single")}
    assert len({each.format for each in single.values() if each.format}) == 2
    assert servers_of(TARGET, case.checkpoint, single)["vLLM-Omni"] is None
    assert refusals["TensorRT-LLM"] == refusals["SGLang"] == "it loads one format, and this has fp8 and nvfp4"
    theirs = assert_tensors_are_modelopts(case, {name: rows[name] for name in held}, folder, tmp_path / "theirs")
    assert theirs == config


# Servers and pipelines


class Checkpoint:
    """Of a pipeline with these networks."""

    def __init__(self, pipeline: str, networks: tuple[str, ...] = ("transformer",)):
        self.family = type("Family", (), {})()
        self.family.PIPELINES, self.family.DENOISER = (pipeline,), "transformer"
        self.family.NETWORKS = dict.fromkeys(networks, "WanTransformer3DModel")

    def parts(self) -> dict:
        return {"transformer": type("Part", (), {"component": "transformer"})()}


def test_each_server_says_why_it_does_not_load_a_pipeline():
    known = servers_of(TARGET, Checkpoint("Krea2Pipeline"), {})
    assert known == {
        "SGLang": None, "vLLM-Omni": "it loads no quantized Krea2Pipeline",
        "TensorRT-LLM": "it loads no quantized Krea2Pipeline",
    }  # fmt: skip
    two = servers_of(TARGET, Checkpoint("WanPipeline", ("transformer", "transformer_2")), {})
    assert two == {"SGLang": None, "vLLM-Omni": None, "TensorRT-LLM": "it takes transformer_2 for quantized too"}


def test_what_servers_fill_with_codes_although_it_is_in_full_precision():
    """SGLang's FLUX.1 has diffusers' own feed-forwards, vLLM-Omni's has no quantized double block."""
    name = "transformer_blocks.0.ff.net.2"
    rows = {each: row(each) for each in (name, "transformer_blocks.0.attn.to_out.0")}
    single = {
        each: row(each) for each in ("single_transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_out")
    }
    refusals = servers_of(TARGET, Checkpoint("FluxPipeline"), rows | single)
    assert refusals["SGLang"] == (
        f"it takes 1 quantized layers for unquantized ({name}); quantize.exclude with transformer_blocks.*.ff.* keeps "
        "them in fp16"
    )
    assert refusals["vLLM-Omni"].startswith("it takes 2 quantized layers for unquantized (transformer_blocks.0.ff.net")
    assert refusals["TensorRT-LLM"] is None
    assert not any(servers_of(TARGET, Checkpoint("FluxPipeline"), single).values())
    rows.pop(name)
    assert servers_of(TARGET, Checkpoint("FluxPipeline"), rows)["SGLang"] is None


def test_a_pipeline_that_no_server_loads_is_refused_with_the_targets_that_could():
    words = (
        r"none loads this pipeline \(SGLang: it loads no quantized SanaPipeline; .*to diffusers_modelopt, diffusers_t"
    )
    with pytest.raises(ConfigError, match=words):
        check_served(TARGET, Checkpoint("SanaPipeline"))
    check_served(TARGETS["diffusers_torchao"], Checkpoint("SanaPipeline"))
    check_served(TARGET, Checkpoint("FluxPipeline"))


def test_every_pipeline_is_diffusers():
    import diffusers

    known = set().union(*(server.pipelines for server in TARGET.servers.values()))
    assert [name for name in known if not hasattr(diffusers, name)] == []


def rows_of(network: torch.nn.Module, roles: dict[str, str], fmt: str) -> dict[str, LayerAssignment]:
    """Rows of a network's linears as a recipe gives them, ``fp8_per_row`` and formats; inputs reach 4."""
    rows = {}
    for name, role in roles.items():
        weight = network.get_submodule(name).weight
        plain = LayerAssignment(name, role, tuple(weight.shape), reason="it reads no token")
        by_row = {"per_token": True, "weight_axis": 0, "weight_amax": weight.abs().amax(1), "activation_amax": 1.0}
        ranges = {"weight_amax": weight.abs().max().reshape(1), "activation_amax": 4.0}
        kind = fmt.partition("_")[0]
        own = {"format": kind, "activation_format": kind, **(by_row if fmt == "fp8_per_row" else ranges)}
        rows[name] = plain if role == "excluded" else replace(plain, reason=None, **own)
    return rows


OBSERVED = [("QwenImagePipeline", "nvfp4"), ("ZImagePipeline", "fp8_per_row"), ("QwenImagePipeline", "fp8"),
            ("QwenImagePipeline", "fp8_per_row"), ("ZImagePipeline", "fp8"), ("ZImagePipeline", "nvfp4")]  # fmt: skip


@slow
@pytest.mark.parametrize(
    "pipeline, fmt", [*OBSERVED[:2], *(pytest.param(*each, marks=pytest.mark.nightly) for each in OBSERVED[2:])]
)
@torch.no_grad()
def test_a_pipeline_that_was_observed_is_written_as_its_servers_load_it(observe, tmp_path, pipeline, fmt):  # noqa: F811
    checkpoint = observe(pipeline)
    network = checkpoint.build()["transformer"]
    roles = checkpoint.family.layer_roles(network)
    weights = denoiser_weights(checkpoint)
    for name in roles:
        network.get_submodule(name).weight = torch.nn.Parameter(weights[f"{name}.weight"].float())
    rows = adapted(rows_of(network, roles, fmt), TARGET)
    quantized = {name for name, each in rows.items() if each.format}
    assert len(quantized) > 15 and not any(name.endswith(("_mod.1", "adaLN_modulation.0")) for name in quantized)
    shutil.copytree(checkpoint.path / "transformer", tmp_path / "transformer", ignore=lambda *_: ["*.safetensors"])
    written = TARGET.module.write(checkpoint, rows, tmp_path) / "transformer"

    tensors, ignore, linears = tensors_in(written), config_in(written)["ignore"], list(roles)
    assert disagreements(ignore, quantized, linears) == wrong_in_sglang(pipeline, ignore, quantized, linears) == []
    assert {name.rpartition(".")[0] for name in tensors if name.endswith("weight_scale")} == quantized
    read_back = read(written, checkpoint)
    for name in quantized:
        ends = {"weight", "weight_scale", "input_scale", "weight_scale_2"}
        ends -= {"weight_scale_2"} if fmt == "fp8" else {"weight_scale_2", "input_scale"} if fmt != "nvfp4" else set()
        assert layer_tensors(tensors, name).keys() == ends
        weight = weights[f"{name}.weight"].float()
        assert (
            torch.dist(read_back.layers[name].weight.read(), weight)
            < (0.15 if fmt == "nvfp4" else 0.05) * weight.norm()
        )
    told = servers_of(TARGET, checkpoint, rows)
    able = {"SGLang", "vLLM-Omni"} | ({"TensorRT-LLM"} if pipeline == "QwenImagePipeline" else set())
    assert {name for name, reason in told.items() if reason is None} == (
        able if fmt != "fp8_per_row" else {"vLLM-Omni"}
    )


# Reading


@slow
@pytest.mark.parametrize("config", ["FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG"])
@torch.no_grad()
def test_what_modelopt_exports_is_read(tiny, tmp_path, config):
    """By the classes of ModelOpt's stored tensors, from what the file holds."""
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    case = tiny("flux")
    network = case.kind.from_pretrained(case.folder).eval()
    network = mtq.quantize(network, getattr(mtq, config), lambda each: case.output(each, seed=1))
    export_hf_checkpoint(network, export_dir=tmp_path)
    candidate = case.read(tmp_path, "modelopt_export")
    tensors = tensors_in(tmp_path)
    assert len(candidate.layers) > 15 and candidate.bits < 12
    for name, layer in candidate.layers.items():
        codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        if config.startswith("FP8"):
            per_row = scale[:, None] if scale.ndim else scale
            expected = FP8QTensor(codes.shape, torch.float32, codes).dequantize(scale=per_row)
            assert str(layer.inputs) == f"float8_e4m3fn, {'a scale a row' if scale.ndim else 'one scale'}"
        else:
            whole = NVFP4QTensor(layer.weight.shape, torch.float32, codes)
            double = tensors[f"{name}.weight_scale_2"]
            expected = whole.dequantize(scale=scale, double_scale=double, block_sizes={-1: 16})
        assert torch.equal(layer.weight.read(), expected), name
        lost = torch.dist(expected, case.checkpoint.components["transformer"][f"{name}.weight"])
        assert 0 < lost < 0.2 * expected.norm() and layer.inputs is not None


@slow
@pytest.mark.parametrize("written", ["fp8"], indirect=True)
def test_it_is_an_export_whatever_lies_beside(written, tmp_path):
    """ModelOpt saves its state too, where diffusers' checkpointing is switched on."""
    folder = shutil.copytree(written[2], tmp_path / "transformer")
    (folder / "modelopt_state.pth").write_bytes(b"")
    assert [name for name, each in READERS.items() if each.recognizes(folder)] == ["modelopt_export"]


@slow
@pytest.mark.parametrize("written", ["nvfp4"], indirect=True)
def test_a_folder_that_breaks_its_layout_is_refused(written, tmp_path):
    case, layers, folder = written
    name = min(layers)

    def without(end: str):
        return lambda tensors: tensors.pop(f"{name}.{end}")

    for change, config, words in [
        (without("input_scale"), {}, "has no input_scale, which NVFP4 requires"),
        (without("weight_scale_2"), {}, "with other scales"),
        (without("weight_scale"), {}, "no 'weight_scale' beside"),
        (lambda tensors: tensors[f"{name}.input_scale"].fill_(0), {}, "expected a number above 0"),
        (lambda tensors: None, {"quant_algo": "FP8"}, "has codes of nvfp4, and its quant_algo is FP8"),
        (lambda tensors: None, {"quant_algo": "NVFP4_SVD"}, "is NVFP4_SVD, expected one of FP8, "),
        (lambda tensors: None, {"quant_algo": "MIXED_PRECISION"}, "quant_algo of .* is None"),
        (lambda tensors: None, {"ignore": [f"{name}*"]}, "quantizes layers that its ignore excludes"),
        (lambda tensors: None, {"ignore": {"a": 1}}, "ignore is a dict"),
        *(  # the same codes and scales mean other numbers there, so the judge would take a good file for a bad one
            (lambda tensors: None, {key: value}, f"its {key} is {words} as in what ModelOpt exports; give the folder")
            for key, value, words in (
                ("swap_weight_nibbles", True, "True, expected False"),
                ("checkpoint_uses_packed_qkv", True, "True, expected False"),
                ("dynamic_input_scale", True, "True, expected False"),
                ("checkpoint_weight_scale_layout", "swizzled", "swizzled, expected linear"),
                ("weight_scale_layout", ["swizzled"], "a list, expected linear"),
            )
        ),
    ]:
        changed(folder, tmp_path, change)
        whole = json.loads((folder / "config.json").read_text())
        whole["quantization_config"] |= config
        (tmp_path / "config.json").write_text(json.dumps(whole))
        with pytest.raises(ArtifactError, match=words):
            read(tmp_path, case.checkpoint)


@slow
@pytest.mark.parametrize("written", ["nvfp4"], indirect=True)
def test_a_config_that_says_what_is_so_anyway_is_read(written, tmp_path):
    """SGLang's converters write these of ModelOpt's own order too."""
    case, layers, folder = written
    changed(folder, tmp_path)
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"] |= {
        "swap_weight_nibbles": False, "checkpoint_weight_scale_layout": "linear", "dynamic_input_scale": None
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read(tmp_path, case.checkpoint).layers.keys() == layers.keys()


def test_a_block_of_zeros_has_a_scale_that_divides():
    """ModelOpt writes 1 there, bfl's own quantizer 0; all decode zeros."""
    from diffusers.quantizers.bfl.utils import dequantize_nvfp4

    weight = torch.zeros(2, 32)
    weight[1, 16:] = torch.linspace(-1, 1, 16)
    fmt = FORMATS["nvfp4"]
    scales = fmt.scales(weight, weight.abs().max())
    packed = fmt.pack(fmt.quantize(weight, *scales)).view(2, 16)
    stored = scales[0].to(torch.float8_e4m3fn)
    assert (stored.float() > 0).all()
    assert torch.equal(dequantize_nvfp4(packed, stored, scales[1])[weight == 0], weight[weight == 0])


def test_what_no_server_loads_together_is_refused_before_anything_is_written():
    rows = {"a": row("a"), "b": replace(row("b", "fp8"), weight_axis=0, per_token=True)}
    with pytest.raises(ConfigError, match="inputs that are scaled per token and others are in another format"):
        config_of(rows, ["a", "b"])
    rows["b"] = replace(rows["b"], weight_axis=None, per_token=False)
    assert config_of(rows, ["a", "b"])["quant_algo"] == "MIXED_PRECISION"


def test_the_config_names_what_servers_look_for():
    config = config_of({"a": row("a")}, ["a", "b"])
    assert config["ignore"] == ["b*"] and config["config_groups"]["group_0"]["weights"]["group_size"] == 16
    assert config["quant_method"] == config["producer"]["name"] == "modelopt"
