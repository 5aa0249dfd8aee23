"""Names of tensors against sources that are not ours.

Rows of the authors' tensors against diffusers' converters, which get numbered rows and move them about; NeMo's keys
against those seen in NeMo and the converter of OpenCLIP. The UNet's and the VAE's, as a file of SGM's, are judged in
``checkpoints/test_single_file.py``.
"""

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_utils
from torch import Tensor, nn

from sd_quant.checkpoints.nemo_networks import to_nemo
from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import lazy
from sd_quant.names import nemo as nemo_keys
from sd_quant.names.authors import (
    PREFIX,
    assembled,
    authors_places,
    denoiser_tensors,
    pieces_of,
    places_in,
    sampling_marks,
    told_family,
)
from sd_quant.names.sgm import nemo_key, sgm_key
from tests.networks import assert_same

from ..interchange.single_files import in_diffusers

pytestmark = pytest.mark.commit

SDXL = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [320, 640, 1280], "transformer_layers_per_block": [1, 2, 10], "use_linear_projection": True,
    "attention_head_dim": [5, 10, 20], "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816, "cross_attention_dim": 2048,
}  # fmt: skip
SD21 = {"cross_attention_dim": 1024, "use_linear_projection": True, "attention_head_dim": [5, 10, 20, 20]}
FLUX = {"num_layers": 3, "num_single_layers": 4}


def unet(**options) -> nn.Module:
    return diffusers.UNet2DConditionModel(**{"cross_attention_dim": 768, **options})


SD1, SD3, OF_FLUX = "a Stable Diffusion 1 or 2 UNet", "a Stable Diffusion 3 transformer", "a Flux transformer"
NETWORKS: Mapping[str, tuple[str, Callable[[], nn.Module]]] = {  # what names tell, and the network
    "sdxl": ("an SDXL UNet", lambda: unet(**SDXL)),
    "sd15": (SD1, unet),
    "sd21": (SD1, lambda: unet(**SD21)),
    "flux-dev": (OF_FLUX, lambda: diffusers.FluxTransformer2DModel(**FLUX, guidance_embeds=True)),
    "flux-schnell": (OF_FLUX, lambda: diffusers.FluxTransformer2DModel(**FLUX, guidance_embeds=False)),
    "sd3": (SD3, lambda: diffusers.SD3Transformer2DModel(num_layers=3)),
    "sd35": (SD3, lambda: diffusers.SD3Transformer2DModel(
        num_layers=4, qk_norm="rms_norm", dual_attention_layers=(0, 1)
    )),
}  # fmt: skip


def network(name: str) -> nn.Module:
    with torch.device("meta"):
        return NETWORKS[name][1]()


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def numbered(places) -> dict[str, Tensor]:
    """Every row of every stored tensor, by a number of its own."""
    stored: dict[str, Tensor] = {}
    first = 0
    for rows in (rows for parts in places.values() for rows in parts):
        if rows.name not in stored:
            stored[rows.name] = torch.arange(first, first + rows.of)
            first += rows.of
    return stored


