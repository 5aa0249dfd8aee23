"""What is written for servers is what ModelOpt exports, and what each server's rules take.

The rules are restated here from the servers' sources: SGLang 0.5.23 (``modelopt_quant.py``, ``dits/flux.py``), vLLM as
of vLLM-Omni 0.30 (``modelopt.py``), TensorRT-LLM of August 2026 (``visual_gen/config.py``, ``transformer_flux.py``).
"""

import json
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import accumulate, zip_longest
from types import SimpleNamespace

import diffusers
import modelopt.torch.quantization as mtq
import pytest
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from torch import Tensor, nn

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.tensors import lazy
from sd_quant.interchange import TARGETS
from sd_quant.interchange.holding import adapted
from sd_quant.interchange.modelopt_export import algo_written, config_of, ignored, layer_of
from sd_quant.interchange.servers import check_served, servers_of
from sd_quant.interchange.stored import LayerTensors
from sd_quant.models.checkpoint import denoiser_weights
from sd_quant.quantization.assignment import LayerAssignment

from ..observed.conftest import observe, tiny_folder  # noqa: F401 fixtures
from ..tiny import Tiny
from .conftest import recipe_of
from .damage import damaged

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


@pytest.fixture(scope="module", params=[*RECIPES, "mixed"])
def written(request, tiny, tmp_path_factory):
    """A tiny Flux, its quantized layers, and the folder of its transformer."""
    case = tiny("flux")
    layers = quantized_layers(case, request.param)
    return case, layers, case.written(layers, NAME, tmp_path_factory.mktemp(request.param)) / "transformer"


def quantized_layers(case: Tiny, recipe: str) -> dict[str, LayerAssignment]:
    if recipe == "mixed":
        fp8, fp4 = quantized_layers(case, "fp8"), quantized_layers(case, "nvfp4")
        return {name: (fp8 if ".0." in name else fp4)[name] for name in fp8}
    return {name: row for name, row in case.assignment(RECIPES[recipe], NAME).items() if row.format}


def stored(folder) -> tuple[dict[str, Tensor], dict]:
    """Its tensors, and what its config says of them."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file), json.loads((folder / "config.json").read_text())["quantization_config"]


def layer_tensors(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """By the ends of their names, without its bias."""
    found = {key.removeprefix(f"{name}."): each for key, each in tensors.items() if key.startswith(f"{name}.")}
    found.pop("bias", None)
    return found


# Oracles


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
def test_it_is_what_modelopt_exports(written, tmp_path):
    """All codes, scales and the config, of the weights but for ties, and of the numbers that our codes stand for.

    NVFP4's are rounded by a product of scales in fp16, as in graphs, which decides otherwise only within 2^-11.
    """
    case, layers, folder = written
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
        assert matches(name, mine["ignore"]) == matches(name, config["ignore"]) == (name not in layers), name


# Servers' rules of ``ignore``


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def by_sglang(name: str, ignore: list[str], parts: list[str]) -> bool:
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) for pattern in ignore)


def by_vllm(name: str, ignore: list[str], parts: list[str]) -> bool | None:
    """A layer asks for its parts' names as a whole; None where some are listed and others not, which raises there."""
    listed = {part in ignore for part in parts}
    if len(listed) > 1:
        return None
    return listed == {True} or any(pattern in name for pattern in ignore) or matches(name, ignore)


def by_tensorrt(name: str, ignore: list[str], parts: list[str]) -> bool:
    """The name, or any module around it."""
    return any(matches(begin, ignore) for begin in accumulate(name.split("."), "{}.{}".format))


