"""Tiny random denoisers of the six families and of others: those of the pipelines, called as these call them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from . import CASES, build, first_call
from .families import redraw


@dataclass(frozen=True)
class Watched:
    """How a denoiser of ``config`` is called."""

    kind: Any
    config: Mapping[str, Any]
    arguments: Mapping[str, Any]
    dtype: torch.dtype  # fp64, or fp32 of a network that mixes dtypes
    text = (
        "encoder_hidden_states", "pooled_projections", "added_cond_kwargs.text_embeds", "encoder_attention_mask",
        "encoder_hidden_states_mask", "cap_feats", "encoder_hidden_states_t5", "encoder_hidden_states_llama3",
        "pooled_embeds",
    )  # fmt: skip

    def real(self) -> nn.Module:
        """The network in fp64, drawn so that every layer reaches the output."""
        torch.manual_seed(0)
        network = self.kind.from_config(self.config).eval().requires_grad_(False)
        redraw(network)
        for name, parameter in network.named_parameters():
            if name.endswith(".bias") or parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.3
        return network.to(self.dtype)

    def meta(self) -> nn.Module:
        with torch.device("meta"):
            network = self.kind.from_config(self.config).eval().requires_grad_(False)
        return network.to(self.dtype)


SD, SD3 = "StableDiffusionPipeline", "StableDiffusion3Pipeline"
OF_SD21 = {"attention_head_dim": [2, 4], "use_linear_projection": True, "upcast_attention": True}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # the pipeline, its family, what else its denoiser has
    "sd15": (SD, "sd15", {}), "sd21": (SD, "sd21", OF_SD21), "sdxl": ("StableDiffusionXLPipeline", "sdxl", {}),
    "sd3": (SD3, "sd3", {"qk_norm": None, "dual_attention_layers": ()}), "sd35": (SD3, "sd3", {}),
    "flux": ("FluxPipeline", "flux", {}), "pixart": ("PixArtSigmaPipeline", "pixart", {}),
}  # fmt: skip
OTHERS = {
    "qwen_image": "QwenImagePipeline", "z_image": "ZImagePipeline", "flux2": "Flux2Pipeline",
    "chroma": "ChromaPipeline", "sana": "SanaPipeline", "lumina2": "Lumina2Pipeline", "wan": "WanPipeline",
    "ltx": "LTXPipeline", "cogvideox": "CogVideoXPipeline", "hunyuan_video": "HunyuanVideoPipeline",
    "mochi": "MochiPipeline", "auraflow": "AuraFlowPipeline", "cogview4": "CogView4Pipeline",
    "hidream": "HiDreamImagePipeline", "latte": "LattePipeline", "kandinsky5": "Kandinsky5T2VPipeline",
}  # fmt: skip


@cache
def watched(name: str) -> Watched:
    """A row of ``FAMILIES`` or ``OTHERS``."""
    case, _, changes = FAMILIES[name] if name in FAMILIES else (OTHERS[name], None, {})
    dtype = torch.float32 if name == "kandinsky5" else torch.float64
    pipeline = build(case)
    denoiser = getattr(pipeline, CASES[case].denoiser)
    config = {entry: value for entry, value in denoiser.config.items() if entry != "_use_default_values"} | changes
    given = first_call(pipeline, case, ["a cat", "two boats"])
    if name == "hidream":  # whose pipeline makes a million pixels, whatever is asked for
        config |= {"max_resolution": (16, 16)}
        given["hidden_states"] = given["hidden_states"][..., :8, :12].clone()

    def cast(each: Any) -> Any:
        return each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each

    return Watched(type(denoiser), config, tree_map(cast, given), dtype)
