"""Tiny text-to-video pipelines: every class of diffusers that makes frames of a prompt and nothing else.

Videos are of the fewest frames that leave more than one latent frame, so that no axis is one by accident. A class
stands twice where its denoiser runs in two ways that differ in structure (`CASES` names the way after a comma).
Classes that can take an image but also work without one are here; those that start from images are in `from_images`.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import diffusers
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from . import text
from . import video_autoencoders as autoencoders
from .cases import Case

TEXT = 32  # width of the embeddings of texts
TOKENS = 24  # of the longest text, where the call can say so
WAN = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 16, "out_channels": 16, "text_dim": TEXT,
    "freq_dim": 32, "ffn_dim": 64, "num_layers": 2,
}  # fmt: skip  # the sizes of Wan's denoiser and of its descendants
ROTATED = (4, 6, 6)  # channels of a head that turn by time, height and width


def assembled(kind: str, *pairs: text.Pair, **parts: Any) -> Any:
    """Returns a pipeline of these text encoders with their tokenizers and of its other parts."""
    for end, (encoder, tokenizer) in zip(("", "_2"), pairs, strict=False):
        parts |= {f"text_encoder{end}": encoder, f"tokenizer{end}": tokenizer}
    return getattr(diffusers, kind)(**parts)


def flow_unipc() -> Any:
    """Returns the scheduler of Wan and of its descendants."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)


def allegro() -> Any:
    return assembled(
        "AllegroPipeline", text.t5(TEXT),
        transformer=diffusers.AllegroTransformer3DModel(
            num_attention_heads=2, attention_head_dim=24, num_layers=2, cross_attention_dim=48, caption_channels=TEXT,
            sample_height=16, sample_width=16, sample_frames=6,
        ),
        vae=autoencoders.allegro(), scheduler=diffusers.EulerAncestralDiscreteScheduler(),
    )  # fmt: skip


def in_tiles(pipeline: Any) -> None:
    """Makes Allegro's autoencoder decode in tiles, the only way it has, one video at a time."""
    pipeline.vae.enable_tiling()
    pipeline.vae.enable_slicing()


def one_by_one(pipeline: Any) -> None:
    """Makes an autoencoder decode a batch one video at a time, the only way HunyuanVideo 1.5's attention allows."""
    pipeline.vae.enable_slicing()


def mends_nothing(pipeline: Any) -> None:
    """Stands in for ftfy where it is not installed; without it the classes that mend broken characters fail."""
    module: Any = sys.modules[type(pipeline).__module__]
    if not hasattr(module, "ftfy"):
        module.ftfy = SimpleNamespace(fix_text=str)


def animated(kind: str, *pairs: text.Pair, unet: dict[str, Any], **motion: Any) -> Any:
    """Returns a pipeline of Stable Diffusion's network with ``motion`` between its layers."""
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8}
    return assembled(
        kind, *pairs, unet=diffusers.UNet2DConditionModel(**sizes, cross_attention_dim=TEXT, **unet),
        motion_adapter=diffusers.MotionAdapter(
            block_out_channels=(16, 32), motion_layers_per_block=1, motion_num_attention_heads=2,
            motion_norm_num_groups=4, motion_max_seq_length=16, **motion,
        ),
        vae=autoencoders.frame_by_frame(),
        scheduler=diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False),
    )  # fmt: skip


def animate_diff() -> Any:
    levels = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return animated("AnimateDiffPipeline", text.clip(TEXT), unet=levels | {"attention_head_dim": 2})


def animate_diff_xl() -> Any:
    network = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": (2, 4),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": (1, 2),
        "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 16,
    }  # fmt: skip
    pairs = text.clip(16), text.clip(16, projected=True)
    return animated("AnimateDiffSDXLPipeline", *pairs, unet=network, use_motion_mid_block=False)


