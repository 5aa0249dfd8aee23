"""All networks of a pipeline exported to ONNX files, for optimum's pipelines and OpenVINO GenAI.

Weights and assignment are those of a run's own ONNX files; inputs and outputs differ: image sizes are passed as
time_ids, a text encoder returns all hidden states, and all inputs and outputs are fp32, for the sampler's arithmetic
(diffusers casts latents to the network's output dtype). Weights are fp16 or quantized. Alternative not taken: renaming
inputs in a run's own files, as NeMo's UNet takes embedded sizes, and a text encoder there returns one of its states.

| folder               | inputs                                              | outputs                                 |
|----------------------|-----------------------------------------------------|-----------------------------------------|
| `unet`               | sample [B,4,H/8,W/8], timestep [],                  | out_sample [B,4,H/8,W/8]                |
|                      | encoder_hidden_states [B,77,C];                     |                                         |
|                      | of SDXL also text_embeds [B,P], time_ids [B,6]      |                                         |
| `transformer`        | hidden_states [B,C,H/8,W/8],                        | out_hidden_states [B,C,H/8,W/8]         |
| of SD3               | encoder_hidden_states [B,L,J],                      |                                         |
|                      | pooled_projections [B,P], timestep [B] or [1]       |                                         |
| of Flux              | the same, with packed hidden_states [B,N,64];       | out_hidden_states [B,N,64]              |
|                      | img_ids [N,3], txt_ids [L,3], and if it embeds      |                                         |
|                      | guidance, guidance [B]; timestep is below 1         |                                         |
| `vae_decoder`        | latent_sample [B,C,H/8,W/8], already divided by the | sample [B,3,H,W]                        |
|                      | scaling factor                                      |                                         |
| `vae_encoder`        | sample [B,3,H,W], from -1 to 1                      | latent_parameters [B,2C,H/8,W/8]        |
| `text_encoder*`      | input_ids [B,77]                                    | last_hidden_state [B,77,C],             |
| of CLIP              |                                                     | pooler_output [B,C], hidden_states.i    |
| of CLIP, projecting  | input_ids [B,77]                                    | text_embeds [B,P], last_hidden_state,   |
|                      |                                                     | hidden_states.i                         |
| of T5                | input_ids [B,T]                                     | last_hidden_state [B,T,J]               |

input_ids are int64, all else is fp32. B is the batch, H x W the image, C are channels, N packed latents, P and J widths
of pooled and joint text, L and T any text length: GenAI passes 77 zeros for a missing T5, one time for a whole batch.
hidden_states.0 is the embedding, hidden_states.i the output of layer i before the last norm, as in optimum's exporter.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import trace
from sd_quant.files import temporary_folder
from sd_quant.models import LATENT_FACTOR
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, empty_modules
from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.models.parts import Axis, Contract, Part, VaeEncoderPart, VaePart, network_in
from sd_quant.models.sdxl import unet_part
from sd_quant.models.text_encoders import T5Part, padded
from sd_quant.models.transformer import TransformerPart
from sd_quant.quantization.assignment import WITHOUT_WEIGHTS, LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.simulation.modelopt import simulate

CONFIG = "config.json"
# A text axis, traced with a length that no other axis has, and a time axis: one per sample, or one for the batch.
AXES = (("text", Axis("", 0, 1, 91)), ("times", Axis("batch", 1, 1, 0)))
# Sizes of outputs in terms of inputs: optimum-onnx allocates outputs by them on a GPU. A denoiser's sizes it knows.
SIZES = {
    "sample": {2: f"height * {LATENT_FACTOR}", 3: f"width * {LATENT_FACTOR}"},
    "latent_parameters": {2: f"image_height / {LATENT_FACTOR}", 3: f"image_width / {LATENT_FACTOR}"},
    "last_hidden_state": {1: "text"},  # of T5
}


class ConsumedUnet(nn.Module):
    """diffusers' UNet with fp32 inputs and outputs, computed in the dtype of its weights.

    The text is padded with zeros to ``tokens``, as in NeMo's training.
    """

    def __init__(self, unet: nn.Module, tokens: int):
        super().__init__()
        self.unet, self.tokens = unet, tokens

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        text_embeds: Tensor | None = None,
        time_ids: Tensor | None = None,
    ) -> Tensor:
        dtype = next(self.unet.parameters()).dtype
        text = padded(encoder_hidden_states, self.tokens).to(dtype)
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        output = self.unet(sample.to(dtype), timestep, text, added_cond_kwargs=added, return_dict=False)[0]
        return output.float()


class ConsumedTransformer(TransformerPart):
    """The transformer of Stable Diffusion 3 or Flux with fp32 inputs and outputs, in the dtype of its weights."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        timestep: Tensor,
        img_ids: Tensor | None = None,
        txt_ids: Tensor | None = None,
        guidance: Tensor | None = None,
    ) -> Tensor:
        dtype = next(self.transformer.parameters()).dtype
        latents, text, pooled = (x.to(dtype) for x in (hidden_states, encoder_hidden_states, pooled_projections))
        return super().forward(latents, text, pooled, timestep, img_ids, txt_ids, guidance).float()


