"""A folder of diffusers' StableDiffusionXLPipeline read as SDXL in NeMo, and SDXL in NeMo written as such a folder.

``convert`` needs both; a run opens such a folder, of any family, with ``diffusers_pipeline``. NeMo's config is made
from the folder's configs, the inverse of ``sd_quant.models.sdxl_nemo``, and the networks that it describes are then
compared with those configs, key by key. So a UNet of another kind, such as the refiner's or one for inpainting, is
refused for the key that differs, and no list of kinds is needed.
The road not taken is ``StableDiffusionXLPipeline.from_pretrained``: it takes as much memory as the weights, and warns
where it should refuse.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from sd_quant.checkpoints.accepted import INDEX
from sd_quant.checkpoints.nemo_networks import (
    CONFIG,
    NemoCheckpoint,
    checkpoint_of,
    described_networks,
    parameter_shapes,
    read_config,
    sdxl_base_config,
)
from sd_quant.checkpoints.nemo_state import network_state, unused_state
from sd_quant.errors import ArtifactError
from sd_quant.files import atomic_path, write_json, write_text
from sd_quant.files.checks import MAX_DEPTH, check_tensors, reason_of, renamed
from sd_quant.files.folders import WEIGHTS, files_in, read_json, stored_weights
from sd_quant.files.safetensors import read_safetensors, write_safetensors
from sd_quant.files.tensors import Readable
from sd_quant.models.clip_tokenizer import clip_tokenizer
from sd_quant.models.sdxl_nemo import TextShape, scheduler
from sd_quant.names.diffusers import plain_name
from sd_quant.names.nemo import UNUSED

NETWORKS = {
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
}
PIPELINE = {"_class_name": "StableDiffusionXLPipeline"} | NETWORKS
REST_OF_PIPELINE = {
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "image_encoder": [None, None],
    "feature_extractor": [None, None],
    "force_zeros_for_empty_prompt": True,  # as NeMo does
}
NEMO, UNUSED_FILE = "nemo", "unused.safetensors"  # a subfolder for what diffusers has no place for

# Keys of configs that are compared. Of the UNet and the VAE all but COMPUTING, which say how diffusers computes; of a
# text encoder TEXT alone, because its sizes are taken from its config and its ids follow from the vocabulary.
COMPUTING = {"force_upcast", "upcast_attention"}
TEXT = {"num_attention_heads", "hidden_act", "layer_norm_eps"}
NOISE = {"num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"}
SCHEDULER = NOISE | {"prediction_type"}


def open_diffusers(path: Path, model_config: dict | None = None) -> NemoCheckpoint:
    """Opens the folder of a StableDiffusionXLPipeline; no weight is read.

    ``model_config`` is NeMo's; by default it is the one that ``write_diffusers`` kept, or else one is made.
    Raises ArtifactError when the folder is damaged or incomplete, or of another architecture than SDXL base's.
    """
    check_config(path / INDEX, read_json(path, INDEX), PIPELINE, PIPELINE)
    configs = {name: read_json(path / name, "config.json") for name in NETWORKS}
    kept = files_in(path / NEMO) if (path / NEMO).is_dir() else {}
    if model_config is None and CONFIG in kept:
        model_config = read_config(kept[CONFIG])
    try:
        clip1, clip2 = text_shape(configs["text_encoder"]), text_shape(configs["text_encoder_2"], projects=True)
        if model_config is None:
            model_config = nemo_config(configs["unet"], configs["vae"], clip1, clip2)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # any value may be wrong
        raise ArtifactError(
            f"{path}: its configs do not describe an SDXL base of any size ({reason_of(error)})"
        ) from error
    modules = described_networks(path, model_config, clip1, clip2)
    _check_architecture(path, configs, modules)

    components = {}
    for name, shapes in parameter_shapes(modules).items():
        folder = path / name
        tensors = renamed(folder, stored_weights(folder, WEIGHTS[NETWORKS[name][0]]), plain_name)
        expected = {plain_name(parameter): shape for parameter, shape in shapes.items()}
        check_tensors(folder, tensors, expected, {"embeddings.position_ids"})
        components[name] = {parameter: tensors[plain_name(parameter)] for parameter in shapes}
    if UNUSED_FILE in kept:
        unused: Mapping[str, Readable] = read_safetensors(kept[UNUSED_FILE])
        check_tensors(path / NEMO, unused, {}, UNUSED)
    else:
        dtype = components["text_encoder_2"]["text_projection.weight"].dtype
        unused = unused_state(dtype, scheduler().config.num_train_timesteps)
    return checkpoint_of(path, model_config, network_state(components) | unused)


def nemo_config(unet: Mapping, vae: Mapping, clip1: TextShape, clip2: TextShape) -> dict:
    """Returns NeMo's ``model_config.yaml`` of SDXL base with the sizes in diffusers' configs; nothing else is taken.

    Raises KeyError, TypeError and the like for configs of another kind.
    """
    config = sdxl_base_config()
    widths, kinds = unet["block_out_channels"], unet["down_block_types"][:MAX_DEPTH]
    depth = unet["transformer_layers_per_block"]
    config["unet_config"] |= {
        "adm_in_channels": clip2.projection + 6 * unet["addition_time_embed_dim"],
        "model_channels": widths[0],
        "attention_resolutions": [2**level for level in reversed(range(len(kinds))) if "Attn" in kinds[level]],
        "num_res_blocks": unet["layers_per_block"],
        "channel_mult": [width // widths[0] for width in widths],
        "num_head_channels": widths[0] // unet["attention_head_dim"][0],  # diffusers: number of heads
        "transformer_depth": depth if isinstance(depth, list) else [depth] * len(widths),
        "context_dim": clip1.width + clip2.width,
        "image_size": unet["sample_size"],
    }
    widths = vae["block_out_channels"]
    config["first_stage_config"]["ddconfig"] |= {
        "resolution": vae["sample_size"],
        "ch": widths[0],
        "ch_mult": [width // widths[0] for width in widths],
        "num_res_blocks": vae["layers_per_block"],
    }
    config["scale_factor"] = vae["scaling_factor"]
    embedders = [entry["emb_model"] for entry in config["conditioner_config"]["emb_models"]]
    embedders[0]["layer_idx"] = clip1.layers - 1  # the last but one, counted from the embedding
    for embedder in embedders[2:]:  # of sizes
        embedder["outdim"] = unet["addition_time_embed_dim"]
    return config


def text_shape(config: Mapping, projects: bool = False) -> TextShape:
    """Returns the sizes of a text encoder in transformers' ``config.json``."""
    return TextShape(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        context=config["max_position_embeddings"],
        mlp_width=config["intermediate_size"],
        projection=config["projection_dim"] if projects else 0,
    )


