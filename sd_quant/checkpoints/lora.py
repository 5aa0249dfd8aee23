"""Low-rank adapters (LoRA), fused into a checkpoint's weights when a weight is read.

    W' = W + strength * (alpha / rank) * up @ down

(Hu et al. 2021, arXiv:2106.09685, section 4.1), in fp32 and in the order of the files, so that the result equals
diffusers' ``fuse_lora`` on fp32 weights bit for bit. Calibration and every export read the fused weights.
What was fused can be told apart again, for layers that are quantized without it: ``without_loras``, ``factors_of``.
The road not taken is ``load_lora_weights`` and ``fuse_lora`` themselves: they need all weights in memory and PEFT, and
drop unknown keys with a warning.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F

from sd_quant.checkpoints.diffusers_pipeline import DiffusersCheckpoint
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import refusing
from sd_quant.files.archive import open_members, whole_file
from sd_quant.files.checks import WEIGHT_DTYPES, problems_in
from sd_quant.files.folders import read_json
from sd_quant.files.safetensors import read_header, without_duplicates
from sd_quant.files.schema import check_schema
from sd_quant.files.tensors import Readable, Weights
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.names.lora import WEIGHT, Place, places_by_name
from sd_quant.text import one_line

Opened = DiffusersCheckpoint | NemoCheckpoint
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIFFUSERS_WEIGHTS, DIFFUSERS_METADATA = "pytorch_lora_weights.safetensors", "lora_adapter_metadata"
FACTORS = {  # role of a tensor by the end of its key
    ".lora_A.weight": "down", ".lora_B.weight": "up", ".lora_A.default.weight": "down", ".lora_B.default.weight": "up",
    ".lora_down.weight": "down", ".lora_up.weight": "up", ".lora.down.weight": "down", ".lora.up.weight": "up",
    ".lora_linear_layer.down.weight": "down", ".lora_linear_layer.up.weight": "up",
    "_lora.down.weight": "down", "_lora.up.weight": "up", ".alpha": "alpha",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The entries of PEFT's ``LoraConfig`` that matter here. The rank follows from the tensors."""

    lora_alpha: float | int
    alpha_pattern: dict[str, float | int]
    use_rslora: bool
    use_dora: bool


@dataclass(frozen=True)
class Update:
    """The update of one layer's weight from one file."""

    path: Path  # of the file, for messages
    place: Place
    down: Readable  # [rank, in] or [rank, in, kh, kw]
    up: Readable  # [rows, rank] or [rows, rank, 1, 1]; the layer's rows begin at ``place.first``
    factor: float  # strength * alpha / rank

    def delta(self) -> torch.Tensor:
        """Returns the addend, fp32, of the weight's shape, like PEFT's ``get_delta_weight``.

        Raises ArtifactError for values that are not finite.
        """
        shape, first = self.place.shape, self.place.first
        down, up = self.down.read().float(), self.up.read().float()[first : first + shape[0]]
        if len(shape) == 4 and shape[2:] != (1, 1):
            up = up.flatten(1)[:, :, None, None]  # the file has it with or without the ones
            delta = F.conv2d(down.permute(1, 0, 2, 3), up).permute(1, 0, 2, 3) * self.factor
        else:
            delta = (up.flatten(1) @ down.flatten(1)).reshape(shape) * self.factor
        if not bool(torch.isfinite(delta).all()):
            raise ArtifactError(
                f"{self.path}: what it adds to {self.place.layer!r} is not finite; expected finite numbers, so fetch "
                "the file again or give it less strength"
            )
        return delta

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``up`` [out, rank], times the factor, and ``down`` [rank, in] of a linear's update, both fp32."""
        rows = slice(self.place.first, self.place.first + self.place.shape[0])
        return self.up.read().float().flatten(1)[rows] * self.factor, self.down.read().float().flatten(1)


@dataclass(frozen=True)
class AdaptedTensor:
    """A ``Readable`` of a weight with all its updates, in the order of the files; fp32."""

    source: Readable
    updates: Sequence[Update]
    dtype: torch.dtype = field(default=torch.float32, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)

    def read(self) -> torch.Tensor:
        """Raises ArtifactError for values that are not finite."""
        weight = self.source.read().float().clone()
        for update in self.updates:
            weight += update.delta()
        return weight


def fused(checkpoint: Opened, loras: Sequence[tuple[Path, float]]) -> Opened:
    """Returns the checkpoint with the adapters in its weights; a changed weight is fp32. Reads no weight.

    ``loras`` are files, or folders of PEFT or diffusers, with strengths.
    Raises ConfigError for a file of another kind and one of which any layer does not fit the networks, ArtifactError
    for a damaged one.
    """
    names = places_by_name({name: weights.parameters for name, weights in checkpoint.components.items()})
    updates: dict[tuple[str, str], list[Update]] = {}
    for path, strength in loras:
        for update in read_lora(path, strength, names, checkpoint.family.PIPELINES[0].removesuffix("Pipeline")):
            updates.setdefault((update.place.component, update.place.layer + WEIGHT), []).append(update)
    components = {name: changed(weights, updates) for name, weights in checkpoint.components.items()}
    return replace(checkpoint, components=components)


