"""Checkpoints from strangers: what writes each, and words of its refusal."""

import copy
import gzip
import io
import json
import math
import os
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sd_quant.checkpoints.nemo import write_archive
from sd_quant.checkpoints.nemo_networks import NemoCheckpoint
from sd_quant.files.archive import open_members
from sd_quant.files.tensors import lazy
from sd_quant.names import nemo as nemo_keys
from sd_quant.places import HOME

FIRST = nemo_keys.PREFIX["unet"] + "input_blocks.0.0.weight"
MINI = HOME / "checkpoints/sdxl_mini.nemo"
ONE_CALL = ("calib_size=1", "quantize.n_steps=1", "cache.dir=null", "export_trt=none")
HARMLESS = ("./model_config.yaml", b"{}")
MERGES = "\n".join(
    f"a{level}: &a{level} {{" + (f"<<: [{', '.join([f'*a{level - 1}'] * 9)}]" if level else "k: 1") + "}"
    for level in range(9)
)


@dataclass(frozen=True)
class Place:
    """Where a file is written, with a canary in reach of whatever it may start, and a checkpoint that is sound."""

    path: Path
    canary: Path
    whole: NemoCheckpoint

    def write(self, config: bytes | None = None, weights: bytes | None = None) -> None:
        """An archive with the sound checkpoint's config and weights where no others are given."""
        if config is None:
            config = json.dumps(self.whole.model_config).encode()  # JSON is YAML
        if weights is None:
            member = open_members(self.whole.path)["model_weights.ckpt"]
            weights = bytes(member.read(0, member.size))
        self.path.write_bytes(tar(("./model_config.yaml", config), ("./model_weights.ckpt", weights)))

    def write_state(self, change: Callable[[dict], object], config: dict | None = None) -> None:
        state = self.whole.state()
        change(state)
        write_archive(self.path, config or self.whole.model_config, state)


