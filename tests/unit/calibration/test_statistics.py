import pytest
import torch
from torch import nn

from sd_quant.calibration.statistics import collect
from sd_quant.errors import SdQuantError

PROMPTS, STEPS = 4, 3
NAMES = {"conv": "conv", "linear": "ffn"}


class Network(nn.Module):
    """Layers that see what the network is given, so that ranges can be told in advance."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.other = nn.Conv2d(2, 1, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, 2, h, w]; the linear sees it as [B, h * w, 2]."""
        tokens = x.flatten(2).transpose(1, 2)
        return self.conv(x).sum() + self.linear(tokens).sum() + self.other(tokens).sum()


def sample(prompt: int, step: int, half: int) -> torch.Tensor:
    """What the network sees of a prompt at a step, in the unconditional (0) or conditional (1) half: [2, 4, 4]."""
    return torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(100 * prompt + 10 * step + half))


def calibrate(batch_size: int, guidance: bool = True, change=lambda x, batch, step: None):
    """Statistics of a pipeline that runs ``batch_size`` prompts at a time, unconditional halves first."""
    network, now, halves = Network(), {}, (0, 1) if guidance else (1,)
    with collect(network, NAMES, PROMPTS, STEPS, lambda: (now["step"], now["batch"])) as statistics:
        for start in range(0, PROMPTS, batch_size):
            now["batch"] = list(range(start, min(start + batch_size, PROMPTS)))
            for now["step"] in range(STEPS):
                x = torch.stack([sample(prompt, now["step"], half) for half in halves for prompt in now["batch"]])
                change(x, now["batch"], now["step"])
                network(x)
    return statistics


@pytest.mark.parametrize("guidance, halves", [(True, (0, 1)), (False, (1,))])
def test_ranges_by_prompt_and_step_and_by_step_and_channel(guidance, halves):
    statistics = calibrate(2, guidance)
    assert statistics.keys() == NAMES.keys()
    assert (statistics["conv"].kind, statistics["linear"].kind) == ("conv", "linear")
    conv, linear = statistics["conv"].amax, statistics["linear"].amax
    assert (conv.shape, linear.shape) == ((PROMPTS, STEPS), (STEPS, 2))
    assert conv.dtype == linear.dtype == torch.float32
    for step in range(STEPS):
        seen = torch.stack([torch.stack([sample(p, step, half) for half in halves]) for p in range(PROMPTS)]).abs()
        assert torch.equal(conv[:, step], seen.amax(dim=(1, 2, 3, 4)))
        assert torch.equal(linear[step], seen.amax(dim=(0, 1, 3, 4)))


@pytest.mark.parametrize("batch_size", [2, 3, 4])  # 3 leaves a last batch of one
def test_the_batch_size_does_not_matter(batch_size):
    one_by_one, batched = calibrate(1), calibrate(batch_size)
    for name in NAMES:
        assert torch.equal(one_by_one[name].amax, batched[name].amax)


def test_a_second_call_within_a_step_only_widens_the_range():
    """As samplers of second order do, and layers that a network uses twice."""
    network = Network()
    with collect(network, NAMES, 1, 1, lambda: (0, [0])) as statistics:
        for magnitude in (2.0, 5.0, 3.0):
            network(torch.full((2, 2, 1, 1), -magnitude))
    assert statistics["conv"].amax.tolist() == [[5.0]]
    assert statistics["linear"].amax.tolist() == [[5.0, 5.0]]


def test_ranges_of_fp16_inputs_are_kept_in_fp32():
    network = Network().half()
    with collect(network, NAMES, 1, 1, lambda: (0, [0])) as statistics:
        network(torch.full((1, 2, 1, 1), 60000.0).half())
    assert statistics["conv"].amax.dtype == torch.float32 and statistics["conv"].amax.item() == 60000


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("half", [0, 1])
def test_what_is_not_finite_names_layer_prompt_and_step(bad, half):
    def spoil(x, batch, step):
        if step == 1 and 3 in batch:
            x[half * len(batch) + batch.index(3), 0, 2, 2] = bad

    with pytest.raises(SdQuantError, match="layer conv is not finite at prompt 3, step 1"):
        calibrate(2, change=spoil)


def test_hooks_are_gone_afterwards():
    network = Network()
    with collect(network, NAMES, 1, 1, lambda: (0, [0])):
        assert len(network.conv._forward_pre_hooks) == 1 and not network.other._forward_pre_hooks
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_hooks_are_gone_after_a_failure():
    network = Network()
    with pytest.raises(SdQuantError), collect(network, NAMES, 1, 1, lambda: (0, [0])):
        network(torch.full((1, 2, 1, 1), float("nan")))
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_a_layer_that_is_never_called_has_no_statistics():
    with collect(Network(), NAMES, 1, 1, lambda: (0, [0])) as statistics:
        pass
    assert statistics == {}