def write_diffusers(path: Path, checkpoint: NemoCheckpoint, advance: Callable[[], object] = lambda: None) -> None:
    """Writes what ``StableDiffusionXLPipeline.from_pretrained`` loads, and in ``nemo/`` what it has no place for.

    One tensor is in memory at a time; ``advance`` is called after each. Raises ArtifactError for a vocabulary that is
    not CLIP's and ResourceError when the disk is full.
    """
    with atomic_path(path.absolute()) as folder:
        write_pipeline(folder, checkpoint, advance=advance)
        write_text(folder / NEMO / CONFIG, yaml.safe_dump(checkpoint.model_config, sort_keys=False))
        write_safetensors(folder / NEMO / UNUSED_FILE, checkpoint.unused, advance)


def write_pipeline(
    folder: Path,
    checkpoint: NemoCheckpoint,
    without: Collection[str] = (),
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Writes what diffusers loads into a folder, ``without`` the weights of these components.

    Raises what ``write_diffusers`` raises.
    """
    from diffusers import EulerDiscreteScheduler

    try:
        tokenizers = {
            "tokenizer": clip_tokenizer(checkpoint.clip1.vocab_size),
            "tokenizer_2": clip_tokenizer(checkpoint.clip2.vocab_size, "!"),
        }
    except ValueError as error:
        raise ArtifactError(f"{checkpoint.path} needs a tokenizer that is not CLIP's: {error}") from error
    modules = described_networks(checkpoint.path, checkpoint.model_config, checkpoint.clip1, checkpoint.clip2)
    write_json(folder / INDEX, PIPELINE | REST_OF_PIPELINE)
    # diffusers' own class: the folder is for those who do not have ours
    EulerDiscreteScheduler.from_config(scheduler().config).save_pretrained(folder / "scheduler")
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(folder / name)
        tokenizer.backend_tokenizer.model.save(str(folder / name))  # vocab.json, merges.txt: for transformers 4
    for name, module in modules.items():
        weights, (library, kind) = checkpoint.components[name], NETWORKS[name]
        if library == "diffusers":
            module.save_config(folder / name)
        else:
            module.config.architectures = [kind]
            module.config.save_pretrained(folder / name)
        if name in without:
            continue
        level = "text_model." if name == "text_encoder" else ""  # which transformers 4 needs and 5 allows
        tensors = {level + parameter: each for parameter, each in weights.parameters.items()}
        write_safetensors(folder / name / f"{WEIGHTS[library]}.safetensors", tensors, advance)


def _check_architecture(path: Path, configs: Mapping[str, dict], modules: Mapping[str, Any]) -> None:
    """Raises ArtifactError unless the networks that NeMo builds, and its noise schedule, are those of the folder."""
    for name, module in modules.items():
        if NETWORKS[name][0] == "diffusers":
            config, expected = _defaults(type(module)) | configs[name], dict(module.config)
            keys = {key for key in config if not key.startswith("_")} - COMPUTING
        else:
            config, expected, keys = type(module.config)().to_dict() | configs[name], module.config.to_dict(), TEXT
        check_config(path / name / "config.json", config, expected, keys)
    folder, expected = path / "scheduler", scheduler()
    config = _defaults(type(expected)) | read_json(folder, "scheduler_config.json")
    check_config(folder / "scheduler_config.json", config, dict(expected.config), SCHEDULER)


def _defaults(kind: type) -> dict:
    """Returns what a class of diffusers takes for the keys that a config does not hold."""
    parameters = inspect.signature(kind).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def check_config(path: Path, config: Mapping, expected: Mapping, keys: Iterable[str]) -> None:
    """Raises ArtifactError, which names ``path``, for the first of ``keys`` in which the two configs differ."""

    def value(content: Mapping, key: str) -> object:
        entry = content.get(key) or None  # null, false and absent say the same
        return list(entry) if isinstance(entry, tuple) else entry

    for key in sorted(keys):
        if value(config, key) != value(expected, key):
            raise ArtifactError(
                f"{path}: {ascii(key)[1:-1][:200]} is {ascii(config.get(key))[:200]} where SDXL in NeMo has "
                f"{expected.get(key)!r}; convert a StableDiffusionXLPipeline of SDXL base's kind"
            )
