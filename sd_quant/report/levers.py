"""Tables of levers: ways to save time other than quantization, such as reused steps.

A recipe with levers has to be closer to the reference, prompt by prompt, than the control: full precision with fewer
steps in no less time. Bits (quantization) and calls (levers) are also measured alone. Alternative not taken: what both
have beyond independent errors, which add in squares, was at most 0.4 ± 0.3 dB.
"""

from collections.abc import Sequence
from dataclasses import replace

from sd_quant.metrics.intervals import Interval, mean_interval, recorded
from sd_quant.report.candidates import IDENTICAL_DB
from sd_quant.report.recommendation import capped, closer
from sd_quant.report.record import Control, Fidelity, PreciseChosen, Record
from sd_quant.report.summary import Sweep
from sd_quant.report.table import DASH, Table, figure, plus_minus, table_of_texts
from sd_quant.report.timing import Timed

BEATS, LOSES, UNTOLD = "beats it", "does not", "not shown"
CAPTION = (
    "The control is full precision in so few steps that it takes no less time; a recipe beats it if its images are "
    "closer to the reference, by the paired interval over prompts at 95 %. To its twin: to full precision's images by "
    "the same calls. Speed-ups are of an image. Precise steps: what the chosen ones gain in the error of the final "
    "latents, on prompts that did not choose them."
)
TITLES = [
    "recipe", "calls", "schedule", "speed-up", "of that by bits", "by calls", "PSNR, dB", "to its twin", "control",
    "against it", "bits alone, dB", "calls alone, dB", "precise steps",
]  # fmt: skip


def decibels(scores: Fidelity) -> Sequence[float]:
    """Return the PSNR of each image in dB from a record's ``scores``; an empty tuple if any image has no PSNR."""
    return capped(scores, IDENTICAL_DB) if scores["psnr"]["values"] else ()


def against_control(record: Record) -> tuple[str, Interval, Control] | None:
    """Return BEATS, LOSES or UNTOLD, the PSNR gain over the control, and the control; None without one."""
    own, control = decibels(record["fidelity"]), record["levers"]["control"]
    if not control or not own or len(decibels(control["fidelity"])) != len(own):
        return None
    gain = closer(own, decibels(control["fidelity"]), 0.95)
    return (BEATS if gain.low > 0 else LOSES if gain.high < 0 else UNTOLD), gain, control


def mean_text(values: Sequence[float] | None) -> str:
    """Format the mean of ``values`` with its 95 % interval; a dash without values."""
    return plus_minus(mean_interval(values) if values else None, "{:.1f}")


def lever_cells(name: str, record: Record, timed: Timed | None) -> list[str]:
    """Return a job's row of the table of levers, as texts in the order of TITLES."""
    levers = record["levers"]
    speedups: list[float | None] = [None, None, None]  # by all, by bits alone, by calls alone
    if timed is not None:
        by_all, by_bits = timed.image_speedup(), replace(timed, share=1.0).image_speedup()
        speedups[:2] = [each and each.value for each in (by_all, by_bits)]
        speedups[2] = None if timed.rest is None else (1 + timed.rest) / (timed.share + timed.rest)
    control = [str(levers["reason"] or DASH)] * 2
    if judged := against_control(record):
        verdict, gain, fewer = judged
        control = [f"{fewer['steps']} steps: {mean_text(decibels(fewer['fidelity']))} dB"]
        control.append(f"{verdict} ({plus_minus(gain, '{:+.1f}')} dB)")
    return [
        name,
        f"{levers['calls']}",
        levers["schedule"] or f"{levers['steps']} steps",
        *(figure(each, "{:.2f}x") for each in speedups),
        mean_text(decibels(record["fidelity"])),
        mean_text(decibels(levers["twin"])),
        *control,
        mean_text(decibels(levers["bits_alone"])),
        mean_text(decibels(levers["calls_alone"])),
        precise_cell(levers["precise"]),
    ]


def precise_cell(chosen: PreciseChosen) -> str:
    """Format the chosen steps with unquantized inputs and what they gain; a dash without a choice."""
    if not chosen:
        return DASH
    mean, *ends = chosen["gain_db"]
    return f"{chosen['schedule']}: {plus_minus(recorded(mean, ends), '{:+.1f}')} dB"


def lever_tables(sweep: Sweep) -> list[Table]:
    """Return the table of all jobs with levers in a list; an empty list without such jobs."""
    rows = [lever_cells(job.name, job.record, job.timed) for job in sweep.done if job.record["levers"]]
    return [table_of_texts(TITLES, rows, "Bits and other levers", CAPTION)] if rows else []
