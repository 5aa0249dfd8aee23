import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sd_quant.inference.pipeline import vector_condition
from sd_quant.models.parts import COMPONENTS, Clip1Part, Clip2Part, UnetPart, VaePart, contracts, wrap
from sd_quant.models.sdxl import TextShape, build_modules, text_config, vae_config

POOLED, SIZE_FEATURES = 32, 8
SHAPE = TextShape(vocab_size=600, width=64, layers=3, context=77, mlp_width=96, projection=POOLED)
TOKENS = torch.arange(77).remainder(500)[None].repeat(2, 1)


def test_the_unet_with_y_is_diffusers_unet_exactly(build_unet, unet_inputs):
    inputs = unet_inputs(batch=2)
    text_embeds = inputs["y"][:, :POOLED]
    time_ids = torch.tensor([[1024.0, 1024, 0, 0, 1024, 768], [64, 48, 3, 5, 64, 64]])
    added = {"text_embeds": text_embeds, "time_ids": time_ids}
    expected = build_unet()(inputs["x"], inputs["timesteps"], inputs["context"], added_cond_kwargs=added).sample
    inputs["y"] = vector_condition(text_embeds, time_ids, SIZE_FEATURES)
    assert inputs["y"].shape == (2, POOLED + 6 * SIZE_FEATURES)
    assert torch.equal(UnetPart(build_unet(), POOLED)(**inputs), expected)


def test_every_part_of_y_reaches_the_unet(build_unet, unet_inputs):
    part, inputs = UnetPart(build_unet(), POOLED), unet_inputs(batch=1)
    whole = part(**inputs)
    for index in (0, POOLED - 1, POOLED, -1):
        y = inputs["y"].clone()
        y[:, index] += 1
        assert not torch.equal(part(**inputs | {"y": y}), whole)


def test_the_vae_decodes_as_diffusers_does(small_config):
    vae = AutoencoderKL(**vae_config(small_config)).eval()
    z = torch.randn(1, 4, 4, 4)
    with torch.no_grad():
        assert torch.equal(VaePart(vae)(z), vae.decode(z).sample)


def encoded_by_diffusers(text_encoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Context and first output of one text encoder, as ``encode_prompt`` takes them."""
    output = text_encoder(TOKENS, output_hidden_states=True)
    return output.hidden_states[-2], output[0]


@torch.no_grad()
def test_the_text_parts_are_diffusers_encoders_padded_to_80_tokens():
    first = CLIPTextModel(CLIPTextConfig(**text_config(SHAPE, "quick_gelu"))).eval()
    second = CLIPTextModelWithProjection(CLIPTextConfig(**text_config(SHAPE, "gelu"))).eval()
    context1, _ = encoded_by_diffusers(first)
    context2, pooled = encoded_by_diffusers(second)
    z1, (z2, z_pooled) = Clip1Part(first)(TOKENS), Clip2Part(second)(TOKENS)
    assert torch.equal(z_pooled, pooled) and pooled.shape == (2, POOLED)
    for z, context in ((z1, context1), (z2, context2)):
        assert z.shape == (2, 80, 64)
        assert torch.equal(z[:, :77], context) and not z[:, 77:].any()


def test_contracts_are_nemos_at_full_size():
    full = contracts({"in_channels": 4, "cross_attention_dim": 2048, "projection_class_embeddings_input_dim": 2816})
    assert full["unet_xl"].shapes(batch=2, height=128, width=96) == {
        "x": (2, 4, 128, 96),
        "timesteps": (2,),
        "context": (2, 80, 2048),
        "y": (2, 2816),
    }
    assert full["vae"].shapes(batch=1, height=8, width=8) == {"z": (1, 4, 8, 8)}
    assert full["clip1"].shapes(batch=3) == full["clip2"].shapes(batch=3) == {"input_ids": (3, 77)}
    assert {name: contract.outputs for name, contract in full.items()} == {
        "unet_xl": ("out",),
        "vae": ("dec",),
        "clip1": ("z",),
        "clip2": ("z", "z_pooled"),
    }
    assert {name for name, contract in full.items() if contract.weights == torch.float32} == {"vae"}


def test_every_part_has_a_contract_and_a_component_of_the_pipeline(small_config):
    with torch.device("meta"):
        modules = build_modules(small_config, SHAPE, SHAPE)
    parts = wrap(modules)
    assert parts.keys() == contracts(modules["unet"].config).keys() == COMPONENTS.keys()
    assert {component for component, _ in COMPONENTS.values()} <= set(
        StableDiffusionXLPipeline.__init__.__annotations__
    )
    for name, (component, prefix) in COMPONENTS.items():
        inner = modules[component].state_dict().keys()
        outer = {key.removeprefix(prefix) for key in parts[name].state_dict()}
        assert outer <= inner and outer, name


@pytest.mark.parametrize("name", ["unet_xl", "clip1", "clip2"])
def test_no_weight_is_left_out_of_its_part(small_config, name):
    with torch.device("meta"):
        modules = build_modules(small_config, SHAPE, SHAPE)
    component = modules[COMPONENTS[name][0]]
    whole = sum(parameter.numel() for parameter in component.parameters())
    assert sum(parameter.numel() for parameter in wrap(modules)[name].parameters()) == whole
