"""Rows of the authors' tensors, against the converters of diffusers: these get numbered rows and move them about."""

from collections.abc import Callable, Mapping

import diffusers
import pytest
import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
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


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "sdxl": lambda: unet(**SDXL),
    "sd15": unet,
    "sd21": lambda: unet(**SD21),
    "flux-dev": lambda: diffusers.FluxTransformer2DModel(**FLUX, guidance_embeds=True),
    "flux-schnell": lambda: diffusers.FluxTransformer2DModel(**FLUX, guidance_embeds=False),
    "sd3": lambda: diffusers.SD3Transformer2DModel(num_layers=3),
    "sd35": lambda: diffusers.SD3Transformer2DModel(num_layers=4, qk_norm="rms_norm", dual_attention_layers=(0, 1)),
}
KINDS = {
    "sdxl": "an SDXL UNet", "sd15": "a Stable Diffusion 1 or 2 UNet", "sd21": "a Stable Diffusion 1 or 2 UNet",
    "flux-dev": "a Flux transformer", "flux-schnell": "a Flux transformer",
    "sd3": "a Stable Diffusion 3 transformer", "sd35": "a Stable Diffusion 3 transformer",
}  # fmt: skip


def network(name: str) -> nn.Module:
    with torch.device("meta"):
        return NETWORKS[name]()


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
    assert told_family(needed) == told_family(stored) == KINDS[name]
    assert told_family({PREFIX + each for each in stored}) == KINDS[name]


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


def test_families_without_a_table_are_known_by_name_and_no_denoiser_by_none():
    assert told_family(["distilled_guidance_layer.a", "double_blocks.0", "single_blocks.0"]) == "a Chroma transformer"
    assert told_family(["a.weight", "first_stage_model.decoder.conv_in.weight", "vae.encoder.down.0.weight"]) is None


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


def stored_shapes(places, needed) -> dict[str, tuple[int, ...]]:
    return {
        rows.name: (rows.of, *needed[name][1:]) if needed[name] else ()
        for name, parts in places.items()
        for rows in parts
    }


def test_another_family_and_another_size_are_refused(tmp_path):
    module, other = network("flux-dev"), network("sdxl")
    needed = shapes_of(module)
    with pytest.raises(ArtifactError, match="is an SDXL UNet, and the full-precision model is a Flux transformer"):
        places_in(tmp_path, module, needed, shapes_of(other))
    shapes, name = stored_shapes(authors_places(module, needed), needed), "single_blocks.2.linear1.weight"
    for shape, reason in (((21503, 3072), rf"of another size .*{name} \[21503, 3072\]"), ((), "of another size")):
        with pytest.raises(ArtifactError, match=reason):
            places_in(tmp_path, module, needed, shapes | {name: shape})


def test_other_networks_are_left_out_only_beside_a_prefix():
    names = [f"{PREFIX}a.weight", "first_stage_model.x", "model_ema.y", "odd"]
    assert denoiser_tensors(names) == ({"a.weight": f"{PREFIX}a.weight"}, ["odd"])
    assert denoiser_tensors([*names, f"{PREFIX}v_pred", "ztsnr"]) == denoiser_tensors(names)
    assert denoiser_tensors(["a.weight", "v_pred"]) == ({"a.weight": "a.weight"}, [])
    assert sampling_marks([*names, f"{PREFIX}v_pred", "ztsnr", "edm"]) == ("v_pred", "ztsnr")
    assert denoiser_tensors(["a.weight", "vae.x"]) == ({"a.weight": "a.weight", "vae.x": "vae.x"}, [])
