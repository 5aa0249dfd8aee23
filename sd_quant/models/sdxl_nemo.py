"""NeMo's SDXL built from diffusers' classes: the networks of a ``model_config.yaml``, NeMo's sampler and pipeline.

The sizes of the UNet and the VAE come from the config, the sizes of the text encoders from the shapes of their weights,
because NeMo's config only names these encoders. No class that the config names is imported. Neither weights nor config
say how texts are padded and which sampler makes the images: ``PIPELINES`` has NeMo's choice and diffusers' choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from types import MappingProxyType
from typing import Annotated, Any

from sd_quant.knobs import between
from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH, clip_tokenizer
from sd_quant.models.family import PipelineCall
from sd_quant.models.sdxl import FAMILY

CONTEXT_TOKENS = 80  # CLIP's 77 and three of zeros, in training and inference alike
CLIP_HEAD_WIDTH = 64  # in CLIP-L (768/12), OpenCLIP bigG (1280/20) and every other CLIP text model


@dataclass(frozen=True, slots=True)
class TextShape:
    """Sizes of one CLIP text encoder."""

    vocab_size: int
    width: int
    layers: int
    context: int  # in tokens
    mlp_width: int
    projection: int = 0  # width of the pooled output; 0 when there is none


# transformers' names of the fields of ``TextShape`` except the last, in the same order
TEXT_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "intermediate_size")

SIZE, BLOCK_COUNT = between(1, 2**16), between(0, 100)
EACH_SIZE, EACH_BLOCK_COUNT = between(1, 2**12, each=True), between(0, 100, each=True)


@dataclass(frozen=True, slots=True)
class NemoUnet:
    """The entries of ``unet_config`` that are read."""

    image_size: Annotated[int, SIZE]
    in_channels: Annotated[int, SIZE]
    out_channels: Annotated[int, SIZE]
    model_channels: Annotated[int, SIZE]
    channel_mult: Annotated[list[int], EACH_SIZE]
    attention_resolutions: Annotated[list[int], EACH_SIZE]
    num_res_blocks: Annotated[int, BLOCK_COUNT]
    transformer_depth: Annotated[list[int], EACH_BLOCK_COUNT]
    num_head_channels: Annotated[int, SIZE]
    context_dim: Annotated[int, SIZE]
    use_linear_in_transformer: bool
    adm_in_channels: Annotated[int, SIZE]


@dataclass(frozen=True, slots=True)
class NemoVae:
    """The entries of ``first_stage_config.ddconfig`` that are read."""

    in_channels: Annotated[int, SIZE]
    out_ch: Annotated[int, SIZE]
    z_channels: Annotated[int, SIZE]
    ch: Annotated[int, SIZE]
    ch_mult: Annotated[list[int], EACH_SIZE]
    num_res_blocks: Annotated[int, BLOCK_COUNT]
    resolution: Annotated[int, SIZE]


@dataclass(frozen=True, slots=True)
class NemoFirstStage:
    ddconfig: NemoVae


@dataclass(frozen=True, slots=True)
class NemoEmbedder:
    outdim: Annotated[int, SIZE]


@dataclass(frozen=True, slots=True)
class NemoDiscretization:
    """The entries of ``denoiser_config.discretization_config`` that are read, with NeMo's defaults."""

    linear_start: Annotated[float, between(1e-9, 0.999)] = 0.00085
    linear_end: Annotated[float, between(1e-9, 0.999)] = 0.012
    num_timesteps: Annotated[int, between(2, 100_000)] = 1000
    rescale_betas_zero_snr: bool = False  # not in NeMo's configs: for single files marked as zero-SNR


