"""Rows of tables of which some are refused and some are taken."""

from contextlib import AbstractContextManager, nullcontext

import pytest

from sd_quant.errors import ConfigError


def refused(sentence: str | None, kind: type[Exception] = ConfigError) -> AbstractContextManager:
    """The block is refused in words that begin so, as a regular expression; without a sentence it is taken."""
    return nullcontext() if sentence is None else pytest.raises(kind, match=f"^{sentence}")
