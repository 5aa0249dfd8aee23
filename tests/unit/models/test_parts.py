from types import SimpleNamespace

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sd_quant.errors import SdQuantError
from sd_quant.files.tensors import lazy
from sd_quant.models import STORED
from sd_quant.models.parts import Axis, Contract, as_inputs, filled, with_dtypes, wrapped
from sd_quant.models.sdxl import FAMILY as sdxl
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, TextShape, build_modules, text_config
from sd_quant.models.text_encoders import ClipPart

pytestmark = pytest.mark.commit

POOLED = 32
SHAPE = TextShape(vocab_size=600, width=64, layers=3, context=77, mlp_width=96, projection=POOLED)
TOKENS = torch.arange(77).remainder(500)[None].repeat(2, 1)


@torch.no_grad()
def test_the_text_parts_are_diffusers_encoders_padded_to_80_tokens():
    first = CLIPTextModel(CLIPTextConfig(**text_config(SHAPE, "quick_gelu"))).eval()
    second = CLIPTextModelWithProjection(CLIPTextConfig(**text_config(SHAPE, "gelu"))).eval()
    first_output, second_output = (encoder(TOKENS, output_hidden_states=True) for encoder in (first, second))
    pooled = second_output[0]
    (z1,) = ClipPart(first, ("hidden_states",), 80)(TOKENS)
    z2, z_pooled = ClipPart(second, ("hidden_states", "text_embeds"), 80)(TOKENS)
    assert torch.equal(z_pooled, pooled) and pooled.shape == (2, POOLED)
    for z, output in ((z1, first_output), (z2, second_output)):
        context = output.hidden_states[-2]  # as ``encode_prompt`` takes it
        assert z.shape == (2, 80, 64)
        assert torch.equal(z[:, :77], context) and not z[:, 77:].any()


FULL = {
    "unet": {"in_channels": 4, "cross_attention_dim": 2048, "projection_class_embeddings_input_dim": 2816,
             "addition_time_embed_dim": 256},
    "vae": {"latent_channels": 4},
}  # fmt: skip


def test_contracts_are_nemos_at_full_size_and_with_diffusers_names_those_of_nvidias_demo():
    """demoDiffusion: --shapes=sample:2x4x128x128,timestep:1,encoder_hidden_states:2x77x2048,text_embeds:2x1280,
    time_ids:2x6."""
    demo = sdxl.parts(FULL, None, "diffusers")["unet_xl"].contract
    assert demo.shapes(batch=2, height=128, width=128) == {
        "sample": (2, 4, 128, 128), "timestep": (1,), "encoder_hidden_states": (2, 77, 2048),
        "text_embeds": (2, 1280), "time_ids": (2, 6),
    }  # fmt: skip
    full = {name: part.contract for name, part in sdxl.parts(FULL, CONTEXT_TOKENS, "nemo").items()}
    assert full["unet_xl"].shapes(batch=2, height=128, width=96) == {
        "x": (2, 4, 128, 96), "timesteps": (2,), "context": (2, 80, 2048), "y": (2, 2816),
    }  # fmt: skip
    assert full["vae"].shapes(batch=1, height=8, width=8) == {"z": (1, 4, 8, 8)}
    assert full["clip1"].shapes(batch=3) == full["clip2"].shapes(batch=3) == {"input_ids": (3, 77)}
    assert {name: contract.outputs for name, contract in full.items()} == {
        "unet_xl": ("out",), "vae": ("dec",), "clip1": ("z",), "clip2": ("z", "z_pooled"),
    }  # fmt: skip
    assert {name for name, contract in full.items() if contract.weights == torch.float32} == {"vae"}


