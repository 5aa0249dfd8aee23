"""Checks of the prompts and knobs that a caller of the Python interface passes, and the source text of calls."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from sd_quant.errors import ConfigError
from sd_quant.knobs import check

UNUSED = {"calib_size": 1}  # where nothing is calibrated, so that a short table of calls serves


def with_prompts(prompts: str | Sequence[str] | None, knobs: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``knobs`` with ``prompts`` added, which ``table`` can replace. Raises ConfigError for both or neither."""
    if "table" not in knobs:
        return {"prompts": texts_of([] if prompts is None else prompts), **knobs}
    check(prompts is None, "prompts", f"{prompts!r:.100}", "None, because table has the prompts of the images")
    return knobs


def texts_of(prompts: str | Sequence[str]) -> list[str]:
    """Return the prompts as a list, a single text as a list of one. Raises ConfigError if empty or not texts."""
    texts = [prompts] if isinstance(prompts, str) else list(prompts) if isinstance(prompts, Iterable) else []
    fits = bool(texts) and all(isinstance(text, str) for text in texts)
    expected = "a text or a list of at least one; give what the images show, such as ['a red bicycle']"
    check(fits, "prompts", f"{prompts!r:.100}", expected)
    return texts


def check_used(knobs: Iterable[str], unused: Collection[str], method: str, remedy: str, when: str = "") -> None:
    """Raise ConfigError for a knob that is in ``unused``: no effect in ``method``; ``remedy`` ends the message."""
    for name in knobs:
        if name.partition(".")[0] in unused:
            raise ConfigError(f"{method} does not use {name}{when}; {remedy}")


def called(*positional: object, **named: object) -> str:
    """Return the source text of a Python call's arguments, such as ``'int8', alpha=0.8``."""
    return ", ".join([*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())])
