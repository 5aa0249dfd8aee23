"""The folder of a diffusers pipeline, of a stated family or of any, opened safely.

No code that the folder names is imported or executed. A component's class is looked up by name in the public namespaces
of diffusers and transformers and must be a network, scheduler, tokenizer or processor of these libraries. A network of
transformers must be of a model type that the pipeline's signature names, and so must each configuration nested in the
network's configuration. Of a stated family, the classes must be those that it lists, and values those that its graphs
serve. Alternative not taken: diffusers' own ``from_pretrained``. It takes as much memory as all weights, imports what
the folder names, unpickles where there is no safetensors file, and warns where it should refuse.
"""

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import nn

from sd_quant.checkpoints.diffusers_network import (
    AGAIN,
    ENCODERS,
    LARGEST_NUMBER,
    MOST_SECONDS,
    check_entries,
    check_numbers,
    defaults_of,
    full_config,
    network,
    package_of,
    pairs_in,
    read_network,
)
from sd_quant.checkpoints.entries import check_known, check_served
from sd_quant.checkpoints.opened import OpenedFiles
from sd_quant.checkpoints.unopened import INDEX, check_kind
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.files import check_downloaded, refusing
from sd_quant.files.folders import WEIGHTS, files_in, read_json
from sd_quant.files.tensors import Weights
from sd_quant.files.tokenizer_steps import SECTIONS, check_file, check_steps
from sd_quant.models import FAMILIES, OBSERVED
from sd_quant.models.checkpoint import empty_modules
from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.models.controlnet import controlled_call, controlnet_networks
from sd_quant.models.family import Family, PipelineCall, StandIn, family_named
from sd_quant.models.parts import Part
from sd_quant.names.diffusers import FORMER_CLASSES
from sd_quant.process import confined

TOKENIZER = "tokenizer_config.json"
MOST_NOISE_LEVELS = 100_000  # of a scheduler, which computes tables of them
LONGEST_TEXT = 2_000_000  # tokens, to all of which a tokenizer may pad
UNSTATED = int(1e30)  # transformers' number where a tokenizer's config has none
MOST_SECONDS_OF_A_TEMPLATE, MOST_CHARACTERS = 5, 10**6  # to render one chat template
BLACKENING = {"requires_safety_checker": False, "add_watermarker": False}  # what blackens images or adds watermarks
NOT_WANTED = ("safety_checker", "watermark")  # parts that a pipeline may lack
OF_IMAGES = ("feature_extractor", "image_encoder")  # likewise, where no image is given
OTHER_MEDIA = {"audio": ("audio", "music", "sound", "speech"), "3D": ("shape", "mesh", "3d")}
CONFIGS = (
    "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast", "T5Tokenizer", "T5TokenizerFast")
ABSENT = [None, None]  # the entry of model_index.json for a component that the pipeline was saved without
MOST_TOKENS = 4096  # of a text encoder: texts are padded to it, and all of it is in memory


@dataclass(frozen=True)
class Component:
    """A component of a pipeline, as its index names it."""

    name: str
    library: str  # "diffusers" or "transformers"
    kind: type

    @property
    def is_network(self) -> bool:
        return issubclass(self.kind, nn.Module)


@dataclass(frozen=True)
class Folder:
    """The opened folder of a pipeline, whose weights are complete and of the right shapes."""

    path: Path
    kind: type  # the pipeline's class
    index: dict[str, Any]
    described: dict[str, Component]
    configs: dict[str, dict]  # of the networks, by component
    components: dict[str, Weights]  # of the networks

    def pipeline(self, networks: Mapping[str, Any]) -> Any:
        """Build diffusers' pipeline from these networks by component, and the folder's other components."""
        return pipeline_of_components(self.kind, self.index, {**open_others(self.path, self.described), **networks})


def open_folder(path: Path, images: bool = False) -> Folder:
    """Open the folder of a pipeline, to be called with ``images`` or not. Raises SdQuantError if it cannot be used."""
    check_kind(path, OBSERVED)
    kind, index = read_index(path)
    described = components_of(path, kind, index, images)
    return Folder(path, kind, index, described, *open_networks(path, described))


def read_index(path: Path) -> tuple[type, dict[str, Any]]:
    """Return the pipeline's class and the content of model_index.json. Raises as ``pipeline_class``."""
    index = read_json(path, INDEX)
    return pipeline_class(path, index), index


