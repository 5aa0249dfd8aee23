"""Gate: does a finished run meet limits fixed beforehand, by confidence intervals? docs/gate.md has the statistics.

A criterion is a mean over prompts, or a speed-up, with a limit ("bar"). It passes if its whole interval is on the good
side, fails if all of it is on the bad side, else is undecided. Several images of one prompt count once, by their mean.

- The interval of a mean is Hall's (Journal of the Royal Statistical Society B 54, 1992): Student's, transformed by the
  skewness of the values. In a trial the bootstrap-t covered the mean as often, in 100 times the time.
- The worst image has a bar of its own: one image beyond it fails the run (quality control's acceptance number zero).
- All criteria have to pass, so passing needs no correction (intersection-union test; Berger, Technometrics 24, 1982).
  One failure fails the run, so of several criteria at their bars more than 2.5 % of runs fail.
- Against a baseline run, the value is the difference between the two runs for each prompt: a test of non-inferiority.

Alternatives not taken: means without intervals, which pass by lucky prompts, and an earlier run's images as reference,
which also measure differences between machines: each run is compared with its own full precision.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import refusing
from sd_quant.metrics import Against, Score, scores_against
from sd_quant.metrics.intervals import FEWEST_ROUNDS, Interval, exactly, means_of_groups, t_quantile
from sd_quant.report.readings import degenerate_images, degenerate_of, number_at, psnr_of_images, score_of
from sd_quant.report.record import ABSENT, DONE, IMAGE, RECORD, VARIANTS, Record, at, read_record, weights_sha256
from sd_quant.report.summary import machine_of, timed_alone, workload
from sd_quant.report.table import DASH, between
from sd_quant.report.timing import Timed, log_speedup_over

PROMPTS, ROUNDS = "prompts", "rounds"
PASSED, FAILED, UNTOLD = "passed", "failed", "cannot be told"
SHOWN = 3  # worst images of a criterion
MOST = 10_000  # prompts or rounds that are suggested at most
OF_IMAGES = {score.key: score for score in scores_against(Against.IMAGES)}
AGAIN = "run the job again"
REFERENCE = {  # knobs that decide full precision's images, by section; samplers and schedules of a recipe do not
    "infer": "width height sizes steps scale seed num_samples negative_prompt strength precision".split(),
    "model": ("arguments", "max_sequence_length"),
}
FILES = ("image", "mask", "latents")  # knobs of infer that name a file, which the record's inputs have by its hash
OF_CALLS = ("control ", "infer.table", "argument ")  # begin the names of other inputs that images start from


class Run(NamedTuple):
    folder: Path
    record: Record


@dataclass(frozen=True)
class Shown:
    """One of the worst images of a criterion, to show to people."""

    index: int
    prompt: str
    value: float
    file: Path | None


@dataclass(frozen=True)
class Estimate:
    """A quantity estimated from prompts or timed rounds, and the bar that it has to reach."""

    knob: str
    title: str
    bar: float
    more_is_better: bool
    at: Callable[[float], Interval]  # the estimate with its interval at a confidence level
    count: int
    unit: str  # of the count
    form: str  # format of its values
    worst: Sequence[Shown] = ()
    note: str = ""

    def good(self, interval: Interval) -> bool:
        return interval.low >= self.bar if self.more_is_better else interval.high <= self.bar

    def bad(self, interval: Interval) -> bool:
        return interval.high < self.bar if self.more_is_better else interval.low > self.bar


@dataclass(frozen=True)
class Verdict:
    """Outcome of a criterion. ``more``: further prompts or rounds needed to decide it; None if decided or unknown."""

    criterion: str  # the knob
    title: str
    value: str
    bar: str
    verdict: str
    figures: Mapping[str, float | int | None]  # value, low, high, bar, count
    reason: str = ""
    more: int | None = None
    unit: str = ""
    worst: Sequence[Shown] = ()
    form: str = "{}"  # of the values of ``worst``


@dataclass(frozen=True)
class Gate:
    run: Path
    outcome: str  # PASSED, FAILED or UNTOLD
    sentence: str
    verdicts: Sequence[Verdict]


# Reading


def read_run(knob: str, folder: Path) -> Run:
    """Read a run. Raises ConfigError, naming ``knob``, unless it is finished, ArtifactError for a damaged record."""
    with refusing(f"{folder / RECORD} is damaged", ValueError, OSError, advice=AGAIN):
        record = read_record(folder)
    if record is None or record["status"] != DONE:
        raise ConfigError(f"{knob} is {folder}, which has no {RECORD} of a finished run, expected the folder of one")
    run, prompts = Run(folder, record), record["prompts"]
    for key, score in OF_IMAGES.items():
        if (count := len(score_of(record["fidelity"], score).values)) not in (0, len(prompts)):
            raise damaged(run, f"fidelity.{key} has {count} values for {len(prompts)} images")
    return run


def damaged(run: Run, what: str) -> ArtifactError:
    return ArtifactError(f"{run.folder / RECORD} is damaged ({what}); {AGAIN}")


def without_figure(run: Run, knob: str, figure: str, expected: str) -> ConfigError:
    return ConfigError(f"{knob} is given, and {run.folder} has no {figure}, expected {expected}, or leave the bar out")


def image_values(run: Run, score: Score, knob: str) -> list[float | None]:
    """Return each image's score (PSNR inf if identical). Raises ConfigError, naming ``knob``, without scores."""
    values = score_of(run.record["fidelity"], score).values
    if not values:
        made = "a run that made images: run quantize with infer.prompts"
        raise without_figure(run, knob, f"{score.title} of images", made)
    return psnr_of_images(run.record["fidelity"]) if score.key == "psnr" else values


