"""``modelopt_state.pth``, NVIDIA ModelOpt's description of its quantizers, read without an unpickler.

The file is a pickle in the zip of ``torch.save``: operations for dicts, lists, tuples and plain values, and names such
as ``torch.Size`` or classes of stored tensors. Operations are interpreted here one by one, a name stays a ``Name``, and
nothing is called. Alternatives not taken: ``torch.load(weights_only=True)`` allows whatever any library has declared
safe, and refuses the classes of a compressed checkpoint; the quantizers' buffers alone do not tell INT8 from FP8.
"""

import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import Member
from sd_quant.files.checks import listing
from sd_quant.interchange.stored import told

MOST_BYTES = 256 * 2**20  # of the file, which holds ranges too
MOST_PICKLE, MOST_ENTRIES = 4 * 2**20, 100_000  # SDXL's pickle has about 2 MB
MOST_STEPS, MOST_PROPERTIES = 100, 100  # what a pickle refers to often costs nothing there and time here
MOST_TEXT = 4096  # of anything that is named
STEPS = ("quantize", "auto_quantize", "real_quantize")  # of what ModelOpt did; and whatever calibrates
CALIBRATES = "_calibrate"
BRANCHES = "svdquant_calibrate"  # adds weights
CONSTANTS = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "NONE": lambda: None,
             "NEWTRUE": lambda: True, "NEWFALSE": lambda: False}  # fmt: skip


@dataclass(frozen=True)
class Name:
    """A name in a pickle, such as ``torch.float16``; never looked up."""

    text: str


@dataclass(frozen=True)
class Made:
    """A call in a pickle, of ``by`` with the arguments ``of``; never executed."""

    by: object
    of: object = field(repr=False)


@dataclass(frozen=True)
class State:
    """Content of ``modelopt_state.pth``: quantizers' properties by name, compressed weights' metadata by layer."""

    version: str
    quantizers: Mapping[str, Mapping[str, object]]
    stored: Mapping[str, object]


def read_state(path: Path, member: Member) -> State:
    """Read ``modelopt_state.pth``. Raises ArtifactError for a broken file and for steps other than quantization."""
    try:
        content = plain_content(pickle_of(member))
        version, steps = content["modelopt_version"], content["modelopt_state_dict"]
        if not isinstance(steps, list) or len(steps) > MOST_STEPS:
            raise ValueError("no list of steps, or too many")
        quantizers: dict[str, Mapping[str, object]] = {}
        stored: dict[str, object] = {}
        for step, entry in steps:
            if not isinstance(step, str) or not (step in STEPS or step.endswith(CALIBRATES)) or step == BRANCHES:
                raise ArtifactError(
                    f"{path}: ModelOpt has done {listing([told(step)])} with this network, expected quantization "
                    "without a low-rank branch; give such a checkpoint"
                )
            metadata = entry["metadata"]
            quantizers |= checked(metadata.get("quantizer_state", {}))
            stored |= metadata.get("q_tensor_state", {})
        if not isinstance(version, str) or not all(isinstance(name, str) for name in stored):
            raise ValueError("no version, or another key than a name")
    except (ArtifactError, MemoryError):
        raise
    except Exception as error:  # the file decides where this fails
        raise ArtifactError(
            f"{member.name} is not what ModelOpt writes beside weights "
            f"({listing([f'{type(error).__name__}: {error}'])}); fetch it again"
        ) from None
    return State(version[:40], quantizers, stored)


def checked(quantizers: Any) -> dict[str, Mapping[str, object]]:
    """Return ``quantizers``. Raises ValueError for anything except mappings of properties by name."""
    for name, properties in quantizers.items():
        if not isinstance(name, str) or not isinstance(properties, dict) or len(properties) > MOST_PROPERTIES:
            raise ValueError("a quantizer without a name or properties, or with too many")
        if not all(isinstance(key, str) for key in properties):
            raise ValueError("a property without a name")
    return quantizers


def pickle_of(member: Member) -> bytes:
    """Return the pickle in a file of ``torch.save``. Raises ValueError, or zipfile's errors for a broken zip."""
    if member.size > MOST_BYTES:
        raise ValueError(f"{member.size} bytes, at most {MOST_BYTES} expected")
    with member.open() as file, zipfile.ZipFile(file) as directory:
        entries = directory.infolist()
        found = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(entries) > MOST_ENTRIES or len(found) != 1:
            raise ValueError(f"{len(found)} pickles in {len(entries)} entries")
        sizes = {found[0].file_size, found[0].compress_size}  # the second is what zipfile reads
        if found[0].compress_type != zipfile.ZIP_STORED or len(sizes) > 1 or max(sizes) > MOST_PICKLE:
            raise ValueError("a pickle that is compressed or too large")
        return directory.read(found[0])


def plain_content(data: bytes) -> Any:
    """Parse a pickle of protocol 2 without calling anything. Raises any exception for other content."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def pop(count: int) -> tuple:
        if count > len(stack) - (marks[-1] if marks else 0):
            raise ValueError("a value is missing")
        items = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        return items

    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "STOP":
                pass
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE" | "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(CONSTANTS[opcode.name]())
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(pop(int(opcode.name[-1])))
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                if isinstance(argument, str) and len(argument) > MOST_TEXT:
                    raise ValueError("a text that is too long")
                stack.append(argument)
            case "GLOBAL":
                stack.append(Name(str(argument)[:MOST_TEXT].replace(" ", ".")))
            case "BINPERSID":
                stack.append(Made("storage", pop(1)))
            case "REDUCE" | "NEWOBJ":
                by, of = pop(2)
                stack.append(made(by, of))
            case "BUILD":
                pop(1)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "APPEND" | "APPENDS":
                items = list(pop(1)) if opcode.name == "APPEND" else since_mark()
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = list(pop(2)) if opcode.name == "SETITEM" else since_mark()
                for key, value in zip(items[::2], items[1::2], strict=True):
                    if not isinstance(key, str | int | float | None):
                        raise ValueError("a key that is no plain value")
                    stack[-1][key] = value
            case other:
                raise ValueError(f"the operation {other}")
    (content,) = stack
    return content


def made(by: object, of: object) -> object:
    """Return a call's value: ordered dicts and shapes become plain values, all other calls a ``Made``."""
    if by == Name("collections.OrderedDict") and of == ():
        return {}
    if by == Name("torch.Size") and isinstance(of, tuple) and len(of) == 1:
        return of[0]
    return Made(by, of)
