"""Checks of what a checkpoint says of itself, before anything is built from it or read."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from sd_quant.checkpoints.tensors import Readable, Weights
from sd_quant.errors import ArtifactError

MAX_DEPTH = 100  # of any list or count of blocks: SDXL's largest is 32
MOST_MODULES = 50_000  # Flux has 2,200
LONGEST_LISTING = 1100  # letters
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def bounded_modules() -> Iterator[None]:
    """Raises ValueError for networks of more modules than any has: bounds of single numbers multiply."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise ValueError(f"more than {MOST_MODULES} modules")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


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
        problems = [f"{len(keys)} {what}: {listing(keys, most)}" for what, keys in kinds.items() if keys]
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


def check_finite(weights: Weights) -> None:
    """Reads every tensor once. Raises ArtifactError naming the first that holds a NaN or an infinity."""
    for key, stored in weights.tensors.items():
        tensor = stored.read()
        if tensor.numel() and not all(map(math.isfinite, (bound.item() for bound in torch.aminmax(tensor)))):
            broken = tensor.numel() - int(torch.isfinite(tensor).sum())
            raise ArtifactError(
                f"{weights.path}: {key!r} of the {weights.component} holds {broken} NaN or infinite values out of "
                f"{tensor.numel()}; expected finite weights, so fetch the checkpoint again or repair its training"
            )


def listing(names: Iterable[str], most: int = 10) -> str:
    names = list(names)
    shown = ", ".join(ascii(name[:200])[1:-1] for name in names[:most])  # ascii: they come from the file
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
