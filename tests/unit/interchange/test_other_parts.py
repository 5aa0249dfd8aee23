"""Text encoders and autoencoders in foreign formats: the codes of their assignment, or the checkpoint's own weights."""

import json
import shutil
import sys
from functools import cache
from unittest.mock import MagicMock

import pytest
import torch
import transformers

from sd_quant.config.recipe import part_recipe
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.interchange import TARGETS
from sd_quant.interchange.other_parts import adapted_part, read_part, read_parts
from sd_quant.interchange.stored import CONFIG
from sd_quant.interchange.weights import codes_and_scales
from sd_quant.models.checkpoint import denoiser_part, denoiser_weights, empty_denoiser, in_place
from sd_quant.models.parts import network_in
from sd_quant.models.roles import roles_of
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive_nearest
from sd_quant.quantization.formats import FORMATS
from sd_quant.stages.consumer import open_consumed
from sd_quant.stages.target_folder import write_folder
from sd_quant.stages.targets import rows_of

pytestmark = [pytest.mark.commit, pytest.mark.slow]
SDNQ, TORCHAO, AUTOROUND = "diffusers_sdnq", "diffusers_torchao", "diffusers_autoround"
HELD = {  # which parts of Stable Diffusion 3 hold layers
    SDNQ: {"text_encoder", "text_encoder_2", "text_encoder_3", "vae"},
    TORCHAO: {"text_encoder", "text_encoder_2", "text_encoder_3", "vae"},
    AUTOROUND: {"text_encoder", "text_encoder_2", "text_encoder_3"},
    "comfyui": {"text_encoder_3"},
    "gguf": {"text_encoder_3"},
}


def assigned(checkpoint, part: str) -> dict[str, LayerAssignment]:
    """Weights of a part in INT8, rounded to nearest, as a run has those of parts that are not calibrated."""
    place = in_place(checkpoint, part)
    own, weights = denoiser_part(place), denoiser_weights(place)
    module = own.wrap(empty_denoiser(place))
    excluded = (*own.excluded, *getattr(module, "unread", ()), *checkpoint.family.EXCLUDED)
    roles = roles_of(network_in(own, module), excluded)
    recipes = dict.fromkeys(roles, part_recipe("int8_weight_only"))
    return derive_nearest(roles, lambda name: weights[f"{name}.weight"], recipes)


def quantized(rows) -> dict[str, LayerAssignment]:
    return {name: row for name, row in rows.items() if row.format}


def rounded(place, row: LayerAssignment) -> torch.Tensor:
    codes, scales = codes_and_scales(place, row)
    return FORMATS[row.format].dequantize(codes, scales).reshape(row.weight_shape)


@pytest.fixture(scope="module")
def sd3(tiny):
    """A checkpoint with three text encoders, and weights of all its parts in INT8, the denoiser's first."""
    checkpoint = tiny("sd3").checkpoint
    return checkpoint, {part: assigned(checkpoint, part) for part in checkpoint.parts()}


@pytest.fixture(scope="module")
def written(sd3, tmp_path_factory):
    """A target's folder, the rows in it by part, and the paths of the quantized parts but the denoiser."""

    @cache
    def write(target: str) -> tuple:
        checkpoint, assignments = sd3
        held = rows_of([target], assignments, checkpoint)[target]
        folder = tmp_path_factory.mktemp(target) / "result"
        paths = write_folder(folder, TARGETS[target], checkpoint, held)
        paths.pop(checkpoint.family.DENOISER)
        return folder, held, paths

    return write


@pytest.mark.parametrize(
    "target",
    [pytest.param(name, marks=pytest.mark.consumer if name == "gguf" else pytest.mark.nightly) for name in HELD],
)
@torch.no_grad()
def test_what_is_read_is_what_was_written(sd3, written, target):
    if target == "gguf":
        pytest.importorskip("gguf")
    checkpoint, assignments = sd3
    _, held, paths = written(target)
    assert paths.keys() == HELD[target]
    for part in HELD[target]:
        place, rows = in_place(checkpoint, part), quantized(held[part])
        assert rows.keys() == quantized(assignments[part]).keys() or part == "vae"
        read = TARGETS[target].module.read(paths[part], place)
        assert read.layers.keys() == rows.keys() and not any(layer.inputs for layer in read.layers.values())
        opened = open_consumed(place, held[part], TARGETS[target], paths[part]).module
        network = network_in(denoiser_part(place), opened)
        for name, row in rows.items():
            expected = rounded(place, row)
            assert torch.equal(read.layers[name].weight.read().float(), expected), name
            if name in dict(network.named_modules()):  # and not of the autoencoder's encoder
                assert torch.equal(network.get_submodule(name).weight.cpu(), expected), name


