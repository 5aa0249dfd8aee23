"""Stability AI's single file: what convert writes is what diffusers reads, and images of it are diffusers' own."""

import inspect
import json
import pickle
import re
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
from diffusers.loaders import single_file_utils

from sd_quant.checkpoints.convert import convert, open_sdxl
from sd_quant.checkpoints.kinds import open_checkpoint
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.nemo_networks import betas_of, denoiser_sigmas, sdxl_base_config
from sd_quant.checkpoints.single_file import DESCRIPTION, open_single_file
from sd_quant.errors import ArtifactError
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.sdxl_nemo import noise_config, scheduler, with_noise
from sd_quant.names.nemo import POSITION_IDS
from sd_quant.places import HOME
from tests.networks import assert_same

pytestmark = pytest.mark.slow
commit = pytest.mark.commit
SDXL_BASE = {  # scheduler/scheduler_config.json of stabilityai/stable-diffusion-xl-base-1.0
    "beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": False,
    "interpolation_type": "linear", "num_train_timesteps": 1000, "prediction_type": "epsilon", "sample_max_value": 1.0,
    "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1, "timestep_spacing": "leading",
    "trained_betas": None, "use_karras_sigmas": False,
}  # fmt: skip


def read(path) -> dict[str, torch.Tensor]:
    return {key: tensor.read() for key, tensor in open_sdxl(path).state().items()}


def opened(path, **knobs):
    return open_checkpoint(path, "sdxl", **knobs)


@pytest.fixture(scope="module")
def single(tiny_nemo, tmp_path_factory):
    path = tmp_path_factory.mktemp("single") / "tiny.safetensors"
    convert(tiny_nemo, path)
    return path


@pytest.fixture
def marked(single, tmp_path):
    """Writes the file with further tensors and entries of metadata, without names that match ``missing``."""

    def write(tensors, missing: str = " ", **metadata):
        with safetensors.safe_open(single, "pt") as file:
            metadata = file.metadata() | metadata
        kept = {
            name: each for name, each in safetensors.torch.load_file(single).items() if not re.search(missing, name)
        }
        safetensors.torch.save_file(kept | tensors, tmp_path / "a.safetensors", metadata)
        return tmp_path / "a.safetensors"

    return write


@commit
def test_it_is_read_back_bit_for_bit_and_by_diffusers_converters(single, tiny_nemo, tiny_modules, tmp_path):
    assert_same(read(single), read(tiny_nemo) | {POSITION_IDS: torch.arange(16)[None]})
    assert open_single_file(single).model_config == open_nemo(tiny_nemo).model_config
    stored = safetensors.torch.load_file(single)
    configs = {name: dict(tiny_modules[name].config) for name in ("unet", "vae")}
    unet = single_file_utils.convert_ldm_unet_checkpoint(dict(stored), configs["unet"])
    assert_same(unet, tiny_modules["unet"].state_dict())
    vae = single_file_utils.convert_ldm_vae_checkpoint(dict(stored), configs["vae"])
    assert_same(vae, tiny_modules["vae"].state_dict())


@commit
@pytest.mark.parametrize("entries, marks", [
    ({"prediction_type": "v_prediction"}, {"v_pred"}),
    ({"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}, {"v_pred", "ztsnr"}),
    ({"rescale_betas_zero_snr": True}, "a terminal SNR of zero without v-prediction, which no single file can state"),
    ({"beta_end": 0.02}, "beta_end 0.02, which no single file can state; give a folder"),
])  # fmt: skip
def test_the_noise_is_written_as_marks_or_refused(single, tmp_path, entries, marks):
    folder, target = tmp_path / "folder", tmp_path / "a.safetensors"
    convert(single, folder)
    for path in (folder / "nemo").iterdir():
        path.unlink()
    scheduler = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler | entries))
    if isinstance(marks, str):
        with pytest.raises(ArtifactError, match=marks):
            convert(folder, target)
        return
    convert(folder, target)
    stored = safetensors.torch.load_file(target)
    assert stored.keys() - safetensors.torch.load_file(single).keys() == marks
    assert entries.items() <= noise_config(open_single_file(target).model_config).items()


@commit
def test_weights_in_fp16_where_these_hold_them(single, marked, tmp_path):
    convert(single, tmp_path / "half.safetensors", fp16=True)
    whole, half = read(single), read(tmp_path / "half.safetensors")
    assert_same(half, {key: tensor.half() if ".model.logit" not in key and tensor.is_floating_point() and
                       "sigmas" not in key else tensor for key, tensor in whole.items()})  # fmt: skip
    name = "model.diffusion_model.out.2.bias"
    with pytest.raises(ArtifactError, match="numbers beyond 65504, the largest of fp16; convert it without --fp16"):
        convert(marked({name: torch.full((4,), 1e5)}), tmp_path / "too_large.safetensors", fp16=True)


