"""The knob ``infer.precise_steps``: which denoising steps leave inputs unquantized, by place, number or target."""

import re
from dataclasses import dataclass

from sd_quant.inference.samplers import COMPUTED, FULL, WEIGHTS_ALONE
from sd_quant.knobs import Limit, check

KNOB = "infer.precise_steps"
WHOLE, AMOUNT = r"[1-9]\d{0,5}", r"(?!0*\.?0*(?:dB|%))\d{1,3}(?:\.\d{1,3})?"
FORM = re.compile(
    rf"(?=[fl])(?:first(?P<first>{WHOLE}))?(?:(?:^|,)last(?P<last>{WHOLE}))?|(?P<count>{WHOLE})"
    rf"|(?P<gain_db>{AMOUNT})dB|(?P<percent>{AMOUNT})%|auto"
)
PRECISE = Limit(
    lambda value: FORM.fullmatch(str(value)) is not None,
    "auto, places such as first3,last3, a number of steps such as 4, dB that they gain such as 3dB, or time that they "
    "add to denoising such as 10%",
)


@dataclass(frozen=True)
class PreciseSteps:
    """Places of steps with unquantized inputs, or their number, gain or time if a run chooses; None for ``auto``."""

    first: int | None = None
    last: int | None = None
    count: int | None = None
    gain_db: float | None = None
    percent: float | None = None  # of the time of denoising

    @property
    def is_auto(self) -> bool:
        """Whether the knob is ``auto``: steps are precise only if the same time, spent otherwise, gains less."""
        return self == PreciseSteps()

    @property
    def by_time(self) -> bool:
        """Whether the choice of steps needs latencies, as for ``auto`` and a share of the time."""
        return self.is_auto or self.percent is not None

    def schedule(self, steps: int) -> str | None:
        """Return the schedule, a letter per step, with precise steps at the stated places; None if a run chooses."""
        if self.first is None and self.last is None:
            return None
        return with_ends(self.first or 0, self.last or 0, steps)


def ends_of(schedule: str | None) -> tuple[int, int] | None:
    """Count the precise steps at start and end of a schedule; None if another step is precise or in full precision."""
    schedule = schedule or ""
    middle, last = schedule.strip(WEIGHTS_ALONE), schedule.lstrip(WEIGHTS_ALONE)
    first = len(schedule) - len(last)
    return None if {WEIGHTS_ALONE, FULL} & set(middle) else (first, len(last) - len(middle))


def with_ends(first: int, last: int, steps: int) -> str:
    """Return a schedule whose ``first`` and ``last`` steps are precise, as published checkpoints declare them."""
    return WEIGHTS_ALONE * first + COMPUTED * (steps - first - last) + WEIGHTS_ALONE * last


def precise_steps(value: str | int | None, steps: int) -> PreciseSteps | None:
    """Parse the knob for images of ``steps`` steps; null gives None. Raises ConfigError for too many precise steps."""
    form = FORM.fullmatch(str(value))
    if form is None:  # null
        return None
    kinds: dict[str, type] = {"gain_db": float, "percent": float}
    made = PreciseSteps(**{name: kinds.get(name, int)(text) for name, text in form.groupdict().items() if text})
    total = (made.first or 0) + (made.last or 0) + (made.count or 0)
    check(total <= steps, KNOB, value, f"at most the {steps} steps of an image, and these are {total}")
    check(made.count != steps, KNOB, value, f"fewer than the {steps} steps; of all of them nothing is to be chosen")
    return made
