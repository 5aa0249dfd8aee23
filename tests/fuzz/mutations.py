"""Damages to a sound file, as by a stranger or a bad disk: Hypothesis draws the edits, these functions apply them.

An edit is a tuple of its kind and numbers that are taken modulo what is there, so any edit fits any file and a failing
list of them can be shrunk. The road not taken is a fuzzer that a compiler instruments: most of the readers are Python,
and what they call is not built here.
"""

import hashlib
import io
import json
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import yaml
from hypothesis import strategies as st

from sd_quant.files.tensors import Readable

LARGE = st.integers(0, 2**32 - 1)  # modulo what there is to choose from
EXTREMES = (0, 1, -1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
Edit = tuple
Ranges = Sequence[tuple[int, int]]

# Bytes

place = st.tuples(st.integers(0, 3), LARGE)  # three of four times in a range that decides something
byte_edit = st.one_of(
    st.tuples(st.just("flip"), place, st.integers(0, 7)),
    st.tuples(st.just("byte"), place, st.integers(0, 255)),
    st.tuples(st.just("cut"), place),
    st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=16), st.sampled_from([1, 1, 32, 4096])),
    st.tuples(st.just("remove"), place, st.integers(1, 600)),
    st.tuples(st.just("repeat"), place, st.integers(1, 600), st.sampled_from([1, 1, 2, 20])),
    st.tuples(st.just("splice"), place, LARGE),
    st.tuples(st.just("number"), place, st.sampled_from("bBhHiIqQ"), st.sampled_from("<>"), st.sampled_from(EXTREMES)),
    st.tuples(st.just("digits"), place, st.sampled_from([*EXTREMES, 10**30, "1e999", "NaN", "0x10", "1_0", "٣"])),
)
byte_edits = st.lists(byte_edit, min_size=1, max_size=4)


def edited(data: bytes, edits: Sequence[Edit], hot: Ranges = (), other: bytes = b"") -> bytes:
    """``hot``: where the bytes are that decide something; ``other``: another sound file, to be spliced with."""
    hot = [(start, stop) for start, stop in hot if start < stop]
    for kind, (temperature, number), *options in edits:
        if not data:
            return data
        start, stop = hot[number // 7 % len(hot)] if hot and temperature else (0, len(data))
        at = (start + number % (stop - start)) % len(data)
        data = BYTES[kind](data, at, other or data, *options)
    return data


def _number(data: bytes, at: int, other: bytes, width: str, order: str, value: int) -> bytes:
    content = struct.pack(order + width.upper(), value % 2 ** (8 * struct.calcsize(width)))
    return data[:at] + content + data[at + len(content) :]


def _digits(data: bytes, at: int, other: bytes, value: int | str) -> bytes:
    """In place of the next number that is written as text, as tar and JSON have them."""
    return data[:at] + re.sub(rb"\d+", str(value).encode(), data[at:], count=1)


BYTES: dict[str, Callable[..., bytes]] = {
    "flip": lambda data, at, other, bit: data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :],
    "byte": lambda data, at, other, value: data[:at] + bytes([value]) + data[at + 1 :],
    "cut": lambda data, at, other: data[:at],
    "insert": lambda data, at, other, content, times: data[:at] + content * times + data[at:],
    "remove": lambda data, at, other, length: data[:at] + data[at + length :],
    "repeat": lambda data, at, other, length, times: data[:at] + data[at : at + length] * times + data[at:],
    "splice": lambda data, at, other, number: data[:at] + other[number % len(other) :],
    "number": _number,
    "digits": _digits,
}

# Documents: JSON and YAML

