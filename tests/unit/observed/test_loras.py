"""LoRAs of observed pipelines: by the formula, by diffusers' own fuse_lora, and every file that is refused."""

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd_quant.checkpoints.lora import adapted_in, without_loras
from sd_quant.errors import SdQuantError
from sd_quant.files.tensors import StoredTensor
from sd_quant.observed.checkpoint import ObservedCheckpoint
from sd_quant.observed.loras import with_loras
from tests.zoo import build

pytestmark = [pytest.mark.commit, pytest.mark.slow]

RANK, ALPHA, STRENGTH = 4, 2.0, 0.7
TWO, WAN = "WanPipeline, two denoisers", "blocks.1.attn2.to_k"
DOUBLE, SINGLE = "transformer_blocks.0.attn.{}", "single_transformer_blocks.0.{}"
LAYOUTS = {  # by trainer: a pipeline, names in its files and the layers whose rows each holds, the ends of tensors
    "diffusers": ("WanPipeline", {f"transformer.{WAN}": [WAN]}, "lora_A lora_B"),
    "peft": ("WanPipeline", {f"base_model.model.{WAN}": [WAN]}, "lora_A.style lora_B.style"),
    "peft of a class that diffusers loads none for": (
        "PixArtSigmaPipeline", {"base_model.model.proj_out": ["proj_out"]}, "lora_A lora_B"
    ),
    "wan's authors": (
        "WanPipeline",
        {"diffusion_model.blocks.1.cross_attn.k": [WAN], "diffusion_model.blocks.0.ffn.2": ["blocks.0.ffn.net.2"]},
        "lora_down lora_up alpha",
    ),
    "kohya's wan": (
        "WanPipeline",
        {f"lora_unet_blocks_{block}_{there}": [f"blocks.{block}.{here}"]
         for block in range(2)
         for there, here in {
             **{f"{a}_{b}": f"{c}.to_{d}" for a, c in (("self_attn", "attn1"), ("cross_attn", "attn2"))
                for b, d in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out.0"))},
             "ffn_0": "ffn.net.0.proj", "ffn_2": "ffn.net.2",
         }.items()},
        "lora_down lora_up alpha",
    ),
    "kohya's flux": (
        "FluxPipeline",
        {"lora_unet_double_blocks_0_img_attn_qkv": [DOUBLE.format(f"to_{each}") for each in "qkv"],
         "lora_unet_single_blocks_0_linear2": [SINGLE.format("proj_out")]},
        "lora_down lora_up alpha",
    ),
    "xlabs' flux": (
        "FluxPipeline",
        {"double_blocks.0.processor.qkv_lora2": [DOUBLE.format(f"add_{each}_proj") for each in "qkv"],
         "double_blocks.0.processor.proj_lora1": [DOUBLE.format("to_out.0")]},
        "down up",
    ),
    "kohya's qwen": (
        "QwenImagePipeline",
        {"lora_unet_transformer_blocks_1_attn_add_k_proj": ["transformer_blocks.1.attn.add_k_proj"],
         "lora_unet_img_in": ["img_in"]},
        "lora_down lora_up alpha",
    ),
    "kohya's stable diffusion": (
        "StableDiffusionPipeline", {"lora_unet_mid_block_attentions_0_proj_in": ["mid_block.attentions.0.proj_in"]},
        "lora_down lora_up alpha",
    ),
    "early diffusers'": (
        "StableDiffusionPipeline", {"unet.mid_block.attentions.0.proj_in": ["mid_block.attentions.0.proj_in"]},
        "lora.down lora.up",
    ),
}  # fmt: skip


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.1


def denoiser_in(checkpoint: ObservedCheckpoint) -> dict[str, Tensor]:
    return dict(checkpoint.components[checkpoint.denoiser])


@pytest.fixture
def write(observe, tmp_path) -> Callable[[str], Path]:
    """``write(layout)``: a file of one of ``LAYOUTS``."""

    def written(layout: str) -> Path:
        case, names, (down, up, *alpha) = *LAYOUTS[layout][:2], LAYOUTS[layout][2].split()
        weights, tensors = denoiser_in(observe(case)), {}
        for name, layers in names.items():
            shapes = [weights[f"{layer}.weight"].shape for layer in layers]
            kernel, rows = shapes[0][2:], sum(shape[0] for shape in shapes)
            tensors[f"{name}.{down}.weight"] = drawn(RANK, *shapes[0][1:])
            tensors[f"{name}.{up}.weight"] = drawn(rows, RANK, *kernel)
            tensors |= {f"{name}.alpha": torch.tensor(ALPHA) for _ in alpha}
        save_file(tensors, tmp_path / "style.safetensors")
        return tmp_path / "style.safetensors"

    return written


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_gets_strength_times_alpha_by_rank_times_the_product(observe, write, layout):
    case, names, ends = LAYOUTS[layout]
    before = observe(case)
    old, new = denoiser_in(before), denoiser_in(with_loras(before, [(write(layout), STRENGTH, None)]))
    scale = STRENGTH * (ALPHA / RANK if "alpha" in ends else 1.0)
    expected = dict(old)
    for layers in names.values():
        shapes = [old[f"{layer}.weight"].shape for layer in layers]
        rows = [shape[0] for shape in shapes]
        down, up = drawn(RANK, *shapes[0][1:]), drawn(sum(rows), RANK, *shapes[0][2:])
        product = scale * up.flatten(1).double() @ down.flatten(1).double()
        for layer, shape, change in zip(layers, shapes, product.split(rows), strict=True):
            expected[f"{layer}.weight"] = old[f"{layer}.weight"] + change.reshape(shape)
            assert change.abs().max() > 1e-3
    for name, tensor in new.items():
        atol = 0 if expected[name] is old[name] else 1e-6
        assert torch.allclose(tensor.double(), expected[name].double(), rtol=0, atol=atol), name


def test_numbers_are_read_when_their_layer_is(observe, write, monkeypatch):
    path, read = write("xlabs' flux"), StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self: read(self) if self.shape == () else pytest.fail("read"))
    with_loras(observe("FluxPipeline"), [(path, STRENGTH, None)])


