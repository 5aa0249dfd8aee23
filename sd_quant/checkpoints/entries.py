"""Entries of the JSON files in a pipeline's folder: each is used, known to be without effect, or refused.

diffusers only warns of an entry that its class does not take, and transformers makes it an attribute, which a pipeline
may read. So if an entry is ignored, images may differ from those of the model's author.
"""

import inspect
import re
import sys
from collections.abc import Collection, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files.checks import listing
from sd_quant.knobs import BOUNDED
from sd_quant.names.diffusers import FORMER_CLASSES

NOTHING: tuple = (None, [], {}, [None, None])  # empty values
# Entries of published files without effect on denoising: of versions, training, tasks and generation, and some that the
# installed classes derive themselves. They belong to transformers' networks, to tokenizers, and to diffusers' classes.
OF_NETWORKS = set(
    "add_cross_attention attn_implementation auto_map cache_implementation cross_attention_hidden_size "
    "decoder_start_token_id dense_act_fn directionality dropout dtype experts_implementation finetuning_task "
    "gradient_checkpointing hidden_act in_chans is_decoder is_gated_act max_window_layers model_type n_positions "
    "name_or_path num_labels output_attentions output_past partial_rotary_factor pooler_fc_size "
    "pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type position_embedding_type prefix "
    "pretraining_tp rope_scaling rope_theta scalable_attention scale_decoder_outputs sep_token_id sliding_window_size "
    "spatial_patch_size task_specific_params tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class "
    "torch_dtype torchscript use_attention_mask use_bfloat16 use_sliding_window vision_token_id "
    "vocab_size".split()
)
OF_TOKENIZERS = set(
    "add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens auto_map backend "
    "chat_template clean_up_tokenization_spaces do_basic_tokenize do_lower_case encode_special_tokens errors extra_ids "
    "extra_special_tokens from_slow is_local keep_accents legacy local_files_only max_len max_length model_input_names "
    "model_max_length model_specific_special_tokens name_or_path never_split pad_to_multiple_of pad_token_type_id "
    "padding_side processor_class remove_space sp_model_kwargs spaces_between_special_tokens special_tokens_map_file "
    "split_special_tokens stride strip_accents tokenize_chinese_chars tokenizer_class tokenizer_file trim_offsets "
    "truncation_side truncation_strategy use_default_system_prompt use_fast verbose".split()
)
LEFT_OUT = set(
    "feature_extractor nfe noise_sampler_seed pooled_projection_dim requires_aesthetics_score requires_safety_checker "
    "safety_checker".split()
)
# Values that the graphs of a family support, by class of network, by family and by the naming of inputs (``io``). A
# type stands for all of its values. Other values need inputs that the graphs lack.
SERVED: dict[str, dict[str, list[Any]]] = {
    "UNet2DConditionModel": {
        "addition_embed_type": [None], "attention_type": ["default"], "class_embed_type": [None],
        "cross_attention_dim": [int], "dual_cross_attention": [False], "encoder_hid_dim": [None],
        "encoder_hid_dim_type": [None], "mid_block_only_cross_attention": [None, False], "num_class_embeds": [None],
        "only_cross_attention": [False],
    },
    "ControlNetModel": {
        "addition_embed_type": [None, "text_time"], "class_embed_type": [None], "conditioning_channels": [3],
        "cross_attention_dim": [int], "encoder_hid_dim": [None], "encoder_hid_dim_type": [None],
        "global_pool_conditions": [False], "num_class_embeds": [None], "only_cross_attention": [False],
    },
    "PixArtTransformer2DModel": {"attention_type": ["default"], "caption_channels": [int]},
    "CLIPTextModel": {
        "model_type": ["clip_text_model"], "return_dict": [True], "use_attention_mask": [False, None]
    },
    "T5EncoderModel": {"model_type": ["t5"], "return_dict": [True]},
    "sdxl": {"addition_embed_type": ["text_time"], "requires_aesthetics_score": [False, None]},
    "nemo": {"flip_sin_to_cos": [True], "freq_shift": [0]},  # of the size embedding, which NeMo computes outside
}  # fmt: skip


