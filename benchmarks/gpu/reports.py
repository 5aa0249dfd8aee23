"""Adds reports of GPUs, as their owners send them, to benchmarks/results/gpu, and writes README's row of each.

    python -m benchmarks.gpu.reports gpu_report.json
    python -m benchmarks.gpu.reports

A file is read as hostile: its size, its schema, every name in it, and every speed-up against its own latencies. One of
a GPU that is there already takes its place. Without a file the rows are written again.
"""

import argparse
import re
import sys
from pathlib import Path

from sd_quant.errors import ConfigError, exit_with_its_code
from sd_quant.files import write_text
from sd_quant.places import HOME, existing_file
from sd_quant.report.gpu_report import MOST_BYTES, GpuReport, Row, read_report

RESULTS = HOME / "benchmarks" / "results" / "gpu"
README = HOME / "README.md"
OWN_ROW = re.compile(rf"^\| \[[^\]]+\]\({RESULTS.relative_to(HOME).as_posix()}/.*\n", re.MULTILINE)
BEFORE = "| NVIDIA Turing"  # begins the row in front of which reports stand


def add(path: Path, folder: Path = RESULTS) -> Path:
    """Copy a report to the folder of results. Raises ArtifactError for a wrong one, ConfigError for a rehearsal."""
    with existing_file("reports", str(path)).open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    report = read_report(content, path.name)
    if report.rehearsal:
        raise ConfigError(f"{path.name} is a rehearsal without a GPU, expected the report of one")
    if not any(row.checkpoint == "full" and row.denoiser for row in report.rows):
        raise ConfigError(f"{path.name} has no row of the full size that is done, expected one; its table needs that")
    kept = folder / f"{re.sub('[^a-z0-9]+', '_', report.gpu.name.lower()).strip('_')}.json"
    write_text(kept, content.decode("utf-8"))
    return kept


def line_of(path: Path, report: GpuReport) -> str:
    """README's row of a report: what is fastest, and what each engine reaches at full size over compiled torch."""
    rows = [row for row in report.rows if row.checkpoint == "full" and row.denoiser]
    rows.sort(key=lambda row: row.denoiser.quantized_ms)  # type: ignore[union-attr]
    engines = {
        engine: [row for row in rows if row.engine == engine] for engine in dict.fromkeys(r.engine for r in rows)
    }
    reached = "; ".join(f"`{engine}`: {', '.join(map(in_words, own))}" for engine, own in engines.items())
    link = f"[{report.gpu.name}]({path.relative_to(HOME).as_posix()})"
    take = f"`quantize={rows[0].format}`, `infer={rows[0].engine}`"
    return f"| {link} | {take} | SDXL's UNet over compiled 16 bits, {reached} (`{report.made_by}`, {report.day}) |\n"


def in_words(row: Row) -> str:
    """The speed-up of a row with its interval, and its latency."""
    assert row.denoiser is not None
    over = row.denoiser.over_compiled
    known = over is not None and over.low is not None and over.high is not None
    interval = f" ({over.low:.2f} to {over.high:.2f})" if known else ""  # type: ignore[union-attr]
    speedup = f"{over.value:.2f}x{interval}" if over else "not timed beside it"
    return f"{row.format} {speedup}, {row.denoiser.quantized_ms:.1f} ms"


def with_rows(readme: str, folder: Path = RESULTS) -> str:
    """README with a row of each report in the folder."""
    rows = [line_of(path, read_report(path.read_bytes(), path.name)) for path in sorted(folder.glob("*.json"))]
    return OWN_ROW.sub("", readme).replace(BEFORE, "".join(rows) + BEFORE, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("reports", nargs="*", type=Path, help="files that sd-quant gpu-report has written")
    for path in parser.parse_args().reports:
        print(f"added: {add(path).relative_to(HOME)}")
    write_text(README, with_rows(README.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(exit_with_its_code(main))
