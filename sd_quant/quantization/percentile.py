"""One activation range from many UNet calls: the diffusion percentile calibrator of NeMo and ModelOpt, done right.

Every denoising step has a range of its own. The calibrator first reduces over the prompts within a step, then over the
first ``int(n_steps * percentile)`` steps:

| collect_method | over prompts | over steps |
|----------------|--------------|------------|
| global_min     | min          | min        |
| min-max        | max          | min        |
| min-mean       | mean         | min        |
| mean-max       | max          | mean       |

Two departures from the original, which are defects there: ``min-mean`` divides by the number of prompts (theirs divides
by n_steps), and at least one step is always used (theirs fails when ``n_steps * percentile < 1``).
"""

import torch
from torch import Tensor

OVER_PROMPTS = {"global_min": torch.amin, "min-max": torch.amax, "min-mean": torch.mean, "mean-max": torch.amax}
OVER_STEPS = {"global_min": torch.amin, "min-max": torch.amin, "min-mean": torch.amin, "mean-max": torch.mean}


def percentile_amax(amax: Tensor, percentile: float, collect_method: str) -> float:
    """The range to quantize with. ``amax``: fp32 [prompts, steps], ``percentile`` in (0, 1]."""
    per_step = OVER_PROMPTS[collect_method](amax, dim=0)
    chosen = per_step[: max(1, int(len(per_step) * percentile))]
    return OVER_STEPS[collect_method](chosen, dim=0).item()
