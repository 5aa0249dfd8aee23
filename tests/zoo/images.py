"""Tiny text-to-image pipelines, and why other classes are left out.

A denoiser is 32 wide: two heads of 16. Its text is 32 wide, or 64 where two encoders are joined. Images are wider than
high, so that no axis stands for the other, and a few tokens each way.
"""

from typing import Any

import diffusers
from torch import nn

from . import autoencoders, text
from .cases import Case

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
WIDTH = 32
AXES = (4, 6, 6)  # of rotary embeddings: a head of 16 by time, height and width
SD_NOISE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
SHORT = {"max_sequence_length": 32}


def flow(**options: Any) -> Any:
    """Returns the scheduler of flow matching."""
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


def dynamic_flow() -> Any:
    """Returns the scheduler of flow matching that shifts by the number of tokens, as Flux's."""
    return flow(use_dynamic_shifting=True, shift=3.0)


def unet(text_width: int = WIDTH, **options: Any) -> Any:
    """Returns a ``UNet2DConditionModel`` of two levels with attention in both."""
    # attention_head_dim counts heads here: https://github.com/huggingface/diffusers/issues/2011
    return diffusers.UNet2DConditionModel(**{
        "sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4,
        "down_block_types": ("CrossAttnDownBlock2D",) * 2, "up_block_types": ("CrossAttnUpBlock2D",) * 2,
        "cross_attention_dim": text_width, "attention_head_dim": 2,
    } | options)  # fmt: skip


def stable_diffusion() -> Any:
    encoder, tokenizer = text.clip()
    return diffusers.StableDiffusionPipeline(
        autoencoders.kl(), encoder, tokenizer, unet(), diffusers.EulerDiscreteScheduler(**SD_NOISE), None, None,
        requires_safety_checker=False,
    )  # fmt: skip


def latent_consistency() -> Any:
    encoder, tokenizer = text.clip()
    noise = {name: value for name, value in SD_NOISE.items() if name != "steps_offset"}
    return diffusers.LatentConsistencyModelPipeline(
        autoencoders.kl(), encoder, tokenizer, unet(time_cond_proj_dim=WIDTH), diffusers.LCMScheduler(**noise), None,
        None, requires_safety_checker=False,
    )  # fmt: skip


def stable_diffusion_xl() -> Any:
    first, second = text.clip(), text.clip(projected=True, pad_token="!")
    denoiser = unet(
        2 * WIDTH, transformer_layers_per_block=(1, 2), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        autoencoders.kl(), first[0], second[0], first[1], second[1], denoiser,
        diffusers.EulerDiscreteScheduler(**SD_NOISE), add_watermarker=False,
    )  # fmt: skip


def stable_diffusion_3() -> Any:
    first, second, third = text.clip(projected=True), text.clip(projected=True, pad_token="!"), text.t5(2 * WIDTH)
    denoiser = diffusers.SD3Transformer2DModel(
        sample_size=8, in_channels=8, out_channels=8, num_layers=2, joint_attention_dim=2 * WIDTH,
        caption_projection_dim=WIDTH, pooled_projection_dim=2 * WIDTH, pos_embed_max_size=16, qk_norm="rms_norm",
        dual_attention_layers=(0,), **HEADS,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        denoiser, flow(shift=3.0), autoencoders.kl(8, shifted=True), *first, *second, *third
    )  # fmt: skip


def flux() -> Any:
    denoiser = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        guidance_embeds=True, axes_dims_rope=AXES, **HEADS,
    )  # fmt: skip
    return diffusers.FluxPipeline(dynamic_flow(), autoencoders.kl(shifted=True), *text.clip(), *text.t5(), denoiser)


def chroma() -> Any:
    denoiser = diffusers.ChromaTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, joint_attention_dim=WIDTH, axes_dims_rope=AXES,
        approximator_num_channels=16, approximator_hidden_dim=32, approximator_layers=2, **HEADS,
    )  # fmt: skip
    return diffusers.ChromaPipeline(dynamic_flow(), autoencoders.kl(shifted=True), *text.t5(), denoiser)


