"""What people deploy beside text to image: with LoRAs, from images, in masks, without quantization."""

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sd_quant.engines.tensorrt.plan import describe_plan

from ..zoo.families import TINY, controlnet, for_inpainting, sd15_of_one_level
from .conftest import LEVEL_3
from .shared import QUICK, onnx_path, pixels, record_of, rows_of

pytestmark = pytest.mark.nightly

STEPS = ("quantize.n_steps=4", "infer.steps=4", "quant_level=3")
LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A folder of three, and beside it a mask of the right half."""
    folder = tmp_path_factory.mktemp("given") / "pictures"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in "abc":
        smooth = np.kron(random.integers(0, 255, (8, 12, 3)), np.ones((8, 8, 1))).astype(np.uint8)
        Image.fromarray(smooth).save(folder / f"{name}.png")
    right = np.repeat([[0, 255]], 48, axis=1).repeat(64, axis=0).astype(np.uint8)
    Image.fromarray(right).save(folder.with_name("right.png"))
    return folder


@pytest.fixture(scope="module")
def mask(pictures) -> Path:
    return pictures.with_name("right.png")


@pytest.fixture(scope="module")
def style(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("loras") / "style.safetensors"
    lora = {"lora_A": torch.randn(4, 64) / 8, "lora_B": torch.randn(64, 4) / 4}
    save_file({f"unet.{LAYER}.{name}.weight": tensor for name, tensor in lora.items()}, path)
    return path


@pytest.fixture(scope="module")
def cache(with_graphs, tmp_path_factory) -> Path:
    return with_graphs(tmp_path_factory.mktemp("cached") / "cache")


@pytest.fixture(scope="module")
def job(job, cache):
    return partial(job, f"cache.dir={cache}")


@pytest.fixture(scope="module")
def changed(job, pictures) -> Path:
    """A run whose images begin with images, calibrated on images too."""
    return job(
        *STEPS, f"infer.image={pictures}", f"model.calibration_image={pictures}/c.png", "infer.prompts=[a red cat]",
        "infer.strength=0.5", "export_trt=tensorrt_rtx", "trt.optimization_level=0",
    )  # fmt: skip


@pytest.fixture(scope="module")
def fused(job, style) -> Path:
    """The tiny pipeline's run with a LoRA in its weights, which is handed over."""
    return job(*LEVEL_3, f"model.loras=[{style}:0.5]", "hand_over=[diffusers_modelopt]", name="fused")


def test_each_image_of_a_folder_is_changed_and_the_encoder_is_a_part(changed, pictures):
    record = record_of(changed)
    assert record["prompts"] == ["a red cat"] * 3
    assert len(list((changed / "images/quantized").glob("*.png"))) == 3
    assert list(record["plans"]) == ["unet", "vae", "text_encoder", "vae_encoder"]
    assert record["parity"]["vae_encoder"]["relative_error"] < record["parity"]["vae_encoder"]["tolerance"]
    (x,) = onnx.load(changed / "onnx/vae_encoder/vae_encoder.onnx").graph.input
    axes = [axis.dim_param or axis.dim_value for axis in x.type.tensor_type.shape.dim]
    assert axes == ["batch", 3, "image_height", "image_width"]
    assert describe_plan(changed / "plan/vae_encoder.plan")["version"]
    assert len(record["fidelity"]["latent_sqnr_db"]) == 3, "half of four steps, which are five calls of PNDM"
    inputs = record["inputs"]
    assert "calibrating on 2 prompts: 4 calls" in (changed / "quantize.log").read_text(), "from images too"
    assert inputs["image"]["sha256"] and inputs["calibration_image"]["sha256"] != inputs["image"]["sha256"]


