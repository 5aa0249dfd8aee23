"""Tiny text-to-video pipelines: every class of diffusers that makes frames of a prompt and nothing else.

Videos are of the fewest frames that leave more than one latent frame, so that no axis is one by accident. A class
stands twice where its denoiser runs in two ways that differ in structure (`CASES` names the way after a comma).
Classes that can take an image but also work without one are here; those that start from images are in `from_images`.
"""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import diffusers
import transformers

from . import autoencoders, text
from .cases import Case, row
from .images import flow

TEXT = 32  # width of the embeddings of texts
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
WAN: dict[str, Any] = dict(  # the sizes of Wan's denoiser and of its descendants
    in_channels=16, out_channels=16, text_dim=TEXT, freq_dim=32, ffn_dim=64, num_layers=2, **HEADS
)
LONG = WAN | {"rope_max_seq_len": 64}
ROTATED = (4, 6, 6)  # channels of a head that turn by time, height and width
UNET = dict(block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, sample_size=8, cross_attention_dim=TEXT)
MOTION = dict(
    block_out_channels=(16, 32), motion_layers_per_block=1, motion_num_attention_heads=2, motion_norm_num_groups=4,
    motion_max_seq_length=16,
)  # fmt: skip

unipc = partial(diffusers.UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True)
ddim = partial(diffusers.DDIMScheduler, clip_sample=False)
guider = partial(diffusers.ClassifierFreeGuidance, guidance_scale=6.0)


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


def wan_vae() -> Any:
    """Returns the autoencoder for a pipeline whose signature names another first."""
    return diffusers.AutoencoderKLWan(**autoencoders.WAN)


def qwen2_vl() -> text.Pair:
    """Returns a ``Qwen2VLForConditionalGeneration``."""
    tokenizer = text.qwen_tokenizer()
    sizes = text.decoder_sizes(TEXT) | {  # this class divides the width by the heads
        "num_attention_heads": TEXT // text.HEAD_WIDTH, "num_key_value_heads": 1,
        "rope_parameters": text.rotation(4, 2, 2),
    }  # fmt: skip
    del sizes["head_dim"]
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": TEXT, "num_heads": text.HEADS, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config=sizes, vision_config=vision, tie_word_embeddings=False, **text.qwen_markers(tokenizer)
    )
    return transformers.Qwen2VLForConditionalGeneration(config), tokenizer


def t5gemma2() -> text.Pair:
    """Returns a ``T5Gemma2Encoder``, which could read images too, with Gemma's tokenizer."""
    from transformers.models.t5gemma2.configuration_t5gemma2 import T5Gemma2EncoderConfig
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": text.HEADS,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    last = text.VOCABULARY - 1
    config = T5Gemma2EncoderConfig(
        text_config=text.decoder_sizes(TEXT) | {"query_pre_attn_scalar": text.HEAD_WIDTH, "dropout_rate": 0.0},
        vision_config=vision,
        mm_tokens_per_image=4, boi_token_index=last - 2, eoi_token_index=last - 1, image_token_index=last,
    )  # fmt: skip
    return T5Gemma2Encoder(config, eoi_token_index=last - 1), text.gemma_tokenizer()


def case(kind: str, larger: tuple[int, int] = (48, 32), size: int = 32, **given: Any) -> tuple[str, Case]:
    """Returns a row of ``CASES``: of ``size`` x ``size`` pixels, with further arguments of the call among ``given``."""
    arguments = {name: given.pop(name) for name in ARGUMENTS & given.keys()}
    return row(kind, (size, size), larger, given | {"arguments": arguments})