def pipeline_class(path: Path, index: Mapping[str, Any]) -> Any:
    """Return the class that the ``index`` of the folder ``path`` names.

    Raises ConfigError for remote code, a class that the installed diffusers lacks and media that are not images,
    ResourceError for a package that the class needs.
    """
    import diffusers
    import transformers.processing_utils  # noqa: F401  puts another module in transformers' place, once

    name = index.get("_class_name")
    if not isinstance(name, str):
        raise ConfigError(
            f"{path / INDEX} names the pipeline {str(name)[:100]!r}, which is code of the folder's own; expected a "
            "class of diffusers, because code of a folder is never executed"
        )
    for medium, words in OTHER_MEDIA.items():
        if any(word in name.lower() for word in words):
            raise ConfigError(f"{path} is a {name[:100]}, which makes {medium}, expected a pipeline of images or video")
    kind = getattr(diffusers, name, None) if name.isidentifier() else None
    check_packages(path / INDEX, name, kind)
    if not (inspect.isclass(kind) and issubclass(kind, diffusers.DiffusionPipeline) and "__call__" in dir(kind)):
        raise ConfigError(
            f"{path} is a {name[:100]!r}, which diffusers {diffusers.__version__} does not have; expected one of its "
            f"pipelines (the folder was saved by diffusers {str(index.get('_diffusers_version'))[:20]}), so install a "
            "version that has it"
        )
    return kind


def components_of(path: Path, kind: type, index: Mapping[str, Any], images: bool = False) -> dict[str, Component]:
    """Return the pipeline's components by name, without optional safety checkers and watermarks.

    Optional encoders of images are left out, too, unless the pipeline is given ``images``.
    Raises ConfigError for a class other than the networks, schedulers, tokenizers and processors of diffusers and
    transformers; ArtifactError for a damaged index, and for one without any network or without a scheduler.
    """
    check_numbers(path / INDEX, index, LARGEST_NUMBER)
    check_known(path / INDEX, kind, index)
    taken, found = inspect.signature(kind.__init__).parameters, {}
    unwanted = NOT_WANTED if images else (*NOT_WANTED, *OF_IMAGES)
    for name, described in index.items():
        named = isinstance(described, list) and len(described) == 2 and all(described)
        if name not in taken or not named or (name in unwanted and name not in needed(kind)):
            continue
        library, class_name = map(str, described)
        found[name] = Component(name, *public_class(path, name, library, class_name))
        check_named(path, found[name], str(taken[name].annotation))
    networks = [name for name, component in found.items() if component.is_network]
    for what, names in {"network": networks, "scheduler": found.keys() & {"scheduler"}}.items():
        if not names:
            raise ArtifactError(f"{path / INDEX} names no {what} of the {kind.__name__}, expected one; {AGAIN}")
    return found


def needed(kind: type) -> set[str]:
    """Return the names of the components that the constructor of pipeline class ``kind`` requires."""
    optional = set(getattr(kind, "_optional_components", ()))
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {each.name for each in parameters if each.default is each.empty} - optional


def public_class(path: Path, component: str, library: str, name: str) -> tuple[str, type]:
    """Return library and class of a component. Raises ConfigError for a missing class or one of no accepted kind."""
    import diffusers
    import transformers

    accepted = accepted_classes()
    spaces = {"diffusers": diffusers, "transformers": transformers}
    own = library.isidentifier() and library in dir(diffusers.pipelines)  # networks that one pipeline alone has
    space = getattr(diffusers.pipelines, library) if own else spaces.get(library)
    found = getattr(space, name, None) if space is not None and name.isidentifier() else None
    check_packages(path / INDEX, name, found)
    if found is None or not inspect.isclass(found):
        version = f" {spaces[library].__version__}" if library in spaces else ""
        raise ConfigError(
            f"{path / INDEX}: its {component[:100]} is {name[:100]!r} of {library[:100]!r}, expected a class of "
            f"diffusers or transformers, and the installed {library[:100]}{version} has none of this name; install a "
            "version that has it, because code of a folder is never executed"
        )
    home = "transformers" if issubclass(found, accepted["transformers"]) else "diffusers" if own else library
    expected, kinds = "a network, a scheduler, a tokenizer or a processor", accepted.get(home, ())
    if component == "scheduler":
        expected, kinds = "a scheduler", (diffusers.SchedulerMixin,)
    if not issubclass(found, kinds):
        raise ConfigError(
            f"{path / INDEX}: its {component[:100]} is a {name[:100]}, expected {expected}; check the folder"
        )
    return home, found


