"""Statistics to keep and to compare, those of two layers and a UNet's inputs among them."""

import torch
from torch import nn

from sd_quant.calibration.store import pack
from sd_quant.models.sdxl import unet_part
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS
from sd_quant.quantization.statistics import LayerStatistics, Sample, Statistics

STEPS = 2
CONVOLUTIONS = [  # whose patches are what their outputs multiply
    {"kernel_size": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "padding": 1, "dilation": 2},
    {"kernel_size": (3, 2), "stride": (1, 2), "padding": (0, 1), "dilation": (2, 1)},
    {"kernel_size": 4, "padding": "same"},
]
with torch.device("meta"):
    LAYERS = {"down.to_q": nn.Linear(4, 3), "down.conv1": nn.Conv2d(1, 2, 3)}
UNET = {"in_channels": 4, "cross_attention_dim": 6, "projection_class_embeddings_input_dim": 5}
CONTRACT = unet_part(UNET | {"addition_time_embed_dim": 0}, CONTEXT_TOKENS, "nemo").contract
ORIGIN = {
    "checkpoint": "a" * 64,
    "sampling": {"steps": STEPS, "guidance_scale": 5.0, "height": 64, "width": 128, "batch_size": 1, "seed": 42},
    "device": "cuda",
    "kept": [128, 8],
    "versions": {"torch": "2.13.0"},
}


def sample(random: torch.Generator, count: int, *shape: int, dtype: torch.dtype) -> Sample:
    values = torch.randn(count, *shape, generator=random).to(dtype)
    return Sample(values, torch.rand(count, generator=random, dtype=torch.float64).sort().values)


def statistics(segment: range, rows: int = 3, seed: int | None = None) -> Statistics:
    """What calibration leaves of ``LAYERS`` and the UNet's inputs."""
    random = torch.Generator().manual_seed(segment.stop if seed is None else seed)
    half, ranges = torch.float16, torch.rand(segment.stop, STEPS, generator=random)
    linear, folds = torch.rand(STEPS, 4, generator=random), torch.rand(2, 4, generator=random)
    linear = LayerStatistics("linear", linear, sample(random, rows, 4, dtype=half), folds)
    conv = LayerStatistics("conv", ranges, sample(random, rows, 9, dtype=half))
    inputs = {"x": (4, 8, 16), "timesteps": (), "context": (80, 6), "y": (5,)}
    calls = {name: sample(random, 2, 2, *shape, dtype=torch.float32) for name, shape in inputs.items()}
    return Statistics({"down.to_q": linear, "down.conv1": conv}, calls)


def assert_same(first: Statistics, second: Statistics) -> None:
    """Bit for bit: NaN equals itself and -0 is not 0. Layers and calls may stand in another order."""
    ours, others = pack(first), pack(second)
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (others[name].dtype, others[name].shape), name
        assert tensor.numpy().tobytes() == others[name].numpy().tobytes(), name
