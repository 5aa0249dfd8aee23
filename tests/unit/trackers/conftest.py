from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def directory(tmp_path) -> Path:
    folder = tmp_path / "multirun" / "0"
    (folder / "images").mkdir(parents=True)
    Image.new("RGB", (40, 20), "red").save(folder / "images" / "grid.png")
    return folder


@pytest.fixture
def record() -> dict:
    times = {
        "full_precision": {"p50_ms": 15.05, "n": 20, "warmup": 3, "samples_ms": [15.0, 15.1]},
        "quantized": {"p50_ms": None, "reason": "not quantized"},
        "speedup": {"value": 1.35, "reason": None},
    }
    return {
        "schema_version": 1,
        "status": "done",
        "knobs": {
            "quant_level": 3.0,
            "alpha": "auto",
            "keep": None,
            "snapshots": [32, 64],
            "infer": {"width": 64, "prompts": ["\x1b[31mred\x1b[0m\n" * 100], "static": False},
        },
        "sizes_bytes": {"unet_xl": {"onnx_quantized": 9_700_000, "plan": {"value": None, "reason": "no plan"}}},
        "latency": {"openvino": {"unet_xl": {"2": times}}},
        "fidelity": {
            "psnr": {"mean": 35.0, "min": 32.4, "worst_index": 3, "values": [35.0, 32.4], "reason": None},
            "latent_sqnr_db": [40.0, None, 25.1],
            "latent_sqnr_reason": "identical",
            "other": {"value": 3.2, "reason": None, "images": 64, "features": 1280},
        },
        "peak_memory_bytes": 1_460_000_000,
        "stages": {"load": {"seconds": 0.4, "peak_memory_bytes": 5_000_000}},
    }


@pytest.fixture
def metrics() -> dict[str, float]:
    """Of the record."""
    return {
        "fidelity/psnr/mean": 35.0, "fidelity/psnr/min": 32.4, "fidelity/other": 3.2,
        "latency/openvino/unet_xl/2/full_precision/p50_ms": 15.05, "latency/openvino/unet_xl/2/speedup": 1.35,
        "sizes_bytes/unet_xl/onnx_quantized": 9_700_000.0, "peak_memory_bytes": 1_460_000_000.0,
        "stages/load/seconds": 0.4, "stages/load/peak_memory_bytes": 5_000_000.0,
    }  # fmt: skip