def check_packages(file: Path, name: str, kind: Any) -> None:
    """Raise ResourceError for a class that diffusers replaces by a dummy, because a package is not installed."""
    if isinstance(packages := getattr(kind, "_backends", None), list):
        missing = [package for package in packages if find_spec(package) is None] or packages
        raise ResourceError(
            f"{file} names {name[:100]}, which needs {' and '.join(missing)}; pip install {' '.join(missing)}"
        )


def check_named(path: Path, component: Component, annotation: str) -> None:
    """Raise ConfigError for a transformers network of a model type that the pipeline's ``annotation`` does not name.

    Constructors of some model types download what a configuration names, or loop for hours.
    """
    import transformers

    kind, words = component.kind, set(re.findall(r"\w+", annotation))
    classes = [each for word in words if inspect.isclass(each := getattr(transformers, word, None))]
    named = {package_of(each) for each in classes if issubclass(each, nn.Module)}
    named = (named | set(re.findall(r"transformers\.models\.(\w+)", annotation))) - {""} or ENCODERS
    if issubclass(kind, transformers.PreTrainedModel) and not {kind.__name__, package_of(kind)} & {*words, *named}:
        raise ConfigError(
            f"{path / INDEX}: its {component.name[:100]} is a {kind.__name__}, expected a network of "
            f"{' or '.join(sorted(named))}, as the pipeline's class names it; check the folder"
        )


def accepted_classes() -> dict[str, tuple[type, ...]]:
    """Return the accepted base classes of components by library: no pipelines, and no Auto classes."""
    import diffusers
    import transformers

    return {
        "diffusers": (
            diffusers.ModelMixin, diffusers.SchedulerMixin, diffusers.VaeImageProcessor, diffusers.BaseGuidance
        ),
        "transformers": (
            transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin,
            transformers.image_processing_utils.BaseImageProcessor,
            transformers.feature_extraction_utils.FeatureExtractionMixin,
        ),
    }  # fmt: skip


def open_networks(
    path: Path, components: Mapping[str, Component], rows: Collection[str] | None = None
) -> tuple[dict[str, dict], dict[str, Weights]]:
    """Return configuration, complete for a family's ``rows``, and unread weights of each network (``read_network``)."""
    configs, weights = {}, {}
    for name, component in components.items():
        if component.is_network:
            configs[name], built, weights[name] = read_network(path / name, name, component.kind, rows)
            configs[name] = configs[name] if rows is None else full_config(built)
    return configs, weights


def open_others(path: Path, described: Mapping[str, Component], most: int = LONGEST_TEXT) -> dict[str, Any]:
    """Read all components that are no networks; texts of tokenizers have at most ``most`` tokens."""
    return {name: open_other(path, each, most) for name, each in described.items() if not each.is_network}


def open_other(path: Path, component: Component, most: int = LONGEST_TEXT) -> Any:
    """Read a scheduler, tokenizer or processor from the folder, never a hub. Raises ArtifactError for damaged files."""
    folder = path / component.name
    configs = {name: read_json(folder, name) for name in files_in(folder) if name in CONFIGS}
    for each in folder.iterdir():
        if not (each.is_file() or each.is_dir()):  # reading a pipe or a device would not end
            raise ArtifactError(f"{each} is no file, expected a file of the {component.name}; {AGAIN}")
    if "SchedulerMixin" in {each.__name__ for each in component.kind.__mro__}:
        for name, config in configs.items():
            unclipped = {key: value for key, value in config.items() if "clip" not in key}  # which may be infinite
            check_numbers(folder / name, unclipped, MOST_NOISE_LEVELS)
            check_known(folder / name, component.kind, config)
    for name, config in configs.items():
        with refusing(f"{folder / name} is nested too deeply", RecursionError):
            check_classes(folder / name, config)
    if hasattr(component.kind, "vocab_files_names"):
        return read_tokenizer(folder, component.kind, most)
    return loaded(folder, component.kind, {} if component.library == "diffusers" else {"trust_remote_code": False})


def loaded(folder: Path, kind: Any, options: Mapping[str, Any]) -> Any:
    """Read a folder by its class's own ``from_pretrained``, within bounds. Raises ArtifactError for damaged files."""
    check_downloaded(folder)
    with refusing(f"{folder} holds no {kind.__name__} that can be read", advice=AGAIN), confined(MOST_SECONDS):
        check_file(folder / "tokenizer.json")
        with without_videos():
            opened = kind.from_pretrained(folder, local_files_only=True, **options)
        for each in (getattr(opened, "tokenizer", None), opened):  # of a processor
            if native := getattr(each, "backend_tokenizer", None):  # which may be made of other files
                steps = {name: getattr(native, name, None) for name in SECTIONS}
                check_steps(folder, {name: json.loads(step.__getstate__()) for name, step in steps.items() if step})
            bound_template(folder, each)
    return opened


