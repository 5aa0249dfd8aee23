"""Everything that is shown of a sweep, made again from what its jobs left."""

from pathlib import Path

from sd_quant.files import write_text
from sd_quant.report.page import write_report
from sd_quant.report.plots import write_plots
from sd_quant.report.published import as_html, as_markdown, published_tables
from sd_quant.report.summary import read_sweep, write_summary


def rebuild(directory: Path) -> Path:
    """Write the summaries, the plots and the page into a sweep's or a run's folder; returns the page's path.

    Raises ArtifactError when it is no such folder, ResourceError when the disk is full.
    """
    sweep = read_sweep(directory)
    write_summary(sweep)
    write_plots(sweep)
    tables = published_tables(sweep)
    if tables:
        write_text(directory / "published.md", "\n".join(map(as_markdown, tables)))
    return write_report(sweep, [(table.heading, as_html(table)) for table in tables])
