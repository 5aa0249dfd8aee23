"""A diffusers pipeline folder of any family, opened as a checkpoint.

Opening reads the configs and the headers of the weight files, and compares names and shapes of the tensors with those
of the networks. It reads no weight. Class names in the folder are data: only those that the family lists are accepted.
Alternative not taken: ``DiffusionPipeline.from_pretrained``. It takes as much memory as all weights, imports what the
folder names, unpickles where there is no safetensors file, and warns where it should refuse.
"""

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from torch import nn

from sd_quant.checkpoints.entries import check_known, check_served
from sd_quant.checkpoints.opened import OpenedFiles
from sd_quant.checkpoints.unopened import INDEX
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.files import check_downloaded, refusing
from sd_quant.files.checks import MAX_DEPTH, bounded_modules, check_tensors, renamed
from sd_quant.files.folders import WEIGHTS, files_in, read_json, stored_weights
from sd_quant.files.schema import check_like, check_schema
from sd_quant.files.tensors import Readable, Weights
from sd_quant.files.tokenizer_steps import SECTIONS, check_file, check_steps
from sd_quant.knobs import between, one_of
from sd_quant.models import FAMILIES
from sd_quant.models.checkpoint import empty_modules
from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.models.controlnet import controlled_call, controlnet_networks
from sd_quant.models.empty import shared_names
from sd_quant.models.family import Family, PipelineCall, StandIn, family_named
from sd_quant.models.parts import Part
from sd_quant.names.diffusers import FORMER_CLASSES, plain_name
from sd_quant.process import confined

TOKENIZER = "tokenizer_config.json"
TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast", "T5Tokenizer", "T5TokenizerFast")
AGAIN = "fetch the folder again"
DEPTHS = ("layer", "depth", "blocks")  # parts of the names of entries that count layers
UNUSED_TENSORS = {"embeddings.position_ids", "logit_scale"}
NOT_WANTED = {"requires_safety_checker": False, "add_watermarker": False}  # which blacken images or add watermarks
ABSENT = [None, None]  # the entry of model_index.json for a component that the pipeline was saved without
UNSTATED = int(1e30)  # transformers' number where a tokenizer's config has none
MOST_SECONDS = 60  # of processor time, to build what a folder describes
MOST_SECONDS_OF_A_TEMPLATE, MOST_CHARACTERS = 5, 10**6  # to render one chat template
MOST_TOKENS = 4096  # of a text encoder: texts are padded to it, and all of it is in memory


@dataclass(frozen=True, slots=True)
class Entries:
    """Optional config entries of schedulers, networks and tokenizers, with the limits of values that work."""

    num_train_timesteps: Annotated[int, between(1, 100_000)]
    beta_start: Annotated[float | None, between(0, 1)]
    beta_end: Annotated[float | None, between(0, 1)]
    trained_betas: Annotated[list[float] | None, between(0, 1, each=True)]
    prediction_type: Annotated[str, one_of(["epsilon", "sample", "v_prediction", "flow_prediction"])]
    timestep_spacing: Annotated[str, one_of(["linspace", "leading", "trailing"])]
    steps_offset: Annotated[int, between(0, 1000)]
    shift: Annotated[float | None, between(1e-3, 1e3)]
    scaling_factor: Annotated[float, between(1e-6, 1e6)]
    shift_factor: Annotated[float | None, between(-1e6, 1e6)]
    relative_attention_num_buckets: Annotated[int, between(4, 10_000)]
    relative_attention_max_distance: Annotated[int, between(4, 1_000_000)]
    extra_ids: Annotated[int, between(0, 1000)]


