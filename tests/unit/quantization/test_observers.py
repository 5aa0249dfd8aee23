import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sd_quant.quantization.formats import FORMATS, fake_quantize
from sd_quant.quantization.observers import OBSERVERS
from sd_quant.quantization.observers.mse import squared_errors

pytestmark = pytest.mark.commit

COUNT = 30_011
each_distribution = pytest.mark.parametrize("distribution", ["gaussian", "rectified", "heavy-tailed", "one outlier"])


def draw(distribution: str) -> Tensor:
    """fp32 [COUNT], the same every time."""
    random = np.random.default_rng(0)
    values = random.standard_t(3, size=COUNT) if distribution == "heavy-tailed" else random.normal(size=COUNT)
    if distribution == "one outlier":
        values[7] = -30
    if distribution == "rectified":
        values = values.clip(min=0)
    return torch.from_numpy(values).float()


def amax_of(values: Tensor) -> float:
    return values.abs().max().item()


def modelopt_error(values: Tensor, threshold: float) -> float:
    """Of ModelOpt's own quantizer. Its ``compute_amax("mse")`` is of no use: 0.47 passes the number of bits where the
    quantizer takes a bias, and so returns the first range it tries, a sixteenth of the peak, whatever the values."""
    from modelopt.torch.quantization.tensor_quant import fake_tensor_quant

    quantized = fake_tensor_quant(values, torch.tensor(threshold), None, 8, False, True)
    return (quantized.double() - values.double()).square().mean().item()


@each_distribution
def test_squared_errors_are_those_of_modelopts_quantizer(distribution):
    """Within its fp32: the step is rounded, and with it which level the values near a boundary go to."""
    values = draw(distribution)
    thresholds = amax_of(values) * np.array([1.0, 0.9, 0.61, 0.3, 0.1, 0.01])
    expected = [modelopt_error(values, threshold) for threshold in thresholds]
    assert squared_errors(values.abs(), thresholds).tolist() == pytest.approx(expected, rel=1e-4)


@each_distribution
def test_mse_is_as_good_as_brute_force(distribution):
    """A grid seven times as fine finds an error less than 1 % smaller: the largest of the sample rise and fall over the
    thresholds' 1 %, so the curve is not quite smooth."""
    values = draw(distribution)
    peak = amax_of(values)
    grid = peak * np.geomspace(1, 1 / 20, 2000)
    best = modelopt_error(values, grid[squared_errors(values.abs(), grid).argmin()])
    found = OBSERVERS["mse"](values, peak)
    assert best < 0.98 * modelopt_error(values, peak)
    assert modelopt_error(values, found) < 1.01 * best


@each_distribution
def test_e4m3_is_judged_by_its_own_rounding(distribution):
    """The range that it chooses rounds no worse than ``amax``, and no worse than the one that INT8 would want."""
    values = draw(distribution)
    peak = amax_of(values)

    def error(threshold: float) -> float:
        return (fake_quantize(FORMATS["fp8"], values, torch.tensor(threshold)) - values).square().mean().item()

    found = error(OBSERVERS["mse"](values, peak, fmt=FORMATS["fp8"]))
    assert found <= 1.02 * min(error(peak), error(OBSERVERS["mse"](values, peak)))


@pytest.mark.parametrize("name", OBSERVERS)
def test_never_more_than_amax(name):
    """A sample may exceed it by how its dtype was rounded. Steps of 1 and of 127 both round 127 to itself."""
    assert 0 < OBSERVERS[name](torch.tensor([1.0, 9.004]), 9.0) <= 9.0
    assert OBSERVERS[name](torch.tensor([127.0]), 127.0**2) == 127.0**2
    for values in ([], [[]], [0.0, -0.0], [1.0, math.nan], [1.0, -math.inf]):  # which say nothing
        assert OBSERVERS[name](torch.tensor(values), 3.0) == 3.0, values
