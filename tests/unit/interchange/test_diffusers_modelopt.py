"""Folders that ModelOpt saves with diffusers are read back as its quantizers compute, and nothing in them is run."""

import copy
import os
import pickle
import zipfile
from functools import partial
from pathlib import Path

import modelopt.torch.opt as mto
import modelopt.torch.quantization as mtq
import pytest
import torch

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.interchange.diffusers_modelopt import Quantizer, quantizer_of, read
from sd_quant.interchange.modelopt_state import State, plain_content, read_state

from ..tiny import Tiny, changed
from .conftest import assert_equal, weights_of

pytestmark = pytest.mark.commit

READER = "diffusers_modelopt"
slow = pytest.mark.slow  # seconds to quantize a network
INT8_TENSOR = {"quant_cfg": [
    {"quantizer_name": "*", "enable": False},
    {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": 8, "axis": None, "narrow_range": True}},
    {"quantizer_name": "*input_quantizer", "cfg": {"num_bits": 8, "axis": None, "bias": {0: None, "type": "static"}}},
]}  # fmt: skip


def mixed(*configs: dict) -> dict:
    blocks = [f"{kind}_blocks.{index}." for kind in ("transformer", "single_transformer") for index in range(2)]
    entries = [{"quantizer_name": "*", "enable": False}]
    for block, config in zip(blocks, configs, strict=False):
        entries += [each | {"quantizer_name": block + each["quantizer_name"]} for each in config["quant_cfg"][1:3]]
    return {"quant_cfg": entries, "algorithm": "max"}


CASES = {
    "int8": ("sd21", mtq.INT8_DEFAULT_CFG, torch.float32),
    "smoothed": ("sd21", mtq.INT8_SMOOTHQUANT_CFG, torch.float32),
    "awq": ("sd3", mtq.INT4_AWQ_CFG, torch.float32),
    "fp16": ("sd15", mtq.FP8_DEFAULT_CFG, torch.float16),
    "mixed": (
        "flux",
        mixed(mtq.FP8_DEFAULT_CFG, mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG, mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, INT8_TENSOR),
        torch.float32,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def checkpointing():
    mto.enable_huggingface_checkpointing()


def quantized(case: Tiny, config: dict, dtype: torch.dtype = torch.float32):
    network = case.kind.from_pretrained(case.folder).eval()
    network = mtq.quantize(network, copy.deepcopy(config), lambda each: case.output(each, seed=1))
    for module in network.modules():
        if getattr(module, "bias_value", None) is not None:
            module.reset_bias()
            module.bias_value = torch.tensor(0.1)  # one for all, which no configuration gives
    return network.to(dtype)


@pytest.fixture(scope="module", params=CASES)
def saved(request, tiny, tmp_path_factory):
    """A checkpoint, the candidate in the folder that ModelOpt saved, and the network that it restores from there."""
    family, config, dtype = CASES[request.param]
    case, folder = tiny(family), tmp_path_factory.mktemp("quantized")
    quantized(case, config, dtype).save_pretrained(folder)
    theirs = case.kind.from_pretrained(folder, torch_dtype=dtype).eval()
    return case, case.read(folder, READER), theirs, folder


@slow
@torch.no_grad()
def test_weights_and_outputs_are_those_of_modelopt(saved):
    case, candidate, theirs, _ = saved
    quantizers = dict(theirs.named_modules())
    layers, readers = (
        {name.removesuffix(f".{kind}_quantizer"): each for name, each in quantizers.items()
         if name.endswith(f".{kind}_quantizer") and (each.is_enabled or each.pre_quant_scale is not None)}
        for kind in ("weight", "input")
    )  # fmt: skip
    assert layers.keys() == candidate.layers.keys() and len(layers) > 15
    inputs = {name for name, layer in candidate.layers.items() if layer.inputs}
    assert readers.keys() == {*candidate.rounded, *inputs}
    quantized = {name: theirs.get_submodule(name) for name in layers}
    expected = {name: each.weight_quantizer(each._parameters["weight"]) for name, each in quantized.items()}
    assert_equal(weights_of(candidate), expected)
    in_fp32 = {each.dtype for each in expected.values()} == {torch.float32}
    ours = case.network(candidate)
    theirs = theirs.float()
    assert max(case.error_of_layers(ours, theirs, candidate).values()) < (1e-5 if in_fp32 else 1e-3)
    # theirs rounds in fp32 what it rounds in fp16 where that is stored, which moves inputs over a rounding
    assert case.error(theirs, ours) < (0.3 if in_fp32 else 1) * case.error(theirs, case.denoiser())


@slow
@torch.no_grad()
def test_weights_of_nvfp4_and_compressed_weights_are_those_that_modelopt_stores(tiny, tmp_path):
    """Its fake quantization of NVFP4 needs a GPU, the class of its stored tensors does not."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    case = tiny("flux")
    network = quantized(case, mixed(mtq.INT8_DEFAULT_CFG, mtq.FP8_DEFAULT_CFG, mtq.NVFP4_DEFAULT_CFG))
    network.save_pretrained(tmp_path / "quantized")
    layers = case.read(tmp_path / "quantized", READER).layers
    assert {layer.format for layer in layers.values()} == {"int8", "float8_e4m3fn", "nvfp4"}
    for name, layer in layers.items():
        if layer.format == "nvfp4":
            theirs = network.get_submodule(name)
            scale = NVFP4QTensor.get_weights_scaling_factor_2_from_quantizer(theirs.weight_quantizer)
            made, *scales = NVFP4QTensor.quantize(theirs._parameters["weight"], 16, weights_scaling_factor_2=scale)
            options = dict(zip(("scale", "double_scale"), scales, strict=True))
            assert torch.equal(layer.weight.read(), made.dequantize(**options, block_sizes={-1: 16})), name
    mtq.compress(network)
    network.save_pretrained(tmp_path / "compressed")
    candidate = case.read(tmp_path / "compressed", READER)
    theirs = {name: network.get_submodule(name) for name in layers}
    assert len(layers) > 15 and all(layer.bits < 12 for layer in candidate.layers.values())
    assert_equal(weights_of(candidate), {name: each.weight_quantizer(each.weight) for name, each in theirs.items()})
    assert all(str(layer.inputs).startswith(layer.format) for layer in candidate.layers.values())


def read_content(folder: Path, content: object) -> State:
    with zipfile.ZipFile(folder / "a.pth", "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    return read_state(folder, whole_file(folder / "a.pth"))


def state_with(quantizers: object) -> dict:
    steps = [("quantize", {"metadata": {"quantizer_state": quantizers}})]
    return {"modelopt_version": "0.47.0", "modelopt_state_dict": steps}


class Evil:
    def __reduce__(self):
        return os.mkdir, ("canary",)


def test_nothing_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = {"modelopt_version": "0.47.0", "modelopt_state_dict": [("quantize", {"metadata": Evil()})]}
    with pytest.raises(ArtifactError, match="not what ModelOpt writes"):
        read_content(tmp_path, content)
    assert not (tmp_path / "canary").exists()
    pickle.loads(pickle.dumps(Evil(), protocol=2))
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"", b".", b"}", b"(.", b"e.", b"}q\x00h\x01.", b"]]a", b"\x85.", b"}(]K\x01u.",
        b"cos\nsystem\n(X\x01\x00\x00\x00atR.", b"r\xff\xff\xff\x7f.", b"\x8a\xff" + b"\xff" * 255 + b".",
        b"}((K\x01K\x02tK\x03u.",
    ],
)  # fmt: skip
def test_pickles_that_are_none_raise_or_stay_inert(data):
    try:
        found = plain_content(data)
    except Exception:
        return
    assert not callable(found)


def test_what_a_pickle_refers_to_often_costs_no_time(tmp_path):
    """A thousand steps of a thousand quantizers, and lists in lists that stand for more numbers than memory holds."""
    many = dict.fromkeys(map(str, range(10**4)), dict.fromkeys(map(str, range(10**4))))
    deep: list = [4]
    for _ in range(60):
        deep = [deep, deep]
    often = state_with(many) | {"modelopt_state_dict": state_with(many)["modelopt_state_dict"] * 10**5}
    for content in (state_with(many), often, state_with({"a": {"_num_bits": deep}})):
        with pytest.raises(ArtifactError):
            for name, each in read_content(tmp_path, content).quantizers.items():
                quantizer_of(tmp_path, name, each)


def test_a_property_without_a_name_and_an_entry_whose_two_sizes_differ_are_refused(tmp_path):
    for key in (True, None, 3):
        with pytest.raises(ArtifactError, match="a property without a name"):
            read_content(tmp_path, state_with({"a.weight_quantizer": {key: 8}}))
    data = (path := tmp_path / "a.pth").read_bytes()
    at = data.index(b"PK\x01\x02") + 20  # the compressed size in the directory
    path.write_bytes(data[:at] + (2**31 - 1).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ArtifactError, match="a pickle that is compressed or too large"):
        read_state(tmp_path, whole_file(path))


SOUND = {"_num_bits": 8, "_axis": 0, "_fake_quant": True, "_disabled": False}
CHANGES = [
    ({"_num_bits": (5, 2)}, "num_bits"), ({"_num_bits": 16}, "num_bits"), ({"_rotate": True}, "_rotate"),
    ({"backend": "mine"}, "backend"), ({"_unsigned": True}, "_unsigned"), ({"_axis": 9}, "axis"),
    ({"_block_sizes": {-1: 0}}, "block"), ({"_block_sizes": {-1: 16, -2: 16}}, "block"), ({"_new": 3}, "_new"),
    ({"_bias": {"type": "dynamic"}}, "bias"), ({"_num_bits": [4, 3]}, "num_bits"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", CHANGES, ids=str)
def test_what_is_not_understood_is_refused(tmp_path, change, message):
    assert quantizer_of(tmp_path, "a.weight_quantizer", SOUND) == Quantizer("int8", axes=(0,))
    with pytest.raises(ArtifactError, match=f"a.weight_quantizer has .*{message}"):
        quantizer_of(tmp_path, "a.weight_quantizer", SOUND | change)


@slow
@pytest.mark.parametrize("saved", ["int8"], indirect=True)
def test_what_does_not_fit_is_refused_by_name(saved, tmp_path):
    case, candidate, _, folder = saved
    name = min(candidate.layers)
    for change, message in [
        (lambda _, tensors: tensors.pop(f"{name}.weight_quantizer._amax"), name),
        (lambda state, _: state[f"{name}.weight_quantizer"].update(_axis=None), "_amax"),
        (lambda state, _: state[f"{name}.weight_quantizer"].update(_rotate=True), "_rotate"),
        (lambda state, _: state[f"{name}.output_quantizer"].update(_disabled=False), f"{name}.output_quantizer"),
        (lambda _, tensors: tensors[f"{name}.input_quantizer._amax"].fill_(-1), "below 0"),
        (lambda _, tensors: tensors.update({f"{name}.weight_quantizer._scale": torch.ones(1)}), "does not say"),
    ]:
        state = torch.load(folder / "modelopt_state.pth", weights_only=False)
        quantizers = state["modelopt_state_dict"][-1][1]["metadata"]["quantizer_state"]
        changed(folder, tmp_path, partial(change, quantizers))
        torch.save(state, tmp_path / "modelopt_state.pth")
        with pytest.raises(ArtifactError, match=message):
            read(tmp_path, case.checkpoint)