ARGUMENTS = {
    "num_frames", "max_sequence_length", "frames", "video_length", "negative_prompt", "guidance_scale",
    "complex_human_instruction", "use_resolution_binning", "num_latent_frames_per_chunk", "history_sizes",
    "pyramid_num_inference_steps_list",
}  # fmt: skip
# Two chunks of Helios: the second reads the latents of the first, the oldest in the longest of its three memories.
TWO_CHUNKS = {"num_frames": 26, "num_latent_frames_per_chunk": 4, "history_sizes": [4, 2, 1]}
limited = partial(case, max_sequence_length=24)
kept = partial(limited, needs=("accelerate",))  # the denoiser's class keeps modules in 32 bits
mended = partial(kept, prepare=mends_nothing)
ANY_FLOW = dict(vae=autoencoders.WAN, scheduler=diffusers.FlowMapEulerDiscreteScheduler)
SKYREELS = dict(text_encoder=text.umt5, vae=autoencoders.WAN, num_frames=5, scheduler=unipc)
OF_FRAMES = dict(vae=autoencoders.FRAME_BY_FRAME, scheduler=ddim)
COGVIDEOX = dict(
    time_embed_dim=32, text_embed_dim=TEXT, num_layers=2, sample_width=4, sample_height=4, sample_frames=9,
    max_text_seq_length=24, **HEADS,
)  # fmt: skip
EASY = dict(
    text_encoder=qwen2_vl, num_frames=5, scheduler=flow,
    transformer=dict(
        in_channels=16, out_channels=16, patch_size=2, num_layers=2, mmdit_layers=1, time_embed_dim=32,
        text_embed_dim=TEXT, add_norm_text_encoder=True, sample_width=8, sample_height=8, **HEADS,
    ),
    vae=autoencoders.MAGVIT,
)  # fmt: skip
CASES: dict[str, Case] = dict([
    limited(
        "Allegro", (144, 128), 128, num_frames=24, prepare=in_tiles, text_encoder=text.t5,
        transformer=dict(
            num_attention_heads=2, attention_head_dim=24, num_layers=2, cross_attention_dim=48, caption_channels=TEXT,
            sample_height=16, sample_width=16, sample_frames=6,
        ),
        vae=autoencoders.ALLEGRO, scheduler=diffusers.EulerAncestralDiscreteScheduler,
    ),
    case(
        "AnimateDiff", num_frames=3, text_encoder=text.clip,
        unet=UNET | dict(
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=2,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        motion_adapter=MOTION, vae=autoencoders.FRAME_BY_FRAME, scheduler=partial(ddim, beta_schedule="linear"),
    ),
    case(
        "AnimateDiffSDXL", num_frames=3, text_encoder=partial(text.clip, 16),
        text_encoder_2=partial(text.clip, 16, projected=True),
        unet=UNET | dict(
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=(2, 4),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=(1, 2),
            use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 16,
        ),
        motion_adapter=MOTION | {"use_motion_mid_block": False}, vae=autoencoders.FRAME_BY_FRAME,
        scheduler=partial(ddim, beta_schedule="linear"),
    ),
    # all frames at once, or chunk after chunk of one and two
    kept("AnyFlow", num_frames=5, text_encoder=text.umt5, transformer=LONG, **ANY_FLOW),
    kept(
        "AnyFlowFAR", num_frames=9, text_encoder=text.umt5, transformer=LONG | {"chunk_partition": (1, 2)}, **ANY_FLOW
    ),
    # positions are added to the tokens (the 2B model's), or turned (the 5B's)
    limited(
        "CogVideoX", num_frames=9, text_encoder=text.t5, transformer=COGVIDEOX, vae=autoencoders.COGVIDEOX,
        scheduler=partial(diffusers.CogVideoXDDIMScheduler, prediction_type="v_prediction"),
    ),
    limited(
        "CogVideoX, rotary", num_frames=9, text_encoder=text.t5,
        transformer=COGVIDEOX | {"use_rotary_positional_embeddings": True}, vae=autoencoders.COGVIDEOX,
        scheduler=partial(diffusers.CogVideoXDPMScheduler, prediction_type="v_prediction"),
    ),
    # without its parts for sound; its denoiser is a language model that reads frames' latents
    case(
        "Cosmos3Omni", num_frames=5, batched=False, needs=("accelerate",), text_tokenizer=text.qwen_tokenizer,
        transformer=dict(
            hidden_size=32, head_dim=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
            num_hidden_layers=2, latent_channel=16, patch_latent_dim=64, rope_axes_dim=(4, 2, 2),
            vocab_size=text.VOCABULARY,
        ),
        vae=autoencoders.WAN, enable_safety_checker=False, scheduler=unipc,
    ),
    case("EasyAnimate", negative_prompt="blurry", batched=False, **EASY),  # as many negative prompts as prompts
    case("EasyAnimate, no guidance", guidance_scale=1.0, **EASY),
    # chunk after chunk, at one resolution or at a pyramid of three
    mended(
        "Helios", (128, 64), 64, **TWO_CHUNKS, text_encoder=text.umt5,
        transformer=WAN | dict(attention_head_dim=24, rope_dim=(8, 8, 8), is_amplify_history=False),
        vae=autoencoders.WAN, scheduler=partial(diffusers.HeliosScheduler, stages=1, stage_range=[0, 1]),
    ),
    mended(  # with the default gamma of 1/3 the covariance of a block's noise has no Cholesky factor
        "HeliosPyramid", (128, 64), 64, **TWO_CHUNKS, text_encoder=text.umt5,
        transformer=WAN | dict(attention_head_dim=24, rope_dim=(8, 8, 8), is_amplify_history=True),
        vae=autoencoders.WAN, scheduler=partial(diffusers.HeliosScheduler, gamma=0.25),
        steps="pyramid_num_inference_steps_list", pyramid_num_inference_steps_list=[1, 1, 1],
    ),
    # A tiny vocabulary makes more tokens of a template than are cut off: the rest of it, and the prompt, have to fit.
    case(
        "HunyuanVideo", num_frames=5, max_sequence_length=96, scheduler=partial(flow, shift=7.0),
        text_encoder=partial(text.llama, layers=4), text_encoder_2=text.clip,  # Llama's second from the last is read
        transformer=dict(
            num_layers=2, num_single_layers=2, num_refiner_layers=2, text_embed_dim=TEXT, pooled_projection_dim=TEXT,
            rope_axes_dim=ROTATED, **HEADS,
        ),
        vae=autoencoders.HUNYUAN,
    ),
    case(
        "HunyuanVideo15", num_frames=5, prepare=one_by_one, scheduler=partial(flow, shift=5.0), guider=guider,
        text_encoder=partial(text.qwen2_5_vl, layers=4, text_only=True), text_encoder_2=text.byte_t5,
        transformer=dict(
            in_channels=33, out_channels=16, num_layers=2, num_refiner_layers=2, text_embed_dim=TEXT,
            text_embed_2_dim=TEXT, image_embed_dim=24, rope_axes_dim=ROTATED, target_size=64, task_type="t2v", **HEADS,
        ),
        vae=autoencoders.HUNYUAN_15,
    ),
    # with a tokenizer in its processor's place, which needs torchvision for videos to read
    kept(
        "Kandinsky5T2V", num_frames=5, max_sequence_length=192, text_encoder=text.qwen2_5_vl, text_encoder_2=text.clip,
        transformer=dict(
            in_visual_dim=16, out_visual_dim=16, in_text_dim=TEXT, in_text_dim2=TEXT, time_dim=32, model_dim=32,
            ff_dim=64, num_text_blocks=2, num_visual_blocks=2, axes_dims=ROTATED,
        ),
        vae=autoencoders.HUNYUAN, scheduler=partial(flow, shift=5.0),
    ),
    limited(
        "LTX", (96, 64), 64, num_frames=9, text_encoder=text.t5, scheduler=flow,
        transformer=dict(
            in_channels=16, out_channels=16, cross_attention_dim=32, num_layers=2, caption_channels=TEXT, **HEADS
        ),
        vae=autoencoders.LTX,
    ),
    case(
        "Latte", video_length=3, text_encoder=text.t5,
        transformer=dict(
            in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=32, attention_bias=True, sample_size=4,
            patch_size=2, activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_single",
            norm_elementwise_affine=False, norm_eps=1e-6, caption_channels=TEXT, video_length=3, **HEADS,
        ),
        **OF_FRAMES,
    ),
    limited(
        "Mochi", num_frames=7, text_encoder=text.t5, scheduler=partial(flow, invert_sigmas=True),
        transformer=dict(  # its last block treats the text differently
            num_layers=3, pooled_projection_dim=16, text_embed_dim=TEXT, time_embed_dim=32, max_sequence_length=24,
            **HEADS,
        ),
        vae=autoencoders.MOCHI,
    ),
    limited(
        "MotifVideo", num_frames=5, text_encoder=t5gemma2, scheduler=flow, guider=guider,
        transformer=dict(
            in_channels=33, out_channels=16, num_layers=2, num_single_layers=3, num_decoder_layers=1,
            text_embed_dim=TEXT, rope_axes_dim=ROTATED, enable_text_cross_attention_dual=True,
            enable_text_cross_attention_single=True, **HEADS,
        ),
        vae=autoencoders.WAN,
    ),
    limited(
        "SanaVideo", (64, 32), frames=5, complex_human_instruction=None, use_resolution_binning=False,
        text_encoder=text.gemma2,
        transformer=dict(
            num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32,
            caption_channels=TEXT, rope_max_seq_len=64, sample_size=4, **HEADS,
        ),
        vae=wan_vae,
        scheduler=partial(
            diffusers.DPMSolverMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True
        ),
    ),
    # one time for all frames, or a time of its own for each
    mended("SkyReelsV2", **SKYREELS, transformer=LONG | {"inject_sample_info": False}),
    mended(
        "SkyReelsV2DiffusionForcing", **SKYREELS, transformer=LONG | {"inject_sample_info": False}
    ),
    # a denoiser that is told the frames' rate, as the 1.3B model's, adds it wrongly to more than one video
    mended(
        "SkyReelsV2DiffusionForcing, rate", batched=False, **SKYREELS,
        transformer=LONG | {"inject_sample_info": True},
    ),
    case(
        "TextToVideoSD", num_frames=3, text_encoder=text.clip,
        unet=UNET | dict(
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), attention_head_dim=8,
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        ),
        **OF_FRAMES,
    ),
    # one denoiser (2.1), or one for each side of a time (2.2)
    kept("Wan", text_encoder=text.umt5, transformer=LONG, vae=autoencoders.WAN, scheduler=unipc, num_frames=5),
    kept(
        "Wan, two denoisers", text_encoder=text.umt5, transformer=LONG, transformer_2=LONG, vae=autoencoders.WAN,
        boundary_ratio=0.875, scheduler=unipc, num_frames=5,
    ),
])  # fmt: skip
