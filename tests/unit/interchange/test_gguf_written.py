"""The package ``gguf`` reads what is written, and diffusers' converters and loader find their networks in it."""

import diffusers
import numpy as np
import pytest
import torch

from sd_quant.interchange.weights import codes_and_scales
from sd_quant.models.checkpoint import denoiser_weights, empty_denoiser
from sd_quant.names.authors import PREFIX
from sd_quant.quantization.assignment import rewritten
from sd_quant.quantization.formats import FORMATS

from .cases import PLAIN
from .conftest import recipe_of
from .single_files import in_diffusers

pytestmark = pytest.mark.consumer
gguf = pytest.importorskip("gguf")
from sd_quant.interchange.gguf import write  # noqa: E402

INT8, INT4 = ("int8", {"per_channel": False, **PLAIN}), ("int4", PLAIN)
K_QUANTS = [(name, PLAIN | {"scale_search": True}) for name in ("q4_k", "q5_k", "q6_k")]
CASES = [
    ("sdxl", *INT8), ("sdxl", *INT4), ("sd15", *INT8), ("sd21", *INT4), ("sd3", *INT8), ("sd3", *INT4),
    ("flux", *INT8), ("flux", *INT4), ("sdxl", *K_QUANTS[0]), ("sd3", *K_QUANTS[1]), ("flux", *K_QUANTS[2]),
]  # fmt: skip
ARCHITECTURES = {"sdxl": "sdxl", "sd15": "sd1", "sd21": "sd1", "sd3": "sd3", "flux": "flux"}  # of ComfyUI-GGUF
# a tensor of each that ComfyUI-GGUF, whose ModelTemplates these are, and stable-diffusion.cpp tell the model by
TOLD_BY = {
    "sd15": "input_blocks.0.0.weight", "sd21": "input_blocks.0.0.weight", "sdxl": "label_emb.0.0.weight",
    "sd3": "joint_blocks.0.x_block.attn.qkv.weight", "flux": "double_blocks.0.img_attn.proj.weight",
}  # fmt: skip


def read(reader) -> dict[str, torch.Tensor]:
    """Every tensor dequantized, in torch's shape, without the prefix as ComfyUI-GGUF takes it off."""
    return {
        tensor.name.removeprefix(PREFIX): torch.from_numpy(
            np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        )
        .float()
        .view(*(int(size) for size in reversed(tensor.shape)))
        for tensor in reader.tensors
    }


@pytest.mark.slow
@pytest.mark.parametrize("family, fmt, options", CASES)
@torch.no_grad()
def test_codes_are_ours_and_the_network_is_the_readers(tiny, tmp_path, family, fmt, options):
    case = tiny(family)
    assignment = case.assignment(recipe_of(fmt, None, **options), "gguf")
    path = write(case.checkpoint, assignment, tmp_path)
    assert list(tmp_path.iterdir()) == [path] and path.name == f"{case.checkpoint.family.DENOISER}.gguf"
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == ARCHITECTURES[family]
    assert reader.get_field("general.quantization_version").contents() == 2
    tensors = read(reader)
    kinds = {tensor.name.removeprefix(PREFIX): tensor.tensor_type.name for tensor in reader.tensors}
    assert TOLD_BY[family] in tensors and not any(key.startswith("comfy.gguf.orig_shape") for key in reader.fields)
    assert {kinds[key] for key, tensor in tensors.items() if tensor.ndim == 1} == {"F32"}
    quantized = {"int8": {"Q8_0"}, "int4": {"Q4_0"}}.get(fmt) or {fmt.upper(), FORMATS[fmt].narrow.upper()}
    assert {kinds[key] for key, tensor in tensors.items() if tensor.ndim > 1} == {"F16", *quantized}

    found, weights = in_diffusers(empty_denoiser(case.checkpoint), tensors), denoiser_weights(case.checkpoint)
    assert found.keys() == case.denoiser().state_dict().keys()
    count = 0
    for name, tensor in found.items():
        layer = assignment.get(name.rpartition(".")[0])
        if name.endswith(".weight") and layer is not None and layer.format:
            count, dequantized = count + 1, FORMATS[layer.format].dequantize
            assert torch.equal(tensor, dequantized(*codes_and_scales(case.checkpoint, layer))), name
        else:
            changed = layer is not None and layer.role != "attention"
            expected = rewritten(weights[name], layer) if changed else weights[name]
            assert torch.equal(tensor, expected.half().float()), name
    assert count == sum(layer.format is not None for layer in assignment.values()) > 10

    theirs = case.kind.from_config(case.kind.load_config(case.folder)).eval()
    theirs.load_state_dict(found)
    ours = case.network(case.read(path, "gguf"))
    assert case.error(ours, theirs) < 1e-5
    if family != "flux":  # whose converter has the width 3072 written in
        pytest.importorskip("accelerate")
        config = diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
        theirs = case.kind.from_single_file(
            str(path), config=str(case.folder), quantization_config=config, torch_dtype=torch.float32
        )
        assert case.error(ours, theirs.eval()) < 2e-3
