"""The folder of one network, as diffusers and transformers save it: config, the network that it describes, weights.

Configs are compared with what their class takes, and sizes are bounded before anything is allocated: a network is built
on the meta device, with a limit of time and memory, without sockets. A network that belongs to no family is then built
again with its tables, so that a constructor that fails on real numbers is refused at opening. No weight is read: names
and shapes in the headers of the files are compared with those of the network.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sd_quant.checkpoints.entries import check_known, check_served, config_class
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import refusing
from sd_quant.files.checks import MAX_DEPTH, bounded_modules, check_tensors, renamed
from sd_quant.files.folders import WEIGHTS, read_json, stored_weights
from sd_quant.files.schema import check_like, check_schema, numbers_in
from sd_quant.files.tensors import Readable, Weights
from sd_quant.knobs import between, one_of
from sd_quant.models.empty import shared_names, without_weights
from sd_quant.names.diffusers import plain_name
from sd_quant.process import confined
from sd_quant.text import one_line

AGAIN = "fetch the folder again"
DEPTHS = ("layer", "depth", "blocks")  # parts of the names of entries that count layers
UNUSED_TENSORS = {"embeddings.position_ids", "logit_scale"}
MOST_SECONDS = 60  # of processor time, to build what a folder describes
MOST_MEMORY = 2e9  # bytes that it takes to build a network without tensors
MOST_TABLES = 5e8  # bytes of the tables that a network computes when it is built, of several times as many
LARGEST_NUMBER = 10_000_000  # in a configuration: more than any vocabulary or context
# Packages of transformers with encoders of text, for pipelines whose signature names none, and for configurations.
ENCODERS = set(
    "bert clip gemma gemma2 gemma3 glm glm4 llama ministral3 mistral mistral3 mt5 pixtral qwen2 qwen2_5_vl qwen2_vl "
    "qwen3 qwen3_vl siglip smollm3 t5 t5gemma t5gemma2 umt5".split()
)
ELSEWHERE = ("backbone", "use_pretrained_backbone", "use_timm_backbone")  # entries that name a network on a hub


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


def read_network(
    folder: Path, component: str, kind: Any, rows: Collection[str] | None = None
) -> tuple[dict, nn.Module, Weights]:
    """Return the config in ``folder``, its network of class ``kind`` on the meta device, and its weights, unread.

    ``rows`` of ``SERVED`` are those of a family, whose graphs serve some values alone; None for any network.
    Raises ArtifactError for a damaged folder, ConfigError for a config that ``rows`` exclude.
    """
    config, file = read_json(folder, "config.json"), folder / "config.json"
    check_depths(folder, config)
    if rows is not None:
        check_entries(folder, config, usual := usual_entries(kind))
        check_served(file, usual | config, (kind.__name__.removesuffix("WithProjection"), *rows))
    check_numbers(file, config, LARGEST_NUMBER)
    if not hasattr(kind, "from_config"):
        check_reach(file, kind, config)
    check_known(file, kind, config)
    with refusing(f"{folder}: its config describes no {kind.__name__} that can be built", advice=AGAIN):
        with bounded_modules(), confined(MOST_SECONDS, MOST_MEMORY):
            built = network_of(kind, config, device="meta")
            if rows is None:
                check_tables(built)
        if rows is None:  # of classes that no family knows some compute tables only from numbers
            with confined(MOST_SECONDS):
                network_of(kind, config)
    return config, built, weights_of(folder, component, built)


def network(kind: Any, config: Mapping[str, Any]) -> nn.Module:
    """Build a network of class ``kind`` in evaluation mode, with newly initialized weights."""
    if hasattr(kind, "from_config"):
        return kind.from_config(dict(config)).eval()
    # not how it is computed, which is ours to choose: transformers would even fetch a kernel from a hub
    unused = ("dtype", "torch_dtype", "attn_implementation", "_attn_implementation")
    plain = {key: value for key, value in config.items() if key not in unused}
    made = config_class(kind.config_class, config).from_dict(plain)
    if kind.__name__.endswith("Encoder"):  # one half of a network, whose file describes both
        made = getattr(made, "encoder", made)
    made._attn_implementation = "sdpa" if getattr(kind, "_supports_sdpa", True) else "eager"
    for each in (made, getattr(made, "text_config", None)):
        if hasattr(each, "use_cache"):
            each.use_cache = False  # a cache is for texts that go on
    return kind(made).eval()


def network_of(kind: Any, config: Mapping[str, Any], prepared: Sequence[str] = (), device: str = "cpu") -> nn.Module:
    """Build a network of class ``kind`` with parameters on the meta device and buffers on ``device``.

    ``prepared`` names methods to call on a network of diffusers after construction, such as ``enable_tiling``.
    """
    with torch.device(device), without_weights():
        built = network(kind, config)
        for method in prepared:
            getattr(built, method)()
    return built


def network_class(name: str) -> Any:
    """Return the class of diffusers or transformers called ``name``, which has to be in a family's table."""
    import diffusers
    import transformers

    return getattr(diffusers, name, None) or getattr(transformers, name)


