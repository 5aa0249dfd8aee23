"""LoRAs for pipelines of any class, with layer names converted by diffusers' own loader of that class.

``lora_state_dict`` of the class renames, joins, cuts and scales what trainers have stored; nothing here knows a family.
The loader gets meta tensors that record its operations, so that the factors of a layer are read only with that layer,
and tensors of the file that the loader ignores are noticed. The loader opens no file and downloads nothing.
Alternatives not taken: ``load_lora_weights`` and ``fuse_lora``, which need all weights in memory and PEFT, and drop
what does not fit with a warning; and a table of names for each class.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sd_quant.checkpoints.diffusers_network import MOST_MEMORY, MOST_SECONDS
from sd_quant.checkpoints.lora import read_lora, split_key, updated
from sd_quant.errors import ConfigError
from sd_quant.files import refusing
from sd_quant.files.checks import listing
from sd_quant.files.tensors import LazyTensor, Readable, lazy
from sd_quant.names.lora import Place, diffusers_places
from sd_quant.observed.checkpoint import ObservedCheckpoint
from sd_quant.process import confined


class Recorded(Tensor):
    """A meta tensor that records how its numbers are computed, and from which tensors of a file."""

    source: LazyTensor
    keys: frozenset[str]  # names of the file's tensors from which it is computed
    asked: set[str]  # names of the file's tensors whose numbers the loader needed at once, such as alphas

    @staticmethod
    def of(plain: Tensor, source: LazyTensor, keys: frozenset[str], asked: set[str]) -> "Recorded":
        """Convert ``plain``, a tensor on the meta device, to a ``Recorded``."""
        made = plain.as_subclass(Recorded)
        made.source, made.keys, made.asked = source, keys, asked
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        given = (tuple(args), dict(kwargs or {}))
        inputs = [each for each in pytree.tree_leaves(given) if isinstance(each, Recorded)]
        keys, asked = frozenset[str]().union(*(each.keys for each in inputs)), inputs[0].asked
        compute = partial(computed, func, *pytree.tree_map_only(Recorded, lambda each: each.source, given))
        with torch._C.DisableTorchFunctionSubclass():
            try:
                made = func(*given[0], **given[1])
            except RuntimeError:  # it needs numbers
                asked |= keys
                return compute()

            def recorded(place: int, leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                source = LazyTensor(tuple(leaf.shape), leaf.dtype, lambda: pytree.tree_leaves(compute())[place])
                if isinstance(leaf, Recorded):  # changed in place
                    leaf.source, leaf.keys = source, keys
                    return leaf
                return Recorded.of(leaf, source, keys, asked)

            leaves, structure = pytree.tree_flatten(made)
            return pytree.tree_unflatten([recorded(*each) for each in enumerate(leaves)], structure)


def computed(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Read the lazy tensors among the arguments, call ``func`` and return its result."""
    args, kwargs = pytree.tree_map_only(LazyTensor, lambda each: each.read(), (args, kwargs))
    return func(*args, **kwargs)


def with_loras(checkpoint: ObservedCheckpoint, loras: Iterable[tuple]) -> ObservedCheckpoint:
    """Return the checkpoint with LoRAs added to its weights; no weight is read yet.

    Each of ``loras`` is (path, strength, denoiser or None for the only one). Raises ConfigError for a LoRA that does
    not fit, or that names no denoiser where there are several; ArtifactError for a damaged file.
    """
    updates = []
    for path, strength, denoiser in loras:
        names = names_for(checkpoint, path, denoiser)
        about = checkpoint.kind.__name__ + (f", {denoiser}" if denoiser else "")
        updates += read_lora(path, strength, names, about, partial(in_diffusers_names, checkpoint, path, names))
    if not updates:
        return checkpoint
    return replace(updated(checkpoint, updates), reopen=partial(reopened, checkpoint.reopen, loras=loras))


def reopened(reopen: Callable[[], Any], loras: Iterable[tuple]) -> ObservedCheckpoint:
    """Open the checkpoint again by ``reopen``, and add the LoRAs (``with_loras``)."""
    return with_loras(reopen(), loras)


def names_for(checkpoint: ObservedCheckpoint, path: Path, denoiser: str | None) -> dict[str, list[list[Place]]]:
    """Map layer names in a LoRA of ``denoiser`` to weights (``Place``). Raises ConfigError for an unknown denoiser."""
    kind, denoisers = checkpoint.kind, checkpoint.observation.denoisers
    loadable = getattr(kind, "_lora_loadable_modules", denoisers)
    able = [each for each in denoisers if each in loadable] or [checkpoint.denoiser]
    if denoiser not in able and (denoiser or len(able) > 1):
        found = f"for {denoiser}" if denoiser else "for no denoiser"
        raise ConfigError(
            f"model.loras names {path} {found}, expected one of {', '.join(able)}, which {kind.__name__} calls in its "
            f"steps: write {able[-1]}:file:strength"
        )
    own = denoiser or able[0]
    called = getattr(kind, "transformer_name", None) or getattr(kind, "unet_name", None) or own
    others = set(denoisers) - {own}
    parameters = {name: each.parameters for name, each in checkpoint.components.items() if name not in others}
    return diffusers_places(parameters, own, called)


def in_diffusers_names(
    checkpoint: ObservedCheckpoint, path: Path, names: Mapping[str, Any], tensors: Mapping[str, Readable]
) -> Mapping[str, Readable]:
    """Return a LoRA's tensors under diffusers' names of layers, converted by the pipeline class's ``lora_state_dict``.

    Tensors are returned unchanged where all layers are in ``names`` already, or the class has no such loader. Raises
    ConfigError for tensors that the loader ignores and that are not zero, ArtifactError for names it does not know.
    """
    kind = cast(Any, checkpoint.kind)
    if all(split_key(key)[0] in names for key in tensors) or not hasattr(kind, "lora_state_dict"):
        return tensors
    asked: set[str] = set()
    given = {
        key: Recorded.of(
            torch.empty(each.shape, dtype=each.dtype, device="meta"),
            LazyTensor(tuple(each.shape), each.dtype, each.read), frozenset([key]), asked,
        )
        for key, each in tensors.items()
    }  # fmt: skip
    unet = getattr(kind, "unet_name", "")
    config = SimpleNamespace(**cast(Any, checkpoint.build_one(unet)).config) if unet in checkpoint.configs else None
    what = f"model.loras names {path}, whose names diffusers' loader of {kind.__name__} does not understand"
    with refusing(what, advice="give a LoRA that was trained for this pipeline"), confined(MOST_SECONDS, MOST_MEMORY):
        made = kind.lora_state_dict(given, unet_config=config, return_alphas=True)
        state, alphas = made if isinstance(made, tuple) else (made, {})
        found = {**state, **(alphas or {})}
        kept = asked.union(*(each.keys for each in found.values() if isinstance(each, Recorded)))
    if left := [key for key in tensors.keys() - kept if tensors[key].read().any()]:
        raise ConfigError(
            f"model.loras names {path}, of whose {len(tensors)} tensors diffusers' loader of {kind.__name__} leaves "
            f"out {len(left)} that are not zero ({listing(sorted(left))}); expected a LoRA that it loads whole"
        )
    return {
        key: each.source if isinstance(each, Recorded) else lazy(torch.as_tensor(each)) for key, each in found.items()
    }
