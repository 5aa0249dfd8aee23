"""Convert SDXL between a folder of diffusers' StableDiffusionXLPipeline and NeMo's checkpoint, for ``convert``.

NeMo's config is derived from the folder's configs, the inverse of ``sd_quant.models.sdxl_nemo``. The networks that it
describes are then compared with the folder's configs, entry by entry. So another kind of UNet, such as the refiner's or
an inpainting one, is refused for the entry that differs, and no list of kinds is needed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import yaml

from sd_quant.checkpoints.diffusers_network import defaults_of, full_config, network_class, usual_entries, weights_of
from sd_quant.checkpoints.diffusers_pipeline import ABSENT, components_of, read_index
from sd_quant.checkpoints.nemo_networks import (
    NemoCheckpoint,
    checkpoint_of,
    described_networks,
    network_state,
    read_config,
    sdxl_base_config,
    state_of,
)
from sd_quant.checkpoints.unopened import CONFIG, INDEX
from sd_quant.errors import ArtifactError
from sd_quant.files import atomic_path, refusing, write_json, write_text
from sd_quant.files.checks import MAX_DEPTH, check_tensors
from sd_quant.files.folders import WEIGHTS, files_in, read_json
from sd_quant.files.safetensors import read_safetensors, write_safetensors
from sd_quant.models.checkpoint import empty_modules
from sd_quant.models.sdxl import FAMILY
from sd_quant.models.sdxl_nemo import TEXT_SIZES, TextShape, noise_config, tokenizers, with_noise
from sd_quant.names.nemo import UNUSED

NETWORKS = {  # library and class
    name: ["transformers" if name.startswith("text_encoder") else "diffusers", kind]
    for name, kind in FAMILY.NETWORKS.items()
}
PIPELINE = {"_class_name": "StableDiffusionXLPipeline"} | NETWORKS
REST_OF_PIPELINE = {
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "image_encoder": ABSENT,
    "feature_extractor": ABSENT,
}
ZEROS = {"force_zeros_for_empty_prompt": True}  # as NeMo does
AS_IT_IS = "use the folder as it is, with model=sdxl"
NEMO, UNUSED_FILE = "nemo", "unused.safetensors"  # a subfolder for NeMo's config and tensors that diffusers ignores

# Entries of configs that are compared: of the UNet and the VAE all but COMPUTING, which say how diffusers computes. A
# text encoder's sizes are taken from its config and its ids follow from the vocabulary, so the others suffice.
COMPUTING = {"force_upcast", "upcast_attention"}
COMPARED_OF_TEXT = {"num_attention_heads", "hidden_act", "layer_norm_eps"}
NOISE = {"num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"}
SCHEDULER = NOISE | {"prediction_type"}


def open_diffusers(path: Path, model_config: dict | None = None) -> NemoCheckpoint:
    """Open the folder of a StableDiffusionXLPipeline; reads no weight.

    ``model_config`` is NeMo's; by default the one that ``write_diffusers`` stored in the folder, else a derived one.
    Raises ArtifactError when the folder is damaged or incomplete, or of another architecture than SDXL base's.
    """
    check_config(path / INDEX, ZEROS | read_json(path, INDEX), PIPELINE | ZEROS, PIPELINE | ZEROS)
    configs = {name: read_json(path / name, "config.json") for name in NETWORKS}
    kept = files_in(path / NEMO) if (path / NEMO).is_dir() else {}
    if model_config is None and CONFIG in kept:
        model_config = read_config(kept[CONFIG])
    errors = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # any value may be wrong
    noise = scheduler_entries(path)
    with refusing(f"{path}: its configs do not describe an SDXL base of any size", *errors, advice=AS_IT_IS):
        clip1, clip2 = text_shape(configs["text_encoder"], 0), text_shape(configs["text_encoder_2"])
        if model_config is None:
            model_config = with_noise(nemo_config(configs["unet"], configs["vae"], clip1, clip2), noise)
    modules = described_networks(path, model_config, clip1, clip2)
    for name, module in modules.items():  # the networks that NeMo builds have to be those of the folder
        library, kind = NETWORKS[name]
        config = usual_entries(network_class(kind)) | configs[name]
        compared = {key for key in config if not key.startswith("_")} - COMPUTING
        keys = compared if library == "diffusers" else COMPARED_OF_TEXT
        check_config(path / name / "config.json", config, full_config(module), keys)
    check_config(path / "scheduler" / "scheduler_config.json", noise, noise_config(model_config), SCHEDULER)

    components = {
        name: weights_of(path / name, name, module, unused={"embeddings.position_ids"}).parameters
        for name, module in modules.items()
    }
    if UNUSED_FILE in kept:
        unused = read_safetensors(kept[UNUSED_FILE])
        check_tensors(path / NEMO, unused, {}, UNUSED)
        return checkpoint_of(path, model_config, network_state(components) | unused)
    return checkpoint_of(path, model_config, state_of(components, model_config))


def scheduler_entries(path: Path) -> dict:
    """Return a folder's scheduler config, defaults included. Raises ArtifactError for a scheduler that has no betas."""
    pipeline, index = read_index(path)
    described = components_of(path, pipeline, {"scheduler": ["diffusers", "EulerDiscreteScheduler"], **index})
    if "beta_schedule" not in (usual := defaults_of(kind := described["scheduler"].kind)):
        raise ArtifactError(f"{path / INDEX}: its scheduler is {kind.__name__!r}, expected one with betas; {AS_IT_IS}")
    return usual | read_json(path / "scheduler", "scheduler_config.json") | {"_class_name": kind.__name__}


