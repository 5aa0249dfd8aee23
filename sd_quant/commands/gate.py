"""Pass or fail a finished run by thresholds that were fixed before, for CI: ``gate run=<folder> min_psnr=35``.

Knobs are written as for other commands, except that Hydra does not read them: so a gate writes no folder and no log,
starts in a third of a second, and accepts the folder of a sweep's job, which has = in its name, without quotes.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sd_quant.errors import UNDECIDED, ConfigError, SdQuantError
from sd_quant.files import check_replaceable, write_json
from sd_quant.help import listed
from sd_quant.knobs import CONFIDENCE, FROM_0, MORE_THAN_0, SHARE, between, check, fields_of, options_of, read
from sd_quant.places import existing, output_path
from sd_quant.report.gate import FAILED, PASSED, UNTOLD, decide, read_run
from sd_quant.report.gate_output import json_of, text_of

EXIT_CODES = {PASSED: 0, FAILED: SdQuantError.exit_code, UNTOLD: UNDECIDED}
OWN = rb'\{\s*"schema_version": \d+,\s*"run": '  # how such a file begins
MARGINS = ("psnr_margin", "ssim_margin", "lpips_margin", "speedup_margin")
NOT_BARS = ("run", "baseline", "output", "confidence", "worst_share")
USAGE = """Pass or fail a finished run by bars that were fixed before.

  sd-quant gate run=<folder> min_psnr=35 max_lpips=0.01 min_speedup=1.2
  sd-quant gate run=<folder> baseline=<folder> psnr_margin=0.5 output=gate.json

The exit code is 0 if all criteria pass, 1 if one fails, {untold} if it cannot be told, which may be a failure.
docs/gate.md has the statistics.

== Knobs: name=value ==
{knobs}"""


@dataclass(slots=True)
class GateJob:
    run: Annotated[str, "folder of a finished run"]
    baseline: Annotated[str | None, "folder of the run that the margins are to, with the same prompts and seeds"] = None
    min_psnr: Annotated[float | None, FROM_0, "least mean PSNR in dB"] = None
    min_ssim: Annotated[float | None, between(-1, 1), "least mean SSIM"] = None
    max_lpips: Annotated[float | None, FROM_0, "largest mean LPIPS"] = None
    min_speedup: Annotated[float | None, MORE_THAN_0, "least speed-up of an image over the unquantized engine"] = None
    worst_psnr: Annotated[float | None, FROM_0, "PSNR in dB below which no image may be"] = None
    worst_ssim: Annotated[float | None, between(-1, 1), "SSIM below which no image may be"] = None
    worst_lpips: Annotated[float | None, FROM_0, "LPIPS above which no image may be"] = None
    worst_share: Annotated[float, between(0.0001, 0.9999), "share of prompts that may be worse than a worst_ bar"] = 0.1
    psnr_margin: Annotated[float | None, FROM_0, "dB by which the mean PSNR may be below the baseline's"] = None
    ssim_margin: Annotated[float | None, FROM_0, "by how much the mean SSIM may be below the baseline's"] = None
    lpips_margin: Annotated[float | None, FROM_0, "by how much the mean LPIPS may be above the baseline's"] = None
    speedup_margin: Annotated[float | None, SHARE, "share of the baseline's speed-up that may be lost"] = None
    confidence: Annotated[float, CONFIDENCE, "of intervals"] = 0.95
    output: Annotated[str | None, "file of the verdicts, .json"] = None

    def __post_init__(self):
        margins = ", ".join(name for name in MARGINS if getattr(self, name) is not None)
        if not self.bars():
            raise ConfigError("no criterion is given, expected at least one, such as min_psnr=35; --help lists all")
        check(self.baseline is not None or not margins, "baseline", "null", f"a folder, because {margins} is given")
        expected = f"null, because none of {', '.join(MARGINS)} is given"
        check(self.baseline is None or bool(margins), "baseline", self.baseline, expected)
        known = self.output is None or Path(self.output).suffix.lower() == ".json"
        check(known, "output", self.output, "a file that ends with .json")

    def bars(self) -> dict[str, float]:
        """Return the thresholds that were given, by knob."""
        values = {name: getattr(self, name) for name in fields_of(GateJob) if name not in NOT_BARS}
        return {name: value for name, value in values.items() if value is not None}


DEFAULTS = {
    field.name: "???" if field.default is dataclasses.MISSING else field.default
    for field in dataclasses.fields(GateJob)
}


def job_of(words: list[str]) -> GateJob:
    """Parse ``name=value`` words. Raises ConfigError for an unknown knob, and a value that a knob does not accept."""
    kinds = {name: options_of(kind) for name, (kind, _) in fields_of(GateJob).items()}
    given = {name: value for name, value in DEFAULTS.items() if name != "run"}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"the argument {word} has no value, expected {word.lstrip('-')}=<value>")
        value = None if text == "null" else number(text) if float in kinds.get(name, ()) else text
        given[name] = value
    return read(GateJob, given)


def number(text: str) -> float | str:
    """Return the number in ``text``, or ``text`` itself, which the knob's check refuses later."""
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    """Print the verdicts, write them to the file ``output`` if given, and exit with the code of the outcome."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(USAGE.format(untold=UNDECIDED, knobs=listed(GateJob, DEFAULTS)))
        return
    job = job_of(words)
    folders = {"run": job.run} | ({"baseline": job.baseline} if job.baseline is not None else {})
    expected = "the folder of a finished run"
    runs = {knob: read_run(knob, existing(knob, folder, expected)) for knob, folder in folders.items()}
    output = None if job.output is None else output_path(job.output)
    if output is not None:
        check_replaceable(output, "output", OWN, "the verdicts of a gate")
    gate = decide(runs["run"], runs.get("baseline"), job.bars(), job.confidence, job.worst_share)
    code = EXIT_CODES[gate.outcome]
    print(text_of(gate))
    if output is not None:
        write_json(output, json_of(gate, code))
    sys.exit(code)
