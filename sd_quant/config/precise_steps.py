"""The knob ``infer.precise_steps``: which denoising steps leave inputs unquantized, by place or number."""

import re
from dataclasses import dataclass

from sd_quant.inference.schedules import COMPUTED, WEIGHTS_ALONE
from sd_quant.knobs import Limit, check

KNOB = "infer.precise_steps"
WHOLE = r"[1-9]\d{0,5}"
FORM = re.compile(rf"(?=[fl])(?:first(?P<first>{WHOLE}))?(?:(?:^|,)last(?P<last>{WHOLE}))?|(?P<count>{WHOLE})")
PRECISE = Limit(
    lambda value: FORM.fullmatch(str(value)) is not None, "places such as first3,last3, or a number of steps such as 4"
)


@dataclass(frozen=True)
class PreciseSteps:
    """Places of steps with unquantized inputs, or their number if a run chooses them."""

    first: int | None = None
    last: int | None = None
    count: int | None = None

    def schedule(self, steps: int) -> str | None:
        """Return the schedule, a letter per step, with precise steps at the stated places; None if a run chooses."""
        if self.first is None and self.last is None:
            return None
        return with_ends(self.first or 0, self.last or 0, steps)


def with_ends(first: int, last: int, steps: int) -> str:
    """Return a schedule whose ``first`` and ``last`` steps are precise, as published checkpoints declare them."""
    return WEIGHTS_ALONE * first + COMPUTED * (steps - first - last) + WEIGHTS_ALONE * last


def precise_steps(value: str | int | None, steps: int) -> PreciseSteps | None:
    """Parse the knob for images of ``steps`` steps; null gives None. Raises ConfigError for too many precise steps."""
    form = FORM.fullmatch(str(value))
    if form is None:  # null
        return None
    made = PreciseSteps(**{name: int(text) for name, text in form.groupdict().items() if text})
    total = (made.first or 0) + (made.last or 0) + (made.count or 0)
    check(total <= steps, KNOB, value, f"at most the {steps} steps of an image, and these are {total}")
    check(made.count != steps, KNOB, value, f"fewer than the {steps} steps; of all of them nothing is to be chosen")
    return made
