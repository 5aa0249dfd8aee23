"""Every entry of NeMo's own SDXL configs decides what is computed, or is refused, or is known to decide no image."""

import copy
import re
from collections import Counter

import pytest
import torch
import yaml

from sd_quant.checkpoints.nemo_entries import NO_EFFECT, check_entries, leaves, needed_entries, reason
from sd_quant.checkpoints.nemo_networks import described_networks, read_config, sdxl_base_config
from sd_quant.checkpoints.synthetic import CLIP_L, OPEN_CLIP_BIGG
from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.models.sdxl_nemo import noise_config, scheduler, unet_config, vae_config, with_noise

from ..models.nemo_unet import ddpm_sigmas, nemo_euler

pytestmark = pytest.mark.commit

BASE = sdxl_base_config()

# What sd_xl_base_train, sd_xl_infer_v2 and the two other training configs of NeMo 2.0 have beside SDXL base's entries.
OF_NEMO = """
{name: a, trainer: {devices: 1, precision: 32, max_steps: 1}, exp_manager: {exp_dir: a, ema: {enable: false}},
infer: {num_samples_per_batch: 1, num_samples: 4, prompt: [a], negative_prompt: "", seed: 123}, use_refiner: false,
sampling: {base: {sampler: EulerEDMSampler, width: 512, height: 512, steps: 50,
  discretization: LegacyDDPMDiscretization,
  guider: VanillaCFG, thresholder: "None", scale: 5.0, img2img_strength: 1.0, sigma_min: 0.0292, sigma_max: 14.6146,
  rho: 3.0, s_churn: 0.0, s_tmin: 0.0, s_tmax: 999.0, s_noise: 1.0, eta: 1.0, order: 4, orig_width: 512,
  orig_height: 512, crop_coords_top: 0, crop_coords_left: 0, aesthetic_score: 5.0, negative_aesthetic_score: 5.0}},
use_fp16: false, out_path: a, base_model_config: a, refiner_config: a,
model: {micro_batch_size: 1, global_batch_size: 1, nemo_version: 2.0.0, inductor: false, capture_cudagraph_iters: -1,
  scale_by_std: false, channels_last: false, fsdp: true, fsdp_set_buffer_dtype: a, fsdp_sharding_strategy: full,
  use_cpu_initialization: true, precache_mode: a, input_key: images, restore_from_path: a, ckpt_path: a, seed: 1234,
  loss_fn_config: {_target_: a, sigma_sampler: {_target_: b, num_idx: 1000, discretization: {_target_: c}}},
  data: {num_workers: 16, train: {dataset_path: [a], augmentations: {horizontal_flip: false}, filterings: a}},
  resume_from_checkpoint: a, apex_transformer_log_level: 30, gradient_as_bucket_view: true, nsys_profile: {ranks: [0]},
  optim: {name: a, lr: 1.0e-4, betas: [0.9, 0.999], sched: {name: a}}, peft: {peft_scheme: a, lora_tuning: {dim: 32}},
  unet_config: {from_pretrained: a, from_NeMo: true, use_checkpoint: false, spatial_transformer_attn_type: softmax},
  denoiser_config: {discretization_config: {linear_start: 0.00085, linear_end: 0.012, num_timesteps: 1000}},
  first_stage_config: {from_pretrained: a, from_NeMo: true, monitor: val/rec_loss},
  conditioner_config: {emb_models: [{ucg_rate: 1}, {ucg_rate: 1}, {ucg_rate: 1}, {ucg_rate: 1}, {ucg_rate: 1}]}}}
"""


def merged(one: object, other: object) -> object:
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {name: merged(one[name], each) if name in one else each for name, each in other.items()}
    return [merged(*pair) for pair in zip(one, other, strict=True)] if isinstance(one, list) else other


def having(config: dict, name: str, value: object) -> dict:
    """A copy with another value, or a further entry."""
    config = copy.deepcopy(config)
    *groups, last = name.split(".")
    section = config
    for each in groups:
        section = section[int(each) if isinstance(section, list) else each]
    section[last] = value
    return config


def other_than(value: object) -> object:
    if isinstance(value, bool):
        return not value
    return [*value, 1] if isinstance(value, list) else value * 2 + 1 if isinstance(value, int | float) else f"{value}x"


def computed(config: dict) -> tuple:
    return unet_config(config), vae_config(config), noise_config(config)


def checked(document: dict) -> dict:
    config = document["model"]
    check_entries("it", {name: each for name, each in document.items() if name != "model"}, {})
    check_entries("it", config, needed_entries(config, BASE, CLIP_L))
    return config


