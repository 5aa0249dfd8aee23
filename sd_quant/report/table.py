"""The closing table of a run: its record (``metrics.json``), as text for a terminal.

Everything comes from the record, so the table can be printed again later. The road not taken is ``rich``: colours and
boxes do not survive a log file.

The record; its parts, here SDXL's, are those of ``sizes_bytes`` and, in ``latency``, ``image``: prompt to picture::

    {
      "schema_version": 1,
      "status": "done",                                   # or "failed", then with "reason"
      "knobs": {"format": "int8", "quant_level": 3, "alpha": 0.8, "infer": {"width": 64, ...}, ...},
      "sizes_bytes": {
        "unet_xl": {"onnx_full_precision": 64900000, "onnx_quantized": 35100000, "plan": 36700000},
        "clip1": {"onnx_full_precision": 1300000, "onnx_quantized": {"value": null, "reason": "not quantized"}, ...}
      },
      "latency": {                                        # engine -> part -> batch size -> precision
        "torch": {"image": {"1": {"full_precision": {"p50_ms": 812.0, "mean_ms": 815.2, "n": 20, "warmup": 3, ...}}}},
        "openvino": {"unet_xl": {"2": {"full_precision": {"p50_ms": 28.3, ...}, "quantized": {"p50_ms": 10.1, ...},
                                       "speedup": 2.8}},  # latency.ratio(full_precision, quantized) of the rounds
                     "vae": {"1": {"full_precision": {...}, "quantized": {"p50_ms": null, "reason": "not quantized"}}},
                     "image": {"1": {...}}}
      },
      "fidelity": {...},                                  # metrics.fidelity.fidelity
      "parity": {"unet_xl": 0.012, ...},                  # relative error of the engine against torch
      "peak_memory_bytes": 3435973836,
      "stages": {"calibrate": {"seconds": 12.3, "peak_memory_bytes": 1200000000}, ...},  # StageTimer.stages
      "environment": {...}, "inputs": {...}               # report.provenance
    }

A number that does not exist is null, with a ``reason`` beside it, or ``{"value": null, "reason": "..."}``, or absent;
it is shown as a dash, with the reason below the table.
"""

from collections.abc import Callable
from typing import Any

from sd_quant.text import printable

FRAMEWORK = "torch"
IMAGE = "image"
ABSENT = {"value": None, "reason": "not in the record"}


def run_table(record: dict) -> str:
    """The closing table as plain text, lines ending in a newline. Works on any record, a failed run's too."""
    reasons: list[str] = []
    engines = [name for name in _names(record, "latency") if name != FRAMEWORK]
    sections = [
        _heading(record),
        _sizes(record, reasons),
        *(_parts(record, engine, reasons) for engine in engines),
        *(_image(record, engine, reasons) for engine in engines or [FRAMEWORK]),
        _fidelity(record, reasons),
        _costs(record),
        [sentence for engine in engines for sentence in _slower(record, engine)],
        [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)],
    ]
    return "\n\n".join("\n".join(printable(line) for line in lines) for lines in sections if lines) + "\n"


def _heading(record: dict) -> list[str]:
    knobs = record.get("knobs") or {}
    named = [f"{name}={knobs[name]}" for name in ("format", "quant_level", "alpha", "percentile") if name in knobs]
    status = record.get("status") or "unfinished"
    return ["  ".join([status if not record.get("reason") else f"{status}: {record['reason']}", *named])]


def _part_names(record: dict) -> list[str]:
    """Those that the record knows sizes or latencies of."""
    engines = [_at(record, "latency", engine) for engine in _names(record, "latency")]
    found = [*(record.get("sizes_bytes") or {}), *(part for engine in engines for part in engine)]
    return [part for part in dict.fromkeys(found) if part not in (IMAGE, "reason", "value")]


def _sizes(record: dict, reasons: list[str]) -> list[str]:
    rows = []
    for part in _part_names(record):
        full, quantized, plan = (
            _at(record, "sizes_bytes", part, key) for key in ("onnx_full_precision", "onnx_quantized", "plan")
        )
        rows.append([
            part, _cell(full, _bytes, reasons), _cell(quantized, _bytes, reasons),
            _cell(_divide(full, quantized), _times, reasons), _cell(plan, _bytes, reasons),
        ])  # fmt: skip
    return _align(["size", "ONNX full precision", "ONNX quantized", "smaller", "plan"], rows)


def _parts(record: dict, engine: str, reasons: list[str]) -> list[str]:
    rows = []
    for part in _part_names(record):
        for batch in _names(record, "latency", engine, part) or [""]:
            full, quantized, speedup = _speed(record, engine, part, batch)
            rows.append([
                part, batch or "–", _cell(full, _milliseconds, reasons), _cell(quantized, _milliseconds, reasons),
                _cell(speedup, _times, reasons),
            ])  # fmt: skip
    return _align([f"one call, {engine}, median", "batch", "full precision", "quantized", "speed-up"], rows)


