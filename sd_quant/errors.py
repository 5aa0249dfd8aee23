"""Every refusal of the project. The message is one sentence: what, found, expected, what to do.

The class decides the exit code of the command.
"""


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