@contextmanager
def without_videos() -> Iterator[None]:
    """Build processors in this context without their video processor, which needs torchvision and no pipeline uses.

    Qwen's processors, which read the input images of Qwen-Image-Edit, would otherwise construct a video processor too.
    """
    from transformers import ProcessorMixin
    from transformers.models.auto import video_processing_auto

    check = ProcessorMixin.check_argument_for_proper_class
    checked = lambda own, name, part: None if part is None else check(own, name, part)  # noqa: E731
    none = SimpleNamespace(from_pretrained=lambda *args, **kwargs: None)
    with (
        mock.patch.object(video_processing_auto, "AutoVideoProcessor", none),
        mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", checked),
    ):
        yield


def check_classes(file: Path, config: Any) -> None:
    """Raise ArtifactError if a configuration names an object of transformers that is no accepted class.

    transformers calls any of its own functions that a processor's configuration names. See ``accepted_classes``.
    """
    import transformers

    accepted = (*accepted_classes()["transformers"], transformers.PreTrainedConfig)
    for key, value in pairs_in(config):
        names_class = isinstance(key, str) and key.endswith(("_type", "_class")) and isinstance(value, str)
        found = getattr(transformers, value, None) if names_class and value.isidentifier() else None
        if found is not None and not (inspect.isclass(found) and issubclass(found, accepted)):
            raise ArtifactError(
                f"{file}: {key[:100]} is {value[:100]!r}, expected a tokenizer or a processor; start from the "
                "published folder"
            )


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
    tokenizer = loaded(folder, kind, {"trust_remote_code": False})
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


def pipeline_of_components(kind: type, index: Mapping[str, Any], components: Mapping[str, Any]) -> Any:
    """Build a pipeline of class ``kind`` of components and plain index entries. Raises ArtifactError if impossible."""
    plain = {name: value for name, value in index.items() if not name.startswith("_") and not names_a_class(value)}
    known = {**plain, **components, **BLACKENING}
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


# A stated family


@dataclass(frozen=True, kw_only=True)
class DiffusersCheckpoint(OpenedFiles, Folder):
    """An opened diffusers pipeline folder, as if saved without the networks that are left out."""

    tokens: int | None  # the longest text of a T5 in tokens; None: the family's default

    def parts(self) -> dict[str, Part]:
        return self.parts_of(self.configs, self.tokens)

    def build(self) -> dict[str, nn.Module]:
        own = {name: network(self.described[name].kind, config) for name, config in self.configs.items()}
        return own | controlnet_networks(self.controlnets)

    def called(self, stand_in: StandIn) -> PipelineCall:
        networks = {component: stand_in(component, each) for component, each in empty_modules(self).items()}
        others, family = self.others(), self.family
        pipe = pipeline_of_components(self.kind, self.index, {**others, **networks})
        tokenizers = [others[name] for name in tokenizers_of(self.configs)]
        shortest = min(tokenizers, key=lambda tokenizer: tokenizer.model_max_length)
        arguments = {**family.call_arguments(self.tokens), **self.arguments}
        call = PipelineCall(family, pipe, [family.DENOISER], arguments, tokenizer=shortest)
        return controlled_call(call, networks, self.controlnets)

    def others(self) -> dict[str, Any]:
        """Return scheduler and tokenizers by component. Raises ConfigError if unsupported, ArtifactError if invalid."""
        tokenizers = tokenizers_of(self.configs)
        for name in tokenizers:
            if (found := self.described.get(name)) is None:
                raise ArtifactError(f"{self.path / INDEX} names no {name}, expected one; {AGAIN}")
            if found.kind.__name__ not in TOKENIZERS:
                raise ConfigError(
                    f"{self.path / INDEX}: its {name} is {found.kind.__name__!r}, expected one of "
                    f"{', '.join(TOKENIZERS)}; use model=diffusers"
                )
        config = read_json(self.path / "scheduler", "scheduler_config.json")
        check_entries(self.path / "scheduler", config, defaults_of(self.described["scheduler"].kind))
        opened = open_others(self.path, self.described, MOST_TOKENS)
        for name in tokenizers:
            longest = opened[name].model_max_length
            if "CLIP" in type(opened[name]).__name__ and longest != CONTEXT_LENGTH:  # to which all texts are padded
                raise ConfigError(
                    f"{self.path / name}: model_max_length is {longest}, expected {CONTEXT_LENGTH}, because this "
                    "family's graphs read as many tokens; use model=diffusers"
                )
        return opened


