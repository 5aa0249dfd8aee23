"""What a run is given and leaves: prompts, statistics, images, LoRAs, graphs, plans, the cache, records and configs."""

import dataclasses
import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from hypothesis import strategies as st
from onnx import TensorProto, helper
from PIL import Image
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from sd_quant.cache import MANIFEST, sound
from sd_quant.calibration.collected_elsewhere import read_statistics
from sd_quant.calibration.prompts import read_prompts
from sd_quant.calibration.store import Entries, content_digest, pack
from sd_quant.checkpoints.lora import read_lora
from sd_quant.config import Model, run_model
from sd_quant.engines.onnx_input import onnx_files
from sd_quant.engines.tensorrt.plan import RTX_HEADER, PlanReport, describe_plan, read_record, record_path
from sd_quant.errors import ArtifactError
from sd_quant.files.image_files import IMAGE_FORMATS
from sd_quant.files.tensors import LazyTensor
from sd_quant.inference.latents import read_latents
from sd_quant.inference.source_images import read_source
from sd_quant.knobs import read
from sd_quant.names.lora import places_by_name
from sd_quant.report.rebuild import rebuild
from sd_quant.report.record import DONE
from sd_quant.report.run_table import run_table
from sd_quant.report.summary import markdown, read_sweep

from ..presets import model_of
from ..unit.calibration import some_statistics
from ..unit.report.sweeps import LAYERS, QUIET, record_of, timing
from .harness import Reader
from .mutations import LARGE, Files, byte_edits, damages, digest, edited, header_of, to_json, to_yaml, ways, with_header


def prompts() -> Reader:
    text = "a cat\n\n  ein Kätzchen 🐈 \r\n../../etc/passwd\na dog, 35 mm, 1024 x 1024\n".encode()
    table = 'id\timage_id\tcaption\n1\t42\ta cat\n2\t43\t"a ""big"" dog"\n\n3\t44\tein Kätzchen 🐈\n'.encode()
    drawbench = 'Prompts,Category\nA red car.,Colors\n"Two cups, one ""big"" 🐈.",Counting\n'.encode()
    entries = {"a1": {"category": "food", "prompt": "a soup"}, "b2": {"category": "logo", "prompt": "ein Kätzchen 🐈"}}
    captions = {"annotations": [{"image_id": 9, "caption": "a cat\n"}, {"image_id": 9, "caption": "a dog"}]}
    files = {
        "prompts.txt": b"\xef\xbb\xbf" + text, "prompts.tsv": table, "prompts.csv": drawbench,
        "entries.json": json.dumps(entries).encode(), "captions.json": json.dumps(captions).encode(),
    }  # fmt: skip

    def check(folder: Path, found: list[list[str]]) -> None:
        for prompts in found:
            assert prompts and all(prompt == prompt.strip() and 0 < len(prompt) <= 2000 for prompt in prompts)
            assert not any("\n" in prompt for prompt in prompts)
        lines = (folder / "prompts.txt").read_bytes().decode("utf-8-sig").split("\n")
        assert found[0] == [line.strip() for line in lines if line.strip()]
        rest = (folder / "prompts.tsv").read_text("utf-8")
        assert all(prompt.replace('"', "") in rest.replace('"', "") for prompt in found[1])

    def read(folder: Path) -> list[list[str]]:
        return [read_prompts(folder / name) for name in files]

    return Reader("prompts", files, read=read, check=check, **damages(files))


def statistics(scratch: Path) -> Reader:
    entries = Entries(scratch, some_statistics.ORIGIN, ["a cat", "ein Kätzchen 🐈"])
    for segment in (range(0, 1), range(1, 2)):
        entries.write(segment, some_statistics.statistics(segment))
    files = {path.name: path.read_bytes() for path in sorted(entries.folder.iterdir())}

    def signed(damaged: Files) -> Files:
        """Three of four inputs get a digest that matches, so readers go past that check."""
        [(name, data)] = damaged.items()
        if zlib.crc32(data) % 4:
            with suppress(Exception):
                header, content = header_of(data)
                known = header["__metadata__"]
                known["digest"] = content_digest(known["origin"], known["prompts"], load_safetensors(data))
                return {name: with_header(header, content)}
        return damaged

    def packed(folder: Path) -> dict[str, torch.Tensor]:
        origin = {"form": 2, **some_statistics.ORIGIN}
        return pack(read_statistics(folder, some_statistics.LAYERS, some_statistics.CONTRACT, origin, 2))

    def check(folder: Path, found: dict[str, tuple]) -> None:
        """Statistics read from a file: the same layers and inputs, finite numbers, no range below zero."""
        tensors = packed(folder)
        assert tensors.keys() == sound.keys() and all(tensor.isfinite().all() for tensor in tensors.values())
        assert all((tensor >= 0).all() for name, tensor in tensors.items() if name.endswith("amax"))

    def loaded(folder: Path) -> dict[str, tuple]:
        return {name: digest(tensor) for name, tensor in packed(folder).items()}

    sound = loaded(entries.folder)
    return Reader("statistics", files, read=loaded, check=check, **damages(files, signed))


