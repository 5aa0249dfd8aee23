"""Tiny text-to-image pipelines.

A denoiser is 32 wide: two heads of 16. Its text is 32 wide, or 64 where two encoders are joined. Images are wider than
high, so that no axis stands for the other, and a few tokens each way.
"""

from functools import partial
from typing import Any

import diffusers
from torch import nn

from . import text
from .autoencoders import (
    DEEP_COMPRESSION,
    FLUX2,
    HUNYUAN_IMAGE,
    KL,
    QWEN_IMAGE,
    SHIFTED,
    TINY,
    VQ,
    WAN_OF_IMAGES,
    levels,
    statistics,
)
from .cases import Case, row

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
WIDTH = 32
AXES = (4, 6, 6)  # of rotary embeddings: a head of 16 by time, height and width
SD_NOISE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
SHORT = {"max_sequence_length": 32}

euler = partial(diffusers.EulerDiscreteScheduler, **SD_NOISE)
flow = diffusers.FlowMatchEulerDiscreteScheduler
dynamic_flow = partial(flow, use_dynamic_shifting=True, shift=3.0)  # shifts by the number of tokens, as Flux's
cogview_flow = partial(flow, use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear")
projected_clip = partial(text.clip, projected=True)
second_clip = partial(text.clip, projected=True, pad_token="!")

# Two levels with attention in both; attention_head_dim counts heads: https://github.com/huggingface/diffusers/issues/2011
UNET: dict[str, Any] = dict(
    sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, cross_attention_dim=WIDTH,
    down_block_types=("CrossAttnDownBlock2D",) * 2, up_block_types=("CrossAttnUpBlock2D",) * 2, attention_head_dim=2,
)  # fmt: skip
SIZED = dict(  # reads six sizes and a pooled text, as SDXL's
    transformer_layers_per_block=(1, 2), use_linear_projection=True, addition_embed_type="text_time",
    addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + WIDTH,
)  # fmt: skip
SIMPLE = dict(  # of the pipelines with blocks without transformers
    down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"), attention_head_dim=16,
    up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), encoder_hid_dim=WIDTH,
    mid_block_type="UNetMidBlock2DSimpleCrossAttn", resnet_time_scale_shift="scale_shift",
)  # fmt: skip
STREAMS = dict(num_layers=2, num_single_layers=2, **HEADS)  # blocks of two streams, text and image, and of one
FLUX = dict(in_channels=16, joint_attention_dim=WIDTH, axes_dims_rope=AXES, **STREAMS)
OF_FLUX2 = dict(
    in_channels=32, joint_attention_dim=3 * WIDTH, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4), **STREAMS
)
COGVIEW = dict(
    in_channels=4, out_channels=4, num_layers=2, text_embed_dim=WIDTH, time_embed_dim=16, condition_dim=8, **HEADS
)
PIXART = dict(
    text_encoder=text.t5, scheduler=diffusers.DPMSolverMultistepScheduler,
    arguments=SHORT | {"use_resolution_binning": False, "clean_caption": False},
    transformer=dict(
        sample_size=8, num_layers=2, in_channels=4, out_channels=8, cross_attention_dim=WIDTH, caption_channels=WIDTH,
        norm_num_groups=4, use_additional_conditions=False, **HEADS,
    ),
    vae=KL,
)  # fmt: skip
PRX = dict(in_channels=4, context_in_dim=WIDTH, hidden_size=WIDTH, mlp_ratio=2.0, num_heads=2, depth=2, axes_dim=[8, 8])
SANA = dict(
    in_channels=8, out_channels=8, num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=16,
    cross_attention_dim=WIDTH, caption_channels=WIDTH, sample_size=8, **HEADS,
)  # fmt: skip
OF_SANA = dict(
    size=(96, 64), larger=(128, 96), text_encoder=text.gemma2,
    arguments=SHORT | {"use_resolution_binning": False},
)  # fmt: skip
DREAM_LITE = dict(
    batched=False, text_encoder=text.qwen3_vl, processor=text.qwen_tokenizer, scheduler=flow,
    unet=dict(
        block_out_channels=(16, 32, 32), layers_per_block=1, norm_num_groups=4, cross_attention_dim=WIDTH,
        attention_head_dim=2, ff_mult=2, addition_embed_type_num_heads=2,
    ),
    vae=TINY,
)  # fmt: skip
IDEOGRAM = dict(
    in_channels=32, num_layers=2, intermediate_size=2 * WIDTH, adaln_dim=16, llm_features_dim=13 * 16,
    mrope_section=(4, 2, 2), **HEADS,
)  # fmt: skip


