"""The summary that a run prints at its end: its record (``metrics.json``) as text tables for a terminal.

A number that does not exist is a dash, with its reason below the tables.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sd_quant.engines import COMPILED
from sd_quant.metrics import Against, fidelity_scores
from sd_quant.metrics.intervals import recorded
from sd_quant.report.levers import TITLES, lever_cells
from sd_quant.report.readings import (
    Number,
    interval_of,
    latency_of,
    named_parts,
    number_at,
    psnr_text,
    quotient,
    score_of,
)
from sd_quant.report.record import IMAGE, TORCH, VARIANTS, HandedOver, HandedPart, Record, at, parsed
from sd_quant.report.score_tables import asked, difference_text
from sd_quant.report.summary import timed_alone, workload
from sd_quant.report.table import CLAUSES, DASH, WORDS, Table, as_text, folded, plus_minus, table_of_texts
from sd_quant.report.timing import occasions_of
from sd_quant.report.warnings import warnings_of_run
from sd_quant.text import printable

HANDED_OVER = ["handed over", "layers", "PSNR", "size"]


def run_table(found: Mapping[str, Any]) -> str:
    """Format the summary of any record, a failed run's too, as plain text that ends with a newline."""
    record: Record = parsed(found)
    reasons = list[str]()
    engines = [name for name in named_parts(record["latency"]) if name not in baselines_of(record)]
    sections: list[Table | list[str]] = [
        _heading(record),
        warnings_of_run(record, engines, baselines_of(record)),
        _sizes(record, reasons),
        *(_parts(record, engine, reasons) for engine in engines),
        *(_image(record, engine, reasons) for engine in engines or [TORCH]),
        _intervals(record),
        _fidelity(record, reasons),
        _video(record),
        _named_scores(record, reasons),
        _levers(record),
        _moved(record),
        *_fit(record),
        handed_over_table(record["hand_over"]),
        _costs(record),
        [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)],
    ]
    texts = [as_text(each) if isinstance(each, Table) else each for each in sections]
    return "\n\n".join("\n".join(map(printable, lines)) for lines in texts if lines) + "\n"


def _heading(record: Record) -> list[str]:
    knobs, status, reason = record["knobs"], record["status"] or "unfinished", at(record, "reason")
    named = [f"{name}={at(knobs, name)}" for name in ("format", "quant_level", "alpha", "percentile") if name in knobs]
    return ["  ".join([f"{status}: {reason}" if reason else status, *named])]


def _part_names(record: Record) -> list[str]:
    """Return the names of the parts for which the record has sizes or latencies."""
    places = [record["sizes_bytes"], *(record["latency"][engine] for engine in named_parts(record["latency"]))]
    found = dict.fromkeys(part for place in places for part in place)
    return [part for part in found if part not in (IMAGE, "reason", "value")]


def _sizes(record: Record, reasons: list[str]) -> Table:
    rows, parts, files = [], _part_names(record), ("onnx_full_precision", "onnx_quantized", "plan")
    found = {part: [number_at(record["sizes_bytes"], part, file) for file in files] for part in parts}
    plans = any(plan.value for *_, plan in found.values())
    for part, (full, quantized, plan) in found.items():
        if kept := record["plans"][part]["attention"]:
            plan = Number(plan.value, f"attention is in high precision: {kept}")
        cells = [_cell(full, _bytes, reasons), _cell(quantized, _bytes, reasons)]
        cells.append(_cell(quotient(full, quantized), _times, reasons))
        rows.append([part, *cells, *([_cell(plan, _bytes, reasons)] if plans else [])])
    titles = ["size", "ONNX full precision", "ONNX quantized", "smaller", *(["plan"] if plans else [])]
    return table_of_texts(titles, rows)


def _parts(record: Record, engine: str, reasons: list[str]) -> Table:
    rows, calls = [], record["denoiser"]["calls"]
    for part in _part_names(record):
        title = f"{part}, {calls[part]:g} of {sum(calls.values()):g} calls" if part in calls else part
        for batch in named_parts(record["latency"][engine][part]) or [""]:
            full, quantized, speedup, reach = latency_of(record, engine, part, batch)
            rows.append([
                title, batch or DASH, _cell(full, _milliseconds, reasons), _cell(quantized, _milliseconds, reasons),
                _cell(speedup, partial(_times, reach=reach), reasons),
            ])  # fmt: skip
    return table_of_texts([f"one call, {engine}, median", "batch", "full precision", "quantized", "speed-up"], rows)


