"""Archives, pickled weights, NeMo's checkpoints, safetensors and pipelines' folders."""

import dataclasses
import gzip
import io
import json
import math
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath

import torch
import yaml
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from sd_quant.checkpoints.archive import open_members, whole_file
from sd_quant.checkpoints.checks import check_finite
from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.checkpoints.nemo import open_nemo, write_nemo
from sd_quant.checkpoints.safetensors_file import read_safetensors
from sd_quant.checkpoints.tensors import size_of
from sd_quant.checkpoints.torch_weights import stored_tensors
from sd_quant.models.checkpoint import denoiser_part
from sd_quant.models.sdxl_nemo import TextShape, build_modules

from ..pipelines import TINY
from .harness import Reader
from .mutations import (
    LARGE,
    byte_edits,
    changed,
    document_edits,
    edited,
    pickle_edits,
    repickled,
    to_json,
    to_yaml,
    with_pickle,
)
from .shared import YAML_VALUES, Files, damaged_safetensors, described, digest, digests

MINI_CONFIG = Path(__file__).parents[2] / "examples/sdxl_mini/model_config.yaml"


def tar_of(members: Mapping[str, bytes], form: int, mtime: float = 0) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size, header.mtime = len(content), mtime
            archive.addfile(header, io.BytesIO(content))
    return target.getvalue()


