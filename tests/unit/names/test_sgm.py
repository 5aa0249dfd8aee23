"""SGM's single file: its names, marks, and what else is in such files."""

import re

import pytest
import safetensors.torch
import torch

from sd_quant.checkpoints.convert import convert
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.checkpoints.nemo_networks import sdxl_base_config
from sd_quant.checkpoints.nemo_state import betas_of, denoiser_sigmas
from sd_quant.checkpoints.single_file import open_single_file
from sd_quant.errors import ArtifactError
from sd_quant.models.sdxl_nemo import noise_config, scheduler
from sd_quant.names import nemo as nemo_keys
from sd_quant.names.sgm import nemo_key, sgm_key
from tests.networks import assert_same

pytestmark = pytest.mark.commit

POSITION_IDS = "conditioner.embedders.0.transformer.text_model.embeddings.position_ids"
SGM = "model.diffusion_model."


@pytest.fixture(scope="module")
def nemo_state(tiny_nemo) -> dict[str, torch.Tensor]:
    return {key: tensor.read() for key, tensor in open_nemo(tiny_nemo).state().items()}


@pytest.fixture
def sgm(nemo_state) -> dict[str, torch.Tensor]:
    state = {sgm_key(key): tensor.contiguous() for key, tensor in nemo_state.items() if key != nemo_keys.SIGMAS}
    return state | {POSITION_IDS: torch.arange(16)[None]}


@pytest.fixture
def written(tmp_path, sgm):
    """Writes it without what matches ``missing``, and with ``changes``."""

    def write(changes: dict | None = None, missing: str = "nothing"):
        path = tmp_path / "sd_xl_tiny.safetensors"
        state = {key: tensor for key, tensor in sgm.items() if not re.search(missing, key)} | (changes or {})
        safetensors.torch.save_file(state, path)
        return path

    return write


@pytest.mark.slow
def test_every_tensor_keeps_its_bits_and_dtype(tmp_path, written, sgm, nemo_state, tiny_config):
    half = next(key for key in sgm if "out_layers.3.weight" in key)
    brain = next(key for key in sgm if "in_proj_weight" in key)
    changes = {half: sgm[half].half(), brain: sgm[brain].bfloat16()}
    convert(written(changes), tmp_path / "a.nemo", tiny_config)
    checkpoint = open_nemo(tmp_path / "a.nemo")
    assert checkpoint.model_config == tiny_config
    expected = nemo_state | {nemo_key(key): tensor for key, tensor in changes.items()}
    expected[nemo_keys.POSITION_IDS] = torch.arange(16)[None]
    assert_same({key: tensor.read() for key, tensor in checkpoint.state().items()}, expected)


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


def refusal(path, config) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_single_file(path, config)
    return str(caught.value)


def test_another_architecture_or_a_weight_under_both_namings(written, tiny_config):
    key = "model.diffusion_model.out.1.weight"
    assert "twice" in refusal(written({key: torch.ones(4, 32, 3, 3)}), tiny_config)
    assert "misshapen" in refusal(written(), sdxl_base_config())
    assert "another kind" in refusal(written(missing="middle_block.1."), tiny_config)


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


@pytest.mark.parametrize("marks, prediction, zero", [
    ((), "epsilon", False), ((f"{SGM}v_pred",), "v_prediction", False), (("v_pred", "ztsnr"), "v_prediction", True)
])  # fmt: skip
def test_marks_are_followed_and_what_training_keeps_is_left_out(
    written, nemo_state, tmp_path, tiny_config, marks, prediction, zero
):
    path, target = written(KNOWN | dict.fromkeys(marks, MARK)), tmp_path / "a.nemo"
    checkpoint = open_single_file(path, tiny_config)
    noise = noise_config(checkpoint.model_config)
    assert (noise["prediction_type"], noise["rescale_betas_zero_snr"]) == (prediction, zero)
    assert len(checkpoint.state()) == len(nemo_state) + 1  # position_ids
    sampler = scheduler(checkpoint.model_config)
    sampler.set_timesteps(4)
    assert sampler.sigmas[0] == pytest.approx(4096 if zero else 14.6146, rel=1e-4) and sampler.timesteps[0] == 999
    if zero:
        with pytest.raises(ArtifactError, match="terminal SNR of zero"):
            convert(path, target, tiny_config)
    else:
        convert(path, target, tiny_config)
        assert noise_config(open_nemo(target).model_config)["prediction_type"] == prediction


ONLY_UNET = "is UNet only: it needs text encoders and a VAE; give a whole checkpoint"


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
    ({"edm_vpred.sigma_max": torch.tensor(-1.0), "edm_vpred.sigma_min": torch.ones(2)}, " ", "are nan and -1, ex"),
    ({f"edm_vpred.sigma_{end}": torch.tensor(1.0) for end in ("max", "min")}, " ", "are 1 and 1, expected a positive"),
    ({"betas": torch.linspace(1e-4, 0.02, 1000)}, " ", "the values of betas are not those of SDXL"),
    ({"alphas_cumprod": torch.ones(7)}, " ", "the values of alphas_cumprod are not"),
    ({"scale_factor": torch.tensor(0.18215)}, " ", "the values of scale_factor are not"),
    ({"denoiser.sigmas": torch.linspace(0.002, 80, 1000)}, " ", "not those of denoiser_config"),
])  # fmt: skip
def test_files_of_another_kind_are_named_by_what_they_are(written, tiny_config, state, missing, message):
    assert message in refusal(written(state, missing), tiny_config)
