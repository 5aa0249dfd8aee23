"""How much a configuration may ask to be built. A stranger's could ask for a billion layers, which builds for ever."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.modules.module import register_module_module_registration_hook

MAX_DEPTH = 100  # of any list or count of blocks: SDXL's largest is 32
MOST_MODULES = 50_000  # Flux has 2,200


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