@dataclass(frozen=True, kw_only=True)
class DiffusersCheckpoint(OpenedFiles):
    """An opened diffusers pipeline folder."""

    index: dict[str, Any]  # the content of model_index.json, as if saved without the networks that are left out
    configs: dict[str, dict]  # complete configs of the networks that are used, by component
    tokens: int | None  # the longest text of a T5 in tokens; None: the family's default

    def parts(self) -> dict[str, Part]:
        return self.parts_of(self.configs, self.tokens)

    def build(self) -> dict[str, nn.Module]:
        own = {name: network(self.family.NETWORKS[name], config) for name, config in self.configs.items()}
        return own | controlnet_networks(self.controlnets)

    def called(self, stand_in: StandIn) -> PipelineCall:
        import diffusers

        networks = {component: stand_in(component, each) for component, each in empty_modules(self).items()}
        tokenizers, family = self.tokenizers(), self.family
        components = {**networks, "scheduler": self.scheduler(), **tokenizers}
        pipe = pipeline_of_components(getattr(diffusers, self.index["_class_name"]), self.index, components)
        shortest = min(tokenizers.values(), key=lambda tokenizer: tokenizer.model_max_length)
        arguments = {**family.call_arguments(self.tokens), **self.arguments}
        call = PipelineCall(family, pipe, [family.DENOISER], arguments, tokenizer=shortest)
        return controlled_call(call, networks, self.controlnets)

    def scheduler(self):
        """Return the folder's scheduler. Raises ArtifactError for an invalid config or a class foreign to diffusers."""
        import diffusers

        name = class_in(self.index, "scheduler")
        config = read_json(self.path / "scheduler", "scheduler_config.json")
        kind = getattr(diffusers, str(name), None)
        check_packages(self.path / INDEX, str(name), kind)
        bases = (diffusers.SchedulerMixin, diffusers.ConfigMixin)
        if not (inspect.isclass(kind) and all(issubclass(kind, base) for base in bases)):
            raise ArtifactError(
                f"{self.path / INDEX}: its scheduler is {str(name)[:100]!r}, expected one of diffusers' schedulers; "
                "fetch the folder again"
            )
        check_entries(self.path / "scheduler", config, defaults_of(kind))
        check_known(self.path / "scheduler/scheduler_config.json", kind, config)
        described = f"{self.path / 'scheduler'}: its config describes no {name} that can be built"
        with refusing(described, advice=AGAIN), confined(MOST_SECONDS):
            return kind.from_config(config)

    def tokenizers(self) -> dict[str, Any]:
        """Return the tokenizers by component. Raises ConfigError if unsupported, ArtifactError if invalid."""
        import transformers

        tokenizers = {}
        described = {name: class_in(self.index, name) for name in self.index if name.startswith("tokenizer")}
        for name, kind in described.items():
            if kind is None:
                continue
            if kind not in TOKENIZERS:
                raise ConfigError(
                    f"{self.path / INDEX}: its {name} is {str(kind)[:100]!r}, expected one of {', '.join(TOKENIZERS)}; "
                    "use model=diffusers"
                )
            tokenizers[name] = read_tokenizer(self.path / name, getattr(transformers, kind), MOST_TOKENS)
            longest = tokenizers[name].model_max_length
            if "CLIP" in kind and longest != CONTEXT_LENGTH:  # to which all texts are padded
                raise ConfigError(
                    f"{self.path / name}: model_max_length is {longest}, expected {CONTEXT_LENGTH}, because this "
                    "family's graphs read as many tokens; use model=diffusers"
                )
        for name in with_tokenizers(self.configs):
            if name.startswith("tokenizer") and name not in tokenizers:
                raise ArtifactError(f"{self.path / INDEX} names no {name}, expected one; fetch the folder again")
        return tokenizers


def read_tokenizer(folder: Path, kind: Any, most: int) -> Any:
    """Return a folder's tokenizer of class ``kind``, whose maximum length, if stated, is at most ``most`` tokens.

    Raises ArtifactError for a missing or invalid file: without a vocabulary the class would silently know two words.
    """
    files, names = files_in(folder), dict(kind.vocab_files_names)
    single = names.pop("tokenizer_file", None)
    if single not in files and not set(names.values()) <= files.keys():
        raise ArtifactError(
            f"{folder} holds neither {single} nor {' and '.join(names.values())}, so it holds no tokenizer that can be "
            "read; fetch the folder again"
        )
    for name in {TOKENIZER, "special_tokens_map.json"} & files.keys():
        config = read_json(folder, name)
        check_entries(folder, config)
        check_known(folder / name, kind, config)
    check_downloaded(folder)
    with refusing(f"{folder} holds no tokenizer that can be read", advice=AGAIN), confined(MOST_SECONDS):
        check_file(folder / "tokenizer.json")
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if native := getattr(tokenizer, "backend_tokenizer", None):  # which may be made of other files
            steps = {name: getattr(native, name, None) for name in SECTIONS}
            check_steps(folder, {name: json.loads(each.__getstate__()) for name, each in steps.items() if each})
        bound_template(folder, tokenizer)
    longest = tokenizer.model_max_length
    if longest != UNSTATED and (type(longest) is not int or not 1 <= longest <= most):
        raise ArtifactError(
            f"{folder}: model_max_length is {str(longest)[:100]}, expected a number of tokens from 1 to {most}; "
            f"state it in {TOKENIZER}"
        )
    return tokenizer