@commit
def test_it_has_77_tokens_and_its_own_sampler_unless_nemos_are_asked_for(single, tiny_nemo, tiny_modules):
    checkpoint = opened(single)
    for each in (checkpoint, pickle.loads(pickle.dumps(checkpoint))):
        assert each.parts()["unet_xl"].contract.inputs["encoder_hidden_states"][1] == 77
        assert each.parts()["clip1"].contract.outputs == ("z",)
        assert_same(dict(each.components["unet"]), tiny_modules["unet"].state_dict())
        call = each.called(lambda component, network: network)
        assert type(call.pipe.scheduler) is EulerDiscreteScheduler
        expected = EulerDiscreteScheduler.from_config(SDXL_BASE).config
        known = inspect.signature(EulerDiscreteScheduler).parameters  # the others are of other schedulers
        assert {name: call.pipe.scheduler.config[name] for name in known} == {name: expected[name] for name in known}
    for path, pipeline, context in ((single, "nemo", 80), (tiny_nemo, None, 80), (tiny_nemo, "diffusers", 77)):
        made = opened(path, pipeline=pipeline)
        assert made.parts()["unet_xl"].contract.inputs["context"][1] == context
        sampler = made.called(lambda component, network: network).pipe.scheduler
        assert sampler.config.timestep_spacing == {77: "leading", 80: "trailing"}[context]


@commit
@commit
def test_a_description_in_metadata_is_untrusted(marked):
    mute = json.dumps(sdxl_base_config() | {"denoiser_config": {}})
    texts = {"[": "is not plain YAML", "7": "holds a int", "{}": "does not describe an SDXL", mute: "does not say what"}
    prediction = "modelspec.prediction_type"
    for entry, text, said in (
        *((DESCRIPTION, *row) for row in texts.items()),
        (prediction, "rf", f"{prediction} in its metadata is 'rf', expected epsilon"),
    ):
        with pytest.raises(ArtifactError, match=said):
            open_single_file(marked({}, **{entry: text}))


SGM = "model.diffusion_model."
ALPHAS = 1 / (1 + denoiser_sigmas({}) ** 2)
MARK = torch.empty(0)
KNOWN = {  # beside the networks, in merges and in what trainers save
    "betas": betas_of({}), "alphas_cumprod": ALPHAS.half(), "denoiser.sigmas": denoiser_sigmas({}).bfloat16(),
    "scale_factor": torch.tensor(0.13025), "conditioner.embedders.0.logit_scale": torch.tensor(4.6),
    "conditioner.embedders.0.transformer.text_projection.weight": torch.eye(64), "global_step": torch.tensor(7),
    "model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(7), "model_ema.outbias": torch.ones(3),
    **{name: torch.ones(1000) for name in ("alphas_cumprod_prev", "sqrt_alphas_cumprod", "logvar")},
    "first_stage_model.loss.logvar": torch.tensor(0.0), "loss_fn.weight": torch.ones(2),
}  # fmt: skip


@commit
@pytest.mark.parametrize("marks, said, prediction, zero", [  # marks go before what metadata say
    ((), "epsilon", "epsilon", False), ((f"{SGM}v_pred",), "epsilon", "v_prediction", False),
    ((), "v", "v_prediction", False), (("v_pred", "ztsnr"), None, "v_prediction", True),
])  # fmt: skip
def test_marks_and_metadata_are_followed_and_what_training_keeps_is_left_out(
    marked, single, tmp_path, marks, said, prediction, zero
):
    stated = {"modelspec.prediction_type": said} if said else {}
    path, target = marked(KNOWN | dict.fromkeys(marks, MARK), **stated), tmp_path / "a.nemo"
    checkpoint = open_single_file(path)
    noise = noise_config(checkpoint.model_config)
    assert (noise["prediction_type"], noise["rescale_betas_zero_snr"]) == (prediction, zero)
    assert checkpoint.state().keys() == open_single_file(single).state().keys()
    sampler = scheduler(checkpoint.model_config)
    sampler.set_timesteps(4)
    assert sampler.sigmas[0] == pytest.approx(4096 if zero else 14.6146, rel=1e-4) and sampler.timesteps[0] == 999
    if zero:
        with pytest.raises(ArtifactError, match="terminal SNR of zero"):
            convert(path, target)
    else:
        convert(path, target)
        assert noise_config(open_nemo(target).model_config)["prediction_type"] == prediction


@commit
def test_another_architecture_than_the_config_describes_is_refused(single):
    with pytest.raises(ArtifactError, match="misshapen"):
        open_single_file(single, sdxl_base_config())