def flux2_transformer(text_width: int, guided: bool) -> Any:
    return diffusers.Flux2Transformer2DModel(
        in_channels=32, num_layers=2, num_single_layers=2, joint_attention_dim=text_width, guidance_embeds=guided,
        timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4), **HEADS,
    )  # fmt: skip


def flux2() -> Any:
    encoder, tokenizer = text.mistral3(layers=3)
    return diffusers.Flux2Pipeline(
        dynamic_flow(), autoencoders.flux2(), encoder, tokenizer, flux2_transformer(96, True)
    )


def flux2_klein() -> Any:
    encoder, tokenizer = text.qwen3(layers=3, causal=True)
    return diffusers.Flux2KleinPipeline(
        dynamic_flow(), autoencoders.flux2(), encoder, tokenizer, flux2_transformer(96, False)
    )


def pixart(sigma: bool) -> Any:
    encoder, tokenizer = text.t5()
    denoiser = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, in_channels=4, out_channels=8, cross_attention_dim=WIDTH, caption_channels=WIDTH,
        norm_num_groups=4, use_additional_conditions=False, **HEADS,
    )  # fmt: skip
    kind = diffusers.PixArtSigmaPipeline if sigma else diffusers.PixArtAlphaPipeline
    return kind(tokenizer, encoder, autoencoders.kl(), denoiser, diffusers.DPMSolverMultistepScheduler())


def aura_flow() -> Any:
    encoder, tokenizer = text.umt5()
    denoiser = diffusers.AuraFlowTransformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_mmdit_layers=2, num_single_dit_layers=2,
        joint_attention_dim=WIDTH, caption_projection_dim=WIDTH, pos_embed_max_size=64, **HEADS,
    )  # fmt: skip
    return diffusers.AuraFlowPipeline(tokenizer, encoder, autoencoders.kl(), denoiser, flow())


def bria() -> Any:
    denoiser = diffusers.BriaTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, joint_attention_dim=WIDTH, axes_dims_rope=list(AXES), **HEADS
    )
    return diffusers.BriaPipeline(denoiser, flow(), autoencoders.kl(), *text.t5(length=128))


def bria_fibo() -> Any:
    denoiser = diffusers.BriaFiboTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, joint_attention_dim=2 * WIDTH, text_encoder_dim=WIDTH,
        axes_dims_rope=list(AXES), **HEADS,
    )  # fmt: skip
    return diffusers.BriaFiboPipeline(denoiser, flow(), autoencoders.wan_of_images(), *text.smollm3(layers=4))


def cogview3_plus() -> Any:
    encoder, tokenizer = text.t5()
    denoiser = diffusers.CogView3PlusTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, text_embed_dim=WIDTH, time_embed_dim=16, condition_dim=8,
        pos_embed_max_size=16, sample_size=8, **HEADS,
    )  # fmt: skip
    return diffusers.CogView3PlusPipeline(
        tokenizer, encoder, autoencoders.kl(), denoiser, diffusers.CogVideoXDDIMScheduler()
    )