def bound_template(folder: Path, tokenizer: Any) -> None:
    """Bound a tokenizer's chat template, a program: beyond limits of time, memory or length it raises ArtifactError."""
    plain = getattr(tokenizer, "apply_chat_template", None)

    def bounded(*conversation: Any, **options: Any) -> Any:
        with refusing(f"{folder}: its chat_template makes no text", advice="start from the published folder"):
            with confined(MOST_SECONDS_OF_A_TEMPLATE, memory=1e9):
                texts = plain(*conversation, **{**options, "tokenize": False, "return_dict": False})
            if sum(map(len, [texts] if isinstance(texts, str) else texts)) > MOST_CHARACTERS:
                raise ValueError(f"more than {MOST_CHARACTERS} characters")
        return plain(*conversation, **options)

    if plain is not None:
        tokenizer.apply_chat_template = bounded


def check_packages(file: Path, name: str, kind: Any) -> None:
    """Raise ResourceError for a class that diffusers replaces by a dummy, because a package is not installed."""
    if isinstance(packages := getattr(kind, "_backends", None), list):
        missing = [package for package in packages if find_spec(package) is None] or packages
        raise ResourceError(
            f"{file} names {name[:100]}, which needs {' and '.join(missing)}; pip install {' '.join(missing)}"
        )


def check_entries(folder: Path, config: Mapping, usual: Mapping = MappingProxyType({})) -> None:
    """Raise ArtifactError for a config entry that violates ``Entries`` or differs in type from its ``usual`` value."""
    with refusing(f"{folder} has a wrong config", ConfigError, advice=AGAIN):
        check_schema(Entries, config, whole=False)
        check_like(usual, config)


def pipeline_of_components(kind: type, index: Mapping[str, Any], components: Mapping[str, Any]) -> Any:
    """Build a pipeline of class ``kind`` of components and plain index entries. Raises ArtifactError if impossible."""
    plain = {name: value for name, value in index.items() if not name.startswith("_") and not names_a_class(value)}
    known = {**plain, **components, **NOT_WANTED}
    arguments = {
        name: known.get(name)
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if name in known or (parameter.default is parameter.empty and name != "self")
    }
    with refusing(f"the folder describes no {kind.__name__} that can be built here", advice="check its index"):
        return kind(**arguments)


def names_a_class(value: object) -> bool:
    """Return whether an index entry describes a component: [library, class], or two nulls."""
    return isinstance(value, list) and len(value) == 2 and all(each is None or isinstance(each, str) for each in value)


def class_in(index: Mapping, name: str) -> Any:
    """Return the class that model_index.json names for a component: the second item of [library, class]."""
    described = index.get(name)
    return described[1] if isinstance(described, list) and len(described) == 2 else described


def network_class(name: str) -> Any:
    """Return the class of diffusers or transformers called ``name``, which has to be in a family's table."""
    import diffusers
    import transformers

    return getattr(diffusers, name, None) or getattr(transformers, name)


def network(name: str, config: Mapping) -> nn.Module:
    """Build a randomly initialized network of the class called ``name``, which has to be in a family's table."""
    kind = network_class(name)
    if hasattr(kind, "from_config"):
        return kind.from_config(dict(config))
    # not how it is computed, which is ours to choose: transformers would even fetch a kernel from a hub
    unused = ("dtype", "torch_dtype", "attn_implementation", "_attn_implementation")
    plain = {key: value for key, value in config.items() if key not in unused}
    return kind(kind.config_class.from_dict(plain))


def usual_entries(name: str) -> dict[str, Any]:
    """Return the default config of the network class called ``name``."""
    kind = network_class(name)
    return defaults_of(kind) if hasattr(kind, "from_config") else kind.config_class().to_dict()


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the default config of a diffusers class, from its constructor's signature."""
    parameters = inspect.signature(kind).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def with_tokenizers(components: Collection[str]) -> list[str]:
    """Return the component names, followed by those of the tokenizers of the text encoders among them."""
    encoders = [component for component in components if component.startswith("text_encoder")]
    return [*components, *(encoder.replace("text_encoder", "tokenizer") for encoder in encoders)]


