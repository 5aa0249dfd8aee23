"""What a reader of an export has to know of how the checkpoint samples: marks in a file, sentences in its README.

Weights do not say what a network predicts, between which noise levels, and how its latents are scaled. Whoever opens a
pipeline's folder reads that in scheduler/ and vae/. ComfyUI (0.38: supported_models.py, latent_formats.py, samplers.py,
nodes_model_advanced.py) and stable-diffusion.cpp (August 2026) take a file for the family's first model, and tell kinds
of SDXL by tensors; for the rest there are nodes and flags, or nothing.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import LazyTensor, lazy

# what both tools take a family for; of Flux without guidance
SCALING = {"sd15": 0.18215, "sd21": 0.18215, "sdxl": 0.13025, "sd3": 1.5305, "flux": 0.3611, "pixart": 0.13025}
SHIFT_FACTORS, FLOW_SHIFTS = {"sd3": 0.0609, "flux": 0.1159}, {"sd3": 3.0, "flux": 1.0}
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
NOISE_OF_PIXART = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
UNSET = {  # settings of a scheduler that both lack, with the values that both have
    "num_train_timesteps": 1000, "trained_betas": None, "thresholding": False, "clip_sample": False,
    "shift_terminal": None, "invert_sigmas": False, "stochastic_sampling": False, "snr_shift_scale": 1.0,
    "original_inference_steps": 50, "timestep_scaling": 10.0, "base_image_seq_len": 256, "max_image_seq_len": 4096,
}  # fmt: skip
SAMPLERS = {  # ComfyUI's, by diffusers' classes without Discrete, Multistep and Scheduler
    "Euler": "euler", "EDMEuler": "euler", "FlowMatchEuler": "euler", "EulerAncestral": "euler_ancestral",
    "Heun": "heun", "FlowMatchHeun": "heun", "DPMSolver": "dpmpp_2m", "EDMDPMSolver": "dpmpp_2m", "LMS": "lms",
    "DPMSolverSDE": "dpmpp_sde", "UniPC": "uni_pc_bh2", "DEIS": "deis", "DDIM": "ddim", "DDPM": "ddpm", "LCM": "lcm",
    "KDPM2": "dpm_2", "KDPM2Ancestral": "dpm_2_ancestral",
}  # fmt: skip
SPACINGS = {"trailing": "sgm_uniform", "leading": "ddim_uniform", "linspace": "normal"}  # ComfyUI's by diffusers'
EDM, EDM_V = "EDM's epsilon with sigma_data 0.5", "EDM's v_prediction with sigma_data 1"
NODES = {  # ComfyUI's by what is predicted, and what they choose
    "epsilon": ("Discrete", "eps"), "v_prediction": ("Discrete", "v_prediction"), "sample": ("Discrete", "x0"),
    EDM: ("ContinuousEDM", "edm"), EDM_V: ("ContinuousEDM", "v_prediction"),
}  # fmt: skip
FLAGS = {"epsilon": "eps", "v_prediction": "v", "flow": "sd3_flow", EDM_V: "edm_v"}  # of --prediction
PLAYGROUND: dict[str, Any] = {
    "scaling_factor": 0.5,
    "latents_mean": [-1.6574, 1.886, -1.383, 2.5155],
    "latents_std": [8.4927, 5.9022, 6.5498, 5.2299],
}  # Playground v2.5's


@dataclass(frozen=True)
class Sampled:
    """How a checkpoint samples. Configs are diffusers'."""

    family: str
    kind: str  # class of the scheduler
    config: Mapping[str, Any]  # of the scheduler
    defaults: Mapping[str, Any]  # of its class
    vae: Mapping[str, Any]
    denoiser: Mapping[str, Any]

    @property
    def prediction(self) -> str:
        """``epsilon``, ``v_prediction``, ``sample``, ``flow``, or one of EDM's with its name."""
        name = self.config.get("prediction_type") or "epsilon"
        if "FlowMatch" in self.kind or name == "flow_prediction":
            return "flow"
        return f"EDM's {name} with sigma_data {self.config['sigma_data']:g}" if "EDM" in self.kind else name

    @property
    def zero_snr(self) -> bool:
        return bool(self.config.get("rescale_betas_zero_snr"))

    @property
    def levels(self) -> dict[str, float]:
        """The ends of EDM's noise levels."""
        return {name: float(self.config[name]) for name in ("sigma_max", "sigma_min")}

    @property
    def shift(self) -> float:
        """A flow's, or that of an image of 1024 x 1024."""
        if self.config.get("use_dynamic_shifting"):
            return math.exp(self.config.get("max_shift", 1.15))
        return self.config.get("shift") or self.config.get("flow_shift") or 1.0

    @property
    def latents(self) -> dict[str, Any]:
        """How latents are scaled."""
        found = {name: self.vae.get(name) for name in (*PLAYGROUND, "shift_factor")}
        return {name: list(each) if isinstance(each, tuple) else each for name, each in found.items() if each}

    @property
    def marks(self) -> dict[str, list[float]]:
        """The tensors by which both tools tell such an SDXL from others."""
        if self.prediction == "v_prediction":
            return dict.fromkeys(("v_pred", "ztsnr") if self.zero_snr else ("v_pred",), [1.0])
        if self.prediction == EDM_V:
            return {f"edm_vpred.{name}": [level] for name, level in self.levels.items()}
        if self.prediction == EDM and self.latents == PLAYGROUND and [*self.levels.values()] == [80, 0.002]:
            return {"edm_mean": PLAYGROUND["latents_mean"], "edm_std": PLAYGROUND["latents_std"]}
        return {}