class ConsumedVae(VaePart):
    """The VAE's decoder, whose input has optimum's name."""

    def forward(self, latent_sample: Tensor) -> Tensor:
        return super().forward(latent_sample)


class ConsumedVaeEncoder(VaeEncoderPart):
    """The VAE's encoder, whose input has optimum's name."""

    def forward(self, sample: Tensor) -> Tensor:
        return super().forward(sample)


class ConsumedTextEncoder(nn.Module):
    """A CLIP text encoder with all its hidden states as outputs, in fp32."""

    def __init__(self, text_encoder: nn.Module, named: tuple[str, ...]):
        """``named`` are the outputs before the hidden states, by transformers' names."""
        super().__init__()
        self.text_encoder, self.named = text_encoder, named

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # not CLIP's own buffer, a constant
        output = self.text_encoder(input_ids, position_ids=places, output_hidden_states=True)
        return tuple(value.float() for value in (*(output[name] for name in self.named), *output.hidden_states))


def consumed_unet(checkpoint: Checkpoint, config: Mapping) -> Part:
    """Return the UNet with optimum's inputs and outputs; ``config`` is its configuration."""
    contract = denoiser_part(checkpoint).contract
    inputs = contract.inputs
    if "context" in inputs:  # NeMo's names
        inputs = unet_part(config, inputs["context"][1], "diffusers").contract.inputs
    tokens = inputs["encoder_hidden_states"][1]
    text = ("batch", CONTEXT_LENGTH, inputs["encoder_hidden_states"][2])
    inputs = inputs | {"timestep": (), "encoder_hidden_states": text}
    dtypes = dict.fromkeys(inputs, torch.float32)
    return Part(
        "unet",
        "unet.",
        Contract(inputs, ("out_sample",), dtypes, contract.weights),
        partial(ConsumedUnet, tokens=tokens),
    )


def consumed_transformer(part: Part) -> Part:
    """Return the transformer ``part`` with fp32 inputs, for texts of any length and one timestep or one per sample."""
    inputs = part.contract.inputs
    text = ("batch", "text", inputs["encoder_hidden_states"][2])
    changed = {"encoder_hidden_states": text, "txt_ids": ("text", 3), "timestep": ("times",)}
    inputs = {name: changed.get(name, shape) for name, shape in inputs.items()}
    dtypes = dict.fromkeys(inputs, torch.float32)
    contract = replace(part.contract, inputs=inputs, outputs=("out_hidden_states",), dtypes=dtypes, axes=AXES)

    def wrap(network: nn.Module) -> ConsumedTransformer:
        return ConsumedTransformer(part.wrap(network).get_submodule("transformer"))  # with what the family replaces

    return replace(part, contract=contract, wrap=wrap)


def consumed_vae(part: Part) -> dict[str, Part]:
    """Return the run's VAE decoder with optimum's names, and the encoder."""
    (latents,), single = part.contract.inputs.values(), torch.float32
    image = ("batch", 3, "image_height", "image_width")
    decoder = Contract({"latent_sample": latents}, ("sample",), {"latent_sample": single}, part.contract.weights)
    encoder = Contract({"sample": image}, ("latent_parameters",), {"sample": single}, part.contract.weights)
    return {
        "vae_decoder": replace(part, contract=decoder, wrap=ConsumedVae),
        "vae_encoder": replace(part, contract=encoder, wrap=ConsumedVaeEncoder),
    }


def consumed_clip(component: str, layers: int, projects: bool) -> Part:
    """Return a CLIP text encoder of ``layers`` layers; ``projects``: its first output is text_embeds."""
    named = ("text_embeds", "last_hidden_state") if projects else ("last_hidden_state", "pooler_output")
    outputs = (*named, *(f"hidden_states.{layer}" for layer in range(layers + 1)))
    contract = Contract({"input_ids": ("batch", CONTEXT_LENGTH)}, outputs, {"input_ids": torch.int64}, torch.float16)
    return Part(component, "text_encoder.", contract, partial(ConsumedTextEncoder, named=named))