def test_files_add_up_and_come_off_also_where_another_process_opens_them(observe, write):
    plain, path = observe("WanPipeline"), write("wan's authors")
    loras = [(path, 0.5, None), (path, -0.25, "transformer")]
    made = pickle.loads(pickle.dumps(with_loras(plain, loras)))
    once = with_loras(plain, [(path, 0.25, None)])
    weights = [denoiser_in(each)[f"{WAN}.weight"] for each in (made, once, plain)]
    assert torch.allclose(*weights[:2], atol=1e-6) and not torch.equal(*weights[1:])
    assert len(adapted_in(made, "transformer")) == 2
    off = without_loras(made)
    for each in (off, pickle.loads(pickle.dumps(off))):
        assert not adapted_in(each, "transformer") and torch.equal(denoiser_in(each)[f"{WAN}.weight"], weights[2])


def test_of_two_denoisers_one_is_changed_whose_name_stands_before_the_file(observe, write):
    after = with_loras(observe(TWO), [(write("wan's authors"), STRENGTH, "transformer_2")])
    assert not adapted_in(after, "transformer") and adapted_in(after, "transformer_2")


def of_wan(**tensors: Tensor) -> Callable[[dict], dict]:
    return lambda known: known | {f"diffusion_model.{name}": each for name, each in tensors.items()}


