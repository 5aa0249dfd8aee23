"""Exceptions whose message is one sentence: the thing, what was found, what was expected, what to do.

The class of an exception is mapped to the exit code of the command.
"""

import errno
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

from sd_quant.process import Lasting
from sd_quant.text import escaped, one_line

CANCELLED = 130
UNDECIDED = 5  # of a gate whose criteria cannot be decided, and of invalid votes
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_WORDS = re.compile(r"no space left|os error 28\b|disk quota exceeded", re.IGNORECASE)
MEMORY_WORDS = re.compile(  # the last four are about threads, graphs and libraries
    r"out of memory|bad_alloc|(can't|cannot|could not|failed to) alloc|resource temporarily unavailable"
    r"|failed to serialize proto|arena alloc failed|failed to map segment",
    re.IGNORECASE,
)
TIME_WORDS = "timed-out too many times"  # of submitit, when a job's time on Slurm is over
LONGEST = 1400  # characters of a sentence


class SdQuantError(Exception):
    """A job failed. The message is escaped to one line; if too long, its middle is cut, so that the advice stays."""

    exit_code = 1

    def __init__(self, sentence: object):
        line = escaped(sentence)
        super().__init__(line if len(line) <= LONGEST else f"{line[: LONGEST - 401]}…{line[-400:]}")


class ConfigError(SdQuantError):
    """A configuration option (knob) is unknown, out of range, contradictory, or names something that does not exist."""

    exit_code = 2


class ArtifactError(SdQuantError):
    """A checkpoint, ONNX file, TensorRT plan or prompt file is damaged or not of the expected kind."""

    exit_code = 3


class ResourceError(SdQuantError):
    """Not enough disk, memory or time, or a requested device or runtime is missing."""

    exit_code = 4


def of_the_machine(error: BaseException) -> ResourceError | None:
    """Return a ResourceError for any library's error about disk space, memory or time, with its notes; else None."""
    if isinstance(error, ResourceError):
        return error
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    where = "".join(f" in {note}" for found in chain for note in getattr(found, "__notes__", ()))
    for found in chain:
        if isinstance(found, SdQuantError):  # it may quote a file; its cause does not
            continue
        if isinstance(found, OSError) and found.errno in FULL or FULL_WORDS.search(str(found)):
            name = getattr(found, "filename", None)
            could_not = f": {name} could not be written" if name else ""
            return ResourceError(f"the disk is full{where}{could_not}; free some space and rerun")
        if TIME_WORDS in str(found):
            return ResourceError(f"its time on the cluster was over{where}; raise hydra.launcher.timeout_min")
        if isinstance(found, MemoryError) or MEMORY_WORDS.search(str(found)):
            return ResourceError(
                f"out of memory{where} ({one_line(found, 200) or type(found).__name__}); lower "
                "quantize.batch_size, infer.batch_size or infer.width and infer.height, or take a larger machine"
            )
    return None


def fail(sentence: str, code: int) -> int:
    """Print the sentence to standard error and return the exit code."""
    print(f"error: {sentence}", file=sys.stderr)
    return code


def is_cancelled(error: BaseException | None) -> bool:
    """Return whether an error is a KeyboardInterrupt, or was raised (by torch, say) while one was handled."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def exit_with_its_code(main: Callable[[], object], kept: str = "nothing half written is left") -> None:
    """Run a command; print a known error as its sentence and exit with its code. Other errors keep their traceback.

    ``kept`` says what a cancelled command leaves behind. A command whose standard output is closed runs to its end.
    """
    output = Lasting(sys.stdout)
    try:
        with redirect_stdout(output):  # type: ignore[type-var]
            main()
    except (KeyboardInterrupt, Exception) as error:
        if is_cancelled(error):
            sys.exit(fail(f"cancelled; {kept}", CANCELLED))
        refused = error if isinstance(error, SdQuantError) else of_the_machine(error)
        if refused is None:
            raise
        sys.exit(fail(str(refused), refused.exit_code))
    finally:
        output.flush()
