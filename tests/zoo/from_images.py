"""Tiny pipelines that start from images or videos: edits, inpainting, image to video, control.

A class of diffusers for images has the networks of a class for texts, sometimes with more channels at the input, an
encoder of images or a control network. So a case is that of a text's class (`images`, `videos`) made into another.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import diffusers
import transformers

from sd_quant.checkpoints.diffusers_pipeline import without_videos

from . import images, text, videos
from .autoencoders import FRAME_BY_FRAME
from .cases import Case, row
from .images import SHORT, WIDTH

Parts = Mapping[str, Any]  # components of a pipeline by name


def of(kind: str, build: Callable[[], Any], **others: Any) -> Any:
    """Returns a pipeline of the class ``kind`` with the components of the one that ``build`` makes, and with others.

    One that is given as a mapping is built again with these entries of its configuration; a function gets all
    components and returns one.
    """
    found = build()
    parts = {"requires_safety_checker": False, **found.config, **found.components}
    for name, other in others.items():
        if isinstance(other, Mapping):
            parts[name] = type(parts[name]).from_config({**stated(parts[name]), **other})
        else:
            parts[name] = other(parts) if callable(other) else other
    kind = getattr(diffusers, kind)
    return kind(**{name: each for name, each in parts.items() if name in inspect.signature(kind.__init__).parameters})


def stated(network: Any) -> dict[str, Any]:
    """Returns the entries of a network's configuration, without the list of those that ``from_config`` would ignore."""
    return {name: value for name, value in network.config.items() if name != "_use_default_values"}


def changed(kind: str, own: Case, takes: str, arguments: Mapping[str, Any] | None = None, **others: Any) -> Any:
    """Returns the name and the case of a class that is built of ``own`` and called like it, with images beside.

    ``takes`` names the arguments that are images; one that is named several times takes as many. ``others`` are
    components, or fields of the case. A name may end with a variant, after a comma.
    """
    fields = {name: others.pop(name) for name in ("width", "height", "larger", "needs") if name in others}
    name, *variant = kind.split(",")
    known = inspect.signature(getattr(diffusers, f"{name}Pipeline").__call__).parameters
    given = {name: value for name, value in own.arguments.items() if name in known} | dict(arguments or {})
    build = partial(of, f"{name}Pipeline", own.build, **others)
    full = ",".join([f"{name}Pipeline", *variant])
    return full, replace(own, build=build, images=Counter(takes.split()), arguments=given, **fields)


def control(kind: str, **sizes: Any) -> Callable[[Parts], Any]:
    """Returns what makes a control network of the sizes of a pipeline's transformer, with one block."""
    own = getattr(diffusers, kind)
    known = inspect.signature(own.__init__).parameters

    def made(parts: Parts) -> Any:
        entries = {**parts["transformer"].config, "num_layers": 1, **sizes}
        return own(**{name: value for name, value in entries.items() if name in known})

    return made


def of_unet(parts: Parts) -> Any:
    """Returns a control network of the sizes of a pipeline's UNet."""
    return diffusers.ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(8, 16, 16, 16))


def eye(parts: Parts) -> Any:
    return text.clip_vision()[0]


def lens(parts: Parts) -> Any:
    return text.clip_vision()[1]


def hidden_eye(parts: Parts) -> Any:
    """Returns a ``CLIPVisionModel``, whose hidden states Wan and SkyReels read: 17 of an image."""
    return transformers.CLIPVisionModel(eye(parts).config)


def siglip(parts: Parts) -> Any:
    """Returns a ``SiglipVisionModel`` of 16 tokens."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=8))


def reader(parts: Parts) -> Any:
    """Returns a ``Qwen2VLProcessor`` of images of 4 to 16 tokens, which saves the files of its parts, as published."""
    own = transformers.Qwen2VLImageProcessor(min_pixels=4 * 28**2, max_pixels=16 * 28**2), parts["tokenizer"]
    with without_videos():
        made = transformers.Qwen2VLProcessor(*own, chat_template=text.CHATML)
    made.save_pretrained = lambda folder, **_: [each.save_pretrained(folder) for each in own]
    return made


def adapter(parts: Parts) -> Any:
    return diffusers.T2IAdapter(channels=[16, 32], num_res_blocks=1, downscale_factor=8)


def vace(parts: Parts) -> Any:
    """Returns a denoiser that reads a video's latents of 16 channels, twice, and its mask of 8 x 8."""
    return diffusers.WanVACETransformer3DModel(
        **videos.WAN, rope_max_seq_len=64, vace_layers=[0], vace_in_channels=2 * 16 + 64
    )