def nucleus() -> Any:
    """Returns a denoiser whose experts' memory, which the class leaves as it finds it, is drawn."""
    denoiser = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=32, out_channels=8, num_layers=5, num_key_value_heads=1, joint_attention_dim=WIDTH,
        axes_dims_rope=AXES, num_experts=4, moe_intermediate_dim=WIDTH, capacity_factors=2.0, mlp_ratio=6.0, **HEADS,
    )  # fmt: skip
    for name, parameter in denoiser.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return denoiser


def case(kind: str, size=(64, 48), larger=(96, 80), **given: Any) -> tuple[str, Case]:
    """Returns a row of ``CASES``: of 64 by 48 pixels, and 96 by 80, which 16 divides."""
    return row(kind, size, larger, given)


CASES: dict[str, Case] = dict([
    case("StableDiffusion", text_encoder=text.clip, vae=KL, unet=UNET, scheduler=euler, requires_safety_checker=False),
    case(
        "StableDiffusionXL", text_encoder=text.clip, text_encoder_2=second_clip, scheduler=euler, add_watermarker=False,
        unet=UNET | SIZED | {"cross_attention_dim": 2 * WIDTH}, vae=KL,
    ),
    case(
        "StableDiffusion3", text_encoder=projected_clip, text_encoder_2=second_clip,
        text_encoder_3=partial(text.t5, 2 * WIDTH), arguments=SHORT,
        transformer=dict(
            sample_size=8, in_channels=8, out_channels=8, num_layers=2, joint_attention_dim=2 * WIDTH,
            caption_projection_dim=WIDTH, pooled_projection_dim=2 * WIDTH, pos_embed_max_size=16, qk_norm="rms_norm",
            dual_attention_layers=(0,), **HEADS,
        ),
        vae=SHIFTED | {"latent_channels": 8}, scheduler=partial(flow, shift=3.0),
    ),
    case(
        "Flux", transformer=FLUX | dict(pooled_projection_dim=WIDTH, guidance_embeds=True), vae=SHIFTED,
        text_encoder=text.clip, text_encoder_2=text.t5, scheduler=dynamic_flow, arguments=SHORT,
    ),
    case("PixArtAlpha", **PIXART),
    case("PixArtSigma", **PIXART),
    case(
        "AuraFlow", text_encoder=text.umt5, scheduler=flow, arguments=SHORT,
        transformer=dict(
            sample_size=8, in_channels=4, out_channels=4, num_mmdit_layers=2, num_single_dit_layers=2,
            joint_attention_dim=WIDTH, caption_projection_dim=WIDTH, pos_embed_max_size=64, **HEADS,
        ),
        vae=KL,
    ),
    case(
        "Bria", transformer=FLUX | {"axes_dims_rope": list(AXES)}, vae=KL, text_encoder=partial(text.t5, length=128),
        scheduler=flow, arguments=SHORT,
    ),
    case(
        "Amused", text_encoder=projected_clip, scheduler=partial(diffusers.AmusedScheduler, mask_token_id=32),
        transformer=dict(
            hidden_size=WIDTH, cond_embed_dim=WIDTH, micro_cond_encode_dim=8, micro_cond_embed_dim=5 * 8,
            encoder_hidden_size=WIDTH, vocab_size=33, codebook_size=32, in_channels=WIDTH, block_out_channels=WIDTH,
            num_res_blocks=2, block_num_heads=2, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=2 * WIDTH, sample_size=8,
        ),
        vqvae=VQ | {"lookup_from_codebook": True},
    ),
    case(
        "BriaFibo2", text_encoder=partial(text.qwen3_vl, 16, layers=36),  # the pipeline reads 6 times 3 of 36 layers
        transformer=dict(
            in_channels=8, dim=WIDTH, n_layers=3, n_refiner_layers=2, n_heads=2, cap_feat_dim=3 * 16,
            injection_layer_ids=(0, 0, 1, 1, 2), min_num_gist_tokens=8, max_num_gist_tokens=16, gist_step=4,
            gist_min_text_len=16, gist_max_text_len=64, axes_dims=AXES, axes_lens=(256, 64, 64),
        ),
        vae=FLUX2, scheduler=flow,
    ),
    case(
        "BriaFibo", (96, 64), (128, 96), arguments={"negative_prompt": "low quality"},
        transformer=FLUX | dict(joint_attention_dim=2 * WIDTH, text_encoder_dim=WIDTH, axes_dims_rope=list(AXES)),
        vae=WAN_OF_IMAGES, text_encoder=partial(text.smollm3, layers=4), scheduler=flow,
    ),
    case(
        "Chroma", scheduler=dynamic_flow, arguments=SHORT,
        transformer=FLUX | dict(approximator_num_channels=16, approximator_hidden_dim=32, approximator_layers=2),
        vae=SHIFTED, text_encoder=text.t5,
    ),
    case(
        "CogView3Plus", text_encoder=text.t5, transformer=COGVIEW | dict(pos_embed_max_size=16, sample_size=8), vae=KL,
        scheduler=diffusers.CogVideoXDDIMScheduler, arguments=SHORT,
    ),
    case(
        "CogView4", text_encoder=text.glm, scheduler=cogview_flow, arguments=SHORT,
        transformer=COGVIEW | dict(pos_embed_max_size=16, sample_size=8, rope_axes_dim=(8, 8)), vae=KL,
    ),
    case("DreamLite", **DREAM_LITE),
    case("DreamLiteMobile", **DREAM_LITE),
    case(
        "ErnieImage", arguments={"use_pe": False}, scheduler=partial(flow, shift=4.0),
        transformer=dict(
            hidden_size=WIDTH, num_attention_heads=2, num_layers=2, ffn_hidden_size=2 * WIDTH, in_channels=32,
            out_channels=32, text_in_dim=WIDTH, rope_axes_dim=AXES,
        ),
        vae=FLUX2, text_encoder=partial(text.mistral3, generating=False),
    ),
    case(
        "Flux2", arguments={"max_sequence_length": 128, "text_encoder_out_layers": (1, 2, 3)}, scheduler=dynamic_flow,
        text_encoder=partial(text.mistral3, layers=3), vae=FLUX2, transformer=OF_FLUX2 | {"guidance_embeds": True},
    ),
    case(
        "Flux2Klein", arguments={"max_sequence_length": 128, "text_encoder_out_layers": (1, 2, 3)},
        text_encoder=partial(text.qwen3, layers=3, causal=True), vae=FLUX2,
        transformer=OF_FLUX2 | {"guidance_embeds": False}, scheduler=dynamic_flow,
    ),
    case(
        "GlmImage", (96, 64), (128, 96), vision_language_encoder=text.glm_image, text_encoder=text.byte_t5,
        transformer=COGVIEW | {"prior_vq_quantizer_codebook_size": 64}, vae=KL | statistics(4), scheduler=cogview_flow,
        arguments=SHORT,
    ),
    case(  # scaled to 4096 tokens
        "HiDreamImage", arguments=SHORT, scheduler=partial(flow, shift=3.0),
        transformer=dict(
            patch_size=2, in_channels=4, out_channels=4, caption_channels=[WIDTH, WIDTH], text_emb_dim=2 * WIDTH,
            num_routed_experts=4, num_activated_experts=2, axes_dims_rope=(8, 4, 4), max_resolution=(128, 128),
            llama_layers=[0, 1, 1, 1], **STREAMS,
        ),
        vae=SHIFTED | levels(2), text_encoder=projected_clip, text_encoder_2=projected_clip,
        text_encoder_3=partial(text.t5, length=128), text_encoder_4=partial(text.llama, causal=True),
    ),
    case(
        "HunyuanDiT", arguments={"use_resolution_binning": False}, text_encoder=text.bert,
        text_encoder_2=partial(text.t5, length=256),
        transformer=dict(
            in_channels=4, patch_size=2, sample_size=8, hidden_size=WIDTH, num_layers=4, cross_attention_dim=WIDTH,
            cross_attention_dim_t5=WIDTH, pooled_projection_dim=16, text_len=77, text_len_t5=256,
            activation_fn="gelu-approximate", **HEADS,
        ),
        vae=KL, requires_safety_checker=False,
        scheduler=partial(
            diffusers.DDPMScheduler, prediction_type="v_prediction", beta_schedule="scaled_linear", beta_start=0.00085,
            beta_end=0.02,
        ),
    ),
    case(
        "HunyuanImage", (192, 128), (256, 192), scheduler=partial(flow, shift=5.0),
        transformer=dict(
            in_channels=8, out_channels=8, text_embed_dim=WIDTH, text_embed_2_dim=WIDTH, rope_axes_dim=(8, 8), **STREAMS
        ),
        vae=HUNYUAN_IMAGE, text_encoder=partial(text.qwen2_5_vl, layers=4), text_encoder_2=text.byte_t5,
    ),
    case(
        "Ideogram4", arguments={"max_sequence_length": 64, "guidance_scale": 5.0, "guidance_schedule": None},
        text_encoder=partial(text.qwen3_vl, 16, layers=36, generating=False),  # the pipeline reads 13 of 36 layers
        transformer=IDEOGRAM, unconditional_transformer=IDEOGRAM, vae=FLUX2, scheduler=flow,
    ),
    case(
        "IF", (32, 24), (48, 40), arguments={"clean_caption": False}, text_encoder=text.t5,
        unet=UNET | SIMPLE | dict(
            in_channels=3, out_channels=6, encoder_hid_dim_type="text_proj", addition_embed_type="text",
            addition_embed_type_num_heads=2, cross_attention_norm="group_norm", act_fn="gelu", class_embed_type=None,
            time_embedding_dim=WIDTH, sample_size=32,
        ),
        scheduler=partial(
            diffusers.DDPMScheduler, variance_type="learned_range", thresholding=True,
            beta_schedule="squaredcos_cap_v2",
        ),
        requires_safety_checker=False,
    ),
    case(
        "Kandinsky3", (192, 128), (256, 192), text_encoder=partial(text.t5, length=128),
        unet=dict(
            time_embedding_dim=WIDTH, groups=4, attention_head_dim=8, layers_per_block=2,
            block_out_channels=(16, 16, 16, 16), cross_attention_dim=WIDTH, encoder_hid_dim=WIDTH,
        ),
        movq=VQ, scheduler=partial(diffusers.DDPMScheduler, beta_schedule="squaredcos_cap_v2"),
    ),
    case(  # rounded to about 1024 by 1024
        "Kandinsky5T2I", larger=(48, 48), needs=("accelerate",), scheduler=partial(flow, shift=5.0),
        transformer=dict(
            in_visual_dim=4, out_visual_dim=4, in_text_dim=WIDTH, in_text_dim2=WIDTH, time_dim=16, model_dim=WIDTH,
            ff_dim=2 * WIDTH, num_text_blocks=2, num_visual_blocks=2, axes_dims=AXES,
        ),
        vae=SHIFTED, text_encoder=text.qwen2_5_vl, text_encoder_2=text.clip,
    ),
    case(
        "KandinskyV22Combined", arguments={"prior_num_inference_steps": 2}, prior_text_encoder=projected_clip,
        prior_prior=dict(num_layers=2, embedding_dim=WIDTH, num_embeddings=77, additional_embeddings=4, **HEADS),
        unet=UNET | SIMPLE | dict(out_channels=8, encoder_hid_dim_type="image_proj", addition_embed_type="image"),
        prior_image_encoder=text.clip_vision, movq=VQ,
        scheduler=partial(
            diffusers.DDPMScheduler, beta_schedule="linear", beta_start=0.00085, beta_end=0.012, clip_sample=False,
            variance_type="learned_range",
        ),
        prior_scheduler=partial(
            diffusers.UnCLIPScheduler, variance_type="fixed_small_log", prediction_type="sample",
            num_train_timesteps=1000, clip_sample_range=5.0,
        ),
    ),
    case(
        "Kolors", text_encoder=text.chatglm, scheduler=euler, arguments=SHORT,
        unet=UNET | SIZED | dict(encoder_hid_dim=WIDTH, encoder_hid_dim_type="text_proj"), vae=KL,
    ),
    case(
        "Krea2", arguments=SHORT, needs=("accelerate",), text_encoder_select_layers=(1, 2, 3), scheduler=dynamic_flow,
        text_encoder=partial(text.qwen3_vl, layers=3, generating=False),
        transformer=dict(
            in_channels=32, num_layers=2, num_key_value_heads=1, intermediate_size=2 * WIDTH, timestep_embed_dim=16,
            text_hidden_dim=WIDTH, num_text_layers=3, text_num_attention_heads=2, text_num_key_value_heads=2,
            text_intermediate_size=2 * WIDTH, axes_dims_rope=AXES, **HEADS,
        ),
        vae=QWEN_IMAGE,
    ),
    case(
        "LatentConsistencyModel", text_encoder=text.clip, vae=KL, unet=UNET | {"time_cond_proj_dim": WIDTH},
        scheduler=partial(
            diffusers.LCMScheduler, beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012
        ),
        requires_safety_checker=False,
    ),
    case(
        "LongCatImage", arguments={"enable_prompt_rewrite": False}, text_encoder=text.qwen2_5_vl,
        transformer=FLUX | dict(in_channels=64, pooled_projection_dim=WIDTH, axes_dims_rope=list(AXES)),
        vae=SHIFTED | {"latent_channels": 16}, text_processor=text.qwen_tokenizer, scheduler=dynamic_flow,
    ),
    case(
        "Lumina", arguments=SHORT | {"clean_caption": False}, text_encoder=text.gemma, scheduler=flow,
        transformer=dict(
            sample_size=8, hidden_size=WIDTH, num_layers=2, num_attention_heads=2, num_kv_heads=1, multiple_of=16,
            cross_attention_dim=WIDTH,
        ),
        vae=KL,
    ),
    case(
        "Lumina2", arguments={"max_sequence_length": 96}, scheduler=partial(flow, shift=6.0),
        transformer=dict(
            sample_size=8, in_channels=4, hidden_size=WIDTH, num_layers=2, num_refiner_layers=2, num_attention_heads=2,
            num_kv_heads=1, multiple_of=16, axes_dim_rope=AXES, axes_lens=(300, 16, 16), cap_feat_dim=WIDTH,
        ),
        vae=SHIFTED, text_encoder=text.gemma2,
    ),
    case(  # the pipeline reads the eighth layer from the end
        "NucleusMoEImage", arguments={"max_sequence_length": 128}, text_encoder=partial(text.qwen3_vl, layers=8),
        transformer=nucleus, vae=QWEN_IMAGE, scheduler=dynamic_flow,
    ),
    case(
        "OmniGen", needs=("torchvision",), tokenizer=text.sentence_llama_tokenizer,
        transformer=dict(
            hidden_size=WIDTH, num_attention_heads=2, num_key_value_heads=2, intermediate_size=2 * WIDTH, num_layers=2,
            pad_token_id=0, vocab_size=text.VOCABULARY, max_position_embeddings=4096, pos_embed_max_size=16,
            rope_scaling={"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.5] * 8}, time_step_dim=16,
        ),
        vae=KL, scheduler=partial(flow, invert_sigmas=True),
    ),
    case(
        "OvisImage", arguments=SHORT, transformer=FLUX | {"out_channels": 16}, vae=SHIFTED, text_encoder=text.qwen3,
        scheduler=dynamic_flow,
    ),
    # neither takes two prompts and guidance: a time for each of two images, whatever the batch
    case(
        "PRX", arguments={"use_resolution_binning": False, "skip_text_cleaning": True}, needs=("ftfy",), batched=False,
        transformer=PRX, text_encoder=text.t5gemma, vae=SHIFTED, scheduler=flow, default_sample_size=64,
    ),
    case(
        "PRXPixel", arguments={"use_resolution_binning": False}, needs=("ftfy",), batched=False,
        transformer=PRX | dict(in_channels=3, patch_size=8, bottleneck_size=16, resolution_embeds=True),
        text_encoder=text.qwen3, scheduler=flow, default_sample_size=64, prompt_max_tokens=32,
    ),
    case(
        "QwenImage", arguments=SHORT, scheduler=dynamic_flow,
        transformer=dict(
            in_channels=32, out_channels=8, num_layers=2, joint_attention_dim=WIDTH, axes_dims_rope=AXES, **HEADS
        ),
        vae=QWEN_IMAGE, text_encoder=text.qwen2_5_vl,
    ),
    case(
        "Sana", **OF_SANA, transformer=SANA, vae=DEEP_COMPRESSION,
        scheduler=partial(
            diffusers.DPMSolverMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True,
            flow_shift=3.0,
        ),
    ),
    case(
        "SanaSprint", **OF_SANA, transformer=SANA | dict(guidance_embeds=True, qk_norm="rms_norm_across_heads"),
        vae=DEEP_COMPRESSION, scheduler=partial(diffusers.SCMScheduler, prediction_type="trigflow", sigma_data=0.5),
    ),
    case(
        "ZImage", arguments=SHORT, scheduler=partial(flow, shift=3.0),
        transformer=dict(
            in_channels=4, dim=WIDTH, n_layers=2, n_refiner_layers=2, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH,
            axes_dims=list(AXES), axes_lens=[1024, 64, 64],
        ),
        vae=SHIFTED, text_encoder=text.qwen3,
    ),
])  # fmt: skip
