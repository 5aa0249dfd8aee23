"""The closing table of a run: its record (``metrics.json``), as text for a terminal.

Everything comes from the record, so the table can be printed again later. A number that does not exist is shown as a
dash, with its reason below the table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sd_quant.engines import COMPILED
from sd_quant.metrics import Against, fidelity_scores
from sd_quant.metrics.intervals import recorded
from sd_quant.report.levers import TITLES, lever_cells
from sd_quant.report.named_scores import asked, difference_text
from sd_quant.report.noise_floor import floor_table
from sd_quant.report.readings import (
    Number,
    held,
    interval_of,
    latency_of,
    memory_of,
    names,
    number_at,
    psnr_text,
    quotient,
    score_of,
)
from sd_quant.report.record import IMAGE, TORCH, VARIANTS, at
from sd_quant.report.summary import timed_alone, workload
from sd_quant.report.table import CLAUSES, DASH, WORDS, Table, as_text, folded, plus_minus, table_of_texts
from sd_quant.report.timing import occasions_of
from sd_quant.report.warnings import warnings_of_run
from sd_quant.text import printable

HANDED_OVER = ["handed over", "layers", "PSNR by quantization", "PSNR by its text", "size"]


def run_table(record: Mapping[str, Any]) -> str:
    """The closing table as plain text, lines ending in a newline. Works on any record, a failed run's too."""
    reasons, floor = list[str](), floor_table(record)
    engines = [name for name in names(record, "latency") if name not in baselines_of(record)]
    sections: list[Table | list[str]] = [
        _heading(record),
        warnings_of_run(record, engines, baselines_of(record)),
        _sizes(record, reasons),
        _memory(record),
        *(_parts(record, engine, reasons) for engine in engines),
        *(_image(record, engine, reasons) for engine in engines or [TORCH]),
        _intervals(record),
        _fidelity(record, reasons),
        _video(record),
        _named_scores(record, reasons),
        _levers(record),
        replace(floor, notes=()),
        [*floor.notes],
        _moved(record),
        *_fit(record),
        handed_over_table(record.get("hand_over")),
        _costs(record),
        [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)],
    ]
    texts = [as_text(each) if isinstance(each, Table) else each for each in sections]
    return "\n\n".join("\n".join(map(printable, lines)) for lines in texts if lines) + "\n"


def _heading(record: Mapping[str, Any]) -> list[str]:
    knobs = record.get("knobs") or {}
    named = [f"{name}={knobs[name]}" for name in ("format", "quant_level", "alpha", "percentile") if name in knobs]
    status = record.get("status") or "unfinished"
    return ["  ".join([status if not record.get("reason") else f"{status}: {record['reason']}", *named])]


def _part_names(record: Mapping[str, Any]) -> list[str]:
    """The parts of which the record has sizes or latencies."""
    parts = [*(at(record, "sizes_bytes") or {})]
    for engine in names(record, "latency"):
        parts += at(record, "latency", engine)
    return [part for part in dict.fromkeys(parts) if part not in (IMAGE, "reason", "value")]


def _sizes(record: Mapping[str, Any], reasons: list[str]) -> Table:
    rows, parts = [], _part_names(record)
    plans = any(number_at(record, "sizes_bytes", part, "plan").value for part in parts)
    for part in parts:
        full, quantized, plan = (
            number_at(record, "sizes_bytes", part, key) for key in ("onnx_full_precision", "onnx_quantized", "plan")
        )
        if kept := at(record, "plans", part, "attention"):
            plan = Number(plan.value, f"attention is in high precision: {kept}")
        rows.append([
            part, _cell(full, _bytes, reasons), _cell(quantized, _bytes, reasons),
            _cell(quotient(full, quantized), _times, reasons), *([_cell(plan, _bytes, reasons)] if plans else []),
        ])  # fmt: skip
    titles = ["size", "ONNX full precision", "ONNX quantized", "smaller", *(["plan"] if plans else [])]
    return table_of_texts(titles, rows)


