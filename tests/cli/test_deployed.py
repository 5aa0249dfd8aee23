"""What people deploy beside text to image: with LoRAs, from images, in masks, without quantization."""

import csv
import json
from pathlib import Path

import diffusers
import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sd_quant.engines.tensorrt.plan import describe_plan

from ..pipelines import redraw, sd15_of_one_level

pytestmark = pytest.mark.commit

STEPS = ("quantize.n_steps=4", "infer.steps=4", "quant_level=3")
LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def inpainting(tmp_path_factory) -> Path:
    """As a checkpoint for inpainting is stored: its UNet reads nine channels."""
    folder = tmp_path_factory.mktemp("inpainting") / "sd15"
    sd15_of_one_level(folder)
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipe.unet = diffusers.UNet2DConditionModel.from_config(pipe.unet.config, in_channels=9)
    redraw(pipe.unet)
    diffusers.StableDiffusionInpaintPipeline(**pipe.components, requires_safety_checker=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for name in "abc":
        smooth = np.kron(random.integers(0, 255, (8, 12, 3)), np.ones((8, 8, 1))).astype(np.uint8)
        Image.fromarray(smooth).save(folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def mask(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("masks") / "right.png"
    pixels = np.zeros((64, 96), np.uint8)
    pixels[:, 48:] = 255
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def style(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("loras") / "style.safetensors"
    save_file(
        {f"unet.{LAYER}.lora_A.weight": torch.randn(4, 64) / 8, f"unet.{LAYER}.lora_B.weight": torch.randn(64, 4) / 4},
        path,
    )
    return path


@pytest.fixture(scope="module")
def cache(with_graphs, tmp_path_factory) -> Path:
    return with_graphs(tmp_path_factory.mktemp("cached") / "cache")


@pytest.fixture(scope="module")
def changed(command, tiny, pictures, cache, tmp_path_factory) -> Path:
    """A run whose images begin with images, calibrated on images too."""
    folder = tmp_path_factory.mktemp("changed") / "run"
    result = command(
        "quantize.py", *tiny.knobs, *STEPS, f"infer.image={pictures}", f"model.calibration_image={pictures}/c.png",
        "infer.prompts=[a red cat]", "infer.strength=0.5", "export_trt=tensorrt_rtx", "trt.optimization_level=0",
        f"cache.dir={cache}", f"hydra.run.dir={folder}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def record_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image).astype(float)


@pytest.mark.nightly
def test_each_image_of_a_folder_is_changed_and_the_encoder_is_a_part(changed, pictures):
    record = record_of(changed)
    assert record["prompts"] == ["a red cat"] * 3
    assert len(list((changed / "images/quantized").glob("*.png"))) == 3
    assert list(record["plans"]) == ["unet", "vae", "text_encoder", "vae_encoder"]
    assert record["parity"]["vae_encoder"]["relative_error"] < record["parity"]["vae_encoder"]["tolerance"]
    graph = onnx.load(changed / "onnx/vae_encoder/vae_encoder.onnx").graph
    (x,) = graph.input
    assert [axis.dim_param or axis.dim_value for axis in x.type.tensor_type.shape.dim] == [
        "batch", 3, "image_height", "image_width",
    ]  # fmt: skip
    assert describe_plan(changed / "plan/vae_encoder.plan")["version"]
    assert len(record["fidelity"]["latent_sqnr_db"]) == 3, "half of four steps, which are five calls of PNDM"
    inputs = record["inputs"]
    assert "calibrating on 2 prompts: 4 calls" in (changed / "quantize.log").read_text(), "from images too"
    assert inputs["image"]["sha256"] and inputs["calibration_image"]["sha256"] != inputs["image"]["sha256"]


@pytest.mark.nightly
def test_an_earlier_run_changes_other_images(command, changed, pictures, mask, tmp_path):
    knobs = f"run={changed}", f"infer.image={pictures}/b.png", "prompts=[a house]", "steps=4", "num_warmup_runs=0"
    for name, more in {
        "few": ["infer.strength=0.25"],
        "many": ["infer.strength=1"],
        "part": [f"infer.mask={mask}"],
    }.items():
        result = command("infer.py", *knobs, *more, "infer.num_timed_runs=1", f"hydra.run.dir={tmp_path / name}")
        assert result.returncode == 0, result.stderr[-3000:]
    few, many, part = (pixels(tmp_path / name / "images/0000.png") for name in ("few", "many", "part"))
    assert few.shape == (64, 64, 3) and np.abs(few - many).mean() > 1
    left, right = np.abs(part - few)[:, :24].mean(), np.abs(part - many)[:, 40:].mean()
    assert left < np.abs(part - many)[:, :24].mean(), "what is not masked stays nearer to the image"
    assert right < np.abs(part - few)[:, 40:].mean(), "and what is, nearer to what is made of noise"


@pytest.mark.nightly
def test_a_checkpoint_for_inpainting(command, tiny, inpainting, pictures, mask, cache, tmp_path):
    knobs = *tiny.knobs, *STEPS, f"model.path={inpainting}", f"cache.dir={cache}"
    masked = f"infer.image={pictures}/a.png", f"infer.mask={mask}", "infer.prompts=[a red cat]"
    result = command("quantize.py", *knobs, *masked, "export_trt=none", f"hydra.run.dir={tmp_path / 'refused'}")
    assert result.returncode == 2
    assert "model.calibration_image and model.calibration_mask are not given, expected both" in result.stderr
    calibrated = f"model.calibration_image={pictures}/b.png", f"model.calibration_mask={mask}"
    result = command(
        "quantize.py", *knobs, *masked, *calibrated, "export_trt=none", f"hydra.run.dir={tmp_path / 'run'}"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (sample, *_) = onnx.load(tmp_path / "run/onnx/unet/unet.onnx").graph.input
    assert sample.type.tensor_type.shape.dim[1].dim_value == 9


@pytest.mark.parametrize(
    ("knobs", "code", "refusal"),
    [
        (["infer.image={pictures}/a.png", "infer.mask={pictures}/../mask"], 2, "infer.mask names"),
        (["infer.image={style}"], 2, "expected an image or a folder with images"),
        (["model=pixart", "infer.image={pictures}"], 2, "only sd15, sd21, sdxl begin with images here"),
        (["model.loras=[{style}:x]"], 2, "a file, or file:strength with a number"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(command, tiny, pictures, style, tmp_path, knobs, code, refusal):
    given = [knob.format(pictures=pictures, style=style) for knob in knobs]
    result = command("quantize.py", "model=sd15", f"model.path={tiny.folder}", *given, f"hydra.run.dir={tmp_path}/run")
    assert result.returncode == code and refusal in result.stderr and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.nightly
def test_a_lora_is_in_everything_that_is_made(command, tiny, style, cache, tmp_path):
    """Beside the run without it."""
    result = command(
        "quantize.py", *tiny.knobs, "quant_level=3", "alpha=0.8", "quantize.snapshots=[1]",
        f"model.loras=[{style}:0.5]", "hand_over=[diffusers_modelopt]", f"cache.dir={cache}",
        f"hydra.run.dir={tmp_path}/with",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    made = {"without": tiny.run, "with": tmp_path / "with"}
    without, adapted = map(record_of, made.values())
    assert adapted["inputs"]["lora 1 at 0.5"]["sha256"] and adapted["fingerprint"] != without["fingerprint"]
    assert not np.array_equal(*(pixels(folder / "images/full_precision/0000.png") for folder in made.values()))
    scales = {
        name: {
            row["name"]: row["weight_scale_max"]
            for row in csv.DictReader((folder / "layers.csv").read_text().splitlines())
        }
        for name, folder in made.items()
    }
    assert scales["without"][LAYER] != scales["with"][LAYER]
    assert "style.safetensors:0.5" in (made["with"] / "report.html").read_text()
    card = (made["with"] / "hand_over/diffusers_modelopt/README.md").read_text()
    assert "The LoRA style.safetensors:0.5 is fused into the weights" in card


@pytest.mark.nightly
def test_a_lora_beside_quantized_weights_is_the_one_that_judge_adds_to_a_run_without_it(
    command, tiny, style, cache, tmp_path
):
    """The run of the model without it, judged with it, makes the very images of a run with it beside its weights."""
    lora, runs = f"model.loras=[{style}:0.5]", {"without": tiny.run}
    for where in ("fused", "beside"):
        runs[where] = tmp_path / where
        result = command(
            "quantize.py", *tiny.knobs, "quant_level=3", "alpha=0.8", "quantize.snapshots=[1]", lora,
            f"quantize.loras={where}", f"cache.dir={cache}", f"hydra.run.dir={runs[where]}",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]
    judged = [knob for knob in tiny.knobs if knob.startswith(("model", "infer.prompts", "infer.steps"))]
    result = command(
        "judge.py", *judged, lora, f"candidates=[{','.join(map(str, runs.values()))}]", f"cache.dir={cache}",
        f"hydra.run.dir={tmp_path}/judged",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    folders = dict(zip(runs, (tmp_path / "judged" / path.name for path in runs.values()), strict=True))
    said = {name: record_of(folder)["judged"]["loras"] for name, folder in folders.items()}
    assert said == {"without": "beside", "fused": "fused", "beside": "beside"}
    images = {name: pixels(folder / "images/quantized/0000.png") for name, folder in folders.items()}
    assert np.array_equal(images["without"], images["beside"]) and not np.array_equal(
        images["without"], images["fused"]
    )


@pytest.mark.nightly
def test_a_checkpoint_is_exported_as_it_is_and_drawn(command, tiny, style, tmp_path):
    result = command(
        "export_trt.py", "model=sd15", f"model.path={tiny.folder}", "model.width=64", "model.height=64",
        f"model.loras=[{style}]", "model.encoder=true", "trt.optimization_level=0",
        f"hydra.run.dir={tmp_path / 'exported'}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    parts = ["unet", "vae", "text_encoder", "vae_encoder"]
    for part in parts:
        assert (tmp_path / f"exported/onnx/{part}/{part}.onnx").is_file()
        assert (tmp_path / f"exported/plan/{part}.plan").is_file()
    kinds = {weight.data_type for weight in onnx.load(tmp_path / "exported/onnx/unet/unet.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 not in kinds
    knobs = "prompts=[a red cat]", "steps=2", "num_warmup_runs=0", "infer.num_timed_runs=1"
    drawn = command("infer.py", f"run={tmp_path / 'exported'}", *knobs, f"hydra.run.dir={tmp_path / 'drawn'}")
    assert drawn.returncode == 0, drawn.stderr[-3000:]
    assert pixels(tmp_path / "drawn/images/0000.png").std() > 1
