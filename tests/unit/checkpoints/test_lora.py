"""LoRAs in the weights: against the formula, against diffusers' own fuse_lora, and every file that is refused."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.checkpoints.lora import adapted_in, factors_of, without_loras
from sd_quant.checkpoints.pipeline_folder import write_pipeline_without
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.models.checkpoint import Checkpoint, build_module
from sd_quant.names.lora import places_by_name
from sd_quant.names.sgm import sgm_names

from ..interchange.single_files import authors_state, in_diffusers
from ..tiny import tiny  # noqa: F401 a fixture

pytestmark = [pytest.mark.commit, pytest.mark.slow]

RANK, ALPHA = 4, 2.0  # a scale of 1/2, which diffusers' rescaling of Flux's factors leaves exact
Factors = dict[str, tuple[Tensor, Tensor]]  # down and up, by a layer's name


@pytest.fixture(scope="module")
def folder_of(tiny) -> Callable[[str], Path]:  # noqa: F811
    return lambda family: tiny(family).checkpoint.path


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    return {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear | nn.Conv2d)}


def drawn_factors(module: nn.Module, wanted: str) -> Factors:
    """Random factors for the layers whose names match ``wanted``, of the size that moves a weight by a tenth."""
    random = torch.Generator().manual_seed(0)
    factors = {}
    for name, layer in layers_of(module).items():
        if re.search(wanted, name):
            outs, ins, *kernel = layer.weight.shape
            down = torch.randn(RANK, ins, *kernel, generator=random) * ins**-0.5
            up = torch.randn(outs, RANK, *[1] * len(kernel), generator=random) * 0.1
            factors[name] = (down, up)
    assert factors
    return factors


def opened(folder: Path, family: str, *loras: tuple[Path, float]) -> Checkpoint:
    return open_checkpoint(folder, family, loras=loras)


def dotted(prefix: str, down: str, up: str) -> Callable[[Factors], dict[str, Tensor]]:
    """A layout that keeps the layers' names."""
    return lambda factors: {
        f"{prefix}{name}.{end}.weight": tensor.contiguous()
        for name, pair in factors.items()
        for end, tensor in zip((down, up), pair, strict=True)
    }


def kohya(prefix: str = "lora_unet_") -> Callable[[Factors], dict[str, Tensor]]:
    """Underscores for dots, and the scale of each layer in a tensor."""
    return lambda factors: {
        f"{prefix}{name.replace('.', '_')}.{end}": tensor.contiguous()
        for name, (down, up) in factors.items()
        for end, tensor in {
            "lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(ALPHA),
        }.items()
    }  # fmt: skip


def processors(factors: Factors) -> dict[str, Tensor]:
    """diffusers' layout of early 2023, of attention alone."""
    inside = {re.sub(r"(attn[12])[.](\w+)(?:[.]0)?$", "\\1.processor.\\2_lora", name): name for name in factors}
    return {
        f"unet.{name}.{end}.weight": tensor
        for name, layer in inside.items()
        for end, tensor in zip(("down", "up"), factors[layer], strict=True)
    }