def _memory(record: Mapping[str, Any]) -> Table:
    """Memory of the parts' engines, and what of it has to fit at once, which is derived."""
    known = [memory_of(record, variant) for variant in VARIANTS]
    peaks = [[each and each.peak for each in parts.values()] for parts in known]
    figures: dict[str, Sequence[float | None]] = dict(zip(known[0], zip(*peaks, strict=True), strict=True))
    if figures:
        fit = [held(record, variant) for variant in VARIANTS]
        figures["all parts open at once, derived"] = [sum(each.values()) or None for each in fit]
        figures["one at a time, derived"] = [None if None in each else max(each) for each in peaks]
    rows = []
    for title, (full, quantized) in figures.items():
        cells = [DASH if each is None else _bytes(each) for each in (full, quantized)]
        rows.append([title, *cells, _times(full / quantized) if full is not None and quantized else ""])
    return table_of_texts(["peak memory of a part's engine", "full precision", "quantized", "smaller"], rows)


def _parts(record: Mapping[str, Any], engine: str, reasons: list[str]) -> Table:
    rows, calls = [], at(record, "denoiser", "calls") or {}
    for part in _part_names(record):
        title = f"{part}, {calls[part]:g} of {sum(calls.values()):g} calls" if part in calls else part
        for batch in names(record, "latency", engine, part) or [""]:
            full, quantized, speedup, reach = latency_of(record, engine, part, batch)
            rows.append([
                title, batch or DASH, _cell(full, _milliseconds, reasons), _cell(quantized, _milliseconds, reasons),
                _cell(speedup, partial(_times, reach=reach), reasons),
            ])  # fmt: skip
    return table_of_texts([f"one call, {engine}, median", "batch", "full precision", "quantized", "speed-up"], rows)


def _image(record: Mapping[str, Any], engine: str, reasons: list[str]) -> Table:
    rows, baselines = [], baselines_of(record)
    for batch in names(record, "latency", engine, IMAGE) or ["1"]:
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


def _intervals(record: Mapping[str, Any]) -> list[str]:
    """The line that says whether intervals of speed-ups cover other hours too, folded."""
    engine, part, samples, _ = workload(record)
    words = occasions_of(at(record, "latency", engine, part, str(samples), "rounds"))
    return folded(re.findall(WORDS, f"± of speed-ups: {words}")) if words else []


def baselines_of(record: Mapping[str, Any]) -> list[str]:
    """The baselines of a record: torch and, where it was timed, compiled torch."""
    compiled = COMPILED in names(record, "latency") and at(record, "knobs", "infer", "engine") != COMPILED
    return [TORCH, *([COMPILED] if compiled else [])]


def _fidelity(record: Mapping[str, Any], reasons: list[str]) -> Table:
    rows = []
    for score in fidelity_scores():
        value, worst, _ = score_of(record, score)
        if score.against is Against.IMAGES:
            mean = interval_of(record, score)
            show = partial(score.text, reach=None if mean is None else mean.reach)
            rows.append([score.title, _cell(value, show, reasons), _cell(worst, score.text, reasons)])
        else:
            rows.append([f"{score.title}, last step", _cell(value, score.text, reasons), ""])
    return table_of_texts(["fidelity to full precision", "mean ± at 95 %", "worst"], rows)


def _named_scores(record: Mapping[str, Any], reasons: list[str]) -> Table:
    """The scores by networks and photographs that were named, and how far from full precision's they are."""
    rows = []
    for score in asked(record):
        both = [number_at(record, "text_scores", variant, score.key) for variant in VARIANTS]
        cells = [_cell(each, score.text, reasons) for each in both]
        rows.append([score.title, *cells, difference_text(score, record)])
    return table_of_texts(["scores asked for", "full precision", "quantized", "difference [95 % interval]"], rows)


def _video(record: Mapping[str, Any]) -> Table | list[str]:
    """How far frames are from full precision's, and how they change from one to the next."""
    video = record.get("video")
    if not video:
        return []
    figures = {"flicker, levels of 255": ("flicker", "{:.2f}"), "change, of full precision's": ("change", "{:.3f}")}
    of_frames = [number_at(video, "psnr", name) for name in ("mean", "min")]
    rows = [["PSNR, dB", *("identical" if each.value is None else f"{each.value:.2f}" for each in of_frames)]]
    for title, (name, form) in figures.items():
        found = video[name]
        known = None if found["mean"] is None else recorded(found["mean"], found["interval"])
        rows.append([title, plus_minus(known, form), ""])
    return table_of_texts([f"{video['frames']} frames of a video", "mean ± at 95 %", "worst"], rows)