FLUX, QWEN, Z_IMAGE, WAN = "FluxPipeline", "QwenImagePipeline", "ZImagePipeline", "WanPipeline"
IN_VLLM = {r"\.to_[qkv]$": ".to_qkv", r"\.add_[qkv]_proj$": ".add_kv_proj", r"\.w[13]$": ".w13"}
IN_TENSORRT = IN_VLLM | {r"\.to_[qkv]$": ".qkv_proj", r"\.add_[qkv]_proj$": ".add_qkv_proj"}
IN_TENSORRT |= {r"\.net\.0\.proj$": ".up_proj", r"\.net\.2$": ".down_proj"}
IN_WAN = {r"attn1\.to_": "to_", r"to_out\.0$": "to_out", r"net\.0\.proj$": "fc_in", r"net\.2$": "fc_out"}
# Who has which rule in which pipelines, and its names for linears that it calls otherwise than diffusers. SGLang's are
# those of ``param_names_mapping`` and ``dits/qwen_image.py`` and ``dits/zimage.py``: so is ``ignore`` (sglang #23625)
RULES = [
    ("SGLang", by_sglang, {FLUX, QWEN, Z_IMAGE, WAN}, {}),
    ("SGLang", by_sglang, {QWEN}, {r"\.add_[qkv]_proj$": ".to_added_qkv", r"_mod\.1$": "_mod"}),
    ("SGLang", by_sglang, {Z_IMAGE}, {r"\.to_[qkv]$": ".to_qkv", r"\.w[13]$": ".w13"}),
    ("SGLang", by_sglang, {WAN}, IN_WAN),
    ("vLLM-Omni", by_vllm, {FLUX, QWEN, Z_IMAGE}, IN_VLLM),
    ("TensorRT-LLM", by_tensorrt, {FLUX, QWEN, Z_IMAGE}, IN_TENSORRT),
]
SERVERS = ("SGLang", "vLLM-Omni", "TensorRT-LLM")
BLOCKS = {  # of diffusers' classes, so many that one number begins another
    FLUX: ("FluxTransformer2DModel", {"num_layers": 12, "num_single_layers": 12}),
    QWEN: ("QwenImageTransformer2DModel", {"num_layers": 12}),
    Z_IMAGE: ("ZImageTransformer2DModel", {"n_layers": 12}),
    WAN: ("WanTransformer3DModel", {"num_layers": 12}),
}


@cache
def linears_of(pipeline: str) -> list[str]:
    kind, blocks = BLOCKS[pipeline]
    with torch.device("meta"):
        network = getattr(diffusers, kind)(**blocks)
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]


def named(linears: list[str], names: dict[str, str]) -> dict[str, list[str]]:
    """The linears by the names of the layers that they are part of, by patterns of ``names``."""
    found: dict[str, list[str]] = {}
    for name in linears:
        theirs = name
        for pattern, other in names.items():
            theirs = re.sub(pattern, other, theirs)
        found.setdefault(theirs, []).append(name)
    return found


def wrong(pipeline: str, ignore: list[str], quantized: set[str], linears: list[str]) -> set[str]:
    """Linears that a server would take for what they are not."""
    return {
        f"{server}: {name}"
        for server, rule, pipelines, names in RULES
        if pipeline in pipelines
        for theirs, parts in named(linears, names).items()
        for name in parts
        if rule(theirs, ignore, parts) != (name not in quantized)
    }


@pytest.mark.parametrize("pipeline", BLOCKS)
@pytest.mark.parametrize("seed", range(12))
def test_the_exclusions_mean_the_same_to_every_server(pipeline, seed):
    """Of any choice of layers, whole blocks among those that are not quantized."""
    linears, chance = linears_of(pipeline), random.Random(seed)
    share = chance.choice((0.02, 0.3, 0.7, 0.98))
    drawn = {name for parts in named(linears, IN_VLLM).values() if chance.random() < share for name in parts}
    left_out = tuple(
        f"{place}.{chance.randrange(12)}." for place in sorted({name.partition(".")[0] for name in linears})
    )
    quantized = {name for name in drawn if not name.startswith(left_out)}
    quantized |= {"single_transformer_blocks.3.proj_out"}.intersection(linears)
    assert wrong(pipeline, ignored(linears, quantized), quantized, linears) == set()


def test_what_neither_list_nor_config_says_is_refused_before_anything_is_written():
    with pytest.raises(ConfigError, match=r"layers\.1 stays in high precision and layers\.10 does not"):
        ignored(["layers.1", "layers.10"], {"layers.10"})
    rows = {"a": replace(ROW, name="a"), "b": replace(ROW, name="b", **BY_ROW)}
    with pytest.raises(ConfigError, match="inputs that are scaled per token and others are in another format"):
        config_of(rows, ["a", "b"])


# Holding

