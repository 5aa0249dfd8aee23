"""NeMo's SDXL checkpoints: open one safely, build its networks, write one.

Opening reads the config and the directory of the weights, and compares every key and shape with the networks that the
config describes; it reads no weights. From then on a component is a mapping from diffusers' parameter names to tensors
that are read when asked for, so that 14 GB of weights never have to be in memory at once.
The road not taken is NeMo's SaveRestoreConnector: it extracts the archive, unpickles and instantiates ``target``.
"""

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tarfile import BLOCKSIZE, GNU_FORMAT, TarInfo
from typing import BinaryIO, Protocol

import torch
import yaml

from sd_quant.checkpoints import sdxl_keys
from sd_quant.checkpoints.archive import Member, OpenFile, open_members
from sd_quant.checkpoints.bounds import MAX_DEPTH, bounded_modules
from sd_quant.checkpoints.torch_weights import LazyTensor, Readable, lazy, stored_tensors, write_tensors
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import atomic_path
from sd_quant.models import Family, family_named
from sd_quant.models.parts import Part, PipelineAdapter
from sd_quant.models.sdxl_nemo import (
    CONTEXT_TOKENS,
    TextShape,
    build_modules,
    pipeline_adapter,
    scheduler,
    tokenizers,
    unet_config,
    vae_config,
)

CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"
MAX_CONFIG = 2**20
LONGEST_LISTING = 1100  # letters
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Source(Protocol):
    """Weights of one network in a file: ``tensors`` by the file's own names."""

    @property
    def path(self) -> Path: ...

    @property
    def component(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, Readable]: ...


@dataclass(frozen=True, eq=False)
class WeightSource(Mapping[str, torch.Tensor]):
    """Weights of one component by diffusers name; ``source[name]`` reads that tensor, in the dtype it is stored in.

    ``tensors`` are the same weights by NeMo's keys.
    """

    path: Path
    component: str
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    places: dict[str, sdxl_keys.Stored] = field(repr=False)
    tensors: dict[str, Readable] = field(repr=False)

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self.places[name]
        return place.parameter(self.tensors[place.key].read())

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[self.places[name].key].dtype

    def lazy(self, name: str) -> LazyTensor:
        """``self[name]``, not read yet."""
        return LazyTensor(self.shape(name), self.dtype(name), lambda: self[name])


@dataclass(frozen=True)
class Checkpoint:
    """``components`` are 'unet', 'vae', 'text_encoder' and 'text_encoder_2', complete and of the right shapes.

    ``unused`` are the tensors of ``sdxl_keys.UNUSED`` that the file holds, ``io`` whose names the UNet's inputs have.
    """

    path: Path
    model_config: dict
    components: dict[str, WeightSource]
    clip1: TextShape
    clip2: TextShape
    unused: dict[str, Readable]
    io: str = "nemo"
    reopen: "Callable[[], Checkpoint] | None" = None  # in another process; None for what no run works on

    @property
    def family(self) -> Family:
        return family_named("sdxl")

    def parts(self) -> dict[str, Part]:
        unet, vae = unet_config(self.model_config), vae_config(self.model_config)
        return self.family.parts({"unet": unet, "vae": vae}, CONTEXT_TOKENS, self.io)

    def build(self) -> dict[str, torch.nn.Module]:
        return build_modules(self.model_config, self.clip1, self.clip2)

    def adapter(self, networks: Mapping) -> PipelineAdapter:
        return pipeline_adapter(networks, tokenizers(self.clip1, self.clip2), scheduler())

    def reopened(self) -> "Checkpoint":
        assert self.reopen is not None
        return replace(self.reopen(), io=self.io)

    def state(self) -> dict[str, Readable]:
        """Every tensor by NeMo's key: what ``write_archive`` takes."""
        return {key: each for source in self.components.values() for key, each in source.tensors.items()} | self.unused


def open_nemo(path: Path) -> Checkpoint:
    """A NeMo SDXL archive (plain or gzipped) or the directory it was extracted to, checked but not loaded.

    Raises ConfigError when ``path`` does not exist, ArtifactError when it is not a whole and harmless SDXL checkpoint.
    """
    members = open_members(path)
    for name in (CONFIG, WEIGHTS):
        if name not in members:
            raise ArtifactError(
                f"{path} holds no {name} but {_listing(sorted(members)) or 'nothing'}; expected a whole single-GPU "
                "checkpoint, so fetch it again or merge its model-parallel parts"
            )
    state = renamed(path, stored_tensors(members[WEIGHTS]), _plain_key)
    return replace(checkpoint_of(path, read_config(members[CONFIG]), state), reopen=partial(open_nemo, path))


