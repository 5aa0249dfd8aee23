"""How a checkpoint samples, for users of an exported file: marker tensors in it, sentences in the README.

Weights do not determine the prediction type, the noise levels and the scale of latents. A pipeline's folder has these
in scheduler/ and vae/. ComfyUI (0.38: supported_models.py, latent_formats.py, samplers.py, nodes_model_advanced.py) and
stable-diffusion.cpp (August 2026) assume those of the family's first model and tell kinds of SDXL by marker tensors;
everything else takes nodes and flags.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import LazyTensor, lazy

# What both tools have: how a family's latents are scaled, a flow's shift (Flux's without guidance), noise of others
LATENTS = {
    **dict.fromkeys(("sd15", "sd21"), {"scaling_factor": 0.18215}), "sdxl": {"scaling_factor": 0.13025},
    "sd3": {"scaling_factor": 1.5305, "shift_factor": 0.0609},
    "flux": {"scaling_factor": 0.3611, "shift_factor": 0.1159},
}  # fmt: skip
SHIFTS = {"sd3": 3.0, "flux": 1.0}
UNET = [320, 640, 1280]
SIZES: dict[str, dict[str, Any]] = {  # by which both tools tell a denoiser's family
    "sdxl": {"block_out_channels": UNET, "cross_attention_dim": 2048},
    "sd15": {"block_out_channels": [*UNET, 1280], "cross_attention_dim": 768},
    "sd21": {"block_out_channels": [*UNET, 1280], "cross_attention_dim": 1024},
    "sd3": {"attention_head_dim": 64, "in_channels": 16},
    "flux": {"axes_dims_rope": [16, 56, 56]},
}
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
NOISE_OF = {"pixart": {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}}
EDM, EDM_V = "EDM's epsilon with sigma_data 0.5", "EDM's v_prediction with sigma_data 1"
PLAIN = {"epsilon": "eps", "v_prediction": "v_prediction", "sample": "x0"}
CHOICES = PLAIN | {EDM: "edm", EDM_V: "v_prediction"}  # in ComfyUI's nodes
FLAGS = {"epsilon": "eps", "v_prediction": "v", "flow": "sd3_flow", EDM_V: "edm_v"}  # of --prediction
PLAYGROUND: dict[str, Any] = {  # v2.5
    "scaling_factor": 0.5, "latents_mean": [-1.6574, 1.886, -1.383, 2.5155],
    "latents_std": [8.4927, 5.9022, 6.5498, 5.2299],
}  # fmt: skip


@dataclass(frozen=True)
class Sampled:
    """A checkpoint's scheduler, VAE and denoiser configs, which determine sampling. Configs are diffusers'."""

    family: str
    kind: str  # class of the scheduler
    config: Mapping[str, Any]  # of the scheduler
    defaults: dict[str, Any]  # of its class
    vae: Mapping[str, Any]
    denoiser: Mapping[str, Any]

    @property
    def prediction(self) -> str:
        """``epsilon``, ``v_prediction``, ``sample``, ``flow``, or EDM's variant of one with its ``sigma_data``."""
        name = self.config.get("prediction_type") or "epsilon"
        if "FlowMatch" in self.kind or name == "flow_prediction":
            return "flow"
        return f"EDM's {name} with sigma_data {self.config['sigma_data']:g}" if "EDM" in self.kind else name

    @property
    def zero_snr(self) -> bool:
        return bool(self.config.get("rescale_betas_zero_snr"))

    @property
    def levels(self) -> dict[str, float]:
        """EDM's largest and smallest noise levels."""
        return {name: float(self.config[name]) for name in ("sigma_max", "sigma_min")}

    @property
    def shift(self) -> float:
        """The time shift of a flow model; a dynamic shift is that of an image of 1024 x 1024."""
        if self.config.get("use_dynamic_shifting"):
            return math.exp(self.config.get("max_shift", 1.15))
        return self.config.get("shift") or self.config.get("flow_shift") or 1.0

    @property
    def latents(self) -> dict[str, Any]:
        """The VAE config's entries that scale and shift latents."""
        found = {name: self.vae.get(name) for name in (*PLAYGROUND, "shift_factor")}
        return {name: as_list(each) for name, each in found.items() if each}

    @property
    def marks(self) -> dict[str, list[float]]:
        """The tensors by which ComfyUI and stable-diffusion.cpp recognize the sampling of an SDXL, if any."""
        if self.prediction == "v_prediction":
            return dict.fromkeys(("v_pred", "ztsnr") if self.zero_snr else ("v_pred",), [1.0])
        if self.prediction == EDM_V:
            return {f"edm_vpred.{name}": [level] for name, level in self.levels.items()}
        if self.prediction == EDM and self.latents == PLAYGROUND and [*self.levels.values()] == [80, 0.002]:
            return {"edm_mean": PLAYGROUND["latents_mean"], "edm_std": PLAYGROUND["latents_std"]}
        return {}


def written_marks(own: Sampled) -> dict[str, LazyTensor]:
    """Return the marker tensors to write by name: only SDXL's, as ComfyUI and stable-diffusion.cpp read no others."""
    return {name: lazy(torch.tensor(values)) for name, values in own.marks.items() if own.family == "sdxl"}