def stored_shapes(places, needed) -> dict[str, tuple[int, ...]]:
    return {
        rows.name: (rows.of, *needed[name][1:]) if needed[name] else ()
        for name, parts in places.items()
        for rows in parts
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_diffusers_moves_every_row_to_the_same_place_and_names_tell_the_family(name):
    module = network(name)
    needed = shapes_of(module)
    places = authors_places(module, needed)
    stored = numbered(places)
    expected = in_diffusers(module, stored)
    assert expected.keys() == needed.keys() == places.keys()
    for parameter, rows in expected.items():
        found = torch.cat([stored[part.name][part.start : part.stop] for part in places[parameter]])
        assert torch.equal(found, rows), parameter
    pieces = pieces_of(module, needed)
    assert pieces.keys() == stored.keys()
    for key, made_of in pieces.items():
        assert torch.equal(assembled(made_of, expected.__getitem__), stored[key]), key
    assert told_family(needed) == told_family(stored) == NETWORKS[name][0]
    assert told_family({PREFIX + each for each in stored}) == NETWORKS[name][0]


PIXART = {  # as the authors' tools/convert_pixart_to_diffusers.py has it, which diffusers' package does not contain
    "x_embedder.proj": ["pos_embed.proj"],
    "t_embedder.mlp.0": ["adaln_single.emb.timestep_embedder.linear_1"],
    "t_embedder.mlp.2": ["adaln_single.emb.timestep_embedder.linear_2"],
    "csize_embedder.mlp.0": ["adaln_single.emb.resolution_embedder.linear_1"],
    "csize_embedder.mlp.2": ["adaln_single.emb.resolution_embedder.linear_2"],
    "ar_embedder.mlp.0": ["adaln_single.emb.aspect_ratio_embedder.linear_1"],
    "ar_embedder.mlp.2": ["adaln_single.emb.aspect_ratio_embedder.linear_2"],
    "t_block.1": ["adaln_single.linear"],
    "y_embedder.y_proj.fc1": ["caption_projection.linear_1"],
    "y_embedder.y_proj.fc2": ["caption_projection.linear_2"],
    "blocks.0.attn.qkv": [f"transformer_blocks.0.attn1.to_{each}" for each in "qkv"],
    "blocks.0.attn.proj": ["transformer_blocks.0.attn1.to_out.0"],
    "blocks.0.cross_attn.q_linear": ["transformer_blocks.0.attn2.to_q"],
    "blocks.0.cross_attn.kv_linear": [f"transformer_blocks.0.attn2.to_{each}" for each in "kv"],
    "blocks.0.cross_attn.proj": ["transformer_blocks.0.attn2.to_out.0"],
    "blocks.0.mlp.fc1": ["transformer_blocks.0.ff.net.0.proj"],
    "blocks.0.mlp.fc2": ["transformer_blocks.0.ff.net.2"],
    "final_layer.linear": ["proj_out"],
}
TABLES = {"blocks.0.scale_shift_table": ["transformer_blocks.0.scale_shift_table"],
          "final_layer.scale_shift_table": ["scale_shift_table"]}  # fmt: skip


def test_pixart_has_its_authors_names_and_what_diffusers_computes_is_not_missed(tmp_path):
    with torch.device("meta"):
        pixart = diffusers.PixArtTransformer2DModel(num_layers=1, sample_size=128, caption_channels=64)
    needed = shapes_of(pixart)
    found = {key: [piece.name for piece in pieces] for key, pieces in pieces_of(pixart, needed).items()}
    expected = {
        f"{key}.{end}": [f"{name}.{end}" for name in names]
        for key, names in PIXART.items()
        for end in ("weight", "bias")
    }
    assert found == expected | TABLES
    assert told_family(needed) == told_family(found) == "a PixArt transformer"
    shapes = stored_shapes(authors_places(pixart, needed), needed)
    shapes |= {"pos_embed": (1, 4096, 1152), "y_embedder.y_embedding": (300, 64)}
    assert places_in(tmp_path, pixart, needed, shapes) == (authors_places(pixart, needed), [])


def test_both_layouts_are_found_and_what_is_left_over_is_told(tmp_path):
    module = network("flux-dev")
    needed = shapes_of(module)
    assert places_in(tmp_path, module, needed, needed | {"odd": (1,)})[1] == ["odd"]
    places = authors_places(module, needed)
    shapes = stored_shapes(places, needed)
    found, unknown = places_in(tmp_path, module, needed, shapes | {"odd": (1,)})
    assert found == places and unknown == ["odd"]
    del shapes["double_blocks.1.img_attn.qkv.weight"]
    gone = places.keys() - places_in(tmp_path, module, needed, shapes)[0].keys()
    assert gone == {f"transformer_blocks.1.attn.to_{each}.weight" for each in "qkv"}


def test_another_family_and_another_size_are_refused(tmp_path):
    module, other = network("flux-dev"), network("sdxl")
    needed = shapes_of(module)
    with pytest.raises(ArtifactError, match="is an SDXL UNet, and the full-precision model is a Flux transformer"):
        places_in(tmp_path, module, needed, shapes_of(other))
    shapes, name = stored_shapes(authors_places(module, needed), needed), "single_blocks.2.linear1.weight"
    for shape, reason in (((21503, 3072), rf"of another size .*{name} \[21503, 3072\]"), ((), "of another size")):
        with pytest.raises(ArtifactError, match=reason):
            places_in(tmp_path, module, needed, shapes | {name: shape})


def test_other_networks_are_left_out_beside_a_prefix_and_families_without_a_table_known_by_name():
    names = [f"{PREFIX}a.weight", "first_stage_model.x", "model_ema.y", "odd"]
    assert denoiser_tensors(names) == ({"a.weight": f"{PREFIX}a.weight"}, ["odd"])
    assert denoiser_tensors([*names, f"{PREFIX}v_pred", "ztsnr"]) == denoiser_tensors(names)
    assert denoiser_tensors(["a.weight", "v_pred"]) == ({"a.weight": "a.weight"}, [])
    assert sampling_marks([*names, f"{PREFIX}v_pred", "ztsnr", "edm"]) == ("v_pred", "ztsnr")
    assert told_family(["a.weight", "first_stage_model.decoder.conv_in.weight", "vae.encoder.down.0.weight"]) is None
    assert told_family(["distilled_guidance_layer.a", "double_blocks.0", "single_blocks.0"]) == "a Chroma transformer"
    assert denoiser_tensors(["a.weight", "vae.x"]) == ({"a.weight": "a.weight", "vae.x": "vae.x"}, [])


GOLDEN = Path(__file__).with_name("nemo_sdxl_unet_keys.txt.gz")  # "key shape" lines of NeMo's full-size UNet


def test_full_size_unet_has_the_keys_and_shapes_seen_in_nemo(full_size_shapes):
    shapes = full_size_shapes["unet"]
    ours = {
        f"{place.key.removeprefix(nemo_keys.PREFIX['unet'])} {'x'.join(map(str, place.layout.shape(shapes[name])))}"
        for name, place in nemo_keys.locations("unet", shapes).items()
    }
    golden = gzip.decompress(GOLDEN.read_bytes()).decode().splitlines()
    assert sorted(ours) == golden and len(golden) == 1680


def test_open_clip_means_the_same_to_diffusers_converter(tiny_modules):
    module, ours = tiny_modules["text_encoder_2"], nemo_keys.PREFIX["text_encoder_2"]
    state = to_nemo("text_encoder_2", {name: lazy(tensor) for name, tensor in module.state_dict().items()})
    prefix, open_clip = "conditioner.embedders.1.model.", {}
    for key, stated in state.items():
        tensor = open_clip[prefix + key.removeprefix(ours)] = stated.read()
        assert (tuple(tensor.shape), tensor.dtype) == (stated.shape, stated.dtype)
    assert_same(single_file_utils.convert_open_clip_checkpoint(module, open_clip, prefix=prefix), module.state_dict())


def test_full_size_has_the_2515_keys_of_stability_ai(full_size_shapes):
    keys = {
        place.key
        for component, shapes in full_size_shapes.items()
        for place in nemo_keys.locations(component, shapes).values()
    } | {nemo_keys.LOGIT_SCALE, nemo_keys.POSITION_IDS}
    sgm_keys = {sgm_key(key) for key in keys}
    assert len(keys) == len(sgm_keys) == 1680 + 248 + 196 + 1 + 390 == 2515
    assert {nemo_key(key) for key in sgm_keys} == keys
    assert {  # some of the real file, one for each rename
        "model.diffusion_model.input_blocks.4.1.transformer_blocks.1.norm1.weight",
        "model.diffusion_model.middle_block.1.transformer_blocks.9.norm3.bias",
        "model.diffusion_model.output_blocks.0.1.transformer_blocks.9.ff.net.0.proj.weight",
        "model.diffusion_model.output_blocks.0.1.transformer_blocks.0.ff.net.2.bias",
        "model.diffusion_model.input_blocks.1.0.in_layers.2.weight",
        "model.diffusion_model.output_blocks.8.0.out_layers.3.weight",
        "model.diffusion_model.out.2.weight",
        "first_stage_model.decoder.up.0.block.0.nin_shortcut.weight",
        "conditioner.embedders.0.transformer.text_model.final_layer_norm.weight",
        "conditioner.embedders.1.model.transformer.resblocks.31.attn.in_proj_weight",
    } <= sgm_keys