def cogview4() -> Any:
    encoder, tokenizer = text.glm()
    denoiser = diffusers.CogView4Transformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, text_embed_dim=WIDTH, time_embed_dim=16, condition_dim=8,
        pos_embed_max_size=16, sample_size=8, rope_axes_dim=(8, 8), **HEADS,
    )  # fmt: skip
    return diffusers.CogView4Pipeline(
        tokenizer, encoder, autoencoders.kl(), denoiser,
        flow(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"),
    )  # fmt: skip


def ernie_image() -> Any:
    denoiser = diffusers.ErnieImageTransformer2DModel(
        hidden_size=WIDTH, num_attention_heads=2, num_layers=2, ffn_hidden_size=2 * WIDTH, in_channels=32,
        out_channels=32, text_in_dim=WIDTH, rope_axes_dim=AXES,
    )  # fmt: skip
    return diffusers.ErnieImagePipeline(
        denoiser, autoencoders.flux2(), *text.mistral3(generating=False), flow(shift=4.0)
    )


def glm_image() -> Any:
    writer, processor = text.glm_image()
    encoder, tokenizer = text.byte_t5()
    denoiser = diffusers.GlmImageTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, text_embed_dim=WIDTH, time_embed_dim=16, condition_dim=8,
        prior_vq_quantizer_codebook_size=64, **HEADS,
    )  # fmt: skip
    return diffusers.GlmImagePipeline(
        tokenizer, processor, encoder, writer, autoencoders.kl(**autoencoders.statistics(4)), denoiser,
        flow(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"),
    )  # fmt: skip


def hidream() -> Any:
    denoiser = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_single_layers=2,
        caption_channels=[WIDTH, WIDTH], text_emb_dim=2 * WIDTH, num_routed_experts=4, num_activated_experts=2,
        axes_dims_rope=(8, 4, 4), max_resolution=(128, 128), llama_layers=[0, 1, 1, 1], **HEADS,
    )  # fmt: skip
    return diffusers.HiDreamImagePipeline(
        flow(shift=3.0), autoencoders.kl(levels=2, shifted=True), *text.clip(projected=True),
        *text.clip(projected=True), *text.t5(length=128), *text.llama(causal=True), denoiser,
    )  # fmt: skip


def hunyuan_dit() -> Any:
    first, second = text.bert(), text.t5(length=256)
    denoiser = diffusers.HunyuanDiT2DModel(
        in_channels=4, patch_size=2, sample_size=8, hidden_size=WIDTH, num_layers=4, cross_attention_dim=WIDTH,
        cross_attention_dim_t5=WIDTH, pooled_projection_dim=16, text_len=77, text_len_t5=256,
        activation_fn="gelu-approximate", **HEADS,
    )  # fmt: skip
    noise = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.02}
    return diffusers.HunyuanDiTPipeline(
        autoencoders.kl(), *first, denoiser, diffusers.DDPMScheduler(**noise, prediction_type="v_prediction"), None,
        None, False, *second,
    )  # fmt: skip


def hunyuan_image() -> Any:
    denoiser = diffusers.HunyuanImageTransformer2DModel(
        in_channels=8, out_channels=8, num_layers=2, num_single_layers=2, text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH, rope_axes_dim=(8, 8), **HEADS,
    )  # fmt: skip
    return diffusers.HunyuanImagePipeline(
        flow(shift=5.0), autoencoders.hunyuan_image(), *text.qwen2_5_vl(layers=4), *text.byte_t5(), denoiser
    )


def ideogram4() -> Any:
    encoder, tokenizer = text.qwen3_vl(16, layers=36, generating=False)  # the pipeline reads 13 of 36 layers
    denoisers = [
        diffusers.Ideogram4Transformer2DModel(
            in_channels=32, num_layers=2, intermediate_size=2 * WIDTH, adaln_dim=16, llm_features_dim=13 * 16,
            mrope_section=(4, 2, 2), **HEADS,
        )
        for _ in range(2)
    ]  # fmt: skip
    return diffusers.Ideogram4Pipeline(flow(), autoencoders.flux2(), encoder, tokenizer, *denoisers)


def deep_floyd() -> Any:
    encoder, tokenizer = text.t5()
    denoiser = unet(
        WIDTH, in_channels=3, out_channels=6, encoder_hid_dim=WIDTH, encoder_hid_dim_type="text_proj",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn", attention_head_dim=16, addition_embed_type="text",
        addition_embed_type_num_heads=2, cross_attention_norm="group_norm",
        resnet_time_scale_shift="scale_shift", act_fn="gelu", class_embed_type=None, time_embedding_dim=WIDTH,
        sample_size=32,
    )  # fmt: skip
    scheduler = diffusers.DDPMScheduler(
        variance_type="learned_range", thresholding=True, beta_schedule="squaredcos_cap_v2"
    )
    return diffusers.IFPipeline(
        tokenizer, encoder, denoiser, scheduler, None, None, None, requires_safety_checker=False
    )


