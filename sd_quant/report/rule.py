"""The rule by which a report recommends a recipe: the ``verdict`` knobs of ``quantize``, and the rule in words."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from sd_quant.errors import ConfigError
from sd_quant.knobs import CONFIDENCE, MORE_THAN_0, SHARE, Limit, check_unused, read

FEWEST_IMAGES = 5  # of which the interval of the mean counts, and not the mean alone
MORE_THAN_1 = Limit(lambda number: 1 < number <= 1e9, "more than 1, and at most 1e9")  # the unquantized engine has 1


@dataclass(frozen=True)
class Rule:
    """The ``verdict`` knobs: a quality floor, then either the price of time in dB or a target latency."""

    enough_db: Annotated[float, MORE_THAN_0, "PSNR above which nobody sees a difference"] = 40.0
    time_of_a_db: Annotated[float, SHARE, "share of an image's time that is worth one dB"] = 0.03
    confidence: Annotated[float, CONFIDENCE, "at which recipes are told apart, for all of them together"] = 0.95
    floor_db: Annotated[float | None, MORE_THAN_0, "PSNR that a recipe has to have surely; null: any"] = 28.0
    worst_db: Annotated[float | None, MORE_THAN_0, "PSNR that its worst image has to have; null: any"] = 20.0
    speedup: Annotated[float | None, MORE_THAN_1, "target: times as fast an image as the unquantized engine's"] = None
    image_ms: Annotated[float | None, MORE_THAN_0, "target: milliseconds from prompt to image"] = None

    def __post_init__(self):
        if self.speedup is not None:
            check_unused(self, "verdict.", (True, {"image_ms": None}, "verdict.speedup is the target already"))

    def __str__(self) -> str:
        if self.target:
            return (
                f"the most faithful recipe is recommended that reaches {self.target} with a confidence of "
                f"{self.confidence:.0%}; {self.floor}"
            )
        return (
            f"worth of a recipe: its PSNR up to {self.enough_db:g} dB, and 1 dB for every "
            f"{100 * self.time_of_a_db:g} % of an image's time that it saves over the unquantized engine; of those "
            f"that cannot be told apart from the best with a confidence of {self.confidence:.0%}, the most faithful is "
            f"recommended; {self.floor}"
        )

    @property
    def target(self) -> str:
        """Target latency or speed-up in words; empty without a target."""
        if self.image_ms is not None:
            return f"{self.image_ms:,g} ms from prompt to image"
        return "" if self.speedup is None else f"{self.speedup:g}x the speed of the unquantized engine"

    @property
    def floor(self) -> str:
        """Quality floor in words."""
        bars = [] if self.floor_db is None else [
            f"surely {self.floor_db:g} dB (the low end of the interval over prompts; of fewer than {FEWEST_IMAGES} "
            "images the mean)"
        ]  # fmt: skip
        bars += [] if self.worst_db is None else [f"{self.worst_db:g} dB in its worst image"]
        return f"the floor, before any speed counts: {', '.join([*bars, 'no degenerate image'])}"


def rule_of(knobs: Any) -> Rule:
    """Build the rule from the ``verdict`` knobs of a sweep or a record; the default rule if they are invalid."""
    usual, stated = asdict(Rule()), knobs if isinstance(knobs, Mapping) else {}
    try:
        return read(Rule, {name: stated.get(name, value) for name, value in usual.items()}, "verdict.")
    except ConfigError:
        return Rule()