def tokenizers_of(components: Collection[str]) -> list[str]:
    """Return the names of the tokenizers of the text encoders among the components."""
    encoders = [component for component in components if component.startswith("text_encoder")]
    return [encoder.replace("text_encoder", "tokenizer") for encoder in encoders]


def open_pipeline(
    path: Path, name: str, tokens: int | None = None, io: str = "diffusers", parts: Collection[str] | None = None
) -> DiffusersCheckpoint:
    """Open a pipeline folder of the model family ``name``; reads no weight. ``tokens`` is the longest text of a T5.

    For ``io`` and ``parts`` see ``kinds.Options``. Raises ConfigError for another family, ArtifactError for damage.
    """
    family = family_named(name)
    left_out = [] if parts is None else [component for component in family.OPTIONAL if component not in parts]
    index = read_json(path, INDEX)
    index |= {component: ABSENT for component in [*left_out, *tokenizers_of(left_out)] if component in index}
    index["_class_name"] = base_of(index.get("_class_name"), family)
    kind = pipeline_class(path, index)
    check_pipeline(path, name, family, kind.__name__)
    check_served(path / INDEX, index, (name,))
    networks = networks_of(path, name, family, index)
    found = components_of(path, kind, index | networks)
    described = {component: found[component] for component in networks}  # in the family's order, which parts keep
    described |= {component: each for component, each in found.items() if not each.is_network}
    folder = Folder(path, kind, index, described, *open_networks(path, described, (name, io)))
    with refusing(f"{path}: its configs describe no {name} that can be built", advice=AGAIN):
        family.parts(folder.configs, tokens, io)
    reopen = partial(open_pipeline, path, name, tokens, io, parts)
    checkpoint = DiffusersCheckpoint(**vars(folder), name=name, io=io, reopen=reopen, tokens=tokens)
    checkpoint.others()  # refused now, not when the first image is made
    return checkpoint


def check_pipeline(path: Path, name: str, family: Family, pipeline: str) -> None:
    """Raise ConfigError for a ``pipeline`` of another family than the one called ``name``."""
    if pipeline not in family.PIPELINES:
        families = {other: family_named(other) for other in FAMILIES}
        others = [other for other, its in families.items() if base_of(pipeline, its) in its.PIPELINES]
        advice = f"use model={' or model='.join(others)}"
        if not others:
            advice = f"what this class adds is missing in {name}: use model=diffusers"
        raise ConfigError(
            f"{path} is a {pipeline} and model.family is {name}, expected {' or '.join(family.PIPELINES)}; {advice}"
        )


def networks_of(path: Path, name: str, family: Family, index: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return library and class of the family's networks that the ``index`` names, former class names replaced.

    Raises ArtifactError for a missing network or a wrong class, ResourceError for a package that a class needs.
    """
    import diffusers

    found = {}
    for component, expected in family.NETWORKS.items():
        described = index.get(component)
        library, kind = described if isinstance(described, list) and len(described) == 2 else (None, described)
        if kind is None and component in family.OPTIONAL:
            continue
        check_packages(path / INDEX, str(kind), getattr(diffusers, str(kind), None))
        if FORMER_CLASSES.get(str(kind), kind) != expected or library not in list(WEIGHTS):
            advice = f"{name} has no graph of that class: use model=diffusers"
            if kind is None:
                advice = "save the pipeline again with all its networks"
            raise ArtifactError(
                f"{path / INDEX}: its {component} is {str(described)[:100]}, expected {expected} of "
                f"{' or '.join(WEIGHTS)}; {advice}"
            )
        found[component] = ["transformers" if component.startswith("text_encoder") else "diffusers", expected]
    return found


def base_of(pipeline: Any, family: Family) -> Any:
    """Return the family's text-to-image class for its image-to-image or inpainting class; else ``pipeline`` itself."""
    base = re.sub("(Img2Img|Inpaint)Pipeline$", "Pipeline", str(pipeline))
    return base if pipeline not in family.PIPELINES and base in family.PIPELINES else pipeline
