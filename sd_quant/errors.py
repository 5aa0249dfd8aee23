"""Every refusal of the project. The message is one sentence: what, found, expected, what to do.

The class decides the exit code of the command.
"""

import sys
from collections.abc import Callable

CANCELLED = 130
LONGEST = 1400  # characters of a sentence


class SdQuantError(Exception):
    """The job failed. Its sentence may quote what a stranger wrote: it stays one line, and its end is the advice."""

    exit_code = 1

    def __init__(self, sentence: object):
        line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(sentence))
        super().__init__(line if len(line) <= LONGEST else f"{line[: LONGEST - 401]}…{line[-400:]}")


class ConfigError(SdQuantError):
    """A knob is unknown, out of range, contradictory, or names something that does not exist."""

    exit_code = 2


class ArtifactError(SdQuantError):
    """A checkpoint, ONNX file, plan or prompt file is broken or not what it should be."""

    exit_code = 3


class ResourceError(SdQuantError):
    """Not enough disk or memory, or a device or runtime that was asked for is missing."""

    exit_code = 4


def fail(sentence: str, code: int) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return code


def exit_with_its_code(main: Callable[[], object]) -> None:
    """Run a command; a refusal is one sentence and its exit code."""
    try:
        main()
    except SdQuantError as error:
        sys.exit(fail(str(error), error.exit_code))
    except KeyboardInterrupt:
        sys.exit(fail("cancelled; nothing half written is left", CANCELLED))
