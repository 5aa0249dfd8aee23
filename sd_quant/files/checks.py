"""Checks of checkpoints: module count of the networks; names, shapes, dtypes and values of the tensors."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import Readable, Weights

MAX_DEPTH = 100  # of any list or count of blocks; SDXL's largest is 32
MAX_MODULES = 50_000  # Flux has 2,200
MAX_PROBLEMS = 1100  # characters of a message that list names
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def bounded_modules() -> Iterator[None]:
    """Raise ValueError, in the block, when more than ``MAX_MODULES`` torch modules are built in all."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > MAX_MODULES:
            raise ValueError(f"more than {MAX_MODULES} modules")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def renamed(path: Path, tensors: Mapping[str, Readable], rename: Callable[[str], str]) -> dict[str, Readable]:
    """Return the tensors under ``rename(name)``. Raises ArtifactError when two names become the same."""
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


def check_tensors(
    path: Path,
    tensors: Mapping[str, Readable],
    expected: Mapping[str, tuple[int, ...]],
    unused: Collection[str],
    whose: str = "that its configuration describes",
    advice: str = "use the configuration and the weights of one training",
) -> None:
    """Raise ArtifactError for missing, unknown or misshapen weights, or ones not in fp32, fp16, bf16; reads no tensor.

    ``expected`` are shapes by name. Names in ``unused`` are allowed too, in any shape and dtype. ``whose`` and
    ``advice`` complete the message.
    """
    missing = [key for key in expected if key not in tensors]
    unknown = [key for key in tensors if key not in expected and key not in unused]
    misshapen = [
        f"{key} {list(tensors[key].shape)} instead of {list(shape)}"
        for key, shape in expected.items()
        if key in tensors and tensors[key].shape != shape
    ]
    if problems := problems_in({"missing": missing, "unknown": unknown, "misshapen": misshapen}):
        raise ArtifactError(
            f"{path} does not hold the weights {whose}, {len(expected)} keys expected ({problems}); {advice}"
        )
    for key in expected:
        if tensors[key].dtype not in WEIGHT_DTYPES:
            raise ArtifactError(
                f"{path}: {key!r} is stored as {tensors[key].dtype}; expected float32, float16 or bfloat16, so start "
                "from the checkpoint as it was before quantization"
            )


def problems_in(kinds: Mapping[str, Sequence[str]]) -> str:
    """Describe each kind of problem: the number of names with it and the first ten, or three if that is too long."""
    for most in (10, 3):
        problems = [f"{len(names)} {what}: {listing(names, most)}" for what, names in kinds.items() if names]
        if sum(map(len, problems)) < MAX_PROBLEMS:
            break
    return "; ".join(problems)


def check_finite(weights: Weights) -> None:
    """Raise ArtifactError for the first tensor that holds a NaN or an infinity. Reads every tensor once."""
    for key, stored in weights.tensors.items():
        tensor = stored.read()
        if tensor.numel() and not all(map(math.isfinite, (bound.item() for bound in torch.aminmax(tensor)))):
            broken = tensor.numel() - int(torch.isfinite(tensor).sum())
            raise ArtifactError(
                f"{weights.path}: {key!r} of the {weights.component} holds {broken} NaN or infinite values out of "
                f"{tensor.numel()}; expected finite weights, so fetch the checkpoint again or repair its training"
            )


def listing(names: Sequence[str], most: int = 10) -> str:
    """Join the first ``most`` names, made printable and cut, and say how many more there are."""
    shown = ", ".join(ascii(name[:200])[1:-1] for name in names[:most])  # ascii: they come from the file
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