def written_marks(own: Sampled) -> dict[str, LazyTensor]:
    """The marks of the only family in which both tools look for them."""
    return {name: lazy(torch.tensor(values)) for name, values in own.marks.items() if own.family == "sdxl"}


def check_marks(path: Path, found: Collection[str], own: Sampled) -> None:
    """Raises ArtifactError where a file's marks say that it samples otherwise than the checkpoint."""
    if others := [name for name in found if name not in own.marks]:
        raise ArtifactError(
            f"{path} has {' and '.join(others)}, the mark of a model that samples otherwise than the full-precision "
            f"one, whose scheduler says {own.prediction}{' and zero terminal SNR' if own.zero_snr else ''}; give a "
            "quantization of that very model, or correct the scheduler_config.json of model.path"
        )


def for_folders(own: Sampled) -> list[str]:
    """The sentence for whoever opens a pipeline's folder."""
    config = {name: each for name, each in own.config.items() if own.defaults.get(name, each) != each}
    return [
        f"The pipeline's `scheduler/` has to be the checkpoint's, {own.kind} with {words(config) or 'its defaults'}, "
        f"and so its `vae/config.json`, with {words(own.latents) or 'latents as they are'}."
    ]


def for_files(own: Sampled) -> list[str]:
    """The sentences for whoever opens a file in ComfyUI or stable-diffusion.cpp, and what neither can be told."""
    told = [node_for(own), flags_for(own), sampler_for(own)]
    noise = {"pixart": NOISE_OF_PIXART}.get(own.family, NOISE) if "Discrete" in NODES.get(own.prediction, ()) else {}
    usual = UNSET | noise
    if unset := {name: each for name, each in own.config.items() if name in usual and each != usual[name]}:
        told.append(f"No node and no flag sets what the checkpoint's scheduler has: {words(unset)}.")
    sizes = own.denoiser.get("use_additional_conditions")  # by which ComfyUI tells PixArt-alpha
    sizes = own.denoiser.get("sample_size") == 128 if sizes is None else sizes
    scaled = {"scaling_factor": SCALING["sd15" if own.family == "pixart" and sizes else own.family]}
    scaled |= {"shift_factor": SHIFT_FACTORS[own.family]} if own.family in SHIFT_FACTORS else {}
    if own.latents != scaled and not {"edm_mean", "edm_playground_v2.5,"} & {*told[0].split()}:
        told.append(f"No node and no flag scales latents by {words(own.latents)}: images are made by {words(scaled)}.")
    return [each for each in told if each]


