"""Images of drawn folders and settings are diffusers' own, whatever the scheduler, the autoencoder and the batch."""

import inspect
import json
import random
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.schedulers import KarrasDiffusionSchedulers

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.errors import SdQuantError
from sd_quant.inference.loading import load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling

pytestmark = pytest.mark.slow

PROMPTS = ["a red cat", "a house at the end of a long road, at night", "a lamp"]
TOKENS = 32  # of T5
NOISE = [kind.name for kind in KarrasDiffusionSchedulers] + ["LCMScheduler", "TCDScheduler", "EDMEulerScheduler"]
NOISE = [name for name in NOISE if not hasattr(getattr(diffusers, name), "_backends")]  # of packages that are not here
FLOW = ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler"]
SAMPLERS = {"sd15": NOISE, "sd21": NOISE, "sdxl": NOISE, "pixart": NOISE, "sd3": FLOW, "flux": [FLOW[0], FLOW[2]]}
DRAWING = {"sdxl": "EulerAncestralDiscreteScheduler", "sd3": "FlowMatchLCMScheduler"}  # noise in each step
ENTRIES = {  # of a scheduler's config, and what is drawn for those that a class has
    "prediction_type": ["epsilon", "v_prediction", "sample"],
    "timestep_spacing": ["linspace", "leading", "trailing"],
    "beta_schedule": ["scaled_linear", "linear"],
    "rescale_betas_zero_snr": [False, True],
    "use_karras_sigmas": [False, True],
    "algorithm_type": ["dpmsolver++", "sde-dpmsolver++"],
    "final_sigmas_type": ["zero"],
    "stochastic_sampling": [False, True],
    "steps_offset": [0, 1],
    "shift": [1.0, 3.0],
}


def drawn_folder(of: random.Random, kind: type, sound: Path, folder: Path) -> dict[str, Any]:
    """Writes the folder of a tiny pipeline with another scheduler and another autoencoder's config."""
    shutil.copytree(sound, folder)
    known = inspect.signature(kind).parameters
    entries = {name: of.choice(values) for name, values in ENTRIES.items() if name in known}
    if kind.__name__ == "DPMSolverSinglestepScheduler":
        entries["algorithm_type"] = "dpmsolver++"
    scheduler = kind(**entries, **({"beta_start": 0.00085, "beta_end": 0.012} if "beta_start" in known else {}))
    scheduler.save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", kind.__name__]}))
    vae = json.loads((folder / "vae/config.json").read_text())
    channels = range(vae["latent_channels"])
    changed = of.choice([
        {}, {"scaling_factor": 0.5},
        {"latents_mean": [of.uniform(-2, 2) for _ in channels], "latents_std": [of.uniform(4, 9) for _ in channels]},
    ])  # fmt: skip
    (folder / "vae/config.json").write_text(json.dumps(vae | changed))
    return {"scheduler": kind.__name__, **entries, **changed}


def by_diffusers(folder: Path, sampling: Sampling) -> np.ndarray:
    """Each image alone, as somebody makes it who wants this seed."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    known, made = inspect.signature(type(pipe).__call__).parameters, []
    for number, prompt in enumerate(PROMPTS):
        given = {
            "max_sequence_length": TOKENS, "use_resolution_binning": False, "clean_caption": False,
            "negative_prompt": (sampling.negative_prompts or [None])[0], "height": sampling.height,
            "width": sampling.width, "guidance_scale": sampling.guidance_scale, "num_inference_steps": sampling.steps,
            "output_type": "np",
        }  # fmt: skip
        taken = {name: value for name, value in given.items() if name in known and value is not None}
        torch.manual_seed(sampling.seed + number)
        made.append(pipe(prompt, generator=torch.Generator().manual_seed(sampling.seed + number), **taken).images)
    return (np.concatenate(made) * 255).round()


def compare(family: str, scheduler: str, sound: Path, root: Path) -> None:
    """Compares the images of the first draw that diffusers takes."""
    for attempt in range(50):
        of, folder = random.Random(f"{family} {scheduler} {attempt}"), root / str(attempt)
        sampling = Sampling(
            of.randint(2, 5), of.choice([1.0, 3.0, 7.5]), 64, of.choice([64, 128]), of.choice([2, 3]), seed=attempt,
            negative_prompts=of.choice([None, ["rain"]]) if family != "flux" else None,
        )  # fmt: skip
        try:
            drawn = drawn_folder(of, getattr(diffusers, scheduler), sound, folder)
            expected = by_diffusers(folder, sampling)
        except (ValueError, NotImplementedError):  # the scheduler does not go with one of the entries
            continue
        break
    else:
        pytest.fail(f"diffusers refuses all that is drawn for {scheduler} in {family}")
    checkpoint = open_pipeline(folder, family, TOKENS if family in ("sd3", "flux", "pixart") else None)
    pipeline = pipeline_of(checkpoint, load_model(checkpoint).torch_engines())
    if not np.isfinite(expected).all():  # such as noise that is predicted where there is nothing but noise
        with pytest.raises(SdQuantError, match="not finite"):
            pipeline(PROMPTS, sampling)
        return
    apart = np.abs(pipeline(PROMPTS, sampling).images.astype(int) - expected)
    # bit for bit with AVX-512; with AVX2 alone sums are ordered by where their numbers lie in memory
    assert apart.max() <= 1 and apart.mean() < 0.01, (drawn, sampling)
    print(f"{family} {drawn}: {'equal' if not apart.any() else f'{np.count_nonzero(apart)} of {apart.size} by one'}")


@pytest.mark.commit
@pytest.mark.parametrize("family", ["sdxl", "sd3"])
def test_images_of_a_scheduler_that_draws_are_diffusers_own(family, folder_of, tmp_path):
    compare(family, DRAWING[family], folder_of(family), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "scheduler"), [(family, scheduler) for family, each in SAMPLERS.items() for scheduler in each]
)
def test_images_are_diffusers_own(family, scheduler, folder_of, tmp_path):
    compare(family, scheduler, folder_of(family), tmp_path)