def usual_entries(kind: Any) -> dict[str, Any]:
    """Return the default config of a network's class."""
    return defaults_of(kind) if hasattr(kind, "from_config") else kind.config_class().to_dict()


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the default config of a diffusers class, from its constructor's signature."""
    parameters = inspect.signature(kind).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def full_config(built: nn.Module) -> dict:
    """Return a network's whole config: its class's defaults fill in the entries that the file lacks."""
    config = built.config
    return dict(config) if isinstance(config, Mapping) else config.to_dict()


def check_entries(folder: Path, config: Mapping, usual: Mapping = MappingProxyType({})) -> None:
    """Raise ArtifactError for a config entry that violates ``Entries`` or differs in type from its ``usual`` value."""
    with refusing(f"{folder} has a wrong config", ConfigError, advice=AGAIN):
        check_schema(Entries, config, whole=False)
        check_like(usual, config)


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


def check_numbers(file: Path, content: Mapping[str, Any], most: int) -> None:
    """Raise ArtifactError for NaN, infinity and integers above ``most``, except in entries for rotary bases (theta)."""
    with refusing(f"{file} is nested too deeply", RecursionError):
        for number in numbers_in({key: value for key, value in content.items() if "theta" not in key}):
            if (isinstance(number, int) and abs(number) > most) or not math.isfinite(number):
                raise ArtifactError(
                    f"{file} holds the number {str(number)[:40]}, expected at most {most}; fetch it again"
                )


def pairs_in(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the key, or index, and the value of each entry of nested JSON."""
    pairs = content.items() if isinstance(content, Mapping) else enumerate(content if isinstance(content, list) else ())
    for key, value in pairs:
        yield key, value
        yield from pairs_in(value)


def packages_in(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (model type, package) for each nested transformers configuration, and (entry, "") for ``ELSEWHERE``."""
    import transformers

    for key, value in pairs_in(config):
        if key == "model_type" and isinstance(value, str) and value in transformers.CONFIG_MAPPING:
            yield value, package_of(transformers.CONFIG_MAPPING[value])
        elif key in ELSEWHERE and value:
            yield f"{key} {value}", ""


def package_of(kind: type) -> str:
    """Return the package of a class in ``transformers.models``, such as "clip"; "" for a class from elsewhere."""
    return "".join(re.findall(r"^transformers\.models\.(\w+)", kind.__module__))


def check_reach(file: Path, kind: Any, config: Mapping[str, Any]) -> None:
    """Raise ArtifactError if a configuration nests one of an unexpected model type, or names a network on a hub."""
    own = {*ENCODERS, package_of(kind), *(package for _, package in packages_in(kind.config_class().to_dict()))} - {""}
    with refusing(f"{file} is nested too deeply", RecursionError):
        if named := [stated for stated, package in packages_in(config) if package not in own]:
            raise ArtifactError(
                f"{file} names {one_line(named[0], 100)!r}, expected configurations of {kind.__name__} alone, because "
                "others may lead to downloads; start from the published folder"
            )


def check_tables(network: nn.Module) -> None:
    """Raise ValueError if a network's buffers and other constructed tensors exceed ``MOST_TABLES`` bytes."""
    held = [each for module in network.modules() for each in pytree.tree_leaves(vars(module))]
    tables = [each for each in held if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)]
    if (size := sum(each.numel() * each.itemsize for each in tables)) > MOST_TABLES:
        raise ValueError(f"its tables take {size / 1e9:.1f} GB, expected at most {MOST_TABLES / 1e9:.1f}")


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


def with_small_weights(network: nn.Module, weights: Mapping[str, Tensor], most: float) -> None:
    """Load those weights of a network that have at most ``most`` numbers each, in fp32."""
    small = {name for name, each in network.state_dict().items() if each.numel() <= most and name in weights}
    network.load_state_dict({name: weights[name].float() for name in small}, assign=True, strict=False)
    network.requires_grad_(False)