def changed(weights: Weights, updates: Mapping[tuple[str, str], list[Update]]) -> Weights:
    """Returns the weights of a network with the updates, or the same object if there are none for it."""
    here = {name: added for (component, name), added in updates.items() if component == weights.component}
    if not here:
        return weights
    parameters = dict(weights.parameters) | {
        name: AdaptedTensor(weights.parameters[name], added) for name, added in here.items()
    }
    return replace(weights, parameters=parameters, tensors=parameters, adapted=True)


def adapted_in(checkpoint: object, component: str) -> dict[str, AdaptedTensor]:
    """Returns the weights of a network that LoRAs change, by the layers' names; of an observed pipeline none."""
    weights = getattr(checkpoint, "components", {}).get(component)
    parameters = weights.parameters if isinstance(weights, Weights) else {}
    return {name.removesuffix(WEIGHT): each for name, each in parameters.items() if isinstance(each, AdaptedTensor)}


def factors_of(adapted: AdaptedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``up`` [out, rank] and ``down`` [rank, in] of all updates of a linear, fp32: its LoRAs as one."""
    ups, downs = zip(*(update.factors() for update in adapted.updates), strict=True)
    return torch.cat(ups, dim=1), torch.cat(downs)


def without_loras(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint as it was before ``fused``; the same object where nothing was."""
    adapted = {component: adapted_in(checkpoint, component) for component in checkpoint.components}
    if not any(adapted.values()):
        return checkpoint
    opened = cast(Opened, checkpoint)
    components = {}
    for component, weights in opened.components.items():
        sources = {f"{name}{WEIGHT}": each.source for name, each in adapted[component].items()}
        parameters = dict(weights.parameters) | sources
        components[component] = replace(weights, parameters=parameters, tensors=parameters) if sources else weights
    return replace(opened, components=components, reopen=partial(cast(Callable, opened.reopen), loras=()))


def read_lora(path: Path, strength: float, names: Mapping[str, list[list[Place]]], model: str) -> list[Update]:
    """Returns the updates of a file, of whose tensors only the alphas are read.

    ``names`` are those of ``places_by_name``, ``model`` is for messages. Raises as ``fused`` does.
    """
    tensors, configs, about = open_lora(path)
    roles: dict[str, dict[str, Readable]] = {}
    unknown: list[str] = []
    for key, tensor in tensors.items():
        end = next((end for end in sorted(FACTORS, key=len, reverse=True) if key.endswith(end)), None)
        if end is None:
            unknown.append(key)
            continue
        entry = roles.setdefault(key.removesuffix(end), {})
        if FACTORS[end] in entry:
            raise ArtifactError(f"{path} holds {key[:200]!r} twice, under two endings; expected it once")
        entry[FACTORS[end]] = tensor
    incomplete = [name for name, entry in roles.items() if not {"down", "up"} <= entry.keys()]
    foreign = [name for name in roles if name not in names and name not in incomplete]
    updates, misshapen = [], []
    for name, entry in roles.items():
        if name in names and name not in incomplete:
            meaning = next((places for places in names[name] if has_shape_of(entry, places)), None)
            if meaning is None:
                misshapen.append(f"{name} {sizes(entry)} for a weight of {list(names[name][0][0].shape)}")
                continue
            for place in meaning:
                factor = strength * scale(path, entry, place, configs)
                updates.append(Update(path, place, entry["down"], entry["up"], factor))
    problems = {
        f"of {len(roles)} layers are none of this model's": foreign,
        f"of {len(roles)} layers have another shape": misshapen,
        "layers lack a half": incomplete,
        "tensors are no part of a LoRA (of a DoRA, LoHa or LoKr, say)": unknown,
    }
    if any(problems.values()) or not updates:
        found = problems_in(problems) or "it holds no update"
        raise ConfigError(
            f"model.loras names {path}, which does not fit this {model} ({found}{about}); "
            "expected a LoRA that was trained for it, every layer of which fits"
        )
    [((_, layer), count)] = Counter((each.place.component, each.place.layer) for each in updates).most_common(1)
    if count > 1:
        raise ArtifactError(f"{path} holds two updates of {layer!r}, under two names; expected one")
    return updates


def open_lora(path: Path) -> tuple[Mapping[str, Readable], dict[str, PeftConfig], str]:
    """Returns the tensors of a file or folder, PEFT's configs by component, and a clause on the model it names.

    The key of a config is empty where it holds for all components. Raises ConfigError for a file of another kind,
    ArtifactError for a damaged one.
    """
    if path.is_dir():
        members = open_members(path)
        held = next((name for name in (PEFT_WEIGHTS, DIFFUSERS_WEIGHTS) if name in members), None)
        if held is None:
            raise ConfigError(
                f"model.loras names {path}, a folder without {PEFT_WEIGHTS} or {DIFFUSERS_WEIGHTS}, expected one of "
                "these; name the file itself"
            )
        member = members[held]
    elif path.suffix != ".safetensors":
        raise ConfigError(
            f"model.loras names {path}, expected a .safetensors file, because other files would have to be unpickled; "
            "save it again as one"
        )
    else:
        member = whole_file(path)
    tensors, metadata = read_header(member)
    for key, tensor in tensors.items():
        if tensor.dtype not in WEIGHT_DTYPES or (key.endswith(".alpha") and math.prod(tensor.shape) != 1):
            raise ArtifactError(
                f"{path}: {key[:200]!r} is {list(tensor.shape)} in {tensor.dtype}, expected numbers in float32, "
                "float16 or bfloat16, and one for an alpha; fetch it again"
            )
    configs = {}
    if path.is_dir() and PEFT_CONFIG in open_members(path):
        configs[""] = peft_config(path / PEFT_CONFIG, read_json(path, PEFT_CONFIG))
    elif DIFFUSERS_METADATA in metadata:
        configs = stored_configs(path, metadata[DIFFUSERS_METADATA])
    made_for = metadata.get("modelspec.architecture") or metadata.get("ss_base_model_version")
    about = f"; it says that it is for {one_line(made_for, 80)}" if isinstance(made_for, str) else ""
    return tensors, configs, about


def stored_configs(path: Path, text: object) -> dict[str, PeftConfig]:
    """Returns the configs in a file's metadata, which diffusers writes as JSON with keys like ``unet.lora_alpha``."""
    grouped: dict[str, dict] = {}
    what = f"{path}: its {DIFFUSERS_METADATA} is no object of JSON"
    with refusing(what, ValueError, AttributeError, RecursionError):
        stored = json.loads(str(text), object_pairs_hook=without_duplicates)
        for key, value in stored.items():
            component, _, entry = key.rpartition(".")
            grouped.setdefault(component, {})[entry] = value
    return {component: peft_config(path, entries) for component, entries in grouped.items()}


def peft_config(path: Path, entries: Mapping) -> PeftConfig:
    """Returns the config. Raises ArtifactError for an entry of a wrong type, ConfigError for more than a LoRA."""
    given = {"alpha_pattern": {}, "use_rslora": False, "use_dora": False} | {
        name: value for name, value in entries.items() if value is not None
    }
    with refusing(f"{path} holds no config of a LoRA", ConfigError):
        check_schema(PeftConfig, given)
    config = PeftConfig(*(given[name] for name in PeftConfig.__slots__))
    if config.use_dora or entries.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"model.loras names {path}, which is more than a LoRA (DoRA, say), expected a plain one")
    return config


