"""Rebuild all report files of a sweep or a run from the records in its folder."""

import logging
from pathlib import Path

from sd_quant.addons import at_work, loaded, points
from sd_quant.errors import SdQuantError
from sd_quant.files import write_text
from sd_quant.report.candidates import candidate_tables
from sd_quant.report.levers import lever_tables
from sd_quant.report.page import write_report
from sd_quant.report.plots import figures, write_plots
from sd_quant.report.published import published_tables
from sd_quant.report.run_table import HANDED_OVER, handed_over_table
from sd_quant.report.score_tables import score_tables
from sd_quant.report.shipped import recommendation_of, write_recommendation
from sd_quant.report.summary import Sweep, read_sweep, write_summary
from sd_quant.report.table import Table, as_markdown, table_of_texts

LOG = logging.getLogger(__name__)


def rebuild(directory: Path) -> Path:
    """Write all report files; return the page. Raises ArtifactError for damaged files, ResourceError on a full disk."""
    sweep = read_sweep(directory)
    advice = recommendation_of(sweep)
    drawn = figures(sweep, advice)
    write_summary(sweep, dict.fromkeys(advice.tied, "tied") | {advice.job: "yes"}, advice.sentence)
    write_recommendation(sweep, advice)
    if published := published_tables(sweep):
        write_text(directory / "published.md", "\n".join(map(as_markdown, published)))
    tables = lever_tables(sweep) + published + candidate_tables(sweep) + score_tables(sweep) + handed_over_tables(sweep)
    report = write_report(sweep, advice, drawn, tables, vote_page(sweep))
    write_plots(drawn, directory)  # after the page: a PNG's resolution moves what is placed by the layout
    return report


def vote_page(sweep: Sweep) -> Path | None:
    """Write the page for blind votes, by the add-on ``votes``; None if that is not installed, or fails (logged)."""
    try:
        with at_work("votes"):
            return loaded("votes", "page", "votes.html")(sweep) if points("votes", "page") else None
    except SdQuantError as error:
        LOG.warning("there is no votes.html: %s", error)
        return None


def handed_over_tables(sweep: Sweep) -> list[Table]:
    """Return a table of the jobs' exports to other tools in a list; an empty list without exports."""
    lines = [[job.name, *cells] for job in sweep.jobs for cells in handed_over_table(job.record["hand_over"]).rows]
    caption = (
        "PSNR of what each tool computes of its file, simulated, and of full precision with the text as the tool has "
        "it, with the mean's interval at 95 %. The README beside each result says what is lost and how to open it."
    )
    return [table_of_texts(["job", *HANDED_OVER], lines, "Handed over to other tools", caption)] if lines else []
