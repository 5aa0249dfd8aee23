"""What is written for servers is what ModelOpt exports, and what each server's rules take.

The rules are those of SGLang 0.5.23 (``modelopt_quant.py``, ``dits/flux.py``; its names are those of
``param_names_mapping``, ``dits/qwen_image.py`` and ``dits/zimage.py``, sglang #23625), of vLLM as of vLLM-Omni 0.30
(``modelopt.py``) and of TensorRT-LLM of August 2026 (``visual_gen/config.py``, ``transformer_flux.py``).
"""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import diffusers
import modelopt.torch.quantization as mtq
import numpy as np
import pytest
import torch
from ml_dtypes import float8_e4m3fn
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.tensors import lazy
from sd_quant.interchange import TARGETS
from sd_quant.interchange.holding import adapted, check_served, not_held, servers_of
from sd_quant.interchange.inputs import BlockFloat8
from sd_quant.interchange.modelopt_export import config_of, ignored
from sd_quant.interchange.sglang_fp8 import LAYOUT, skips
from sd_quant.interchange.stored import LayerTensors
from sd_quant.interchange.weights import codes_and_scales
from sd_quant.models.checkpoint import denoiser_weights, empty_denoiser
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from tests.refusals import refused

from ..observed.conftest import observe, tiny_folder  # noqa: F401 fixtures
from ..tiny import Tiny
from .conftest import recipe_of

pytestmark = pytest.mark.commit

NAME = "modelopt_export"
TARGET = TARGETS[NAME]
PLAIN = {"smoothing": "none", "alpha": None}
RECIPES = {
    "fp8": recipe_of("fp8", per_channel=False, **PLAIN),
    "fp8_per_row": recipe_of("fp8", per_channel=True, per_token=True, **PLAIN),
    "nvfp4": recipe_of("nvfp4", **PLAIN),
    "chosen": recipe_of("nvfp4", rounding="gptq", scale_search=True, **PLAIN),
}
slow = pytest.mark.slow


def quantized_layers(case: Tiny, recipe: str) -> dict[str, LayerAssignment]:
    if recipe == "mixed":
        fp8, fp4 = quantized_layers(case, "fp8"), quantized_layers(case, "nvfp4")
        return {name: (fp8 if ".0." in name else fp4)[name] for name in fp8}
    return {name: row for name, row in case.assignment(RECIPES[recipe], NAME).items() if row.format}


def stored(folder) -> tuple[dict[str, Tensor], dict]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file), json.loads((folder / "config.json").read_text())["quantization_config"]