WIDER: Any = {"width": 128, "height": 64, "larger": (192, 128)}
STRENGTH = {"strength": 0.75}
MASKED = "image mask_image"
OF_TEXT = {name.replace("Pipeline", ""): own for name, own in (images.CASES | videos.CASES).items()}
SD, SDXL, SD3 = (OF_TEXT[f"StableDiffusion{version}"] for version in ("", "XL", "3"))
FLUX, KLEIN, CHROMA, QWEN, Z = (OF_TEXT[name] for name in ("Flux", "Flux2Klein", "Chroma", "QwenImage", "ZImage"))
WAN, LTX, COGVIDEOX, HUNYUAN = (OF_TEXT[name] for name in ("Wan", "LTX", "CogVideoX", "HunyuanVideo"))
FORCING = OF_TEXT["SkyReelsV2DiffusionForcing"]
# Its images are encoded at about a million pixels whatever their size, so its latents are 32 times smaller, not 8.
EDIT = replace(QWEN, **WIDER, arguments=SHORT | {"max_sequence_length": 256})
COARSE = {"vae": {"base_dim": 4, "dim_mult": [1] * 6, "temperal_downsample": [False] * 5}}
COARSE |= {"processor": reader, "needs": ("torchvision",)}
SEEING = {"image_encoder": hidden_eye, "image_processor": lens}
WAN_SEEN = {"transformer": {"in_channels": 36, "image_dim": WIDTH, "added_kv_proj_dim": WIDTH}, **SEEING}
BOTH_ENDS = WAN_SEEN | {"transformer": WAN_SEEN["transformer"] | {"pos_embed_seq_len": 2 * 17}}
OF_FLUX = control("FluxControlNetModel", num_single_layers=1)
FREE = {"_auto_resize": False}
WHOLE = {"max_sequence_length": 512}  # tokens of the text, by which Wan's attention tells the image's from them

