"""A gate's verdicts as a text table and as JSON."""

from dataclasses import asdict
from typing import Any

from sd_quant.places import shown as shown_path
from sd_quant.report.gate import Gate, Shown
from sd_quant.report.table import as_text, table_of_texts
from sd_quant.text import one_line, printable

SCHEMA_VERSION = 1
LONGEST_PROMPT = 60


def text_of(gate: Gate) -> str:
    """Format the table of criteria, the worst images and the outcome as plain text."""
    rows = [[each.criterion, each.value, each.bar, each.verdict] for each in gate.verdicts]
    notes = [f"{each.criterion}: {each.reason}" for each in gate.verdicts if each.reason]
    images: dict[tuple[int, str], list[str]] = {}  # two criteria on one score have the same ones
    for verdict in gate.verdicts:
        for each in verdict.worst:
            named = f"{verdict.criterion}: {each.index}, {one_line(each.prompt, LONGEST_PROMPT)}"
            figure = verdict.form.format(each.value)
            images.setdefault((each.index, figure), [named, figure, path_of(each) or "no file"])
    tables = [
        as_text(table_of_texts(["criterion", "value", "bar", "verdict"], rows, notes=notes)),
        as_text(table_of_texts(["worst images", "value", "file"], [*images.values()])),
    ]
    return "\n".join([line for lines in tables if lines for line in (*lines, "")] + [printable(gate.sentence)])


def path_of(image: Shown) -> str | None:
    return None if image.file is None else shown_path(image.file)


def json_of(gate: Gate, exit_code: int) -> dict[str, Any]:
    """Return the gate as a JSON object; unknown interval ends and numbers of prompts are null."""
    criteria = [
        {
            **{"criterion": each.criterion, "title": each.title, "verdict": each.verdict, **each.figures},
            **{"reason": each.reason or None, "more": each.more, "unit": each.unit or None},
            "worst": [{**asdict(image), "file": path_of(image)} for image in each.worst],
        }
        for each in gate.verdicts
    ]
    run = {"run": str(gate.run), "outcome": gate.outcome, "exit_code": exit_code, "sentence": gate.sentence}
    return {"schema_version": SCHEMA_VERSION, **run, "criteria": criteria}
