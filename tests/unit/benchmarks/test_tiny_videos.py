"""Tiny text-to-video pipelines: every class of the installed diffusers is built or left out, and makes frames."""

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tests.zoo as tiny
from tests.zoo.videos import CASES, LEFT_OUT

pytestmark = pytest.mark.commit

FRAMES = {"num_frames", "video_length", "frames", "video", "control_video", "segment_frame_length"}
PROMPTS = ["a red cat", "two small boats at sunset near the old harbour"]


def classes() -> dict[str, Any]:
    """Returns the classes of pipelines that take a prompt and make frames, by their public names."""
    found = {}
    for name in dir(diffusers):
        if not name.endswith("Pipeline") or name.startswith("Onnx"):
            continue
        kind = getattr(diffusers, name)
        if inspect.isclass(kind) and issubclass(kind, diffusers.DiffusionPipeline):
            names = inspect.signature(kind.__call__).parameters.keys()
            if "prompt" in names and FRAMES & names:
                found[name] = kind
    return found


def opened(name: str, folder: Path) -> Any:
    """Opens a folder as diffusers does, but for networks with parts in fp32, which it opens with accelerate only."""
    given: dict[str, Any] = {}
    if importlib.util.find_spec("accelerate") is None:
        index = json.loads((folder / "model_index.json").read_text())
        for part, value in index.items():
            kind = getattr(diffusers, value[1] or "", None) if isinstance(value, list) else None
            if getattr(kind, "_keep_in_fp32_modules", None):
                given[part] = network = kind.from_config(kind.load_config(folder / part)).eval()
                network.load_state_dict(load_file(folder / part / "diffusion_pytorch_model.safetensors"))
        # A part that may be None, as Wan's denoisers, is read from the folder even where it is given.
        (folder / "model_index.json").write_text(json.dumps(index | dict.fromkeys(given, [None, None])))
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, **given)
    CASES[name].prepare(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def frames(pipeline: Any, name: str, prompt: str | list[str], **options: Any) -> np.ndarray:
    """Returns the frames of a run, float32 (videos, frames, height, width, 3)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = pipeline(**(tiny.call(name, prompt, **options) | {"output_type": "np"}))
    videos = np.asarray(output[0] if isinstance(output, tuple) else next(iter(output.values())))
    return videos if videos.ndim == 5 else videos[None]


@pytest.mark.slow  # imports every pipeline
def test_every_class_is_built_or_left_out_for_a_reason() -> None:
    built = {name.split(",")[0] for name in CASES}
    assert built | LEFT_OUT.keys() == classes().keys()
    assert not built & LEFT_OUT.keys()


def test_the_weights_are_those_of_the_seed() -> None:
    first, again, other = (tiny.build("WanPipeline, two denoisers", seed).transformer_2 for seed in (1, 1, 2))
    one, same, another = (network.state_dict()["blocks.0.scale_shift_table"] for network in (first, again, other))
    assert torch.equal(one, same) and not torch.equal(one, another)


@pytest.mark.release
@pytest.mark.filterwarnings("ignore::UserWarning")  # of diffusers and torch: autocast, flex attention, tokenizers
@pytest.mark.parametrize("name", CASES)
def test_a_folder_opens_and_its_frames_follow_the_prompt(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tiny.write(name, tmp_path)
    pipeline = opened(name, tmp_path)
    assert type(pipeline).__name__ == name.split(",")[0]

    one = frames(pipeline, name, PROMPTS[0])
    assert one.shape[0] == 1 and one.shape[1] > 1 and one.shape[2:] == (case.height, case.width, 3)
    assert np.isfinite(one).all() and one.std() > 0.01
    assert np.abs(one - frames(pipeline, name, PROMPTS[1])).max() > 1e-3
    assert np.abs(one - frames(pipeline, name, PROMPTS[0])).max() == 0
    larger = frames(pipeline, name, PROMPTS[0], larger=True)
    assert np.isfinite(larger).all() and larger.shape[2:4] == case.larger[::-1]
    if case.batched:
        both = frames(pipeline, name, PROMPTS)
        assert np.isfinite(both).all() and both.shape == (2, *one.shape[1:])
        assert np.abs(both[0] - both[1]).max() > 1e-3
