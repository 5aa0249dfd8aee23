"""One file and one line, for real: a format, a runtime, a family, an observer, a collect method, a smoothing, a score
and a tracker, each added here alone, and taken through the stages of ``quantize.py`` and ``infer.py``.

What is added is this module, a YAML file for each of preset, runtime and family, and a row in each table. Nothing in
``sd_quant`` knows any of their names.
"""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.composition import job_of
from sd_quant.config import InferJob, QuantizeJob, recipe
from sd_quant.engines import RUNTIMES, Runtime
from sd_quant.errors import ConfigError
from sd_quant.metrics import SCORES, Against, Score
from sd_quant.models import FAMILIES
from sd_quant.models.sd import StableDiffusion
from sd_quant.places import HOME
from sd_quant.quantization.formats import FORMATS, Format
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.percentile import COLLECT_METHODS
from sd_quant.quantization.smoothing import SMOOTHINGS, per_layer
from sd_quant.report.rebuild import rebuild
from sd_quant.stages import infer, run_record
from sd_quant.stages.quantize import quantize as run_quantize
from sd_quant.trackers import TRACKERS

from ..zoo.families import sd15_of_one_level
from .shared import QUICK, record_of, rows_of

pytestmark = pytest.mark.nightly

QMAX = 127.0


class Own(StableDiffusion):
    """Stable Diffusion whose cross-attention stays as it is, with a name of its own for the UNet."""

    FROM_IMAGES = None
    DENOISER = "my_unet"
    EXCLUDED = (*StableDiffusion.EXCLUDED, "attn2")

    def parts(self, configs, tokens, io):
        described = super().parts(configs, tokens, io)
        return {self.DENOISER: described.pop("unet")} | described


FAMILY = Own()


def scales(x, amax):
    """INT8 whose scales are powers of two."""
    return (torch.exp2(torch.ceil(torch.log2((amax.float() / QMAX).clamp(min=2.0**-20)))),)


def quantize(x, scale):
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8)


def dequantize(codes, scale):
    return codes.float() * scale


def load(path, **options):
    from sd_quant.engines import onnxruntime

    engine = onnxruntime.load(path)
    engine.name = "my_runtime"
    return engine


def nine_tenths(values, amax, **options):
    return 0.9 * amax


def level_difference(reference, images):
    return np.abs(reference.astype(float) - images).mean((1, 2, 3)).tolist()


def log(run, store):
    store.mkdir(parents=True, exist_ok=True)
    (store / "told.txt").write_text(f"{run.name} {run.metrics['fidelity/my_score/mean']}")


PAIR = {"weight": "my_format", "activation": "my_format"}
ADDED = {
    "quantize/my_preset": {
        "defaults": ["int8", "_self_"], "format": "my_preset",
        "enable": {"conv": PAIR, "linear": PAIR, "attention": None},
    },
    "infer/my_runtime": {"defaults": ["openvino", "_self_"], "engine": "my_runtime"},
    "model/my_family": {
        "defaults": ["sd15", "_self_"], "family": "my_family", "parts": ["my_unet", "vae", "text_encoder"],
        "width": 64, "height": 64,
    },
}  # fmt: skip


@pytest.fixture
def added(tmp_path, monkeypatch) -> Path:
    """The folder of a configuration with the added files, while the tables have the added rows."""
    rows = {
        "my_format": Format(
            "my_format", 8, None, "INT8", ("FLOAT16",), opset=19, min_compute_capability=75, layer_tolerance=1e-2,
            modelopt_num_bits=8, module=__name__,
        ),
        "my_runtime": Runtime("my_runtime", "onnx", "cpu", "onnxruntime", "onnxruntime", load=f"{__name__}:load"),
        "my_family": __name__,
        "my_observer": f"{__name__}:nine_tenths",
        "my_method": ("mean", "mean"),
        "my_smoothing": per_layer,
        "my_score": Score(
            "my_score", "my score", Against.IMAGES, f"{__name__}:level_difference", more_is_better=False,
            columns=("my_score", "my_score_worst"),
        ),
        "my_tracker": f"{__name__}:log",
    }  # fmt: skip
    tables = (FORMATS, RUNTIMES, FAMILIES, OBSERVERS, COLLECT_METHODS, SMOOTHINGS, SCORES, TRACKERS)
    for table, (name, row) in zip(tables, rows.items(), strict=True):
        monkeypatch.setitem(table, name, row)
    shutil.copytree(HOME / "conf", tmp_path / "conf")
    for name, content in ADDED.items():
        (tmp_path / f"conf/{name}.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(recipe, "GROUPS", [tmp_path / "conf"])
    monkeypatch.setattr(run_record, "TRACKED", str(tmp_path / "trackers"))
    return tmp_path / "conf"


def composed(conf: Path, name: str, job: type, *overrides: str):
    with initialize_config_dir(str(conf), version_base="1.3"):
        return job_of(job, compose(name, list(overrides)))


def test_one_of_each_is_one_file_and_one_line(added, tmp_path):
    run, name = tmp_path / "run", f"model.path={tmp_path}/pipeline"
    sd15_of_one_level(tmp_path / "pipeline")
    job = composed(
        added, "quantize", QuantizeJob, "model=my_family", name, "quantize=my_preset", "infer=my_runtime",
        "quant_level=3", "alpha=0.5", "smoothing=my_smoothing", "collect_method=my_method",
        "quantize.observer=my_observer", "trackers=[my_tracker]", f"cache.dir={tmp_path / 'cache'}", *QUICK,
    )  # fmt: skip
    run.mkdir()
    psnr = run_quantize(job, run)
    record = record_of(run)

    assert record["status"] == "done" and not record["simulated"] and record["fidelity"]["psnr"]["mean"] == psnr
    assert set(record["latency"]) == {"torch", "my_runtime"} and "my_unet" in record["latency"]["my_runtime"]
    assert record["parity"]["quantized_layers"]["count"] == record["layers"]["quantized"] > 20
    stored = onnx.load(run / "onnx/my_unet/my_unet.onnx")
    codes = [weight for weight in stored.graph.initializer if weight.name.endswith(".my_format")]
    assert len(codes) == record["layers"]["quantized"] and {code.data_type for code in codes} == {onnx.TensorProto.INT8}
    rows = rows_of(run / "layers.csv")
    assert {row["format"] for row in rows} == {"my_format", "high precision"}
    roles = {row["name"]: row["role"] for row in rows if row["role"] != "attention"}
    assert {role for name, role in roles.items() if ".attn2." in name} == {"excluded"}
    assert {role for name, role in roles.items() if ".attn1." in name} == {"qkv", "linear"}
    assert {row["smoothing"] for row in rows} == {"", "multiplication"}  # per_layer folds nothing
    assert record["fidelity"]["my_score"]["mean"] > 0
    assert (tmp_path / "trackers" / "told.txt").read_text().endswith(str(record["fidelity"]["my_score"]["mean"]))

    page = rebuild(run).read_text(encoding="utf-8")
    assert "my score" in page and "my_score_worst" in (run / "summary.csv").read_text().splitlines()[0]

    with pytest.raises(ConfigError, match="use model=sd15 or model=sd21 or model=my_family$"):
        open_pipeline(tmp_path / "pipeline", "flux")

    drawn = composed(added, "infer", InferJob, f"run={run}", "infer=my_runtime", *QUICK[2:6])
    infer.infer(drawn, tmp_path / "drawn")
    assert "my_unet" in record_of(tmp_path / "drawn")["latency"]["my_runtime"]