DEEP = 20_000
PLANTS = {  # what cannot be made of Python's objects, by a text that stands for it until the document is written
    "@deep list": "[" * DEEP + "]" * DEEP,
    "@deep object": '{"a":' * DEEP + "1" + "}" * DEEP,
    "@many digits": "9" * 5000,
    "@some digits": "9" * 400,
    "@overflow": "1e999",
    "@not a number": "NaN",
    "@infinity": "-Infinity",
    "@long list": "[" + ",".join("0" * 20_000) + "]",
}
YAML_PLANTS = {
    "@not a number": ".nan",
    "@infinity": "-.inf",
    "@deep object": "{a: " * DEEP + "1" + "}" * DEEP,
    "@bomb": "[&a [0,0,0,0,0,0,0,0,0,0]," + ",".join(f"&{b} [{','.join([f'*{a}'] * 10)}]" for a, b in zip(
        "abcdefgh", "bcdefghi", strict=True)) + "]",
    "@cycle": "&z [*z, 1]",
    "@object": "!!python/object/apply:os.system [\"touch canary\"]",
    "@date": "2020-01-01",
    "@tagged": "!!set {a, b}",
    "@binary": "!!binary aGVsbG8=",
}  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 64, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e-320, 1e308, -1e308,
    "", "0", "x" * 50_000, "a\0b\x1b[2J\r\nc", "\ud800", "‮evil", "../not_for_readers", "/proc/self/environ", ".", "..",
    "a" * 300, "cpu", "<script>alert(1)</script>", "=cmd|' /C calc'!A0", [], {}, [[]], [None], {"": None},
    {"value": "x"}, {"value": None, "reason": 3}, {"reason": "none\n"}, [-1], ["a", 1], list(range(300)),
    {"a" * 2000: {"b" * 2000: 1}}, {f"key {number}": number for number in range(300)}, *PLANTS,
]  # fmt: skip

YAML_VALUES = [*VALUES, *YAML_PLANTS]

DOCUMENT_EDITS = ("replace", "replace", "remove", "rename", "copy", "wrap", "twice", "scale")
document_edit = st.one_of(*(st.tuples(st.just(kind), LARGE, LARGE) for kind in DOCUMENT_EDITS))
document_edits = st.lists(document_edit, min_size=1, max_size=3)


