"""Sweeps as their jobs leave them, small enough to be made for every test."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sd_quant.report import rebuild
from sd_quant.report.page import write_report
from sd_quant.report.shipped import recommendation_of
from sd_quant.report.summary import Sweep, read_sweep
from tests.nested import with_values

LAYERS = """name,role,format,output_error
conv_in,excluded,high precision,
down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q,qkv,int8,0.006
down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2,ffn,int8,0.03
down_blocks.1.resnets.0.conv1,conv,int8,0.02
up_blocks.0.resnets.0.conv1,conv,int8,0.01
mid_block.resnets.0.conv1,conv,int8,0.05
"""
PROMPTS = ("a red apple", "a pear")
QUIET = {"together": True, "stopped": "narrow", "others": 0.0, "steal": 0.0, "reference_spread": 0.05}
NOT_QUANTIZED = {"p50_ms": None, "reason": "not quantized"}


def latency_of(speedup: float) -> dict:
    """Twenty rounds of the denoiser, twice in an image that takes 60 ms unquantized, 20 of them beside the denoiser."""
    quantized = (60 / speedup - 20) / 2
    wobble = [1 + 0.001 * (index % 5 - 2) for index in range(20)]
    denoiser = {
        "full_precision": {"p50_ms": 20.0, "samples_ms": [20.0 * each for each in wobble]},
        "quantized": {"p50_ms": quantized, "samples_ms": [quantized * each for each in reversed(wobble)]},
        "speedup": 20 / quantized,
    }
    image = {"full_precision": {"p50_ms": 60.0, "rest": 0.5}, "quantized": {"p50_ms": 60 / speedup}, "speedup": speedup}
    decoder = {"full_precision": {"p50_ms": 5.0}, "quantized": NOT_QUANTIZED}
    return {
        "torch": {"image": {"1": {"full_precision": {"p50_ms": 800.0}}}},
        "openvino": {"unet_xl": {"2": denoiser}, "vae": {"1": decoder}, "image": {"1": image}},
    }


def record_of(decibels: float, speedup: float, share: float, prompts: Sequence[str] = PROMPTS) -> dict:
    """Of a finished job; its images get worse from prompt to prompt, by 0.1 dB."""
    values = [decibels + ((len(prompts) - 1) / 2 - index) / 10 for index in range(len(prompts))]
    return {
        "status": "done",
        "knobs": {
            "calib_size": 32, "n_steps": 20, "model": {"path": "checkpoints/small.nemo"},
            "infer": {"engine": "openvino", "batch_size": 1, "width": 64, "height": 64, "steps": 20},
        },
        "prompts": list(prompts),
        "latency": latency_of(speedup),
        "sizes_bytes": {
            "unet_xl": {"onnx_full_precision": 17e6, "onnx_quantized": 17e6 * share, "plan": 3e7},
            "vae": {"onnx_full_precision": 5e6, "onnx_quantized": None, "reason": "not quantized"},
        },
        "fidelity": {
            "psnr": {"mean": decibels, "min": min(values, default=None), "values": values},
            "ssim": {"mean": 0.98, "min": 0.97, "values": [0.98] * len(prompts)},
            "lpips": {"mean": 0.01, "max": 0.02, "values": [0.01] * len(prompts)},
            "latent_sqnr_db": [decibels, decibels - 5, decibels - 9],
        },
        "layers": {"quantized": 5},
        "stages": {"calibrate": {"seconds": 12.5}},
        "seconds": 12.5,
        "peak_memory_bytes": 2**31,
        "environment": {
            "versions": {"openvino": "2026.4"},
            "machine": {"cpu": "a processor", "usable_cores": 2, "cpu_int8": ["avx512_vnni"], "memory_bytes": 2**34},
        },
    }  # fmt: skip


PLANS = {"unet_xl": {"bytes": 34, "seconds": 5.5}}
PARITY = {"vae": {"relative_error": 1e-6, "tolerance": 1e-3}, "quantized_layers": {"relative_error": None}}


def record_of_plan() -> dict:
    """Of a plan's run beside torch.compile, whose latencies are 1.2 times the unquantized plan's."""
    made = record_of(35.0, 1.5, 0.5) | {"plans": PLANS, "parity": PARITY, "executed": {"count": 5, "of": 5}}
    made["denoiser"] = {"part": "unet_xl", "samples_per_image": 2}
    own = made["latency"]["tensorrt"] = made["latency"].pop("openvino")
    slower = [1.2 * each for each in own["unet_xl"]["2"]["full_precision"]["samples_ms"]]
    full = {"p50_ms": 24.0, "samples_ms": slower}
    made["latency"]["torch_compiled"] = {"unet_xl": {"2": {"full_precision": full}}}
    return made


def write_job(
    folder: Path, decibels: float = 34.0, speedup: float = 1.3, share: float = 0.6,
    prompts: Sequence[str] = PROMPTS, size: int = 8,
) -> Path:  # fmt: skip
    """What a finished job leaves: its record, its layers, its images."""
    for number, side in enumerate(("full_precision", "quantized")):
        (folder / "images" / side).mkdir(parents=True)
        for index in range(len(prompts)):
            pixels = np.full((size, size, 3), (40 * index + 1 + number * round(decibels)) % 256, np.uint8)
            Image.fromarray(pixels).save(folder / "images" / side / f"{index:04d}.png")
    (folder / "layers.csv").write_text(LAYERS)
    (folder / "provenance.json").write_text(json.dumps({"started": "2026-03-01T10:20:30+00:00"}))
    (folder / "metrics.json").write_text(json.dumps(record_of(decibels, speedup, share, prompts)))
    return folder


def write_plan(folder: Path, jobs: Mapping[str, dict], /, **more: object) -> Sweep:
    """Writes ``sweep.json`` for jobs, name -> varied knobs, and reads the sweep."""
    varied = list(dict.fromkeys(knob for knobs in jobs.values() for knob in knobs))
    content = {
        "schema_version": 1, "command": ["quantize.py", "-m"], "varied": varied, "published": None,
        "jobs": [{"name": name, "varied": knobs} for name, knobs in jobs.items()],
    }  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(content | more))
    return read_sweep(folder)


def write_sweep(folder: Path) -> Sweep:
    """Levels 1 to 4: faithful, in between on both counts, fast, and one that level 2 beats; one failed, one unfinished.

    Level 2 is worth most.
    """
    recipes = {"1": (44.0, 1.05, 0.8), "2": (39.0, 1.2, 0.7), "3": (30.0, 1.3, 0.6), "4": (29.0, 1.1, 0.75)}
    for level, (decibels, speedup, share) in recipes.items():
        write_job(folder / f"level={level}", decibels, speedup, share)
    for level in ("5", "6"):
        (folder / f"level={level}").mkdir()
    (folder / "level=5" / "failure.json").write_text(json.dumps({"status": "failed", "reason": "the disk is full"}))
    return write_plan(folder, {f"level={level}": {"quant_level": float(level)} for level in "123456"})


def change_record(folder: Path, changes: Mapping[str, object]) -> Path:
    """What a job's folder holds, ``changed``; returns the folder."""
    path = folder / "metrics.json"
    path.write_text(json.dumps(with_values(json.loads(path.read_text()), changes)))
    return folder


def timing(jobs: dict[str, float], **changes) -> dict:
    """``timing.json``: each job's denoiser is so many times as fast as the unquantized one, which takes 20 ms."""
    wobble = [1 + 0.001 * (index % 7 - 3) for index in range(40)]
    block = {
        "engine": "openvino", "rest": 0.5, "image_ms": 60.0, "seconds": 3.0, "rounds": QUIET,
        "reference_ms": [20.0 * each for each in wobble],
        "subjects": [
            {"sha256": name, "jobs": [name], "samples_ms": [20.0 / ratio * each for each in reversed(wobble)]}
            for name, ratio in jobs.items()
        ],
    }  # fmt: skip
    known = {"schema_version": 1, "origin": "x", "machine": "this one", "left_out": []}
    return known | {"blocks": [block | changes]}


def report_of(sweep: Sweep, **options) -> Path:
    """``report.html`` of a sweep, with what ``rebuild`` would draw."""
    advice = recommendation_of(sweep)
    return write_report(sweep, advice, rebuild.figures(sweep, advice), **options)