def _image(record: dict, engine: str, reasons: list[str]) -> list[str]:
    rows = []
    for batch in _names(record, "latency", engine, IMAGE) or ["1"]:
        framework = _at(record, "latency", FRAMEWORK, IMAGE, batch, "full_precision", "p50_ms")
        rows.append([f"{FRAMEWORK}, full precision", batch, _cell(framework, _milliseconds, reasons), "", ""])
        if engine == FRAMEWORK:
            continue
        full, quantized, speedup = _speed(record, engine, IMAGE, batch)
        rows.append([
            f"{engine}, full precision", batch, _cell(full, _milliseconds, reasons),
            _cell(_divide(framework, full), _times, reasons), "",
        ])  # fmt: skip
        rows.append([
            f"{engine}, quantized", batch, _cell(quantized, _milliseconds, reasons),
            _cell(_divide(framework, quantized), _times, reasons), _cell(speedup, _times, reasons),
        ])  # fmt: skip
    return _align(["prompt to image, median", "batch", "latency", f"vs {FRAMEWORK}", "vs full precision"], rows)


def _fidelity(record: dict, reasons: list[str]) -> list[str]:
    rows = []
    scores = (("psnr", "PSNR", _decibel, "min"), ("ssim", "SSIM", _score, "min"), ("lpips", "LPIPS", _score, "max"))
    for key, title, show, extreme in scores:
        reason = _at(record, "fidelity", key, "reason", default=None)
        mean, worst = (_at(record, "fidelity", key, name) for name in ("mean", extreme))
        rows.append([title, _cell(mean, show, reasons, note=reason), _cell(worst, show, reasons)])
    steps = _at(record, "fidelity", "latent_sqnr_db")
    if isinstance(steps, list):
        reason = _at(record, "fidelity", "latent_sqnr_reason", default=None)
        steps = steps[-1] if steps and steps[-1] is not None else {"value": None, "reason": reason}
    rows.append(["latent SQNR, last step", _cell(steps, _decibel, reasons), ""])
    return _align(["fidelity to full precision", "mean", "worst"], rows)


def _costs(record: dict) -> list[str]:
    peak = _number(record.get("peak_memory_bytes"))
    stages = [
        f"{name} {stage['seconds']:.1f} s"
        for name, stage in (record.get("stages") or {}).items()
        if stage and stage.get("seconds") is not None
    ]
    return ["; ".join(([f"peak memory {_bytes(peak)}"] if peak else []) + stages)] if peak or stages else []


def _slower(record: dict, engine: str) -> list[str]:
    """One sentence for each part whose quantized engine lost; two decimals, because the third is noise."""
    sentences = []
    for part in _names(record, "latency", engine):
        for batch in _names(record, "latency", engine, part):
            speedup = _number(_speed(record, engine, part, batch)[2])
            if speedup is not None and round(speedup, 2) < 1:
                what = f"{'prompt to image' if part == IMAGE else part} at batch {batch}"
                times = f"{1 / speedup:.2f} times as long quantized as unquantized"
                sentences.append(f"SLOWER: on {engine}, {what} takes {times}.")
    return sentences


def _speed(record: dict, engine: str, part: str, batch: str) -> tuple[object, object, object]:
    """Full precision, quantized, speed-up: the recorded one, or else the ratio of the medians."""
    place = ("latency", engine, part, batch)
    full, quantized = (_at(record, *place, precision, "p50_ms") for precision in ("full_precision", "quantized"))
    return full, quantized, _at(record, *place, "speedup", default=_divide(full, quantized))


def _at(record: Any, *keys: str, default: Any = ABSENT) -> Any:
    """What lies at ``keys``; a null as ``default``, or with the reason if there is one beside it."""
    for depth, key in enumerate(keys):
        if record.get(key) is None:
            reason = record.get("reason") if depth else None  # the run's own reason stands in the heading
            return {"value": None, "reason": reason} if reason and default is ABSENT else default
        record = record[key]
    return record


def _names(record: dict, *keys: str) -> list[str]:
    """What the dict at ``keys`` holds more dicts of: the engines, the batch sizes. None where it is a null."""
    return [name for name, inner in _at(record, *keys).items() if isinstance(inner, dict)]


def _number(value: Any) -> float | int | None:
    return value.get("value") if isinstance(value, dict) else value


def _divide(a: object, b: object) -> object:
    numerator, denominator = _number(a), _number(b)
    if numerator is None or not denominator:
        return a if numerator is None else b
    return numerator / denominator


def _cell(value: object, show: Callable[[float], str], reasons: list[str], note: str | None = None) -> str:
    """The number as ``show`` writes it, or a dash; a note, or the dash's reason, joins ``reasons``."""
    number = _number(value)
    if number is None:
        note = note or (value.get("reason") if isinstance(value, dict) else None) or "null without a reason"
    if note and note not in reasons:
        reasons.append(note)
    return ("–" if number is None else show(number)) + (f" [{reasons.index(note) + 1}]" if note else "")


def _align(header: list[str], rows: list[list[str]]) -> list[str]:
    """Columns as wide as their widest cell, the first to the left, others to the right; no lines without rows."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        row[0].ljust(widths[0]) + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in (header, *rows)
    ]
    return [lines[0], "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])]


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _milliseconds(value: float) -> str:
    return f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _decibel(value: float) -> str:
    return f"{value:.1f} dB"


def _score(value: float) -> str:
    return f"{value:.4f}"