CASES: dict[str, Case] = dict([
    changed("StableDiffusionImg2Img", SD, "image", STRENGTH),
    changed("StableDiffusionInpaint", SD, MASKED, STRENGTH),
    changed("StableDiffusionInpaint, nine channels", SD, MASKED, unet={"in_channels": 9}),
    changed("StableDiffusionInstructPix2Pix", SD, "image", unet={"in_channels": 8}),
    changed("StableDiffusionControlNet", SD, "image", controlnet=of_unet),
    changed("StableDiffusionControlNetImg2Img", SD, "image control_image", STRENGTH, controlnet=of_unet),
    changed("StableDiffusionControlNetInpaint", SD, f"{MASKED} control_image", STRENGTH, controlnet=of_unet),
    changed("StableDiffusionAdapter", SD, "image", adapter=adapter),
    changed("StableDiffusionImageVariation", SD, "image", image_encoder=eye, feature_extractor=lens),
    changed(
        "StableDiffusionUpscale", SD, "image", {"noise_level": 20}, unet={"in_channels": 7, "num_class_embeds": 1000},
        low_res_scheduler=lambda parts: diffusers.DDPMScheduler(), width=32, height=24, larger=(48, 40),
    ),
    changed(
        "StableDiffusionLatentUpscale", SD, "image",
        unet={"in_channels": 8, "out_channels": 5, "time_cond_proj_dim": 160}, width=32, height=64, larger=(64, 128),
    ),
    changed("LatentConsistencyModelImg2Img", OF_TEXT["LatentConsistencyModel"], "image", STRENGTH),
    changed("StableDiffusionXLImg2Img", SDXL, "image", STRENGTH),
    changed("StableDiffusionXLInpaint", SDXL, MASKED, STRENGTH),
    changed("StableDiffusionXLInstructPix2Pix", SDXL, "image", unet={"in_channels": 8}),
    changed("StableDiffusionXLControlNet", SDXL, "image", controlnet=of_unet),
    changed("StableDiffusionXLControlNetImg2Img", SDXL, "image control_image", STRENGTH, controlnet=of_unet),
    changed("StableDiffusionXLControlNetInpaint", SDXL, f"{MASKED} control_image", STRENGTH, controlnet=of_unet),
    changed("StableDiffusionXLAdapter", SDXL, "image", adapter=adapter),
    changed("KolorsImg2Img", OF_TEXT["Kolors"], "image", STRENGTH),
    changed("StableDiffusion3Img2Img", SD3, "image", STRENGTH),
    changed(
        "StableDiffusion3Inpaint", SD3, MASKED, STRENGTH,
        transformer={"in_channels": 16, "out_channels": 16}, vae={"latent_channels": 16},
    ),
    changed(
        "StableDiffusion3ControlNet", SD3, "control_image",
        controlnet=control("SD3ControlNetModel", extra_conditioning_channels=0),
    ),
    changed(
        "StableDiffusion3ControlNetInpainting", SD3, "control_image control_mask",
        controlnet=control("SD3ControlNetModel", extra_conditioning_channels=1),
    ),
    changed("FluxKontext", FLUX, "image", FREE),
    changed("FluxKontextInpaint", FLUX, MASKED, FREE | STRENGTH),
    changed("FluxFill", FLUX, MASKED, transformer={"in_channels": 16 + 16 + 256, "out_channels": 16}),
    changed("FluxControl", FLUX, "control_image", transformer={"in_channels": 32, "out_channels": 16}),
    changed(
        "FluxControlImg2Img", FLUX, "image control_image", STRENGTH,
        transformer={"in_channels": 32, "out_channels": 16},
    ),
    changed(
        "FluxControlInpaint", FLUX, f"{MASKED} control_image", STRENGTH,
        transformer={"in_channels": 32, "out_channels": 16},
    ),
    changed("FluxControlNet", FLUX, "control_image", controlnet=OF_FLUX),
    changed("FluxControlNetImg2Img", FLUX, "image control_image", STRENGTH, controlnet=OF_FLUX),
    changed("FluxControlNetInpaint", FLUX, f"{MASKED} control_image", STRENGTH, controlnet=OF_FLUX),
    changed("FluxImg2Img", FLUX, "image", STRENGTH),
    changed("FluxInpaint", FLUX, MASKED, STRENGTH),
    changed("ChromaImg2Img", CHROMA, "image", STRENGTH),
    changed("QwenImageImg2Img", QWEN, "image", STRENGTH),
    changed("QwenImageInpaint", QWEN, MASKED, STRENGTH),
    changed(
        "QwenImageControlNet", QWEN, "control_image",
        controlnet=control("QwenImageControlNetModel", extra_condition_channels=0),
    ),
    changed(
        "QwenImageControlNetInpaint", QWEN, "control_image control_mask",
        controlnet=control("QwenImageControlNetModel", extra_condition_channels=4),
    ),
    changed("QwenImageEdit", EDIT, "image", **COARSE),
    changed("QwenImageEditPlus", EDIT, "image image", **COARSE),
    changed("ZImageImg2Img", Z, "image", STRENGTH),
    changed("ZImageInpaint", Z, MASKED, STRENGTH),
    changed("Flux2, an image", OF_TEXT["Flux2"], "image", **WIDER),
    changed("Flux2KleinInpaint", KLEIN, MASKED, STRENGTH),
    changed("Flux2KleinKV", KLEIN, "image", **WIDER),
    changed(
        "HunyuanDiTControlNet", OF_TEXT["HunyuanDiT"], "control_image",
        controlnet=control("HunyuanDiT2DControlNetModel", transformer_num_layers=4),
    ),
    changed("SanaSprintImg2Img", OF_TEXT["SanaSprint"], "image", STRENGTH | {"intermediate_timesteps": None}),
    changed("SanaControlNet", OF_TEXT["Sana"], "control_image", controlnet=control("SanaControlNetModel")),
    changed("Kandinsky3Img2Img", OF_TEXT["Kandinsky3"], "image", STRENGTH),
    changed("CogView4Control", OF_TEXT["CogView4"], "control_image", transformer={"in_channels": 8}),
    changed("AmusedImg2Img", OF_TEXT["Amused"], "image", STRENGTH),
    changed("AmusedInpaint", OF_TEXT["Amused"], MASKED, STRENGTH, **WIDER),
    changed("IFImg2Img", OF_TEXT["IF"], "image", STRENGTH),
    changed("IFInpainting", OF_TEXT["IF"], MASKED, STRENGTH),
    changed("WanImageToVideo", WAN, "image", WHOLE, **WAN_SEEN),
    changed("WanImageToVideo, first and last frame", WAN, "image last_image", WHOLE, **BOTH_ENDS),
    changed(
        "WanImageToVideo, two denoisers", OF_TEXT["Wan, two denoisers"], "image",
        transformer={"in_channels": 36}, transformer_2={"in_channels": 36},
    ),
    changed("WanVideoToVideo", WAN, "video " * 5, STRENGTH),
    changed("LTXImageToVideo", LTX, "image"),
    changed("LTXCondition", LTX, "image"),
    changed("CogVideoXImageToVideo", COGVIDEOX, "image", transformer={"in_channels": 32}),
    changed("CogVideoXVideoToVideo", COGVIDEOX, "video " * 9, STRENGTH),
    changed("HunyuanSkyreelsImageToVideo", HUNYUAN, "image", transformer={"in_channels": 32}),
    changed("SkyReelsV2ImageToVideo", OF_TEXT["SkyReelsV2"], "image", WHOLE, **WAN_SEEN),
    changed("SkyReelsV2DiffusionForcingImageToVideo", FORCING, "image"),
    changed(
        "SkyReelsV2DiffusionForcingVideoToVideo", FORCING, "video " * 5,
        {"num_frames": 9, "base_num_frames": 9, "overlap_history": 1},
    ),
    changed("AnimateDiffVideoToVideo", OF_TEXT["AnimateDiff"], "video " * 3, STRENGTH),
    changed("CogVideoXFunControl", COGVIDEOX, "control_video " * 9, transformer={"in_channels": 32}),
    changed(
        "Kandinsky5I2V", OF_TEXT["Kandinsky5T2V"], "image", {"num_frames": 21}, transformer={"visual_cond": True}
    ),
    changed(
        "MotifVideoImage2Video", OF_TEXT["MotifVideo"], "image", transformer={"image_embed_dim": 32},
        feature_extractor=lambda parts: transformers.SiglipImageProcessor(size={"height": 28, "width": 28}),
    ),
    changed("ChronoEdit", WAN, "image", WHOLE, **WAN_SEEN),
    changed(
        "HunyuanVideo15ImageToVideo", OF_TEXT["HunyuanVideo15"], "image",
        transformer={"task_type": "i2v", "image_embed_dim": 32}, vae={"block_out_channels": (8, 8, 16, 32, 32)},
        image_encoder=siglip, feature_extractor=lens,
    ),
    changed("WanVACE", WAN, "video " * 5, transformer=vace),
    changed("SanaImageToVideo", OF_TEXT["SanaVideo"], "image"),
])  # fmt: skip
CASES |= dict([
    row("StableVideoDiffusion", (32, 32), (48, 32), dict(
        arguments={"num_frames": 3}, images={"image": 1},
        unet=dict(
            block_out_channels=(32, 64), layers_per_block=1, num_attention_heads=2, cross_attention_dim=WIDTH,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), num_frames=3,
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=3 * 8,
        ),
        vae=dict(down_block_types=("DownEncoderBlock2D",) * 4, block_out_channels=(32,) * 4),
        scheduler=partial(
            images.euler, prediction_type="v_prediction", timestep_type="continuous", sigma_min=0.002, sigma_max=700.0,
            use_karras_sigmas=True,
        ),
        image_encoder=partial(text.clip_vision, size=224),  # whatever its processor says
    )),
    row("I2VGenXL", (32, 32), (48, 32), dict(
        arguments={"num_frames": 3, "clip_skip": None}, images={"image": 1},
        unet=dict(
            block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, cross_attention_dim=WIDTH,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), attention_head_dim=8,
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        ),
        image_encoder=text.clip_vision, vae=FRAME_BY_FRAME, text_encoder=text.clip,
        scheduler=partial(videos.ddim, beta_schedule="linear", set_alpha_to_one=False),
    )),
])  # fmt: skip
