"""Low-rank adapters (LoRA), fused into a checkpoint's weights when a weight is read.

    W' = W + strength * (alpha / rank) * up @ down

(Hu et al. 2021, arXiv:2106.09685, section 4.1), in fp32 and in the order of the files, so that the result equals
diffusers' ``fuse_lora`` on fp32 weights bit for bit. Also read are LyCORIS' LoCon with a tensor between the factors,
DoRA (arXiv:2402.09353), and full differences of weights, norms and biases. Calibration and every export read the fused
weights. ``without_loras`` undoes the fusion, for layers that are quantized without their LoRA.
Alternative not taken: ``load_lora_weights`` and ``fuse_lora`` themselves. They need all weights in memory and PEFT, and
drop unknown keys with a warning.
"""

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F

from sd_quant.checkpoints.other_networks import Opened
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import refusing
from sd_quant.files.archive import open_members, whole_file
from sd_quant.files.checks import WEIGHT_DTYPES, listing, problems_in
from sd_quant.files.folders import read_json
from sd_quant.files.safetensors import read_header, without_duplicates
from sd_quant.files.schema import check_schema
from sd_quant.files.tensors import Readable, Weights
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.names.lora import BIAS, WEIGHT, Place, places_by_name
from sd_quant.text import one_line

Renamed = Callable[[Mapping[str, Readable]], Mapping[str, Readable]]
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIFFUSERS_WEIGHTS, DIFFUSERS_METADATA = "pytorch_lora_weights.safetensors", "lora_adapter_metadata"
LOG = logging.getLogger(__name__)
ROLES = {  # role of a tensor, by the end of its key
    ".lora_A.weight": "down", ".lora_B.weight": "up", ".lora_B.bias": "bias", ".alpha": "alpha",
    ".lora_down.weight": "down", ".lora_up.weight": "up", ".lora_mid.weight": "mid",
    ".lora.down.weight": "down", ".lora.up.weight": "up", "_lora.down.weight": "down", "_lora.up.weight": "up",
    ".lora_linear_layer.down.weight": "down", ".lora_linear_layer.up.weight": "up",
    ".dora_scale": "magnitude", ".lora_magnitude_vector": "of rows", ".lora_magnitude_vector.weight": "of rows",
    ".diff": "difference", ".w_norm": "difference", ".diff_b": "of bias", ".b_norm": "of bias",
}  # fmt: skip
MAGNITUDES, ALONE = {"magnitude", "of rows"}, {"difference", "of bias"}  # roles: a DoRA's; those without factors
ADAPTER = re.compile(r"(\.lora_[AB]|\.lora_magnitude_vector)\.(?!(?:weight|bias)$)[^.]+")  # PEFT's, with its name
BUNDLED = re.compile(r"bundle_emb\.(.+?)\.(?:string_to_param\.\*|[^.]+)")  # the embedding of a word (textual inversion)
OTHER_KINDS = {  # kinds of adapter that are not supported, by patterns of their keys
    "LoHa": r"\.hada_", "LoKr": r"\.lokr_", "OFT": r"\.b?oft_", "GLoRA": r"\.[ab][12]\.weight$", "VeRA": r"\.vera_",
    "(IA)^3": r"\.(on_input|ia3_)", "AdaLoRA": r"\.lora_E", "textual inversion": r"^(emb_params|clip_[lg]|t5xxl)$",
}  # fmt: skip
ARCHITECTURES = ("modelspec.architecture", "ss_base_model_version")  # entries of metadata
MADE_FOR = {  # families, and the pattern of these entries' values
    "sdxl": "xl", "sd15": "sd[-_ ]?v?1|stable-diffusion-v1", "sd21": "sd[-_ ]?v?2|stable-diffusion-v2",
    "sd3": "sd[-_ ]?3|stable-diffusion-3", "flux": "flux", "pixart": "pixart",
}  # fmt: skip
# Entries that give a scale. kohya's ss_network_alpha does not: its tools fold it into the factors and leave it there.
SCALES = re.compile(r"(?!ss_)(?:.*[._])?(lora_alpha|network_alpha|alpha_pattern|use_rslora|rs_lora)")
PATTERN = re.compile(r"(?!(?:.*[*+]){3})(?:[\w|()^$-]|\\[.d]\+?|\.\*?){1,200}")  # of PEFT's; fast to match
WITHOUT_EFFECT = {  # entries of PEFT's configs whose value does not matter
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_bias",
    "target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern",
    "megatron_config", "megatron_core", "runtime_config", "eva_config", "qalora_group_size", "ensure_weight_tying",
    "r", "rank_pattern",
}  # fmt: skip
USUAL = {"peft_type": ["LORA"], "bias": ["none"], "init_lora_weights": [True, "gaussian", "eva", "orthogonal"]}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The entries of PEFT's ``LoraConfig`` that are used here. The rank follows from the tensors."""

    lora_alpha: float | int
    alpha_pattern: dict[str, float | int]
    use_rslora: bool
    use_dora: bool