ONLY_UNET = "is UNet only: it needs text encoders and a VAE; give a whole checkpoint"


@commit
@pytest.mark.parametrize("state, missing, message", [
    ({}, "e_model.|conditioner", ONLY_UNET),
    ({"down_blocks.0.resnets.0.conv1.weight": MARK, "add_embedding.linear_1.weight": MARK}, ".", ONLY_UNET),
    ({"input_blocks.0.0.weight": MARK, "label_emb.0.0.weight": MARK}, ".", ONLY_UNET),
    ({}, "first_stage_model", "is no whole SDXL: none of its tensors begins with first_stage_model.;"),
    ({"lora_unet_input_blocks.lora_up.weight": MARK}, ".", "is no whole SDXL"),
    ({f"{SGM}input_blocks.0.0.weight": torch.zeros(32, 9, 3, 3)}, " ", "is an inpainting UNet, with 9 input channels"),
    ({f"{SGM}input_blocks.0.0.weight": MARK, f"{SGM}output_blocks.0": MARK}, ".", "is a Stable Diffusion 1 or 2"),
    ({f"{SGM}joint_blocks.0.x": MARK}, ".", "is a Stable Diffusion 3 transformer, expected SDXL"),
    ({"double_blocks.0.x": MARK, "single_blocks.0.x": MARK}, ".", "is a Flux transformer, expected SDXL"),
    ({"edm_mean": torch.zeros(1, 4, 1, 1)}, " ", "has the mark edm_mean, which is not followed"),
    ({"edm_vpred.sigma_max": torch.tensor(120.0)}, " ", "has the mark edm_vpred.sigma_max, "),
    ({"ztsnr": MARK}, " ", "has the mark ztsnr, which"),
    ({"__index_timestep_zero__": MARK}, " ", "1 unknown: __index_timestep_zero__"),
    ({"cond_stage_model.model.ln_final.bias": MARK}, " ", "text encoder of Stable Diffusion 1 or 2, which"),
    ({"lora_unet_out.lora_up.weight": MARK}, " ", "lora_* are a LoRA, so give it to model.loras"),
    ({"betas": torch.linspace(1e-4, 0.02, 1000)}, " ", "the values of betas are not those of SDXL"),
    ({"alphas_cumprod": torch.ones(7)}, " ", "the values of alphas_cumprod are not"),
    ({"scale_factor": torch.tensor(0.18215)}, " ", "the values of scale_factor are not"),
    ({"denoiser.sigmas": torch.linspace(0.002, 80, 1000)}, " ", "not those of denoiser_config"),
    ({f"{SGM}out.1.weight": torch.ones(4, 32, 3, 3)}, " ", "twice"),
    ({}, "middle_block.1.", "another kind"),
])  # fmt: skip
def test_files_of_another_kind_are_named_by_what_they_are(marked, state, missing, message):
    with pytest.raises(ArtifactError) as refusal:
        open_single_file(marked(state, missing))
    assert message in str(refusal.value)


@pytest.mark.nightly
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_images_are_those_of_diffusers_from_single_file(tmp_path, prediction, monkeypatch):
    """With the configs of a local folder in place of a hub's."""
    path, folder, prompts = tmp_path / "mini.safetensors", tmp_path / "folder", ["a glossy icon of a rocket", "a lamp"]
    nemo = open_nemo(HOME / "checkpoints/sdxl_mini.nemo")
    config = with_noise(nemo.model_config, noise_config(nemo.model_config) | {"prediction_type": prediction})
    monkeypatch.setattr("sd_quant.checkpoints.convert.open_nemo", lambda path: replace(nemo, model_config=config))
    convert(HOME / "checkpoints/sdxl_mini.nemo", path)
    convert(path, folder)
    entries = SDXL_BASE | {"prediction_type": prediction}
    EulerDiscreteScheduler.from_config(entries).save_pretrained(folder / "scheduler")
    pipe = StableDiffusionXLPipeline.from_single_file(
        str(path), config=str(folder), local_files_only=True, torch_dtype=torch.float32
    )
    checkpoint = opened(path)
    for negative in (None, ["blurry"] * 2):
        sampling = Sampling(4, 5.0, 64, 64, 2, 7, negative_prompts=negative)
        made = pipeline_of(checkpoint, load_model(checkpoint).torch_engines())(prompts, sampling)
        theirs = pipe(
            prompts, negative_prompt=negative, num_inference_steps=4, guidance_scale=5.0, height=64, width=64,
            generator=[torch.Generator().manual_seed(seed) for seed in (7, 8)], output_type="np",
        ).images  # fmt: skip
        for ours, their in zip(made.images, theirs, strict=True):
            assert (torch.as_tensor(ours) - (255 * torch.as_tensor(their)).round()).abs().max() == 0