def check_marks(path: Path, found: Collection[str], own: Sampled) -> None:
    """Raise ArtifactError if marker tensors ``found`` in a file state another sampling than the checkpoint's."""
    if others := [name for name in found if name not in own.marks]:
        raise ArtifactError(
            f"{path} has {' and '.join(others)}, the mark of a model that samples otherwise than the full-precision "
            f"one, whose scheduler says {own.prediction}{' and zero terminal SNR' if own.zero_snr else ''}; give a "
            "quantization of that very model, or correct the scheduler_config.json of model.path"
        )


def own_scheduler(own: Sampled) -> str:
    defaults = own.defaults | {"timestep_spacing": ""}  # said always
    changed = {name: each for name, each in own.config.items() if defaults.get(name, each) != each}
    return f"{own.kind} with {words(changed) or 'its defaults'}"


def for_folders(own: Sampled) -> list[str]:
    """Return the README's sentence for users of a pipeline's folder."""
    return [
        f"The pipeline's `scheduler/` has to be the checkpoint's, {own_scheduler(own)}, and so its `vae/config.json`, "
        f"with {words(own.latents) or 'latents as they are'}."
    ]


def for_files(own: Sampled) -> list[str]:
    """Return sentences for users of a file in ComfyUI or stable-diffusion.cpp, also on unsupported settings."""
    node = node_for(own)
    told = [
        f"The checkpoint has {own_scheduler(own)}: choose the nearest in KSampler, whose scheduler sgm_uniform is "
        "trailing, ddim_uniform leading, normal linspace, and simple that of most flows.",
        *filter(None, [node, flags_for(own)]),
    ]
    noise = NOISE_OF.get(own.family, NOISE) | {"trained_betas": None, "num_train_timesteps": 1000}
    if own.prediction in PLAIN and any(own.config.get(name, each) != each for name, each in noise.items()):
        told.append(f"No node and no flag sets other noise levels than those of {words(noise)}: images will differ.")
    scaled = LATENTS.get(own.family, own.latents)
    if own.latents != scaled and not {"edm_mean", "edm_playground_v2.5,"} & {*node.split()}:
        told.append(f"No node and no flag scales latents by {words(own.latents)}: images are made by {words(scaled)}.")
    known, sizes = SIZES.get(own.family, {}), own.denoiser
    if others := {name: sizes[name] for name in known if name in sizes and as_list(sizes[name]) != known[name]}:
        expected = words({name: known[name] for name in others})
        told.append(f"ComfyUI opens no {own.family} with {words(others)}: it knows models by {expected}.")
    return told


def as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def node_for(own: Sampled) -> str:
    """Return a sentence on the node that ComfyUI needs behind the loader; empty if it needs none."""
    dynamic, zero = own.config.get("use_dynamic_shifting"), str(own.zero_snr).lower()
    choice = CHOICES.get(own.prediction)
    if own.prediction == "flow":
        if own.family == "flux" and dynamic:
            ends = {name: own.config.get(name, usual) for name, usual in (("max_shift", 1.15), ("base_shift", 0.5))}
            return f"Add the node ModelSamplingFlux with {words(ends)} and the image's size: ComfyUI knows one alone."
        if own.shift == SHIFTS.get(own.family) and not own.denoiser.get("guidance_embeds"):
            return ""
        size = ", that of 1024 x 1024: it changes with the size" if dynamic else ""
        node = "AuraFlow" if own.family == "flux" else "SD3"
        return f"Add the node ModelSampling{node} with shift {own.shift:.4g}{size}."
    if own.family == "sdxl" and own.marks:
        return f"The file tells ComfyUI by the tensors {' and '.join(own.marks)} how it samples."
    if choice is None:
        return f"ComfyUI has no node for {own.prediction}."
    if "EDM" in own.kind:
        choice = "edm_playground_v2.5" if choice == "edm" and own.latents == PLAYGROUND else choice
        return f"Add the node ModelSamplingContinuousEDM with {choice}, {words(own.levels)}."
    choice = "lcm" if own.kind == "LCMScheduler" and choice == "eps" else choice
    if choice == "eps" and not own.zero_snr and own.family in ("sdxl", "sd15", "pixart"):
        return ""
    guess = ": ComfyUI guesses it by the spread of a norm's bias, which smoothing=folded changes"
    return f"Add the node ModelSamplingDiscrete with {choice}, zsnr {zero}{guess if own.family == 'sd21' else ''}."


def flags_for(own: Sampled) -> str:
    """Return a sentence on stable-diffusion.cpp's flags; empty if none are needed, and for PixArt."""
    flow, usual, shift = own.prediction == "flow", SHIFTS.get(own.family), own.shift
    lacks = [] if own.prediction in FLAGS else [own.prediction]
    lacks += ["zero terminal SNR"] if own.zero_snr else []
    lacks += [words(own.levels)] if own.prediction == EDM_V and own.levels["sigma_max"] != 120 else []
    known = own.prediction == ("epsilon" if usual is None else "flow")
    flags = [] if known or own.prediction not in FLAGS else [f"--prediction {FLAGS[own.prediction]}"]
    if own.family == "flux":  # as a logarithm
        shift, usual = math.log(shift), 1.15 if own.denoiser.get("guidance_embeds") else 1.0
    flags += [f"--flow-shift {shift:.4g}"] if flow and (usual is None or not math.isclose(shift, usual)) else []
    told = [f"`{' '.join(flags)}`"] if flags else []
    told += [f"it has no {' and no '.join(lacks)}"] if lacks else []
    return f"stable-diffusion.cpp: {'; '.join(told)}." if told and own.family != "pixart" else ""


def words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {str(each)[:200]}" for name, each in settings.items())
