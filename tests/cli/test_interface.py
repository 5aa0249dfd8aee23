"""What Python computes is what the command has left: the same layers, the same files, the same images. The notebook of
the examples runs, and the picture of a ``.nemo`` is that of diffusers' own pipeline of the same weights."""

import re

import nbformat
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from nbclient import NotebookClient

import sd_quant
from sd_quant.checkpoints.convert import convert
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.errors import ConfigError
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.metrics.fidelity import psnr
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, scheduler
from sd_quant.models.text_encoders import padded
from sd_quant.numbers import relative_error
from sd_quant.places import HOME

from .shared import PROMPTS, images_in, json_of, rows_of

pytestmark = pytest.mark.commit

PAGE, NOTEBOOK = HOME / "docs/python.md", HOME / "examples/notebook.ipynb"


@pytest.fixture(scope="module")
def model(main_job, checkpoint) -> sd_quant.Model:
    return sd_quant.open("sdxl_mini", checkpoint, cache=main_job.cache)


@pytest.fixture(scope="module")
def quantized(model) -> sd_quant.Quantized:
    statistics = model.calibrate(calib_size=4, n_steps=5)
    return model.quantize(statistics, "int8", quant_level=3, alpha=0.8)


def test_layers_are_those_of_the_command(quantized, main_job):
    expected, found = rows_of(main_job.directory / "layers.csv"), quantized.layers()
    assert [row["name"] for row in found] == [row["name"] for row in expected]
    for row, there in zip(found, expected, strict=True):
        for name, value in row.items():
            if isinstance(value, float):  # errors, summed by another number of threads
                assert float(there[name]) == pytest.approx(value, rel=1e-3), (row["name"], name)
            else:
                assert there[name] == ("" if value is None else str(value)), (row["name"], name)


def test_files_are_those_of_the_command(quantized, main_job, tmp_path):
    files = quantized.export(tmp_path / "exported")
    assert list(files) == ["unet_xl", "vae", "clip1", "clip2"]
    for part, path in files.items():
        assert path.read_bytes() == (main_job.directory / f"onnx/{part}/{part}.onnx").read_bytes()
    assert not (tmp_path / "exported/full_precision").exists()


