"""Metrics of a run: the fidelity of its images to full precision, latency and memory.

``SCORES`` has the image scores, which the record, a job's printed table, a sweep's summary and the report use.
``NAMED`` lists optional scores, most of them from the add-on ``scores``. To add a score, write a function as described
in ``Against`` in ``sd_quant/metrics/<name>.py``, and an entry of ``SCORES``. Functions are imported at the first call,
so the table can be read without torch.
"""

import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from sd_quant.addons import at_work, loaded
from sd_quant.metrics.intervals import Interval, mean_interval


class Against(Enum):
    """What a score compares images with, which defines the arguments and the result of the score's function.

    Images are uint8 [N, H, W, 3], latents [N, steps, ...]. Where images differ in size, LATENTS scores get lists with
    an entry for each image, IMAGES scores get one image at a time, and all other scores are refused. ``value`` is None
    where ``reason`` is given.
    """

    IMAGES = auto()  # (full precision's images, images) -> a number or None for each of N images
    LATENTS = auto()  # (full precision's latents, latents) -> a number or None for each step
    PROMPTS = auto()  # (images, prompts, file) -> {"value": ..., "reason": ..., "values": of each image, ...}
    REFERENCE = auto()  # (images, full precision's images, file) -> the same
    PHOTOGRAPHS = auto()  # (images, file) -> {"value": ..., "reason": ..., ...}


@dataclass(frozen=True)
class Score:
    key: str  # its entry in the record, in ``fidelity`` or for each variant in ``text_scores``
    title: str
    against: Against
    function: str  # "module:function"; of a score by a network it checks its files and returns what opens them
    format: str = "{:.4f}"
    unit: str = ""
    more_is_better: bool = True
    least: float = -math.inf  # its range
    most: float = math.inf
    columns: tuple[str, ...] = ()  # in summary.csv: of the mean or the last step, then of the worst image
    undefined: str = "not a finite number"  # why it is None for an image or a step
    check: str = ""  # "module:function" that raises ResourceError where a package is missing
    weights: str = ""  # of a score by a network: the files that it needs, and their source

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    @property
    def reason_key(self) -> str:
        """The key in the record's ``fidelity`` for the reason why some steps have no value."""
        return f"{self.key.removesuffix('_db')}_reason"

    def text(self, value: float, reach: float | None = None) -> str:
        """Format ``value`` with its unit, and its interval's half-width ``reach`` if given: ``34.81 ± 1.20 dB``."""
        ends = "" if reach is None else f" ± {self.format.format(reach)}"
        return f"{self.format.format(value)}{ends} {self.unit}".rstrip()

    def mean(self, values: Sequence[float | None]) -> Interval | None:
        """Return the mean of the values that are not None, with its 95 % confidence interval; None without values."""
        known = [value for value in values if value is not None]
        return self.inside(mean_interval(known)) if known else None

    def inside(self, found: Interval) -> Interval:
        """Clip the ends of a known interval to the score's range."""
        # rounding may put a mean of float32 outside of the range by its last digit; it stays inside its interval
        ends = max(found.low, min(self.least, found.value)), min(found.high, max(self.most, found.value))
        return Interval(found.value, *ends) if found.known else found

    def compute(self, *arguments):
        """Compute the score from the arguments that ``Against`` lists; scores with ``weights`` by ``score_images``."""
        if self.weights:
            return pkgutil.resolve_name("sd_quant.metrics.network_scores:score_images")(self, *arguments)
        return pkgutil.resolve_name(self.function)(*arguments)

    def opener(self, weights: Path) -> Callable:
        """Return the function that opens the score's network. Reads no weights; raises SdQuantError for unfit files."""
        return pkgutil.resolve_name(self.function)(weights)

    def check_packages(self) -> None:
        """Raise ResourceError if a package that the score needs is not installed."""
        if self.check:
            pkgutil.resolve_name(self.check)()


NOT_ASKED = "metrics does not ask for it"  # the reason of a score that nobody asked for
IDENTICAL = "identical to full precision, which makes the ratio infinite"
SCORES = {
    score.key: score
    for score in (
        Score("psnr", "PSNR", Against.IMAGES, "sd_quant.metrics.fidelity:psnr", "{:.2f}", "dB",
              least=0, columns=("psnr_db", "psnr_worst_db"), undefined=IDENTICAL),
        Score("ssim", "SSIM", Against.IMAGES, "sd_quant.metrics.fidelity:ssim", least=-1, most=1, columns=("ssim",)),
        Score("lpips", "LPIPS", Against.IMAGES, "sd_quant.metrics.lpips:lpips", more_is_better=False, least=0,
              columns=("lpips",)),
        Score("latent_sqnr_db", "latent SQNR", Against.LATENTS, "sd_quant.metrics.fidelity:latent_sqnr", "{:.1f}", "dB",
              columns=("latent_sqnr_db",), undefined=IDENTICAL),
        Score("clip_score", "CLIP score", Against.PROMPTS, "sd_quant.metrics.text_image:clip_score", "{:.2f}",
              least=0, most=100,
              weights="a folder with a CLIPModel of transformers and its processor, such as "
              "openai/clip-vit-base-patch32 of Hugging Face"),
        Score("fid", "FID", Against.PHOTOGRAPHS, "sd_quant.metrics.text_image:fid", "{:.2f}", more_is_better=False,
              least=0, check="sd_quant.metrics.text_image:check_inception"),
    )
}  # fmt: skip
# Scores of the record's ``text_scores`` with their knobs of ``metrics``: computed if the knob names a file or is true.
NAMED = {
    "clip_score": "clip_weights", "pickscore": "pickscore_weights", "hps": "hps_weights",
    "image_reward": "image_reward_weights", "dino_distance": "dino_weights", "ocr": "ocr", "fid": "fid_references",
}  # fmt: skip


def scores_against(*kinds: Against) -> list[Score]:
    """Return the scores that compare images with one of these ``kinds``, in the order of ``SCORES``."""
    return [score for score in SCORES.values() if score.against in kinds]


def score_named(key: str) -> Score:
    """Return a score of SCORES or of the add-on. Raises ResourceError if the add-on is missing or incompatible."""
    return SCORES.get(key) or loaded("scores", key, f"metrics.{NAMED[key]}")


@contextmanager
def scoring(key: str) -> Iterator[Score]:
    """Yield the score; in the block, exceptions of the add-on are raised as SdQuantErrors of one sentence."""
    with nullcontext() if key in SCORES else at_work("scores"):
        yield score_named(key)


def fidelity_scores() -> list[Score]:
    """Return the scores of the record's ``fidelity``, which compare images or latents with full precision's."""
    return scores_against(Against.IMAGES, Against.LATENTS)