def test_an_earlier_run_changes_other_images(done, changed, pictures, mask, tmp_path):
    knobs = f"run={changed}", f"infer.image={pictures}/b.png", "prompts=[a house]", "steps=4", "num_warmup_runs=0"
    for name, more in {"few": "strength=0.25", "many": "strength=1", "part": f"mask={mask}"}.items():
        done("infer.py", *knobs, f"infer.{more}", "infer.num_timed_runs=1", f"hydra.run.dir={tmp_path / name}")
    few, many, part = (pixels(tmp_path / name / "images/0000.png") for name in ("few", "many", "part"))
    assert few.shape == (64, 64, 3) and np.abs(few - many).mean() > 1
    left, right = np.abs(part - few)[:, :24].mean(), np.abs(part - many)[:, 40:].mean()
    assert left < np.abs(part - many)[:, :24].mean(), "what is not masked stays nearer to the image"
    assert right < np.abs(part - few)[:, 40:].mean(), "and what is, nearer to what is made of noise"


def test_a_checkpoint_for_inpainting(refused, job, tiny, pictures, mask, tmp_path):
    for_inpainting(sd15_of_one_level, tmp_path / "sd15")
    masked = f"model.path={tmp_path}/sd15", f"infer.image={pictures}/a.png", f"infer.mask={mask}"
    said = refused("quantize.py", *tiny.knobs, *STEPS, *masked, f"hydra.run.dir={tmp_path}/refused")
    assert "model.calibration_image and model.calibration_mask are not given, expected both" in said
    calibrated = f"model.calibration_image={pictures}/b.png", f"model.calibration_mask={mask}"
    (sample, *_) = onnx.load(job(*STEPS, *masked, *calibrated) / "onnx/unet/unet.onnx").graph.input
    assert sample.type.tensor_type.shape.dim[1].dim_value == 9


def test_a_lora_is_in_everything_that_is_made(tiny, fused):
    """Beside the run without it."""
    runs = tiny.run, fused
    without, adapted = map(record_of, runs)
    assert adapted["inputs"]["lora 1 at 0.5"]["sha256"] and adapted["fingerprint"] != without["fingerprint"]
    assert not np.array_equal(*(pixels(run / "images/full_precision/0000.png") for run in runs))
    scales = [{row["name"]: row["weight_scale_max"] for row in rows_of(run / "layers.csv")}[LAYER] for run in runs]
    assert scales[0] != scales[1]
    assert "style.safetensors:0.5" in (fused / "report.html").read_text()
    card = (fused / "hand_over/diffusers_modelopt/README.md").read_text()
    assert "The LoRA style.safetensors:0.5 is fused into the weights" in card


def test_judge_adds_a_lora_beside_the_quantized_weights_of_a_run_without_it(done, tiny, fused, style, cache, tmp_path):
    lora, runs = f"model.loras=[{style}:0.5]", {"without": tiny.run, "fused": fused}
    judged = [knob for knob in tiny.knobs if knob.startswith(("model", "infer.prompts", "infer.steps"))]
    given = f"candidates=[{','.join(map(str, runs.values()))}]", f"cache.dir={cache}"
    done("judge.py", *judged, lora, *given, f"hydra.run.dir={tmp_path}/judged")
    folders = {name: tmp_path / "judged" / run.name for name, run in runs.items()}
    said = {name: record_of(folder)["judged"]["loras"] for name, folder in folders.items()}
    assert said == {"without": "beside", "fused": "fused"}
    images = {name: pixels(folder / "images/quantized/0000.png") for name, folder in folders.items()}
    assert not np.array_equal(images["without"], images["fused"])