def any_flow(causal: bool = False) -> Any:
    """Returns the pipeline that denoises all frames at once, or, ``causal``, chunk after chunk of one and two."""
    far, chunks = ("FAR", {"chunk_partition": (1, 2)}) if causal else ("", {})
    network = getattr(diffusers, f"AnyFlow{far}Transformer3DModel")
    return assembled(
        f"AnyFlow{far}Pipeline", text.umt5(TEXT), transformer=network(**WAN, rope_max_seq_len=64, **chunks),
        vae=autoencoders.wan(), scheduler=diffusers.FlowMapEulerDiscreteScheduler(),
    )  # fmt: skip


def cogvideox(rotary: bool = False) -> Any:
    """Returns the pipeline with positions added to the tokens (the 2B model's) or, ``rotary``, turned (the 5B's)."""
    scheduler = diffusers.CogVideoXDPMScheduler if rotary else diffusers.CogVideoXDDIMScheduler
    return assembled(
        "CogVideoXPipeline", text.t5(TEXT),
        transformer=diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, time_embed_dim=32, text_embed_dim=TEXT, num_layers=2,
            sample_width=4, sample_height=4, sample_frames=9, max_text_seq_length=TOKENS,
            use_rotary_positional_embeddings=rotary,
        ),
        vae=autoencoders.cogvideox(), scheduler=scheduler(prediction_type="v_prediction"),
    )  # fmt: skip


def cosmos_omni() -> Any:
    """Returns Cosmos 3 without its parts for sound, whose denoiser is a language model that reads frames' latents."""
    tokenizer = text.qwen_tokenizer()
    transformer = diffusers.Cosmos3OmniTransformer(
        hidden_size=32, head_dim=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
        num_hidden_layers=2, latent_channel=16, patch_latent_dim=64, rope_axes_dim=(4, 2, 2),
        vocab_size=text.VOCABULARY,
    )  # fmt: skip
    return diffusers.Cosmos3OmniPipeline(
        transformer=transformer, text_tokenizer=tokenizer, vae=autoencoders.wan(), enable_safety_checker=False,
        scheduler=flow_unipc(),
    )  # fmt: skip


def easy_animate() -> Any:
    return assembled(
        "EasyAnimatePipeline", qwen2_vl(TEXT),
        transformer=diffusers.EasyAnimateTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=16, out_channels=16, patch_size=2, num_layers=2,
            mmdit_layers=1, time_embed_dim=32, text_embed_dim=TEXT, add_norm_text_encoder=True, sample_width=8,
            sample_height=8,
        ),
        vae=autoencoders.magvit(), scheduler=FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def helios(pyramid: bool = False) -> Any:
    """Returns the pipeline that denoises chunk after chunk, at one resolution or at a ``pyramid`` of three."""
    # With the default gamma of 1/3 the covariance of a block's noise has no Cholesky factor.
    stages = {"gamma": 0.25} if pyramid else {"stages": 1, "stage_range": [0, 1]}
    return assembled(
        "HeliosPyramidPipeline" if pyramid else "HeliosPipeline", text.umt5(TEXT),
        transformer=diffusers.HeliosTransformer3DModel(
            **(WAN | {"attention_head_dim": 24}), rope_dim=(8, 8, 8), is_amplify_history=pyramid
        ),
        vae=autoencoders.wan(), scheduler=diffusers.HeliosScheduler(**stages),
    )  # fmt: skip


def hunyuan() -> Any:
    return assembled(
        "HunyuanVideoPipeline", text.llama(TEXT, layers=4), text.clip(TEXT),  # Llama's second from the last is read
        transformer=diffusers.HunyuanVideoTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, num_layers=2, num_single_layers=2, num_refiner_layers=2,
            text_embed_dim=TEXT, pooled_projection_dim=TEXT, rope_axes_dim=ROTATED,
        ),
        vae=autoencoders.hunyuan(), scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )  # fmt: skip


