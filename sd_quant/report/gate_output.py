"""A gate's verdicts as a text table, as JSON and as JUnit XML.

In JUnit XML an undecided criterion is an ``error``: the check could not be made, and no CI counts it as passed. Most CI
systems show a ``skipped`` test as green, and a ``failure`` would claim what is unknown.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sd_quant.files import write_json, write_text
from sd_quant.places import shown as shown_path
from sd_quant.report.gate import FAILED, OPEN, Gate, Shown
from sd_quant.report.table import as_text, table_of_texts
from sd_quant.text import one_line, printable

KINDS = {".json": rb'\{\s*"schema_version": \d+,\s*"run": ', ".xml": rb"<\?xml[^>]*>\s*<testsuites"}  # begin so
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


def write_gate(gate: Gate, exit_code: int, path: Path) -> None:
    """Write JSON for the suffix ``.json``, else JUnit XML, atomically. Raises ResourceError when the disk is full."""
    if path.suffix.lower() == ".json":
        write_json(path, json_of(gate, exit_code))
    else:
        write_text(path, xml_of(gate))


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


def xml_of(gate: Gate) -> str:
    """Return JUnit XML: a test suite with a test case for each criterion."""
    verdicts = [each.verdict for each in gate.verdicts]
    failures, errors = (str(sum(map(verdicts.count, words))) for words in ((FAILED,), OPEN))
    numbers = {"tests": str(len(verdicts)), "failures": failures, "errors": errors, "skipped": "0"}
    suites = ElementTree.Element("testsuites", numbers)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "sd-quant gate", "time": "0", **numbers})
    for each in gate.verdicts:
        named = {"classname": "sd-quant.gate", "name": each.criterion, "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", named)
        because = f"; {each.reason}" if each.reason else ""
        told = printable(f"{each.title}: {each.value}, expected {each.bar}{because}")
        if each.verdict in (FAILED, *OPEN):
            kind = "failure" if each.verdict == FAILED else "error"
            ElementTree.SubElement(case, kind, {"message": told, "type": each.verdict}).text = "\n".join(
                printable(
                    f"{image.index}: {each.form.format(image.value)}, {image.prompt}, {path_of(image) or 'no file'}"
                )
                for image in each.worst
            )
        else:
            ElementTree.SubElement(case, "system-out").text = told
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"