def layer_tensors(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    found = {key.removeprefix(f"{name}."): each for key, each in tensors.items() if key.startswith(f"{name}.")}
    found.pop("bias", None)
    return found


def exported(case: Tiny, layers: dict[str, LayerAssignment], weights: dict[str, Tensor], folder) -> tuple[dict, dict]:
    """Tensors and config of ModelOpt's own exporter, given our ranges and these weights."""
    entries, by_row = [{"quantizer_name": "*", "enable": False}], mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG
    for name, row in layers.items():
        base = by_row if row.per_token else mtq.FP8_DEFAULT_CFG if row.format == "fp8" else mtq.NVFP4_DEFAULT_CFG
        of_weight_and_inputs = base["quant_cfg"][1:3]
        entries += [each | {"quantizer_name": name + "." + each["quantizer_name"][1:]} for each in of_weight_and_inputs]
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
    return stored(folder)


@slow
@pytest.mark.parametrize("recipe", [*RECIPES, "mixed"])
def test_it_is_what_modelopt_exports(tiny, tmp_path, recipe):
    """All codes, scales and the config, of the weights but for ties, and of the numbers that our codes stand for.

    NVFP4's are rounded by a product of scales in fp16, as in graphs, which decides otherwise only within 2^-11.
    """
    case = tiny("flux")
    layers = quantized_layers(case, recipe)
    folder = case.written(layers, NAME, tmp_path / "ours") / "transformer"
    original, read_back, (ours, mine) = denoiser_weights(case.checkpoint), case.read(folder, NAME), stored(folder)
    formats = {name: row.format for name, row in layers.items()}
    assert {name: each.format.replace("float8_e4m3fn", "fp8") for name, each in read_back.layers.items()} == formats
    weights = {name: original[f"{name}.weight"].float() for name in layers}
    numbers = {name: layer.weight.read() for name, layer in read_back.layers.items()}
    signed = torch.tensor(1e-30)  # in place of zero, whose sign ModelOpt drops
    numbers = {name: each.where(each != 0, signed.copysign(each)) for name, each in numbers.items()}
    for given, share in ((weights, 1e-3 if "nvfp4" in formats.values() else 0), (numbers, 0)):
        theirs, config = exported(case, layers, given, tmp_path / str(share))
        assert theirs.keys() == ours.keys()
        differing = total = 0
        for key in (f"{name}.{end}" for name in layers for end in layer_tensors(ours, name)):
            tensor, their, chosen = ours[key], theirs[key], layers[key.rpartition(".")[0]].rounded is not None
            assert (tensor.dtype, tensor.shape) == (their.dtype, their.shape), key
            if key.endswith(".weight") and not chosen:
                differing += int((tensor.view(torch.uint8) != their.view(torch.uint8)).sum())
                total += tensor.numel()
            elif tensor.ndim == 0 or not chosen:  # of chosen codes, 4 may be a block's largest
                assert torch.equal(tensor.float(), their.float()), key
        assert differing <= share * total, (differing, total)
    (tmp_path / "0/modelopt_state.pth").write_bytes(b"")  # which it saves too in diffusers' checkpoints
    for name, layer in case.read(tmp_path / "0", NAME).layers.items():
        same = torch.equal(layer.weight.read(), read_back.layers[name].weight.read())
        assert (same or layers[name].rounded is not None) and str(layer.inputs) == str(read_back.layers[name].inputs)
    assert mine | {"ignore": None} == config | {"ignore": None} and list(mine) == list(config)
    assert "config_groups" in mine or layers[min(layers)].per_token  # else TensorRT-LLM quantizes weights again
    if len(set(formats.values())) > 1:
        assert mine["quant_algo"] == "MIXED_PRECISION" and mine["ignore"] == config["ignore"] == []
        return
    for name in case.roles:  # theirs are spelt without a star where they are whole names
        ours, others = (any(fnmatchcase(name, each) for each in found["ignore"]) for found in (mine, config))
        assert ours == others == (name not in layers), name


FLUX, QWEN, Z_IMAGE, WAN = "FluxPipeline", "QwenImagePipeline", "ZImagePipeline", "WanPipeline"
SERVERS = ("SGLang", "vLLM-Omni", "TensorRT-LLM")
EXCLUDED = {  # linears, those of them that are quantized, and the entries of ``ignore``
    # vLLM-Omni finds an entry that is a whole name anywhere in others
    "a name that ends another": ("proj_out single.0.proj_out x_embedder", "single.0.proj_out", "proj_out* x_embedder*"),
    "a number that begins another": ("b.1.ff b.1.out b.10.ff b.2.ff", "b.10.ff", "b.1.* b.2*"),
    "a layer of a block": ("b.1.ff b.1.out b.10.ff b.10.out", "b.10.ff b.1.out", "b.1.ff* b.10.out*"),
    # each server asks for names of its own, of q, k and v also together
    "layers by servers' names": (
        "b.attn1.to_q b.attn1.to_k b.attn1.to_v b.attn1.to_out.0 b.attn1.norm b.ff.net.0.proj b.ff.net.1 b.ff.net.2 "
        "b.add_q_proj b.add_k_proj b.add_v_proj b.w1 b.w2 b.w3", "b.attn1.norm b.ff.net.1 b.w2",
        "b.add_k_proj* b.add_kv_proj* b.add_q_proj* b.add_qkv_proj* b.add_v_proj* b.attn1.qkv_proj* b.attn1.to_k* "
        "b.attn1.to_out* b.attn1.to_q* b.attn1.to_v* b.ff.down_proj* b.ff.fc_in* b.ff.fc_out* b.ff.net.0* b.ff.net.2* "
        "b.ff.up_proj* b.to_added_qkv* b.to_k* b.to_out* b.to_q* b.to_v* b.w1* b.w3*",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", EXCLUDED)
def test_exclusions_mean_the_same_to_every_server(trap):
    """SGLang takes ``*`` for anything, TensorRT-LLM matches a module around a layer too. ``tests.programs`` runs them.

    A bare name would mean more to vLLM-Omni, where one of joint layers alone is listed under it raises.
    """
    linears, quantized, expected = (names.split() for names in EXCLUDED[trap])
    assert ignored(linears, quantized) == expected


def test_what_neither_list_nor_config_says_is_refused_before_anything_is_written():
    with pytest.raises(ConfigError, match=r"layers\.1 stays in high precision and layers\.10 does not"):
        ignored(["layers.1", "layers.10"], {"layers.10"})
    rows = {"a": replace(ROW, name="a"), "b": replace(ROW, name="b", **BY_ROW)}
    with pytest.raises(ConfigError, match="inputs that are scaled per token and others are in another format"):
        config_of(rows, ["a", "b"])


ROW = LayerAssignment("", "qkv", (16, 32), "nvfp4", "nvfp4", weight_amax=torch.tensor([1.0]), activation_amax=2.0)
IN_FP8 = {"format": "fp8", "activation_format": "fp8"}
BY_ROW = IN_FP8 | {"per_token": True, "weight_axis": 0}


@pytest.mark.parametrize(
    "changes, ranges",
    [
        # queries of another tensor keep their own scale, and scales of rows stack
        ([{}] * 3, [3, 2, 2, 1]), ([IN_FP8] * 3, [3, 2, 2, 1]), ([BY_ROW] * 3, [3, 1, 2, 1]),
        ([{}, dict.fromkeys(("format", "activation_format"))], None), ([{}, IN_FP8], None),
    ],
)  # fmt: skip
def test_a_joint_layer_is_held_whole_with_one_range_or_not_at_all(changes, ranges):
    """Query, key and value of one attention, whose key and value are joint, and the query of another."""
    inputs = zip(("a.to_q", "a.to_k", "a.to_v"), (3.0, 1.0, 2.0), (9.0, 2.0, 2.0), strict=True)
    rows = {name: replace(ROW, name=name, weight_amax=torch.tensor([amax]), activation_amax=largest, **change)
            for (name, amax, largest), change in zip_longest(inputs, changes, fillvalue={})}  # fmt: skip
    *joint, alone = adapted(rows | {"b.to_q": replace(ROW, name="b.to_q")}, TARGET).values()
    if ranges is None:
        assert "modelopt_export joins it with layers in other formats" in joint[0].reason and alone.format
        assert not any(each.format for each in joint) and joint[0].weight_amax is None
    else:
        assert [each.weight_amax.item() for each in (*joint, alone)] == ranges


# Servers and pipelines


def checkpoint_of(pipeline: str, networks: int = 1) -> SimpleNamespace:
    names = ("transformer", "transformer_2")[:networks]
    family = SimpleNamespace(
        PIPELINES=(pipeline,), DENOISER="transformer", NETWORKS=dict.fromkeys(names, "WanTransformer3DModel")
    )
    return SimpleNamespace(family=family, parts=lambda: {"transformer": SimpleNamespace(component="transformer")})


FEED_FORWARD, OUTPUT = "transformer_blocks.0.ff.net.2", "transformer_blocks.0.attn.to_out.0"
SINGLE = ("single_transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_out")
PER_TOKEN = "it loads no fp8 whose inputs are scaled per token"
UNQUANTIZED = "it takes {} quantized layers for unquantized ({}); quantize.exclude with {} keeps them in fp16"


@pytest.mark.parametrize(
    "pipeline, networks, layers, changes, refusals",
    [
        ("Krea2Pipeline", 1, (), [], dict.fromkeys(SERVERS[1:], "it loads no quantized Krea2Pipeline")),
        (WAN, 2, (), [], {"TensorRT-LLM": "it takes transformer_2 for quantized too, as the transformer is"}),
        # SGLang's FLUX.1 has diffusers' own feed-forwards, vLLM-Omni's has no quantized double block
        (FLUX, 1, (FEED_FORWARD, OUTPUT, *SINGLE), [{}] * 4, {
            "SGLang": UNQUANTIZED.format(1, FEED_FORWARD, "transformer_blocks.*.ff.*"),
            "vLLM-Omni": UNQUANTIZED.format(2, f"{FEED_FORWARD}, {OUTPUT}", "transformer_blocks.*"),
        }),
        (FLUX, 1, (OUTPUT,), [{}], {"vLLM-Omni": UNQUANTIZED.format(1, OUTPUT, "transformer_blocks.*")}),
        (FLUX, 1, SINGLE, [{}, {}], {}),
        (FLUX, 1, SINGLE, [BY_ROW, BY_ROW], {"SGLang": PER_TOKEN, "TensorRT-LLM": PER_TOKEN}),
        (FLUX, 1, SINGLE, [{}, IN_FP8], dict.fromkeys(SERVERS[::2], "it loads one format, and this has fp8 and nvfp4")),
    ],
)  # fmt: skip
def test_each_server_says_why_it_does_not_load_a_result(pipeline, networks, layers, changes, refusals):
    rows = {name: replace(ROW, name=name, **change) for name, change in zip(layers, changes, strict=True)}
    assert servers_of(TARGET, checkpoint_of(pipeline, networks), rows) == dict.fromkeys(SERVERS) | refusals


def test_a_pipeline_that_no_server_loads_is_refused_with_the_targets_that_could():
    words = r"none loads this pipeline \(SGLang: it loads no quantized SanaPipeline; .*to diffusers_modelopt, diffusers"
    with pytest.raises(ConfigError, match=words):
        check_served(TARGET, checkpoint_of("SanaPipeline"))
    with pytest.raises(ConfigError, match="SGLang: it loads no quantized StableDiffusion3Pipeline"):
        check_served(TARGETS["sglang_fp8"], checkpoint_of("StableDiffusion3Pipeline"))
    check_served(TARGETS["diffusers_torchao"], checkpoint_of("SanaPipeline"))
    check_served(TARGET, checkpoint_of(FLUX))


def test_every_pipeline_is_diffusers():
    known = set().union(*(server.pipelines for server in TARGET.servers.values()))
    assert [name for name in known if not hasattr(diffusers, name)] == []


IN_HIGH_PRECISION = {
    QWEN: "img_in* norm_out* proj_out* time_text_embed* transformer_blocks.0.img_mod* transformer_blocks.0.txt_mod* "
          "transformer_blocks.1.attn.to_add_out* transformer_blocks.1.img_mod* transformer_blocks.1.txt_mlp* "
          "transformer_blocks.1.txt_mod* txt_in*",
    Z_IMAGE: "all_final_layer* all_x_embedder* cap_embedder* context_refiner* layers.0.adaLN_modulation* "
             "layers.0.feed_forward.w2* layers.1.adaLN_modulation* layers.1.feed_forward.w2* "
             "noise_refiner.0.adaLN_modulation* noise_refiner.0.feed_forward.w2* noise_refiner.1.adaLN_modulation* "
             "noise_refiner.1.feed_forward.w2* t_embedder*",
}  # fmt: skip


@slow
@pytest.mark.parametrize(
    "pipeline, own, ends, able",
    [
        (QWEN, {}, {"weight", "weight_scale", "input_scale", "weight_scale_2"}, SERVERS),
        (Z_IMAGE, BY_ROW, {"weight", "weight_scale"}, SERVERS[1:2]),
    ],
)  # fmt: skip
def test_a_pipeline_that_was_observed_is_written_as_its_servers_load_it(observe, tmp_path, pipeline, own, ends, able):  # noqa: F811
    case = Tiny(observe(pipeline))
    weights = {name: denoiser_weights(case.checkpoint)[f"{name}.weight"].float() for name in case.roles}
    rows = {
        name: replace(ROW, name=name, weight_shape=tuple(weights[name].shape), weight_amax=amax, **own)
        for name, role in case.roles.items()
        for amax in [weights[name].abs().amax(1 if own is BY_ROW else None).reshape(-1)]
        if role != "excluded"
    }
    quantized = {name: row for name, row in adapted(rows, TARGET).items() if row.format}
    folder = case.written(quantized, NAME, tmp_path) / "transformer"
    (tensors, config), read_back = stored(folder), case.read(folder, NAME)
    assert config["ignore"] == IN_HIGH_PRECISION[pipeline].split()
    assert read_back.layers.keys() == quantized.keys() and len(quantized) > 20
    for name, layer in read_back.layers.items():
        assert layer_tensors(tensors, name).keys() == ends
        allowed = (0.05 if own else 0.15) * weights[name].norm()
        assert torch.dist(layer.weight.read(), weights[name]) < allowed, name
    told = servers_of(TARGET, case.checkpoint, quantized)
    assert tuple(name for name in told if told[name] is None) == able


@slow
def test_a_policy_of_precise_steps_is_refused(tiny, tmp_path):
    case = tiny("flux")
    folder = case.written(quantized_layers(case, "fp8"), NAME, tmp_path)
    path = folder / "transformer/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["runtime"] = {"diffusion_step_policy": {"type": "first_last_n"}}
    path.write_text(json.dumps(config))
    with refused(".*: its runtime is a dict, expected none: steps that multiply", ArtifactError):
        case.read(folder, NAME)


# SGLang's FP8 in blocks and vLLM-Omni's INT8, as their loaders' sources have them

SGLANG, VLLM = "sglang_fp8", "vllm_int8"
BLOCK = "single_transformer_blocks.0"
KEPT = "single_transformer_blocks.1.proj_out"  # by the recipe, in SGLang's
LOADED = {
    SGLANG: recipe_of("fp8_128x128", "fp8_128", smoothing="none", alpha=None),
    VLLM: recipe_of("int8", smoothing="none", alpha=None, per_token=True),
}


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    @cache
    def write(target: str):
        case = tiny("flux")
        assignment = case.assignment(LOADED[target], target)
        if target == SGLANG:
            assignment[KEPT] = not_held(assignment[KEPT], "sensitive")
        return case, assignment, case.written(assignment, target, tmp_path_factory.mktemp(target))

    return write


def test_transformers_decodes_the_numbers_of_the_assignment(written):
    case, assignment, folder = written(SGLANG)
    (tensors, told), read = stored(folder / "transformer"), case.read(folder, SGLANG)
    config = FineGrainedFP8Config(**told)
    assert config.modules_to_not_convert == told["ignored_layers"]
    assert tuple(config.weight_block_size) == (128, 128)
    held_rows = [row for row in assignment.values() if row.format]
    assert len(held_rows) == 2 * 8 + 2 * 5 - 1
    for row in held_rows:
        codes, scales = codes_and_scales(case.checkpoint, row)
        own = {end: tensors[f"{row.name}.{end}"] for end in ("weight", "weight_scale_inv")}
        (decoded,) = Fp8Dequantize(None).convert(own).values()
        assert torch.equal(decoded, FORMATS["fp8_128x128"].dequantize(codes, scales))
        assert torch.equal(read.layers[row.name].weight.read(), decoded)
        assert str(read.layers[row.name].inputs) == "float8_e4m3fn, a scale for 128 numbers"


def test_sglang_ignores_whole_words_and_none_that_would_match_a_quantized_layer(written):
    case, assignment, folder = written(SGLANG)
    ignored = stored(folder / "transformer")[1]["ignored_layers"]
    assert {KEPT, "transformer_blocks.0.ff.net.2", "transformer_blocks.1.norm1.linear", "x_embedder"} <= set(ignored)
    assert "proj_out" not in ignored and assignment[f"{BLOCK}.proj_out"].format
    network = empty_denoiser(case.checkpoint)
    linears = [name for name, each in network.named_modules() if isinstance(each, nn.Linear)]
    kept = {name for name in linears if assignment.get(name) is None or assignment[name].format is None}
    assert {name for name in linears if skips(ignored, name)} == kept - {"proj_out"}


@pytest.mark.parametrize(
    "entry, found",
    {
        "proj_out": True, BLOCK: True, f"{BLOCK}.proj_out": True, "0": True, f"{BLOCK}.": True, "proj": False,
        "transformer_blocks.0.proj_out": False, "*.proj_out": False, f"{BLOCK}.proj_out.x": False,
    }.items(),
)  # fmt: skip
def test_an_entry_of_sglangs_is_whole_words_of_a_name(entry, found):
    """``is_layer_skipped`` of a linear that is not stacked."""
    assert found == skips([entry], f"{BLOCK}.proj_out")


def test_vllm_ignores_exact_names_of_parts_and_of_what_is_stacked(written):
    ignored = stored(written(VLLM)[2] / "transformer")[1]["ignored_layers"]
    expected = {f"{BLOCK}.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_qkv")} | {f"{BLOCK}.norm.linear"}
    assert expected <= set(ignored) and not any("*" in name for name in ignored)
    assert f"{BLOCK}.proj_mlp" not in ignored


OF_BLOCKS = LayerAssignment("layer", "qkv", (200, 256), "fp8_128x128", "fp8_128", weight_amax=torch.ones(1))


def test_such_rows_are_written_with_a_scale(monkeypatch):
    """200 rows are no whole blocks."""
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    codes, (scales,) = OF_BLOCKS.codes_and_scales(weight)
    monkeypatch.setattr("sd_quant.interchange.layouts.codes_and_scales", lambda checkpoint, layer: (codes, scales))
    made = LAYOUT.tensors(None, OF_BLOCKS)
    tensors = {name.removeprefix("layer."): each.read() for name, each in made.items()}
    assert tensors["weight_scale_inv"].tolist() == [scales[0].tolist(), scales[128].tolist()]
    assert torch.equal(scales[128], scales[199]) and not torch.equal(scales[0], scales[128])
    own = LayerTensors(Path("x"), "a", {end: lazy(tensor) for end, tensor in tensors.items()})
    layer, expected = LAYOUT.layer(own, (200, 256), own.size(), None), codes.float()
    for row, column in np.ndindex(2, 2):
        block = tensors["weight_scale_inv"][row, column]
        expected[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)] *= block
    assert torch.equal(layer.weight.read(), expected)
    assert layer.stored_bytes == 200 * 256 + 4 * 4 and layer.scales == "1 for 128 x 128"


def test_inputs_are_rounded_as_sglangs_kernel_does():
    """In numpy: ``448 / amax`` and ``amax * (1 / 448)`` in fp32, amax at least 1e-10, E4M3 by ml_dtypes."""
    x = torch.randn(3, 5, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 384)
    x[0, 0, :128], x[0, 1, :128] = 0.0, 1e-12
    blocks = x.numpy().reshape(3, 5, 3, 128)
    largest = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(1e-10))
    codes = np.clip(blocks * (np.float32(448) / largest), -448, 448).astype(float8_e4m3fn).astype(np.float32)
    expected = (codes * (largest * np.float32(1 / 448))).reshape(x.shape)
    found = BlockFloat8(128)(x)
    assert np.array_equal(found.numpy(), expected) and not found[0, 0, :128].any()
    assert BlockFloat8(128)(x.half()).dtype == torch.float16
    assert 0.01 < relative_error(x, found) < 0.04
