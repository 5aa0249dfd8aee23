"""Statistics to keep and to compare."""

import torch

from sd_quant.calibration.store import pack
from sd_quant.quantization.statistics import Sample, Statistics


def sample(random: torch.Generator, count: int, *shape: int, dtype: torch.dtype) -> Sample:
    values = torch.randn(count, *shape, generator=random).to(dtype)
    return Sample(values, torch.rand(count, generator=random, dtype=torch.float64).sort().values)


def assert_same(first: Statistics, second: Statistics) -> None:
    """Bit for bit: NaN equals itself and -0 is not 0. Layers and calls may stand in another order."""
    ours, others = pack(first), pack(second)
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (others[name].dtype, others[name].shape), name
        assert tensor.numpy().tobytes() == others[name].numpy().tobytes(), name
