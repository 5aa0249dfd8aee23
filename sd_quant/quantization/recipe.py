"""quant_level: which roles of layer are quantized (ModelOpt's and NeMo's diffusion recipes).

1 convolutions; 2 + feed-forward; 2.5 + query, key, value; 3 + every other linear; 4 + the two matrix products of
attention, which are no layers. A layer that the family excludes has the role ``excluded`` and is in no level.
"""

from dataclasses import dataclass, field

ROLES = ("conv", "ffn", "qkv", "linear")
QUANT_LEVELS: dict[float, tuple[str, ...]] = {
    1.0: ROLES[:1],
    2.0: ROLES[:2],
    2.5: ROLES[:3],
    3.0: ROLES[:4],
    4.0: (*ROLES, "attention"),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Formats of a layer's weight and of its input. Null: it stays in high precision."""

    weight: str
    activation: str | None


@dataclass(frozen=True, slots=True)
class Enable:
    """What a preset quantizes, by kind of layer; ``attention`` is the format of its matrix products."""

    conv: Pair
    linear: Pair
    attention: str | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a user chooses. Ranges are checked where the configuration is read.

    ``enable`` are the formats by kind of layer. ``per_channel``: weights have a scale per output channel where their
    format takes a range, else one. ``alpha`` is a number, "auto", or None without smoothing; ``rank`` that of the
    low-rank branch of linears, or a fraction below 1 of a layer's shorter side.
    """

    quant_level: float
    alpha: float | str | None
    percentile: float = 1.0
    collect_method: str = "mean-max"
    percentile_calibrator: str = "corrected"
    observer: str = "min_max"
    observer_percentile: float = 99.99
    smoothing: str = "folded"
    batch_size: int = 1  # of the calibration, which ModelOpt's own calibrator depends on
    enable: Enable = field(default_factory=lambda: Enable(Pair("int8", "int8"), Pair("int8", "int8"), None))
    per_channel: bool = True
    rank: int | float = 0
    exclude: tuple[str, ...] = ()  # patterns of names that stay in high precision

    def formats_of(self, role: str) -> Pair:
        return self.enable.conv if role == "conv" else self.enable.linear


def formats_used(enable: Enable, quant_level: float) -> dict[str, set[str]]:
    """What a level quantizes: the formats of ``weights``, of ``inputs`` and of ``attention``."""
    pairs = [enable.conv, enable.linear] if quant_level > 1 else [enable.conv]
    return {
        "weights": {pair.weight for pair in pairs},
        "inputs": {pair.activation for pair in pairs if pair.activation is not None},
        "attention": {enable.attention} if quant_level >= 4 and enable.attention is not None else set(),
    }


def reason_kept(role: str, quant_level: float) -> str | None:
    """Why a layer of this role stays in high precision, or None when it is quantized."""
    if role == "excluded":
        return "excluded by the model family"
    if role not in QUANT_LEVELS[quant_level]:
        return f"role {role} is not in quant_level {quant_level:g}"
    return None
