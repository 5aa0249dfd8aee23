"""Every refusal of the project. The message is one sentence: what, found, expected, what to do.

The class decides the exit code of the command.
"""

import sys
from collections.abc import Callable

CANCELLED = 130


class SdQuantError(Exception):
    """The job failed."""

    exit_code = 1


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
