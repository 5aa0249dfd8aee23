"""Comparison of candidates, the third-party quantized checkpoints of ``judge.py``: verdicts, contents, worst layers.

Candidates come from other tools and run on other machines, so only their sizes and images are compared, the images by
PSNR, prompt by prompt. A candidate is "worth its bits" if no other is both smaller and closer to full precision.
Alternative not taken: a single score of both, because how much a smaller model is worth depends on the user's memory.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sd_quant.report.readings import named_parts
from sd_quant.report.recommendation import capped, closer, joined
from sd_quant.report.record import CANDIDATE, DONE, Judged, JudgedPart, at
from sd_quant.report.summary import Job, Sweep
from sd_quant.report.table import DASH, Table, between, figure, table_of_texts
from sd_quant.text import counted

USUAL_CONFIDENCE = 0.95
IDENTICAL_DB = 100.0  # PSNR that counts for an identical image
HIGH_PRECISION = "high precision"
MOST_NAMES = 6  # names in a sentence
WORST = 5  # layers of each candidate
CONTENTS = (
    "Bits are all stored bits of the denoiser, scales and layers in high precision included, per weight. Images come "
    "from our reading of each file, in torch and fp32. Where the library that the file is made for computes here, it "
    "has made them again, and their PSNR against ours says whether the file was understood. Speed is of this machine's "
    "processor alone. The error of the network is that of one call's output, relative to its norm. Files are judged "
    "with full precision's text."
)
CONTENTS_TITLES = [
    "candidate", "made by", "verdict", "bits a weight", "MiB", "layers quantized", "inputs", "error of the network",
    "its own library", "agrees with our reading", "a call, ms", "over torch in full precision",
]  # fmt: skip
HURTING_TITLES = ["candidate", "layer", "role", "format", "error of its output", "error of the network with it alone"]


@dataclass(frozen=True, eq=False)
class Standing:
    """Size and PSNR of the images of one candidate."""

    name: str
    bits: float
    images: tuple[float, ...]  # PSNR of each in dB
    loras: str | None = None  # of a checkpoint: where it has the LoRAs of full precision
    kind: tuple[frozenset[str], ...] = ()  # of a checkpoint: its formats of weights and of inputs

    def __str__(self) -> str:
        return f"{self.name} ({statistics.fmean(self.images):.1f} dB at {self.bits:.2f} bits a weight)"


def confidence_of(sweep: Sweep) -> float:
    """Return the knob ``judge.confidence``, or 0.95 where the sweep's plan has no valid value."""
    stated = at(sweep.judge, "confidence")
    return stated if type(stated) is float and 0.5 <= stated < 1 else USUAL_CONFIDENCE


def rule(sweep: Sweep) -> str:
    return (
        "a candidate is worth its bits if no other is both smaller and closer to full precision; two are compared on "
        f"the same prompts, with a confidence of {confidence_of(sweep):.0%} for all comparisons together"
    )


def standings(sweep: Sweep) -> list[Standing]:
    """Return the Standing of each candidate that is judged and has images and a size, the smallest first."""
    found = []
    for job, row in zip(sweep.jobs, sweep.rows, strict=True):
        images, judged = capped(job.record["fidelity"], IDENTICAL_DB), job.record["judged"]
        if row["status"] == DONE and images and row["denoiser_bits"]:
            kind = (frozenset(judged["formats"]), frozenset(judged["inputs"]))
            found.append(Standing(name_of(job), row["denoiser_bits"], images, judged["loras"], kind))
    return sorted(found, key=lambda each: (each.bits, -statistics.fmean(each.images)))


WORTH, BEATEN, TIED = "worth its bits", "beaten", "not to be told apart"


def verdicts(everyone: Sequence[Standing], together: float) -> dict[str, tuple[str, str]]:
    """Return by name WORTH, BEATEN or TIED, and why, at joint confidence ``together``. ``everyone``: smallest first."""
    found: dict[str, tuple[str, str]] = {}
    best: Standing | None = None
    confidence = 1 - (1 - together) / max(1, len(everyone))
    for each in everyone:  # all that could beat it stand before it
        if best is None or (gain := closer(each.images, best.images, confidence)).low > 0:
            best, found[each.name] = each, (WORTH, WORTH)
        elif gain.high < 0:
            by = f"{-gain.value:.1f} dB ({-gain.high:.1f} to {-gain.low:.1f})"
            found[each.name] = BEATEN, f"beaten by {best.name}, which is no larger, by {by}"
        else:
            found[each.name] = TIED, f"not to be told apart from {best.name}, which is no larger"
    return found