def rounds_of(run: Run, knob: str) -> Timed | str:
    """Return a run's timed rounds, or why it has none. Raises ConfigError if that is unknown or the run simulated."""
    timed = timed_alone(run.folder.name, run.record)
    if timed is not None and timed.rest is not None:
        return timed
    engine, _, _, batch = workload(run.record)
    reason = number_at(run.record["latency"], engine, IMAGE, str(batch), "speedup").reason
    if not reason or reason == ABSENT or run.record["simulated"]:
        rounds = "a run with timed rounds of an engine that executes the recipe (infer=)"
        raise without_figure(run, knob, "speed-up of an image", rounds)
    return reason


def reference_of(record: Record) -> dict[str, Any]:
    """Return all that determines full precision's images (prompts, weights, knobs, input files), by name."""
    facts = {"prompts": record["prompts"], "weights": weights_sha256(record)}
    for section, names in REFERENCE.items():
        facts |= {f"{section}.{name}": at(record["knobs"], section, name) for name in names}
    names = *FILES, *(name for name in record["inputs"] if name.startswith(OF_CALLS))
    files = {name: at(record["inputs"], name, "sha256") or at(record["knobs"]["infer"], name) for name in names}
    return facts | {f"infer.{name}": value for name, value in files.items()}


def check_comparable(run: Run, baseline: Run) -> None:
    """Raise ConfigError unless ``reference_of`` is equal: both runs would make the same images in full precision."""
    one, other = (reference_of(each.record) for each in (run, baseline))
    if differ := [name for name in one | other if one.get(name) != other.get(name)]:
        raise ConfigError(
            f"run and baseline differ in {', '.join(differ)}, expected runs with the same prompts, seeds, sizes, model "
            f"and reference; run the baseline {baseline.folder} again with those of run"
        )


# Statistics


def mean_of_skewed(values: Sequence[float], confidence: float) -> Interval:
    """Compute the mean of independent values with Hall's interval for skewed data; infinite ends for a single value."""
    count, mean = len(values), statistics.fmean(values)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    deviation = statistics.pstdev(values)
    if deviation <= 1e-12 * abs(mean):
        return exactly(mean)
    skewness = statistics.fmean(((value - mean) / deviation) ** 3 for value in values) / math.sqrt(count)
    error, t = deviation / math.sqrt(count - 1), t_quantile(count - 1, confidence)
    return Interval(mean, mean - error * untransformed(t, skewness), mean - error * untransformed(-t, skewness))


def untransformed(quantile: float, skewness: float) -> float:
    """Solve t + a t²/3 + a² t³/27 + a/6 = ``quantile`` for t; a is ``skewness``, already divided by sqrt(count)."""
    if abs(skewness) < 1e-6:
        return quantile
    return 3 / skewness * (math.cbrt(1 + skewness * (quantile - skewness / 6)) - 1)


