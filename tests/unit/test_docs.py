"""The files, links, headings, commands and knobs of the documentation exist. No command is run, torch is not imported.

Not taken: a checker of prose. What it would find, a reader finds better.
"""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from sd_quant import sweep
from sd_quant.commands import gate
from sd_quant.composition import composing, readable
from sd_quant.errors import ResourceError
from sd_quant.help import knobs_of_job, presets_of
from sd_quant.knobs import read
from sd_quant.places import CONF, HOME
from sd_quant_votes import command

from ..documents import COMMAND, PAGES, README, commands, lines, text_of
from .config.composition import JOBS, composed

pytestmark = pytest.mark.commit

RESULTS = [page for page in PAGES if page.name.startswith("results_") or page.name == "lab_notebook.md"]
CARDS = [*HOME.glob("examples/*/README.md"), *CONF.rglob("*.yaml")]
EVERYWHERE = (*PAGES, *CARDS)
GENERATED, LONGEST_PAGE = {"python.md", "metrics.md", "targets.md"}, 400
FOLDERS = "addons|benchmarks|checkpoints|conf|docs|examples|sd_quant|tests"
# groups whose names are parts, knobs or families
WITHOUT_HYDRA = {"sd_quant.commands.gate": gate.job_of, "sd_quant.commands.addons": command.split}


def is_job(words: list[str]) -> bool:
    return words[0] == "python" and words[1].endswith(".py") and words[1].removesuffix(".py") in JOBS


OTHER_COMMANDS = [
    words[1:] for words in commands(EVERYWHERE) if words[0] == "python" and len(words) > 1 and not is_job(words)
]


def links_of(page: Path) -> list[str]:
    """Targets of the page's links and images that are not on the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors_of(page: Path) -> set[str]:
    """Anchors of the page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_leads_to_every_page_and_none_is_too_long_to_be_read():
    assert len(text_of(README).splitlines()) <= 160
    linked = {HOME / target.partition("#")[0] for target in links_of(README)}
    assert set(PAGES) - {README} <= linked
    lengths = {page.name: len(text_of(page).splitlines()) for page in PAGES if page.name not in GENERATED}
    assert not {name: length for name, length in lengths.items() if length > LONGEST_PAGE}


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_every_table_of_results_has_its_date_and_its_command(page):
    """The paragraph in front of a table says when it was measured, and its section with which command."""
    for section in re.split(r"^## ", text_of(page), flags=re.MULTILINE)[1:]:
        blocks = re.split(r"\n\s*\n", section)
        for number, block in enumerate(blocks):
            if block.lstrip().startswith("|"):
                above = "\n\n".join(blocks[:number])
                given = re.findall(r"^ {4} *(\S.*)$", above, re.MULTILINE) + re.findall(r"`([^`\n]+)`", above)
                assert re.search(r"\b(Measured|Counted|Tested)\s2026-\d\d-\d\d", blocks[number - 1]), block[:200]
                assert any(COMMAND.match(line) for line in given), block[:200]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_has_its_target_and_every_path_is_there(page):
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target
    paths = re.findall(rf"(?<![\w/.:])(?:{FOLDERS})/[\w./-]*[\w/]", text_of(page))
    assert not [path for path in paths if not (HOME / path).exists()]


def test_every_command_pastes():
    """In ``sh``, and in zsh as it is installed: there a word with a bracket needs quotes, and # begins no comment."""
    script = "\n".join(lines(EVERYWHERE))
    parsed = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True)
    assert (parsed.returncode, parsed.stderr) == (0, "") and script.count("\n") > 100
    bare = {line: re.sub(r"'[^']*'|\"[^\"]*\"", "", line) for line in lines(EVERYWHERE)}
    assert not [line for line, words in bare.items() if re.search(r"[][(){}*?~#;&|<>!`]|\s=", words)]
    sources = {path: text_of(path) for path in (HOME / "sd_quant").rglob("*.py")}  # whose messages say what to install
    assert not [path for path, text in sources.items() if re.search(r"install [^'\"]*sd-quant\[", text)]


@pytest.mark.parametrize(
    "pages", [[README], pytest.param([*PAGES[1:], *CARDS], marks=pytest.mark.nightly)], ids=["README.md", "others"]
)
def test_every_job_command_is_a_job(pages):
    """Not every combination: every word of a command once."""
    seen: set[tuple[str, str]] = set()
    for _, script, *arguments in [words for words in commands(pages) if is_job(words)]:
        primary, several = script.removesuffix(".py"), "-m" in arguments
        overrides = [readable(word, several) for word in arguments if word != "-m"]
        if any(word.startswith(("--help", "--cfg", "--config-dir")) for word in overrides):
            continue
        try:
            with composing(primary):
                jobs = [overrides]
                if sweep.is_sweep(sweep.plain_config(primary, overrides), several):
                    _, jobs = sweep.expand(primary, overrides)
        except ResourceError:  # a launcher that is not installed
            continue
        for job in jobs:
            words = {(primary, word) for word in job or [""]}
            if not words <= seen:
                try:
                    read(JOBS[primary], composed(primary, *job))
                except Exception as error:
                    error.add_note(f"python {script} {' '.join(arguments)}")
                    raise
            seen |= words


@pytest.mark.parametrize("words", OTHER_COMMANDS, ids=" ".join)
def test_every_other_command_has_its_file_and_options(words):
    program, arguments = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
    if arguments and program in WITHOUT_HYDRA:
        WITHOUT_HYDRA[program](arguments)
    if program == "pytest":
        assert all((HOME / path).exists() for path in arguments)
        return
    base = HOME / (program if program.endswith(".py") else program.replace(".", "/"))
    [source, *shared] = [file for file in (base, base.with_suffix(".py"), base / "__main__.py") if file.is_file()]
    shared = [source.with_name("common.py")] if source.with_name("common.py").is_file() else []
    known = "".join(map(text_of, [source, *shared]))
    assert not [word for word in arguments if word.startswith("--") and f'"{word}"' not in known]


def test_every_target_of_make_is_there():
    wanted = {words[1] for words in commands(EVERYWHERE) if words[0] == "make"}
    assert wanted <= {*re.findall(r"^([\w-]+):", text_of(HOME / "Makefile"), re.MULTILINE)}


def test_pages_that_are_made_are_those_of_today():
    for name, made in runpy.run_path(str(HOME / "docs/make_pages.py"))["pages"]().items():
        assert made == text_of(HOME / "docs" / name), "python docs/make_pages.py writes it"


def test_the_page_of_knobs_names_knobs():
    rows = re.split(r"^\| knob \| more.*\n.*\n", text_of(HOME / "docs/knobs.md"), flags=re.MULTILINE)[1:]
    cells = [row.split("|")[1] for table in rows for row in table.partition("\n\n")[0].splitlines()]
    knobs = {name for job in JOBS.values() for names in knobs_of_job(job) for name in names[:2]}
    groups = {f"{name.rpartition('.')[0]}." for name in knobs} | {f"{group}=" for group, _ in presets_of("quantize")}
    assert len(rows) == 7 and not {*re.findall(r"`([^`]+)`", "".join(cells))} - knobs - groups
