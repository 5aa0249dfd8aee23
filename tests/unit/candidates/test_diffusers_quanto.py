"""Folders that diffusers and quanto quantize and save are read back as quanto computes with them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_quant.candidates.diffusers_quanto import read
from sd_quant.errors import ArtifactError

from .tiny_folders import tiny

quanto = pytest.importorskip("optimum.quanto")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.consumer, pytest.mark.filterwarnings("ignore::FutureWarning")]
READER = "diffusers_quanto"
CASES = [
    ("sdxl", "int8", torch.float32), ("flux", "float8", torch.bfloat16), ("flux", "int4", torch.float32),
    ("sd3", "int2", torch.float16),
]  # fmt: skip
OWN = ["qint8", "qint4", "qint2", "qfloat8_e5m2"]


def quantized_layers(network):
    return {name: module for name, module in network.named_modules() if isinstance(module, quanto.nn.QModuleMixin)}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case[:2])))
def saved(request, tmp_path_factory):
    """A checkpoint, the candidate in the folder of its quantized denoiser, and diffusers' own network of it."""
    from diffusers import QuantoConfig

    family, weights, dtype = request.param
    case = tiny(family, tmp_path_factory.mktemp("full"))
    folder = tmp_path_factory.mktemp("quantized")
    config = QuantoConfig(weights_dtype=weights)
    case.kind.from_pretrained(case.folder, quantization_config=config, torch_dtype=dtype).save_pretrained(folder)
    theirs = case.kind.from_pretrained(folder, torch_dtype=dtype).eval()
    return case, case.read(folder, READER), theirs, folder


@pytest.fixture(scope="module", params=OWN)
def own(request, tmp_path_factory):
    """As ``saved``, in quanto's own serialization, with convolutions; PixArt is the one class that quanto has."""
    case = tiny("pixart", tmp_path_factory.mktemp("full"))
    folder = tmp_path_factory.mktemp("quantized")
    network = case.kind.from_pretrained(case.folder)
    kind = quanto.QuantizedPixArtTransformer2DModel
    kind.quantize(network, weights=request.param, exclude="proj_out").save_pretrained(folder)
    return case, case.read(folder, READER), kind.from_pretrained(folder)._wrapped, folder


def same_weights(candidate, theirs):
    layers = quantized_layers(theirs)
    assert candidate.layers.keys() == layers.keys() and len(layers) > 15
    for name, module in layers.items():
        found, expected = candidate.layers[name].weight, module.weight.dequantize()
        assert found.dtype == expected.dtype and torch.equal(found.read(), expected), name


def same_outputs(case, candidate, theirs):
    """In the weight's dtype quanto multiplies by scales after the codes, in fp32 here."""
    ours = case.network(candidate)
    if theirs.dtype == torch.float32:
        assert max(case.error_of_layers(ours, theirs, candidate).values()) < 1e-5
        for each in (theirs, candidate.runtime()):
            torch.testing.assert_close(case.output(ours), case.output(each), rtol=1e-4, atol=1e-4)
    lost = torch.dist(case.output(ours), case.output(case.kind.from_pretrained(case.folder).eval()))
    assert lost > 1e-2


def test_weights_and_outputs_are_those_of_quanto(saved):
    case, candidate, theirs, _ = saved
    same_weights(candidate, theirs)
    same_outputs(case, candidate, theirs)


def test_quantos_own_folders(own):
    case, candidate, theirs, _ = own
    assert any(len(layer.weight.shape) == 4 for layer in candidate.layers.values())
    same_weights(candidate, theirs)
    same_outputs(case, candidate, theirs)


def test_every_size_of_group(tmp_path):
    from sd_quant.candidates.diffusers_quanto import KINDS, stored_layer
    from sd_quant.checkpoints.archive import whole_file
    from sd_quant.checkpoints.safetensors_file import read_safetensors

    for shape in [(5, 128), (7, 256), (3, 192), (9, 160), (5, 200), (6, 132), (3, 16, 3, 3), (3, 15, 3, 3)]:
        for kind in ("qint4", "qint2"):
            plain = torch.nn.Linear(shape[1], shape[0]) if len(shape) == 2 else torch.nn.Conv2d(shape[1], shape[0], 3)
            module = torch.nn.Sequential(plain)
            quanto.quantize(module, weights=kind)
            quanto.freeze(module)
            save_file(
                {name: each.contiguous() for name, each in module.state_dict().items()}, tmp_path / "a.safetensors"
            )
            stored = read_safetensors(whole_file(tmp_path / "a.safetensors"))
            fields = {name.removeprefix("0."): each for name, each in stored.items() if "weight." in name}
            layer = stored_layer(tmp_path, "0", fields, shape, KINDS[kind])
            assert torch.equal(layer.weight.read(), module[0].weight.dequantize()), (shape, kind)


def changed(source, folder, change):
    """A folder like ``source``, with its tensors as ``change`` makes them."""
    tensors = load_file(next(source.glob("*.safetensors")))
    change(tensors)
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    for file in source.glob("*.json"):
        (folder / file.name).write_text(file.read_text())
    return folder


def test_what_does_not_fit_is_refused_by_name(saved, tmp_path):
    case, candidate, _, folder = saved
    name, stored = min(candidate.layers), load_file(next(folder.glob("*.safetensors")))
    end = next(end for end in ("_shift", "_scale") if f"{name}.weight.{end}" in stored)

    def shorter(tensors):
        tensors[f"{name}.weight.{end}"] = tensors[f"{name}.weight.{end}"][:-1].clone()

    with pytest.raises(ArtifactError, match=f"{name}.weight.{end}"):
        read(changed(folder, tmp_path, shorter), case.checkpoint)
    with pytest.raises(ArtifactError, match=f"{name}.*{end}"):
        read(changed(folder, tmp_path, lambda tensors: tensors.pop(f"{name}.weight.{end}")), case.checkpoint)
    found = read(
        changed(folder, tmp_path, lambda tensors: tensors[f"{name}.weight.{end}"].fill_(torch.inf)), case.checkpoint
    )
    with pytest.raises(ArtifactError, match=f"{end}.*infinite"):
        found.layers[name].weight.read()


@pytest.mark.parametrize("given", ["int3", 8, None, ["int8"], "int2"])
def test_another_dtype_than_the_weights_have_is_refused(tmp_path, tmp_path_factory, given):
    from diffusers import QuantoConfig

    case = tiny("sd15", tmp_path_factory.mktemp("full"))
    config = QuantoConfig(weights_dtype="int8")
    case.kind.from_pretrained(case.folder, quantization_config=config).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["quantization_config"]["weights_dtype"] = given
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ArtifactError, match=r"weights_dtype|has no 'weight\._data\._data'"):
        read(tmp_path, case.checkpoint)


def test_quantized_inputs_and_a_wrong_map_are_refused(own, tmp_path):
    case, candidate, _, folder = own
    changed(folder, tmp_path, lambda tensors: None)
    entries = json.loads((tmp_path / "quanto_qmap.json").read_text())
    name = min(candidate.layers)
    for change, message in [
        ({name: entries[name] | {"activations": "qint8"}}, "inputs and outputs of 1 layers"),
        ({name: entries[name] | {"weights": "qint3"}}, name),
        ({name: "qint8"}, name),
        ({"more": entries[name]}, "other layers.*more"),
    ]:
        (tmp_path / "quanto_qmap.json").write_text(json.dumps(entries | change))
        with pytest.raises(ArtifactError, match=message):
            read(tmp_path, case.checkpoint)
