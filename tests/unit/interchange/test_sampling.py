"""How a checkpoint samples is in a file as ComfyUI tells models by, or in the README; judge compares such marks."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import diffusers
import pytest

from sd_quant.checkpoints.diffusers_network import defaults_of
from sd_quant.errors import ArtifactError
from sd_quant.files.archive import whole_file
from sd_quant.files.safetensors import read_header
from sd_quant.interchange import TARGETS, gguf
from sd_quant.interchange.sampling import (
    LATENTS,
    PLAYGROUND,
    Sampled,
    check_marks,
    for_files,
    for_folders,
    written_marks,
)
from sd_quant.names.authors import PREFIX
from sd_quant.stages.target_folder import write_folder
from sd_quant.stages.targets import sampled
from sd_quant.stages.third_party import third_party

pytestmark = pytest.mark.commit

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
V, ZERO = SD | {"prediction_type": "v_prediction"}, {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
COSXL = {"sigma_max": 120.0, "sigma_data": 1.0, "prediction_type": "v_prediction", "sigma_schedule": "exponential"}
EULER, FLOW, DEV = "EulerDiscrete", "FlowMatchEulerDiscrete", {"guidance_embeds": True}
UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
DYNAMIC = {"use_dynamic_shifting": True}
# family, scheduler, its config, configs of networks; tensors in SDXL's file; words of each sentence but the first
CASES = [
    ("sdxl", EULER, SD | {"timestep_spacing": "leading"}, {}, "", []),
    ("sdxl", EULER, V, {}, "v_pred", ["tensors v_pred how", "stable-diffusion.cpp: `--prediction v`."]),
    ("sdxl", EULER, V | ZERO, {}, "v_pred ztsnr", ["v_pred and ztsnr how", "`--prediction v`; it has no zero"]),
    ("sdxl", EULER, SD | ZERO, {}, "", ["Discrete with eps, zsnr true.", "no zero terminal"]),
    ("sd15", "DDIM", V, {}, "", ["Discrete with v_prediction, zsnr false.", "`--prediction v`."]),
    ("sd21", "PNDM", SD, {}, "", ["Discrete with eps, zsnr false: ComfyUI guesses"]),
    ("sdxl", "DDPM", {"prediction_type": "sample"}, {}, "", ["with x0, zsnr", "no sample.", "levels than"]),
    ("sdxl", FLOW, {"shift": 2.5}, {}, "", ["SD3 with shift 2.5.", "`--prediction sd3_flow --flow-shift 2.5`."]),
    ("sdxl", "UniPCMultistep", UNIPC, {}, "", ["SD3 with shift 3.", "`--prediction sd3_flow --flow-shift 3`."]),
    ("sd3", FLOW, {"shift": 3.0}, {}, "", []),
    ("sd3", FLOW, DYNAMIC, {}, "", ["SD3 with shift 3.158, that of", ": `--flow-shift 3.158`."]),
    ("flux", FLOW, {}, {}, "", [": `--flow-shift 0`."]),
    ("flux", FLOW, {"shift": 3.0}, DEV, "", ["AuraFlow with shift 3.", ": `--flow-shift 1.099`."]),
    ("flux", FLOW, DYNAMIC, DEV, "", ["ModelSamplingFlux with max_shift 1.15, base_shift 0.5 and"]),
    ("sdxl", "EDMEuler", {}, PLAYGROUND, "edm_mean edm_std", ["edm_mean and edm_std how", "no EDM's epsilon"]),
    ("sd15", "EDMEuler", {}, PLAYGROUND, "", ["edm_playground_v2.5, sigma_max 80.0,", "no EDM's epsilon"]),
    ("sdxl", "EDMEuler", COSXL, {}, "edm_vpred.sigma_max edm_vpred.sigma_min", ["sigma_min how", "edm_v`."]),
    ("sdxl", "EDMDPMSolverMultistep", {"sigma_max": 60.0}, {}, "", ["EDM with edm, sigma_max 60.0,", "no EDM"]),
    ("sdxl", "EDMEuler", {"sigma_data": 2.0}, {}, "", ["no node for EDM's epsilon", "with sigma_data 2."]),
    ("sdxl", "LCM", {}, {}, "", ["Discrete with lcm, zsnr false."]),
    ("sdxl", "TCD", {}, {}, "", []),
    ("sdxl", EULER, SD, {"scaling_factor": 0.2}, "", ["factor 0.2: images are made by scaling_factor 0.13025"]),
    ("sd3", FLOW, {"shift": 3.0}, {"attention_head_dim": 32, "in_channels": 16}, "", ["opens no sd3 with attention_"]),
    ("pixart", "DPMSolverMultistep", {"algorithm_type": "sde-dpmsolver++"}, {}, "", []),
]  # fmt: skip


@pytest.mark.parametrize("family, name, config, networks, marks, sentences", CASES)
def test_what_neither_tool_knows_of_a_family_is_marked_or_said(family, name, config, networks, marks, sentences):
    kind, vae = getattr(diffusers, f"{name}Scheduler"), LATENTS.get(family, {}) | networks
    own = Sampled(family, kind.__name__, kind(**config).config, defaults_of(kind), vae, networks)
    assert " ".join(written_marks(own)) == marks
    own_scheduler, *told = for_files(own)
    assert len(told) == len(sentences) and all(map(str.__contains__, told, sentences)), told
    changed = {each: value for each, value in config.items() if defaults_of(kind)[each] != value}
    for sentence in (own_scheduler, *for_folders(own)):
        assert all(f"{each} {value}" in sentence for each, value in ({kind.__name__: "with"} | changed).items())


@pytest.mark.parametrize("target", ["comfyui", pytest.param("gguf", marks=pytest.mark.consumer)])
@pytest.mark.parametrize(
    "name, config, networks", [(EULER, V | ZERO, {}), ("EDMEuler", {}, PLAYGROUND), ("EDMEuler", COSXL, {})]
)
def test_a_file_tells_comfyui_how_it_samples_and_judge_too(tiny, tmp_path, target, name, config, networks):
    if TARGETS[target].package:
        pytest.importorskip(TARGETS[target].package)
    plain, of = tiny("sdxl").checkpoint, tmp_path / "of"
    shutil.copytree(plain.path, of, ignore=lambda _, names: [each for each in names if "safetensors" in each])
    (of / "scheduler/scheduler_config.json").write_text(json.dumps(config))
    index = plain.index | {"scheduler": ["diffusers", f"{name}Scheduler"]}
    configs = plain.configs | {"vae": plain.configs["vae"] | networks}
    own = sampled(checkpoint := replace(plain, path=of, index=index, configs=configs), "sdxl")
    (path,) = write_folder(tmp_path / "x", TARGETS[target], checkpoint, {"unet_xl": {}}, written_marks(own)).values()
    read = TARGETS[target].module.read(path, checkpoint)
    names = set({"comfyui": read_header, "gguf": gguf.read_header}[target](whole_file(path))[0])
    if target == "gguf":  # ComfyUI-GGUF passes on what has the prefix, where anything has it
        names = {each.removeprefix(PREFIX) for each in names if each.startswith(PREFIX)}
    assert own.marks.keys() <= names and set(read.marks) == own.marks.keys() and len(read.parameters) > 100
    check_marks(path, read.marks, own)
    with pytest.raises(ArtifactError, match=f"{read.marks[0]}.*, the mark of a model .* says epsilon; give"):
        third_party("a", path, SimpleNamespace(session=SimpleNamespace(checkpoint=plain), denoiser="unet_xl"))
