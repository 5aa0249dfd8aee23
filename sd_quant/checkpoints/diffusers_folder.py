"""A folder of diffusers' StableDiffusionXLPipeline as an opened checkpoint, and the other way round.

NeMo's ``model_config.yaml`` is made from the folder's configs by the inverse of ``sd_quant.models.sdxl``, and the
networks that it describes are then compared with those configs, key by key. So a UNet of another kind, such as the
refiner's or one for inpainting, is refused for the key that differs, though nobody listed the kinds.
The road not taken is ``StableDiffusionXLPipeline.from_pretrained``: it takes as much memory as the weights, and warns
where it should refuse.
"""

import errno
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from sd_quant.checkpoints import sdxl_keys
from sd_quant.checkpoints.archive import Member, open_members
from sd_quant.checkpoints.bounds import MAX_DEPTH
from sd_quant.checkpoints.nemo import (
    CONFIG,
    MAX_CONFIG,
    Checkpoint,
    check_tensors,
    checkpoint_of,
    empty_modules,
    network_state,
    parameter_shapes,
    read_config,
    renamed,
    unused_state,
)
from sd_quant.checkpoints.safetensors_file import read_safetensors, write_safetensors
from sd_quant.checkpoints.synthetic import sdxl_base_config
from sd_quant.checkpoints.torch_weights import Readable, StoredTensor
from sd_quant.errors import ArtifactError, ResourceError
from sd_quant.files import write_json, write_text
from sd_quant.models.clip_tokenizer import clip_tokenizer
from sd_quant.models.sdxl_nemo import TextShape, scheduler

INDEX = "model_index.json"
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
WEIGHTS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}  # by library
NEMO, UNUSED = "nemo", "unused.safetensors"  # the subfolder of what diffusers has no place for

# Keys of configs. All of the UNet's and the VAE's are compared but COMPUTING, which is how diffusers computes; of a
# text encoder's those of TEXT, because its sizes are taken from there and its ids follow from the vocabulary.
COMPUTING = {"force_upcast", "upcast_attention"}
TEXT = {"num_attention_heads", "hidden_act", "layer_norm_eps"}
NOISE = {"num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"}
SCHEDULER = NOISE | {"prediction_type"}

# of the VAE's attention in older files, as in diffusers' ModelMixin._fix_state_dict_keys_on_load
OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def open_folder(path: Path, model_config: dict | None = None) -> Checkpoint:
    """A StableDiffusionXLPipeline's folder, checked but not loaded.

    ``model_config`` is NeMo's; without it, the one that ``write_folder`` kept counts, or else one is made.
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
        reason = f"{type(error).__name__}: {error}"[:300]
        raise ArtifactError(f"{path}: its configs do not describe an SDXL base of any size ({reason})") from error
    modules = empty_modules(path, model_config, clip1, clip2)
    _check_architecture(path, configs, modules)

    components = {}
    for name, shapes in parameter_shapes(modules).items():
        folder = path / name
        found = renamed(folder, stored_weights(folder, WEIGHTS[NETWORKS[name][0]]), plain_name)
        plain = {parameter: plain_name(parameter) for parameter in shapes}
        check_tensors(
            folder, found, {plain[parameter]: shapes[parameter] for parameter in shapes}, {"embeddings.position_ids"}
        )
        components[name] = {parameter: found[plain[parameter]] for parameter in shapes}
    if UNUSED in kept:
        unused: Mapping[str, Readable] = read_safetensors(kept[UNUSED])
        check_tensors(path / NEMO, unused, {}, sdxl_keys.UNUSED)
    else:
        dtype = components["text_encoder_2"]["text_projection.weight"].dtype
        unused = unused_state(dtype, scheduler().config.num_train_timesteps)
    return checkpoint_of(path, model_config, network_state(components) | unused)


def nemo_config(unet: Mapping, vae: Mapping, clip1: TextShape, clip2: TextShape) -> dict:
    """NeMo's model section for configs of diffusers: SDXL base's with their sizes.

    Only sizes are taken. Raises KeyError, TypeError and the like for configs of another kind.
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
    for size in embedders[2:]:
        size["outdim"] = unet["addition_time_embed_dim"]
    return config


def text_shape(config: Mapping, projects: bool = False) -> TextShape:
    """Sizes of a text encoder from transformers' ``config.json``."""
    return TextShape(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        context=config["max_position_embeddings"],
        mlp_width=config["intermediate_size"],
        projection=config["projection_dim"] if projects else 0,
    )