def hunyuan_15() -> Any:
    return assembled(
        "HunyuanVideo15Pipeline", text.qwen2_5_vl(TEXT, layers=4, text_only=True), text.byte_t5(TEXT),
        transformer=diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=33, out_channels=16, num_attention_heads=2, attention_head_dim=16, num_layers=2,
            num_refiner_layers=2, text_embed_dim=TEXT, text_embed_2_dim=TEXT, image_embed_dim=24, rope_axes_dim=ROTATED,
            target_size=64, task_type="t2v",
        ),
        vae=autoencoders.hunyuan_15(), scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )  # fmt: skip


def kandinsky5() -> Any:
    """Returns the pipeline with a tokenizer in its processor's place, which needs torchvision for videos to read."""
    return assembled(
        "Kandinsky5T2VPipeline", text.qwen2_5_vl(TEXT), text.clip(TEXT),
        transformer=diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=16, out_visual_dim=16, in_text_dim=TEXT, in_text_dim2=TEXT, time_dim=32, model_dim=32,
            ff_dim=64, num_text_blocks=2, num_visual_blocks=2, axes_dims=ROTATED,
        ),
        vae=autoencoders.hunyuan(), scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )  # fmt: skip


def latte() -> Any:
    return assembled(
        "LattePipeline", text.t5(TEXT),
        transformer=diffusers.LatteTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2,
            cross_attention_dim=32, attention_bias=True, sample_size=4, patch_size=2,
            activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_single",
            norm_elementwise_affine=False, norm_eps=1e-6, caption_channels=TEXT, video_length=3,
        ),
        vae=autoencoders.frame_by_frame(), scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )  # fmt: skip


def ltx() -> Any:
    return assembled(
        "LTXPipeline", text.t5(TEXT),
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
            num_layers=2, caption_channels=TEXT,
        ),
        vae=autoencoders.ltx(), scheduler=FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def mochi() -> Any:
    return assembled(
        "MochiPipeline", text.t5(TEXT),
        transformer=diffusers.MochiTransformer3DModel(  # its last block treats the text differently
            num_attention_heads=2, attention_head_dim=16, num_layers=3, pooled_projection_dim=16, text_embed_dim=TEXT,
            time_embed_dim=32, max_sequence_length=TOKENS,
        ),
        vae=autoencoders.mochi(), scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    )  # fmt: skip


def motif() -> Any:
    return assembled(
        "MotifVideoPipeline", t5gemma2(TEXT),
        transformer=diffusers.MotifVideoTransformer3DModel(
            in_channels=33, out_channels=16, num_attention_heads=2, attention_head_dim=16, num_layers=2,
            num_single_layers=3, num_decoder_layers=1, text_embed_dim=TEXT, rope_axes_dim=ROTATED,
            enable_text_cross_attention_dual=True, enable_text_cross_attention_single=True,
        ),
        vae=autoencoders.wan(), scheduler=FlowMatchEulerDiscreteScheduler(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )  # fmt: skip


def sana() -> Any:
    return assembled(
        "SanaVideoPipeline", text.gemma2(TEXT),
        transformer=diffusers.SanaVideoTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, num_layers=2, num_cross_attention_heads=2,
            cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=TEXT, rope_max_seq_len=64,
            sample_size=4,
        ),
        vae=autoencoders.wan(),
        scheduler=diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    )  # fmt: skip


def skyreels(forcing: bool = False, rate: bool = False) -> Any:
    """Returns the pipeline with one time for all frames or, ``forcing``, with a time of its own for each.

    A denoiser that is told the frames' ``rate``, as the 1.3B model's, adds it wrongly to more than one video.
    """
    return assembled(
        "SkyReelsV2DiffusionForcingPipeline" if forcing else "SkyReelsV2Pipeline", text.umt5(TEXT),
        vae=autoencoders.wan(), scheduler=flow_unipc(),
        transformer=diffusers.SkyReelsV2Transformer3DModel(**WAN, rope_max_seq_len=64, inject_sample_info=rate),
    )  # fmt: skip


