"""Archives, pickled weights, NeMo's checkpoints, safetensors and pipelines' folders."""

import dataclasses
import gzip
import io
import math
import tarfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

import torch
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from sd_quant.checkpoints.diffusers_pipeline import components_of, open_networks, open_other, open_pipeline, read_index
from sd_quant.checkpoints.nemo import open_nemo, write_nemo
from sd_quant.checkpoints.unopened import INDEX
from sd_quant.files.archive import open_members, whole_file
from sd_quant.files.checks import check_finite
from sd_quant.files.safetensors import read_safetensors
from sd_quant.files.tensors import Weights, size_of
from sd_quant.files.torch_weights import stored_tensors
from sd_quant.models.checkpoint import denoiser_part
from sd_quant.models.sdxl_nemo import TextShape, build_modules

from .. import small_nemo, zoo
from ..zoo.families import TINY
from .harness import Reader
from .mutations import Files, byte_edits, damages, decisive, digest, digests, edited, ways


def tar_of(members: Mapping[str, bytes], form: int, mtime: float = 0) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size, header.mtime = len(content), mtime
            archive.addfile(header, io.BytesIO(content))
    return target.getvalue()


def headers_of(archive: bytes) -> list[tuple[int, int]]:
    """Where the blocks of a sound tar are that say what follows, and its end."""
    end = -(-len(archive.rstrip(b"\0")) // 512) * 512
    starts = [start for start in range(0, end, 512) if archive[start + 257 : start + 262] == b"ustar"]
    return [*((start, start + 512) for start in starts), (end, end + 1024)]


def with_checksums(archive: bytes, headers: list[tuple[int, int]]) -> bytes:
    """Right ones in all headers, so that what else was changed there is looked at."""
    content = bytearray(archive)
    for start, stop in headers:
        block = content[start:stop]
        if len(block) == 512 and any(block):
            block[148:156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    return bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: bytes(member.read(0, member.size)) for name, member in open_members(folder / "a.nemo").items()}


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

    recipes = st.tuples(st.integers(0, 1), byte_edits, st.booleans(), st.sampled_from([0, 0, 0, 1, 2]))
    return Reader("archive", {"a.nemo": plain}, recipes, mutate, contents, check)


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


def weights() -> Reader:
    sound = weights_file()

    def check(folder: Path, found: dict[str, tuple]) -> None:
        """torch finds the same."""
        loaded = torch.load(folder / "a.ckpt", weights_only=True)
        assert {name: digest(tensor) for name, tensor in loaded.items()} == found

    def read(folder: Path) -> dict[str, tuple]:
        return digests(stored_tensors(whole_file(folder / "a.ckpt")))

    return Reader("weights", {"a.ckpt": sound}, read=read, check=check, weight=40, **damages({"a.ckpt": sound}))


def nemo(scratch: Path) -> Reader:
    torch.manual_seed(0)
    config = small_nemo.config(num_res_blocks=1)
    config["first_stage_config"]["ddconfig"] |= {"ch": 32, "ch_mult": [1], "num_res_blocks": 1}
    text = TextShape(vocab_size=20, width=64, layers=3, context=8, mlp_width=16)
    modules = build_modules(config, text, dataclasses.replace(text, projection=32))
    write_nemo(scratch / "a.nemo", config, modules, torch.float16)
    sound = (scratch / "a.nemo").read_bytes()
    members = contents(scratch)
    stored, headers = members["model_weights.ckpt"], headers_of(sound)
    begin = sound.index(b"PK")
    hot = [*headers, (512, headers[1][0]), *((begin + start, begin + stop) for start, stop in decisive(stored))]

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

    def packed(files: Files) -> Files:
        return {"a.nemo": tar_of(members | files, tarfile.GNU_FORMAT)}

    inside = damages(members, packed)
    whole = (byte_edits, lambda edits: {"a.nemo": edited(sound, edits, hot)})
    ways_in = ways(whole, (inside["recipes"], inside["mutate"]))
    return Reader("nemo", {"a.nemo": sound}, read=opened, check=check, weight=5, **ways_in)


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

    def read(folder: Path) -> dict[str, tuple]:
        return digests(read_safetensors(whole_file(folder / "a.safetensors")))

    files = {"a.safetensors": sound}
    return Reader("safetensors", files, read=read, check=check, weight=30, **damages(files))


def pipeline(scratch: Path, families: Collection[str] = TINY) -> Reader:
    """A folder of each family, which it makes."""

    def opened(folder: Path, family: str, damaged: str) -> tuple:
        checkpoint = open_pipeline(folder, family)
        parts = {name: (part.contract.inputs, part.contract.outputs) for name, part in checkpoint.parts().items()}
        weights = checkpoint.components[denoiser_part(checkpoint).component]
        return shapes_of(checkpoint.components), digest(weights[min(weights)]), repr(parts)

    return of_folders("pipeline", {name: TINY[name] for name in families}, opened, scratch)


OBSERVED = ("LuminaPipeline", "SanaPipeline", "StableDiffusionPipeline", "WanPipeline")


def observed(scratch: Path, names: Collection[str] = OBSERVED) -> Reader:
    """Folders of any pipeline, as far as is known before it runs: the index, and the component that was damaged."""

    def opened(folder: Path, name: str, damaged: str) -> tuple:
        kind, index = read_index(folder)
        described = components_of(folder, kind, index)
        wanted = {name: each for name, each in described.items() if damaged in (name, INDEX)}
        _, weights = open_networks(folder, wanted)
        others = [type(open_other(folder, each)).__name__ for each in wanted.values() if not each.is_network]
        return shapes_of(weights), {name: digests(each.tensors) for name, each in weights.items()}, others

    return of_folders("observed", {name: partial(zoo.write, name) for name in names}, opened, scratch)


def shapes_of(components: Mapping[str, Weights]) -> dict:
    return {
        (component, name): (tensor.dtype, tensor.shape)
        for component, weights in components.items()
        for name, tensor in weights.tensors.items()
    }


def of_folders(name: str, writers: Mapping[str, Callable], opened: Callable[..., tuple], scratch: Path) -> Reader:
    """``writers`` make sound folders; ``opened`` gets one, its kind, and which of its folders or files was damaged."""
    for kind, write in writers.items():
        write(scratch / kind)
    paths = [path for kind in writers for path in sorted((scratch / kind).rglob("*")) if path.is_file()]
    files = {str(path.relative_to(scratch)): path.read_bytes() for path in paths}

    def marked(damaged: Files) -> Files:
        return {"damaged": min(damaged).encode()} | damaged

    def read(folder: Path) -> tuple:
        kind, damaged = Path((folder / "damaged").read_text()).parts[:2]
        return opened(folder / kind, kind, damaged)

    def check(folder: Path, found: tuple) -> None:
        """As many weights as the sound one, from files that hold as many bytes."""
        kind = Path((folder / "damaged").read_text()).parts[0]
        total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in found[0].values())
        assert total <= sum(path.stat().st_size for path in (folder / kind).rglob("*.safetensors"))

    read_by_us = {path: data for path, data in files.items() if path.endswith((".json", ".safetensors"))}
    sound = files | {"damaged": f"{min(writers)}/{INDEX}".encode()}
    return Reader(name, sound, read=read, check=check, weight=12, **damages(read_by_us, marked))