@dataclass(frozen=True)
class Update:
    """The update of one parameter from one LoRA file."""

    path: Path  # of the file, for messages
    place: Place
    tensors: Mapping[str, Readable]  # by role: low-rank factors and their companions, or a full difference
    factor: float  # strength, times alpha / rank for factors

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the updated ``weight``, fp32; a DoRA as PEFT merges it. Raises ArtifactError for NaN or infinity."""
        changed = weight + self.delta()
        for role in self.tensors.keys() & MAGNITUDES:
            magnitude = self.tensors[role].read().float()
            by_column = role == "magnitude" and magnitude.shape[:2] == (1, changed.shape[1])  # LyCORIS allows it
            others = [axis for axis in range(changed.ndim) if axis != by_column]
            norm = torch.linalg.vector_norm(changed, dim=others, keepdim=True)
            magnitude = magnitude if by_column else self.rows(magnitude.flatten())
            changed *= self.finite(magnitude.reshape(norm.shape) / norm)
        return changed

    def delta(self) -> torch.Tensor:
        """Return the additive update, fp32, as PEFT's ``get_delta_weight``. Raises ArtifactError if not finite."""
        shape = self.place.shape
        stored = {role: tensor.read().float() for role, tensor in self.tensors.items() if role not in MAGNITUDES}
        if "difference" in stored:
            return self.finite(self.rows(stored["difference"]).reshape(shape) * self.factor)
        down, up = stored["down"], self.rows(stored["up"].flatten(1))
        if "mid" in stored:
            product = torch.einsum("ijkl,oi,jn->onkl", stored["mid"], up, down.flatten(1))
        elif len(shape) == 4 and shape[2:] != (1, 1):
            product = F.conv2d(down.permute(1, 0, 2, 3), up[:, :, None, None]).permute(1, 0, 2, 3)
        else:
            product = (up @ down.flatten(1)).reshape(shape)
        return self.finite(product * self.factor)

    def rows(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.roll(-self.place.first, 0)[: self.place.shape[0]]

    def finite(self, values: torch.Tensor) -> torch.Tensor:
        if not bool(torch.isfinite(values).all()):
            what = f"what it adds to {self.place.layer!r} is not finite"
            raise ArtifactError(
                f"{self.path}: {what}, expected finite numbers; fetch it again or give it less strength"
            )
        return values

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``factor * up`` [out, rank] and ``down`` [rank, in], fp32. Raises ConfigError if not of this form."""
        if self.tensors.keys() != {"down", "up"}:
            raise ConfigError(
                f"model.loras names {self.path}, whose update of {self.place.layer!r} is a whole weight or a DoRA, "
                "expected two factors to add beside quantized weights; give a candidate of a model with the LoRA"
            )
        up, down = (self.tensors[role].read().float().flatten(1) for role in ("up", "down"))
        return self.rows(up) * self.factor, down


@dataclass(frozen=True)
class AdaptedTensor:
    """A weight, fp32, to which all its LoRA updates are applied, in the order of the files, when it is read."""

    source: Readable
    updates: Sequence[Update]
    dtype: torch.dtype = field(default=torch.float32, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)

    def read(self) -> torch.Tensor:
        """Return the updated weight, fp32. Raises ArtifactError for values that are not finite."""
        weight = self.source.read().float()
        for update in self.updates:
            weight = update.applied(weight)
        return weight


def fused(checkpoint: Opened, loras: Iterable[tuple], family: str = "this checkpoint") -> Opened:
    """Return the checkpoint with the adapters added to its weights, fp32 where changed; reads no weight.

    ``loras`` are (path, strength), the path being a file or a folder of PEFT or diffusers; ``family`` is a key of
    ``MADE_FOR``. Raises ConfigError for another kind of file or a layer that does not fit, ArtifactError for damage.
    """
    names = places_by_name({name: weights.parameters for name, weights in checkpoint.components.items()})
    return updated(checkpoint, [
        update for path, strength, *_ in loras for update in read_lora(path, strength, names, family)
    ])  # fmt: skip


def updated(checkpoint: Any, updates: Iterable[Update]) -> Any:
    """Return an opened checkpoint of any kind with these updates added to its weights; changed weights become fp32."""
    by_parameter: dict[tuple[str, str], list[Update]] = {}
    for update in updates:
        by_parameter.setdefault((update.place.component, update.place.layer + update.place.kind), []).append(update)
    components = dict(checkpoint.components)
    for (name, parameter), added in by_parameter.items():
        weights = components[name]
        changed = {**weights.parameters, parameter: AdaptedTensor(weights.parameters[parameter], added)}
        components[name] = replace(weights, parameters=changed, tensors=changed, adapted=True)
    return replace(checkpoint, components=components)


def adapted_in(checkpoint: object, component: str) -> dict[str, AdaptedTensor]:
    """Return the tensors of a network that LoRAs change: weights by layer name, biases by parameter name."""
    weights = getattr(checkpoint, "components", {}).get(component)
    parameters = weights.parameters if isinstance(weights, Weights) else {}
    return {name.removesuffix(WEIGHT): each for name, each in parameters.items() if isinstance(each, AdaptedTensor)}


def factors_of(adapted: AdaptedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``up`` [out, rank] and ``down`` [rank, in], fp32: all LoRAs of a linear, concatenated along the rank."""
    ups, downs = zip(*(update.factors() for update in adapted.updates), strict=True)
    return torch.cat(ups, dim=1), torch.cat(downs)


def without_loras(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its weights as before ``fused``; the same object if it has no LoRA."""
    if not any(adapted_in(checkpoint, component) for component in checkpoint.components):
        return checkpoint
    opened = cast(Opened, checkpoint)
    components = {}
    for component, weights in opened.components.items():
        sources = {name: each.source for name, each in weights.parameters.items() if isinstance(each, AdaptedTensor)}
        parameters = dict(weights.parameters) | sources
        components[component] = replace(weights, parameters=parameters, tensors=parameters) if sources else weights
    return replace(opened, components=components, reopen=partial(cast(Callable, opened.reopen), loras=()))


def read_lora(
    path: Path, strength: float, names: Mapping[str, list[list[Place]]], family: str, renamed: Renamed = lambda _: _
) -> list[Update]:
    """Return the updates of a LoRA file; of its tensors only the alphas are read. Raises as ``fused`` does.

    ``names`` is the result of ``places_by_name``, for tensor names after ``renamed``. If the file bundles embeddings of
    words (textual inversion), a warning lists the words, because these embeddings are not used.
    """
    stored, configs, metadata = open_lora(path)
    tensors = renamed(stored)
    roles: dict[str, dict[str, Readable]] = {}
    unknown: list[str] = []
    for key, tensor in tensors.items():
        name, end = split_key(key)
        if not end:
            unknown += [] if BUNDLED.fullmatch(key) else [key]
            continue
        entry = roles.setdefault(name, {})
        if ROLES[end] in entry:
            raise ArtifactError(f"{path} holds {key[:200]!r} twice, under two endings; expected it once")
        entry[ROLES[end]] = tensor
    incomplete = [name for name, entry in roles.items() if entry.keys() - ALONE and not {"down", "up"} <= entry.keys()]
    foreign = [name for name in roles if name not in names and name not in incomplete]
    updates, misshapen = [], []
    for name, entry in roles.items():
        if name not in names or name in incomplete:
            continue
        meaning = next((places for places in names[name] if has_shape_of(entry, places)), None)
        if meaning is None:
            found = " by ".join(str(list(entry[role].shape)) for role in sorted(entry.keys() - {"alpha"})[::-1])
            shape, biased = names[name][0][0].shape, "and a" if names[name][0][0].biased else "without"
            misshapen.append(f"{name} {found} for a weight of {list(shape)} {biased} bias")
        for place in meaning or []:
            bias, factor = replace(place, kind=BIAS, shape=place.shape[:1]), strength
            if factors := {role: each for role, each in entry.items() if role in {"down", "up", "mid"} | MAGNITUDES}:
                config = next(
                    (configs[of] for of in (name.partition(".")[0], place.component, "") if of in configs), None
                )
                factor *= scale(path, entry, place, config)
                updates.append(Update(path, place, factors, factor))
            alone = ((place, "difference", strength), (bias, "of bias", strength), (bias, "bias", factor))
            updates += [Update(path, part, {"difference": entry[role]}, times)
                        for part, role, times in alone if role in entry]  # fmt: skip
    kinds = " or ".join(kind for kind, mark in OTHER_KINDS.items() if any(re.search(mark, key) for key in unknown))
    stated = [one_line(text, 80) for text in map(metadata.get, ARCHITECTURES) if isinstance(text, str)]
    told = {each for each, mark in MADE_FOR.items() for text in stated if re.search(mark, text.lower())}
    others = stated if family in MADE_FOR and told and family not in told else []
    unscaled = not configs and any("down" in entry and "alpha" not in entry for entry in roles.values())
    scales = [f"{name}={one_line(metadata[name], 80)}" for name in metadata if unscaled and SCALES.fullmatch(name)]
    problems = {
        f"tensors are of {kinds}, which is not read" if kinds else "tensors are no part of a LoRA": unknown,
        f"of {len(roles)} layers are none of this model's": foreign,
        f"of {len(roles)} layers have another shape": misshapen,
        "layers lack a half": [] if kinds else incomplete,
        f"entries of metadata say that it is not for {family}": others,
        "entries of metadata give a scale, which diffusers would not read": scales,
    }
    if any(problems.values()) or not updates:
        found = problems_in(problems) or "it holds no update"
        about = f"; it says that it is for {stated[0]}" if stated else ""
        raise ConfigError(
            f"model.loras names {path}, which does not fit {family} ({found}{about}); "
            "expected a LoRA that was trained for it, every layer of which fits"
        )
    where = Counter((each.place.component, each.place.layer + each.place.kind) for each in updates)
    [((_, parameter), count)] = where.most_common(1)
    if count > 1:
        raise ArtifactError(f"{path} holds two updates of {parameter!r}, under two names; expected one")
    if words := bundled_words(tensors):
        LOG.warning("%s has embeddings of words too, which no prompt gets: %s", path, listing(words))
    return updates


def split_key(key: str) -> tuple[str, str]:
    """Split a tensor's key into the layer's name and an ending, a key of ``ROLES``; empty if it has no such ending."""
    plain = ADAPTER.sub(r"\1", key)
    end = next((end for end in sorted(ROLES, key=len, reverse=True) if plain.endswith(end)), "")
    return plain.removesuffix(end), end


def bundled_words(tensors: Iterable[str]) -> list[str]:
    """Return the words whose embeddings (textual inversion) are among the tensors."""
    return list(dict.fromkeys(found[1] for key in tensors if (found := BUNDLED.fullmatch(key))))


def open_lora(path: Path) -> tuple[Mapping[str, Readable], dict[str, PeftConfig], dict[str, str]]:
    """Return a file's or folder's tensors, PEFT configs by component ("" for all of them), and metadata.

    Raises ConfigError for a file of another kind, ArtifactError for a damaged one.
    """
    if path.is_dir():
        members = open_members(path)
        held = next((name for name in (PEFT_WEIGHTS, DIFFUSERS_WEIGHTS) if name in members), None)
        if held is None:
            raise ConfigError(
                f"model.loras names {path}, a folder without {PEFT_WEIGHTS} or {DIFFUSERS_WEIGHTS}; name a file"
            )
        member = members[held]
    elif path.suffix.lower() != ".safetensors":
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
    return tensors, configs, metadata


def stored_configs(path: Path, text: object) -> dict[str, PeftConfig]:
    """Return the PEFT configs in a file's metadata, JSON of diffusers with keys like ``unet.lora_alpha``."""
    grouped: dict[str, dict] = {}
    what = f"{path}: its {DIFFUSERS_METADATA} is no object of JSON"
    with refusing(what, ValueError, AttributeError, RecursionError):
        stored = json.loads(str(text), object_pairs_hook=without_duplicates)
        for key, value in stored.items():
            component, _, entry = key.rpartition(".")
            grouped.setdefault(component, {})[entry] = value
    return {component: peft_config(path, entries) for component, entries in grouped.items()}


def peft_config(path: Path, entries: Mapping) -> PeftConfig:
    """Return PEFT's config from its JSON. Raises ArtifactError for a wrong type, ConfigError for unsupported values."""
    given = {"alpha_pattern": {}, "use_rslora": False, "use_dora": False} | {
        name: value for name, value in entries.items() if value is not None
    }
    with refusing(f"{path} holds no config of a LoRA", ConfigError):
        check_schema(PeftConfig, given)
    config = PeftConfig(*(given[name] for name in PeftConfig.__slots__))
    known = WITHOUT_EFFECT.union(PeftConfig.__slots__)
    unread = [f"{name}={value!r}" for name, value in entries.items()
              if value and name not in known and value not in USUAL.get(name, [])]  # fmt: skip
    unread += [key for key in config.alpha_pattern if not PATTERN.fullmatch(key)]
    if unread:
        raise ConfigError(
            f"model.loras names {path}, whose config has {one_line(', '.join(unread), 200)}, which is more than a LoRA "
            "and not computed here, expected a plain one; merge it into a checkpoint with PEFT, and give that"
        )
    return config


def scale(path: Path, entry: Mapping[str, Readable], place: Place, config: PeftConfig | None) -> float:
    """Return an update's scale ``alpha / rank``, for rsLoRA ``alpha / sqrt(rank)``; 1 without alpha (as diffusers)."""
    rank = entry["down"].shape[0]
    if "alpha" in entry:
        return float(entry["alpha"].read().float()) / rank
    if config is None:
        return 1.0
    if config.use_dora and not entry.keys() & MAGNITUDES:
        raise ArtifactError(f"{path} has use_dora in its config and no magnitudes of {place.layer!r}; fetch it again")
    with refusing(f"{path} has a pattern in its config that is none", re.error, RecursionError):
        found = (value for key, value in config.alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", place.layer))
        alpha = next(found, config.lora_alpha)
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def has_shape_of(entry: Mapping[str, Readable], places: Sequence[Place]) -> bool:
    """Return whether an update's tensors, by role, fit the parameters at ``places``, joined along the first axis."""
    shapes = {role: bare(tuple(tensor.shape)) for role, tensor in entry.items() if role != "alpha"}
    rows, columns = sum(place.shape[0] for place in places), places[0].shape[1:]
    (rank, *_), (inner, *_) = (shapes.get(role) or (1,) for role in ("down", "mid" if "mid" in shapes else "down"))
    row, column = [(rows,), (rows, 1), (1, rows)], [(1, *columns[:1])] if len(places) == 1 else []
    fitting = {
        "down": [bare((rank, *columns[: 1 if "mid" in shapes else None]))] if columns else [], "up": [(rows, inner)],
        "mid": [(inner, rank, *columns[1:])] if columns[1:] else [], "difference": [bare((rows, *columns))],
        "magnitude": row[1:2] + column, "of rows": row,
    } | dict.fromkeys(("bias", "of bias"), row[:1] if all(place.biased for place in places) else [])  # fmt: skip
    alike = all(place.shape[1:] == columns for place in places)
    return alike and all(shape in fitting[role] and 0 not in shape for role, shape in shapes.items())


def bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a weight's shape without the axes of a 1x1 kernel, which some trainers store and others omit."""
    return shape[:2] if set(shape[2:]) <= {1} else shape