def text_to_video_sd() -> Any:
    return assembled(
        "TextToVideoSDPipeline", text.clip(TEXT),
        unet=diffusers.UNet3DConditionModel(
            block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=TEXT, attention_head_dim=8,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), norm_num_groups=4, sample_size=8,
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        ),
        vae=autoencoders.frame_by_frame(), scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )  # fmt: skip


def wan(two: bool = False) -> Any:
    """Returns the pipeline with one denoiser (2.1) or, ``two``, one for each side of a time (2.2)."""
    pair = text.umt5(TEXT)
    first, *second = (diffusers.WanTransformer3DModel(**WAN, rope_max_seq_len=64) for _ in range(2 if two else 1))
    return assembled(
        "WanPipeline", pair, transformer=first, transformer_2=second[0] if two else None, vae=autoencoders.wan(),
        boundary_ratio=0.875 if two else None, scheduler=flow_unipc(),
    )  # fmt: skip


def qwen2_vl(width: int) -> text.Pair:
    """Returns a ``Qwen2VLForConditionalGeneration``."""
    tokenizer = text.qwen_tokenizer()
    heads = width // text.HEAD_WIDTH  # this class divides the width by the heads
    sizes = text.decoder_sizes(width) | {
        "num_attention_heads": heads, "num_key_value_heads": 1, "rope_parameters": text.rotation(4, 2, 2),
    }  # fmt: skip
    del sizes["head_dim"]
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": width, "num_heads": text.HEADS, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config=sizes, vision_config=vision, tie_word_embeddings=False, **text.qwen_markers(tokenizer)
    )
    return transformers.Qwen2VLForConditionalGeneration(config), tokenizer


def t5gemma2(width: int) -> text.Pair:
    """Returns a ``T5Gemma2Encoder``, which could read images too, with Gemma's tokenizer."""
    from transformers.models.t5gemma2.configuration_t5gemma2 import T5Gemma2EncoderConfig
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": text.HEADS,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    last = text.VOCABULARY - 1
    config = T5Gemma2EncoderConfig(
        text_config=text.decoder_sizes(width) | {"query_pre_attn_scalar": text.HEAD_WIDTH, "dropout_rate": 0.0},
        vision_config=vision,
        mm_tokens_per_image=4, boi_token_index=last - 2, eoi_token_index=last - 1, image_token_index=last,
    )  # fmt: skip
    return T5Gemma2Encoder(config, eoi_token_index=last - 1), text.gemma_tokenizer()


# Two chunks of Helios: the second reads the latents of the first, the oldest in the longest of its three memories.
TWO_CHUNKS = {"num_frames": 26, "num_latent_frames_per_chunk": 4, "history_sizes": [4, 2, 1]}


def case(build: Callable[[], Any], larger: tuple[int, int] = (48, 32), size: int = 32, **options: Any) -> Case:
    """Returns a case of ``size`` x ``size`` pixels; ``options`` are other fields of it, or arguments of the call."""
    fields = {
        name: options.pop(name) for name in ("denoiser", "batched", "needs", "steps", "prepare") if name in options
    }
    return Case(build, size, size, larger, options, **fields)