def write_folder(path: Path, checkpoint: Checkpoint, advance: Callable[[], object] = lambda: None) -> None:
    """What ``StableDiffusionXLPipeline.from_pretrained`` loads, and in ``nemo/`` what it has no place for.

    One tensor is in memory at a time; ``advance`` is called after each. Raises ArtifactError for a vocabulary that is
    not CLIP's and ResourceError when the disk is full.
    """
    from diffusers import EulerDiscreteScheduler

    try:
        tokenizers = {
            "tokenizer": clip_tokenizer(checkpoint.clip1.vocab_size),
            "tokenizer_2": clip_tokenizer(checkpoint.clip2.vocab_size, "!"),
        }
    except ValueError as error:
        raise ArtifactError(f"{checkpoint.path} needs a tokenizer that is not CLIP's: {error}") from error
    modules = empty_modules(checkpoint.path, checkpoint.model_config, checkpoint.clip1, checkpoint.clip2)
    with atomic_folder(path) as folder:
        write_json(folder / INDEX, PIPELINE | REST_OF_PIPELINE)
        # diffusers' own class: the folder is for those who do not have ours
        EulerDiscreteScheduler.from_config(scheduler().config).save_pretrained(folder / "scheduler")
        for name, tokenizer in tokenizers.items():
            tokenizer.save_pretrained(folder / name)
            tokenizer.backend_tokenizer.model.save(str(folder / name))  # vocab.json, merges.txt: for transformers 4
        for name, module in modules.items():
            source, (library, kind) = checkpoint.components[name], NETWORKS[name]
            if library == "diffusers":
                module.save_config(folder / name)
            else:
                module.config.architectures = [kind]
                module.config.save_pretrained(folder / name)
            level = "text_model." if name == "text_encoder" else ""  # which transformers 4 needs and 5 allows
            tensors = {level + parameter: source.lazy(parameter) for parameter in source}
            write_safetensors(folder / name / f"{WEIGHTS[library]}.safetensors", tensors, advance)
        write_text(folder / NEMO / CONFIG, yaml.safe_dump(checkpoint.model_config, sort_keys=False))
        write_safetensors(folder / NEMO / UNUSED, checkpoint.unused, advance)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path``, renamed to it when the block ends well and removed when it does not.

    ``path`` may be an empty folder. Raises ResourceError when the disk is full.
    """
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for entry in temporary.rglob("*"):
            if entry.is_file():
                with entry.open("rb") as file:
                    os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"the disk is full: {path} could not be written; free some space and rerun") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_architecture(path: Path, configs: Mapping[str, dict], modules: Mapping[str, Any]) -> None:
    """Whether the networks that NeMo would build are those of the folder, and are told the same noise."""
    for name, module in modules.items():
        where = path / name / "config.json"
        if NETWORKS[name][0] == "diffusers":
            found, expected = _defaults(type(module)) | configs[name], dict(module.config)
            keys = {key for key in found if not key.startswith("_")} - COMPUTING
        else:
            found, expected, keys = type(module.config)().to_dict() | configs[name], module.config.to_dict(), TEXT
        check_config(where, found, expected, keys)
    where, ours = path / "scheduler", scheduler()
    found = _defaults(type(ours)) | read_json(where, "scheduler_config.json")
    check_config(where / "scheduler_config.json", found, dict(ours.config), SCHEDULER)


def _defaults(kind: type) -> dict:
    """What diffusers takes for the keys that a config does not hold."""
    parameters = inspect.signature(kind).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def check_config(path: Path, found: Mapping, expected: Mapping, keys: Iterable[str]) -> None:
    def value(config: Mapping, key: str) -> object:
        entry = config.get(key) or None  # null, false and absent say the same
        return list(entry) if isinstance(entry, tuple) else entry

    for key in sorted(keys):
        if value(found, key) != value(expected, key):
            raise ArtifactError(
                f"{path}: {ascii(key)[1:-1][:200]} is {ascii(found.get(key))[:200]} where SDXL in NeMo has "
                f"{expected.get(key)!r}; convert a StableDiffusionXLPipeline of SDXL base's kind"
            )


def files_in(folder: Path) -> dict[str, Member]:
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is missing; expected the whole folder of a pipeline, so fetch it again")
    return open_members(folder)


def read_json(folder: Path, name: str) -> dict:
    files = files_in(folder)
    if name not in files:
        raise ArtifactError(f"{folder} holds no {name}; expected the whole folder of a pipeline, so fetch it again")
    member = files[name]
    if member.size > MAX_CONFIG:
        raise ArtifactError(f"{member.name} has {member.size} bytes; expected at most {MAX_CONFIG}, so check the path")
    try:
        content = json.loads(bytes(member.read(0, member.size)))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{member.name} is not JSON ({str(error)[:200]}); fetch it again") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{member.name} holds a {type(content).__name__}; expected an object, so fetch it again")
    return content


def stored_weights(folder: Path, stem: str) -> dict[str, StoredTensor]:
    """From one file or the shards of an index; full precision wins over the fp16 variant. Shards are looked up among
    the folder's own files, so no name can lead out of it."""
    files = files_in(folder)
    for variant in ("", ".fp16"):
        if (name := f"{stem}{variant}.safetensors") in files:
            return read_safetensors(files[name])
        for name in (f"{stem}.safetensors.index{variant}.json", f"{stem}.safetensors{variant}.index.json"):
            if name in files:
                return _shards(folder, name, files)
    raise ArtifactError(
        f"{folder} holds no {stem}.safetensors, no .fp16. variant and no index of shards; expected weights as "
        "safetensors, so fetch those, or save the pipeline again with safe_serialization=True"
    )


def _shards(folder: Path, index: str, files: Mapping[str, Member]) -> dict[str, StoredTensor]:
    weight_map = read_json(folder, index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    tensors: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(map(str, names)):
        if name not in files:
            raise ArtifactError(
                f"{folder / index} names the shard {name[:200]!r}, which is no file of that folder; fetch it again"
            )
        shard = read_safetensors(files[name])
        if double := tensors.keys() & shard.keys():
            raise ArtifactError(f"{folder} holds {min(double)[:200]!r} in two shards; expected it once, fetch it again")
        tensors |= shard
    return tensors


def plain_name(name: str) -> str:
    """A parameter's name as this project's versions have it, without the level that only some versions have."""
    name = re.sub(
        r"(mid_block\.attentions\.0\.)(query|key|value|proj_attn)(?=\.)",
        lambda found: found[1] + OLD_NAMES[found[2]],
        name,
    )
    return name.removeprefix("text_model.")