AUTHORS = "diffusion_model.blocks.1.cross_attn.k"
REFUSED = {  # case, denoiser, what changes the file, what is said of it
    "for none of two": (TWO, None, dict, "for no denoiser, expected one of transformer, transformer_2"),
    "for another than one": ("WanPipeline", "transformer_2", dict, "for transformer_2, expected one of transformer, "),
    "of the other denoiser": (
        TWO, "transformer", lambda _: {f"transformer_2.{WAN}.lora_{end}.weight": drawn(2, 2) for end in "AB"},
        "does not fit WanPipeline, transformer .1 of 1 layers are none of this model's: transformer_2.blocks.1",
    ),
    "of another network": (
        "WanPipeline", None, lambda known: {name.replace("blocks.1", "blocks.9"): each for name, each in known.items()},
        r"does not fit WanPipeline \(1 of 2 layers are none of this model's: transformer.blocks.9.attn2.to_k",
    ),
    "of another width": (
        "WanPipeline", None, lambda known: known | {f"{AUTHORS}.lora_down.weight": drawn(RANK, 7)},
        r"have another shape: transformer.blocks.1.attn2.to_k \[\d+, 4\] by \[4, 7\]",
    ),
    "a name that nobody knows": (
        "WanPipeline", None, of_wan(**{"head.thing.lora_down.weight": drawn(2, 2)}),
        "whose names diffusers' loader of WanPipeline does not understand .*head.thing.lora_down.weight",
    ),
    "a change that diffusers leaves out": (
        "WanPipeline", None, of_wan(**{"blocks.0.norm3.diff": drawn(8)}),
        "leaves out 1 that are not zero .diffusion_model.blocks.0.norm3.diff.; expected a LoRA that it loads whole",
    ),
    "a magnitude that diffusers leaves out": (
        "FluxPipeline", None, lambda known: {"double_blocks.0.processor.proj_lora1.dora_scale": drawn(8)} | known,
        "leaves out 1 that are not zero .double_blocks.0.processor.proj_lora1.dora_scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_does_not_fit_is_refused_in_one_sentence(observe, write, case):
    pipeline, denoiser, change, message = REFUSED[case]
    path = write("xlabs' flux" if pipeline == "FluxPipeline" else "wan's authors")
    save_file(change(load_file(path)), path)
    with pytest.raises(SdQuantError, match=f"^model.loras names {re.escape(str(path))}.*{message}") as refused:
        with_loras(observe(pipeline), [(path, STRENGTH, denoiser)])
    assert "\n" not in str(refused.value)


def test_a_change_of_zero_that_diffusers_leaves_out_is_none(observe, write):
    path = write("wan's authors")
    save_file(of_wan(**{"blocks.0.norm3.diff": torch.zeros(8)})(load_file(path)), path)
    with_loras(observe("WanPipeline"), [(path, STRENGTH, None)])


def in_pefts_own(case: str, folder: Path, denoiser: str) -> Path:
    """A file that PEFT and diffusers write, of every attention and feed-forward network, with alpha in its metadata."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe = build(case)
    module = getattr(pipe, denoiser)
    layers = [name for name, each in module.named_modules() if isinstance(each, nn.Linear)]
    targets = [name for name in layers if re.search("to_|ff|attn|proj|mlp", name)]
    torch.manual_seed(0)
    module.add_adapter(LoraConfig(r=RANK, lora_alpha=3, target_modules=targets, init_lora_weights=False))
    called = "unet" if denoiser == "unet" else "transformer"
    given = {f"{called}_lora_layers": get_peft_model_state_dict(module),
             f"{called}_lora_adapter_metadata": module.peft_config["default"].to_dict()}  # fmt: skip
    known = inspect.signature(pipe.save_lora_weights).parameters
    pipe.save_lora_weights(folder, **{name: each for name, each in given.items() if name in known})
    return folder / "pytorch_lora_weights.safetensors"


OWN = ["AuraFlowPipeline", "ChromaPipeline", "HunyuanVideoPipeline", "LTXPipeline", "SanaPipeline", TWO]


@pytest.mark.consumer
@pytest.mark.filterwarnings("ignore:.*lora:UserWarning")
@pytest.mark.parametrize("written", [*(each for each in LAYOUTS if "peft" not in each), *OWN])
def test_the_weights_are_those_that_diffusers_fuses_bit_for_bit(observe, write, tmp_path, written):
    case = LAYOUTS[written][0] if written in LAYOUTS else written
    denoiser = "transformer_2" if case == TWO else observe(case).denoiser
    path = write(written) if written in LAYOUTS else in_pefts_own(case, tmp_path, denoiser)
    pipe = build(case)
    second = {"load_into_transformer_2": True} if case == TWO else {}
    pipe.load_lora_weights(path, adapter_name="style", **second)
    pipe.set_adapters(["style"], [STRENGTH])
    pipe.fuse_lora(components=[denoiser])
    pipe.unload_lora_weights()
    ours = with_loras(observe(case), [(path, STRENGTH, denoiser)]).components[denoiser]
    theirs, plain = getattr(pipe, denoiser).state_dict(), getattr(build(case), denoiser).state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert [name for name in ours if not torch.equal(ours[name], plain[name])]