def _levers(record: Mapping[str, Any]) -> Table | list[str]:
    """What the levers beside bits buy."""
    if not at(record, "levers"):
        return []
    cells = lever_cells("", record, timed_alone("", record))
    return table_of_texts(["bits and other levers", ""], list(zip(TITLES[1:], cells[1:], strict=True)))


def _moved(record: Mapping[str, Any]) -> Table:
    """The outputs of other quantized parts than the denoiser."""
    keys, rows = ("relative_error", "cosine", "worst", "first_token"), []
    for part in names(record, "parts"):
        for output in names(record, "parts", part, "outputs"):
            cells = [number_at(record, "parts", part, "outputs", output, key) for key in keys]
            rows.append([f"{part}, {output}", *("" if each.value is None else f"{each.value:.5f}" for each in cells)])
    titles = ["quantized part, output", "relative error", "cosine of tokens", "worst token", "first token"]
    return table_of_texts(titles, rows)


RESIDENT = {"all": ", all parts in memory", "one": ", one part in memory at a time", None: " of weights"}


def _fit(record: Mapping[str, Any]) -> list[Table | list[str]]:
    """The formats that ``fit`` or a budget chose for each part, and the PSNR of all candidates."""
    entry = at(record, "sensitivity", "limit") or {}
    candidates, whole = entry.get("candidates") or {}, entry.get("unquantized_bytes") or {}
    chosen = candidates.get(entry.get("taken"))
    if chosen is None:
        return []
    rows = []
    for part, size in chosen["weight_bytes"].items():
        formats = ", ".join(f"{count} {label}" for label, count in chosen["formats"][part].items())
        rows.append([part, _bytes(whole[part]), _bytes(size), formats])
    limit = f"fit in {_bytes(entry['limit_bytes'])}{RESIDENT[entry['resident']]}"
    titles = [limit, "weights", "chosen", "layers in each format"]
    lines = [
        f"formats {name}: expected {_decibels(each['expected_psnr'])}, in calibration images {_decibels(each['psnr'])}"
        f"{', taken' if name == entry['taken'] else ''}"
        for name, each in candidates.items()
    ]
    return [table_of_texts(titles, rows), lines]


def _decibels(value: float | None) -> str:
    return "no error" if value is None else f"{value:.1f} dB"


def handed_over_table(entries: Mapping[str, Any] | None) -> Table:
    """The exports to other tools by target: PSNR with its interval at 95 %, bytes of the larger files."""
    return table_of_texts(HANDED_OVER, [handed_over_cells(*entry) for entry in (entries or {}).items()])


def handed_over_cells(target: str, entry: Mapping[str, Any]) -> list[str]:
    size = sum(filter(None, (at(entry, "bytes") or {}).values()))
    layers = [f"{at(entry, 'quantized')} of {at(entry, 'of')}"]
    layers += [f"{part} {at(entry, 'parts', part, 'quantized')} of {at(entry, 'parts', part, 'of')}"
               for part in at(entry, "parts") or {}]  # fmt: skip
    return [target, ", ".join(layers), psnr_text(entry, "fidelity"), psnr_text(entry, "text"), _bytes(size)]


def _costs(record: Mapping[str, Any]) -> list[str]:
    peak = number_at(record, "peak_memory_bytes").value
    whole = number_at(record, "seconds").value
    costs = [f"peak memory {_bytes(peak)}"] if peak else []
    costs += [f"{whole:.1f} s in all"] if whole else []
    stages = {name: at(record, "stages", name, "seconds") for name in names(record, "stages")}
    costs += [f"{name} {seconds:.1f} s" for name, seconds in stages.items() if seconds is not None]
    return folded(re.findall(CLAUSES, "; ".join(costs))) if costs else []


def _cell(number: Number, show: Callable[[float], str], reasons: list[str]) -> str:
    """The number in the form of ``show``, or a dash, with the mark of its reason, which is added to ``reasons``."""
    value, reason = number
    if value is None:
        reason = reason or "null without a reason"
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