IN_SCHEDULER = {  # field of ``NemoDiscretization`` -> diffusers' name in a scheduler's config
    "linear_start": "beta_start", "linear_end": "beta_end", "num_timesteps": "num_train_timesteps",
    "rescale_betas_zero_snr": "rescale_betas_zero_snr",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NemoConfig:
    """The entries of a ``model_config.yaml`` that are read, except the embedder of sizes and the noise."""

    unet_config: NemoUnet
    first_stage_config: NemoFirstStage
    scale_factor: Annotated[float, between(1e-6, 1e6)]


def embedder(model_config: Mapping, index: int) -> Mapping:
    """Return the config of NeMo's ``index``-th embedder: 0 and 1 are the text encoders, 2 embeds sizes."""
    return model_config["conditioner_config"]["emb_models"][index]["emb_model"]


def noise_config(model_config: Mapping = MappingProxyType({})) -> dict:
    """Convert NeMo's ``denoiser_config`` to the noise entries of a diffusers scheduler's config; by default SDXL's.

    LegacyDDPMDiscretization has betas whose square roots are equally spaced, and VScaling is v-prediction:
    x0 = x / (sigma^2 + 1) - v sigma / (sigma^2 + 1)^0.5.
    """
    denoiser = model_config.get("denoiser_config", {})
    stated = asdict(NemoDiscretization()) | denoiser.get("discretization_config", {})
    predicts_v = str(denoiser.get("scaling_config", {}).get("_target_")).endswith(".VScaling")
    return {name: stated[entry] for entry, name in IN_SCHEDULER.items()} | {
        "beta_schedule": "scaled_linear", "prediction_type": "v_prediction" if predicts_v else "epsilon"
    }  # fmt: skip


def with_noise(model_config: Mapping, noise: Mapping) -> dict:
    """Return a copy of NeMo's config with a scheduler config's ``noise`` entries: the inverse of ``noise_config``."""
    denoiser, usual = model_config["denoiser_config"], noise_config()
    stated = {each: noise[name] for each, name in IN_SCHEDULER.items() if noise.get(name, usual[name]) != usual[name]}
    module = denoiser["scaling_config"]["_target_"].rpartition(".")[0]
    scaling = f"{module}.{'VScaling' if noise['prediction_type'] == 'v_prediction' else 'EpsScaling'}"
    return {**model_config, "denoiser_config": denoiser | {
        "num_idx": noise["num_train_timesteps"], "scaling_config": {"_target_": scaling},
        "discretization_config": denoiser["discretization_config"] | stated,
    }}  # fmt: skip


def unet_config(model_config: Mapping) -> dict:
    """Return the arguments of ``UNet2DConditionModel`` for NeMo's ``unet_config`` (openaimodel.UNetModel)."""
    unet = model_config["unet_config"]
    channels = [unet["model_channels"] * factor for factor in unet["channel_mult"]]
    attends = [2**level in unet["attention_resolutions"] for level in range(len(channels))]
    return {
        "sample_size": unet["image_size"],
        "in_channels": unet["in_channels"],
        "out_channels": unet["out_channels"],
        "block_out_channels": channels,
        "layers_per_block": unet["num_res_blocks"],
        "down_block_types": ["CrossAttnDownBlock2D" if attend else "DownBlock2D" for attend in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if attend else "UpBlock2D" for attend in reversed(attends)],
        "transformer_layers_per_block": list(unet["transformer_depth"]),
        "attention_head_dim": [width // unet["num_head_channels"] for width in channels],  # means the number of heads
        "cross_attention_dim": unet["context_dim"],
        "use_linear_projection": unet["use_linear_in_transformer"],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": embedder(model_config, 2)["outdim"],
        "projection_class_embeddings_input_dim": unet["adm_in_channels"],
    }


def vae_config(model_config: Mapping) -> dict:
    """Return the arguments of ``AutoencoderKL`` for NeMo's ``first_stage_config``."""
    vae = model_config["first_stage_config"]["ddconfig"]
    levels = len(vae["ch_mult"])
    return {
        "in_channels": vae["in_channels"],
        "out_channels": vae["out_ch"],
        "latent_channels": vae["z_channels"],
        "block_out_channels": [vae["ch"] * factor for factor in vae["ch_mult"]],
        "layers_per_block": vae["num_res_blocks"],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "sample_size": vae["resolution"],
        "scaling_factor": model_config["scale_factor"],
    }


def text_config(shape: TextShape, activation: str) -> dict:
    """Return the arguments of ``CLIPTextConfig``. Start and end marker are the last two ids of the vocabulary."""
    return {
        **dict(zip(TEXT_SIZES, astuple(shape), strict=False)),
        "num_attention_heads": shape.width // CLIP_HEAD_WIDTH,
        "projection_dim": shape.projection or shape.width,
        "hidden_act": activation,
        "bos_token_id": shape.vocab_size - 2,
        "eos_token_id": shape.vocab_size - 1,
        "pad_token_id": shape.vocab_size - 1,
    }


def build_modules(model_config: Mapping, clip1: TextShape, clip2: TextShape) -> dict:
    """Build the four networks, newly initialized, by their names in ``StableDiffusionXLPipeline``."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    return {
        "unet": UNet2DConditionModel(**unet_config(model_config)),
        "vae": AutoencoderKL(**vae_config(model_config)),
        "text_encoder": CLIPTextModel(CLIPTextConfig(**text_config(clip1, "quick_gelu"))),
        "text_encoder_2": CLIPTextModelWithProjection(CLIPTextConfig(**text_config(clip2, "gelu"))),
    }


def scheduler(model_config: Mapping = MappingProxyType({})):
    """Return diffusers' Euler sampler, changed to compute like NeMo's EulerEDMSampler on LegacyDDPMDiscretization.

    NeMo truncates timesteps where diffusers' trailing spacing rounds them, so some timesteps differ by 1 for most step
    counts. The initial noise has standard deviation sqrt(1 + sigma^2) instead of sigma, 0.23 % more. The noise levels
    are the config's; NeMo's own script uses SDXL's levels for every config, even where training used different levels.
    """
    import numpy as np
    from diffusers import EulerDiscreteScheduler

    class NemoEulerScheduler(EulerDiscreteScheduler):
        @property
        def init_noise_sigma(self):
            return (self.sigmas.max() ** 2 + 1) ** 0.5

        def set_timesteps(self, num_inference_steps: int, device=None, **_):
            last = self.config.num_train_timesteps - 1
            timesteps = np.linspace(last, 0, num_inference_steps, endpoint=False).astype(int)
            super().set_timesteps(device=device, timesteps=timesteps)

    return NemoEulerScheduler(**noise_config(model_config), timestep_spacing="trailing")


def tokenizers(clip1: TextShape, clip2: TextShape) -> tuple:
    """Return the tokenizers of both text encoders. CLIP-L pads with its end marker, OpenCLIP with "!" (id 0)."""
    return clip_tokenizer(clip1.vocab_size), clip_tokenizer(clip2.vocab_size, "!")


def diffusers_scheduler(model_config: Mapping):
    """Return the Euler sampler of SDXL base's folder, also the default of diffusers' ``from_single_file``."""
    from diffusers import EulerDiscreteScheduler

    return EulerDiscreteScheduler(**noise_config(model_config), timestep_spacing="leading", steps_offset=1)


def diffusers_called(networks: Mapping, tokenizers: Sequence, sampler) -> PipelineCall:
    """Build ``StableDiffusionXLPipeline`` from ``networks`` by component, with diffusers' own text conditioning."""
    from diffusers import StableDiffusionXLPipeline

    names = {"tokenizer": tokenizers[0], "tokenizer_2": tokenizers[1], "scheduler": sampler}
    pipe = StableDiffusionXLPipeline(**networks, **names, add_watermarker=False)
    return PipelineCall(FAMILY, pipe, [FAMILY.DENOISER], tokenizer=tokenizers[0])


def called(networks: Mapping, tokenizers: Sequence, sampler) -> PipelineCall:
    """Build ``StableDiffusionXLPipeline`` from ``networks`` by component, with NeMo's text conditioning.

    Without negative prompts NeMo's unconditional embedding is all zeros. The context is padded to 80 tokens by the text
    encoders' engines.
    """
    import torch

    call, names = diffusers_called(networks, tokenizers, sampler), ("text_encoder", "text_encoder_2")

    def embedded(texts: list[str]) -> tuple:
        """Encode texts to the context [B, S, C] and the pooled vector [B, P]."""
        options = {"padding": "max_length", "truncation": True, "max_length": CONTEXT_LENGTH}
        first, second = (
            networks[name](torch.tensor(tokenizer(texts, **options)["input_ids"]))
            for tokenizer, name in zip(tokenizers, names, strict=True)
        )
        return torch.cat([first.z, second.z], dim=-1), second.z_pooled

    def encode_prompt(
        prompt: list[str], second=None, device=None, images=1, guided=True, negative_prompt: list[str] | None = None,
        *_, **__,
    ) -> tuple:  # fmt: skip
        """Return context, unconditional context, pooled and unconditional pooled vector, as diffusers' method does.

        The ControlNet pipeline passes positional arguments.
        """
        context, pooled = embedded(prompt)
        if negative_prompt is None:
            return context, torch.zeros_like(context), pooled, torch.zeros_like(pooled)
        no_context, no_pooled = embedded(negative_prompt)
        return context, no_context, pooled, no_pooled

    call.pipe.encode_prompt = encode_prompt
    return call


@dataclass(frozen=True, slots=True)
class SdxlPipeline:
    """Padding, sampler and pipeline with which images are made from SDXL's networks."""

    tokens: int  # of the context that the UNet reads
    scheduler: Callable[[Mapping], Any]  # model_config -> the sampler
    called: Callable[[Mapping, Sequence, Any], PipelineCall]  # with networks by component, tokenizers and the scheduler


PIPELINES = {
    "nemo": SdxlPipeline(CONTEXT_TOKENS, scheduler, called),
    "diffusers": SdxlPipeline(CONTEXT_LENGTH, diffusers_scheduler, diffusers_called),
}