def checkpoint_of(path: Path, model_config: dict, state: Mapping[str, Readable]) -> Checkpoint:
    """A state dict by NeMo's keys, from whatever kind of file; ``path`` is for messages. Nothing is read.

    Raises ArtifactError unless it holds every weight that the config describes, in its shape, and nothing else.
    """
    stored_shapes = {key: tensor.shape for key, tensor in state.items()}
    try:
        clip1, clip2 = sdxl_keys.text_shapes(stored_shapes)
    except (KeyError, IndexError, ValueError) as error:
        raise ArtifactError(
            f"{path} lacks the weights that tell the sizes of its text encoders, or they have another rank ({error}); "
            f"expected SDXL's two, under {sdxl_keys.PREFIX['text_encoder']} and {sdxl_keys.PREFIX['text_encoder_2']}"
        ) from error
    shapes = parameter_shapes(empty_modules(path, model_config, clip1, clip2))
    places = {component: sdxl_keys.stored(component, shapes[component]) for component in shapes}
    expected = {
        place.key: place.stored_shape(shapes[component][name])
        for component in shapes
        for name, place in places[component].items()
    }
    check_tensors(path, state, expected, sdxl_keys.UNUSED)
    components = {
        component: WeightSource(
            path, component, shapes[component], places[component],
            {place.key: state[place.key] for place in places[component].values()},
        )
        for component in shapes
    }  # fmt: skip
    unused = {key: tensor for key, tensor in state.items() if key in sdxl_keys.UNUSED}
    return Checkpoint(path, model_config, components, clip1, clip2, unused)


def check_finite(source: Source) -> None:
    """Reads every tensor once. Raises ArtifactError naming the first that holds a NaN or an infinity."""
    for key, stored in source.tensors.items():
        tensor = stored.read()
        if tensor.numel() and not all(map(math.isfinite, (bound.item() for bound in torch.aminmax(tensor)))):
            broken = tensor.numel() - int(torch.isfinite(tensor).sum())
            raise ArtifactError(
                f"{source.path}: {key!r} of the {source.component} holds {broken} NaN or infinite values out of "
                f"{tensor.numel()}; expected finite weights, so fetch the checkpoint again or repair its training"
            )


def write_nemo(path: Path, model_config: dict, modules: Mapping[str, torch.nn.Module], dtype: torch.dtype) -> None:
    """Writes the four networks of ``sd_quant.models.sdxl.build_modules`` with weights in ``dtype``.

    Raises ResourceError when the disk is full.
    """
    write_archive(path, model_config, state_of({
        component: {name: lazy(parameter, dtype) for name, parameter in modules[component].named_parameters()}
        for component in sdxl_keys.PREFIX
    }, model_config))  # fmt: skip


def state_of(components: Mapping[str, Mapping[str, Readable]], model_config: dict) -> dict[str, Readable]:
    """NeMo's state dict of the four networks, given by diffusers' names, and of what belongs to none of them."""
    dtype = components["text_encoder_2"]["text_projection.weight"].dtype
    return network_state(components) | unused_state(dtype, model_config["denoiser_config"]["num_idx"])


def network_state(components: Mapping[str, Mapping[str, Readable]]) -> dict[str, Readable]:
    """The four networks alone."""
    state: dict[str, Readable] = {}
    for component in sdxl_keys.PREFIX:
        state |= sdxl_keys.to_nemo(component, components[component])
    return state


def unused_state(dtype: torch.dtype, steps: int) -> dict[str, Readable]:
    """What NeMo stores beside the networks, for weights that come from elsewhere.

    CLIP's temperature, a scalar of ``dtype``, has the value that training starts with: only training uses it. The noise
    levels are fp32 [steps].
    """
    logit_scale = torch.tensor(math.log(1 / 0.07))
    return {sdxl_keys.LOGIT_SCALE: lazy(logit_scale, dtype), sdxl_keys.SIGMAS: lazy(denoiser_sigmas(steps))}


def write_archive(
    path: Path, model_config: dict, state: Mapping[str, Readable], advance: Callable[[], object] = lambda: None
) -> None:
    """Writes a single-GPU archive, one tensor in memory at a time; the same input gives the same bytes.

    ``advance`` is called after each tensor. Raises ResourceError when the disk is full.
    """
    config = yaml.safe_dump(model_config, sort_keys=False).encode()
    with atomic_path(path) as temporary, temporary.open("w+b") as file:
        _write_member(file, CONFIG, lambda target: target.write(config))
        _write_member(file, WEIGHTS, lambda target: write_tensors(target, state, advance))
        file.write(bytes(2 * BLOCKSIZE))  # the end-of-archive mark


def denoiser_sigmas(count: int) -> torch.Tensor:
    """Noise levels of SGM's DiscreteDenoiser on LegacyDDPMDiscretization: fp32 [count], ascending."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, count, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1 - betas, dim=0)
    return ((1 - alphas) / alphas).sqrt().float()


def whole_file(path: Path) -> Member:
    """A file that stands alone, read as those of an archive are. Raises ConfigError when it does not exist."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; check the path")
    with path.open("rb") as file:
        return Member(str(path), OpenFile(file), 0, os.fstat(file.fileno()).st_size)