def more_needed(estimate: Estimate, confidence: float) -> int | None:
    """Estimate how many more prompts or rounds would decide, if mean and spread stay; None for more than MOST."""
    interval, of_prompts = estimate.at(confidence), estimate.unit == PROMPTS
    if not interval.known:
        return max(1, (2 if of_prompts else FEWEST_ROUNDS) - estimate.count)
    scale = float if of_prompts else math.log
    value, bar = scale(interval.value), scale(estimate.bar)
    reach = value - scale(interval.low) if bar < value else scale(interval.high) - value
    if value == bar or (by_root := estimate.count * (reach / (value - bar)) ** 2) > MOST:
        return None
    wanted = by_root
    for _ in range(4 if of_prompts else 0):
        factor = t_quantile(max(2, math.ceil(wanted)) - 1, confidence) / t_quantile(estimate.count - 1, confidence)
        wanted = by_root * factor**2
    return max(1, math.ceil(wanted) - estimate.count)


# Criteria


def estimate_of_score(run: Run, score: Score, bar: float) -> Estimate:
    """Estimate the mean of a score over the prompts, limited by ``bar``. Raises ConfigError without the score."""
    knob = bound(score)
    values = image_values(run, score, knob)
    best = max([bar, *filter(math.isfinite, known(values))])
    identical = values.count(math.inf)
    note = f"{identical} of {len(values)} images are identical to full precision and count as {score.text(best)}"
    means = means_of_prompts(run, [None if value is None else best if value == math.inf else value for value in values])
    return Estimate(
        knob, f"mean {score.title}", bar, score.more_is_better,
        lambda confidence: score.inside(mean_of_skewed(means, confidence)), len(means), PROMPTS, form_of(score),
        worst_of(run, values, score.more_is_better), note if identical else missing_of(score, values),
    )  # fmt: skip


def estimate_of_difference(run: Run, baseline: Run, score: Score, margin: float) -> Estimate:
    """Estimate a score's mean less the baseline's; it may be worse by ``margin``. Raises ConfigError without scores."""
    knob = f"{score.key}_margin"
    own, others = (image_values(each, score, knob) for each in (run, baseline))
    best = max([0.0, *filter(math.isfinite, known([*own, *others]))])
    pairs = [None if a is None or b is None else min(a, best) - min(b, best) for a, b in zip(own, others, strict=True)]
    differences, bar = means_of_prompts(run, pairs), 0.0 - margin if score.more_is_better else margin
    return Estimate(
        knob, f"{score.title} over the baseline's", bar, score.more_is_better,
        lambda confidence: mean_of_skewed(differences, confidence), len(differences), PROMPTS,
        form_of(score).replace("{:", "{:+"), worst_of(run, pairs, score.more_is_better), missing_of(score, pairs),
    )  # fmt: skip


def means_of_prompts(run: Run, values: Sequence[float | None]) -> list[float]:
    """Return the mean of each prompt's images; an empty list if any image has no value, since that image is broken."""
    return [] if None in values else means_of_groups(values, run.record["prompts"])


def estimate_of_speedup(run: Run, bar: float) -> Estimate:
    """Estimate the speed-up of an image over the unquantized engine. Raises ConfigError for a run without timings."""
    timed = rounds_of(run, "min_speedup")
    return estimate_of_rounds(
        "min_speedup", "speed-up of an image", bar, [timed], lambda confidence: timed.image_speedup(confidence), "x"
    )


def estimate_of_relative_speedup(run: Run, baseline: Run, margin: float) -> Estimate:
    """Estimate a run's speed-up divided by the baseline's. Raises ConfigError without timings, or on two machines."""
    both: list[Any] = [rounds_of(each, "speedup_margin") for each in (run, baseline)]
    timed, other = both
    one, another = (machine_of(each.record["environment"]["machine"]) for each in (run, baseline))
    if one != another:
        raise ConfigError(
            f"speedup_margin is given, and run was timed on {one or 'an unknown machine'}, the baseline on "
            f"{another or 'an unknown one'}, expected one machine; time both on it, or leave speedup_margin out"
        )

    def relative(confidence: float) -> Interval:
        if (timed.full_precision, timed.quantized) == (other.full_precision, other.quantized):  # a run and itself
            return exactly(1.0)
        difference = log_speedup_over(replace(timed, block="run"), replace(other, block="baseline"), confidence)
        return Interval(*map(math.exp, difference))

    rounds = [timed, f"the baseline's: {other}" if isinstance(other, str) else other]
    return estimate_of_rounds("speedup_margin", "speed-up by the baseline's", 1 - margin, rounds, relative)