@pytest.mark.nightly
def test_it_is_handed_over_to_other_tools(quantized, main_job, tmp_path):
    """With the command's card, but for how it was made and the last digits of what images say."""
    folder = quantized.hand_over("diffusers_modelopt", tmp_path / "diffusers_modelopt", PROMPTS, steps=5)
    assert (folder / "unet/modelopt_state.pth").is_file() and (folder / "vae/config.json").is_file()
    theirs = main_job.directory / "hand_over/diffusers_modelopt"
    ours, expected = (json_of(each / "hand_over.json") for each in (folder, theirs))
    # of images whose sums another process has in another order
    assert ours["fidelity"]["psnr"]["mean"] == pytest.approx(expected["fidelity"]["psnr"]["mean"], abs=0.5)
    differ = {name for name in ours if ours[name] != expected[name]}
    assert ours["bytes"] == pytest.approx(expected["bytes"], rel=0.01)  # ModelOpt pickles its state
    assert differ <= {"folder", "run", "command", "fidelity", "bytes"} and "model.quantize(" in ours["command"]
    cards = [(each / "README.md").read_text().split("\n## ") for each in (folder, theirs)]
    assert cards[0][:2] == cards[1][:2] and len(cards[0]) == len(cards[1])
    with pytest.raises(ConfigError, match="folder is .*modelopt, expected a new one, or an empty one"):
        quantized.hand_over("diffusers_modelopt", folder)
    with pytest.raises(ConfigError, match="target is nobody, expected one of comfyui, "):
        quantized.hand_over("nobody", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_images_are_those_of_the_command(quantized, main_job):
    comparison = sd_quant.compare([quantized], PROMPTS, steps=5)
    sides = (main_job.directory / "images" / side for side in ("full_precision", "quantized"))
    full, ours = (np.asarray([*images_in(side).values()], np.uint8) for side in sides)
    differ = abs(comparison.full_precision - full.astype(int))
    # sums of AVX2 are ordered by where numbers lie in memory
    assert differ.max() <= 1 and (differ > 0).mean() < 0.001
    (result,) = comparison.results
    # by OpenVINO, and here by the simulation
    assert min(psnr(ours, result.images)) > max(psnr(ours, comparison.full_precision))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_snippet_for_modelopt_runs_as_the_page_has_it(quantized, model, main_job, tmp_path, monkeypatch, dtype):
    monkeypatch.chdir(tmp_path)
    quantized.save_modelopt("quantized_unet.pt")
    convert(model.path, tmp_path / "sdxl")
    (snippet,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "mto" in block]
    names: dict = {}
    exec(snippet.replace("float16", dtype), names)
    pipeline = names["pipeline"]
    assert {parameter.dtype for parameter in pipeline.unet.parameters()} == {getattr(torch, dtype)}
    pipeline.set_progress_bar_config(disable=True)
    sampling = {"num_inference_steps": 5, "height": 64, "width": 64, "output_type": "np"}
    restored = pipeline(PROMPTS, generator=torch.manual_seed(1), **sampling).images
    pipeline.unet = type(pipeline).from_pretrained("sdxl", torch_dtype=getattr(torch, dtype)).unet
    full = pipeline(PROMPTS, generator=torch.manual_seed(1), **sampling).images
    assert 18 < -10 * np.log10(np.square(restored - full).mean()) < 45  # quantized, and the same images


def printed(cells: list) -> list[str]:
    """The first words of every line of text that the cells have printed: the names, without figures."""
    outputs = [output for cell in cells for output in cell.get("outputs", []) if output.get("name") == "stdout"]
    return [line.partition("  ")[0] for output in outputs for line in output["text"].splitlines() if "level" in line]


@pytest.mark.nightly
@pytest.mark.needs(memory_gb=3)
def test_the_notebook_runs_and_its_outputs_are_of_today_and_name_no_machine(tmp_path):
    kept = nbformat.read(NOTEBOOK, 4)
    expected, text = printed(kept.cells), NOTEBOOK.read_text()
    assert len(expected) == 4 and len(text) < 400_000 and str(HOME) not in text
    assert not [out for cell in kept.cells for out in cell.get("outputs", []) if out.get("name") == "stderr"]
    resources = {"metadata": {"path": str(tmp_path)}}
    executed = NotebookClient(kept, timeout=1200, kernel_name="python3", resources=resources).execute()
    assert printed(executed.cells) == expected
    pictures = [out for cell in executed.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    assert len(pictures) == 2 and len(list(tmp_path.glob("outputs/notebook/int8/onnx/*/*.onnx"))) == 4


@pytest.mark.nightly
@torch.no_grad()
def test_a_picture_is_that_of_diffusers_own_pipeline(checkpoint, tmp_path):
    """``from_pretrained`` loads the converted folder, networks, tokenizers and all, and makes an image in fp32 with
    NeMo's sampler, the three zeros that NeMo pads the text with, and the same seed. The networks run the same code, so
    two orders of fp32 sums are all that differs over four guided steps."""
    opened, steps, prompt = open_nemo(checkpoint), [], "a glossy icon of a lighthouse"
    made = pipeline_of(opened, load_model(opened).torch_engines())([prompt], Sampling(4, 5.0, 64, 64, 1, 42))
    convert(checkpoint, tmp_path / "folder")
    pipeline = StableDiffusionXLPipeline.from_pretrained(tmp_path / "folder", torch_dtype=torch.float32)
    pipeline.scheduler = scheduler()
    pipeline.set_progress_bar_config(disable=True)
    context, unconditional, pooled, unconditional_pooled = pipeline.encode_prompt(prompt, device="cpu")

    def remember(pipeline, step, timestep, values):
        steps.append(values["latents"].clone())
        return values

    image = pipeline(
        prompt_embeds=padded(context, CONTEXT_TOKENS), pooled_prompt_embeds=pooled,
        negative_prompt_embeds=padded(unconditional, CONTEXT_TOKENS),
        negative_pooled_prompt_embeds=unconditional_pooled, num_inference_steps=4, guidance_scale=5.0, height=64,
        width=64, generator=torch.Generator().manual_seed(42), callback_on_step_end=remember, output_type="np",
    ).images[0]  # fmt: skip
    errors = [relative_error(theirs, ours) for theirs, ours in zip(torch.cat(steps), made.latents[0], strict=True)]
    assert len(errors) == 4 and max(errors) < 1e-5
    assert abs(made.images[0] - (255 * image).round()).max() <= 1