def judgement(sweep: Sweep) -> str:
    """Return sentences that name the candidates that are worth their bits, beaten or tied."""
    everyone, confidence = standings(sweep), confidence_of(sweep)
    if not everyone:
        return "No candidate has both images and a size, so there is nothing to say."
    kinds = {name: kind for name, (kind, _) in verdicts(everyone, confidence).items()}
    worth = [str(each) for each in everyone if kinds[each.name] == WORTH]
    beaten, tied = ([name for name, kind in kinds.items() if kind == other] for other in (BEATEN, TIED))
    sentences = [f"Worth {'its' if len(worth) == 1 else 'their'} bits: {joined(worth)}."]
    if beaten:
        named = joined(beaten) if len(beaten) <= MOST_NAMES else f"{len(beaten)} others"
        sentences.append(f"Beaten by one that is no larger: {named}.")
    if tied:
        count = counted(len(everyone[0].images), "image")
        sentences.append(f"On {count} not to be told apart from a smaller one: {joined(tied)}.")
    return " ".join([*sentences, *lora_sentences(everyone, confidence)])


def lora_sentences(everyone: Sequence[Standing], together: float) -> list[str]:
    """Compare in sentences, at joint confidence ``together``, candidates of equal formats with LoRAs fused or not."""
    both = [(a, b) for a in everyone for b in everyone if (a.loras, b.loras) == ("beside", "fused")]
    pairs = [(beside, fused) for beside, fused in both if beside.kind == fused.kind]
    found = []
    for beside, fused in pairs:
        gain = closer(beside.images, fused.images, 1 - (1 - together) / len(pairs))
        one, other = f"{beside.name} with the LoRAs beside it", f"{fused.name} with them fused"
        if gain.holds(0):
            found.append(f"{one} and {other} cannot be told apart.")
            continue
        if gain.value < 0:
            one, other = f"{fused.name} with the LoRAs fused", f"{beside.name} with them beside it"
        by = f"by {abs(gain.value):.1f} dB ({min(map(abs, gain[1:])):.1f} to {max(map(abs, gain[1:])):.1f})"
        found.append(f"{one} is closer than {other}, {by}.")
    return found


def candidate_tables(sweep: Sweep) -> list[Table]:
    """Return a table of the candidates' contents and one of their worst layers; no tables without candidates."""
    judged = {job.name: (job, job.record["judged"]) for job in sweep.jobs if job.record["judged"]}
    if not judged:
        return []
    said = {name: words for name, (_, words) in verdicts(standings(sweep), confidence_of(sweep)).items()}
    hurting = [
        [name_of(job), *map(str, (layer["name"], layer["role"], layer["format"])),
         *(figure(error, "{:.2g} %", 100) for error in (layer["output_error"], layer["network_error"]))]
        for job, entry in judged.values()
        for layer in entry["hurting"][:WORST]
    ]  # fmt: skip
    layers = f"The {WORST} worst of each candidate, on inputs of the full-precision network. All layers stand in "
    return [
        table_of_texts(
            CONTENTS_TITLES, [contents_of(*each, said) for each in judged.values()], "What is in each candidate",
            CONTENTS,
        ),
        table_of_texts(
            HURTING_TITLES, hurting, "Which layers hurt", f"{layers}layers.csv of the candidate's folder."
        ),
    ]  # fmt: skip


def name_of(job: Job) -> str:
    return str(job.varied.get(CANDIDATE, job.name))


def contents_of(job: Job, entry: Judged, verdicts: Mapping[str, str]) -> list[str]:
    runtime, agreement = entry["runtime"], entry["runtime"]["agreement"]["values"]
    known = [value for value in agreement if value is not None]
    agrees = f"{statistics.fmean(known):.1f} dB" if known else "identical" if agreement else DASH
    ends, reason = runtime["speedup_interval"], runtime["reason"]
    low, high = ends if len(ends) == 2 else (None, None)
    parts = [f"{part} {quantized_of(each)}" for part, each in named_parts(entry["parts"]).items()]
    loras = [f"LoRAs {entry['loras']}"] if entry["loras"] else []
    return [
        name_of(job),
        str(entry["maker"]),
        verdicts.get(name_of(job), DASH),
        figure(entry["bits"], "{:.2f}"),
        figure(entry["stored_bytes"], "{:,.1f}", 2**-20),
        "; ".join([quantized_of(entry), *parts, *loras]),
        lowered(entry["inputs"]) or HIGH_PRECISION,
        figure(entry["network_error"], "{:.2g} %", 100),
        f"{DASH} ({reason})" if reason else runtime["name"] or DASH,
        agrees,
        figure(runtime["ms"], "{:,.1f}"),
        figure(runtime["speedup"], "{:.2f}x" + between(low, high, "{:.2f}")),
    ]


def quantized_of(entry: JudgedPart) -> str:
    """Format how many layers of the denoiser, or of another part, are quantized, as ``90 Q4_0 of 100``."""
    return f"{lowered(entry['formats']) or 'none'} of {sum(filter(None, entry['formats'].values()))}"


def lowered(counts: Mapping[str, int]) -> str:
    """Format the numbers of layers by format as ``90 Q4_0, 5 Q8_0``, without layers in high precision."""
    return ", ".join(f"{count} {name}" for name, count in counts.items() if name != HIGH_PRECISION)
