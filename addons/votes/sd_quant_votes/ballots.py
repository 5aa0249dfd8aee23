"""Read, check and count the votes of several people, from the files that ``votes.html`` saves.

A file with a vote that cannot have come from the page is refused as a whole: leaving the vote out would change the
count. The checksum detects a file that was edited or truncated; it is no signature.
"""

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import check_replaceable, read_regular, refusing, write_json
from sd_quant.metrics.intervals import holm
from sd_quant.report.table import Table, between, figure, table_of_texts, write_csv
from sd_quant.text import one_line, printable
from sd_quant_votes.page import DAMAGED, EQUAL, PAGE, VOTE, Key, earlier_key, read_key, read_key_file
from sd_quant_votes.statistics import Preference, Vote, preference, votes_needed

FORMAT = "sd-quant votes 1"
MOST_BYTES = 2**24  # of a voter's file
ALPHA, POWER = 0.05, 0.8
LONGEST = 60  # characters of a name that is shown; the page takes 40
ENOUGH_VOTERS = 15  # of ITU-R BT.500, for statements about people in general
KINDS = {"votes.csv": b"a,b,votes,", "votes.json": rb'\{\s*"schema_version": \d+,\s*"page": "\w+",\s*"rule"'}
TITLES = "comparison", "votes", "cannot tell", "prefer the second", "p, Holm", "verdict", "more votes"


class Cast(TypedDict):
    pair: str
    first: str  # the image that was shown first
    answer: Literal["first", "second", "neither"]
    ms: int


class File(TypedDict):
    """Content of a voter's JSON file, as saved by the page."""

    format: str
    page: str
    session: str
    voter: str
    votes: list[Cast]
    checksum: str


@dataclass(frozen=True)
class Ballot:
    path: Path
    page: str
    session: str
    voter: str
    votes: Sequence[Cast]


@dataclass(frozen=True)
class Result:
    """Result of one comparison. ``more``: further votes until a preference is significant at these shares, or None."""

    a: str
    b: str
    preference: Preference
    p: float | None  # adjusted for all comparisons
    more: int | None

    @property
    def verdict(self) -> str:
        if self.p is None or self.p >= ALPHA:
            return "not shown"
        return f"{self.b if self.preference.second > self.preference.first else self.a} is preferred"


@dataclass(frozen=True)
class Count:
    page: str
    rule: str
    voters: Mapping[str, Ballot]  # by the name that they are shown with
    dropped: Mapping[str, str]  # the reason of each that is not counted
    results: Sequence[Result]


def count_votes(folder: Path, paths: Sequence[Path]) -> Count:
    """Count the votes on a folder's page, or on an earlier page of the folder.

    Raises ConfigError for a folder without a page, for other files named ``votes.csv`` or ``votes.json`` there and for
    one session's votes in two files; ArtifactError for a file that is damaged, changed or of another page.
    """
    key = read_key(folder)
    ballots = [read_ballot(path) for path in paths]
    for name, begins in KINDS.items():
        check_replaceable(folder / name, "the name of that file", begins, "the count of the votes")
    if (replaced := earlier_key(folder, ballots[0].page[:8])).is_file() and ballots[0].page != key["page"]:
        key = read_key_file(replaced)
    sessions: dict[str, Path] = {}
    for ballot in ballots:
        check_ballot(ballot, key, folder)
        if ballot.session in sessions:
            raise ConfigError(
                f"{ballot.path} and {sessions[ballot.session]} hold votes of one voter's session, expected each once; "
                "leave out the one that was saved first"
            )
        sessions[ballot.session] = ballot.path
    return counted(key, ballots)


# Reading


def read_ballot(path: Path) -> Ballot:
    """Read a voter's file. Raises ArtifactError for a damaged file and for a wrong checksum."""
    from pydantic import TypeAdapter

    advice = "expected one as votes.html saves it; ask the voter to save it again"
    with refusing(f"{path} is no whole file of votes", OSError, ValueError, RecursionError, advice=advice):
        content: File = TypeAdapter(File).validate_python(json.loads(read_regular(path, MOST_BYTES)), strict=True)
        if content["format"] != FORMAT or not content["page"].isalnum():
            raise ValueError(f"its format is {content['format']}")
    if content["checksum"] != checksum(content):
        raise ArtifactError(
            f"{path} was changed after it was saved: its checksum is {one_line(content['checksum'], 20)}, expected "
            f"{checksum(content)}; ask the voter to save it again"
        )
    return Ballot(path, content["page"], content["session"], one_line(content["voter"], LONGEST), content["votes"])


