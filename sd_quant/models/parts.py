"""The four exported parts of SDXL as plain modules: named tensors in, named tensors out, NeMo's names and shapes.

| part      | inputs                                                         | outputs                              |
|-----------|----------------------------------------------------------------|--------------------------------------|
| `unet_xl` | x [B,4,H/8,W/8], timesteps [B], context [B,S,C], y [B,A]       | out [B,4,H/8,W/8]                    |
| `vae`     | z [B,4,H/8,W/8], already divided by the scaling factor         | dec [B,3,H,W]                        |
| `clip1`   | input_ids [B,77]                                               | z [B,S,C1]                           |
| `clip2`   | input_ids [B,77]                                               | z [B,S,C2], z_pooled [B,P]           |

S is the checkpoint's context length: NeMo pads CLIP's 77 tokens to 80 with zeros, in training and inference alike. `y`
is the pooled text vector followed by the sinusoids of the six size ids. The same modules are the framework baseline,
the source of the exported graph and the reference of every parity check, so the three cannot drift apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT_TOKENS = 80


def positions(input_ids: Tensor) -> Tensor:
    """[1, 77]. Given explicitly, because CLIP's own is a buffer, which a graph without weights would have to carry."""
    return torch.arange(input_ids.shape[1], device=input_ids.device)[None]


def pad_context(hidden: Tensor) -> Tensor:
    """[B, 77, C] -> [B, 80, C] with zeros (NeMo, encoders/modules.py)."""
    return F.pad(hidden, (0, 0, 0, CONTEXT_TOKENS - hidden.shape[1]))


class UnetPart(nn.Module):
    """``y`` already holds the size embedding, so diffusers' own ``add_time_proj`` has to let it through unchanged."""

    def __init__(self, unet: nn.Module, pooled_width: int):
        super().__init__()
        self.unet = unet
        self.pooled_width = pooled_width
        self.unet.add_time_proj = nn.Identity()

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, y: Tensor) -> Tensor:
        added = {"text_embeds": y[:, : self.pooled_width], "time_ids": y[:, self.pooled_width :]}
        return self.unet(x, timesteps, context, added_cond_kwargs=added, return_dict=False)[0]


class VaePart(nn.Module):
    def __init__(self, vae: nn.Module):
        super().__init__()
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder

    def forward(self, z: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(z))


class Clip1Part(nn.Module):
    def __init__(self, text_encoder: nn.Module):
        super().__init__()
        self.text_encoder = text_encoder

    def forward(self, input_ids: Tensor) -> Tensor:
        output = self.text_encoder(input_ids, position_ids=positions(input_ids), output_hidden_states=True)
        return pad_context(output.hidden_states[-2])


class Clip2Part(nn.Module):
    def __init__(self, text_encoder: nn.Module):
        super().__init__()
        self.text_encoder = text_encoder

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        output = self.text_encoder(input_ids, position_ids=positions(input_ids), output_hidden_states=True)
        return pad_context(output.hidden_states[-2]), output.text_embeds


@dataclass(frozen=True, slots=True)
class Contract:
    """Names, shapes and dtypes of one part. Strings in a shape are dynamic axes."""

    inputs: dict[str, tuple]
    outputs: tuple[str, ...]
    dtypes: dict[str, torch.dtype]
    weights: torch.dtype

    def shapes(self, **axes: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(axes.get(axis, axis) for axis in shape) for name, shape in self.inputs.items()}


def contracts(unet_config: Mapping) -> dict[str, Contract]:
    """The contract of each part for one checkpoint. Everything is fp16 but the VAE, which overflows in fp16."""
    half, single = torch.float16, torch.float32
    latent = ("batch", unet_config["in_channels"], "height", "width")
    context, added = unet_config["cross_attention_dim"], unet_config["projection_class_embeddings_input_dim"]
    tokens = {"input_ids": ("batch", 77)}
    return {
        "unet_xl": Contract(
            {
                "x": latent,
                "timesteps": ("batch",),
                "context": ("batch", CONTEXT_TOKENS, context),
                "y": ("batch", added),
            },
            ("out",),
            {"x": half, "timesteps": single, "context": half, "y": half},
            half,
        ),
        "vae": Contract({"z": latent}, ("dec",), {"z": single}, single),
        "clip1": Contract(tokens, ("z",), {"input_ids": torch.int32}, half),
        "clip2": Contract(tokens, ("z", "z_pooled"), {"input_ids": torch.int32}, half),
    }


# Which component of a pipeline a part holds, and what its weights are called in front of diffusers' own names.
COMPONENTS = {
    "unet_xl": ("unet", "unet."),
    "vae": ("vae", ""),
    "clip1": ("text_encoder", "text_encoder."),
    "clip2": ("text_encoder_2", "text_encoder."),
}


def wrap_part(part: str, module: nn.Module, pooled_width: int) -> nn.Module:
    """The part around its component. The UNet is changed in place: it then takes ``y`` and nothing else."""
    if part == "unet_xl":
        return UnetPart(module, pooled_width)
    return {"vae": VaePart, "clip1": Clip1Part, "clip2": Clip2Part}[part](module)


def wrap(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Every part around a pipeline's modules."""
    pooled_width = modules["text_encoder_2"].get_parameter("text_projection.weight").shape[0]
    return {part: wrap_part(part, modules[component], pooled_width) for part, (component, _) in COMPONENTS.items()}