def _image(record: Record, engine: str, reasons: list[str]) -> Table:
    rows, baselines = [], baselines_of(record)
    for batch in named_parts(record["latency"][engine][IMAGE]) or ["1"]:
        known = [latency_of(record, name, IMAGE, batch).full_precision for name in baselines]
        for name, milliseconds in zip(baselines, known, strict=True):
            cell = _cell(milliseconds, _milliseconds, reasons)
            rows.append([f"{name}, full precision", batch, cell, *[""] * len(baselines), ""])
        if engine == TORCH:
            continue
        full, quantized, speedup, reach = latency_of(record, engine, IMAGE, batch)
        for variant, milliseconds in (("full precision", full), ("quantized", quantized)):
            over = [_cell(quotient(baseline, milliseconds), _times, reasons) for baseline in known]
            cell = _cell(milliseconds, _milliseconds, reasons)
            own = _cell(speedup, partial(_times, reach=reach), reasons) if milliseconds is quantized else ""
            rows.append([f"{engine}, {variant}", batch, cell, *over, own])
    compared = [f"vs {name}" for name in baselines]
    return table_of_texts(["prompt to image, median", "batch", "latency", *compared, "vs full precision"], rows)


def _intervals(record: Record) -> list[str]:
    """Return wrapped lines that say whether the intervals of speed-ups also hold for other hours."""
    engine, part, samples, _ = workload(record)
    words = occasions_of(record["latency"][engine][part][str(samples)]["rounds"])
    return folded(re.findall(WORDS, f"± of speed-ups: {words}")) if words else []


def baselines_of(record: Record) -> list[str]:
    """Return the baselines of a record: torch and, where it was timed as a baseline, compiled torch."""
    compiled = COMPILED in named_parts(record["latency"]) and record["knobs"]["infer"]["engine"] != COMPILED
    return [TORCH, *([COMPILED] if compiled else [])]


def _fidelity(record: Record, reasons: list[str]) -> Table:
    rows = []
    for score in fidelity_scores():
        value, worst, _ = score_of(record["fidelity"], score)
        of_images = score.against is Against.IMAGES
        mean = interval_of(record["fidelity"], score) if of_images else None
        show = partial(score.text, reach=None if mean is None else mean.reach)
        title = score.title if of_images else f"{score.title}, last step"
        rows.append([title, _cell(value, show, reasons), _cell(worst, score.text, reasons) if of_images else ""])
    return table_of_texts(["fidelity to full precision", "mean ± at 95 %", "worst"], rows)


def _named_scores(record: Record, reasons: list[str]) -> Table:
    """Build the table of the requested scores (CLIP score, FID, ...), with their differences from full precision."""
    rows = []
    for score in asked(record):
        both = [number_at(record["text_scores"], variant, score.key) for variant in VARIANTS]
        cells = [_cell(each, score.text, reasons) for each in both]
        rows.append([score.title, *cells, difference_text(score, record)])
    return table_of_texts(["scores asked for", "full precision", "quantized", "difference [95 % interval]"], rows)


def _video(record: Record) -> Table | list[str]:
    """Build the table of a video's PSNR, flicker and change from frame to frame, against full precision."""
    if not (video := record["video"]):
        return []
    of_frames = (video["psnr"]["mean"], video["psnr"]["min"])
    rows = [["PSNR, dB", *("identical" if each is None else f"{each:.2f}" for each in of_frames)]]
    for title, of, form in (
        ("flicker, levels of 255", video["flicker"], "{:.2f}"),
        ("change, of full precision's", video["change"], "{:.3f}"),
    ):
        mean = None if of["mean"] is None else recorded(of["mean"], of["interval"])
        rows.append([title, plus_minus(mean, form), ""])
    return table_of_texts([f"{video['frames']} frames of a video", "mean ± at 95 %", "worst"], rows)


