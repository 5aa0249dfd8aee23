"""The package ``gguf`` reads what is written, and diffusers' converter finds SDXL's UNet in it."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.loaders import single_file_utils

from sd_quant.checkpoints.nemo import open_nemo, write_nemo
from sd_quant.checkpoints.nemo_keys import PREFIX, locations
from sd_quant.checkpoints.nemo_networks import parameter_shapes, sdxl_base_config
from sd_quant.checkpoints.sgm import nemo_key, sgm_names
from sd_quant.checkpoints.synthetic import CLIP_L, OPEN_CLIP_BIGG
from sd_quant.hand_over.weights import codes_and_scales
from sd_quant.models.sdxl_nemo import TextShape, build_modules
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Enable, Pair, Recipe

from .conftest import layer_errors, network_error

pytestmark = pytest.mark.consumer
gguf = pytest.importorskip("gguf")
from sd_quant.hand_over import gguf as writer  # noqa: E402

CLIP1 = TextShape(vocab_size=100, width=64, layers=2, context=16, mlp_width=96)
CLIP2 = TextShape(vocab_size=100, width=64, layers=2, context=16, mlp_width=96, projection=32)
UNET = "model.diffusion_model."
CASES = {"int8": {}, "int8-folded": {"alpha": 0.8}, "int8-one-scale": {"per_channel": False},
         "int4": {}, "int4-gptq": {"rounding": "gptq"}}  # fmt: skip


def assigned(case, name: str = "int8"):
    pair = Pair(name.partition("-")[0], None)
    recipe = Recipe(3.0, **{"alpha": None, **CASES[name]}, collect_method="min-max", enable=Enable(pair, pair, None))
    return case.assignment(recipe, "gguf")


@pytest.fixture(scope="module", params=CASES)
def written(request, tiny, tmp_path_factory):
    case, folder = tiny("sdxl"), tmp_path_factory.mktemp("gguf")
    assignment = assigned(case, request.param)
    writer.write(case.checkpoint, assignment, folder)
    (path,) = folder.iterdir()
    assert path.name == f"{case.checkpoint.family.DENOISER}.gguf"
    return case, assignment, gguf.GGUFReader(path)


def read(reader) -> dict[str, torch.Tensor]:
    """Every tensor dequantized, in torch's shape."""
    return {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        .float()
        .view(*(int(size) for size in reversed(tensor.shape)))
        for tensor in reader.tensors
    }


def test_codes_layers_and_the_network_are_the_simulation(written):
    case, assignment, reader = written
    assert reader.get_field("general.architecture").contents() == "sdxl"
    tensors, kinds = read(reader), {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    names = sgm_names(case.checkpoint.components["unet"])
    assert names.keys() == set(case.checkpoint.components["unet"]) and set(names.values()) == tensors.keys()
    for name, key in names.items():
        layer = assignment.get(name.removesuffix(".weight"))
        if layer is not None and layer.format:
            assert kinds[key] == {"int8": "Q8_0", "int4": "Q4_0"}[layer.format]
            assert torch.equal(
                tensors[key], FORMATS[layer.format].dequantize(*codes_and_scales(case.checkpoint, layer))
            )
        else:
            assert kinds[key] == ("F32" if tensors[key].ndim == 1 else "F16")

    theirs = diffusers.UNet2DConditionModel.from_config(
        diffusers.UNet2DConditionModel.load_config(case.checkpoint.path, subfolder="unet")
    )
    state = {UNET + key: tensor for key, tensor in tensors.items()}
    theirs.load_state_dict(single_file_utils.convert_ldm_unet_checkpoint(state, dict(theirs.config)))
    simulated = case.simulated(assignment, "gguf")
    errors = layer_errors(case, simulated, theirs.eval(), assignment)
    whole = network_error(case, simulated, theirs)
    assert max(errors.values()) < 1e-5 and whole < 1e-5


def test_a_nemo_checkpoint_keeps_its_tensors(small_config, tmp_path):
    """By the key that its own reader of SGM's files gives each tensor."""
    config = small_config | {"unet_config": small_config["unet_config"] | {"context_dim": CLIP1.width + CLIP2.width}}
    write_nemo(tmp_path / "tiny.nemo", config, build_modules(config, CLIP1, CLIP2), torch.float32)
    checkpoint = open_nemo(tmp_path / "tiny.nemo")
    weights = checkpoint.components["unet"]
    name = "mid_block.attentions.0.transformer_blocks.0.ff.net.2"
    weight = weights[f"{name}.weight"]
    row = LayerAssignment(name, "ffn", tuple(weight.shape), "int8", weight_axis=0, weight_amax=weight.abs().amax(1))
    writer.write(checkpoint, {name: row}, tmp_path)
    tensors = read(gguf.GGUFReader(tmp_path / "unet_xl.gguf"))
    assert {nemo_key(UNET + key) for key in tensors} == weights.tensors.keys()
    codes = FORMATS["int8"].dequantize(*codes_and_scales(checkpoint, row))
    assert torch.equal(tensors.pop("middle_block.1.transformer_blocks.0.ff.net.2.weight"), codes)
    for key, tensor in tensors.items():
        expected = weights.tensors[nemo_key(UNET + key)].read().half().float()
        assert torch.equal(tensor, expected), key


def test_full_size_keys_are_those_that_sgm_is_read_by():
    with torch.device("meta"):
        modules = build_modules(sdxl_base_config(), CLIP_L, OPEN_CLIP_BIGG)
    names = list(parameter_shapes(modules)["unet"])
    found = sgm_names(names)
    places = locations("unet", names)
    assert len(set(found.values())) == len(names) == 1680
    assert {name: nemo_key(UNET + key) for name, key in found.items()} == {
        name: place.key for name, place in places.items()
    }
    assert {place.layout for place in places.values()} == {"same"} and PREFIX["unet"] == f"model.{UNET}"
    assert found["up_blocks.0.upsamplers.0.conv.weight"] == "output_blocks.2.2.conv.weight"
    assert found["add_embedding.linear_1.weight"] == "label_emb.0.0.weight"  # both tell ComfyUI-GGUF that this is SDXL
    norm = "mid_block.attentions.0.transformer_blocks.9.norm3.bias"
    assert found[norm] == "middle_block.1.transformer_blocks.9.norm3.bias"
    assert max(map(len, found.values())) <= writer.LONGEST_NAME


def test_blocks_are_ggmls():
    """32 codes behind the two bytes of their scale; of four bits, the first half lies in the low halves of bytes."""
    codes = torch.arange(64, dtype=torch.int8)[None] - 32
    scales = torch.tensor([[0.5]])
    block = writer.blocks_of(codes, scales, "int8")
    assert block.shape == (1, 2, 34) and block[0, 1, 2:].view(torch.int8).tolist() == list(range(32))
    assert block[0, 0, :2].view(torch.float16).item() == 0.5
    block = writer.blocks_of(torch.tensor([[-8] * 16 + [7] * 16], dtype=torch.int8), scales, "int4")
    assert block.shape == (1, 1, 18) and set(block[0, 0, 2:].tolist()) == {0xF0}
