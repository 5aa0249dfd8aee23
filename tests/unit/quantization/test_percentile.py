import pytest
import torch

from sd_quant.quantization.percentile import percentile_amax

#                      step 0  1    2    3    4
AMAX = torch.tensor([[9.0, 5.0, 4.0, 8.0, 1.0], [6.0, 2.0, 7.0, 3.0, 1.0], [3.0, 5.0, 4.0, 4.0, 1.0]])
# min over prompts      3    2    4    3    1
# max                   9    5    7    8    1
# mean                  6    4    5    5    1


@pytest.mark.parametrize(
    "collect_method, percentile, expected",
    [
        ("global_min", 1.0, 1),
        ("global_min", 0.8, 2),
        ("global_min", 0.2, 3),
        ("min-max", 1.0, 1),
        ("min-max", 0.8, 5),
        ("min-max", 0.2, 9),
        ("min-mean", 1.0, 1),
        ("min-mean", 0.8, 4),  # theirs divides by the 5 steps instead of the 3 prompts and gives 2.4
        ("min-mean", 0.2, 6),
        ("mean-max", 1.0, 6),  # (9 + 5 + 7 + 8 + 1) / 5
        ("mean-max", 0.6, 7),
        ("mean-max", 0.79, 7),  # int(5 * 0.79) = 3 steps
    ],
)
def test_a_table_worked_by_hand(collect_method, percentile, expected):
    assert percentile_amax(AMAX, percentile, collect_method) == pytest.approx(expected)


@pytest.mark.parametrize("collect_method", ["global_min", "min-max", "min-mean", "mean-max"])
def test_at_least_one_step_is_used(collect_method):
    assert percentile_amax(AMAX, 0.01, collect_method) == percentile_amax(AMAX, 0.2, collect_method)


@pytest.mark.parametrize("collect_method", ["global_min", "min-max", "mean-max"])
def test_it_agrees_with_the_calibrator_that_sees_one_call_after_the_other(collect_method):
    """NeMo's and ModelOpt's examples keep a dict of steps, filled by ``call % n_steps``; neither is a package here."""
    steps, prompts = 20, 6
    amax = torch.rand(prompts, steps, generator=torch.Generator().manual_seed(0))
    kept: dict[int, float] = {}
    for call in range(prompts * steps):
        value, step = amax[call // steps, call % steps].item(), call % steps
        combine = min if collect_method == "global_min" else max
        kept[step] = combine(kept[step], value) if step in kept else value
    for percentile in (1.0, 0.75, 0.5):
        chosen = [kept[step] for step in range(int(steps * percentile))]
        expected = sum(chosen) / len(chosen) if collect_method == "mean-max" else min(chosen)
        assert percentile_amax(amax, percentile, collect_method) == pytest.approx(expected)
