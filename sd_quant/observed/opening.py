"""Safe opening of the folder of any diffusers pipeline: no code that the folder names is imported or executed.

A component's class is looked up by name in the public namespaces of diffusers and transformers and must be a network,
scheduler, tokenizer or processor of these libraries. A network of transformers must be of a model type that the
pipeline's signature names, and so must each configuration nested in the network's configuration.
Sizes are bounded before anything is allocated: networks are built without weights, first on the meta device, and their
constructors run with a limit of time and memory, without sockets. Alternative not taken: diffusers' own
``from_pretrained``, which imports what the folder names and reads all weights.
"""

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sd_quant.checkpoints.diffusers_pipeline import (
    AGAIN,
    MOST_SECONDS,
    bound_template,
    check_depths,
    check_packages,
    is_pipeline,
    pipeline_of_components,
    read_tokenizer,
    weights_of,
)
from sd_quant.checkpoints.entries import check_known, config_class
from sd_quant.checkpoints.unopened import INDEX, check_kind
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import check_downloaded, refusing
from sd_quant.files.checks import bounded_modules
from sd_quant.files.folders import files_in, read_json
from sd_quant.files.schema import numbers_in
from sd_quant.files.tensors import Weights
from sd_quant.files.tokenizer_steps import check_file
from sd_quant.models import OBSERVED
from sd_quant.models.empty import without_weights
from sd_quant.observed.calls import children
from sd_quant.process import confined
from sd_quant.text import one_line