def kandinsky3() -> Any:
    encoder, tokenizer = text.t5(length=128)
    denoiser = diffusers.Kandinsky3UNet(
        time_embedding_dim=WIDTH, groups=4, attention_head_dim=8, layers_per_block=2,
        block_out_channels=(16, 16, 16, 16), cross_attention_dim=WIDTH, encoder_hid_dim=WIDTH,
    )  # fmt: skip
    return diffusers.Kandinsky3Pipeline(
        tokenizer, encoder, denoiser, diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"), autoencoders.vq()
    )


def kandinsky5() -> Any:
    denoiser = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=WIDTH, in_text_dim2=WIDTH, time_dim=16, model_dim=WIDTH,
        ff_dim=2 * WIDTH, num_text_blocks=2, num_visual_blocks=2, axes_dims=AXES,
    )  # fmt: skip
    return diffusers.Kandinsky5T2IPipeline(
        denoiser, autoencoders.kl(shifted=True), *text.qwen2_5_vl(), *text.clip(), flow(shift=5.0)
    )


def krea2() -> Any:
    encoder, tokenizer = text.qwen3_vl(layers=3, generating=False)
    denoiser = diffusers.Krea2Transformer2DModel(
        in_channels=32, num_layers=2, num_key_value_heads=1, intermediate_size=2 * WIDTH, timestep_embed_dim=16,
        text_hidden_dim=WIDTH, num_text_layers=3, text_num_attention_heads=2, text_num_key_value_heads=2,
        text_intermediate_size=2 * WIDTH, axes_dims_rope=AXES, **HEADS,
    )  # fmt: skip
    return diffusers.Krea2Pipeline(
        dynamic_flow(), autoencoders.qwen_image(), encoder, tokenizer, denoiser, text_encoder_select_layers=(1, 2, 3)
    )


def long_cat() -> Any:
    encoder, tokenizer = text.qwen2_5_vl()
    denoiser = diffusers.LongCatImageTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        axes_dims_rope=list(AXES), **HEADS,
    )  # fmt: skip
    return diffusers.LongCatImagePipeline(
        dynamic_flow(), autoencoders.kl(16, shifted=True), encoder, tokenizer, text.qwen_tokenizer(), denoiser
    )


def lumina() -> Any:
    encoder, tokenizer = text.gemma()
    denoiser = diffusers.LuminaNextDiT2DModel(
        sample_size=8, hidden_size=WIDTH, num_layers=2, num_attention_heads=2, num_kv_heads=1, multiple_of=16,
        cross_attention_dim=WIDTH,
    )  # fmt: skip
    return diffusers.LuminaPipeline(denoiser, flow(), autoencoders.kl(), encoder, tokenizer)


def lumina2() -> Any:
    denoiser = diffusers.Lumina2Transformer2DModel(
        sample_size=8, in_channels=4, hidden_size=WIDTH, num_layers=2, num_refiner_layers=2, num_attention_heads=2,
        num_kv_heads=1, multiple_of=16, axes_dim_rope=AXES, axes_lens=(300, 16, 16), cap_feat_dim=WIDTH,
    )  # fmt: skip
    return diffusers.Lumina2Pipeline(denoiser, flow(shift=6.0), autoencoders.kl(shifted=True), *text.gemma2())