def estimate_of_rounds(
    knob: str, title: str, bar: float, rounds: Sequence[Timed | str], at: Callable[[float], Interval], unit: str = ""
) -> Estimate:
    """Build the Estimate of a speed-up. A text in ``rounds`` says why a run was not timed: count 0, undecided."""
    reason = next((each for each in rounds if isinstance(each, str)), "")
    count = 0 if reason else min(len(each.quantized) for each in rounds)
    return Estimate(knob, title, bar, True, at, count, ROUNDS, f"{{:.3f}}{unit}", (), reason)


def estimates_of(run: Run, baseline: Run | None, bars: Mapping[str, float]) -> list[Estimate]:
    """Estimate each mean and speed-up with a limit in ``bars`` (by knob). Raises ConfigError for missing figures."""
    found = [estimate_of_score(run, score, bars[bound(score)]) for score in OF_IMAGES.values() if bound(score) in bars]
    if "min_speedup" in bars:
        found.append(estimate_of_speedup(run, bars["min_speedup"]))
    if baseline is not None:
        check_comparable(run, baseline)
        margins = {score: bars.get(f"{key}_margin") for key, score in OF_IMAGES.items()}
        found += [estimate_of_difference(run, baseline, *each) for each in margins.items() if each[1] is not None]
        if "speedup_margin" in bars:
            found.append(estimate_of_relative_speedup(run, baseline, bars["speedup_margin"]))
    return found


