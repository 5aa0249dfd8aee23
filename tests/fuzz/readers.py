"""Every reader of files that come from strangers, a small sound input for each, and how it is damaged."""

import dataclasses
import gzip
import hashlib
import io
import json
import math
import struct
import tarfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
import torch
import yaml
from hypothesis import strategies as st
from onnx import TensorProto, helper
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

from sd_quant.cache import MANIFEST, sound
from sd_quant.calibration.collected_elsewhere import read_statistics
from sd_quant.calibration.prompts import read_prompts
from sd_quant.calibration.store import Entries, content_digest, pack
from sd_quant.checkpoints.archive import open_members, whole_file
from sd_quant.checkpoints.checks import check_finite
from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.checkpoints.lora import read_lora
from sd_quant.checkpoints.lora_names import places_by_name
from sd_quant.checkpoints.nemo import open_nemo, write_nemo
from sd_quant.checkpoints.safetensors_file import read_safetensors
from sd_quant.checkpoints.tensors import LazyTensor, Readable, size_of
from sd_quant.checkpoints.torch_weights import stored_tensors
from sd_quant.config import Model, run_model
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.engines.tensorrt.plan import RTX_HEADER, PlanReport, describe_plan, read_record, record_path
from sd_quant.errors import ArtifactError
from sd_quant.inference.image_files import FORMATS
from sd_quant.inference.latents import read_latents
from sd_quant.inference.source_images import read_source
from sd_quant.knobs import read
from sd_quant.models.checkpoint import denoiser_part
from sd_quant.models.sdxl import unet_part
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, TextShape, build_modules
from sd_quant.quantization.statistics import LayerStatistics, Sample, Statistics
from sd_quant.report.rebuild import rebuild
from sd_quant.report.record import DONE
from sd_quant.report.summary import markdown, read_sweep, rows
from sd_quant.report.table import run_table

