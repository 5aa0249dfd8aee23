"""Folders that AMD Quark exports are read back as Quark computes with them."""

import json
import shutil
from inspect import signature

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd_quant.errors import ArtifactError
from sd_quant.quantization.formats import e2m1

CONFIG, WEIGHTS = "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"
READER = "diffusers_quark"
DTYPES = {"fp8": "fp8_e4m3", "int8": "int8", "int4": "int4", "uint4": "uint4", "mxfp4": "fp4"}
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's order_map: which of eight numbers comes next in a word


def words(numbers: Tensor, order: list[int]) -> Tensor:
    """Numbers of four bits [N, K] as Quark packs them: int32 [K, N / 8]."""
    eights = (numbers.T & 15).long().unflatten(1, (-1, 8))[..., order]
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def packed(weight: Tensor, kind: str, order: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Quark's tensors for a weight [N, K], by the ends of their names, and the weight that they stand for."""
    scale, zero = weight.abs().amax() / {"fp8": 448, "int8": 127}.get(kind, 7), torch.zeros((), dtype=torch.int8)
    if kind == "fp8":
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_quantizer.scale": scale}, codes.float() * scale
    if kind == "int8":
        codes = (weight / scale).round().to(torch.int8)
        return {"weight": codes, "weight_quantizer.scale": scale, "weight_quantizer.zero_point": zero}, codes * scale
    if kind == "mxfp4":
        blocks = weight.unflatten(1, (-1, 32))
        exponents = (blocks.abs().amax(-1, keepdim=True) / 4).log2().floor()
        codes = e2m1.encode((blocks / exponents.exp2()).clamp(-6, 6))
        pairs = codes.flatten(1).unflatten(1, (-1, 2))
        scales = (exponents[..., 0] + 127).byte()
        stored = {"weight": pairs[..., 0] | pairs[..., 1] << 4, "weight_quantizer.scale": scales}
        return stored, (e2m1.decode(codes) * exponents.exp2()).flatten(1)
    groups = weight.unflatten(1, (-1, 16))
    scale = groups.abs().amax(-1) / 7  # [N, K / 16]
    zeros = torch.full(scale.shape, 8 if kind == "uint4" else 0, dtype=torch.int32)
    numbers = (groups / scale[..., None]).round().int() + zeros[..., None]
    stored = {"weight": words(numbers.flatten(1), order), "weight_quantizer.scale": scale.T.contiguous(),
              "weight_quantizer.zero_point": words(zeros, order)}  # fmt: skip
    return stored, ((numbers - zeros[..., None]) * scale[..., None]).flatten(1)


@pytest.fixture
def exported(tiny, tmp_path):
    """``exported(kind, pack_method, inputs, branch)``: a checkpoint, a folder of it, and its layers' weights."""
    case = tiny("sd3")

    def export(kind: str, pack_method: str = "reorder", inputs: str | None = None, branch: bool = False):
        shutil.copytree(case.checkpoint.path, folder := tmp_path / "exported")
        tensors, expected = load_file(folder / WEIGHTS), {}
        for name in [name for name in tensors if name.endswith((".attn.to_q.weight", ".ff.net.2.weight"))]:
            layer, weight = name.removesuffix(".weight"), tensors.pop(name).float()
            stored, expected[layer] = packed(weight, kind, AWQ if pack_method == "reorder" else list(range(8)))
            beside = {}
            if inputs:
                stored["input_quantizer.scale"] = torch.tensor(0.03)
            if branch:
                up, down = torch.randn(weight.shape[0], 2), torch.randn(2, weight.shape[1])
                factor = torch.rand(weight.shape[1]) + 1
                beside = {"correction.l2.weight": up, "correction.l1.weight": down, "smooth_factor": factor}
                expected[layer] = (expected[layer] + up @ down) / factor
                stored["bias"] = tensors.pop(f"{layer}.bias")
            own = {f"layer.{end}" if branch else end: each for end, each in stored.items()} | beside
            tensors |= {f"{layer}.{end}": each.contiguous() for end, each in own.items()}
        save_file(tensors, folder / WEIGHTS)
        static = inputs and {"dtype": inputs, "is_dynamic": False, "qscheme": "per_tensor"}
        spec = {"weight": {"dtype": DTYPES[kind]}, "input_tensors": static, "output_tensors": None, "bias": None}
        config = {"quant_method": "quark", "global_quant_config": spec, "export": {"pack_method": pack_method}}
        whole = json.loads((folder / CONFIG).read_text()) | {"quantization_config": config}
        (folder / CONFIG).write_text(json.dumps(whole))
        return case, folder, expected

    return export


@pytest.mark.commit
@pytest.mark.parametrize(
    "options",
    [
        ("fp8", "reorder", "fp8_e4m3"), ("int8", "reorder", "int8"), ("int4",), ("int4", "order"), ("uint4",),
        ("mxfp4",), ("int4", "reorder", None, True),
    ],
    ids=str,
)  # fmt: skip
def test_packed_weights_are_what_their_codes_stand_for(exported, options):
    case, folder, expected = exported(*options)
    read = case.read(folder, READER)
    assert read.layers.keys() == expected.keys() and len(expected) > 2
    for name, weight in expected.items():
        torch.testing.assert_close(read.layers[name].weight.read(), weight, rtol=1e-6, atol=1e-6)
    x = torch.linspace(-5, 5, 101)[:, None].expand(-1, 8)
    inputs = {layer.inputs and str(layer.inputs): layer.inputs for layer in read.layers.values()}
    if options[2:3] == ("int8",):
        assert torch.equal(inputs["int8, one scale"](x), (x / 0.03).round().clamp(-128, 127) * torch.tensor(0.03))
    assert len(inputs) == 1 and (None in inputs) == (len(options) < 3 or options[2] is None)


@pytest.mark.commit
def test_a_layer_in_high_precision_may_be_decomposed_too(exported):
    case, folder, expected = exported("int4", "reorder", None, True)
    tensors, layer = load_file(folder / WEIGHTS), next(iter(expected)).replace("to_q", "to_k")
    weight, up, down = tensors.pop(f"{layer}.weight"), torch.randn(128, 2), torch.randn(2, 128)
    tensors |= {f"{layer}.{end}.weight": each for end, each in
                (("layer", weight), ("correction.l2", up), ("correction.l1", down))}  # fmt: skip
    save_file(tensors, folder / WEIGHTS)
    read = case.read(folder, READER)
    assert read.layers.keys() == expected.keys()
    torch.testing.assert_close(read.parameters[f"{layer}.weight"].read(), weight.float() + up @ down)


@pytest.mark.commit
def test_the_config_of_a_layers_own_name_comes_before_those_of_patterns(exported):
    case, folder, expected = exported("int8")
    config = json.loads((folder / CONFIG).read_text())
    usual = config["quantization_config"]["global_quant_config"]
    exceptions = {"*": {"weight": {"dtype": "none"}}, **dict.fromkeys(expected, usual)}
    config["quantization_config"] |= {"layer_quant_config": exceptions, "global_quant_config": None}
    (folder / CONFIG).write_text(json.dumps(config))
    assert {layer.format for layer in case.read(folder, READER).layers.values()} == {"int8"}


STATIC = {"dtype": "int8", "is_dynamic": False, "qscheme": "per_tensor"}
SCALE, ZERO = "weight_quantizer.scale", "weight_quantizer.zero_point"
CONFIGS = [
    ({"output_tensors": {}}, "output_tensors, which is not read here"),
    ({"weight": {"dtype": ["int8"]}}, "weights in a list, which is not read here"),
    ({"input_tensors": STATIC | {"is_dynamic": True}}, "inputs that are dynamic"),
    ({"input_tensors": STATIC | {"dtype": "fp4"}}, "inputs in fp4"),
    ({"kv_cache_quant_config": {"*": {}}}, "kv_cache_quant_config"),
    ({"layer_quant_config": {f"*{number}": {} for number in range(1001)}}, "has 1001 patterns, expected at most 1000"),
    ({"input_tensors": STATIC}, "has no 'input_quantizer.scale' beside its others"),
]
TENSORS = [  # a kind, the end of a name, what is there in place of the tensor
    ("int8", "input_quantizer.scale", lambda _: torch.ones(()), "that its config leaves alone"),
    ("int8", SCALE, lambda _: torch.ones(3), r"is \[3\] in float32, expected \[\] or"),
    ("int8", SCALE, lambda scale: scale * torch.nan, "holds NaN or infinite numbers"),
    ("int8", ZERO, lambda zero: zero + 1, "has zero points, expected zeros"),
    ("int8", "_weight_quantizer.scale", lambda _: torch.ones(()), "twice, expected packed"),
    ("int4", SCALE, lambda scale: scale[:5].clone(), "expected"),
    ("mxfp4", SCALE, lambda scale: scale.float(), "in float32, expected"),
    ("int4", "correction.l1.weight", lambda _: torch.ones(2, 3), "has no 'correction.l2.weight'"),
]


@pytest.mark.commit
@pytest.mark.parametrize(
    ("kind", "entries", "end", "make", "sentence"),
    [
        *(("int8", entries, "", None, sentence) for entries, sentence in CONFIGS),
        *((kind, {}, end, make, sentence) for kind, end, make, sentence in TENSORS),
    ],
)
def test_what_is_not_quarks_or_not_read_is_refused_in_a_sentence(exported, kind, entries, end, make, sentence):
    case, folder, expected = exported(kind)
    name = f"{next(iter(expected))}.{end}"
    if make:
        tensors = load_file(folder / WEIGHTS)
        save_file(tensors | {name: make(tensors.get(name))}, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    usual = config["quantization_config"]["global_quant_config"]
    config["quantization_config"] |= entries | {"global_quant_config": usual | entries}
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=sentence):
        [layer.weight.read() for layer in case.read(folder, READER).layers.values()]


@pytest.fixture(scope="module")
def quark():
    pytest.importorskip("onnxslim")
    return pytest.importorskip("quark.torch")


@pytest.mark.consumer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "name", "options", "reloads"),
    [
        ("sd3", "FP8E4M3PerTensorSpec", {"observer_method": "min_max"}, True),
        ("sdxl", "Int8PerTensorSpec", {}, True),
        ("flux", "Int4PerGroupSpec", {"ch_axis": -1, "group_size": 16}, True),
        ("sd3", "Uint4PerGroupSpec", {"ch_axis": -1, "group_size": 16}, True),
        ("flux", "OCP_MXFP4Spec", {"ch_axis": -1}, True),
        ("sd3", "svdquant", {"ch_axis": -1, "group_size": 16}, False),  # its own loader lacks a buffer, 0.13
    ],
)
def test_quark_computes_the_same(tiny, quark, tmp_path, family, name, options, reloads):
    """Weights equal those of Quark's unpacked export, outputs those of its reloaded packed network, to the bit."""
    from quark.torch.quantization.config import config as quarks

    case, given = tiny(family), {}
    usual = {} if "Spec" in name and name[:2] in ("FP", "OC") else {
        "symmetric": name[0] != "U", "scale_type": "float", "round_method": "half_even",
    }  # fmt: skip
    spec = getattr(quarks, "Int4PerGroupSpec" if name == "svdquant" else name)
    spec = spec(is_dynamic=False, **usual, **options).to_quantization_spec()
    layer = quarks.QLayerConfig(weight=spec, input_tensors=spec if "PerTensor" in name else None)
    svdquant = quarks.SVDQuantConfig(svd_rank=4, search_alpha=False, min_layer_size=16)
    config = quarks.QConfig(
        global_quant_config=layer, algo_config=[svdquant] if name == "svdquant" else None,
        exclude=["*embed*", "*norm*", "conv_*", "proj_out"],
    )  # fmt: skip
    read = {}
    for weight_format in ("fake_quantized", "real_quantized"):
        network = case.kind.from_pretrained(case.folder).eval()
        names = [*signature(network.forward).parameters]
        hook = network.register_forward_pre_hook(
            lambda module, inputs, named, names=names: given.update(dict(zip(names, inputs, strict=False)) | named),
            with_kwargs=True,
        )
        case.output(network)
        hook.remove()
        network = quark.ModelQuantizer(config).quantize_model(network, [given])
        network = quark.ModelQuantizer.freeze(network)
        shutil.copytree(case.checkpoint.path, folder := tmp_path / weight_format)
        shutil.rmtree(folder / case.component)
        quark.export_safetensors(network, folder / case.component, weight_format=weight_format)
        read[weight_format] = case.read(folder, READER)
    fake, real = (read[each].layers for each in read)
    assert real.keys() == fake.keys() and len(real) > 10
    tolerance = 0.0 if reloads else 4e-3  # its branch and what is beside it are in bf16
    for layer_name, stored in real.items():
        expected = fake[layer_name].weight.read()
        largest = expected.abs().max()
        torch.testing.assert_close(stored.weight.read(), expected, rtol=tolerance, atol=tolerance * largest)
    if reloads:
        packed_network = case.network(read["real_quantized"])
        assert torch.equal(case.output(packed_network), case.output(read["real_quantized"].runtime()))