def consumed_parts(checkpoint: Checkpoint) -> dict[str, Part]:
    """Return the networks to be exported by folder name in the result, the denoiser first."""
    family, part = checkpoint.family, denoiser_part(checkpoint)
    configs: dict[str, Any] = {name: module.config for name, module in empty_modules(checkpoint).items()}
    is_unet = part.component == "unet"
    denoiser = consumed_unet(checkpoint, configs["unet"]) if is_unet else consumed_transformer(part)
    parts = {part.component: denoiser, **consumed_vae(checkpoint.parts()["vae"])}
    for component, kind in family.NETWORKS.items():
        if kind == "T5EncoderModel" and component in configs:  # in fp32 as the run's own, for texts of any length
            inputs, dtypes = {"input_ids": ("batch", "text")}, {"input_ids": torch.int64}
            contract = Contract(inputs, ("last_hidden_state",), dtypes, torch.float32, axes=AXES)
            parts[component] = Part(component, "text_encoder.", contract, T5Part)
        elif kind.startswith("CLIPTextModel"):
            layers = configs[component].num_hidden_layers
            parts[component] = consumed_clip(component, layers, kind.endswith("WithProjection"))
    return parts


def write_consumed(checkpoint: Checkpoint, part: Part, path: Path, assignment: Mapping[str, LayerAssignment]) -> None:
    """Write ``part`` to the ONNX file ``path``, with one weight in memory at a time.

    Assignments of layers outside the part, such as those of the other half of a VAE, are ignored.
    """
    weights = checkpoint.components[part.component]
    layers = dict(network_in(part, part.wrap(empty_modules(checkpoint)[part.component])).named_modules())
    model = trace(lambda: part.wrap(checkpoint.build()[part.component]), part.contract)
    for output in model.graph.outputs:
        sizes = SIZES.get(output.name, {})
        known = [size if isinstance(size, int) else sizes.get(axis, size) for axis, size in enumerate(output.shape)]
        output.shape = ir.Shape(known)
    write_onnx(
        model,
        path,
        inputs=len(part.contract.inputs),
        prefix=part.prefix,
        read=lambda name: weights[name.removeprefix(part.prefix)],
        assignment={name: row for name, row in assignment.items() if name in layers or row.role in WITHOUT_WEIGHTS},
    )


def write_folder(
    checkpoint: Checkpoint,
    assignment: Mapping[str, LayerAssignment],
    folder: Path,
    others: Mapping[str, Mapping[str, LayerAssignment]] = MappingProxyType({}),
    *,
    convert: Callable[[Path, Path], None],
) -> Path:
    """Add the networks to the pipeline ``folder``: the denoiser quantized by ``assignment``, ``others`` by component.

    ``convert(ONNX file, folder of the network)`` moves or converts each file; the folder has the config. The index
    keeps diffusers' name of the pipeline, which all consumers know. One network at a time is on the disk twice.
    Raises the errors of ``write_onnx``.
    """
    parts, quantized = consumed_parts(checkpoint), {denoiser_part(checkpoint).component: assignment, **others}
    for component, part in parts.items():
        place = folder / component
        place.mkdir(exist_ok=True)
        if component != part.component:  # the VAE's config in the folders of its halves
            shutil.copyfile(folder / part.component / CONFIG, place / CONFIG)
        with temporary_folder(folder) as temporary:
            path = Path(temporary) / "model.onnx"
            write_consumed(checkpoint, part, path, quantized.get(part.component, {}))
            convert(path, place)
    return folder


@torch.no_grad()
def simulate_graph(
    denoiser: nn.Module, assignment: Mapping[str, LayerAssignment], dtype: torch.dtype = torch.float16
) -> None:
    """Change ``denoiser``, in place, to compute what its exported ONNX file does, by ModelOpt's quantizers.

    Unquantized weights are rounded to ``dtype``; weights with static scales are dequantized from the codes of the
    export, because ModelOpt multiplies by 1 / scale and rounds some ties otherwise. Alternative not taken: running the
    file; runtimes saturate sums on some processors, and take other arguments than the module.
    """
    stored = denoiser.state_dict()
    for name, buffer in denoiser.named_buffers():
        if name in stored and buffer.is_floating_point():
            buffer.copy_(buffer.to(dtype))
    simulate(denoiser, assignment)
    rounded = {f"{row.name}.weight": row for row in assignment.values() if row.format is not None}
    for name, parameter in denoiser.named_parameters():
        if (row := rounded.get(name)) is None:
            parameter.copy_(parameter.to(dtype))
        elif FORMATS[row.format].static_scale:
            parameter.copy_(row.rounded_weight(parameter))