class Malicious:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def pickled(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def tar(*members: tuple[str, bytes], **fields) -> bytes:
    """The last member has the ``fields``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if (name, content) == members[-1]:
                for field, value in fields.items():
                    setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def header_that_claims(size: int) -> bytes:
    info = tarfile.TarInfo("./model_weights.ckpt")
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(10_000)


def sparse() -> bytes:
    """GNU's old form of 8 GiB, of which nothing is stored."""
    info = tarfile.TarInfo("./model_weights.ckpt")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0" % (2**33 - 1) + b"%011o\0" % 0  # one piece, and it is empty
    header[483:495] = b"%011o\0" % (2**33 - 1)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def bomb() -> bytes:
    """A GiB of zeros in five MB."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as stream:
        stream.write(header_that_claims(2**30))
        for _ in range(64):
            stream.write(bytes(2**24))
    return packed.getvalue()


def number_of_base_sixty(at: Place) -> None:
    text = json.dumps(at.whole.model_config | {"scale_factor": 17})
    at.write(config=text.replace('"scale_factor": 17', '"scale_factor": ' + "1:" * 400_000 + "1").encode())


def wide_without_end(at: Place) -> None:
    config = copy.deepcopy(at.whole.model_config)
    config["unet_config"] |= {"model_channels": "x", "channel_mult": [4_000_000_000] * 2}
    at.write(config=json.dumps(config).encode())


def flipped(at: Place) -> None:
    """One bit of the last weights."""
    content = bytearray(at.whole.path.read_bytes())
    content[int(0.9 * len(content))] ^= 1
    at.path.write_bytes(content)


def one_storage(at: Place) -> None:
    """Every weight of the UNet is the first numbers of one tensor, by torch itself, which stores it once."""
    tensors = {key: tensor.read() for key, tensor in at.whole.state().items()}
    shapes = {key: each.shape for key, each in tensors.items() if key.startswith(nemo_keys.PREFIX["unet"])}
    numbers = torch.zeros(max(map(math.prod, shapes.values())))
    views = {key: numbers[: math.prod(shape)].view(shape) for key, shape in shapes.items()}
    at.write(weights=pickled(tensors | views))


def targets_everywhere(at: Place) -> None:
    """A config in which every section says what to call."""

    def spread(node: object) -> object:
        if not isinstance(node, dict):
            return node
        calls = {"_target_": "os.mkdir", "target": "os.mkdir", "path": str(at.canary)}
        return {key: spread(value) for key, value in node.items()} | calls

    at.write_state(first_weight(), spread(at.whole.model_config))


def first_weight(value: float | None = None, factor: float = 1.0) -> Callable[[dict], object]:
    def change(state: dict) -> None:
        tensor = state[FIRST].read().float() * factor
        if value is not None:
            tensor.view(-1)[5] = value
        state[FIRST] = lazy(tensor)

    return change


def in_int8(state: dict) -> None:
    state[FIRST] = lazy(state[FIRST].read().to(torch.int8))


def without_a_block(state: dict) -> None:
    for key in [key for key in state if ".input_blocks.4." in key]:
        del state[key]
    state["model.stranger\x1b[2J"] = lazy(torch.ones(1))
    state[FIRST] = lazy(torch.ones(3, 3))


def holding(content: Callable[[], bytes] | bytes) -> Callable[[Place], object]:
    return lambda at: at.path.write_bytes(content if isinstance(content, bytes) else content())


def with_member(**fields) -> Callable[[Place], object]:
    return holding(tar(HARMLESS, ("./x", b""), **fields))


NAN = f"{FIRST!r} of the unet holds 1 NaN"
CASES: dict[str, tuple[Callable[[Place], object], str]] = {  # what writes it, and words of the refusal
    "cut in a member": (lambda at: at.path.write_bytes(MINI.read_bytes()[:1_000_000]), "model_weights.ckpt"),
    "cut between members": (holding(tar(HARMLESS)[:1024]), "end-of-archive"),
    "a name that leads out": (holding(tar(HARMLESS, ("../canary", b"1"))), "points outside"),
    "a symbolic link": (with_member(type=tarfile.SYMTYPE, linkname="/etc"), "symbolic link"),
    "a pipe": (with_member(type=tarfile.FIFOTYPE), "tar type"),
    "a member twice": (holding(tar(HARMLESS, HARMLESS)), "twice"),
    "a tebibyte that is claimed": (holding(header_that_claims(2**40)), "1099511627776"),
    "gigabytes of holes": (holding(sparse), "tar type"),
    "a gzip bomb": (holding(bomb), "16 times its size"),
    "a pickle that runs": (lambda at: at.write(weights=pickled({"a": Malicious(at.canary)})), "was not run"),
    "a pickle alone that runs": (lambda at: at.write(weights=pickle.dumps({"a": Malicious(at.canary)})), "torch.save"),
    "garbage for weights": (lambda at: at.write(weights=b"\x00garbage" * 1000), "model_weights.ckpt"),
    "no weights at all": (lambda at: at.write(weights=b""), "model_weights.ckpt"),
    "a config that runs": (
        lambda at: at.write(config=f"a: !!python/object/apply:os.mkdir [{at.canary}]".encode()), "not plain YAML",
    ),
    "a config of nothing but a target": (
        lambda at: at.write(config=f"_target_: os.mkdir\npath: {at.canary}\ntarget: os.mkdir".encode()),
        "does not describe an SDXL",
    ),
    "numbers of base sixty": (number_of_base_sixty, "scale_factor is '1:1:1"),
    "merge keys that multiply": (lambda at: at.write(config=MERGES.encode()), "entries"),
    "a width that is text, times billions": (
        wide_without_end, "unet_config.model_channels is 'x', expected a whole number",
    ),
    "weights that share one storage": (one_storage, "share what is stored"),
    "a flipped bit": (flipped, "checksum"),
    "targets in every section": (targets_everywhere, "target is 'os.mkdir', expected MegatronDiffusionEngine"),
    "keys that are missing, unknown and misshapen": (lambda at: at.write_state(without_a_block), " missing: "),
    "weights in int8": (lambda at: at.write_state(in_int8), "torch.int8"),
    "a weight that is NaN": (lambda at: at.write_state(first_weight(float("nan"))), NAN),
    "an activation that is not finite": (lambda at: at.write_state(first_weight(factor=1e38)), "not finite"),
}  # fmt: skip


def code_of(name: str) -> int:
    """The exit code: that of a bad file, but of a job that fails where only its activations show it."""
    return 1 if name == "an activation that is not finite" else 3