def bound(score: Score) -> str:
    """Return the knob that limits a score's mean, such as ``min_psnr``."""
    return f"{'min' if score.more_is_better else 'max'}_{score.key}"


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def missing_of(score: Score, values: Sequence[float | None]) -> str:
    """Say how many and which images have no score, None in ``values``; empty if all have one."""
    missing = [index for index, value in enumerate(values) if value is None]
    images = ", ".join(map(str, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
    return f"{len(missing)} of {len(values)} images have no {score.title}: {images}" if missing else ""


def form_of(score: Score) -> str:
    return f"{score.format} {score.unit}".rstrip()


def worst_of(run: Run, values: Sequence[float | None], more_is_better: bool) -> list[Shown]:
    """Return the images with the worst finite ``values``, the worst first, at most SHOWN."""
    finite = [(index, value) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    chosen = sorted(finite, key=lambda each: each[1] if more_is_better else -each[1])[:SHOWN]
    return [shown(run, *each) for each in chosen]


def shown(run: Run, index: int, value: float) -> Shown:
    names = (run.folder / "images" / VARIANTS[1] / f"{index:04}{suffix}" for suffix in (".png", ".webp"))
    return Shown(index, run.record["prompts"][index], value, next((path for path in names if path.is_file()), None))


# Verdicts


def verdict_of(estimate: Estimate, confidence: float) -> Verdict:
    """Decide a criterion by its interval at ``confidence``."""
    bar = f"at {'least' if estimate.more_is_better else 'most'} {estimate.form.format(estimate.bar)}"
    without = Verdict(
        estimate.knob, estimate.title, DASH, bar, FAILED if estimate.unit == PROMPTS else UNTOLD,
        {"bar": estimate.bar, "count": estimate.count}, estimate.note, worst=estimate.worst, form=estimate.form,
    )  # fmt: skip
    if not estimate.count:
        return without
    interval = estimate.at(confidence)
    outcome = FAILED if estimate.bad(interval) else PASSED if estimate.good(interval) else UNTOLD
    more, reason = None, estimate.note
    if outcome == UNTOLD:
        more = more_needed(estimate, confidence)
        guess = "about" if interval.known else "at least"  # one prompt has no spread
        hint = f"{guess} {more} more {estimate.unit} would tell" if more else "it lies too near the bar to be told"
        reason = "; ".join(filter(None, (hint, reason)))
    low, high = interval.ends
    value = estimate.form.format(interval.value) + between(low, high, estimate.form.split()[0].rstrip("x"), confidence)
    figures = {"value": interval.value, "low": low, "high": high, **without.figures}
    return replace(without, value=value, verdict=outcome, figures=figures, reason=reason, more=more, unit=estimate.unit)


def verdict_of_worst(run: Run, score: Score, bar: float, share: float, confidence: float) -> Verdict:
    """Fail if an image is beyond ``bar``; pass if prompts suffice to infer that at most a ``share`` of all are."""
    knob, sign = f"worst_{score.key}", 1 if score.more_is_better else -1
    values = image_values(run, score, knob)
    beyond = sum(value is None or sign * value < sign * bar for value in values)
    images = worst_of(run, values, score.more_is_better)
    worst = images[0].value if images else None
    count, error = len(set(run.record["prompts"])), (1 - confidence) / 2
    wanted = math.ceil(math.log(error) / math.log1p(-share))
    more = None if beyond or count >= wanted else wanted - count
    reason = f"{beyond} of {len(values)} images are beyond it"
    if not beyond:
        most = 1 - error ** (1 / count)
        reason = f"none of {len(values)} images is beyond it, so at most {most:.1%} of prompts are"
        reason += f"; {more} more prompts would tell of {share:.1%}" if more else ""
    return Verdict(
        knob, f"worst {score.title}", DASH if worst is None else score.text(worst),
        f"at {'least' if score.more_is_better else 'most'} {score.text(bar)}",
        FAILED if beyond else UNTOLD if more else PASSED,
        {"value": worst, "low": None, "high": None, "bar": bar, "count": count},
        reason, more, PROMPTS, images, form_of(score),
    )  # fmt: skip


def verdict_of_degenerate(run: Run) -> Verdict:
    """Fail a run with any degenerate (broken) image. Raises ArtifactError if the record names an image it lacks."""
    count, words = len(run.record["prompts"]), degenerate_of(run.record)
    without = Verdict(
        "degenerate", "degenerate images", DASH, "none", UNTOLD, {"bar": 0, "count": count},
        "the record does not say; make the run again",
    )  # fmt: skip
    if run.record.get("degenerate") is None:
        return without
    if unknown := [index for index in words if index not in range(count)]:
        raise damaged(run, f"degenerate names image {unknown[0]} of {count}")
    return replace(
        without, value=f"{len(words)} of {count}", verdict=FAILED if words else PASSED,
        figures={"value": len(words), **without.figures}, reason=degenerate_images(run.record),
        worst=[shown(run, index, 0.0) for index in [*words][:SHOWN]], form="degenerate",
    )  # fmt: skip


def decide(
    run: Run, baseline: Run | None, bars: Mapping[str, float], confidence: float = 0.95, worst_share: float = 0.1
) -> Gate:
    """Decide all criteria by ``bars``: limits by knob, margins to ``baseline``. Raises ConfigError without figures."""
    verdicts = [verdict_of(each, confidence) for each in estimates_of(run, baseline, bars)]
    worst = {score: bars.get(f"worst_{key}") for key, score in OF_IMAGES.items()}
    verdicts += [verdict_of_worst(run, *each, worst_share, confidence) for each in worst.items() if each[1] is not None]
    verdicts.append(verdict_of_degenerate(run))
    outcomes = {verdict.verdict for verdict in verdicts}
    outcome = next(each for each in (FAILED, UNTOLD, PASSED) if each in outcomes)
    return Gate(run.folder, outcome, sentence_of(outcome, verdicts), verdicts)


def sentence_of(outcome: str, verdicts: Sequence[Verdict]) -> str:
    """Describe the outcome: the failed criteria, or the undecided criteria and the prompts and rounds they need."""
    if outcome == PASSED:
        return PASSED
    named = f"{outcome}: {', '.join(each.criterion for each in verdicts if each.verdict == outcome)}"
    hints = {
        PROMPTS: "prompts would tell (infer.prompts)",
        ROUNDS: "rounds would tell (a smaller timing.half_width and a larger timing.budget_s)",
    }
    needed = [
        f"about {max(numbers)} more {hint}"
        for unit, hint in hints.items()
        if outcome == UNTOLD and (numbers := [each.more for each in verdicts if each.unit == unit and each.more])
    ]
    return "; ".join(filter(None, [named, " and ".join(needed)]))