from ..pipelines import TINY
from .harness import Reader
from .mutations import (
    LARGE,
    VALUES,
    YAML_PLANTS,
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
from .of_other_folders import other_folders
from .of_sdnq_and_torchao import sdnq_and_torchao
from .of_single_files import single_files

MINI_CONFIG = Path(__file__).parents[2] / "examples/sdxl_mini/model_config.yaml"
Files = dict[str, bytes]
YAML_VALUES = [*VALUES, *YAML_PLANTS]


def make_readers(scratch: Path) -> list[Reader]:
    """With their sound inputs made below ``scratch``."""
    scratch.mkdir(parents=True, exist_ok=True)
    return [
        archives(),
        weights(),
        nemo(scratch),
        safetensors(),
        pipeline(scratch),
        prompts(),
        statistics(scratch),
        records(),
        report(),
        configuration(),
        onnx_graph(),
        noise(),
        lora(),
        pictures(),
        plan_record(),
        cache_entry(),
        *single_files(scratch),
        *sdnq_and_torchao(),
        *other_folders(scratch / "folders", described, damaged_safetensors, digest),
    ]


def digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """What tells two tensors apart, of any dtype, NaN included."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(content).hexdigest()


def digests(tensors: Mapping[str, Readable]) -> dict[str, tuple]:
    return {name: digest(tensor.read()) for name, tensor in tensors.items()}


# Archives


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


# Safetensors and folders of them


def header_of(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: Any, content: bytes) -> bytes:
    text = to_json(header)
    return struct.pack("<Q", len(text)) + text + content


def decisive_header(data: bytes) -> list[tuple[int, int]]:
    return [(0, 8), (8, 8 + int.from_bytes(data[:8], "little"))]


described = st.one_of(st.tuples(st.just("bytes"), byte_edits), st.tuples(st.just("header"), document_edits))


def damaged_safetensors(data: bytes, recipe: tuple) -> bytes:
    kind, edits = recipe
    if kind == "bytes":
        return edited(data, edits, decisive_header(data))
    header, content = header_of(data)
    return with_header(changed(header, edits), content)


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


# Prompts


def prompts() -> Reader:
    text = "a cat\n\n  ein Kätzchen 🐈 \r\n../../etc/passwd\na dog, 35 mm, 1024 x 1024\n".encode()
    table = 'id\timage_id\tcaption\n1\t42\ta cat\n2\t43\t"a ""big"" dog"\n\n3\t44\tein Kätzchen 🐈\n'.encode()
    files = {"prompts.txt": b"\xef\xbb\xbf" + text, "prompts.tsv": table}

    def mutate(recipe: tuple) -> Files:
        name, edits = recipe
        other = files["prompts.tsv" if name == "prompts.txt" else "prompts.txt"]
        return {name: edited(files[name], edits, other=other)}

    def check(folder: Path, found: list[list[str]]) -> None:
        for prompts in found:
            assert prompts and all(prompt == prompt.strip() and 0 < len(prompt) <= 2000 for prompt in prompts)
            assert not any("\n" in prompt for prompt in prompts)
        lines = (folder / "prompts.txt").read_bytes().decode("utf-8-sig").split("\n")
        assert found[0] == [line.strip() for line in lines if line.strip()]
        rest = (folder / "prompts.tsv").read_text("utf-8")
        assert all(prompt.replace('"', "") in rest.replace('"', "") for prompt in found[1])

    return Reader(
        "prompts",
        files,
        st.tuples(st.sampled_from(sorted(files)), byte_edits),
        mutate,
        lambda folder: [read_prompts(folder / name) for name in ("prompts.txt", "prompts.tsv")],
        check,
        weight=20,
    )


# Statistics

STEPS = 2
SAMPLING = {"steps": STEPS, "guidance_scale": 5.0, "height": 64, "width": 64, "batch_size": 1, "seed": 42}
ORIGIN = {"checkpoint": "a" * 64, "sampling": SAMPLING, "device": "cuda", "kept": [128, 8], "versions": {"torch": "2"}}


def layers() -> dict[str, nn.Module]:
    with torch.device("meta"):
        return {"down.to_q": nn.Linear(4, 3), "down.conv1": nn.Conv2d(1, 2, 3)}


def some_statistics(segment: range) -> Statistics:
    """Of the layers, and of inputs as this UNet's are."""
    random = torch.Generator().manual_seed(segment.stop)

    def sample(count: int, *shape: int, dtype: torch.dtype) -> Sample:
        values = torch.randn(count, *shape, generator=random).to(dtype)
        return Sample(values, torch.rand(count, generator=random, dtype=torch.float64).sort().values)

    half, single = torch.float16, torch.float32
    linear = LayerStatistics("linear", torch.rand(STEPS, 4, generator=random), sample(3, 4, dtype=half))
    conv = LayerStatistics("conv", torch.rand(segment.stop, STEPS, generator=random), sample(3, 9, dtype=half))
    inputs = {"x": (4, 8, 8), "timesteps": (), "context": (80, 6), "y": (5,)}
    calls = {name: sample(1, 2, *shape, dtype=single) for name, shape in inputs.items()}
    return Statistics({"down.to_q": linear, "down.conv1": conv}, calls)


def statistics(scratch: Path) -> Reader:
    entries = Entries(scratch, ORIGIN, ["a cat", "ein Kätzchen 🐈"])
    for segment in (range(0, 1), range(1, 2)):
        entries.write(segment, some_statistics(segment))
    files = {path.name: path.read_bytes() for path in sorted(entries.folder.iterdir())}
    sizes = {"in_channels": 4, "cross_attention_dim": 6, "projection_class_embeddings_input_dim": 5}
    contract = unet_part(sizes | {"addition_time_embed_dim": 0}, CONTEXT_TOKENS, "nemo").contract
    fitting = layers()

    def mutate(recipe: tuple) -> Files:
        number, (kind, edits), signed = recipe
        name = sorted(files)[number]
        data = files[name]
        if kind == "bytes":
            return {name: edited(data, edits, decisive_header(data), files[sorted(files)[1 - number]])}
        header, content = header_of(data)
        if kind == "header":
            return {name: with_header(changed(header, edits), content)}
        known = header["__metadata__"]
        if kind == "content":
            content = edited(content, edits)
        else:
            known[kind] = to_json(changed(json.loads(known[kind]), edits)).decode()
        if signed and (kind != "content" or len(content) == len(header_of(data)[1])):
            tensors = load_safetensors(with_header(header_of(data)[0], content))
            known["digest"] = content_digest(known["origin"], known["prompts"], tensors)
        return {name: with_header(header, content)}

    def check(folder: Path, found: dict[str, tuple]) -> None:
        """Of the same layers and inputs, finite, no range below zero."""
        tensors = pack(read_statistics(folder, fitting, contract, {"form": 2, **ORIGIN}, 2))
        assert tensors.keys() == sound.keys() and all(tensor.isfinite().all() for tensor in tensors.values())
        assert all((tensor >= 0).all() for name, tensor in tensors.items() if name.endswith("amax"))

    def loaded(folder: Path) -> dict[str, tuple]:
        found = pack(read_statistics(folder, fitting, contract, {"form": 2, **ORIGIN}, 2))
        return {name: digest(tensor) for name, tensor in found.items()}

    sound = loaded(entries.folder)
    kinds = st.one_of(
        described,
        st.tuples(st.sampled_from(["origin", "prompts"]), document_edits),
        st.tuples(st.just("content"), byte_edits),
    )
    recipes = st.tuples(st.integers(0, 1), kinds, st.sampled_from([True, True, True, False]))
    return Reader("statistics", files, recipes, mutate, loaded, check, weight=20)


# Records


def a_record(decibels: float, speedup: float) -> dict:
    """As ``quantize.py`` leaves it, with everything in it that a table, a plot or a page reads."""
    full = {"p50_ms": 20.0, "mean_ms": 21.0, "n": 5, "samples_ms": [20.0, 19.0, 21.0, 20.0, 20.5]}
    times = {
        "full_precision": full, "speedup": speedup, "speedup_interval": [speedup - 0.1, speedup + 0.1],
        "quantized": {"p50_ms": 20 / speedup, "samples_ms": [each / speedup for each in reversed(full["samples_ms"])]},
    }  # fmt: skip
    rounds = {"together": True, "stopped": "budget", "others": 0.3, "steal": None, "reference_spread": 0.1}
    image = {"full_precision": {"p50_ms": 60.0, "rest": 0.5}}
    none = {"value": None, "reason": "not quantized"}
    return {
        "schema_version": 1, "status": "done", "overrides": ["alpha=0.5", "quant_level=3"],
        "knobs": {
            "format": "int8", "quant_level": 3.0, "alpha": 0.8, "percentile": 1.0, "calib_size": 32, "n_steps": 20,
            "model": {"family": "sdxl", "path": "checkpoints/small.nemo"},
            "infer": {"engine": "openvino", "batch_size": 1, "width": 64, "height": 64, "steps": 20},
            "verdict": {"enough_db": 40.0, "time_of_a_db": 0.02, "confidence": 0.95},
        },
        "denoiser": {"part": "unet_xl", "samples_a_picture": 2},
        "prompts": ["a cat", "a dog"], "simulated": False, "simulated_because": None,
        "sizes_bytes": {
            "unet_xl": {"onnx_full_precision": 4000000, "onnx_quantized": 2e6, "plan": 3, "weights_fp32": 8000000},
            "vae": {"onnx_full_precision": 70, "onnx_quantized": none, "plan": none, "weights_fp32": 69},
        },
        "plans": {"unet_xl": {"targets": ["SM89", "SM120"]}},
        "latency": {
            "torch": {"image": {"1": {"full_precision": {"p50_ms": 80.0}}}},
            "openvino": {
                "unet_xl": {"2": {**times, "rounds": rounds}},
                "vae": {
                    "1": {"full_precision": {"p50_ms": 5.0}, "quantized": {"p50_ms": None, "reason": "not quantized"}}
                },
                "image": {"1": {**times, **image}},
            },
        },
        "fidelity": {
            "psnr": {"mean": decibels, "min": decibels - 1, "values": [decibels, decibels - 1], "reason": None},
            "ssim": {"mean": 0.98, "min": 0.97, "values": [0.98, 0.98]},
            "lpips": {"mean": 0.01, "max": 0.02, "values": [0.01, 0.01]},
            "latent_sqnr_db": [decibels, decibels - 5, None], "latent_sqnr_reason": "identical",
            "frechet_efficientnet": {"value": None, "reason": "too few"},
        },
        "parity": {"unet_xl": {"relative_error": 0.0, "tolerance": 0.01}},
        "layers": {"quantized": 7, "high_precision": 2}, "peak_memory_bytes": 10**9,
        "stages": {"calibrate": {"seconds": 1.5, "peak_memory_bytes": 5}, "export": {"seconds": 2.0}},
        "environment": {
            "versions": {"openvino": "2026.4"},
            "machine": {
                "cpu": "a processor", "usable_cores": 2, "cpu_int8": ["avx512_vnni"], "memory_bytes": 2**34, "gpus": [],
            },
        },
    }  # fmt: skip


PUBLISHED = {
    "title": "somebody", "machine": "GPU", "engine": "TensorRT", "precision": "fp16", "steps": "50",
    "resolution": "1024",
    "batches": {"1": {"framework": 3.0, "unquantized": 2.0, "quantized": 1.0}},
}  # fmt: skip
PLAN = {
    "schema_version": 1, "command": ["python", "quantize.py", "-m", "alpha=0.5,auto,1.0"], "varied": ["alpha"],
    "jobs": [
        {"name": f"alpha={alpha}", "varied": {"alpha": alpha}, "overrides": []} for alpha in (0.5, "auto", 1.0, 0.1)
    ],
    "published": PUBLISHED, "verdict": {"enough_db": 40.0, "time_of_a_db": 0.02, "confidence": 0.95},
}  # fmt: skip
PLAN["jobs"][3]["same_as"] = "alpha=0.5"
TIMING = {
    "schema_version": 1, "origin": "x", "machine": "this one", "left_out": [{"job": "alpha=auto", "reason": "<b>"}],
    "blocks": [{
        "engine": "openvino", "rest": 0.1, "image_ms": 420.0, "seconds": 3.0,
        "reference_ms": [20.0, 19.0, 21.0, 20.0, 20.5],
        "subjects": [{"sha256": "a", "jobs": ["alpha=0.5"], "samples_ms": [10.0, 9.0, 11.0, 10.0, 10.5]}],
        "rounds": {"together": True, "stopped": "narrow", "others": 0.0, "steal": 0.0, "reference_spread": 0.1},
    }],
}  # fmt: skip
RECORDS = {
    "sweep.json": PLAN,
    "timing.json": TIMING,
    "alpha=0.5/metrics.json": a_record(30.0, 2.0),
    "alpha=auto/metrics.json": a_record(35.0, 1.25),
    "alpha=1.0/failure.json": {"reason": "=cmd|' /C calc'!A0 <b>| broken", "schema_version": 1},
    "alpha=0.5/provenance.json": {"started": "2026-01-01T00:00:00+00:00", "overrides": ["a"]},
}
LAYERS = b"""name,role,format,output_error
conv_in,excluded,high precision,
up_blocks.0.resnets.0.conv1,conv,int8,0.01
"""
RECORD_FILES = {name: to_json(content) for name, content in RECORDS.items()} | {"alpha=0.5/layers.csv": LAYERS}
OF_RECORDS = st.tuples(
    st.sampled_from(["sweep.json", *["alpha=0.5/metrics.json"] * 4, *sorted(RECORDS)]),
    st.one_of(st.tuples(st.just("bytes"), byte_edits), *[st.tuples(st.just("node"), document_edits)] * 4),
)


def damaged_record(recipe: tuple) -> Files:
    name, (kind, edits) = recipe
    if kind == "bytes":
        return {name: edited(RECORD_FILES[name], edits, other=RECORD_FILES["sweep.json"])}
    return {name: to_json(changed(RECORDS[name], edits))}


def refuse_unreadable(reasons: Iterator[str]) -> None:
    """A sweep goes on without a job whose record is damaged; here that is a refusal like others."""
    for reason in reasons:
        raise ArtifactError(reason)


def unreadable(sweep: Any) -> Iterator[str]:
    return (job.reason for job in sweep.jobs if job.reason and job.reason.startswith("its record cannot be read"))


def records() -> Reader:
    def shown(folder: Path) -> tuple:
        sweep = read_sweep(folder)
        table = rows(sweep)
        texts = [run_table(job.record) for job in sweep.jobs if job.status == DONE]
        result = repr(table), texts, markdown(table, sweep.varied), sweep.command, repr(sweep.published)
        refuse_unreadable(unreadable(sweep))
        return result

    def check(folder: Path, found: tuple) -> None:
        """Numbers are numbers, and no text has letters that a terminal obeys."""
        sweep = read_sweep(folder)
        for row, job in zip(rows(sweep), sweep.jobs, strict=True):
            assert (row["job"], row["status"], row["reason"]) == (job.name, job.status, job.reason)
            values = [
                value for name, value in row.items() if name.endswith(("_db", "_ms", "speedup", "_bytes", "seconds"))
            ]
            assert all(value is None or type(value) in (int, float) and math.isfinite(value) for value in values)
        assert all(line.isprintable() for text in (*found[1], found[2]) for line in text.split("\n"))

    return Reader("records", RECORD_FILES, OF_RECORDS, damaged_record, shown, check, weight=20)


def report() -> Reader:
    """The whole report, which costs a second for its plots; layers and pictures are read by it alone."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    pictures = {
        f"alpha={alpha}/images/{side}/0000.png": picture.getvalue()
        for alpha in ("0.5", "auto")
        for side in ("full_precision", "quantized")
    }
    files = RECORD_FILES | pictures

    def mutate(recipe: tuple) -> Files:
        (name, (kind, edits)), number = recipe
        if kind == "bytes" and number % 2:
            name = ["alpha=0.5/layers.csv", *pictures][number // 2 % 5]
            return {name: edited(files[name], edits, other=LAYERS)}
        return damaged_record((name, (kind, edits)))

    def made(folder: Path) -> str:
        page = rebuild(folder).read_text(encoding="utf-8")
        refuse_unreadable(unreadable(read_sweep(folder)))
        return page

    def check(folder: Path, page: str) -> None:
        assert "<script>alert" not in page and page.count("<script") == 2

    recipes = st.tuples(OF_RECORDS, LARGE)
    return Reader("report", files, recipes, mutate, made, check, weight=1, quick=3, writes=True)


def configuration() -> Reader:
    model = {
        "family": "sdxl", "path": "a.nemo", "parts": ["unet_xl", "vae"], "io": None, "max_sequence_length": None,
        "calibration_prompts": "a.txt", "prompts": "b.txt", "width": 64, "height": 128, "recommended": {"rank": 3},
    }  # fmt: skip
    config = {"model": model, "quantize": {"n_steps": 20, "alpha": None, "enable": {"conv": ["fp8"]}}}

    def mutate(recipe: tuple) -> Files:
        kind, edits = recipe
        text = to_yaml(config)
        data = edited(text, edits) if kind == "bytes" else to_yaml(changed(config, edits, YAML_VALUES))
        return {"config.yaml": data}

    def check(folder: Path, found: dict) -> None:
        assert dataclasses.asdict(read(Model, found, "model.")) == found

    recipes = st.one_of(st.tuples(st.just("bytes"), byte_edits), *[st.tuples(st.just("node"), document_edits)] * 2)
    return Reader(
        "config",
        {"config.yaml": to_yaml(config)},
        recipes,
        mutate,
        lambda folder: run_model(str(folder)),
        check,
        weight=10,
    )


# ONNX


def external(name: str, location: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": "0", "length": "16"}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def graph_with(locations: list[str]) -> bytes:
    """A network with weights in other files, some of them inside a branch."""
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    inside = external("constant", locations[1])
    branch = helper.make_graph([helper.make_node("Constant", [], ["z"], value=inside)], "branch", [], [
        helper.make_tensor_value_info("z", TensorProto.FLOAT, [4])
    ])  # fmt: skip
    nodes = [
        helper.make_node("If", ["which"], ["z"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["z", "w"], ["y"]),
    ]
    which = helper.make_tensor_value_info("which", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "g", [which], [output], [external("w", locations[0])])
    return helper.make_model(graph).SerializeToString()


LOCATIONS = [
    "a.data", "b.data", "sub/c.data", "", ".", "..", "/", "../not_for_readers", "sub/../../not_for_readers",
    "/proc/self/environ", "/etc/passwd", "a\0b", "x" * 300, "y/" * 3000 + "z", "x" * 20_000, "\x1b[2J\n", "‮a.data",
    "a.onnx", "*", "~", "a.data/", "./a.data", "sub", "no.data", "a.data/b", "\\\\host\\share", "C:\\a",
]  # fmt: skip


def onnx_graph() -> Reader:
    sound = graph_with(["a.data", "sub/c.data"])
    files = {"a.onnx": sound, "a.data": bytes(16), "b.data": bytes(16), "sub/c.data": bytes(16)}

    def mutate(recipe: tuple) -> Files:
        kind, edits = recipe
        if kind == "bytes":
            return {"a.onnx": edited(sound, edits, other=files["a.onnx"][::-1])}
        return {"a.onnx": graph_with([LOCATIONS[number % len(LOCATIONS)] for number in edits])}

    def check(folder: Path, found: list[Path]) -> None:
        assert all(path.is_file() and path.resolve().is_relative_to(folder.resolve()) for path in found)
        onnx.load(folder / "a.onnx", load_external_data=False)

    recipes = st.one_of(
        *[st.tuples(st.just("bytes"), byte_edits)] * 3, st.tuples(st.just("locations"), st.tuples(LARGE, LARGE))
    )
    return Reader("onnx", files, recipes, mutate, lambda folder: onnx_files(folder / "a.onnx"), check, weight=20)


# Start noise


def noise() -> Reader:
    values = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    stored, array = io.BytesIO(), io.BytesIO()
    torch.save(values, stored)
    np.save(array, values.numpy())
    files = {"a.pt": stored.getvalue(), "a.npy": array.getvalue(), "a.safetensors": save_safetensors({"a": values})}

    def mutate(recipe: tuple) -> Files:
        which, weights, header, edits = recipe
        if which == "a.pt":
            return {which: damaged_weights(files[which], weights)}
        if which == "a.safetensors":
            return {which: damaged_safetensors(files[which], header)}
        return {which: edited(files[which], edits, [(0, 128)])}

    def loaded(folder: Path) -> list[tuple]:
        return [digest(read_latents(folder / name, {1, 2}, 8, 8)) for name in files]

    def check(folder: Path, found: list[tuple]) -> None:
        """Finite and of the shape; numpy finds the same."""
        for name in files:
            latents = read_latents(folder / name, {1, 2}, 8, 8)
            assert latents.isfinite().all() and latents.shape[2:] == (8, 8) and latents.dtype == torch.float32
        array = np.load(folder / "a.npy", allow_pickle=False)
        assert digest(torch.from_numpy(array.astype("<f4"))) == found[1]

    return Reader("noise", files, st.tuples(st.sampled_from(sorted(files)), either, described, byte_edits), mutate,
                  loaded, check, weight=20)  # fmt: skip


# LoRAs and images to start from


def lora() -> Reader:
    """Of a linear, a convolution and a text encoder's linear, with an alpha of its own and a config in the metadata."""
    shapes = {"unet": {"q": (8, 6), "conv": (8, 6, 3, 3)}, "text_encoder": {"q_proj": (4, 4)}}
    names = places_by_name({
        component: {f"{name}.weight": LazyTensor(shape, torch.float32, torch.empty) for name, shape in layers.items()}
        for component, layers in shapes.items()
    })  # fmt: skip
    tensors = {
        "unet.q.lora_A.weight": torch.ones(2, 6), "unet.q.lora_B.weight": torch.ones(8, 2),
        "lora_unet_conv.lora_down.weight": torch.ones(2, 6, 3, 3), "lora_unet_conv.alpha": torch.tensor(4.0),
        "lora_unet_conv.lora_up.weight": torch.ones(8, 2, 1, 1), "text_encoder.q_proj.lora_A.weight": torch.ones(2, 4),
        "text_encoder.q_proj.lora_B.weight": torch.ones(4, 2).half(),
    }  # fmt: skip
    config = {"unet.r": 2, "unet.lora_alpha": 3, "unet.alpha_pattern": {"q": 5}, "text_encoder.lora_alpha": 8}
    sound = save_safetensors(tensors, {"lora_adapter_metadata": json.dumps(config)})

    def mutate(recipe: tuple) -> Files:
        which, header, edits = recipe
        if which == "tensors":
            return {"a.safetensors": damaged_safetensors(sound, header)}
        fields, content = header_of(sound)
        fields["__metadata__"]["lora_adapter_metadata"] = to_json(changed(config, edits)).decode("utf-8", "replace")
        return {"a.safetensors": with_header(fields, content)}

    def read_all(folder: Path) -> list[tuple]:
        updates = read_lora(folder / "a.safetensors", 0.5, names, "Tiny")
        return sorted((update.place.component, update.place.layer, *digest(update.delta())) for update in updates)

    def check(folder: Path, found: list[tuple]) -> None:
        assert all(shapes[component][layer] == shape for component, layer, _, shape, _ in found)

    recipes = st.tuples(st.sampled_from(["tensors", "tensors", "config"]), described, document_edits)
    return Reader("lora", {"a.safetensors": sound}, recipes, mutate, read_all, check, weight=20)


def pictures() -> Reader:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8))
    files = {}
    for name in ("a.png", "a.jpg", "a.webp", "mask.png"):
        stored = io.BytesIO()
        (image.convert("L") if name == "mask.png" else image).save(stored, FORMATS[Path(name).suffix])
        files[name] = stored.getvalue()
    names = [name for name in files if name != "mask.png"]

    def loaded(folder: Path) -> list[tuple]:
        source = read_source([folder / name for name in names], [folder / "mask.png"] * len(names), 64, 128, 0.5)
        return [digest(torch.from_numpy(each)) for each in (source.images, source.masks)]

    def check(folder: Path, found: list[tuple]) -> None:
        assert [shape for _, shape, _ in found] == [(3, 128, 64, 3), (3, 128, 64)]

    recipes = st.tuples(st.sampled_from(sorted(files)), byte_edits)

    def mutate(recipe: tuple) -> Files:
        name, edits = recipe
        return {name: edited(files[name], edits, [(0, 64)])}

    return Reader("pictures", files, recipes, mutate, loaded, check, weight=20)


