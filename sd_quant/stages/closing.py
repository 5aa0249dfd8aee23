"""The closing words of a finished job."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_quant.metrics import SCORES
from sd_quant.places import shown
from sd_quant.process import seconds_since_start
from sd_quant.progress import working
from sd_quant.report.readings import score_of
from sd_quant.report.record import RECORD
from sd_quant.report.run_table import run_table
from sd_quant.report.shipped import last_words
from sd_quant.report.summary import RECOMMENDATION, REPORT, SWEEP
from sd_quant.shell import pasted
from sd_quant.text import counted

LOG = logging.getLogger(__name__)
ALPHA = ("alpha", "quantize.alpha")
DONE_BEFORE = "done before: nothing that this job depends on has changed since"


def closing_words(record: Mapping[str, Any], directory: Path) -> float | None:
    """Print the table of a run, or log a line of a sweep's job; returns the mean PSNR in dB.

    A run gets its report, unless it has one of this very record; the jobs of a sweep have theirs together.
    """
    psnr = score_of(record, SCORES["psnr"]).value.value
    if in_sweep(directory):
        LOG.info("done: %s", directory.name if psnr is None else f"{directory.name}, PSNR {psnr:.2f} dB")
        return psnr
    print(run_table(record))
    if auto := record.get("auto"):
        given = [each for each in record["overrides"] or [] if each.partition("=")[0] not in ALPHA]
        print(f"alpha=auto {with_auto(auto)}: {pasted('quantize', *given, 'alpha=auto')}\n")
    drawn = [directory / REPORT, directory / RECOMMENDATION]
    made = (directory / RECORD).stat().st_mtime_ns
    if any(not path.exists() or path.stat().st_mtime_ns < made for path in drawn):
        from sd_quant.report.rebuild import rebuild  # which draws

        with working("report"):
            rebuild(directory)
    print(f"run directory: {shown(directory)} (the command took {seconds_since_start():.1f} s)")
    print(last_words(directory))
    return psnr


def with_auto(auto: Mapping[str, Any]) -> str:
    """What ``alpha=auto`` would give, in words."""
    before, after = auto["error"], auto["error_auto"]
    verb = "lowers" if after < before else "does not lower"
    of = f"{auto['lower']} of {counted(auto['inputs'], 'input')} tried"
    errors = f"{before:.2%} with the given alpha, {after:.2%} with auto; lower in {of}"
    return f"{verb} the expected error of layers ({errors})"


def in_sweep(directory: Path) -> bool:
    return (directory.parent / SWEEP).exists()