def test_every_entry_of_nemos_own_configs(tmp_path):
    whole = merged({"model": BASE}, yaml.safe_load(OF_NEMO))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(whole))
    before, found = computed(checked({"model": read_config(whole_file(tmp_path / "config.yaml"))})), Counter()
    (tmp_path / "config.yaml").write_text("{use_refiner: true, model: {}}")
    with pytest.raises(ArtifactError, match="use_refiner is True, expected False"):
        read_config(whole_file(tmp_path / "config.yaml"))
    for place, value in leaves(whole):
        name, changed = place.removeprefix("model."), having(whole, place, other_than(value))
        if (why := reason(name)) is None:
            with pytest.raises(ArtifactError, match=re.escape(f"{name} is ")):
                checked(changed)
            why = "refused"
        elif why == "is read":
            assert computed(changed["model"]) != before, name
        else:
            assert computed(checked(changed)) == before, name
        found[why] += 1
    print(dict(found))
    assert found.keys() == {"is read", "refused", *NO_EFFECT} and sum(found.values()) > 130


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("denoiser_config._target_", "sgm.modules.Denoiser", "expected DiscreteDenoiser"),
        ("denoiser_config.scaling_config._target_", "sgm.modules.EDMScaling", "expected EpsScaling or VScaling"),
        ("denoiser_config.scaling_config.sigma_data", 0.5, "sigma_data is 0.5, expected no entry of that name"),
        ("denoiser_config.num_idx", 500, "expected 1000"),
        ("first_stage_config.latents_mean", [0.1] * 4, "latents_mean is [0.1"),
        ("unet_config.disable_self_attentions", [True, False, False], "expected no entry"),
        ("conditioner_config.emb_models.0.emb_model.layer_idx", 10, "expected 11 or -2"),
        ("conditioner_config.emb_models.1.emb_model.arch", "ViT-bigG-14-quickgelu", "expected ViT-*-14"),
        ("conditioner_config.emb_models.0.emb_model", {"layer": "hidden"}, "_target_ is 'missing', expected Frozen"),
        ("sampler_config", {"num_steps": 50}, "sampler_config.num_steps is 50, expected no entry"),
        ("scale_by_std", 0, "scale_by_std is 0, expected False"),
    ],
)  # fmt: skip
def test_what_is_not_computed_with_is_refused_by_name_and_value(name, value, message):
    with pytest.raises(ArtifactError, match=re.escape(message)):
        checked({"model": having(BASE, name, value)})


NOISE, NO_SDXL = "denoiser_config.discretization_config", "does not describe an SDXL"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((NOISE, each, "discretization_config") for each in (
            {"linear_end": 0.9}, {"linear_start": "x"}, {"num_timesteps": 1.5}, [],
        )),
        ("unet_config.num_res_blocks", 10**9, NO_SDXL), ("unet_config.channel_mult", [1] * 1000, NO_SDXL),
        ("first_stage_config.ddconfig", None, NO_SDXL), ("conditioner_config.emb_models", [], NO_SDXL),
    ],
)  # fmt: skip
def test_networks_and_noise_without_end_are_refused(tmp_path, name, value, said):
    with pytest.raises(ArtifactError, match=said):
        described_networks(tmp_path, having(BASE, name, value), CLIP_L, OPEN_CLIP_BIGG)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("betas", [(0.00085, 0.012, 1000), (1e-4, 0.02, 1000), (0.001, 0.02, 400)])
def test_steps_are_nemos(prediction, betas):
    names = ("beta_start", "beta_end", "num_train_timesteps")
    noise = dict(zip(names, betas, strict=True)) | {"prediction_type": prediction}
    config = with_noise(BASE, noise)
    assert noise.items() <= noise_config(config).items() and noise.items() <= scheduler(config).config.items()

    def network(x, times, *_):
        return torch.sin(3 * x) + times.view(-1, 1, 1, 1) / 1000

    start, none = torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 77, 8)
    sizes = ((8, 8), (0, 0), (8, 8))
    expected = nemo_euler(network, start, none, none[:, 0], sizes, 8, 7, 1.0, ddpm_sigmas(*betas), prediction[0] == "v")

    sampler = scheduler(config)
    sampler.set_timesteps(7)
    x = start * sampler.init_noise_sigma
    for step, time in enumerate(sampler.timesteps):
        predicted = network(sampler.scale_model_input(x, time), time)
        x = sampler.step(predicted, time, x, return_dict=False)[0]
        torch.testing.assert_close(x, expected[:, step], rtol=2e-4, atol=2e-4)