# Plans and the cache


def plan_record() -> Reader:
    header = RTX_HEADER.pack(b"vtrt", 80, 1, 7, 1, 116, b"vtrt", 0b1000) + bytes(80 - RTX_HEADER.size)
    report = PlanReport(
        "tensorrt_rtx", "1.7.1.116", ["SM89"], {"x": [[1, 64], [2, 64], [8, 64]]}, None, 1.5, {"a.onnx": "0" * 64},
        hashlib.sha256(header).hexdigest(), len(header), 3.5, 10**9,
    )  # fmt: skip
    files = {"a.plan": header, "a.plan.json": to_json(dataclasses.asdict(report))}

    def mutate(recipe: tuple) -> Files:
        kind, edits = recipe
        if kind == "node":
            return {"a.plan.json": to_json(changed(dataclasses.asdict(report), edits))}
        name = "a.plan" if kind == "header" else "a.plan.json"
        return {name: edited(files[name], edits, [(0, RTX_HEADER.size)])}

    def told(folder: Path) -> tuple[dict, dict]:
        return describe_plan(folder / "a.plan"), dataclasses.asdict(read_record(folder / "a.plan"))

    def check(folder: Path, found: tuple[dict, dict]) -> None:
        """The record is what the file says, and of the types that a build writes."""
        record = found[1]
        assert (
            json.loads(record_path(folder / "a.plan").read_text("utf-8")) | {"timing_cache": record["timing_cache"]}
            == record
        )
        assert all(type(target) is str for target in record["targets"]) and type(record["sha256"]) is str
        assert all(type(side) is int for shapes in record["profile"].values() for shape in shapes for side in shape)

    recipes = st.one_of(
        st.tuples(st.just("header"), byte_edits), st.tuples(st.just("bytes"), byte_edits),
        *[st.tuples(st.just("node"), document_edits)] * 2,
    )  # fmt: skip
    return Reader("plan", files, recipes, mutate, told, check, weight=20)


def cache_entry() -> Reader:
    """Entries of another origin, or without a whole file, are made again, which is a refusal here."""
    origin, contents = {"of": "a", "form": 2}, {"a.txt": b"text", "b.bin": bytes(range(64))}
    manifest = {"origin": origin, "files": {
        name: {"sha256": hashlib.sha256(content).hexdigest()} for name, content in contents.items()
    }}  # fmt: skip
    files = contents | {MANIFEST: to_json(manifest)}

    def mutate(recipe: tuple) -> Files:
        name, (kind, edits) = recipe
        if kind == "node":
            return {MANIFEST: to_json(changed(manifest, edits))}
        return {name: edited(files[name], edits)}

    def names(folder: Path) -> list[str]:
        if not (found := sound(folder, origin)):
            raise ArtifactError("the entry is damaged")
        return found

    def check(folder: Path, found: list[str]) -> None:
        assert set(found) <= contents.keys() and all((folder / name).read_bytes() == contents[name] for name in found)

    recipes = st.tuples(
        st.sampled_from(sorted(files)),
        st.one_of(st.tuples(st.just("bytes"), byte_edits), *[st.tuples(st.just("node"), document_edits)] * 2),
    )
    return Reader("cache", files, recipes, mutate, names, check, weight=20)