def scale(path: Path, entry: Mapping[str, Readable], place: Place, configs: Mapping[str, PeftConfig]) -> float:
    """Returns ``alpha / rank`` of the file, or 1 where it states no alpha, as diffusers and kohya do."""
    rank = entry["down"].shape[0]
    if "alpha" in entry:
        alpha = float(entry["alpha"].read().float())
        return alpha / rank
    config = configs.get(place.component) or configs.get("")
    if config is None:
        return 1.0
    alpha = next(
        (value for name, value in config.alpha_pattern.items() if f".{place.layer}".endswith(f".{name.lstrip('^')}")),
        config.lora_alpha,
    )
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def has_shape_of(entry: Mapping[str, Readable], places: Sequence[Place]) -> bool:
    """Returns whether the product of the two factors has the shape of the layers' weights, stacked by rows."""
    down, up, shape = tuple(entry["down"].shape), tuple(entry["up"].shape), places[0].shape
    if min(len(down), len(up)) < 2 or any(place.shape[1:] != shape[1:] for place in places) or 0 in down:
        return False
    rows, kernel = sum(place.shape[0] for place in places), without_ones(shape[2:])
    return (
        up[:2] == (rows, down[0])
        and without_ones(up[2:]) == ()
        and down[1] == shape[1]
        and (without_ones(down[2:]) == kernel)
    )


def without_ones(kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Returns () for a kernel of one pixel: trainers store linears and 1x1 convolutions with and without it."""
    return () if set(kernel) <= {1} else kernel


def sizes(entry: Mapping[str, Readable]) -> str:
    return f"{list(entry['up'].shape)} by {list(entry['down'].shape)}"
