"""Every class of diffusers for images or video of a prompt alone is built or counted as left out, and runs."""

import inspect
import json
import re
from importlib.util import find_spec

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from tests.zoo import (
    CASES,
    build,
    call,
    first_call,
    from_images,
    images,
    makes_video,
    takes_a_prompt_alone,
    takes_images,
    write,
)
from tests.zoo.cases import Case

pytestmark = pytest.mark.commit

QUICK = ["StableDiffusionPipeline", "FluxPipeline", "QwenImagePipeline"]
CAT, BOATS = "a photo of a red cat", "two small boats at sunset near the old harbour"
WIDE = {"HunyuanImagePipeline": "projects its second text to 2048, whatever the configuration says"}
FRAMES = {"num_frames", "video_length", "frames", "video", "control_video", "segment_frame_length"}
OPENED_ALONE = {"accelerate"}  # a package that opens a folder, and no call needs


@pytest.mark.slow
def test_every_class_that_makes_images_or_frames_of_a_prompt_or_takes_images_is_built_or_counted():
    """A class that is new in diffusers changes a count: it gets a tiny pipeline, or stays away for a known reason."""
    named = {name: getattr(diffusers, name, None) for name in dir(diffusers)}  # some names have no class any more
    kinds = {
        name: each for name, each in named.items() if isinstance(each, type) and issubclass(each, DiffusionPipeline)
    }
    found = {name for name, kind in kinds.items() if takes_a_prompt_alone(kind) and not makes_video(kind)}
    assert {"StableDiffusionPipeline", "FluxPipeline", "ZImagePipeline"} <= found  # else the search is broken
    assert "FluxKontextPipeline" not in found and "WanPipeline" not in found
    takes = {name: inspect.signature(kind.__call__).parameters.keys() for name, kind in kinds.items()}
    found |= {name for name, own in takes.items() if name.endswith("Pipeline") and "prompt" in own and FRAMES & own}

    of_images, built = {name for name, kind in kinds.items() if takes_images(kind)}, {n.split(",")[0] for n in CASES}
    assert {"FluxKontextPipeline", "WanImageToVideoPipeline", "StableVideoDiffusionPipeline"} <= of_images
    assert "FluxPipeline" not in of_images and "StableAudioPipeline" not in of_images
    assert {n.split(",")[0] for n in from_images.CASES} <= of_images and built <= kinds.keys()
    assert all(case.images for case in from_images.CASES.values())
    left_out = sorted((found | of_images) - built)
    assert len(left_out) == 135, left_out


def test_the_same_seed_builds_the_same_and_leaves_the_random_state():
    state = torch.get_rng_state()
    first, second, other = (build("FluxPipeline", seed).transformer.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    assert not torch.equal(first["proj_out.weight"], other["proj_out.weight"])
    assert torch.equal(state, torch.get_rng_state())


# Weights that do not reach the output by the class's own making: a last block's text, arguments of other uses, and the
# bias of keys, which a softmax cancels. HiDream's experts run without gradients.
UNREACHED = {
    "HiDreamImagePipeline": r"experts\.|ff_i\.gate",
    "HunyuanImagePipeline": r"to_k\.bias",
    "LuminaPipeline": r"^pad_token$|attn2\.norm_k\.bias",
    "NucleusMoEImagePipeline": r"norm_added_q",
    "QwenImagePipeline": r"^transformer_blocks\.1\.(attn\.(add_q|to_add_out|norm_added_q)|txt_mlp)",
    "StableDiffusion3Pipeline": r"^transformer_blocks\.1\.attn\.(add_q|norm_added_q)",
}


@pytest.mark.release
@pytest.mark.parametrize("name", images.CASES)
def test_every_weight_of_the_denoiser_reaches_its_output(name):
    if lacking(CASES[name]):
        pytest.skip(f"{name} needs {', '.join(lacking(CASES[name]))}")
    pipeline = build(name)
    denoiser = getattr(pipeline, CASES[name].denoiser)
    given = first_call(pipeline, name, 'two small boats and the word "sunset"')  # some encode what is quoted by itself
    output = denoiser.requires_grad_(True)(**given)
    sum((part * torch.randn_like(part)).sum() for part in tensors(output)).backward()
    unreached = {
        weight
        for weight, parameter in denoiser.named_parameters()
        if parameter.numel() and (parameter.grad is None or parameter.grad.abs().max() < 1e-8)
    }
    assert [weight for weight in unreached if not re.search(UNREACHED.get(name, "^$"), weight)] == []


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts if part is not None for tensor in tensors(part)]


def lacking(case: Case) -> list[str]:
    return [package for package in case.needs if find_spec(package) is None]


def image(pipeline, name: str, prompt: str | list[str], **options) -> np.ndarray:
    """Images [N, H, W, 3], or videos [N, frames, H, W, 3]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = pipeline(**(call(name, prompt, **options) | {"output_type": "np"}))
    made = np.asarray(output[0] if isinstance(output, tuple) else next(iter(output.values())))
    return made[None] if made.ndim == 4 and name not in images.CASES else made


@pytest.mark.filterwarnings("ignore::UserWarning")  # of diffusers and torch: autocast, flex attention, tokenizers
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.release)
    for name in CASES
    if name not in from_images.CASES  # those are compared with diffusers in `test_pipeline`
])  # fmt: skip
def test_a_folder_opens_and_makes_images_or_frames_of_its_prompts(name, tmp_path):
    case = CASES[name]
    if set(lacking(case)) - OPENED_ALONE:
        pytest.skip(f"{name} needs {', '.join(lacking(case))}")
    write(name, tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == name.split(",")[0] and case.denoiser in index
    assert not list(tmp_path.rglob("*.bin"))
    built = build(name)
    opened = built if lacking(case) else DiffusionPipeline.from_pretrained(tmp_path, local_files_only=True)
    for pipeline in (built, opened):
        pipeline.set_progress_bar_config(disable=True)
        case.prepare(pipeline)
    cat, boats = (image(opened, name, prompt) for prompt in (CAT, BOATS))
    assert np.isfinite(cat).all() and cat.std() > 0.01
    assert np.abs(cat - boats).max() > (0.01 if name in images.CASES else 1e-3)
    assert np.array_equal(cat, image(opened, name, CAT))
    assert np.abs(cat - image(built, name, CAT)).max() < 1e-4
    larger = image(opened, name, CAT, larger=True)
    assert np.isfinite(larger).all() and larger.shape != cat.shape
    if name in images.CASES:
        networks = [part for part in opened.components.values() if isinstance(part, torch.nn.Module)]
        assert all(each.std() > 1e-3 for network in networks for each in network.parameters() if each.numel() > 8)
        count = sum(weight.numel() for network in networks for weight in network.parameters())
        size = sum(path.stat().st_size for path in tmp_path.rglob("*"))
        assert 1e4 < count < 1e6 and size < 4e6 or name in WIDE
    else:
        assert len(cat) == 1 and cat.shape[1] > 1 and cat.shape[2:] == (case.height, case.width, 3)
        assert larger.shape[2:4] == case.larger[::-1]
    if case.batched:
        both = image(opened, name, [CAT, BOATS])
        assert both.shape == (2, *cat.shape[1:]) and np.isfinite(both).all()
        assert np.abs(both[0] - both[1]).max() > (0.01 if name in images.CASES else 1e-3)
