"""Folders that diffusers and quanto quantize and save are read back as quanto computes with them."""

import json
from types import SimpleNamespace

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_safetensors
from sd_quant.interchange.diffusers_quanto import KINDS, read, stored_layer
from sd_quant.interchange.stored import LayerTensors

from ..tiny import changed
from .conftest import assert_equal, weights_of

quanto = pytest.importorskip("optimum.quanto")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.consumer, pytest.mark.filterwarnings("ignore::FutureWarning")]
READER = "diffusers_quanto"
CASES = [
    ("sdxl", "int8", torch.float32), ("flux", "float8", torch.bfloat16), ("flux", "int4", torch.float32),
    ("sd3", "int2", torch.float16),
    # in quanto's own serialization, with convolutions; PixArt is the one class that quanto has
    *(("pixart", kind, torch.float32) for kind in ("qint8", "qint4", "qint2", "qfloat8_e5m2")),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def not_compiled():
    """quanto compiles this in C++ for a minute when it is first asked; in Python it has these lines."""
    from optimum.quanto.library.extensions.cpp import ext

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.cat([packed >> bits * place & 2**bits - 1 for place in range(8 // bits)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ext, "_lib", SimpleNamespace(unpack=unpack))
        yield


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case[:2]))
def saved(request, tiny, tmp_path_factory):
    """A checkpoint, the candidate in the folder of its quantized denoiser, and the saver's own network of it."""
    family, weights, dtype = request.param
    case, folder = tiny(family), tmp_path_factory.mktemp("quantized")
    if family == "pixart":
        kind = quanto.QuantizedPixArtTransformer2DModel
        network = case.kind.from_pretrained(case.folder)
        kind.quantize(network, weights=weights, exclude="proj_out").save_pretrained(folder)
        return case, case.read(folder, READER), kind.from_pretrained(folder)._wrapped, folder
    config = diffusers.QuantoConfig(weights_dtype=weights)
    case.kind.from_pretrained(case.folder, quantization_config=config, torch_dtype=dtype).save_pretrained(folder)
    return case, case.read(folder, READER), case.kind.from_pretrained(folder, torch_dtype=dtype).eval(), folder


def test_weights_and_outputs_are_those_of_quanto(saved):
    """In the weight's dtype quanto multiplies by scales after the codes, in fp32 here."""
    case, candidate, theirs, _ = saved
    modules = {name: each for name, each in theirs.named_modules() if isinstance(each, quanto.nn.QModuleMixin)}
    assert len(modules) > 15
    assert_equal(weights_of(candidate), {name: each.weight.dequantize() for name, each in modules.items()})
    convolutions = any(len(layer.weight.shape) == 4 for layer in candidate.layers.values())
    assert convolutions == isinstance(theirs, diffusers.PixArtTransformer2DModel)
    ours = case.network(candidate)
    if theirs.dtype == torch.float32:
        assert max(case.error_of_layers(ours, theirs, candidate).values()) < 1e-5
        for each in (theirs, candidate.runtime()):
            torch.testing.assert_close(case.output(ours), case.output(each), rtol=1e-4, atol=1e-4)
    assert torch.dist(case.output(ours), case.output(case.denoiser())) > 1e-2


@pytest.mark.parametrize("kind", ["qint4", "qint2"])
def test_every_size_of_group(tmp_path, kind):
    for shape in [(5, 128), (7, 256), (3, 192), (9, 160), (5, 200), (6, 132), (3, 16, 3, 3), (3, 15, 3, 3)]:
        plain = torch.nn.Linear(shape[1], shape[0]) if len(shape) == 2 else torch.nn.Conv2d(shape[1], shape[0], 3)
        module = torch.nn.Sequential(plain)
        quanto.quantize(module, weights=kind)
        quanto.freeze(module)
        tensors = {name: each.contiguous() for name, each in module.state_dict().items()}
        save_file(tensors, tmp_path / "a.safetensors")
        located = read_safetensors(whole_file(tmp_path / "a.safetensors"))
        fields = {name.removeprefix("0."): each for name, each in located.items() if "weight." in name}
        layer = stored_layer(LayerTensors(tmp_path, "0", fields), shape, KINDS[kind])
        assert torch.equal(layer.weight.read(), module[0].weight.dequantize()), shape


@pytest.mark.parametrize("saved", [CASES[0]], indirect=True, ids=["int8"])
def test_another_dtype_than_the_weights_have_is_refused(saved, tmp_path):
    case, _, _, folder = saved
    for given in ("int3", 8, None, ["int8"], "int2"):
        changed(folder, tmp_path, config=lambda config, given=given: config.update(weights_dtype=given))
        with pytest.raises(ArtifactError, match=r"weights_dtype|has no 'weight\._data\._data'"):
            read(tmp_path, case.checkpoint)


@pytest.mark.parametrize("saved", [CASES[4]], indirect=True, ids=["qint8"])
def test_quantized_inputs_and_a_wrong_map_are_refused(saved, tmp_path):
    case, candidate, _, folder = saved
    changed(folder, tmp_path)
    entries = json.loads((tmp_path / "quanto_qmap.json").read_text())
    name = min(candidate.layers)
    for change, message in [
        ({name: entries[name] | {"activations": "qint8"}}, r"inputs and outputs of layers \(1: "),
        ({name: entries[name] | {"weights": "qint3"}}, name),
        ({name: "qint8"}, name),
        ({"more": entries[name]}, "other layers.*more"),
    ]:
        (tmp_path / "quanto_qmap.json").write_text(json.dumps(entries | change))
        with pytest.raises(ArtifactError, match=message):
            read(tmp_path, case.checkpoint)