def open_pipeline(
    path: Path, name: str, tokens: int | None = None, io: str = "diffusers", parts: Collection[str] | None = None
) -> DiffusersCheckpoint:
    """Open a pipeline folder of the model family ``name``; reads no weight. ``tokens`` is the longest text of a T5.

    For ``io`` and ``parts`` see ``kinds.Options``. Raises ConfigError for another family, ArtifactError for damage.
    """
    family = family_named(name)
    left_out = [] if parts is None else [component for component in family.OPTIONAL if component not in parts]
    index = read_json(path, INDEX)
    index |= {component: ABSENT for component in with_tokenizers(left_out) if component in index}
    index["_class_name"] = base_of(index.get("_class_name"), family)
    check_pipeline(path, name, family, index)
    used = [component for component in family.NETWORKS if class_in(index, component) is not None]
    configs = {component: network_config(path / component, family.NETWORKS[component], name, io) for component in used}
    with refusing(f"{path}: its configs describe no {name} that can be built", advice=AGAIN):
        built = empty_networks([(family.NETWORKS[component], config) for component, config in configs.items()])
        configs = dict(zip(used, map(full_config, built), strict=True))
        family.parts(configs, tokens, io)
    components = {
        component: weights_of(path / component, component, each) for component, each in zip(used, built, strict=True)
    }
    reopen = partial(open_pipeline, path, name, tokens, io, parts)
    checkpoint = DiffusersCheckpoint(
        path=path, name=name, components=components, io=io, reopen=reopen, index=index, configs=configs, tokens=tokens
    )
    checkpoint.scheduler(), checkpoint.tokenizers()  # refused now, not when the first image is made
    return checkpoint


def empty_networks(described: Iterable[tuple[str, Mapping]]) -> list[nn.Module]:
    """Build networks of these classes and configs on the meta device, within limits of module count and time."""
    with torch.device("meta"), bounded_modules(), confined(MOST_SECONDS):
        return [network(kind, config) for kind, config in described]


def network_config(folder: Path, kind: str, *rows: str) -> dict:
    """Read a ``kind``'s config. Raises ArtifactError if invalid, ConfigError if ``rows`` of ``SERVED`` exclude it."""
    config, file = read_json(folder, "config.json"), folder / "config.json"
    check_depths(folder, config)
    check_entries(folder, config, usual := usual_entries(kind))
    check_known(file, network_class(kind), config)
    check_served(file, usual | config, (kind.removesuffix("WithProjection"), *rows))
    return config


def check_pipeline(path: Path, name: str, family: Family, index: Mapping) -> None:
    """Raise ConfigError for a pipeline of another family, ArtifactError for a missing network or a wrong class."""
    import diffusers
    import transformers

    pipeline = index.get("_class_name")
    found = getattr(diffusers, str(pipeline), None)
    check_packages(path / INDEX, str(pipeline), found)
    if pipeline not in family.PIPELINES:
        families = {other: family_named(other) for other in FAMILIES}
        others = [other for other, its in families.items() if base_of(pipeline, its) in its.PIPELINES]
        advice = f"use model={' or model='.join(others)}"
        if not others and is_pipeline(found):
            advice = f"what this class adds is missing in {name}: use model=diffusers"
        elif not others:
            advice = f"it is no class of diffusers {diffusers.__version__}: name the class of the same networks there"
        raise ConfigError(
            f"{path} is a {str(pipeline)[:100]} and model.family is {name}, expected {' or '.join(family.PIPELINES)}; "
            f"{advice}"
        )
    check_known(path / INDEX, found, index)
    check_served(path / INDEX, index, (name,))
    for component, expected in family.NETWORKS.items():
        kind = class_in(index, component)
        if kind is None and component in family.OPTIONAL:
            continue
        if FORMER_CLASSES.get(str(kind), kind) != expected:
            other = getattr(diffusers, str(kind), None) or getattr(transformers, str(kind), None)
            check_packages(path / INDEX, str(kind), other)
            advice = "save the pipeline again with all its networks"
            if inspect.isclass(other) and issubclass(other, nn.Module):
                advice = f"{name} has no graph of that class: use model=diffusers"
            raise ArtifactError(
                f"{path / INDEX}: its {component} is {str(kind)[:100]!r}, expected {expected}; {advice}"
            )
        if index[component][0] not in list(WEIGHTS):
            raise ArtifactError(
                f"{path / INDEX}: its {component} is of the library {str(index[component][0])[:100]!r}, expected "
                f"{' or '.join(WEIGHTS)}; fetch the folder again"
            )


