"""Folders that ModelOpt saves with diffusers are read back as its quantizers compute, and nothing in them is run."""

import copy
import io
import pickle
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_quant.candidates.diffusers_modelopt import read
from sd_quant.candidates.modelopt_quantizers import quantizer_of
from sd_quant.candidates.modelopt_state import plain_content, read_state
from sd_quant.checkpoints.archive import whole_file
from sd_quant.errors import ArtifactError
from sd_quant.models.checkpoint import denoiser_of
from sd_quant.quantization.recipe import Enable, Pair, Recipe

from ..hand_over.conftest import Tiny as Assigned
from .tiny_folders import Tiny, tiny

READER = "diffusers_modelopt"
INT8_TENSOR = {"quant_cfg": [
    {"quantizer_name": "*", "enable": False},
    {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": 8, "axis": None, "narrow_range": True}},
    {"quantizer_name": "*input_quantizer", "cfg": {"num_bits": 8, "axis": None, "bias": {0: None, "type": "static"}}},
], "algorithm": "max"}  # fmt: skip
CASES = [
    ("sd15", "INT8_DEFAULT_CFG", torch.float32), ("sdxl", "INT8_SMOOTHQUANT_CFG", torch.float32),
    ("flux", "FP8_DEFAULT_CFG", torch.float32), ("flux", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", torch.float32),
    ("sd3", "INT4_AWQ_CFG", torch.float32), ("sd15", INT8_TENSOR, torch.float32),
    ("sd15", "FP8_DEFAULT_CFG", torch.float16), ("flux", "FP8_PER_CHANNEL_PER_TOKEN_CFG", torch.float32),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def checkpointing():
    """As a person switches it on, for good."""
    import modelopt.torch.opt as mto

    mto.enable_huggingface_checkpointing()


def quantized(case: Tiny, config: object, dtype: torch.dtype):
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(config if isinstance(config, dict) else getattr(mtq, config))
    network = case.kind.from_pretrained(case.folder).eval()
    network = mtq.quantize(network, config, lambda each: case.output(each, seed=1))
    for module in network.modules():
        if getattr(module, "bias_value", None) is not None:
            module.reset_bias()
            module.bias_value = torch.tensor(0.1)  # one for all, which no configuration gives
    return network.to(dtype)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{str(case[1])[:20]}")
def saved(request, tmp_path_factory):
    """A checkpoint, the candidate in the folder that ModelOpt saved, and the network that it restores from there."""
    family, config, dtype = request.param
    case = tiny(family, tmp_path_factory.mktemp("full"))
    folder = tmp_path_factory.mktemp("quantized")
    quantized(case, config, dtype).save_pretrained(folder)
    theirs = case.kind.from_pretrained(folder, torch_dtype=dtype).eval()
    return case, case.read(folder, READER), theirs, folder


@torch.no_grad()
def test_weights_and_outputs_are_those_of_modelopt(saved):
    case, candidate, theirs, _ = saved
    enabled = {
        name.removesuffix(".weight_quantizer")
        for name, module in theirs.named_modules()
        if name.endswith(".weight_quantizer") and module.is_enabled
    }
    assert enabled == candidate.layers.keys()
    inputs = {
        name.removesuffix(".input_quantizer")
        for name, module in theirs.named_modules()
        if name.endswith(".input_quantizer") and (module.is_enabled or module.pre_quant_scale is not None)
    }
    assert inputs == {*candidate.rounded, *(name for name, layer in candidate.layers.items() if layer.inputs)}
    assert len(enabled) > 15
    for name in enabled:
        layer, found = theirs.get_submodule(name), candidate.layers[name].weight
        expected = layer.weight_quantizer(layer._parameters["weight"])
        assert found.dtype == expected.dtype and torch.equal(found.read(), expected), name
    ours = case.network(candidate)
    theirs = theirs.float()
    assert max(case.error_of_layers(ours, theirs, candidate).values()) < (
        1e-5 if found.dtype == torch.float32 else 1e-3
    )
    error = torch.dist(case.output(ours), case.output(theirs))
    lost = torch.dist(case.output(theirs), case.output(case.kind.from_pretrained(case.folder).eval()))
    # theirs rounds in fp32 what it rounds in fp16 where that is stored, which moves inputs over a rounding
    assert error < (0.3 if found.dtype == torch.float32 else 1) * lost, (error, lost)


@pytest.mark.parametrize("config", ["INT8_DEFAULT_CFG", "FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"])
@torch.no_grad()
def test_compressed_weights(tmp_path, config):
    import modelopt.torch.quantization as mtq

    case = tiny("flux", tmp_path / "full")
    network = quantized(case, config, torch.float32)
    mtq.compress(network)
    network.save_pretrained(tmp_path / "quantized")
    candidate = case.read(tmp_path / "quantized", READER)
    assert len(candidate.layers) > 15 and candidate.bits < 12
    for name, layer in candidate.layers.items():
        theirs = network.get_submodule(name)
        assert torch.equal(layer.weight.read(), theirs.weight_quantizer(theirs.weight)), name
        assert str(layer.inputs).startswith(layer.format)


@pytest.mark.parametrize("config", ["FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"])
@torch.no_grad()
def test_exported_weights(tmp_path, config):
    """By the classes of ModelOpt's stored tensors, from what the file holds."""
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    case = tiny("flux", tmp_path / "full")
    export_hf_checkpoint(quantized(case, config, torch.float32), export_dir=tmp_path / "quantized")
    candidate = case.read(tmp_path / "quantized", READER)
    tensors = load_file(next((tmp_path / "quantized").glob("*.safetensors")))
    assert len(candidate.layers) > 15 and candidate.bits < 12
    for name, layer in candidate.layers.items():
        codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        if config.startswith("FP8"):
            expected = FP8QTensor(codes.shape, torch.float32, codes).dequantize(scale=scale)
        else:
            double = tensors[f"{name}.weight_scale_2"]
            whole = NVFP4QTensor(layer.weight.shape, torch.float32, codes)
            expected = whole.dequantize(scale=scale, double_scale=double, block_sizes={-1: 16})
        assert torch.equal(layer.weight.read(), expected), name
        lost = torch.dist(layer.weight.read(), case.checkpoint.components["transformer"][f"{name}.weight"])
        assert 0 < lost < 0.2 * layer.weight.read().norm() and layer.inputs is not None


@torch.no_grad()
def test_weights_of_nvfp4_quantizers_are_those_that_modelopt_would_store(tmp_path):
    """Its fake quantization of NVFP4 needs a GPU, the class of its stored tensors does not."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    case = tiny("flux", tmp_path / "full")
    network = quantized(case, "NVFP4_DEFAULT_CFG", torch.float32)
    network.save_pretrained(tmp_path / "quantized")
    candidate = case.read(tmp_path / "quantized", READER)
    for name, layer in candidate.layers.items():
        theirs = network.get_submodule(name)
        double = NVFP4QTensor.get_weights_scaling_factor_2_from_quantizer(theirs.weight_quantizer)
        codes, scale, double = NVFP4QTensor.quantize(theirs._parameters["weight"], 16, weights_scaling_factor_2=double)
        expected = codes.dequantize(scale=scale, double_scale=double, block_sizes={-1: 16})
        assert torch.equal(layer.weight.read(), expected), name


class Evil:
    def __reduce__(self):
        import os

        return os.mkdir, ("canary",)


def pickled(content: object) -> bytes:
    return pickle.dumps(content, protocol=2)


def test_nothing_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = {"modelopt_version": "0.47.0", "modelopt_state_dict": [("quantize", {"metadata": Evil()})]}
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as file:
        file.writestr("archive/data.pkl", pickled(content))
    with pytest.raises(ArtifactError, match="not what ModelOpt writes"):
        read_state(tmp_path, whole_file(tmp_path / "a.pth"))
    assert not (tmp_path / "canary").exists()
    pickle.loads(pickled(Evil()))
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
    properties = dict.fromkeys(map(str, range(10**4)))
    deep: list = [4]
    for _ in range(60):
        deep = [deep, deep]
    many = [("quantize", {"metadata": {"quantizer_state": dict.fromkeys(map(str, range(10**4)), properties)}})]
    for steps in (many, many * 10**5, [("quantize", {"metadata": {"quantizer_state": {"a": {"_num_bits": deep}}}})]):
        with zipfile.ZipFile(tmp_path / "a.pth", "w") as file:
            file.writestr("archive/data.pkl", pickled({"modelopt_version": "0", "modelopt_state_dict": steps}))
        with pytest.raises(ArtifactError):
            state = read_state(tmp_path, whole_file(tmp_path / "a.pth"))
            for name, each in state.quantizers.items():
                quantizer_of(tmp_path, name, each)


def test_a_pickle_is_what_it_says():
    shared = (4, 3)
    content = {"a": [1, -2, 2.5, None, True, "x", shared, shared, {"b": 2**40}], "c": torch.Size([2, 3]), -1: {}}
    assert plain_content(pickled(content)) == content


def with_state(saved, folder, change):
    """A folder like the saved one, whose state ``change`` has changed, and its tensors."""
    shutil.copytree(saved[3], folder, dirs_exist_ok=True)
    state = torch.load(folder / "modelopt_state.pth", weights_only=False)
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    change(state["modelopt_state_dict"][-1][1]["metadata"]["quantizer_state"], tensors)
    stored = io.BytesIO()
    torch.save(state, stored)
    (folder / "modelopt_state.pth").write_bytes(stored.getvalue())
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    return folder


@pytest.mark.parametrize("fmt", ["int8", "fp8"])
@torch.no_grad()
def test_what_is_handed_over_is_read_back(tmp_path, fmt):
    """Smoothed, shifted and in a pipeline's folder: the weights are those that the simulation has."""
    case, pair = tiny("sdxl", tmp_path / "full"), Pair(fmt, fmt)
    assigned = Assigned(case.checkpoint)
    options = {"shift": True, "smoothing": "modelopt"} if fmt == "int8" else {}
    recipe = Recipe(
        3.0, 0.8, collect_method="min-max", enable=Enable(pair, pair, None), per_channel=fmt == "int8", **options
    )
    assignment = assigned.assignment(recipe, READER)
    candidate = case.read(assigned.written(assignment, READER, tmp_path / "quantized"), READER)
    simulated = denoiser_of(case.checkpoint, assigned.simulated(assignment, READER))
    assert candidate.layers.keys() == {name for name, layer in assignment.items() if layer.format}
    for name, layer in candidate.layers.items():
        theirs = simulated.get_submodule(name)
        torch.testing.assert_close(
            layer.weight.read().float(), theirs.weight_quantizer(theirs._parameters["weight"]), rtol=1e-3, atol=1e-6
        )
    ours = case.network(candidate)
    shifted = [name for name, layer in candidate.layers.items() if "shift" in str(layer.inputs)]
    assert fmt == "fp8" or shifted and any("smoothed" in str(layer.inputs) for layer in candidate.layers.values())
    errors = case.error_of_layers(ours, simulated, candidate)
    assert max(errors.values()) < 2e-2 and sorted(errors.values())[len(errors) // 2] < 1e-3  # ranges in fp16


def test_a_pipelines_folder(tmp_path):
    case = tiny("sd15", tmp_path / "full")
    shutil.copytree(tmp_path / "full", tmp_path / "quantized")
    quantized(case, "INT8_DEFAULT_CFG", torch.float32).save_pretrained(tmp_path / "quantized/unet")
    candidate = case.read(tmp_path / "quantized", READER)
    assert len(candidate.layers) > 15 and candidate.rounded and candidate.path == tmp_path / "quantized"


CHANGES = [
    ({"_num_bits": (5, 2)}, "num_bits"), ({"_num_bits": 16}, "num_bits"), ({"_rotate": True}, "_rotate"),
    ({"backend": "mine"}, "backend"), ({"_unsigned": True}, "_unsigned"), ({"_axis": 9}, "axis"),
    ({"_block_sizes": {-1: 0}}, "block"), ({"_block_sizes": {-1: 16, -2: 16}}, "block"), ({"_new": 3}, "_new"),
    ({"_bias": {"type": "dynamic"}}, "bias"), ({"_num_bits": [4, 3]}, "num_bits"),
]  # fmt: skip


@pytest.mark.parametrize("saved", CASES[:1], ids=["int8"], indirect=True)
@pytest.mark.parametrize("change, message", CHANGES, ids=str)
def test_what_is_not_understood_is_refused(saved, tmp_path, change, message):
    name = f"{min(saved[1].layers)}.weight_quantizer"
    folder = with_state(saved, tmp_path, lambda state, _: state[name].update(change))
    with pytest.raises(ArtifactError, match=message):
        read(folder, saved[0].checkpoint)


@pytest.mark.parametrize("saved", CASES[:1], ids=["int8"], indirect=True)
def test_what_does_not_fit_is_refused_by_name(saved, tmp_path):
    case, candidate, _, _ = saved
    name = min(candidate.layers)
    buffer = f"{name}.weight_quantizer._amax"
    for change, message in [
        (lambda _, tensors: tensors.pop(buffer), name),
        (lambda _, tensors: tensors.update({buffer: tensors[buffer][:-1].clone()}), "_amax"),
        (lambda state, _: state[f"{name}.weight_quantizer"].update(_axis=None), "_amax"),
        (lambda state, _: state[f"{name}.output_quantizer"].update(_disabled=False), f"{name}.output_quantizer"),
        (lambda _, tensors: tensors[f"{name}.input_quantizer._amax"].fill_(-1), "below 0"),
        (lambda _, tensors: tensors.update({"what.is_this": torch.ones(1)}), "1 unknown: what"),
        (lambda _, tensors: tensors.update({f"{name}.weight_quantizer._scale": torch.ones(1)}), "does not say"),
    ]:
        with pytest.raises(ArtifactError, match=message):
            read(with_state(saved, tmp_path, change), case.checkpoint)
    found = read(with_state(saved, tmp_path, lambda _, tensors: tensors[buffer].fill_(torch.nan)), case.checkpoint)
    with pytest.raises(ArtifactError, match="NaN"):
        found.layers[name].weight.read()


@pytest.mark.parametrize("saved", CASES[:1], ids=["int8"], indirect=True)
def test_a_layer_that_is_switched_off_is_high_precision(saved, tmp_path):
    case, candidate, _, _ = saved
    name = min(candidate.layers)

    def off(state, _):
        for role in ("weight", "input"):
            state[f"{name}.{role}_quantizer"]["_disabled"] = True

    found = read(with_state(saved, tmp_path, off), case.checkpoint)
    assert found.layers.keys() == candidate.layers.keys() - {name} and f"{name}.weight" in found.parameters