def check_known(file: Path, kind: type, config: Mapping[str, Any]) -> None:
    """Raise ArtifactError for entries of ``file`` that the class ``kind`` neither takes nor is known to ignore."""
    if "quantization_config" in config:
        raise ArtifactError(
            f"{file} describes quantized weights, expected a checkpoint as it was before; start from that, or give "
            "this one to judge.py"
        )
    parts = [config]
    for part in parts:  # grows: a part may have parts of its own
        parts += [each for each in part.values() if isinstance(each, Mapping) and "model_type" in each]
    stated = {name: value for part in parts for name, value in part.items()}
    unknown = {name for name, value in stated.items() if value not in NOTHING and name[:1] != "_"}
    unknown -= entries_of(kind, config)
    if unknown and (unknown := unknown - entries_of_others(kind, config) - read_by(kind, unknown)):
        said = listing([f"{name[:100]} is {BOUNDED.repr(stated[name])}" for name in sorted(unknown)], 3)
        raise ArtifactError(
            f"{file}: {said}, neither used by {kind.__name__} of the installed {kind.__module__.partition('.')[0]} nor "
            "known to be without effect; install a version that uses it, or take it out of the file"
        )


def entries_of(kind: type, config: Mapping[str, Any]) -> Set[str]:
    """Return the names of config entries that the class ``kind`` takes, or that are known to have no effect on it."""
    import transformers

    if issubclass(kind, transformers.PreTrainedTokenizerBase):
        tokens = {name for name in config if name.endswith("_token")}
        return tokens | OF_TOKENIZERS | parameters_of(*kind.__mro__)
    if issubclass(kind, transformers.PreTrainedModel):
        parts = parts_of(config_class(kind.config_class, config), config)
        inner = {name for part in parts for name in (*part.attribute_map, *part.sub_configs)}
        every = {each for part in parts for each in part.__mro__}
        return parameters_of(*every) | inner | vars(transformers.GenerationConfig()).keys() | OF_NETWORKS
    return parameters_of(kind)


def entries_of_others(kind: type, config: Mapping[str, Any]) -> Set[str]:
    """Return names of entries without effect that published files keep: of other schedulers, or of a former class."""
    import diffusers

    others = [kind]
    if issubclass(kind, diffusers.SchedulerMixin):
        others = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Scheduler")]
    elif str(config.get("_class_name")) in FORMER_CLASSES:
        others = [getattr(diffusers, config["_class_name"])]
    return parameters_of(*others) | LEFT_OUT


def read_by(kind: type, names: Collection[str]) -> set[str]:
    """Return those of ``names`` that the source code of the class's module reads from, or registers in, a config."""
    source = inspect.getsource(sys.modules[kind.__module__])
    return {name for name in names if re.search(rf"config\W+{re.escape(name)}\b", source)}


@cache
def parameters_of(*kinds: Any) -> frozenset[str]:
    """Return the names of the constructor parameters of these classes."""
    every = [each for kind in kinds for each in inspect.signature(kind.__init__).parameters.values()]
    return frozenset(each.name for each in every if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL))


def parts_of(kind: Any, config: Mapping[str, Any]) -> list[Any]:
    """Return a config class of transformers and, recursively, the classes of its sub-configs."""
    found = [kind]
    for name, each in getattr(kind, "sub_configs", {}).items():
        inner = config.get(name)
        found += parts_of(config_class(each, inner), inner) if isinstance(inner, Mapping) else parts_of(each, {})
    return [each for each in found if hasattr(each, "sub_configs")]  # a part may be of any class: AutoConfig


def config_class(own: Any, config: Mapping[str, Any]) -> Any:
    """Return transformers' config class for the ``model_type`` in ``config``, or ``own`` if it names no other class."""
    import transformers

    known, stated = transformers.CONFIG_MAPPING, config.get("model_type")
    other = stated != getattr(own, "model_type", None) and isinstance(stated, str) and stated in known
    return known[stated] if other else own


def check_served(file: Path, config: Mapping[str, Any], rows: Collection[str]) -> None:
    """Raise ConfigError for a config value that the exported graphs do not support; ``rows`` are keys of ``SERVED``."""
    for entry, served in {entry: each for row in rows for entry, each in SERVED.get(row, {}).items()}.items():
        value = config.get(entry, served[0])
        each_value = value if isinstance(value, list | tuple) and int not in served else [value]
        if not all(each in served or type(each) in served for each in each_value):
            expected = " or ".join("a number" if each is int else str(each) for each in served)
            raise ConfigError(
                f"{file}: {entry} is {BOUNDED.repr(value)}, expected {expected}, because this family's graphs have no "
                "inputs for it; use model=diffusers"
            )