def test_what_a_target_cannot_open_quantized_is_the_checkpoints_own_and_says_why(sd3, written, tiny):
    assert HELD.keys() == {name for name, row in TARGETS.items() if row.networks and row.runtime is None}
    checkpoint, _ = sd3
    folder, held, _ = written(AUTOROUND)
    assert not quantized(held["vae"])
    assert {row.reason for row in held["vae"].values()} == {
        "diffusers with AutoRound opens no quantized AutoencoderKL", "excluded by its network"
    }  # fmt: skip
    name = "vae/diffusion_pytorch_model.safetensors"
    assert (folder / name).read_bytes() == (checkpoint.path / name).read_bytes()
    upcast = tiny("sdxl").checkpoint  # whose pipeline casts its autoencoder, which diffusers refuses of a quantized one
    (reason,) = {row.reason for row in adapted_part(assigned(upcast, "vae"), TARGETS[SDNQ], upcast, "vae").values()
                 if "excluded" not in row.reason}  # fmt: skip
    assert "casts this pipeline's autoencoder to fp32 (force_upcast)" in reason
    assert quantized(adapted_part(assigned(upcast, "clip1"), TARGETS[SDNQ], upcast, "clip1"))


def test_a_third_partys_folder_is_read_part_by_part(sd3, written, tmp_path):
    checkpoint, _ = sd3
    folder, held, _ = written(SDNQ)
    read = read_parts(folder, checkpoint)
    assert list(read) == ["transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"]
    assert {part: len(each.layers) for part, each in read.items()} == {
        part: len(quantized(rows)) for part, rows in held.items()
    }
    mixed = shutil.copytree(folder, tmp_path / "mixed")  # quantized text encoders beside a denoiser that is not
    shutil.copytree(checkpoint.path / "transformer", mixed / "transformer", dirs_exist_ok=True)
    shutil.copytree(checkpoint.path / "vae", mixed / "vae", dirs_exist_ok=True)
    read = read_parts(mixed, checkpoint)
    assert list(read) == ["transformer", "text_encoder", "text_encoder_2", "text_encoder_3"]
    assert not read["transformer"].layers and read["transformer"].stored_bytes > 0
    config = mixed / "text_encoder" / CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "other"}}))
    with pytest.raises(ConfigError, match="text_encoder is of no kind that is known here, expected one of"):
        read_parts(mixed, checkpoint)
    paths = written(SDNQ)[2]
    with pytest.raises(ArtifactError, match="does not hold the text_encoder_3 of the full-precision model"):
        TARGETS[SDNQ].module.read(paths["text_encoder"], in_place(checkpoint, "text_encoder_3"))


@pytest.fixture(scope="module")
def consumer():
    """SDNQ has to be imported, or transformers takes codes for weights; AutoRound imports datasets, to calibrate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDNQ_USE_TORCH_COMPILE", "0")
        patch.setitem(sys.modules, "datasets", MagicMock())
        yield lambda target: pytest.importorskip({SDNQ: "sdnq", TORCHAO: "torchao", AUTOROUND: "auto_round"}[target])


def weight_by_them(target: str, layer: torch.nn.Module, columns: int) -> torch.Tensor:
    if target == SDNQ:
        return layer.sdnq_dequantizer(weight=layer.weight, scale=layer.scale, skip_compile=True)
    if target == TORCHAO:
        return layer.weight.dequantize(torch.float32)
    unit = layer(torch.eye(columns, dtype=torch.float16)).float()  # one number of the weight each, in fp16
    return (unit - (0 if layer.bias is None else layer.bias.float())).T


@pytest.mark.consumer
@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_3"])
@pytest.mark.parametrize("target", [SDNQ, TORCHAO, AUTOROUND])
@torch.no_grad()
def test_transformers_opens_the_codes(sd3, written, consumer, target, part):
    consumer(target)
    checkpoint, _ = sd3
    _, held, paths = written(target)
    place, rows = in_place(checkpoint, part), quantized(held[part])
    kind = getattr(transformers, checkpoint.family.NETWORKS[part])
    dtype = torch.float16 if target == AUTOROUND else torch.float32
    network = kind.from_pretrained(paths[part], dtype=dtype, local_files_only=True).eval()
    for name, row in rows.items():
        found, expected = weight_by_them(target, network.get_submodule(name), row.weight_shape[1]), rounded(place, row)
        if target == AUTOROUND:
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3 * expected.abs().max().item())
        else:
            assert torch.equal(found.float(), expected), name
    untouched = [name for name, row in held[part].items() if not row.format]
    assert untouched and all(type(network.get_submodule(name)) is torch.nn.Linear for name in untouched)


@pytest.mark.consumer
@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_3"])
@pytest.mark.parametrize("reader", ["diffusers_bitsandbytes", TORCHAO])
@torch.no_grad()
def test_what_transformers_itself_has_quantized_and_saved_is_read(sd3, consumer, tmp_path, reader, part):
    checkpoint, _ = sd3
    kind = getattr(transformers, checkpoint.family.NETWORKS[part])
    if reader == TORCHAO:
        config = transformers.TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    else:
        bnb, four_bits = pytest.importorskip("bitsandbytes.functional"), {"bnb_4bit_quant_type": "nf4"}
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, **four_bits)
    theirs = kind.from_pretrained(checkpoint.path / part, quantization_config=config, local_files_only=True)
    theirs.save_pretrained(tmp_path / part)
    read = read_part(tmp_path, checkpoint, part)
    assert read.format == reader and len(read.layers) >= 12
    for layer, stored in read.layers.items():
        weight = theirs.get_submodule(layer).weight
        expected = weight.dequantize() if reader == TORCHAO else bnb.dequantize_4bit(weight.data, weight.quant_state)
        torch.testing.assert_close(stored.weight.read().float(), expected.float(), rtol=1e-6, atol=1e-7)