def headers_of(archive: bytes) -> list[tuple[int, int]]:
    """Where the blocks of a sound tar are that are no content."""
    found, position = [], 0
    while any(archive[position : position + 512]):
        size = tarfile.TarInfo.frombuf(archive[position : position + 512], "utf-8", "strict").size
        found.append((position, position + 512))
        position += 512 + -(-size // 512) * 512
    return [*found, (position, min(position + 1024, len(archive)))]


def with_checksums(archive: bytes, headers: list[tuple[int, int]]) -> bytes:
    """Right ones in all headers, so that what else was changed there is looked at."""
    content = bytearray(archive)
    for start, stop in headers:
        block = content[start:stop]
        if len(block) == 512 and any(block):
            block[148:156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    return bytes(content)


def archives() -> Reader:
    members = {"./model_config.yaml": b"a: 1\n" * 20, "./model_weights.ckpt": bytes(range(256)) * 3}
    plain, extended = tar_of(members, tarfile.GNU_FORMAT), tar_of(members, tarfile.PAX_FORMAT, 1.5)
    sound = [plain, extended]

    def mutate(recipe: tuple) -> Files:
        kind, edits, repaired, packed = recipe
        data = sound[kind]
        headers = headers_of(data)
        data = edited(data, edits, headers, sound[1 - kind]) if packed < 2 else data
        if repaired:
            data = with_checksums(data, headers)
        if packed:
            data = gzip.compress(data, mtime=0)
        return {"a.nemo": edited(data, edits, [(0, 12), (len(data) - 8, len(data))]) if packed == 2 else data}

    def check(folder: Path, found: dict[str, bytes]) -> None:
        """tarfile finds the same; an archive of nothing, which it refuses, is for open_nemo to refuse."""
        if not found:
            return
        with tarfile.open(folder / "a.nemo") as archive:
            files = [member for member in archive.getmembers() if member.isfile()]
            assert {str(PurePosixPath(each.name)): archive.extractfile(each).read() for each in files} == found

    def contents(path: Path) -> dict[str, bytes]:
        return {name: bytes(member.read(0, member.size)) for name, member in open_members(path).items()}

    recipes = st.tuples(st.integers(0, 1), byte_edits, st.booleans(), st.sampled_from([0, 0, 0, 1, 2]))
    return Reader(
        "archive", {"a.nemo": plain}, recipes, mutate, lambda folder: contents(folder / "a.nemo"), check, weight=20
    )


def weights_file() -> bytes:
    target = io.BytesIO()
    grid = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    torch.save(
        {
            "a.weight": grid, "a.bias": torch.tensor([0.5, -1.5], dtype=torch.float16), "transposed": grid.t(),
            "scalar": torch.tensor(3.0, dtype=torch.bfloat16), "part": grid[1:, 1:3], "none": torch.empty(0, 3),
            "index": torch.arange(5),
        },
        target,
    )  # fmt: skip
    return target.getvalue()


def decisive(archive: bytes) -> list[tuple[int, int]]:
    """Where a zip file of torch.save has its pickle, and its directory."""
    start = archive.index(b"\x80\x02")
    directory = archive.index(b"PK\x01\x02")
    return [(0, 64), (start, archive.index(b"PK", start)), (directory, len(archive))]


either = st.one_of(st.tuples(st.just("bytes"), byte_edits), st.tuples(st.just("pickle"), pickle_edits))


def damaged_weights(archive: bytes, recipe: tuple) -> bytes:
    kind, edits = recipe
    if kind == "bytes":
        return edited(archive, edits, decisive(archive))
    return with_pickle(archive, partial(repickled, edits=edits))


def weights() -> Reader:
    sound = weights_file()

    def check(folder: Path, found: dict[str, tuple]) -> None:
        """torch finds the same."""
        loaded = torch.load(folder / "a.ckpt", weights_only=True)
        assert {name: digest(tensor) for name, tensor in loaded.items()} == found

    return Reader(
        "weights",
        {"a.ckpt": sound},
        either,
        lambda recipe: {"a.ckpt": damaged_weights(sound, recipe)},
        lambda folder: digests(stored_tensors(whole_file(folder / "a.ckpt"))),
        check,
        weight=40,
    )


def tiny_config() -> dict:
    config = yaml.safe_load(MINI_CONFIG.read_text())
    config["unet_config"] |= {
        "adm_in_channels": 32 + 6 * 8, "model_channels": 32, "channel_mult": [1, 2], "attention_resolutions": [2],
        "transformer_depth": [1, 1], "context_dim": 128, "num_res_blocks": 1,
    }  # fmt: skip
    config["first_stage_config"]["ddconfig"] |= {"ch": 32, "ch_mult": [1], "num_res_blocks": 1}
    for index in (2, 3, 4):
        config["conditioner_config"]["emb_models"][index]["emb_model"]["outdim"] = 8
    return config


def nemo(scratch: Path) -> Reader:
    torch.manual_seed(0)
    config = tiny_config()
    text = TextShape(vocab_size=20, width=64, layers=2, context=8, mlp_width=16)
    modules = build_modules(config, text, dataclasses.replace(text, projection=32))
    write_nemo(scratch / "a.nemo", config, modules, torch.float16)
    sound = (scratch / "a.nemo").read_bytes()
    members = {name: bytes(each.read(0, each.size)) for name, each in open_members(scratch / "a.nemo").items()}
    stored, headers = members["model_weights.ckpt"], headers_of(sound)
    begin = sound.index(b"PK")
    hot = [*headers, (512, headers[1][0]), *((begin + start, begin + stop) for start, stop in decisive(stored))]

    def mutate(recipe: tuple) -> Files:
        kind, edits = recipe
        if kind == "archive":
            return {"a.nemo": edited(sound, edits, hot)}
        changes = {
            "config": lambda: {"model_config.yaml": to_yaml(changed(config, edits, YAML_VALUES))},
            "text": lambda: {"model_config.yaml": edited(members["model_config.yaml"], edits)},
            "weights": lambda: {"model_weights.ckpt": damaged_weights(stored, edits)},
        }
        return {"a.nemo": tar_of(members | changes[kind](), tarfile.GNU_FORMAT)}

    def opened(folder: Path) -> tuple:
        checkpoint = open_nemo(folder / "a.nemo")
        for source in checkpoint.components.values():
            check_finite(source)
        parts = {name: (part.contract.inputs, part.contract.outputs) for name, part in checkpoint.parts().items()}
        first = digest(checkpoint.components["unet"]["conv_in.weight"])
        return {name: digests(source.tensors) for name, source in checkpoint.components.items()}, first, repr(parts)

    def check(folder: Path, found: tuple) -> None:
        """All finite, of a dtype that weights have, and no more bytes than the file holds."""
        checkpoint = open_nemo(folder / "a.nemo")
        for source in checkpoint.components.values():
            for tensor in source.tensors.values():
                assert tensor.read().isfinite().all() and tensor.dtype.is_floating_point
            assert size_of(source.tensors.values()) <= (folder / "a.nemo").stat().st_size

    recipes = st.one_of(
        st.tuples(st.just("archive"), byte_edits),
        st.tuples(st.just("config"), document_edits),
        st.tuples(st.just("text"), byte_edits),
        st.tuples(st.just("weights"), either),
    )
    return Reader("nemo", {"a.nemo": sound}, recipes, mutate, opened, check, weight=7, quick=10)


def safetensors() -> Reader:
    tensors = {
        "b": torch.tensor(2, dtype=torch.int64), "a.weight": torch.arange(12.0).reshape(3, 4),
        "half": torch.ones(5, dtype=torch.float16), "none": torch.empty(0, 3),
        "eight": torch.ones(3).to(torch.float8_e4m3fn),
    }  # fmt: skip
    sound = save_safetensors(tensors, {"format": "pt"})

    def check(folder: Path, found: dict[str, tuple]) -> None:
        """The library of that name finds the same, where it takes the file at all."""
        try:
            loaded = load_safetensors((folder / "a.safetensors").read_bytes())
        except (SafetensorError, ValueError, KeyError):
            assert sum(math.prod(shape) for _, shape, _ in found.values()) <= 64 * len(sound)
        else:
            assert {name: digest(tensor) for name, tensor in loaded.items()} == found

    return Reader(
        "safetensors",
        {"a.safetensors": sound},
        described,
        lambda recipe: {"a.safetensors": damaged_safetensors(sound, recipe)},
        lambda folder: digests(read_safetensors(whole_file(folder / "a.safetensors"))),
        check,
        weight=30,
    )


def pipeline(scratch: Path) -> Reader:
    """A folder of each family; ``family`` says which one is opened."""
    for name, write in TINY.items():
        write(scratch / name)
    paths = {name: sorted(path for path in (scratch / name).rglob("*") if path.is_file()) for name in TINY}
    files = {str(path.relative_to(scratch)): path.read_bytes() for found in paths.values() for path in found}
    sound = files | {"family": b"pixart"}

    def mutate(recipe: tuple) -> Files:
        family, which, (kind, edits), number = recipe
        suffix = ".safetensors" if which == "weights" else ".json"
        names = [name for name in files if name.startswith(f"{family}/") and name.endswith(suffix)]
        name, other = names[number % len(names)], names[number // 7 % len(names)]
        if which == "weights":
            content = damaged_safetensors(files[name], (kind, edits))
        elif kind == "bytes":
            content = edited(files[name], edits, other=files[other])
        else:
            content = to_json(changed(json.loads(files[name]), edits))
        return {"family": family.encode(), name: content}

    def opened(folder: Path) -> tuple:
        family = (folder / "family").read_text()
        checkpoint = open_pipeline(folder / family, family)
        parts = {name: (part.contract.inputs, part.contract.outputs) for name, part in checkpoint.parts().items()}
        shapes = {
            (component, name): (tensor.dtype, tensor.shape)
            for component, weights in checkpoint.components.items()
            for name, tensor in weights.tensors.items()
        }
        weights = checkpoint.components[denoiser_part(checkpoint).component]
        return shapes, digest(weights[min(weights)]), repr(parts)

    def check(folder: Path, found: tuple) -> None:
        """As many weights as the sound one, from files that hold as many bytes."""
        family = (folder / "family").read_text()
        total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in found[0].values())
        assert total <= sum(path.stat().st_size for path in (folder / family).rglob("*.safetensors"))

    recipes = st.tuples(
        st.sampled_from(sorted(TINY)), st.sampled_from(["weights", "text", "text", "text"]), described, LARGE
    )
    return Reader("pipeline", sound, recipes, mutate, opened, check, weight=12, quick=25)