def _levers(record: Record) -> Table | list[str]:
    if not record["levers"]:
        return []
    cells = lever_cells("", record, timed_alone("", record))
    return table_of_texts(["bits and other levers", ""], list(zip(TITLES[1:], cells[1:], strict=True)))


def _moved(record: Record) -> Table:
    """Build the table of output errors of quantized parts other than the denoiser."""
    keys, rows = ("relative_error", "cosine", "worst", "first_token"), []
    for part, quantized in named_parts(record["parts"]).items():
        for output, moved in named_parts(quantized["outputs"]).items():
            values = [at(moved, key) for key in keys]
            rows.append([f"{part}, {output}", *("" if value is None else f"{value:.5f}" for value in values)])
    titles = ["quantized part, output", "relative error", "cosine of tokens", "worst token", "first token"]
    return table_of_texts(titles, rows)


RESIDENT = {"all": ", all parts in memory", "one": ", one part in memory at a time", None: " of weights"}


def _fit(record: Record) -> list[Table | list[str]]:
    """Return a table of each part's formats as chosen by the knob ``fit`` or a budget, and the PSNR of all choices."""
    entry = at(record["sensitivity"], "limit") or {}
    candidates, whole = entry.get("candidates") or {}, entry.get("unquantized_bytes") or {}
    if (chosen := candidates.get(entry.get("taken"))) is None:
        return []
    formats = {part: [f"{n} {name}" for name, n in each.items()] for part, each in chosen["formats"].items()}
    rows = [
        [part, _bytes(whole[part]), _bytes(size), ", ".join(formats[part])]
        for part, size in chosen["weight_bytes"].items()
    ]
    limit = f"fit in {_bytes(entry['limit_bytes'])}{RESIDENT[entry['resident']]}"
    lines = []
    for name, each in candidates.items():
        expected, psnr = (
            "no error" if value is None else f"{value:.1f} dB" for value in (each["expected_psnr"], each["psnr"])
        )
        taken = ", taken" if name == entry["taken"] else ""
        lines.append(f"formats {name}: expected {expected}, in calibration images {psnr}{taken}")
    return [table_of_texts([limit, "weights", "chosen", "layers in each format"], rows), lines]


def handed_over_table(entries: Mapping[str, HandedOver]) -> Table:
    """Build the table of exports to other tools: layers, PSNR with its 95 % interval, bytes of the larger files."""
    rows = []
    known: Mapping[str, HandedOver] = parsed(entries, dict[str, HandedOver])  # from a record, or not written yet
    for target, entry in named_parts(known).items():
        parts: dict[str, HandedPart] = {"": entry, **named_parts(entry["parts"])}
        layers = [f"{part} {each['quantized']} of {each['of']}".lstrip() for part, each in parts.items()]
        size = sum(filter(None, entry["bytes"].values()))
        rows.append([target, ", ".join(layers), psnr_text(entry["fidelity"]), _bytes(size)])
    return table_of_texts(HANDED_OVER, rows)


def _costs(record: Record) -> list[str]:
    peak, whole = number_at(record["peak_memory_bytes"]).value, record["seconds"]
    costs = [f"peak memory {_bytes(peak)}"] if peak else []
    costs += [f"{whole:.1f} s in all"] if whole else []
    stages = named_parts(record["stages"]).items()
    costs += [f"{name} {stage['seconds']:.1f} s" for name, stage in stages if stage["seconds"] is not None]
    return folded(re.findall(CLAUSES, "; ".join(costs))) if costs else []


def _cell(number: Number, show: Callable[[float], str], reasons: list[str]) -> str:
    """Format a number by ``show``, or a dash, with a footnote mark for its reason, which is added to ``reasons``."""
    value, reason = number
    reason = reason or ("null without a reason" if value is None else None)
    if reason and reason not in reasons:
        reasons.append(reason)
    return (DASH if value is None else show(value)) + (f" [{reasons.index(reason) + 1}]" if reason else "")


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _milliseconds(value: float) -> str:
    return f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"


def _times(value: float, reach: float | None = None) -> str:
    return f"{value:.2f}x" + ("" if reach is None else f" ± {reach:.2f}")