def checksum(content: File) -> str:
    """Compute the CRC-32 of page, session, voter and votes as the page's script does, as eight hexadecimal digits."""
    lines = [f"{vote['pair']} {vote['first']} {vote['answer']} {vote['ms']}" for vote in content["votes"]]
    text = "\n".join([content["page"], content["session"], content["voter"], *lines])
    return f"{zlib.crc32(text.encode(errors='replace')):08x}"


def check_ballot(ballot: Ballot, key: Key, folder: Path) -> None:
    """Check a voter's file. Raises ArtifactError for another page, no votes, and unknown or repeated pairs."""
    if ballot.page != key["page"]:
        raise ArtifactError(
            f"{ballot.path} holds votes of another page ({ballot.page[:8]}), expected those of {folder / PAGE} "
            f"({key['page'][:8]}); give the folder whose votes.html the voter has opened"
        )
    if not ballot.votes:
        raise ArtifactError(f"{ballot.path} holds no votes, expected at least one; leave it out")
    seen: set[str] = set()
    for vote in ballot.votes:
        pair = key["pairs"].get(vote["pair"])
        wrong = "is not on the page" if pair is None else "is there twice" if vote["pair"] in seen else None
        if pair is not None and vote["first"] not in (pair["a"], pair["b"]):
            wrong = "has another image"
        if wrong:
            raise ArtifactError(
                f"{ballot.path} was made by hand: its pair {one_line(vote['pair'], 20)} {wrong}, expected each pair of "
                "votes.html once; ask the voter to save it again"
            )
        seen.add(vote["pair"])


# Counting


def answer_of(vote: Cast, key: Key) -> int:
    """Return 1 for a vote for image ``b`` of the pair, -1 for ``a``, 0 for neither."""
    if vote["answer"] == "neither":
        return 0
    chose_first = vote["answer"] == "first"
    return -1 if chose_first == (vote["first"] == key["pairs"][vote["pair"]]["a"]) else 1


def why_dropped(ballot: Ballot, key: Key) -> str | None:
    """Return in words how a voter failed the pairs that test the voter (``page.RULE``); None if the voter passed."""
    answers: dict[str, list[int]] = {VOTE: [], DAMAGED: [], EQUAL: []}
    for vote in ballot.votes:
        answers[key["pairs"][vote["pair"]]["kind"]].append(answer_of(vote, key))
    if not answers[DAMAGED]:
        return "has voted on no pair with a damaged image"
    if missed := sum(answer != -1 for answer in answers[DAMAGED]):
        return f"did not choose the whole image in {missed} of {len(answers[DAMAGED])} pairs with a damaged one"
    if 2 * (decided := sum(answer != 0 for answer in answers[EQUAL])) > len(answers[EQUAL]):
        return f"preferred one in {decided} of {len(answers[EQUAL])} pairs of equal images"
    return None


def shown_names(ballots: Sequence[Ballot]) -> dict[str, Ballot]:
    """Map unique display names to ballots: an absent or repeated name gets the session's id, then the file's name."""
    names: dict[str, Ballot] = {}
    often = Counter(ballot.voter for ballot in ballots)
    for ballot in ballots:
        name = ballot.voter or "voter"
        if often[ballot.voter] > 1 or not ballot.voter:
            name += f" ({printable(ballot.session[:6])})"
        while name in names:
            name += f" of {ballot.path.name}"
        names[name] = ballot
    return names