ROW = LayerAssignment("", "qkv", (16, 32), "nvfp4", "nvfp4", weight_amax=torch.tensor([1.0]), activation_amax=2.0)
IN_FP8 = {"format": "fp8", "activation_format": "fp8"}
BY_ROW = IN_FP8 | {"per_token": True, "weight_axis": 0}


def held(*changes: dict) -> list[LayerAssignment]:
    """Query, key and value of one attention and the query of another, with these changes."""
    names = ("a.to_q", "a.to_k", "a.to_v", "b.to_q")
    rows = [replace(ROW, name=name, **each) for name, each in zip_longest(names, changes, fillvalue={})]
    return list(adapted({each.name: each for each in rows}, TARGET).values())


@pytest.mark.parametrize("change, ranges", [({}, [3, 2, 2]), (IN_FP8, [3, 2, 2]), (BY_ROW, [3, 1, 2])])
def test_queries_of_another_tensor_keep_their_own_scale(change, ranges):
    """And scales of rows stack."""
    inputs = ((3.0, 9.0), (1.0, 2.0), (2.0, 2.0))
    parts = [change | {"weight_amax": torch.tensor([amax]), "activation_amax": largest} for amax, largest in inputs]
    assert [each.weight_amax.item() for each in held(*parts)[:3]] == ranges


@pytest.mark.parametrize(
    "changes, words",
    [
        ([{}, dict.fromkeys(("format", "activation_format"))], "modelopt_export joins it with layers in other formats"),
        ([{}, IN_FP8], "modelopt_export joins it with layers in other formats"),
        ([{}, {}, {}, {"activation_format": None, "activation_amax": None}], "wants a scale of the inputs of nvfp4"),
        ([{}, {}, {}, IN_FP8 | {"weight_axis": 0}], "holds only one scale for a weight in fp8"),
        ([{}, {}, {}, {"per_token": True}], "no inputs of nvfp4 that are scaled per token"),
        ([{}, {}, {}, {"weight_shape": (16, 24)}], "whose inputs are a multiple of 16"),
        ([{}, {}, {}, {"weight_shape": (16, 32, 3, 3)}], "holds no convolutions in nvfp4"),
        ([{}, {}, {}, {"pre_quant_scale": torch.ones(32)}], "cannot multiply the inputs of nvfp4"),
    ],
)
def test_what_is_not_held(changes, words):
    """A joint layer is held whole or not at all."""
    *joint, alone = held(*changes)
    left, others = (joint, [alone]) if len(changes) < 4 else ([alone], joint)
    assert words in left[0].reason and left[0].weight_amax is None
    assert not any(each.format for each in left) and all(each.format for each in others)


# Servers and pipelines


def checkpoint_of(pipeline: str, networks: int = 1) -> SimpleNamespace:
    """A checkpoint of a pipeline with so many transformers."""
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
        (WAN, 2, (), [], {"TensorRT-LLM": "it takes transformer_2 for quantized too"}),
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
    check_served(TARGETS["diffusers_torchao"], checkpoint_of("SanaPipeline"))
    check_served(TARGET, checkpoint_of(FLUX))


def test_every_pipeline_is_diffusers():
    known = set().union(*(server.pipelines for server in TARGET.servers.values()))
    assert [name for name in known if not hasattr(diffusers, name)] == []


OBSERVED = [(QWEN, "nvfp4"), (Z_IMAGE, "fp8_per_row")]
MORE = [(QWEN, "fp8"), (QWEN, "fp8_per_row"), (Z_IMAGE, "fp8"), (Z_IMAGE, "nvfp4")]