def changed(document: Any, edits: Sequence[Edit], values: Sequence = VALUES) -> Any:
    """A JSON-like document with nodes replaced, removed, renamed, copied elsewhere, wrapped or scaled."""
    holder = [deepcopy(document)]
    for kind, node, number in edits:
        nodes = list(_nodes(holder))
        if not nodes:
            break
        parent, key = nodes[node % len(nodes)]
        value = parent[key]
        if kind == "replace":
            parent[key] = deepcopy(values[number % len(values)])
        elif kind == "remove" and parent is not holder:
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            names = ["", "x" * 5000, "__class__", "a\nb", "..", "\x1b[2J", "__metadata__", *map(str, parent)]
            parent[names[number % len(names)]] = parent.pop(key)
        elif kind == "copy":
            other, name = nodes[number % len(nodes)]
            parent[key] = deepcopy(other[name])
        elif kind == "wrap":
            wrapped = [value], {"value": value}, [value, deepcopy(value)], {"a": {"a": value}}, str(value)
            parent[key] = wrapped[number % 5]
        elif kind == "twice" and isinstance(parent, list):
            parent[key:key] = [deepcopy(value) for _ in range((1, 2, 101)[number % 3])]
        elif kind == "scale" and isinstance(value, int | float):
            parent[key] = (-value, 2 * value, value / 3, value + 1, value - 1, value * 10**6)[number % 6]
        elif kind == "scale" and isinstance(value, str):
            parent[key] = (value[::-1], value[:100] * 1000, value[:1], value + "\n", value.upper())[number % 5]
    return holder[0]


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place where a value is: what holds it and under which key."""
    pending = [tree]
    while pending:
        holder = pending.pop()
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            yield holder, key
            if isinstance(value, dict | list):
                pending.append(value)


def to_json(document: Any) -> bytes:
    text = json.dumps(document)
    for name, content in PLANTS.items():
        text = text.replace(f'"{name}"', content)
    return text.encode()


def to_yaml(document: Any) -> bytes:
    text = yaml.safe_dump(document, sort_keys=False, width=2**31)
    for name, content in (PLANTS | YAML_PLANTS).items():
        text = text.replace(f"'{name}'", content)
    return text.encode("utf-8", "surrogatepass")


DOCUMENTS = {"json": (json.loads, to_json, VALUES), "yaml": (yaml.safe_load, to_yaml, YAML_VALUES)}


# Pickles

SUSPECTS = [  # a name of Python's and what it would be called with; those that are run leave the canary
    ("os", "system", ("touch canary",)), ("posix", "system", ("touch canary",)),
    ("builtins", "open", ("canary", "w")), ("io", "open", ("canary", "w")), ("__builtin__", "open", ("canary", "w")),
    ("builtins", "eval", ("open('canary', 'w')",)), ("builtins", "exec", ("open('canary', 'w')",)),
    ("builtins", "getattr", ("a", "__class__")), ("builtins", "__import__", ("this",)),
    ("subprocess", "Popen", (["touch", "canary"],)), ("pathlib", "Path", ("canary",)),
    ("torch.serialization", "load", ("canary",)), ("torch.hub", "load", ("a", "b")), ("torch", "save", ({}, "canary")),
    ("torch", "device", ("cpu",)), ("torch", "Size", ([2**62, 4],)), ("collections", "OrderedDict", ()),
    ("torch._utils", "_rebuild_tensor_v2", (None, 0, (2**40,), (1,), False, {})),
    ("torch._utils", "_rebuild_parameter", (1, False, {})), ("torch._tensor", "_rebuild_from_type_v2", (1, 2, 3, 4)),
    ("torch.nn.parameter", "Parameter", (3,)), ("torch", "FloatStorage", (2**40,)), ("torch", "Tensor", (2**20,)),
    ("_codecs", "encode", ("x" * 100, "latin1")), ("builtins", "bytearray", (2**40,)), ("torch", "zeros", (2**40,)),
    ("torch._utils", "_rebuild_sparse_tensor", (1, (2, 3))),
    ("torch._utils", "_rebuild_meta_tensor_no_storage", (1, (2**50,), (1,), False)),
    ("numpy.core.multiarray", "_reconstruct", (1, (0,), b"b")), ("functools", "partial", (1,)),
    ("torch._utils", "_rebuild_qtensor", (1, 0, (1,), (1,), 1, False, {})),
]  # fmt: skip
RAW = [
    b"(" * 5000, b"]" * 5000, b")\x85" + b"\x85" * 5000, b"0", b"1", b"2", b"a", b"e", b"s", b"u", b"b", b"R", b"\x81",
    b"\x92", b"o", b"Q", b"P0\n", b"\x95" + b"\xff" * 8, b"\x8d" + b"\xff" * 7 + b"\x7f" + b"abc",
    b"X\xff\xff\xff\xffabc", b"\x8b\xff\xff\xff\x7f", b"\x8a\xff" + b"\xff" * 255, b"T\xff\xff\xff\xff",
    b"B\xff\xff\xff\xff",
    b"j\xff\xff\xff\xff", b"h\x00", b"r\xff\xff\xff\x7f", b"\x82\x01", b"\x84\x01\x00\x00\x00", b"\x80\x7f", b"N", b"}",
    b")q\xc8" + b"h\xc8h\xc8\x86q\xc8" * 40, b")" + b"2\x86" * 40, b"]q\xc8" + b"]q\xc9(h\xc8h\xc8eh\xc9q\xc8" * 40,
    b"(lp0\n", b"(iposix\nsystem\n", b"L9999999999999999999999L\n", b"F1e999\n", b".",
    b"\x8f", b"\x90", b"\x94", b"\x97", b"\x98",
]  # fmt: skip
PICKLE_EDITS = ["suspect", "suspect", "raw", "raw", "remove", "twice", "swap", "number", "number", "text"]
pickle_edits = st.lists(st.tuples(st.sampled_from(PICKLE_EDITS), LARGE, LARGE), min_size=1, max_size=3)


def repickled(data: bytes, edits: Sequence[Edit]) -> bytes:
    """A pickle with operations put in, left out, doubled or exchanged, and with other numbers and texts in them."""
    found = list(pickletools.genops(data))
    starts = [position for *_, position in found] + [len(data)]
    pieces = [data[start:stop] for start, stop in zip(starts, starts[1:], strict=False)]
    numbers = [index for index, (code, value, _) in enumerate(found) if type(value) is int and code.code in "KMJ"]
    texts = [index for index, (_, value, _) in enumerate(found) if isinstance(value, str)]
    for kind, where, number in edits:
        at = where % len(pieces)
        if kind == "suspect":
            pieces[at] = called(*SUSPECTS[number % len(SUSPECTS)], number) + pieces[at]
        elif kind == "raw":
            pieces[at] = RAW[number % len(RAW)] + pieces[at]
        elif kind == "remove":
            pieces[at] = b""
        elif kind == "twice":
            pieces[at] *= 2
        elif kind == "swap":
            other = number % len(pieces)
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif kind == "number" and numbers:
            pieces[numbers[where % len(numbers)]] = constant(EXTREMES[number % len(EXTREMES)])
        elif kind == "text" and texts:
            values = ["", "x" * 50_000, "cuda:0", "meta", "../1", "0", "999", "\x1b[2J\n", "a|b", "FloatStorage"]
            pieces[texts[where % len(texts)]] = constant(values[number % len(values)])
    return b"".join(pieces)


def called(module: str, name: str, arguments: tuple, number: int) -> bytes:
    """In the three ways in which a pickle can name something."""
    given = b"(" + b"".join(map(constant, arguments)) + b"t"
    way = number // len(SUSPECTS) % 3
    found = constant(module) + constant(name) + b"\x93" if way == 1 else f"c{module}\n{name}\n".encode()
    return found + given + (b"\x81" if way == 2 else b"R")


def constant(value: Any) -> bytes:
    """The operations that push a plain value."""
    if isinstance(value, bool) or value is None:
        return {True: b"\x88", False: b"\x89", None: b"N"}[value]
    if isinstance(value, int):
        content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(content)]) + content
    if isinstance(value, str):
        content = value.encode()
        return b"X" + struct.pack("<I", len(content)) + content
    if isinstance(value, bytes):
        return b"C" + bytes([len(value)]) + value
    if isinstance(value, dict):
        return b"}"
    return b"(" + b"".join(map(constant, value)) + (b"l" if isinstance(value, list) else b"t")


def with_pickle(archive: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A file of torch.save with another pickle in it, as sound as a zip file can be around it."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(target, "w") as written:
        for entry in source.infolist():
            content = source.read(entry)
            written.writestr(entry.filename, change(content) if entry.filename.endswith("data.pkl") else content)
    return target.getvalue()


# Files, and readers whose input is damaged in several ways

Files = dict[str, bytes]
Way = tuple[st.SearchStrategy, Callable[[Any], Files]]


def ways(*given: Way) -> dict[str, Any]:
    """A reader's ``recipes`` and ``mutate`` of strategies, each with what makes files of its values.

    One that stands here twice is taken twice as often.
    """
    recipes = st.one_of(*(st.tuples(st.just(number), strategy) for number, (strategy, _) in enumerate(given)))
    return {"recipes": recipes, "mutate": lambda recipe: given[recipe[0]][1](recipe[1])}


def digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Returns a digest of a tensor of any dtype, NaN included."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(content).hexdigest()


def digests(tensors: Mapping[str, Readable]) -> dict[str, tuple]:
    return {name: digest(tensor.read()) for name, tensor in tensors.items()}


def header_of(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: Any, content: bytes) -> bytes:
    text = to_json(header)
    return struct.pack("<Q", len(text)) + text + content


def with_numbers(data: bytes, name: str, edits: list) -> bytes:
    """With other bytes in a tensor, as many."""
    header, content = header_of(data)
    first = len(data) - len(content)
    start, stop = (first + each for each in header[name]["data_offsets"])
    piece = edited(data[start:stop], edits)[: stop - start].ljust(stop - start, b"\xff")
    return data[:start] + piece + data[stop:]


def damaged_metadata(data: bytes, key: str, edits: list) -> bytes:
    """With another document, or text that is none, in one entry of the header's metadata."""
    header, content = header_of(data)
    known = header["__metadata__"]
    document = json.loads(known[key]) if known[key].startswith(("{", "[")) else known[key]
    known[key] = to_json(changed(document, edits)).decode("utf-8", "replace")
    return with_header(header, content)


