"""Records of runs and sweeps, their reports, and a run's configuration."""

import dataclasses
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from PIL import Image

from sd_quant.config import Model, run_model
from sd_quant.errors import ArtifactError
from sd_quant.knobs import read
from sd_quant.report.rebuild import rebuild
from sd_quant.report.record import DONE
from sd_quant.report.run_table import run_table
from sd_quant.report.summary import markdown, read_sweep

from ..presets import model_of
from ..unit.report.sweeps import LAYERS, MEMORY, QUIET, record_of, timing
from .harness import Reader
from .mutations import YAML_VALUES, byte_edits, changed, document_edits, edited, to_json, to_yaml
from .shared import Files, ways


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
        "parity": {"unet_xl": {"relative_error": 0.0, "tolerance": 0.01}}, "memory": MEMORY,
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
RANGES = "name,step,least,first_quartile,median,third_quartile,largest,kept\na,1,0,1,2,3,4,\na,2,0,1,2,3,9,5\n"
RECORD_FILES = {name: to_json(content) for name, content in RECORDS.items()} | {
    "alpha=0.5/layers.csv": LAYERS.encode(), "alpha=0.5/ranges.csv": RANGES.encode(),
}  # fmt: skip
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

    return Reader("records", RECORD_FILES, OF_RECORDS, damaged_record, shown, check, weight=20)


def report() -> Reader:
    """The whole report, which costs a second for its plots; layers and pictures are read by it alone."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    folders = [f"alpha={alpha}/images/{side}" for alpha in ("0.5", "auto") for side in ("full_precision", "quantized")]
    pictures = {f"{folder}/0000.png": picture.getvalue() for folder in folders}
    files = RECORD_FILES | pictures

    def damaged_other(drawn: tuple) -> Files:
        name, edits = drawn
        return {name: edited(files[name], edits, other=LAYERS.encode())}

    def made(folder: Path) -> str:
        page = rebuild(folder).read_text(encoding="utf-8")
        refuse_unreadable(unreadable(read_sweep(folder)))
        return page

    def check(folder: Path, page: str) -> None:
        assert "<script>alert" not in page and page.count("<script") == 2

    others = st.tuples(st.sampled_from(["alpha=0.5/layers.csv", "alpha=0.5/ranges.csv", *pictures]), byte_edits)
    damages = ways(*[(OF_RECORDS, damaged_record)] * 4, (others, damaged_other))
    return Reader("report", files, read=made, check=check, weight=1, quick=3, writes=True, **damages)


def configuration() -> Reader:
    model = model_of("sdxl")
    config = {"model": model, "quantize": {"n_steps": 20, "alpha": None, "enable": {"conv": ["fp8"]}}}

    def check(folder: Path, found: dict) -> None:
        assert dataclasses.asdict(read(Model, found, "model.")) == found

    bytes_edited = (byte_edits, lambda edits: {"config.yaml": edited(to_yaml(config), edits)})
    nodes_changed = (document_edits, lambda edits: {"config.yaml": to_yaml(changed(config, edits, YAML_VALUES))})
    damages = ways(bytes_edited, nodes_changed, nodes_changed)
    files = {"config.yaml": to_yaml(config)}
    return Reader("config", files, read=lambda folder: run_model(str(folder)), check=check, **damages)