def delta_of(pair: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """The formula in fp64, by sums over the rank and nothing else."""
    down, up = (tensor.double() for tensor in pair)
    return scale * torch.einsum("or,ri...->oi...", up.flatten(1), down)


PROCESSORS = "diffusers, in processors"
LAYOUTS = {
    PROCESSORS: (processors, 1.0),
    "diffusers": (dotted("unet.", "lora_A", "lora_B"), 1.0),
    "diffusers, of 2023": (dotted("unet.", "lora.down", "lora.up"), 1.0),
    "peft": (dotted("base_model.model.", "lora_A", "lora_B"), 1.0),
    "one adapter's state": (dotted("", "lora_A.default", "lora_B.default"), 1.0),
    "an adapter with a name": (dotted("base_model.model.", "lora_A.style-2", "lora_B.style-2"), 1.0),
    "lycoris": (kohya("lycoris_"), ALPHA / RANK),
    "kohya": (kohya("lora_unet_"), ALPHA / RANK),
    "comfyui": (dotted("diffusion_model.", "lora_down", "lora_up"), 1.0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_gets_strength_times_alpha_by_rank_times_the_product(folder_of, tmp_path, layout):
    folder, (written, scale) = folder_of("sd15"), LAYOUTS[layout]
    before = opened(folder, "sd15")
    unet = build_module(before, "unet")
    factors = drawn_factors(unet, r"attn\d[.]to_" if layout == PROCESSORS else "attentions|resnets|conv_")
    save_file(written(factors), tmp_path / "style.SafeTensors")
    after = build_module(opened(folder, "sd15", (tmp_path / "style.SafeTensors", 0.6)), "unet")
    for name, tensor in after.state_dict().items():
        old = unet.get_parameter(name)
        pair = factors.get(name.removesuffix(".weight"))
        expected = old if pair is None else (old.double() + delta_of(pair, 0.6 * scale)).float()
        assert torch.allclose(tensor, expected, rtol=0, atol=1e-6), name  # three fp32 roundings of weights below 2
        assert (pair is None) == torch.equal(tensor, old), name


CHECKED = {  # by family: which components, and which layers of them that diffusers can load an update for
    "sd15": {"unet": "attn|proj_|conv", "text_encoder": "self_attn|mlp"},
    "sd21": {"unet": "attn|ff", "text_encoder": "self_attn"},
    "sdxl": {"unet": "attn|ff|time_emb", "text_encoder": "self_attn", "text_encoder_2": "self_attn|mlp"},
    "sd3": {"transformer": "attn|ff", "text_encoder": "self_attn", "text_encoder_2": "self_attn"},
    "flux": {"transformer": "attn|ff|proj_mlp|proj_out|norm", "text_encoder": "self_attn"},
}


def assert_fused_alike(folder: Path, family: str, *loras: tuple[Path, float]) -> None:
    """Every network is bit for bit what diffusers' own pipeline fuses, and each file changes one at least."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    for index, (path, _) in enumerate(loras):
        pipe.load_lora_weights(path, adapter_name=f"lora{index}")
    names = [f"lora{index}" for index in range(len(loras))]
    pipe.set_adapters(names, adapter_weights=[strength for _, strength in loras])
    before, after = opened(folder, family), opened(folder, family, *loras)
    pipe.fuse_lora(components=[name for name in after.components if after.components[name].adapted])
    pipe.unload_lora_weights()
    for component in after.components:
        ours, plain = build_module(after, component).state_dict(), build_module(before, component).state_dict()
        theirs = getattr(pipe, component).state_dict()
        different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        assert not different, (component, len(different), different[:5])
        assert after.components[component].adapted == any(not torch.equal(ours[name], plain[name]) for name in ours)
    assert any(weights.adapted for weights in after.components.values())


@pytest.mark.consumer
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")  # PEFT's, of a second adapter
@pytest.mark.parametrize("family", CHECKED)
def test_two_of_diffusers_own_files_are_fused_as_diffusers_fuses_them(folder_of, tmp_path, family):
    """Written by PEFT and diffusers: their names, their metadata with alpha, one with the encoders and one without."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    folder = folder_of(family)
    for index, components in enumerate((CHECKED[family], [*CHECKED[family]][:1])):
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
        given = {}
        torch.manual_seed(index)
        for component in components:
            module = getattr(pipe, component)
            targets = [name for name in layers_of(module) if re.search(CHECKED[family][component], name)]
            config = LoraConfig(r=RANK, lora_alpha=3, target_modules=targets, init_lora_weights=False)
            module.add_adapter(config)
            key = "text_encoder_2" if component == "text_encoder_2" else component
            given[f"{key}_lora_layers"] = get_peft_model_state_dict(module)
            given[f"{key}_lora_adapter_metadata"] = module.peft_config["default"].to_dict()
        pipe.save_lora_weights(tmp_path / str(index), **given)
    files = [tmp_path / str(index) / "pytorch_lora_weights.safetensors" for index in range(2)]
    assert_fused_alike(folder, family, (files[0], 0.8), (files[1], -0.3))


@pytest.mark.consumer
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_kohyas_files_are_fused_as_diffusers_fuses_them(folder_of, tmp_path, family):
    tensors: dict[str, Tensor] = {}
    checkpoint = opened(folder_of(family), family)
    for component, wanted in CHECKED[family].items():
        module = build_module(checkpoint, component)
        factors = drawn_factors(module, wanted)
        if component == "unet" and family == "sdxl":
            names = sgm_names([f"{name}.weight" for name in layers_of(module)])
            factors = {names[f"{name}.weight"].removesuffix(".weight"): pair for name, pair in factors.items()}
        factors = {name.removeprefix("text_model."): pair for name, pair in factors.items()}
        numbers = {"text_encoder": "1" if family == "sdxl" else "", "text_encoder_2": "2"}
        tensors |= kohya(f"lora_te{numbers[component]}_text_model_" if component in numbers else "lora_unet_")(factors)
    save_file(tensors, tmp_path / "style.safetensors")
    assert_fused_alike(folder_of(family), family, (tmp_path / "style.safetensors", 0.7))


@pytest.mark.consumer
@pytest.mark.filterwarnings("ignore:Adapter 'default'. 10 LoRA tensor.s. have invalid shape")  # biases
@pytest.mark.parametrize("kind", ["use_rslora", "use_dora", "lora_bias"])
def test_a_folder_of_pefts_is_merged_as_peft_merges_it(folder_of, tmp_path, kind):
    """Ranks and scales of layers that differ."""
    from peft import LoraConfig, get_peft_model

    checkpoint = opened(folder_of("pixart"), "pixart")
    network = build_module(checkpoint, "transformer")
    config = LoraConfig(
        r=RANK, lora_alpha=6, target_modules=["to_q", "to_out.0", "linear_1"], init_lora_weights=False,
        rank_pattern={"to_q": 2}, alpha_pattern={r"transformer_blocks\.\d+.*1\.to_(q|k)": 3}, **{kind: True},
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = get_peft_model(network, config)
    for name, parameter in theirs.named_parameters():
        if "lora_magnitude" in name or name.endswith("lora_B.default.bias"):
            nn.init.normal_(parameter, mean=1, std=0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    merged = theirs.merge_and_unload().state_dict()
    ours = build_module(opened(folder_of("pixart"), "pixart", (tmp_path / "adapter", 1.0)), "transformer").state_dict()
    assert all(torch.equal(ours[name], merged[name]) for name in ours)
    before = build_module(checkpoint, "transformer").state_dict()
    assert 3 * 2 < sum(not torch.equal(ours[name], before[name]) for name in ours)


@pytest.mark.parametrize("family", ["sd15", "sd3", "flux"])
def test_every_parameter_by_its_authors_name_is_changed_as_diffusers_converts_it(folder_of, tmp_path, family):
    """Weights by factors, biases and norms by differences; of two rows that diffusers exchanges, too."""
    before = opened(folder_of(family), family)
    component = "unet" if family == "sd15" else "transformer"
    network, state, random = build_module(before, component), authors_state(before), torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for number, (key, weight) in enumerate(sorted(state.items())):
        layer, _, kind = key.rpartition(".")
        name = f"diffusion_model.{layer}" if number % 2 else f"lora_unet_{layer.replace('.', '_')}"
        if kind == "weight" and weight.ndim > 1:
            down = torch.randn(RANK, *weight.shape[1:], generator=random) * 0.05
            up = torch.randn(len(weight), RANK, generator=random)
            tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
            state[key] = (weight + delta_of((down, up), 1.0)).float()
        elif kind in ("weight", "bias"):
            tensors[f"{name}.diff{'_b' * (kind == 'bias')}"] = difference = torch.randn(len(weight), generator=random)
            state[key] = weight + difference
    save_file(tensors, tmp_path / "style.safetensors")
    after = build_module(opened(folder_of(family), family, (tmp_path / "style.safetensors", 1.0)), component)
    old, expected = network.state_dict(), in_diffusers(network, state)
    for name, found in after.state_dict().items():
        assert torch.allclose(found, expected[name], rtol=0, atol=1e-5), name
        stored_otherwise = name == "pos_embed.pos_embed" or family == "flux" and "attn.norm_" in name  # as a scale
        assert torch.equal(found, old[name]) == stored_otherwise, name


def test_encoders_by_the_numbers_of_trainers_and_the_names_of_comfyui(folder_of):
    for family, t5 in {"sd3": "text_encoder_3", "flux": "text_encoder_2", "pixart": "text_encoder"}.items():
        components = opened(folder_of(family), family).components
        names = places_by_name({name: each.parameters for name, each in components.items()})
        layer = "encoder.block.0.layer.0.SelfAttention.q"
        for name in (f"lora_te3_{layer.replace('.', '_')}", f"text_encoders.t5xxl.transformer.{layer}"):
            [[place]] = names[name]
            assert (place.component, place.layer) == (t5, layer)


NORM, CONV = "down_blocks.0.attentions.0.norm", "down_blocks.0.resnets.0.conv1"
LINEAR = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0"


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


UP, DOWN, MID = drawn(64, 2), drawn(3, 64), drawn(2, 3, 3, 3)
SIZE = drawn(64).abs() + 0.5
KINDS = {  # of LyCORIS and OneTrainer: a layer, its tensors, and what they make of its weight and bias
    "norms": (NORM, {"w_norm": SIZE, "b_norm": 2 * SIZE}, lambda w, b: (w + SIZE / 2, b + SIZE)),
    "differences": (CONV, {"diff": MID.new_ones(64, 64, 3, 3), "diff_b": SIZE}, lambda w, b: (w + 0.5, b + SIZE / 2)),
    "a linear's": (LINEAR, {"diff": drawn(64, 64)}, lambda w, b: (w + drawn(64, 64) / 2, b)),
    "with a tensor between": (
        CONV, {"lora_up.weight": UP[:, :, None, None], "lora_down.weight": DOWN[:, :, None, None],
               "lora_mid.weight": MID, "alpha": torch.tensor(1.5)},
        lambda w, b: (w + torch.einsum("ijkl,pi,jr->prkl", *(t.double() for t in (MID, UP, DOWN))) / 4, b),
    ),
    "of PEFT, with a bias": (
        LINEAR, {"lora_A.x.weight": drawn(2, 64), "lora_B.x.weight": UP, "lora_B.x.bias": SIZE},
        lambda w, b: (w + UP.double() @ drawn(2, 64).double() / 2, b + SIZE / 2),
    ),
    **{f"DoRA, {end} {list(shape)}": (
        LINEAR, {"lora_up.weight": UP, "lora_down.weight": drawn(2, 64), end: SIZE.reshape(shape)},
        lambda w, b, axis=axis: (normalize(w + UP @ drawn(2, 64) / 2, dim=axis) * SIZE.unsqueeze(axis), b),
    ) for end, shape, axis in (
        ("dora_scale", (64, 1), 1), ("dora_scale", (1, 64), 0), ("lora_magnitude_vector", (64,), 1),
    )},
    "DoRA of a convolution": (
        CONV, {"lora_up.weight": UP, "lora_down.weight": drawn(2, 64, 3, 3), "dora_scale": SIZE.reshape(64, 1, 1, 1)},
        lambda w, b: ((normalize(w.flatten(1) + UP @ drawn(2, 64, 3, 3).flatten(1) / 2, dim=1) * SIZE[:, None])
                      .reshape(w.shape), b),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_updates_by_their_formulas(folder_of, tmp_path, kind):
    layer, tensors, formula = KINDS[kind]
    name = layer if any(".x." in end for end in tensors) else f"lora_unet_{layer.replace('.', '_')}"
    save_file({f"{name}.{end}": each.contiguous() for end, each in tensors.items()}, tmp_path / "a.safetensors")
    adapted = opened(folder_of("sd15"), "sd15", (tmp_path / "a.safetensors", 0.5))
    before, after = ([each.components["unet"][f"{layer}.{part}"] for part in ("weight", "bias")]
                     for each in (opened(folder_of("sd15"), "sd15"), adapted))  # fmt: skip
    for found, wanted in zip(after, formula(*before), strict=True):
        assert torch.allclose(found.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    assert adapted_in(without_loras(adapted), "unet") == {}
    if kind != "of PEFT, with a bias":
        with pytest.raises(ConfigError, match=f"whose update of '{layer}' is a whole weight or a DoRA, expected two"):
            factors_of(adapted_in(adapted, "unet")[layer])


@pytest.fixture(scope="module")
def style_tensors(folder_of) -> dict[str, Tensor]:
    """What fits SD 1.5's UNet and its text encoder."""
    checkpoint = opened(folder_of("sd15"), "sd15")
    unet = drawn_factors(build_module(checkpoint, "unet"), "attn1.to_")
    text = drawn_factors(build_module(checkpoint, "text_encoder"), "q_proj")
    return dotted("unet.", "lora_A", "lora_B")(unet) | dotted("text_encoder.", "lora_A", "lora_B")(text)


@pytest.fixture
def style(style_tensors, tmp_path) -> Path:
    save_file(style_tensors, tmp_path / "style.safetensors")
    return tmp_path / "style.safetensors"


@pytest.fixture
def sd15(folder_of) -> Callable[..., Checkpoint]:
    return lambda *loras: opened(folder_of("sd15"), "sd15", *loras)


def test_files_add_up_also_where_another_process_opens_them(sd15, style):
    checkpoints = [sd15(*[(style, 0.5)] * count) for count in range(3)]
    plain, once, twice = (checkpoint.components["unet"][f"{ODD}.weight"] for checkpoint in checkpoints)
    assert torch.allclose(twice - once, once - plain, atol=1e-6) and not torch.equal(once, plain)
    again = pickle.loads(pickle.dumps(checkpoints[2]))
    assert torch.equal(again.components["unet"][f"{ODD}.weight"], twice)


def test_a_pipelines_folder_gets_the_changed_weights_and_copies_of_the_others(folder_of, sd15, style, tmp_path):
    checkpoint, out, vae = sd15((style, 0.5)), tmp_path / "out", "vae/diffusion_pytorch_model.safetensors"
    write_pipeline_without(checkpoint, ["unet"], out)
    assert not list((out / "unet").glob("*.safetensors"))
    again = transformers.CLIPTextModel.from_pretrained(out / "text_encoder").state_dict()
    assert all(torch.equal(again[name], tensor)
               for name, tensor in build_module(checkpoint, "text_encoder").state_dict().items())  # fmt: skip
    assert (out / vae).read_bytes() == (folder_of("sd15") / vae).read_bytes()


def test_no_weight_is_read_when_it_is_opened(sd15, style, monkeypatch):
    monkeypatch.setattr("sd_quant.files.tensors.StoredTensor.read", lambda self: pytest.fail("a tensor was read"))
    sd15((style, 0.5))


def changed(style: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **metadata: str) -> Path:
    save_file(change(load_file(style)), style, metadata=metadata)
    return style


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


ODD = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
HALVES = [f"unet.{ODD}.lora_A.weight", f"unet.{ODD}.lora_B.weight"]
DAMAGED = {  # by fault: further tensors, or a change of all, and the words of the refusal
    "partly of another network": (renamed("down_blocks.0", "down_blocks.7"), "4 of 18 layers are none of this model's"),
    "a half is missing": (renamed(HALVES[1], "x.lora_B.weight"), f"2 layers lack a half: unet.{ODD}"),
    "of another width": (
        {HALVES[0]: torch.zeros(RANK, 63)},
        r"1 of 18 layers have another shape: unet.* \[64, 4\] by \[4, 63\] for a weight of \[64, 64\] without",
    ),
    "a DoRA of other columns": ({f"unet.{ODD}.dora_scale": torch.ones(1, 63)}, "1 of 18 layers have another shape"),
    "a bias that the layer has not": ({f"unet.{ODD}.diff_b": torch.ones(64)}, r"by \[64\] by .* of .* without bias"),
    "a half of a bias": (lambda _: {f"unet.{ODD}.lora_B.bias": torch.ones(64)}, "1 layers lack a half"),
    **{f"a {kind}": (
        lambda _, end=end: {f"lora_unet_a.{end}": torch.ones(2, 2), "lora_unet_a.alpha": torch.ones(())},
        rf"\(1 tensors are of {re.escape(kind)}, which is not read: lora_unet_a",
    ) for kind, end in {
        "LoHa": "hada_w1_a", "LoKr": "lokr_w2", "OFT": "oft_blocks", "GLoRA": "a1.weight", "(IA)^3": "on_input",
    }.items()},
    "nothing of a LoRA": (lambda _: {"weight": torch.ones(3)}, "1 tensors are no part of a LoRA: weight"),
    "an encoder that is not there": (renamed("text_encoder.", "text_encoder_2."), "2 of 18 layers are none.*encoder_2"),
    "an alpha of several numbers": ({f"unet.{ODD}.alpha": torch.ones(2)}, "expected .* one for an alpha"),
    "codes": ({HALVES[0]: torch.zeros(RANK, 64, dtype=torch.int8)}, "is .* in torch.int8, expected numbers in float32"),
    "a layer twice": (
        {f"{ODD}.lora_A.weight": torch.zeros(1, 64), f"{ODD}.lora_B.weight": torch.zeros(64, 1)},
        "two updates of .*under two names",
    ),
    "a rank of none": (
        dict(zip(HALVES, (torch.zeros(0, 64), torch.zeros(64, 0)), strict=True)), "1 of 18 layers have another shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_file_that_does_not_fit_is_refused_with_names_and_counts(sd15, style, fault):
    change, expected = DAMAGED[fault]
    edit = change if callable(change) else lambda tensors: tensors | change
    with pytest.raises((ArtifactError, ConfigError), match=expected):
        sd15((changed(style, edit), 1.0))


def test_a_lora_of_another_family_is_refused_with_what_it_says_of_itself(folder_of, style):
    changed(style, dict, **{"modelspec.architecture": "stable-diffusion-v1/lora"})
    with pytest.raises(ConfigError, match="does not fit sdxl .* for stable-diffusion-v1/lora"):
        opened(folder_of("sdxl"), "sdxl", (style, 1.0))
    with pytest.raises(ConfigError, match="18 of 18 layers are none of this model's"):
        opened(folder_of("flux"), "flux", (changed(style, renamed("text_encoder.", "unet.")), 1.0))


CONFIG = "lora_adapter_metadata"
ALPHA_8 = '{"unet.lora_alpha": 8, '


@pytest.mark.parametrize(
    ("entry", "value", "expected"),
    [
        (CONFIG, "[1]", "is no object of JSON"),
        (CONFIG, "{", "is no object of JSON"),
        (CONFIG, '{"unet.lora_alpha": "8"}', "lora_alpha is '8', expected a number"),
        (CONFIG, '{"unet.r": 4}', "lora_alpha is missing"),
        (CONFIG, ALPHA_8 + '"unet.use_dora": true}', "use_dora in its config and no magnitudes of 'down_blocks"),
        (CONFIG, ALPHA_8 + '"unet.init_lora_weights": "pissa"}', "init_lora_weights='pissa'.*more than a LoRA"),
        (CONFIG, ALPHA_8 + '"unet.peft_type": "LOHA", "unet.r": 4}', r"has peft_type='LOHA', which"),
        (CONFIG, ALPHA_8 + '"unet.alpha_pattern": {"(a+)+b": 1}}', r"config has \(a\+\)\+b, which"),
        (CONFIG, ALPHA_8 + '"unet.alpha_pattern": {"(a": 1}}', "a pattern in its config that is none"),
        (CONFIG, ALPHA_8 + '"unet.alpha_pattern": {"to_q": []}}', "alpha_pattern.to_q is"),
        ("ss_base_model_version", "sd_v2_v", "1 entries of metadata say that it is not for sd15: sd_v2_v; it says"),
        ("modelspec.architecture", "stable-diffusion-xl-v1-base/lora", "not for sd15: stable-diffusion-xl-v1-base"),
        ("network_alpha", "8", "1 entries of metadata give a scale, which diffusers would not read: network_alpha=8"),
    ],
)
def test_metadata_that_are_damaged_or_say_something_else_are_refused(sd15, style, entry, value, expected):
    with pytest.raises((ArtifactError, ConfigError), match=expected):
        sd15((changed(style, dict, **{entry: value}), 1.0))


def test_other_metadata_are_without_effect(sd15, style):
    """kohya's alpha is folded into the factors where no tensor has it."""
    plain = sd15((style, 1.0)).components["unet"][f"{ODD}.weight"]
    patterns = {r"^down_blocks\.0.*to_(q|k)": RANK**0.5}
    same = {"unet.lora_alpha": 8, "unet.use_rslora": True, "unet.alpha_pattern": patterns}
    for metadata in (
        {"modelspec.architecture": "stable-diffusion-v1/lora", "ss_network_alpha": "8", "ss_v2": "False"},
        {"ss_base_model_version": "my_merge"},
        {CONFIG: json.dumps(same)},
    ):
        found = sd15((changed(style, dict, **metadata), 1.0)).components["unet"][f"{ODD}.weight"]
        assert torch.allclose(found, plain, rtol=0, atol=1e-6)


def test_the_words_of_bundled_embeddings_are_named(sd15, style, caplog):
    plain = sd15((style, 1.0)).components["unet"][f"{ODD}.weight"]
    words = {"bundle_emb.my.word.clip_l": torch.ones(2, 64), "bundle_emb.*other.string_to_param.*": torch.ones(1, 64)}
    again = sd15((changed(style, lambda tensors: tensors | words), 1.0)).components["unet"][f"{ODD}.weight"]
    assert "embeddings of words too, which no prompt gets: *other, my.word" in caplog.text and torch.equal(plain, again)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("style.pt", b"PK", r"style.pt, expected a .safetensors file, because other files would have to"),
        ("empty", None, "a folder without adapter_model.safetensors or pytorch_lora_weights.safetens"),
        ("cut.safetensors", b"12", "cut.safetensors"),
    ],
)
def test_other_files(sd15, tmp_path, name, content, expected):
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises((ArtifactError, ConfigError), match=expected):
        sd15((path, 1.0))


def test_what_is_not_finite_is_refused_when_it_is_read(sd15, style):
    for value in (float("nan"), 3e38):
        changed(style, lambda tensors, value=value: {name: torch.full_like(tensors[name], value) for name in tensors})
        checkpoint = sd15((style, 1.0))
        with pytest.raises(ArtifactError, match="style.safetensors: what it adds to 'down_blocks.* is not finite"):
            checkpoint.components["unet"][f"{ODD}.weight"]