def noise() -> Reader:
    values = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    stored, array = io.BytesIO(), io.BytesIO()
    torch.save(values, stored)
    np.save(array, values.numpy())
    files = {"a.pt": stored.getvalue(), "a.npy": array.getvalue(), "a.safetensors": save_safetensors({"a": values})}

    def loaded(folder: Path) -> list[tuple]:
        return [digest(read_latents(folder / name, {1, 2}, 8, 8)) for name in files]

    def check(folder: Path, found: list[tuple]) -> None:
        """Latents read from a file: finite, of the stated shape, and equal to what numpy reads."""
        for name in files:
            latents = read_latents(folder / name, {1, 2}, 8, 8)
            assert latents.isfinite().all() and latents.shape[2:] == (8, 8) and latents.dtype == torch.float32
        array = np.load(folder / "a.npy", allow_pickle=False)
        assert digest(torch.from_numpy(array.astype("<f4"))) == found[1]

    return Reader("noise", files, read=loaded, check=check, **damages(files))


def lora() -> Reader:
    """DoRA of a linear, LoCon with a bias, an encoder's LoRA, a norm, an embedding, and a config in the metadata."""
    shapes = {"unet": {"q.weight": (8, 6), "conv.weight": (8, 6, 3, 3), "conv.bias": (8,), "norm.weight": (8,)},
              "text_encoder": {"q_proj.weight": (4, 4)}}  # fmt: skip
    names = places_by_name({
        component: {name: LazyTensor(shape, torch.float32, torch.empty) for name, shape in parameters.items()}
        for component, parameters in shapes.items()
    })  # fmt: skip
    tensors = {
        "unet.q.lora_A.weight": torch.ones(2, 6), "unet.q.lora_B.weight": torch.ones(8, 2),
        "lora_unet_conv.lora_down.weight": torch.ones(2, 6, 1, 1), "lora_unet_conv.alpha": torch.tensor(4.0),
        "lora_unet_conv.lora_up.weight": torch.ones(8, 2, 1, 1), "text_encoder.q_proj.lora_A.weight": torch.ones(2, 4),
        "lora_unet_conv.lora_mid.weight": torch.ones(2, 2, 3, 3), "lora_unet_conv.diff_b": torch.ones(8),
        "unet.q.dora_scale": torch.ones(1, 6), "unet.norm.w_norm": torch.ones(8), "bundle_emb.a.t5": torch.ones(1, 2),
        "text_encoder.q_proj.lora_B.weight": torch.ones(4, 2).half(),
    }  # fmt: skip
    config = {"unet.r": 2, "unet.lora_alpha": 3, "unet.alpha_pattern": {"q": 5}, "text_encoder.lora_alpha": 8}
    sound = save_safetensors(tensors, {"lora_adapter_metadata": json.dumps(config)})

    def read_all(folder: Path) -> list[tuple]:
        updates = read_lora(folder / "a.safetensors", 0.5, names, "Tiny")
        found = [(each.place, digest(each.applied(torch.ones(each.place.shape)))) for each in updates]
        return sorted((place.component, place.layer + place.kind, *values) for place, values in found)

    def check(folder: Path, found: list[tuple]) -> None:
        assert all(shapes[component][name] == shape for component, name, _, shape, _ in found)

    files = {"a.safetensors": sound}
    return Reader("lora", files, read=read_all, check=check, **damages(files))