limited = partial(case, max_sequence_length=TOKENS)
kept = partial(limited, needs=("accelerate",))  # the denoiser's class keeps modules in 32 bits
mended = partial(kept, prepare=mends_nothing)
CASES: dict[str, Case] = {
    "AllegroPipeline": limited(allegro, (144, 128), 128, num_frames=24, prepare=in_tiles),
    "AnimateDiffPipeline": case(animate_diff, num_frames=3, denoiser="unet"),
    "AnimateDiffSDXLPipeline": case(animate_diff_xl, num_frames=3, denoiser="unet"),
    "AnyFlowPipeline": kept(any_flow, num_frames=5),
    "AnyFlowFARPipeline": kept(partial(any_flow, causal=True), num_frames=9),
    "CogVideoXPipeline": limited(cogvideox, num_frames=9),
    "CogVideoXPipeline, rotary": limited(partial(cogvideox, rotary=True), num_frames=9),
    "Cosmos3OmniPipeline": case(cosmos_omni, num_frames=5, batched=False, needs=("accelerate",)),
    # Guidance wants as many negative prompts as prompts.
    "EasyAnimatePipeline": case(easy_animate, num_frames=5, negative_prompt="blurry", batched=False),
    "EasyAnimatePipeline, no guidance": case(easy_animate, num_frames=5, guidance_scale=1.0),
    "HeliosPipeline": mended(helios, (128, 64), 64, **TWO_CHUNKS),
    "HeliosPyramidPipeline": mended(
        partial(helios, pyramid=True), (128, 64), 64, steps="pyramid_num_inference_steps_list",
        pyramid_num_inference_steps_list=[1, 1, 1], **TWO_CHUNKS,
    ),
    # A tiny vocabulary makes more tokens of a template than are cut off: the rest of it, and the prompt, have to fit.
    "HunyuanVideoPipeline": case(hunyuan, num_frames=5, max_sequence_length=96),
    "HunyuanVideo15Pipeline": case(hunyuan_15, num_frames=5, prepare=one_by_one),
    "Kandinsky5T2VPipeline": kept(kandinsky5, num_frames=5, max_sequence_length=192),
    "LTXPipeline": limited(ltx, (96, 64), 64, num_frames=9),
    "LattePipeline": case(latte, video_length=3),
    "MochiPipeline": limited(mochi, num_frames=7),
    "MotifVideoPipeline": limited(motif, num_frames=5),
    "SanaVideoPipeline": limited(
        sana, (64, 32), frames=5, complex_human_instruction=None, use_resolution_binning=False
    ),
    "SkyReelsV2Pipeline": mended(skyreels, num_frames=5),
    "SkyReelsV2DiffusionForcingPipeline": mended(partial(skyreels, forcing=True), num_frames=5),
    "SkyReelsV2DiffusionForcingPipeline, rate": mended(
        partial(skyreels, forcing=True, rate=True), num_frames=5, batched=False
    ),
    "TextToVideoSDPipeline": case(text_to_video_sd, num_frames=3, denoiser="unet"),
    "WanPipeline": kept(wan, num_frames=5),
    "WanPipeline, two denoisers": kept(partial(wan, two=True), num_frames=5),
}  # fmt: skip
REASONS = {
    "is made to continue images or videos, and Cosmos's check of prompts needs the package cosmos_guardrail": (
        "Cosmos2VideoToWorld Cosmos2_5_PredictBase CosmosVideoToWorld"
    ),
    "its check of prompts and frames cannot be left away and needs the package cosmos_guardrail": "CosmosTextToWorld",
    "is steered by another video, by frames or by a control network": (
        "AnimateDiffControlNet AnimateDiffSparseControlNet Cosmos2_5_Transfer"
    ),
    "makes sound with the video": (
        "Kandinsky6TI2VA LTX2 LTX2Condition LTX2DFR LTX2DFRTemporalRefine LTX2ImageToVideo LTX2InContext"
    ),
    "edits a reference with LTX 2's denoiser, which makes sound too": "LTX2HDR",
    "is AnimateDiffPipeline with another guidance": "AnimateDiffPAG",
    "is deprecated, sets attention processors of Stable Diffusion's network in each run, and opens with a safety "
    "checker only": "TextToVideoZero",
    "is deprecated and sets attention processors of Stable Diffusion XL's network in each run": "TextToVideoZeroSDXL",
}
LEFT_OUT: dict[str, str] = {f"{name}Pipeline": reason for reason, names in REASONS.items() for name in names.split()}
