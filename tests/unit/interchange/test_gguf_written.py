"""The package ``gguf`` reads what is written, and diffusers' converter finds SDXL's UNet in it."""

import numpy as np
import pytest
import torch
from diffusers.loaders import single_file_utils

from sd_quant.interchange.weights import codes_and_scales
from sd_quant.names.sgm import sgm_names
from sd_quant.quantization.formats import FORMATS

from .conftest import recipe_of

pytestmark = pytest.mark.consumer
gguf = pytest.importorskip("gguf")
from sd_quant.interchange.gguf import write  # noqa: E402

UNET = "model.diffusion_model."


def read(reader) -> dict[str, torch.Tensor]:
    """Every tensor dequantized, in torch's shape."""
    return {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        .float()
        .view(*(int(size) for size in reversed(tensor.shape)))
        for tensor in reader.tensors
    }


@pytest.mark.parametrize("fmt, options", [("int8", {"per_channel": False}), ("int4", {"alpha": None})])
def test_codes_are_ours_and_the_network_is_the_readers(tiny, tmp_path, fmt, options):
    case = tiny("sdxl")
    assignment = case.assignment(recipe_of(fmt, None, **options), "gguf")
    write(case.checkpoint, assignment, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == f"{case.checkpoint.family.DENOISER}.gguf"
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == "sdxl"
    tensors, kinds = read(reader), {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    names = sgm_names(case.checkpoint.components["unet"])
    assert names.keys() == set(case.checkpoint.components["unet"]) and set(names.values()) == tensors.keys()
    for name, key in names.items():
        layer = assignment.get(name.removesuffix(".weight"))
        if layer is not None and layer.format:
            assert kinds[key] == {"int8": "Q8_0", "int4": "Q4_0"}[layer.format]
            expected = FORMATS[layer.format].dequantize(*codes_and_scales(case.checkpoint, layer))
            assert torch.equal(tensors[key], expected)
        else:
            assert kinds[key] == ("F32" if tensors[key].ndim == 1 else "F16")

    theirs = case.kind.from_config(case.kind.load_config(case.folder)).eval()
    state = {UNET + key: tensor for key, tensor in tensors.items()}
    theirs.load_state_dict(single_file_utils.convert_ldm_unet_checkpoint(state, dict(theirs.config)))
    assert case.error(case.network(case.read(path, "gguf")), theirs) < 1e-5