def test_a_scalar_becomes_one_or_one_for_each_sample_and_an_argument_that_a_graph_lacks_is_refused():
    """Flags, and what is empty, say nothing that a graph could lack."""
    shapes = {"sample": ("batch", 4), "ids": ("batch", 6), "timestep": (1,), "guidance": ("batch",)}
    contract = Contract(shapes, ("out",), {}, torch.float16)
    ids, numbers = torch.ones(3, 6), {"timestep": 7, "guidance": torch.tensor(2.0)}
    given = {
        "sample": torch.ones(3, 4),
        **numbers,
        "added_cond_kwargs": {"ids": ids},
        "return_dict": False,
        "mask": None,
    }
    found = as_inputs(contract, given | {"more": {}})
    assert found.keys() == shapes.keys() and found["sample"] is given["sample"]
    assert (found["timestep"].tolist(), found["guidance"].tolist()) == ([7], [2.0, 2.0, 2.0])
    for name, value, shown in (("class_labels", ids, r"a tensor \[3, 6\]"), ("scale", {"lora": 0.5}, "{'lora': 0.5}")):
        with pytest.raises(SdQuantError, match=f"calls a network with {name} .{shown}., expected sample, ids, time"):
            as_inputs(contract, {**given, name: value})
        with pytest.raises(SdQuantError, match=name):
            as_inputs(contract, {**given, "added_cond_kwargs": {"ids": ids, name: value}})


def test_stated_dtypes_are_those_of_weights_and_of_inputs_that_had_the_familys():
    stored = SimpleNamespace(parameters={"a": lazy(torch.ones(3, dtype=torch.bfloat16)), "b": lazy(torch.ones(2))})
    components = {"vae": stored, "text_encoder": SimpleNamespace(parameters={"b": lazy(torch.ones(2))})}
    parts = sdxl.parts(FULL, CONTEXT_TOKENS, "nemo")
    found = with_dtypes(parts, {"unet_xl": "bf16", "vae": STORED, "clip1": STORED}, components)
    contracts = {name: part.contract for name, part in found.items()}
    in_bf16, single = torch.bfloat16, torch.float32
    assert contracts["unet_xl"].dtypes == {"x": in_bf16, "timesteps": single, "context": in_bf16, "y": in_bf16}
    assert (contracts["vae"].weights, contracts["vae"].dtypes) == (in_bf16, {"z": in_bf16})
    assert contracts["clip1"].weights == contracts["clip2"].weights == torch.float16
    assert with_dtypes(parts, None, {}) == parts
    assert {part.contract.weights for part in with_dtypes(parts, "fp32", {}).values()} == {single}


@pytest.mark.parametrize("io", ["nemo", "diffusers"])
def test_every_part_holds_all_of_a_component_of_the_pipeline(small_config, io):
    with torch.device("meta"):
        modules = build_modules(small_config, SHAPE, SHAPE)
    parts = sdxl.parts({name: modules[name].config for name in ("unet", "vae")}, CONTEXT_TOKENS, io)
    assert {part.component for part in parts.values()} <= set(StableDiffusionXLPipeline.__init__.__annotations__)
    for name, module in wrapped(parts, modules).items():
        part = parts[name]
        inner = modules[part.component].state_dict().keys()
        outer = {key.removeprefix(part.prefix) for key in module.state_dict()}
        assert outer <= inner and outer, name
        if name != "vae":  # of which the decoder alone
            whole = sum(parameter.numel() for parameter in modules[part.component].parameters())
            assert sum(parameter.numel() for parameter in module.parameters()) == whole


def test_shapes_have_the_axes_of_all_families_and_a_contracts_own_first():
    shapes = {"x": ("batch", 4, "height", "width"), "tokens": ("batch", "size_1", 8), "place": ("size_1", 3), "t": ()}
    contract = Contract(
        shapes, ("out",), dict.fromkeys(shapes, torch.float32), torch.float32,
        axes=(("size_1", Axis("width*height", 1, 256, 0)), ("width", Axis("width", 1, 4, 0))),
    )  # fmt: skip
    expected = {"x": (2, 4, 8, 32), "tokens": (2, 32, 8), "place": (32, 3), "t": ()}
    assert contract.shapes_for(2, 128, 64) == expected


def test_inputs_for_calls_that_nobody_reads_are_places_in_any_table():
    assert filled("input_ids", (2, 5), torch.int64).eq(0).all()
    for name, dtype in (("x", torch.float16), ("attention_mask", torch.int64), ("flag", torch.bool)):
        found = filled(name, (2, 5), dtype)
        assert found.eq(1).all() and (found.shape, found.dtype) == ((2, 5), dtype)