def nemo_config(unet: Mapping, vae: Mapping, clip1: TextShape, clip2: TextShape) -> dict:
    """Return NeMo's config of SDXL with diffusers' sizes. Raises KeyError, TypeError or the like if unsuitable."""
    config = sdxl_base_config()
    widths, kinds = unet["block_out_channels"], unet["down_block_types"][:MAX_DEPTH]
    depth = unet["transformer_layers_per_block"]
    nested = isinstance(depth, list) and any(isinstance(each, list) for each in depth)
    if nested or unet.get("reverse_transformer_layers_per_block"):
        raise ValueError(f"NeMo has one depth per level, and transformer_layers_per_block is {str(depth)[:100]}")
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


def text_shape(config: Mapping, projection: int | None = None) -> TextShape:
    """Return a text encoder's sizes from transformers' ``config.json``; ``projection`` replaces its projection size."""
    sizes = (config[name] for name in TEXT_SIZES)
    return TextShape(*sizes, projection=config["projection_dim"] if projection is None else projection)


def write_diffusers(path: Path, checkpoint: NemoCheckpoint, advance: Callable[[], object] = lambda: None) -> None:
    """Write a StableDiffusionXLPipeline folder, with the rest of NeMo's checkpoint in its subfolder ``nemo``.

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
    """Write a pipeline folder, except the weights of the networks ``without``. Raises as ``write_diffusers`` does."""
    with refusing(f"{checkpoint.path} needs a tokenizer that is not CLIP's", ValueError, advice="leave it an archive"):
        both = tokenizers(checkpoint.clip1, checkpoint.clip2)
    modules, sampler = empty_modules(checkpoint), checkpoint.pipeline.scheduler(checkpoint.model_config)
    # diffusers' own class, because readers of the folder do not have ours
    theirs = next(each for each in type(sampler).__mro__ if each.__module__.startswith("diffusers."))
    write_json(folder / INDEX, PIPELINE | REST_OF_PIPELINE | ZEROS | {"scheduler": ["diffusers", theirs.__name__]})
    theirs.from_config(sampler.config).save_pretrained(folder / "scheduler")
    for name, tokenizer in zip(("tokenizer", "tokenizer_2"), both, strict=True):
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


def check_config(path: Path, config: Mapping, expected: Mapping, keys: Iterable[str]) -> None:
    """Raise ArtifactError, which names ``path``, for the first of ``keys`` whose value is not the expected one."""

    def value(content: Mapping, key: str) -> object:
        entry = content.get(key) or None  # null, false and absent say the same
        return list(entry) if isinstance(entry, tuple) else entry

    for key in sorted(keys):
        if value(config, key) != value(expected, key):
            raise ArtifactError(
                f"{path}: {ascii(key)[1:-1][:200]} is {ascii(config.get(key))[:200]} where SDXL in NeMo has "
                f"{expected.get(key)!r}; convert a StableDiffusionXLPipeline of SDXL base's kind"
            )