def counted(key: Key, ballots: Sequence[Ballot]) -> Count:
    voters = shown_names(ballots)
    dropped = {name: reason for name, ballot in voters.items() if (reason := why_dropped(ballot, key))}
    cast: list[list[Vote]] = [[] for _ in key["comparisons"]]
    for ballot in (ballot for name, ballot in voters.items() if name not in dropped):
        for vote in ballot.votes:
            pair = key["pairs"][vote["pair"]]
            if pair["kind"] == VOTE:
                cast[pair["comparison"]].append(Vote(ballot.session, pair["prompt"], answer_of(vote, key)))
    preferences = [preference(votes, 1 - ALPHA) for votes in cast]
    adjusted = holm([each.p for each in preferences])
    short = partial(one_line, limit=2 * LONGEST)
    tested = sum(each.p is not None for each in preferences)
    results = [
        Result(short(compared["a"]), short(compared["b"]), each, p, more_votes(each, p, tested))
        for compared, each, p in zip(key["comparisons"], preferences, adjusted, strict=True)
    ]
    return Count(key["page"], key["rule"], voters, dropped, results)


def more_votes(found: Preference, p: float | None, comparisons: int) -> int | None:
    """Estimate how many further votes make the preference significant; None if it is already or cannot become so.

    By the exact two-sided test at the strictest of Holm's levels for ``comparisons``, at the same share of undecided
    votes, for independent votes: voters who judge the same prompts need some more.
    """
    if found.share is None or p is None or p < ALPHA:
        return None
    needed = votes_needed(found.share.value, ALPHA / 2 / comparisons, POWER)
    decided = found.first + found.second
    return None if needed is None else max(1, math.ceil(needed * found.votes / decided - found.votes))


# Showing


def votes_table(count: Count) -> Table:
    """Return a table with a row for each comparison that has votes."""
    rows = []
    for each in count.results:
        found = each.preference
        share, low, high = (100 * end for end in found.share) if found.share else (None, None, None)
        if found.votes:
            rows.append([
                f"{each.a} or {each.b}",
                str(found.votes),
                str(found.neither),
                figure(share, "{:.0f} %" + between(low, high, "{:.0f}")),
                figure(each.p, "{:.3g}"),
                each.verdict,
                figure(each.more, "{:,}"),
            ])  # fmt: skip
    return table_of_texts(TITLES, rows, "Blind votes")


def notes(count: Count) -> list[str]:
    """Return sentences on which voters were counted and on how to read the figures."""
    names = [name for name in count.voters if name not in count.dropped]
    sentences = [f"Counted: {', '.join(names) or 'nobody'}."]
    sentences += [f"Not counted: {name}, who {reason}." for name, reason in count.dropped.items()]
    if not names:
        return sentences
    sentences.append(
        'Preferences are shares of the votes that decide; "cannot tell" is left out. Intervals at 95 %: exact binomial'
        + (", or wider by resampling voters and prompts." if len(names) > 1 else ".")
    )
    if len(names) == 1:
        sentences.append("One person's votes are a statement about one person.")
    elif len(names) < ENOUGH_VOTERS:
        sentences.append(f"{len(names)} people's votes are a statement about these people.")
    return sentences


def write_count(count: Count, folder: Path) -> list[Path]:
    """Write ``votes.csv`` and ``votes.json`` and return their paths. Raises ResourceError when the disk is full."""
    rows, paths = [row_of(each) for each in count.results], [folder / name for name in KINDS]
    voters = [
        {"voter": name, "file": ballot.path.name, "session": ballot.session, "votes": len(ballot.votes),
         "not_counted": count.dropped.get(name)}
        for name, ballot in count.voters.items()
    ]  # fmt: skip
    content = {
        "schema_version": 1, "page": count.page, "rule": count.rule, "voters": voters,
        "comparisons": rows, "notes": notes(count),
    }  # fmt: skip
    write_csv(rows, paths[0])
    write_json(paths[1], content)
    return paths


def row_of(result: Result) -> dict[str, Any]:
    found = result.preference
    counts = {"votes": found.votes, "prefer_a": found.first, "prefer_b": found.second, "cannot_tell": found.neither}
    share = dict(zip(("share_b", "share_b_low", "share_b_high"), found.share or [None] * 3, strict=True))
    told = {"p": found.p, "p_holm": result.p, "verdict": result.verdict, "more_votes": result.more}
    return {"a": result.a, "b": result.b, **counts, **share, **told}