def read_config(member: Member) -> dict:
    """The mapping in a ``model_config.yaml``, without NeMo's ``model:`` around it.

    Raises ArtifactError when the file holds anything else.
    """
    if member.size > MAX_CONFIG:
        raise ArtifactError(f"{member.name} has {member.size} bytes; expected at most {MAX_CONFIG}, so check the path")
    try:
        config = yaml.safe_load(bytes(member.read(0, member.size)))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ArtifactError(f"{member.name} is not plain YAML ({reason}); fetch it again") from error
    if isinstance(config, dict) and isinstance(config.get("model"), dict):  # the wrapper that NeMo's loader accepts too
        config = config["model"]
    if not isinstance(config, dict):
        raise ArtifactError(
            f"{member.name} holds a {type(config).__name__}; expected the mapping of an SDXL model section"
        )
    return config


def renamed(path: Path, tensors: Mapping[str, Readable], rename: Callable[[str], str]) -> dict[str, Readable]:
    """By ``rename(name)``. Raises ArtifactError when that makes two names one: a tensor is there in two namings."""
    result: dict[str, Readable] = {}
    for name, tensor in tensors.items():
        new = rename(name)
        if new in result:
            raise ArtifactError(
                f"{path} holds {new[:200]!r} twice, plain and wrapped or under an old name; expected it once, so save "
                "it again"
            )
        result[new] = tensor
    return result


def _plain_key(key: str) -> str:
    """Without the marks that torch.compile and NeMo's O2 mixed precision leave in the keys."""
    return re.sub(r"^model\.module\.", "model.", key.replace("._orig_mod", ""))


def parameter_shapes(modules: Mapping[str, torch.nn.Module]) -> dict[str, dict[str, tuple[int, ...]]]:
    return {
        component: {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        for component, module in modules.items()
    }


def empty_modules(path: Path, config: dict, clip1: TextShape, clip2: TextShape) -> dict[str, torch.nn.Module]:
    """The networks on the meta device: shapes without memory.

    Raises ArtifactError, in which ``path`` is named, when the config does not describe networks that can be built.
    """
    try:
        unet, vae = config["unet_config"], config["first_stage_config"]["ddconfig"]
        lists = (unet["channel_mult"], unet["transformer_depth"], vae["ch_mult"], unet["attention_resolutions"])
        counts = (unet["num_res_blocks"], vae["num_res_blocks"], *unet["transformer_depth"], clip1.layers, clip2.layers)
        if max(*map(len, lists), *counts) > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} blocks")
        arguments = [*unet_config(config).items(), *vae_config(config).items()]
        for name, value in arguments:
            entries = value if isinstance(value, list) else [value]
            if not all(isinstance(entry, int | float | str | None) for entry in entries):
                raise TypeError(f"{name} is no number, text or list of those")  # YAML lists may stand for a billion
            if name in ("addition_time_embed_dim", "projection_class_embeddings_input_dim") and type(value) is not int:
                raise TypeError(f"{name} is no whole number")
        with torch.device("meta"), bounded_modules():
            return build_modules(config, clip1, clip2)
    except Exception as error:  # the config is the file's own: any value, of any type, may be wrong in it
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ArtifactError(f"{path}: {CONFIG} does not describe an SDXL that can be built ({reason})") from error


def check_tensors(
    path: Path, found: Mapping[str, Readable], expected: Mapping[str, tuple[int, ...]], unused: Collection[str]
) -> None:
    """``unused`` may be there in any shape and dtype.

    Raises ArtifactError when weights are missing, unknown, misshapen or of another dtype than a network's.
    """
    missing = [key for key in expected if key not in found]
    unknown = [key for key in found if key not in expected and key not in unused]
    misshapen = [
        f"{key} {list(found[key].shape)} instead of {list(shape)}"
        for key, shape in expected.items()
        if key in found and found[key].shape != shape
    ]
    kinds = {"missing": missing, "unknown": unknown, "misshapen": misshapen}
    for most in (10, 3):  # names of a kind; every kind has to fit into the sentence
        problems = [f"{len(keys)} {what}: {_listing(keys, most)}" for what, keys in kinds.items() if keys]
        if sum(map(len, problems)) < LONGEST_LISTING:
            break
    if problems:
        raise ArtifactError(
            f"{path} does not hold the weights that its configuration describes, {len(expected)} keys expected "
            f"({'; '.join(problems)}); use the configuration and the weights of one training"
        )
    for key in expected:
        if found[key].dtype not in DTYPES:
            raise ArtifactError(
                f"{path}: {key!r} is stored as {found[key].dtype}; expected float32, float16 or bfloat16, so start "
                "from the checkpoint as it was before quantization"
            )


def _listing(names: Iterable[str], most: int = 10) -> str:
    names = list(names)
    shown = ", ".join(ascii(name[:200])[1:-1] for name in names[:most])  # ascii: they come from the file
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _write_member(file: BinaryIO, name: str, write: Callable[[BinaryIO], object]) -> None:
    """The size stands before the content and is known after it, so the header is written last.

    GNU format keeps it at one block for any size.
    """
    header_at = file.tell()
    file.write(bytes(BLOCKSIZE))
    write(file)
    end = file.tell()
    header = TarInfo(f"./{name}")
    header.size = end - header_at - BLOCKSIZE
    file.write(bytes(-end % BLOCKSIZE))
    after = file.tell()
    file.seek(header_at)
    file.write(header.tobuf(GNU_FORMAT))
    file.seek(after)