LARGEST_NUMBER = 10_000_000  # in a configuration: more than any vocabulary or context
MOST_NOISE_LEVELS = 100_000  # of a scheduler, which computes tables of them
LONGEST_TEXT = 2_000_000  # tokens, to all of which a tokenizer may pad
MOST_MEMORY = 2e9  # bytes that it takes to build a network without tensors
MOST_TABLES = 5e8  # bytes of the tables that a network computes when it is built, of several times as many
# Packages of transformers with encoders of text, for pipelines whose signature names none, and for configurations.
ENCODERS = set(
    "bert clip gemma gemma2 gemma3 glm glm4 llama ministral3 mistral mistral3 mt5 pixtral qwen2 qwen2_5_vl qwen2_vl "
    "qwen3 qwen3_vl siglip smollm3 t5 t5gemma t5gemma2 umt5".split()
)
ELSEWHERE = ("backbone", "use_pretrained_backbone", "use_timm_backbone")  # entries that name a network on a hub
NOT_WANTED = ("safety_checker", "watermark")  # parts that a pipeline may lack
OF_IMAGES = ("feature_extractor", "image_encoder")  # likewise, where no image is given
OTHER_MEDIA = {"audio": ("audio", "music", "sound", "speech"), "3D": ("shape", "mesh", "3d")}
CONFIGS = (
    "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Component:
    """A component of a pipeline, as its index names it."""

    name: str
    library: str  # "diffusers" or "transformers"
    kind: type

    @property
    def is_network(self) -> bool:
        return issubclass(self.kind, nn.Module)


def read_index(path: Path) -> tuple[type, dict[str, Any]]:
    """Return the pipeline's class and the content of model_index.json.

    Raises ConfigError for remote code, a class that the installed diffusers lacks and media that are not images,
    ArtifactError for a damaged index, ResourceError for a package that the class needs.
    """
    import diffusers
    import transformers.processing_utils  # noqa: F401  puts another module in transformers' place, once

    index = read_json(path, INDEX)
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise ConfigError(
            f"{path / INDEX} names the pipeline {str(name)[:100]!r}, which is code of the folder's own; expected a "
            "class of diffusers, because code of a folder is never executed"
        )
    for medium, words in OTHER_MEDIA.items():
        if any(word in name.lower() for word in words):
            raise ConfigError(f"{path} is a {name[:100]}, which makes {medium}, expected a pipeline of images or video")
    check_numbers(path / INDEX, index, LARGEST_NUMBER)
    kind = getattr(diffusers, name, None) if name.isidentifier() else None
    check_packages(path / INDEX, name, kind)
    if not is_pipeline(kind):
        raise ConfigError(
            f"{path} is a {name[:100]!r}, which diffusers {diffusers.__version__} does not have; expected one of its "
            f"pipelines (the folder was saved by diffusers {str(index.get('_diffusers_version'))[:20]}), so install a "
            "version that has it"
        )
    check_known(path / INDEX, kind, index)
    return kind, index


def components_of(path: Path, kind: type, index: Mapping[str, Any], images: bool = False) -> dict[str, Component]:
    """Return the pipeline's components by name, without optional safety checkers and watermarks.

    Optional encoders of images are left out, too, unless the pipeline is given ``images``.
    Raises ConfigError for a class other than the networks, schedulers, tokenizers and processors of diffusers and
    transformers; ArtifactError where the index has no network at all or no scheduler.
    """
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
    home = "diffusers" if own else library
    found = getattr(space, name, None) if space is not None and name.isidentifier() else None
    check_packages(path / INDEX, name, found)
    if found is None or not inspect.isclass(found):
        version = f" {spaces[library].__version__}" if library in spaces else ""
        raise ConfigError(
            f"{path / INDEX}: its {component[:100]} is {name[:100]!r} of {library[:100]!r}, expected a class of "
            f"diffusers or transformers, and the installed {library[:100]}{version} has none of this name; install a "
            "version that has it, because code of a folder is never executed"
        )
    home = "transformers" if issubclass(found, accepted["transformers"]) else home
    if not issubclass(found, accepted.get(home, ())):
        raise ConfigError(
            f"{path / INDEX}: its {component[:100]} is a {name[:100]}, expected a network, a scheduler, a tokenizer or "
            "a processor; check the folder"
        )
    return home, found


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


def package_of(kind: type) -> str:
    """Return the package of a class in ``transformers.models``, such as "clip"; "" for a class from elsewhere."""
    return "".join(re.findall(r"^transformers\.models\.(\w+)", kind.__module__))


def packages_in(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (model type, package) for each nested transformers configuration, and (entry, "") for ``ELSEWHERE``."""
    import transformers

    for key, value in children(config) or ():
        if key == "model_type" and isinstance(value, str) and value in transformers.CONFIG_MAPPING:
            yield value, package_of(transformers.CONFIG_MAPPING[value])
        elif key in ELSEWHERE and value:
            yield f"{key} {value}", ""
        yield from packages_in(value)


def check_reach(file: Path, kind: Any, config: Mapping[str, Any]) -> None:
    """Raise ArtifactError if a configuration nests one of an unexpected model type, or names a network on a hub."""
    own = {*ENCODERS, package_of(kind), *(package for _, package in packages_in(kind.config_class().to_dict()))} - {""}
    with refusing(f"{file} is nested too deeply", RecursionError):
        if named := [stated for stated, package in packages_in(config) if package not in own]:
            raise ArtifactError(
                f"{file} names {one_line(named[0], 100)!r}, expected configurations of {kind.__name__} alone, because "
                "others may lead to downloads; start from the published folder"
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


def check_numbers(file: Path, content: Mapping[str, Any], most: int) -> None:
    """Raise ArtifactError for NaN, infinity and integers above ``most``, except in entries for rotary bases (theta)."""
    with refusing(f"{file} is nested too deeply", RecursionError):
        for number in numbers_in({key: value for key, value in content.items() if "theta" not in key}):
            if (isinstance(number, int) and abs(number) > most) or not math.isfinite(number):
                raise ArtifactError(
                    f"{file} holds the number {str(number)[:40]}, expected at most {most}; fetch it again"
                )


def network_of(kind: type, config: Mapping[str, Any], prepared: Sequence[str] = (), device: str = "cpu") -> nn.Module:
    """Build a network of class ``kind`` with parameters on the meta device and buffers on ``device``.

    ``prepared`` names methods to call on a network of diffusers after construction, such as ``enable_tiling``.
    """
    with torch.device(device), without_weights():
        if hasattr(kind, "from_config"):
            network = kind.from_config(dict(config)).eval()
            for method in prepared:
                getattr(network, method)()
            return network
        unused = ("dtype", "torch_dtype", "attn_implementation", "_attn_implementation")
        plain = {key: value for key, value in config.items() if key not in unused}
        made = config_class(kind.config_class, config).from_dict(plain)  # type: ignore[attr-defined]
        if kind.__name__.endswith("Encoder"):  # one half of a network, whose file describes both
            made = getattr(made, "encoder", made)
        made._attn_implementation = "sdpa" if getattr(kind, "_supports_sdpa", True) else "eager"
        for each in (made, getattr(made, "text_config", None)):
            if hasattr(each, "use_cache"):
                each.use_cache = False  # a cache is for texts that go on
        return kind(made).eval()


def with_small_weights(network: nn.Module, weights: Mapping[str, Tensor], most: float) -> None:
    """Load those weights of a network that have at most ``most`` numbers each, in fp32."""
    small = {name for name, each in network.state_dict().items() if each.numel() <= most and name in weights}
    network.load_state_dict({name: weights[name].float() for name in small}, assign=True, strict=False)
    network.requires_grad_(False)


def check_tables(network: nn.Module) -> None:
    """Raise ValueError if a network's buffers and other constructed tensors exceed ``MOST_TABLES`` bytes."""
    held = [each for module in network.modules() for each in pytree.tree_leaves(vars(module))]
    tables = [each for each in held if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)]
    if (size := sum(each.numel() * each.itemsize for each in tables)) > MOST_TABLES:
        raise ValueError(f"its tables take {size / 1e9:.1f} GB, expected at most {MOST_TABLES / 1e9:.1f}")


def open_networks(path: Path, components: Mapping[str, Component]) -> tuple[dict[str, dict], dict[str, Weights]]:
    """Return configuration and lazily read weights of each network. Raises ArtifactError for a damaged folder."""
    configs, weights = {}, {}
    for name, component in components.items():
        if not component.is_network:
            continue
        folder = path / name
        config = read_json(folder, "config.json")
        check_depths(folder, config)
        check_numbers(folder / "config.json", config, LARGEST_NUMBER)
        if component.library == "transformers":
            check_reach(folder / "config.json", component.kind, config)
        check_known(folder / "config.json", component.kind, config)
        with refusing(f"{folder}: its config describes no {component.kind.__name__} that can be built", advice=AGAIN):
            with bounded_modules(), confined(MOST_SECONDS, MOST_MEMORY):
                check_tables(network_of(component.kind, config, device="meta"))
            with confined(MOST_SECONDS):
                built = network_of(component.kind, config)
        configs[name] = config
        weights[name] = weights_of(folder, name, built)
    return configs, weights


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
        others = {name: open_other(self.path, each) for name, each in self.described.items() if not each.is_network}
        return pipeline_of_components(self.kind, self.index, {**others, **networks})


def open_folder(path: Path, images: bool = False) -> Folder:
    """Open the folder of a pipeline, to be called with ``images`` or not. Raises SdQuantError if it cannot be used."""
    check_kind(path, OBSERVED)
    kind, index = read_index(path)
    described = components_of(path, kind, index, images)
    return Folder(path, kind, index, described, *open_networks(path, described))


def open_other(path: Path, component: Component) -> Any:
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
        return read_tokenizer(folder, component.kind, LONGEST_TEXT)
    check_downloaded(folder)
    with refusing(f"{folder} holds no {component.kind.__name__} that can be read", advice=AGAIN):
        known: dict[str, Any] = {} if component.library == "diffusers" else {"trust_remote_code": False}
        check_file(folder / "tokenizer.json")
        with confined(MOST_SECONDS), without_videos():
            opened = component.kind.from_pretrained(folder, local_files_only=True, **known)  # type: ignore[attr-defined]
        for each in (getattr(opened, "tokenizer", None), opened):  # of a processor
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

    for key, value in children(config) or ():
        names_class = isinstance(key, str) and key.endswith(("_type", "_class")) and isinstance(value, str)
        found = getattr(transformers, value, None) if names_class and value.isidentifier() else None
        accepted = (*accepted_classes()["transformers"], transformers.PreTrainedConfig)
        if found is not None and not (inspect.isclass(found) and issubclass(found, accepted)):
            raise ArtifactError(
                f"{file}: {key[:100]} is {value[:100]!r}, expected a tokenizer or a processor; start from the "
                "published folder"
            )
        check_classes(file, value)