def images() -> Reader:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8))
    files = {}
    for name in ("a.png", "a.jpg", "a.webp", "mask.png"):
        stored = io.BytesIO()
        (image.convert("L") if name == "mask.png" else image).save(stored, IMAGE_FORMATS[Path(name).suffix])
        files[name] = stored.getvalue()
    names = [name for name in files if name != "mask.png"]

    def loaded(folder: Path) -> list[tuple]:
        source = read_source([folder / name for name in names], [folder / "mask.png"] * len(names), 64, 128, 0.5)
        return [digest(torch.from_numpy(each)) for each in (source.images, source.masks)]

    def check(folder: Path, found: list[tuple]) -> None:
        assert [shape for _, shape, _ in found] == [(3, 128, 64, 3), (3, 128, 64)]

    return Reader("images", files, read=loaded, check=check, **damages(files))


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

    def named(numbers: tuple[int, int]) -> Files:
        return {"a.onnx": graph_with([LOCATIONS[number % len(LOCATIONS)] for number in numbers])}

    def check(folder: Path, found: list[Path]) -> None:
        assert all(path.is_file() and path.resolve().is_relative_to(folder.resolve()) for path in found)
        onnx.load(folder / "a.onnx", load_external_data=False)

    damaged = byte_edits, lambda edits: {"a.onnx": edited(sound, edits, other=sound[::-1])}
    recipes = ways(damaged, damaged, damaged, (st.tuples(LARGE, LARGE), named))
    return Reader("onnx", files, read=lambda folder: onnx_files(folder / "a.onnx"), check=check, **recipes)


def plan_record() -> Reader:
    header = RTX_HEADER.pack(b"vtrt", 80, 1, 7, 1, 116, b"vtrt", 0b1000) + bytes(80 - RTX_HEADER.size)
    report = PlanReport(
        "tensorrt_rtx", "1.7.1.116", ["SM89"], {"x": [[1, 64], [2, 64], [8, 64]]}, None, 1.5, {"a.onnx": "0" * 64},
        hashlib.sha256(header).hexdigest(), len(header), 3.5, 10**9,
    )  # fmt: skip
    files = {"a.plan": header, "a.plan.json": to_json(dataclasses.asdict(report))}

    def told(folder: Path) -> tuple[dict, dict]:
        return describe_plan(folder / "a.plan"), dataclasses.asdict(read_record(folder / "a.plan"))

    def check(folder: Path, found: tuple[dict, dict]) -> None:
        """The record of a plan equals the file's JSON and has the types that a build writes."""
        record = found[1]
        stored = json.loads(record_path(folder / "a.plan").read_text("utf-8"))
        assert stored | {"timing_cache": record["timing_cache"]} == record
        assert all(type(target) is str for target in record["targets"]) and type(record["sha256"]) is str
        assert all(type(side) is int for shapes in record["profile"].values() for shape in shapes for side in shape)

    return Reader("plan", files, read=told, check=check, **damages(files))


def cache_entry() -> Reader:
    """Cache entries of another origin or without a complete file are made again; here that counts as refused."""
    origin, contents = {"of": "a", "form": 2}, {"a.txt": b"text", "b.bin": bytes(range(64))}
    manifest = {"origin": origin, "files": {
        name: {"sha256": hashlib.sha256(content).hexdigest()} for name, content in contents.items()
    }}  # fmt: skip
    files = contents | {MANIFEST: to_json(manifest)}

    def names(folder: Path) -> list[str]:
        if not (found := sound(folder, origin)):
            raise ArtifactError("the entry is damaged")
        return found

    def check(folder: Path, found: list[str]) -> None:
        assert set(found) <= contents.keys() and all((folder / name).read_bytes() == contents[name] for name in found)

    return Reader("cache", files, read=names, check=check, **damages(files))


