"""diffusers opens what is written, under its own names and under the authors', and has the weights that are read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_safetensors
from sd_quant.interchange import READERS
from sd_quant.interchange.denoiser import needed
from sd_quant.interchange.diffusers_bfl import scaled_layers
from sd_quant.models.checkpoint import empty_denoiser
from sd_quant.names.authors import PREFIX, Rows, authors_places

pytestmark = pytest.mark.commit

BFL = "diffusers_bfl"
PLAIN = {"smoothing": "none", "alpha": None}
FP8 = PLAIN | {"per_channel": True, "per_token": True}
CASES = [("flux", "fp8", FP8), ("sd3", "fp8", FP8), ("sd15", "fp8", FP8), ("sd21", "nvfp4", PLAIN),
         ("sdxl", "fp8", FP8), ("sdxl", "nvfp4", PLAIN), ("flux", "nvfp4", PLAIN)]  # fmt: skip


@pytest.fixture(scope="module")
def written(written_once):
    """``written(family, format, options)``: a tiny checkpoint and its file."""
    return lambda family, fmt, options: written_once(BFL, family, fmt, **options)[::2]


@pytest.fixture(scope="module")
def flux(written):
    return written("flux", "fp8", FP8)


@pytest.fixture(scope="module")
def nvfp4(written):
    return written("flux", "nvfp4", PLAIN)


def opened_by_diffusers(case, file: Path) -> nn.Module:
    pytest.importorskip("accelerate")
    from diffusers import BFLQuantizationConfig

    config = BFLQuantizationConfig(compute_dtype=torch.float32)
    network = case.kind.from_single_file(
        str(file), config=str(case.folder), quantization_config=config, torch_dtype=torch.float32
    )
    return network.eval()


def assert_weights_are_theirs(case, file: Path) -> None:
    from diffusers.quantizers.bfl.utils import QUANTIZED_LINEARS, dequantize_fp8r
    from diffusers.quantizers.bfl.utils import dequantize_nvfp4 as dequantize

    read, theirs = case.read(file, BFL), opened_by_diffusers(case, file)
    kinds = tuple(QUANTIZED_LINEARS.values())
    assert {name for name, module in theirs.named_modules() if isinstance(module, kinds)} == read.layers.keys()
    for name, layer in read.layers.items():
        module = theirs.get_submodule(name)
        if layer.format == "nvfp4":
            weight = dequantize(module.weight, module.weight_scale, module.weight_scale_2)
            assert layer.inputs.common == module.input_scale.item()
        else:
            weight = dequantize_fp8r(module.weight, module.weight_scale)
        assert torch.equal(layer.weight.read(), weight), name
    for name, parameter in read.parameters.items():
        assert torch.equal(parameter.read().float(), theirs.state_dict()[name].float()), name
    exact = case.denoiser()
    assert 1e-4 < case.error(exact, theirs) < 0.5
    for name, layer in read.layers.items():
        exact.get_submodule(name).weight.data = layer.weight.read()
    assert case.error(exact, theirs) < 2e-3  # what fp16 rounds of the other weights


@pytest.mark.consumer
@pytest.mark.slow
@pytest.mark.parametrize("family, fmt, options", CASES)
@torch.no_grad()
def test_diffusers_opens_it_and_has_our_weights(written, family, fmt, options):
    assert_weights_are_theirs(*written(family, fmt, options))


def with_authors_names(case, file: Path, folder: Path, prefix: str) -> Path:
    """The file of FP8 by row with the names of those who trained the model, their rows stacked as they stack them."""
    network, tensors = empty_denoiser(case.checkpoint), load_file(file)
    places = authors_places(network, {name: tuple(each.shape) for name, each in needed(network).items()})
    state: dict[str, Tensor] = {}
    for name, parts in places.items():
        for end in ("", "_scale") if f"{name}_scale" in tensors else ("",):
            tensor, first = tensors[name + end], 0
            for rows in parts:
                stacked = torch.zeros((rows.of, *tensor.shape[1:])).to(tensor.dtype)
                stacked = state.setdefault(prefix + rows.name + end, stacked)
                stacked[rows.start : rows.stop] = tensor[first : first + rows.stop - rows.start]
                first += rows.stop - rows.start
    save_file(state, folder / "authors.safetensors")
    return folder / "authors.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("family, prefix", [("flux", ""), ("sd3", PREFIX), ("sd21", PREFIX)])
def test_authors_names_are_read_as_diffusers_are(written, tmp_path, family, prefix):
    case, file = written(family, "fp8", FP8)
    read = case.read(file, BFL)
    authors = case.read(with_authors_names(case, file, tmp_path, prefix), BFL)
    assert authors.layers.keys() == read.layers.keys()
    for name, layer in read.layers.items():
        assert torch.equal(layer.weight.read(), authors.layers[name].weight.read()), name
        assert str(layer.inputs) == str(authors.layers[name].inputs)
    for name, parameter in read.parameters.items():
        assert torch.equal(parameter.read(), authors.parameters[name].read()), name


@pytest.mark.consumer
@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd3", "sd21"])
@torch.no_grad()
def test_diffusers_takes_authors_rows_apart_as_we_do(written, tmp_path, family):
    case, file = written(family, "fp8", FP8)
    assert_weights_are_theirs(case, with_authors_names(case, file, tmp_path, PREFIX))


def changed(file: Path, folder: Path, change) -> Path:
    tensors = load_file(file)
    change(tensors, next(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")))
    save_file(tensors, folder / file.name)
    return folder / file.name


def replaced(end: str, make):
    return lambda tensors, layer: tensors.update({f"{layer}.{end}": make(tensors[f"{layer}.{end}"])})


DAMAGE = {  # of what no row says; ``test_layouts`` has the rest
    "input_scale and no weight_scale": lambda tensors, layer: tensors.update({"proj_out.input_scale": torch.ones(())}),
    "does not hold the denoiser": lambda tensors, layer: tensors.update({"another.weight": torch.ones(2)}),
    "input_scale' is 0, expected a number above 0": replaced("input_scale", torch.zeros_like),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_refused(nvfp4, tmp_path, message):
    case, file = nvfp4
    with pytest.raises(ArtifactError, match=message):
        READERS[BFL].module.read(changed(file, tmp_path, DAMAGE[message]), case.checkpoint)


@pytest.mark.consumer
def test_diffusers_too_wants_the_scale_of_inputs(nvfp4, tmp_path):
    case, file = nvfp4
    with pytest.raises(ValueError, match="no `input_scale`"):
        opened_by_diffusers(case, changed(file, tmp_path, lambda tensors, layer: tensors.pop(f"{layer}.input_scale")))


def test_scales_with_comfyui_marks_are_comfyui_files(flux, tmp_path):
    _, file = flux
    mark = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    marked = changed(file, tmp_path, lambda tensors, layer: tensors.update({f"{layer}.comfy_quant": mark}))
    assert [name for name, row in READERS.items() if row.recognizes(marked)] == ["comfyui"]


def test_inputs_of_odd_sides_stay(flux, tmp_path):
    """diffusers multiplies codes where both sides are multiples of 16, and dequantized weights elsewhere."""
    file = tmp_path / "a.safetensors"
    save_file({"a.weight": torch.ones(24, 32).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(24)}, file)
    own = scaled_layers(file, read_safetensors(whole_file(file)))["a"]
    assert own.layer((24, 32), [Rows("a.weight", 0, 24, 24)]).inputs is None
    assert own.layer((16, 32), [Rows("a.weight", 0, 16, 24)]).inputs is not None
