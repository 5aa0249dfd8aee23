"""Rows of the authors' tensors, against the converters of diffusers: these get numbered rows and move them about."""

from collections.abc import Callable, Mapping

import diffusers
import pytest
import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError
from sd_quant.names.authors import PREFIX, authors_places, denoiser_tensors, places_in, told_family

from ..interchange.single_files import in_diffusers

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
    assert told_family(needed) == told_family(stored) == KINDS[name]
    assert told_family({PREFIX + each for each in stored}) == KINDS[name]


def test_families_without_a_table_are_known_by_name_and_no_denoiser_by_none():
    with torch.device("meta"):
        pixart = diffusers.PixArtTransformer2DModel(num_layers=1)
    needed = shapes_of(pixart)
    assert told_family(needed) == "a PixArt transformer"
    assert {rows.name: name for name, (rows,) in authors_places(pixart, needed).items()} == {n: n for n in needed}
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
    assert denoiser_tensors(["a.weight", "vae.x"]) == ({"a.weight": "a.weight", "vae.x": "vae.x"}, [])