def node_for(own: Sampled) -> str:
    """The node that ComfyUI needs behind the one that opens the file."""
    dynamic, guided = own.config.get("use_dynamic_shifting"), own.denoiser.get("guidance_embeds")
    if own.prediction == "flow" and own.family == "flux" and dynamic:
        ends = {name: own.config.get(name, usual) for name, usual in (("max_shift", 1.15), ("base_shift", 0.5))}
        return f"Add the node ModelSamplingFlux with {words(ends)} and the image's size: ComfyUI knows one shift alone."
    if own.prediction == "flow":
        if not guided and own.shift == FLOW_SHIFTS.get(own.family):
            return ""
        node = "AuraFlow" if own.family == "flux" else "SD3"
        size = ", that of 1024 x 1024: it changes with the size" if dynamic else ""
        return f"Add the node ModelSampling{node} with shift {own.shift:.4g}{size}."
    if own.family == "sdxl" and own.marks:
        return f"The file tells ComfyUI by the tensors {' and '.join(own.marks)} how it samples."
    node, choice = NODES.get(own.prediction, ("", ""))
    if not node:
        return f"ComfyUI has no node for {own.prediction}."
    if node == "ContinuousEDM":
        choice = "edm_playground_v2.5" if choice == "edm" and own.latents == PLAYGROUND else choice
        return f"Add the node ModelSampling{node} with {choice}, {words(own.levels)}."
    choice = "lcm" if own.kind == "LCMScheduler" and choice == "eps" else choice
    if choice == "eps" and not own.zero_snr and own.family in ("sdxl", "sd15", "pixart"):
        return ""
    why = ": ComfyUI guesses it by the spread of a norm's bias, which smoothing=folded changes"
    zero = str(own.zero_snr).lower()
    return f"Add the node ModelSampling{node} with {choice}, zsnr {zero}{why if own.family == 'sd21' else ''}."


def flags_for(own: Sampled) -> str:
    """The flags of stable-diffusion.cpp, which has no PixArt."""
    flow, usual, flags = own.prediction == "flow", FLOW_SHIFTS.get(own.family), []
    lacks = [] if own.prediction in FLAGS else [own.prediction]
    lacks += ["zero terminal SNR"] if own.zero_snr else []
    lacks += [words(own.levels)] if own.prediction == EDM_V and own.levels["sigma_max"] != 120 else []
    if own.prediction in FLAGS and (flow != (usual is not None) or own.prediction not in ("flow", "epsilon")):
        flags.append(f"--prediction {FLAGS[own.prediction]}")
    shift = own.shift
    if flow and own.family == "flux":  # as a logarithm
        shift, usual = math.log(own.shift), 1.15 if own.denoiser.get("guidance_embeds") else 1.0
    if flow and (usual is None or not math.isclose(shift, usual)):
        flags.append(f"--flow-shift {shift:.4g}")
    told = [f"`{' '.join(flags)}`"] if flags else []
    told += [f"it has no {' and no '.join(lacks)}"] if lacks else []
    return f"stable-diffusion.cpp: {'; '.join(told)}." if told and own.family != "pixart" else ""


def sampler_for(own: Sampled) -> str:
    """The nearest choice in ComfyUI's node KSampler."""
    name = own.kind.removesuffix("Scheduler").replace("Discrete", "").replace("Multistep", "")
    sampler, config = SAMPLERS.get(name), own.config
    if sampler is None:
        return f"The checkpoint samples by {own.kind}, which ComfyUI's KSampler has not."
    stochastic = "_sde" if sampler == "dpmpp_2m" and "sde" in config.get("algorithm_type", "") else ""
    usual = "simple" if own.prediction == "flow" else SPACINGS[config.get("timestep_spacing", "leading")]
    usual = (
        "sgm_uniform" if sampler == "lcm" else config.get("sigma_schedule", "karras") if "EDM" in own.kind else usual
    )
    levels = next((each for each in ("karras", "exponential", "beta") if config.get(f"use_{each}_sigmas")), usual)
    return f"In KSampler {sampler}{stochastic} with {levels} is nearest to the checkpoint's {own.kind}."


def words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {each}" for name, each in settings.items())