def base_of(pipeline: Any, family: Family) -> Any:
    """Return the family's text-to-image class for its image-to-image or inpainting class; else ``pipeline`` itself."""
    base = re.sub("(Img2Img|Inpaint)Pipeline$", "Pipeline", str(pipeline))
    return base if pipeline not in family.PIPELINES and base in family.PIPELINES else pipeline


def is_pipeline(kind: Any) -> bool:
    """Return whether ``kind`` is a diffusers pipeline class with a ``__call__``."""
    import diffusers

    return inspect.isclass(kind) and issubclass(kind, diffusers.DiffusionPipeline) and "__call__" in dir(kind)


def check_depths(folder: Path, config: Mapping) -> None:
    """Raise ArtifactError for a list or number of layers so large that building the network would take hours."""
    for key, value in config.items():
        counts = value if isinstance(value, list) else [value]
        deepest = [count for entry in counts for count in (entry if isinstance(entry, list) else [entry])]
        counted = any(word in key for word in DEPTHS) and "channels" not in key
        if max(len(counts), len(deepest)) > MAX_DEPTH or (
            counted and any(isinstance(count, int) and count > 2 * MAX_DEPTH for count in deepest)
        ):
            raise ArtifactError(
                f"{folder / 'config.json'}: {key[:100]} is {str(value)[:100]}, more than any network has, expected at "
                f"most {MAX_DEPTH} entries and {2 * MAX_DEPTH} layers; fetch it again"
            )


def full_config(built: nn.Module) -> dict:
    """Return a network's whole config: its class's defaults fill in the entries that the file lacks."""
    config = built.config
    return dict(config) if isinstance(config, Mapping) else config.to_dict()


def weights_of(
    path: Path,
    component: str,
    built: nn.Module,
    unused: Collection[str] = UNUSED_TENSORS,
    tensors: Mapping[str, Readable] | None = None,
) -> Weights:
    """Return weights, unread, of the network ``built``. Raises ArtifactError for missing, unknown or misshapen ones.

    ``tensors`` are by default those of the folder ``path``. Names of other transformers versions are translated; a
    tensor with several names may be stored under only one of them; names in ``unused`` are ignored.
    """
    state = {name: tensor for name, tensor in built.state_dict(keep_vars=True).items() if tensor.is_floating_point()}
    same = {plain_name(name): name for name in state}
    library = "diffusers" if hasattr(built, "from_config") else "transformers"
    rename = renaming(built) if library == "transformers" else lambda name: name

    def own_name(name: str) -> str:
        new = rename(name)
        return next((found for found in (new, name) if found in state), None) or same.get(plain_name(new), new)

    stored = renamed(path, stored_weights(path, WEIGHTS[library]) if tensors is None else tensors, own_name)
    shared = shared_names(built)
    by_tensor = dict.fromkeys(shared[name] for name in state)
    for names in by_tensor:
        kept = next((name for name in names if name in stored), None)
        stored |= {name: stored[kept] for name in names if kept is not None and name not in stored}
    ignored = [re.compile(each) for each in getattr(built, "_keys_to_ignore_on_load_unexpected", None) or ()]
    ignored_tensors = {
        name for name, tensor in stored.items()
        if name not in state and (
            name in unused or not tensor.dtype.is_floating_point or any(rule.search(name) for rule in ignored)
        )
    }  # fmt: skip
    check_tensors(path, stored, {name: tuple(tensor.shape) for name, tensor in state.items()}, ignored_tensors)
    once = {names[0]: stored[names[0]] for names in by_tensor}
    return Weights(path, component, {name: stored[name] for name in state}, once)


def renaming(built: nn.Module) -> Callable[[str], str]:
    """Return the function from a file's tensor names to the network's, by transformers' own conversion rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(built)
    names = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    others, state = [rule for rule in rules if not isinstance(rule, WeightRenaming)], built.state_dict()
    return lambda name: rename_source_key(name, names, others, built.base_model_prefix, state)[0]