def a_record(decibels: float, speedup: float) -> dict:
    """As ``quantize.py`` leaves it, with everything in it that a table, a plot or a page reads."""
    record = record_of(decibels, speedup, 0.5)
    times, sizes = record["latency"]["openvino"], record["sizes_bytes"]
    denoiser, image = times["unet_xl"]["2"], times["image"]["1"]
    denoiser["speedup_interval"] = image["speedup_interval"] = [speedup - 0.1, speedup + 0.1]
    denoiser["rounds"] = QUIET | {"stopped": "budget", "others": 0.3, "steal": None}
    sizes["unet_xl"]["weights_fp32"], sizes["vae"]["weights_fp32"] = 8000000, 69
    record["knobs"] |= {
        "format": "int8", "quant_level": 3.0, "alpha": 0.8, "percentile": 1.0,
        "verdict": {"enough_db": 40.0, "time_of_a_db": 0.02, "confidence": 0.95, "floor_db": 28.0, "speedup": None},
    }  # fmt: skip
    record["knobs"]["model"]["family"] = "sdxl"
    record["fidelity"] |= {
        "latent_sqnr_db": [decibels, decibels - 5, None], "latent_sqnr_reason": "identical",
    }  # fmt: skip
    record["stages"] = {"calibrate": {"seconds": 1.5, "peak_memory_bytes": 5}, "export": {"seconds": 2.0}}
    return record | {
        "schema_version": 1, "overrides": ["alpha=0.5", "quant_level=3"],
        "denoiser": {"part": "unet_xl", "samples_per_image": 2}, "simulated": False, "simulated_because": None,
        "plans": {"unet_xl": {"targets": ["SM89", "SM120"]}}, "layers": {"quantized": 7, "high_precision": 2},
        "degenerate": [{"index": 1, "reason": "black"}],
        "parity": {"unet_xl": {"relative_error": 0.0, "tolerance": 0.01}},
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
    "published": PUBLISHED, "verdict": {"enough_db": 40.0, "confidence": 0.95, "image_ms": 40.0},
}  # fmt: skip
PLAN["jobs"][3]["same_as"] = "alpha=0.5"
TIMING = timing({"alpha=0.5": 2.0}) | {"left_out": [{"job": "alpha=auto", "reason": "<b>"}]}
TIMING["blocks"][0]["subjects"][0]["saved"] = {"alpha=0.5": 0.02}
RECORDS = {
    "sweep.json": PLAN,
    "timing.json": TIMING,
    "alpha=0.5/metrics.json": a_record(30.0, 2.0),
    "alpha=auto/metrics.json": a_record(35.0, 1.25),
    "alpha=1.0/failure.json": {"reason": "=cmd|' /C calc'!A0 <b>| broken", "schema_version": 1},
    "alpha=0.5/provenance.json": {"started": "2026-01-01T00:00:00+00:00", "overrides": ["a"]},
}
RECORD_FILES = {name: to_json(content) for name, content in RECORDS.items()} | {
    "alpha=0.5/layers.csv": LAYERS.encode(),
}  # fmt: skip


def refuse_unreadable(reasons: Iterator[str]) -> None:
    """A sweep skips a job whose record is damaged; here that counts as refused."""
    for reason in reasons:
        raise ArtifactError(reason)


def unreadable(sweep: Any) -> Iterator[str]:
    return (job.reason for job in sweep.jobs if job.reason and job.reason.startswith("its record cannot be read"))


def records() -> Reader:
    def shown(folder: Path) -> tuple:
        sweep = read_sweep(folder)
        table = sweep.rows
        texts = [run_table(job.record) for job in sweep.jobs if job.status == DONE]
        result = repr(table), texts, markdown(sweep), sweep.command, repr(sweep.published)
        refuse_unreadable(unreadable(sweep))
        return result

    def check(folder: Path, found: tuple) -> None:
        """Numbers are numbers, and no text has letters that a terminal obeys."""
        sweep = read_sweep(folder)
        for row, job in zip(sweep.rows, sweep.jobs, strict=True):
            assert (row["job"], row["status"], row["reason"]) == (job.name, job.status, job.reason)
            ends = ("_db", "_ms", "speedup", "_bytes", "seconds")
            values = [value for name, value in row.items() if name.endswith(ends)]
            assert all(value is None or type(value) in (int, float) and math.isfinite(value) for value in values)
        assert all(line.isprintable() for text in (*found[1], found[2]) for line in text.split("\n"))

    return Reader("records", RECORD_FILES, read=shown, check=check, **damages(RECORD_FILES))


def report() -> Reader:
    """The whole report, which costs a second for its plots; layers and pictures are read by it alone."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    folders = [f"alpha={alpha}/images/{side}" for alpha in ("0.5", "auto") for side in ("full_precision", "quantized")]
    pictures = {f"{folder}/0000.png": picture.getvalue() for folder in folders}
    files = RECORD_FILES | pictures

    def made(folder: Path) -> str:
        page = rebuild(folder).read_text(encoding="utf-8")
        refuse_unreadable(unreadable(read_sweep(folder)))
        return page

    def check(folder: Path, page: str) -> None:
        assert "<script>alert" not in page and page.count("<script") == 2

    return Reader("report", files, read=made, check=check, weight=1, writes=True, **damages(files))


def configuration() -> Reader:
    model = model_of("sdxl")
    config = {"model": model, "quantize": {"n_steps": 20, "alpha": None, "enable": {"conv": ["fp8"]}}}

    def check(folder: Path, found: dict) -> None:
        assert dataclasses.asdict(read(Model, found, "model.")) == found

    files = {"config.yaml": to_yaml(config)}
    return Reader("config", files, read=lambda folder: run_model(str(folder)), check=check, **damages(files))