def test_a_controlnet_goes_through_job_judge_and_export(done, refused, pictures, tmp_path):
    """Of two levels, so that a residual has half the latents' sides; its own part, its graph and its plan."""
    TINY["sd15"](tmp_path / "base")
    controlnet(tmp_path / "net", tmp_path / "base/unet")
    images = f"infer.control=[{pictures}/a.png]", "infer.prompts=[a red cat]", "infer.steps=2"
    model = ("model=sd15", f"model.path={tmp_path}/base", f"model.controlnets=[{tmp_path}/net:0.8]", *images,
             "model.width=64", "model.height=64", f"cache.dir={tmp_path}/cache")  # fmt: skip
    begun, given = ("quantize.py", *QUICK, *model, "quant_level=3"), f"model.calibration_control=[{pictures}/b.png]"
    said = refused(*begun, f"hydra.run.dir={tmp_path}/refused")
    assert "model.calibration_control is [], expected condition images" in said
    parts, plans = "quantize.parts={controlnet: int8_weight_only}", "export_trt=tensorrt_rtx"
    done(*begun, given, parts, plans, "trt.optimization_level=0", f"hydra.run.dir={tmp_path}/run")
    record = record_of(tmp_path / "run")
    assert list(record["plans"]) == ["unet", "vae", "text_encoder", "controlnet"]
    graphs = {part: onnx.load(onnx_path(tmp_path / "run", part)).graph for part in ("unet", "controlnet")}
    outputs = [output.name for output in graphs["controlnet"].output]
    inputs = {each.name: each.type.tensor_type.shape.dim for each in graphs["unet"].input}
    assert outputs == ["down_0", "down_1", "down_2", "down_3", "mid"] == list(inputs)[-5:]
    assert [axis.dim_param or axis.dim_value for axis in inputs["mid"]] == ["batch", 128, "height_2", "width_2"]
    assert record["latency"]["openvino"]["controlnet"].keys() == record["latency"]["openvino"]["unet"].keys() == {"2"}
    assert record["inputs"]["controlnet 1 at 0.8"]["sha256"] and record["inputs"]["control 1"]["sha256"]
    assert record["fidelity"]["psnr"]["mean"] > 25 and "control a.png" in (tmp_path / "run/report.html").read_text()
    timed = "num_warmup_runs=0", "infer.num_timed_runs=1"
    done("infer.py", f"run={tmp_path}/run", *images, *timed, f"hydra.run.dir={tmp_path}/drawn")
    one, other = tmp_path / "drawn/images/0000.png", tmp_path / "run/images/quantized/0000.png"
    assert np.abs(pixels(one) - pixels(other)).mean() < 2
    said = refused("hand_over.py", f"run={tmp_path}/run", "to=diffusers_torchao", f"hydra.run.dir={tmp_path}/no")
    assert "no ControlNet with to" in said
    done(*begun, given, "hand_over=[diffusers_torchao]", f"hydra.run.dir={tmp_path}/plain")
    written = tmp_path / "plain/hand_over/diffusers_torchao"
    assert not (written / "controlnet").exists() and "ControlNets" in (written / "README.md").read_text()
    done("judge.py", *model, f"candidates=[{written},{tmp_path}/run]", f"hydra.run.dir={tmp_path}/judged")
    assert len(rows_of(tmp_path / "judged/summary.csv")) == 2


def test_a_checkpoint_is_exported_as_it_is_and_drawn(done, tiny, style, tmp_path):
    lora = f"model.loras=[{style}]", "model.encoder=true", "trt.optimization_level=0"
    done("export_trt.py", *tiny.knobs[:4], *lora, f"hydra.run.dir={tmp_path}/exported")
    for part in ("unet", "vae", "text_encoder", "vae_encoder"):
        assert (tmp_path / f"exported/onnx/{part}/{part}.onnx").is_file()
        assert (tmp_path / f"exported/plan/{part}.plan").is_file()
    kinds = {weight.data_type for weight in onnx.load(tmp_path / "exported/onnx/unet/unet.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 not in kinds
    knobs = "prompts=[a red cat]", "steps=2", "num_warmup_runs=0", "infer.num_timed_runs=1"
    done("infer.py", f"run={tmp_path / 'exported'}", *knobs, f"hydra.run.dir={tmp_path / 'drawn'}")
    assert pixels(tmp_path / "drawn/images/0000.png").std() > 1
