"""Sweeps through launchers leave what one without leaves, also when the command is killed while jobs run; and two
processes calibrate, each of which imports everything and loads the model itself."""

import importlib.metadata
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from sd_quant.calibration.collection import Pass, calibrate, fabric_for
from sd_quant.calibration.store import pack
from sd_quant.checkpoints.nemo import open_nemo, write_nemo
from sd_quant.errors import SdQuantError
from sd_quant.inference.loading import LoadedModel, load_model
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.sdxl import FAMILY
from sd_quant.quantization.statistics import Statistics

from .shared import json_of, record_of, same, without_times
from .sweeping import JOBS, ended

pytestmark = [pytest.mark.nightly, pytest.mark.needs(cores=2, memory_gb=6, files=1000)]

INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
ONE_HOST = ["hydra/launcher=one_host", "hydra.launcher.n_jobs=2"]
THREE = "quant_level=1,2,3"


def needs(package: str) -> pytest.MarkDecorator:
    missing = {package, f"hydra-{package}-launcher"} - INSTALLED
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(sorted(missing))} are not installed")


def alone_killed(sweep, *knobs: str) -> int:
    """Kills a command's process, not those of its jobs, when all jobs have begun to write; returns their group."""
    command = sweep.begun(*knobs)
    command.kill()
    command.wait()
    assert not list(sweep.folder.glob("*/metrics.json"))
    return command.pid


@needs("joblib")
def test_on_one_host_jobs_end_with_the_command_and_one_that_fails_stops_no_other(sweep):
    folder = sweep.folder
    (folder / "quant_level=3/.lock").mkdir(parents=True)  # what that job opens first, as a file
    alone_killed(sweep, *ONE_HOST, THREE)
    said, complaint = ended(sweep.begin(*ONE_HOST, THREE), 1)
    assert "error: 1 of 3 jobs is not done (quant_level=3: " in complaint and ".lock is no file" in complaint
    assert all(f"job {number} of 3: quant_level={number}" in said for number in (1, 2, 3))
    assert json_of(folder / "quant_level=3/failure.json")["exit_code"] == 2
    assert ".lock is no file" in (folder / "quant_level=3/quantize.log").read_text()
    logs = "".join((folder / job / "quantize.log").read_text() for job in JOBS)
    assert "which works in" not in logs, "no job has waited"
    assert same(without_times(folder / "summary.csv")[:2], sweep.undisturbed)

    here = len(os.sched_getaffinity(0))
    cores = {record_of(folder / job)["environment"]["machine"]["usable_cores"] for job in JOBS}
    assert cores <= {max(1, here // 2), here - here // 2}


@needs("submitit")
def test_jobs_of_submitit_outlive_the_command_and_are_waited_for(sweep):
    given, logs = "hydra/launcher=slurm_local", [sweep.folder / job / "quantize.log" for job in JOBS]
    group = alone_killed(sweep, given)
    os.killpg(group, signal.SIGSTOP)  # else they may be done before others wait
    again = sweep.begin(given)
    try:
        for _ in range(6000):
            if again.poll() is not None or all("waiting for another process" in log.read_text() for log in logs):
                break
            time.sleep(0.05)
        early = list(sweep.folder.glob("*/metrics.json"))
    finally:
        os.killpg(group, signal.SIGCONT)
    sweep.is_whole(again)
    assert not early
    for text in (log.read_text() for log in logs):
        assert "waiting for another process, which works in" in text and "done before" in text


# ------------------------------------------------------------------------------------------- two processes calibrate

PROMPTS = ["a glossy icon of a rocket", "a cat", "two flags on a pole"]


@pytest.fixture
def model(checkpoint) -> LoadedModel:
    return load_model(open_nemo(checkpoint))


def collected(model: LoadedModel, prompts=PROMPTS, devices: int = 1, **options) -> Statistics:
    names = [name for name, role in FAMILY.layer_roles(model.modules["unet"]).items() if role != "excluded"]
    sampling = Sampling(steps=2, guidance_scale=5.0, height=64, width=64, batch_size=1, seed=3)
    return calibrate(Pass(model, names, prompts, sampling), fabric_for("cpu", devices), checkpoint_sha256="", **options)


def test_two_processes_find_exactly_what_one_finds(model, tmp_path):
    """Final latents too, which the decoder is calibrated on."""
    of_two, of_one = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    found = pack(collected(model, devices=2, cache=tmp_path, on_latent=of_two.__setitem__))
    torch.testing.assert_close(found, pack(collected(model, on_latent=of_one.__setitem__)), rtol=0, atol=0)
    torch.testing.assert_close(dict(sorted(of_two.items())), of_one, rtol=0, atol=0)
    [entry] = tmp_path.rglob("*.safetensors")
    written = entry.stat().st_mtime_ns
    torch.testing.assert_close(found, pack(collected(model, cache=tmp_path)), rtol=0, atol=0)
    assert entry.stat().st_mtime_ns == written  # one entry serves any number of processes


def test_an_error_in_another_process_arrives_as_its_own_sentence(model, tmp_path):
    path = tmp_path / "overflowing.nemo"
    nn.init.constant_(model.modules["unet"].get_submodule("down_blocks.0.resnets.0.norm1").weight, 3e38)
    write_nemo(path, model.checkpoint.model_config, model.modules, torch.float32)
    with pytest.raises(SdQuantError) as raised:
        collected(replace(model, checkpoint=open_nemo(path)), PROMPTS[:2], devices=2)
    layer = "down_blocks.0.resnets.0.conv1"
    assert str(raised.value) == f"the input of layer {layer} is not finite at prompt 0, step 0"
