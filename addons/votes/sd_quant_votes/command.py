"""Count blind votes, or draw the pairs of a report's ``votes.html`` anew: ``votes <folder> a.json b.json``."""

import sys
from pathlib import Path

from sd_quant.errors import UNDECIDED, ConfigError
from sd_quant.places import existing, shown, url
from sd_quant.report.summary import read_sweep
from sd_quant.report.table import as_text
from sd_quant_votes.ballots import count_votes, notes, votes_table, write_count
from sd_quant_votes.page import MOST_PAIRS, draw_votes, named

MOST_DRAWN = 1000
KNOBS = ("against", "pairs")
USAGE = f"""Count blind votes, or draw the pairs of a report's votes.html anew.

  sd-quant votes <folder> a.json b.json
  sd-quant votes <folder> against=<recipe> pairs=96

<folder> is that of a report: of a run, a sweep, or what judge has compared. A voter opens its votes.html and saves a
file. The exit code is 0, or {UNDECIDED} if no voter has passed the pairs that test the voter. docs/votes.md has the
statistics.

== Knobs: name=value ==
against  a recipe of the report, by its name there or its folder, that the others are compared with; default: full
         precision
pairs    how many to show, 1 to {MOST_DRAWN}; default: {MOST_PAIRS}"""


def split(words: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """Split arguments into folder, voters' files and knobs. Raises ConfigError for files with knobs or for neither."""
    folder, *others = words
    pieces = {word: word.partition("=") for word in others}
    knobs = {name: value for name, _, value in pieces.values() if name in KNOBS}
    files = [word for word in others if pieces[word][0] not in KNOBS]
    if not files and not knobs:
        raise ConfigError("no file of votes is given, expected at least one beside the folder; --help says more")
    if files and knobs:
        raise ConfigError(
            f"{files[0]} is given beside {next(iter(knobs))}=, expected files to count or knobs to draw pairs anew; "
            "do one after the other"
        )
    return folder, files, knobs


def pairs_of(text: str) -> int:
    if text.isdecimal() and text.isascii() and 1 <= int(text[:9]) <= MOST_DRAWN:
        return int(text)
    raise ConfigError(f"pairs is {text}, expected a whole number from 1 to {MOST_DRAWN}")


def redraw(folder: Path, knobs: dict[str, str]) -> None:
    """Write the folder's page with newly drawn pairs and print its address. Raises ConfigError without pairs."""
    most = pairs_of(knobs.get("pairs", str(MOST_PAIRS)))
    sweep = read_sweep(folder)
    against = named(knobs["against"], sweep) if "against" in knobs else None
    page = draw_votes(sweep, against, most)
    if page is None:
        raise ConfigError(
            f"{folder} has no pairs of images to vote on, expected images of a finished job; run it again"
        )
    print(f"votes: {url(page)}")


def main() -> None:
    """Print the counted votes and write them into the folder, or draw pairs anew."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return
    name, files, knobs = split(words)
    folder = existing("the first argument", name, "the folder of a report")
    if knobs:
        redraw(folder, knobs)
        return
    paths = [existing("a file of votes", file, "one that a voter has saved") for file in files]
    count = count_votes(folder, paths)
    print("\n".join([*as_text(votes_table(count)), "", *notes(count)]))
    print(f"written: {', '.join(shown(path) for path in write_count(count, folder))}")
    if len(count.dropped) == len(count.voters):
        sys.exit(UNDECIDED)