@slow
@pytest.mark.parametrize(
    "pipeline, fmt", [*OBSERVED, *(pytest.param(*each, marks=pytest.mark.nightly) for each in MORE)]
)
def test_a_pipeline_that_was_observed_is_written_as_its_servers_load_it(observe, tmp_path, pipeline, fmt):  # noqa: F811
    case = Tiny(observe(pipeline))
    weights = {name: denoiser_weights(case.checkpoint)[f"{name}.weight"].float() for name in case.roles}
    own = {"nvfp4": {}, "fp8": IN_FP8, "fp8_per_row": BY_ROW}[fmt]
    rows = {
        name: replace(ROW, name=name, weight_shape=tuple(weights[name].shape), weight_amax=amax, **own)
        for name, role in case.roles.items()
        for amax in [weights[name].abs().amax(1 if own is BY_ROW else None).reshape(-1)]
        if role != "excluded"
    }
    quantized = {name: row for name, row in adapted(rows, TARGET).items() if row.format}
    assert len(quantized) > 15 and not any(name.endswith(("_mod.1", "adaLN_modulation.0")) for name in quantized)
    folder = case.written(quantized, NAME, tmp_path) / "transformer"
    (tensors, config), read_back = stored(folder), case.read(folder, NAME)
    assert wrong(pipeline, config["ignore"], quantized, list(case.roles)) == set()
    assert read_back.layers.keys() == quantized.keys()
    ends = ["weight", "weight_scale", "input_scale", "weight_scale_2"]
    ends = ends[: {"fp8_per_row": 2, "fp8": 3, "nvfp4": 4}[fmt]]
    for name, layer in read_back.layers.items():
        assert layer_tensors(tensors, name).keys() == set(ends)
        allowed = (0.15 if fmt == "nvfp4" else 0.05) * weights[name].norm()
        assert torch.dist(layer.weight.read(), weights[name]) < allowed, name
    able = {"SGLang", "vLLM-Omni", *(["TensorRT-LLM"] if pipeline == QWEN else [])}
    told = servers_of(TARGET, case.checkpoint, quantized)
    assert {name for name in told if told[name] is None} == (able if fmt != "fp8_per_row" else {"vLLM-Omni"})


# Damage

LAYOUT = "checkpoint_weight_scale_layout"
ORDER = "its {} is {}, expected {} as in what ModelOpt exports; give the folder"


@slow
@pytest.mark.parametrize(
    "written, end, change, words",
    [
        ("fp8", "input_scale", None, "has no input_scale, which FP8 requires"),
        ("nvfp4", "input_scale", torch.zeros(()), "expected a number above 0"),
        ("nvfp4", "input_scale", torch.tensor(torch.nan), "input_scale' holds NaN or infinite numbers"),
        ("nvfp4", "weight_scale_2", None, "with other scales"),
    ],
    indirect=["written"],
)
def test_damaged_tensors_are_refused(written, end, change, words):
    """``test_layouts`` has what the rows say."""
    _, layers, folder = written
    name, row = next(iter(layers.items()))
    tensors = layer_tensors(stored(folder)[0], name) | {end: change}
    own = {each: lazy(tensor) for each, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ArtifactError, match=words):
        layer_of(LayerTensors(folder, name, own), row.weight_shape, algo_written(row))


@slow
@pytest.mark.parametrize("written", ["nvfp4"], indirect=True)
@pytest.mark.parametrize(
    "config, words",
    [
        ({"quant_algo": "FP8"}, "has codes of nvfp4, and its quant_algo is FP8"),
        ({"quant_algo": "NVFP4_SVD"}, "is NVFP4_SVD, expected one of FP8, "),
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo of .* is None"),
        ({"ignore": ["transformer_blocks.0.*"]}, "quantizes layers that its ignore excludes"),
        ({"ignore": {"a": 1}}, "ignore in its config is no list"),
        # SGLang's converters say these of their own order, in which the same codes and scales mean other numbers
        ({"swap_weight_nibbles": True}, ORDER.format("swap_weight_nibbles", True, False)),
        ({"checkpoint_uses_packed_qkv": True}, ORDER.format("checkpoint_uses_packed_qkv", True, False)),
        ({"dynamic_input_scale": True}, ORDER.format("dynamic_input_scale", True, False)),
        ({LAYOUT: "swizzled"}, ORDER.format(LAYOUT, "swizzled", "linear")),
        ({"weight_scale_layout": ["swizzled"]}, ORDER.format("weight_scale_layout", "a list", "linear")),
        ({"swap_weight_nibbles": False, LAYOUT: "linear", "dynamic_input_scale": None}, None),  # and of ModelOpt's
    ],
)
def test_a_config_that_means_something_else_is_refused(written, tmp_path, config, words):
    case, layers, folder = written
    with nullcontext() if words is None else pytest.raises(ArtifactError, match=words):
        candidate = damaged(NAME, (case, layers, folder.parent), tmp_path, lambda found: found.update(config))
        assert candidate.layers.keys() == layers.keys()