def nucleus() -> Any:
    encoder, tokenizer = text.qwen3_vl(layers=8)  # the pipeline reads the eighth layer from the end
    denoiser = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=32, out_channels=8, num_layers=5, num_key_value_heads=1, joint_attention_dim=WIDTH,
        axes_dims_rope=AXES, num_experts=4, moe_intermediate_dim=WIDTH, capacity_factors=2.0, mlp_ratio=6.0, **HEADS,
    )  # fmt: skip
    for name, parameter in denoiser.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):  # the class leaves the experts' memory as it finds it
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return diffusers.NucleusMoEImagePipeline(denoiser, dynamic_flow(), autoencoders.qwen_image(), encoder, tokenizer)


def omni_gen() -> Any:
    denoiser = diffusers.OmniGenTransformer2DModel(
        hidden_size=WIDTH, num_attention_heads=2, num_key_value_heads=2, intermediate_size=2 * WIDTH, num_layers=2,
        pad_token_id=0, vocab_size=text.VOCABULARY, max_position_embeddings=4096,
        rope_scaling={"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.5] * 8}, pos_embed_max_size=16,
        time_step_dim=16,
    )  # fmt: skip
    return diffusers.OmniGenPipeline(
        denoiser, flow(invert_sigmas=True), autoencoders.kl(), text.sentence_llama_tokenizer()
    )


def ovis_image() -> Any:
    denoiser = diffusers.OvisImageTransformer2DModel(
        in_channels=16, out_channels=16, num_layers=2, num_single_layers=2, joint_attention_dim=WIDTH,
        axes_dims_rope=AXES, **HEADS,
    )  # fmt: skip
    return diffusers.OvisImagePipeline(dynamic_flow(), autoencoders.kl(shifted=True), *text.qwen3(), denoiser)


def prx_transformer(**options: Any) -> Any:
    return diffusers.PRXTransformer2DModel(**{
        "in_channels": 4, "context_in_dim": WIDTH, "hidden_size": WIDTH, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2,
        "axes_dim": [8, 8],
    } | options)  # fmt: skip


def prx() -> Any:
    return diffusers.PRXPipeline(prx_transformer(), flow(), *text.t5gemma(), autoencoders.kl(shifted=True), 64)


def prx_pixel() -> Any:
    denoiser = prx_transformer(in_channels=3, patch_size=8, bottleneck_size=16, resolution_embeds=True)
    encoder, tokenizer = text.qwen3()
    return diffusers.PRXPixelPipeline(denoiser, flow(), encoder, tokenizer, 64, 32)


def qwen_image() -> Any:
    denoiser = diffusers.QwenImageTransformer2DModel(
        in_channels=32, out_channels=8, num_layers=2, joint_attention_dim=WIDTH, axes_dims_rope=AXES, **HEADS
    )
    return diffusers.QwenImagePipeline(dynamic_flow(), autoencoders.qwen_image(), *text.qwen2_5_vl(), denoiser)


def sana(sprint: bool) -> Any:
    encoder, tokenizer = text.gemma2()
    options = {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"} if sprint else {}
    denoiser = diffusers.SanaTransformer2DModel(
        in_channels=8, out_channels=8, num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=16,
        cross_attention_dim=WIDTH, caption_channels=WIDTH, sample_size=8, **HEADS, **options,
    )  # fmt: skip
    if sprint:
        scheduler = diffusers.SCMScheduler(prediction_type="trigflow", sigma_data=0.5)
        return diffusers.SanaSprintPipeline(tokenizer, encoder, autoencoders.deep_compression(), denoiser, scheduler)
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return diffusers.SanaPipeline(tokenizer, encoder, autoencoders.deep_compression(), denoiser, scheduler)


def z_image() -> Any:
    denoiser = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=WIDTH, n_layers=2, n_refiner_layers=2, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH,
        axes_dims=list(AXES), axes_lens=[1024, 64, 64],
    )  # fmt: skip
    return diffusers.ZImagePipeline(flow(shift=3.0), autoencoders.kl(shifted=True), *text.qwen3(), denoiser)


def kolors() -> Any:
    encoder, tokenizer = text.chatglm()
    denoiser = unet(
        WIDTH, transformer_layers_per_block=(1, 2), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + WIDTH, encoder_hid_dim=WIDTH,
        encoder_hid_dim_type="text_proj",
    )  # fmt: skip
    return diffusers.KolorsPipeline(
        autoencoders.kl(), encoder, tokenizer, denoiser, diffusers.EulerDiscreteScheduler(**SD_NOISE)
    )


def dream_lite(mobile: bool) -> Any:
    encoder, tokenizer = text.qwen3_vl()
    denoiser = diffusers.DreamLiteUNetModel(
        block_out_channels=(16, 32, 32), layers_per_block=1, norm_num_groups=4, cross_attention_dim=WIDTH,
        attention_head_dim=2, ff_mult=2, addition_embed_type_num_heads=2,
    )  # fmt: skip
    kind = diffusers.DreamLiteMobilePipeline if mobile else diffusers.DreamLitePipeline
    return kind(encoder, tokenizer, tokenizer, autoencoders.tiny(), denoiser, flow())


def amused() -> Any:
    encoder, tokenizer = text.clip(projected=True)
    denoiser = diffusers.UVit2DModel(
        hidden_size=WIDTH, cond_embed_dim=WIDTH, micro_cond_encode_dim=8, micro_cond_embed_dim=5 * 8,
        encoder_hidden_size=WIDTH, vocab_size=33, codebook_size=32, in_channels=WIDTH, block_out_channels=WIDTH,
        num_res_blocks=2, block_num_heads=2, num_hidden_layers=2, num_attention_heads=2, intermediate_size=2 * WIDTH,
        sample_size=8,
    )  # fmt: skip
    return diffusers.AmusedPipeline(
        autoencoders.vq(lookup_from_codebook=True),
        tokenizer,
        encoder,
        denoiser,
        diffusers.AmusedScheduler(mask_token_id=32),
    )


def bria_fibo2() -> Any:
    encoder, tokenizer = text.qwen3_vl(16, layers=36)  # the pipeline reads 6 times 3 of 36 layers
    denoiser = diffusers.BriaFibo2Transformer2DModel(
        in_channels=8, dim=WIDTH, n_layers=3, n_refiner_layers=2, n_heads=2, cap_feat_dim=3 * 16,
        injection_layer_ids=(0, 0, 1, 1, 2), min_num_gist_tokens=8, max_num_gist_tokens=16, gist_step=4,
        gist_min_text_len=16, gist_max_text_len=64, axes_dims=AXES, axes_lens=(256, 64, 64),
    )  # fmt: skip
    return diffusers.BriaFibo2Pipeline(denoiser, flow(), autoencoders.flux2(), encoder, tokenizer)


def kandinsky22() -> Any:
    encoder, tokenizer = text.clip(projected=True)
    prior = diffusers.PriorTransformer(
        num_layers=2, embedding_dim=WIDTH, num_embeddings=77, additional_embeddings=4, **HEADS
    )
    denoiser = unet(
        WIDTH, out_channels=8, encoder_hid_dim=WIDTH, encoder_hid_dim_type="image_proj", addition_embed_type="image",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn", attention_head_dim=16, resnet_time_scale_shift="scale_shift",
    )  # fmt: skip
    image_encoder, image_processor = text.clip_vision()
    prior_scheduler = diffusers.UnCLIPScheduler(
        variance_type="fixed_small_log", prediction_type="sample", num_train_timesteps=1000, clip_sample_range=5.0
    )
    return diffusers.KandinskyV22CombinedPipeline(
        denoiser, diffusers.DDPMScheduler(beta_schedule="linear", beta_start=0.00085, beta_end=0.012, clip_sample=False,
                                variance_type="learned_range"),
        autoencoders.vq(), prior, image_encoder, encoder, tokenizer, prior_scheduler, image_processor,
    )  # fmt: skip


def small(build: Any, **options: Any) -> Case:
    """Returns a case of 64 by 48 pixels, and 96 by 80, which 16 divides."""
    return Case(build, 64, 48, (96, 80), **options)


CASES: dict[str, Case] = {
    "StableDiffusionPipeline": small(stable_diffusion, denoiser="unet"),
    "StableDiffusionXLPipeline": small(stable_diffusion_xl, denoiser="unet"),
    "StableDiffusion3Pipeline": small(stable_diffusion_3, arguments=SHORT),
    "FluxPipeline": small(flux, arguments=SHORT),
    "PixArtAlphaPipeline": small(
        lambda: pixart(False), arguments=SHORT | {"use_resolution_binning": False, "clean_caption": False}
    ),
    "PixArtSigmaPipeline": small(
        lambda: pixart(True), arguments=SHORT | {"use_resolution_binning": False, "clean_caption": False}
    ),
    "AuraFlowPipeline": small(aura_flow, arguments=SHORT),
    "BriaPipeline": small(bria, arguments=SHORT),
    "AmusedPipeline": small(amused),
    "BriaFibo2Pipeline": small(bria_fibo2),
    "BriaFiboPipeline": Case(bria_fibo, 96, 64, (128, 96), {"negative_prompt": "low quality"}),
    "ChromaPipeline": small(chroma, arguments=SHORT),
    "CogView3PlusPipeline": small(cogview3_plus, arguments=SHORT),
    "CogView4Pipeline": small(cogview4, arguments=SHORT),
    "DreamLitePipeline": small(lambda: dream_lite(False), denoiser="unet", batched=False),
    "DreamLiteMobilePipeline": small(lambda: dream_lite(True), denoiser="unet", batched=False),
    "ErnieImagePipeline": small(ernie_image, arguments={"use_pe": False}),
    "Flux2Pipeline": small(flux2, arguments={"max_sequence_length": 128, "text_encoder_out_layers": (1, 2, 3)}),
    "Flux2KleinPipeline": small(
        flux2_klein, arguments={"max_sequence_length": 128, "text_encoder_out_layers": (1, 2, 3)}
    ),
    "GlmImagePipeline": Case(glm_image, 96, 64, (128, 96), SHORT),
    "HiDreamImagePipeline": small(hidream, arguments=SHORT),  # scaled to 4096 tokens
    "HunyuanDiTPipeline": small(hunyuan_dit, arguments={"use_resolution_binning": False}),
    "HunyuanImagePipeline": Case(hunyuan_image, 192, 128, (256, 192)),
    "Ideogram4Pipeline": small(
        ideogram4, arguments={"max_sequence_length": 64, "guidance_scale": 5.0, "guidance_schedule": None}
    ),
    "IFPipeline": Case(deep_floyd, 32, 24, (48, 40), {"clean_caption": False}, "unet"),
    "Kandinsky3Pipeline": Case(kandinsky3, 192, 128, (256, 192), denoiser="unet"),
    "Kandinsky5T2IPipeline": Case(kandinsky5, 64, 48, (48, 48), needs=("accelerate",)),  # rounded to about 1024 by 1024
    "KandinskyV22CombinedPipeline": small(kandinsky22, denoiser="unet", arguments={"prior_num_inference_steps": 2}),
    "KolorsPipeline": small(kolors, denoiser="unet", arguments=SHORT),
    "Krea2Pipeline": small(krea2, arguments=SHORT, needs=("accelerate",)),
    "LatentConsistencyModelPipeline": small(latent_consistency, denoiser="unet"),
    "LongCatImagePipeline": small(long_cat, arguments={"enable_prompt_rewrite": False}),
    "LuminaPipeline": small(lumina, arguments=SHORT | {"clean_caption": False}),
    "Lumina2Pipeline": small(lumina2, arguments={"max_sequence_length": 96}),
    "NucleusMoEImagePipeline": small(nucleus, arguments={"max_sequence_length": 128}),
    "OmniGenPipeline": small(omni_gen, needs=("torchvision",)),
    "OvisImagePipeline": small(ovis_image, arguments=SHORT),
    # neither takes two prompts and guidance: a time for each of two images, whatever the batch
    "PRXPipeline": small(
        prx, arguments={"use_resolution_binning": False, "skip_text_cleaning": True}, needs=("ftfy",), batched=False
    ),
    "PRXPixelPipeline": small(prx_pixel, arguments={"use_resolution_binning": False}, needs=("ftfy",), batched=False),
    "QwenImagePipeline": small(qwen_image, arguments=SHORT),
    "SanaPipeline": Case(lambda: sana(False), 96, 64, (128, 96), SHORT | {"use_resolution_binning": False}),
    "SanaSprintPipeline": Case(lambda: sana(True), 96, 64, (128, 96), SHORT | {"use_resolution_binning": False}),
    "ZImagePipeline": small(z_image, arguments=SHORT),
}
REASONS = {
    "another kind of guidance around the networks of a pipeline that is built": (
        "HunyuanDiTPAGPipeline KolorsPAGPipeline PixArtSigmaPAGPipeline SanaPAGPipeline "
        "SemanticStableDiffusionPipeline StableDiffusion3PAGPipeline StableDiffusionAttendAndExcitePipeline "
        "StableDiffusionPAGPipeline StableDiffusionPipelineSafe StableDiffusionSAGPipeline "
        "StableDiffusionXLPAGPipeline"
    ),
    "first of two stages: makes embeddings of an image": (
        "KandinskyPriorPipeline KandinskyV22PriorPipeline WuerstchenPriorPipeline"
    ),
    "runs graphs of ONNX, has no networks of PyTorch": "OnnxStableDiffusionPipeline StableDiffusionOnnxPipeline",
}
LEFT_OUT: dict[str, str] = {
    "AltDiffusionPipeline": "Stable Diffusion's with a multilingual text encoder; deprecated",
    "Cosmos2TextToImagePipeline": "makes a safety checker of the package cosmos_guardrail, and does not go without",
    "KandinskyCombinedPipeline": "Kandinsky 2.1, whose later version 2.2 is built",
    "LDMTextToImagePipeline": "latent diffusion before Stable Diffusion, with a text encoder of a class of its own",
    "LLaDA2Pipeline": "makes text",
    "QwenImage21Pipeline": "a true processor of Qwen3-VL, which needs torchvision, is read in its constructor",
    "SanaWMLTX2Refiner": "second stage: refines a video that another pipeline made",
    "StableAudio3Pipeline": "makes sound",
    "StableCascadeCombinedPipeline": "two stages, each with a denoiser of its own",
    "StableDiffusionLDM3DPipeline": "makes depth beside colours; deprecated",
    "StableDiffusionModelEditingPipeline": "edits the weights of Stable Diffusion; deprecated",
    "StableDiffusionPanoramaPipeline": "Stable Diffusion over overlapping windows; deprecated",
    "StableDiffusionParadigmsPipeline": "Stable Diffusion with parallel steps; deprecated",
    "StableDiffusionPix2PixZeroPipeline": "edits an image that is given as noise; deprecated",
    "StableUnCLIPPipeline": "two stages, each with a denoiser of its own",
    "UnCLIPPipeline": "three stages, each with a denoiser of its own; deprecated",
    "UniDiffuserPipeline": "makes image and text together; deprecated",
    "VQDiffusionPipeline": "learns its guidance's embeddings in a module of its own; deprecated",
    "VersatileDiffusionTextToImagePipeline": "swaps layers between two networks while it runs; deprecated",
    "WuerstchenCombinedPipeline": "two stages, each with a denoiser of its own; deprecated",
} | {name: reason for reason, names in REASONS.items() for name in names.split()}
