"""Statistics collected on a GPU are those of the CPU. Skipped, with the reason, where there is none."""

from pathlib import Path

import pytest
import torch

from sd_quant.calibration.collection import Pass, calibrate, fabric_for
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.inference.loading import load_model
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.sdxl import FAMILY

pytestmark = [
    pytest.mark.commit,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine"),
]

CHECKPOINT = Path(__file__).parents[2] / "checkpoints/sdxl_mini.nemo"
PROMPTS = [f"a glossy icon of a {thing}" for thing in ("duck", "robot", "frog", "taxi")]


@pytest.fixture(scope="module")
def statistics():
    model = load_model(open_nemo(CHECKPOINT))
    names = [name for name, role in FAMILY.layer_roles(model.modules["unet"]).items() if role != "excluded"]

    def collect(accelerator: str, devices: int = 1):
        sampling = Sampling(2, 5.0, 64, 64, 1, 42)
        return calibrate(Pass(model, names, PROMPTS, sampling), fabric_for(accelerator, devices), checkpoint_sha256="")

    return collect


def test_the_gpu_sees_what_the_cpu_sees(statistics):
    """Convolutions run in TF32 there (10 bits of mantissa), so ranges differ by about 2^-10, a few steps deep."""
    expected, found = statistics("cpu"), statistics("cuda")
    assert expected.layers.keys() == found.layers.keys()
    for name, layer in expected.layers.items():
        torch.testing.assert_close(found.layers[name].amax, layer.amax, rtol=2e-2, atol=2e-2 * layer.amax.max().item())
        assert torch.equal(found.layers[name].rows.priority, layer.rows.priority)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_merge_to_what_one_sees(statistics):
    one, two = statistics("cuda"), statistics("cuda", devices=2)
    for name, layer in one.layers.items():
        torch.testing.assert_close(two.layers[name].amax, layer.amax, rtol=1e-5, atol=0)
