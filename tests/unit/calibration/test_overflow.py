"""Activations that fp16 would not hold are found and named."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import T5Config, T5EncoderModel

from sd_quant.calibration.collected_elsewhere import expected_tensors
from sd_quant.calibration.overflow import too_large, watch
from sd_quant.calibration.store import Entries, pack, unpack
from sd_quant.models.parts import network_in
from sd_quant.models.text_encoders import t5_part
from sd_quant.quantization.statistics import Peak, Statistics, highest, merge

pytestmark = pytest.mark.commit

PART = t5_part("text_encoder", 4)
HALF = {"t5": dataclasses.replace(PART.contract, weights=torch.float16)}


def encoder(scale: float = 1.0) -> nn.Module:
    """A tiny T5 as a part, whose feed-forward's last weight is ``scale`` times as large."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    network = T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu")).eval().requires_grad_(False)
    network.encoder.block[1].layer[1].DenseReluDense.wo.weight.mul_(scale)
    return PART.wrap(network)


def peaks_of(module: nn.Module) -> dict[str, Peak]:
    with watch({"t5": network_in(PART, module)}) as peaks:
        module(input_ids=torch.tensor([[1, 2, 3, 4]]))
    return peaks


def test_a_part_that_overflows_fp16_is_named_with_its_layer_and_the_knob():
    """The residual stream behind the layer is as large, but it comes later; fp32 holds all of it."""
    assert too_large(peaks_of(encoder()), HALF) is None
    found = peaks_of(encoder(1e9))
    assert found["t5"].largest > 40_000 and found["t5"].place in (
        "output of encoder.block.1.layer.1.DenseReluDense.wo",
        "input of encoder.final_layer_norm",
    )
    message = too_large(found, HALF)
    assert message.startswith("activations are larger than 32,752, half of the largest number of fp16")
    assert f"(t5, {found['t5'].place}: " in message and "set export.dtype={t5: fp32}" in message
    assert too_large(found, {"t5": PART.contract}) is None


class Residual(nn.Module):
    """Every module's output is small, and their sum is not."""

    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Identity(), nn.LayerNorm(2)

    def forward(self, x):
        return self.norm(x + self.one(x))


def test_a_residual_stream_is_seen_by_the_norm_that_reads_it():
    for value in (-30_000.0, 1.0):
        network = Residual()
        with watch({"part": network}) as peaks:
            network(torch.tensor([[value, 0.0]]))
        assert peaks == {"part": Peak("input of norm", 2 * abs(value))}
        assert not network.norm._forward_hooks and not network.norm._forward_pre_hooks


def test_peaks_are_kept_with_the_statistics(tmp_path: Path):
    """Of disjoint prompts the larger counts. A file from elsewhere may have as many as a pipeline has parts."""
    first = Statistics({}, {}, {"unet": Peak("output of mid", 3.5), "vae": Peak("output of up", 1.0)})
    second = Statistics({}, {}, {"unet": Peak("output of down", 2.0)})
    assert unpack(pack(first)).peaks == merge([second, first]).peaks == first.peaks
    assert highest([]) == {}
    entries = Entries(tmp_path, {}, ["a cat"])
    entries.write(range(1), first)
    assert entries.read(range(1)).peaks == first.peaks
    stored = {f"peak|{number}|x": (torch.float64, ()) for number in range(99)}
    assert len(expected_tensors({}, {}, 1, 1, stored)) == 16