def decisive(archive: bytes) -> list[tuple[int, int]]:
    """Where a zip file of torch.save has its pickle, and its directory."""
    start = archive.index(b"\x80\x02")
    directory = archive.index(b"PK\x01\x02")
    return [(0, 64), (start, archive.index(b"PK", start)), (directory, len(archive))]


def damages_of(path: str, data: bytes) -> Iterator[Way]:
    """The ways in which a file of its kind is damaged."""
    suffix = path.rpartition(".")[2]
    if suffix == "safetensors":
        yield from damages_of_safetensors(path, data)
    elif suffix in ("pt", "pth", "ckpt"):
        yield byte_edits, lambda edits: {path: edited(data, edits, decisive(data))}
        yield pickle_edits, lambda edits: {path: with_pickle(data, partial(repickled, edits=edits))}
    elif suffix in DOCUMENTS:
        read, write, values = DOCUMENTS[suffix]
        document = read(data)
        yield byte_edits, lambda edits: {path: edited(data, edits)}
        yield from [(document_edits, lambda edits: {path: write(changed(document, edits, values))})] * 2
    else:
        yield byte_edits, lambda edits: {path: edited(data, edits, [(0, 64)])}


def damages_of_safetensors(path: str, data: bytes) -> Iterator[Way]:
    """Damages of a safetensors file: header, numbers, texts stored as tensors, documents in the metadata, names."""
    header, content = header_of(data)
    first = len(data) - len(content)
    names, known = sorted(header.keys() - {"__metadata__"}), sorted(header.get("__metadata__", ()))
    yield byte_edits, lambda edits: {path: edited(data, edits, [(0, 8), (8, first)])}
    yield document_edits, lambda edits: {path: with_header(changed(header, edits), content)}
    yield st.tuples(st.sampled_from(names), byte_edits), lambda drawn: {path: with_numbers(data, *drawn)}
    ranges = [(first + start, first + stop) for start, stop in (header[name]["data_offsets"] for name in names)]
    if texts := [(start, stop) for start, stop in ranges if data[start : start + 2] == b'{"']:
        yield byte_edits, lambda edits: {path: edited(data, edits, texts)}
    if known:
        strategy = st.tuples(st.sampled_from(known), document_edits)
        yield strategy, lambda drawn: {path: damaged_metadata(data, *drawn)}

    def renamed(drawn: tuple) -> Files:
        name, ending = drawn
        other = f"{name.rpartition('.')[0]}.{ending}"
        return {path: with_header({other if each == name else each: entry for each, entry in header.items()}, content)}

    endings = sorted({name.rpartition(".")[2] for name in names})
    yield st.tuples(st.sampled_from(names), st.sampled_from(endings)), renamed


def damages(files: Files, put: Callable[[Files], Files] = lambda files: files) -> dict[str, Any]:
    """A reader's ``recipes`` and ``mutate`` of all its files; ``put`` makes of a damaged one what is laid out."""

    def within(strategy: st.SearchStrategy, damage: Callable[[Any], Files]) -> Way:
        return strategy, lambda drawn: put(damage(drawn))

    return ways(*(within(*way) for path, data in files.items() for way in damages_of(path, data)))
