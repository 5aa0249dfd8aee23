"""Voters' files: what is counted, who is dropped, and what is refused, by the command too, which draws pairs anew."""

import csv
import json
import sys

import pytest

from sd_quant.errors import UNDECIDED, ArtifactError, ConfigError
from sd_quant.places import HOME
from sd_quant.report.table import as_text
from sd_quant_votes import command
from sd_quant_votes.ballots import count_votes, notes, votes_table, write_count
from sd_quant_votes.page import RULE, read_key
from sd_quant_votes.statistics import votes_needed
from tests.unit.report.sweeps import write_job, write_plan

from .cast import PAGE, write_ballot, write_key

pytestmark = pytest.mark.commit


@pytest.fixture
def folder(tmp_path):
    return write_key(tmp_path)


def test_the_sides_are_taken_back_and_each_comparison_is_counted(folder):
    count = count_votes(folder, [write_ballot(folder, "AB", b_wins=(10, 18))])
    found = [(each.preference.first, each.preference.second, each.verdict) for each in count.results]
    assert found == [(10, 10, "not shown"), (2, 18, "nvfp4 is preferred")]
    assert count.results[1].p == pytest.approx(2 * 2 * 211 / 2**20)  # Holm's of two; 1 + 20 + 190 of 2^20 are as far
    assert [each.more for each in count.results] == [None, None]  # equal: no number tells; shown: none is needed
    text = "\n".join([*map(str, votes_table(count).rows), *notes(count)])
    assert "full precision or nvfp4" in text and "90 % (68 to 99)" in text
    assert "Counted: AB." in text and "One person's votes are a statement about one person." in text
    count = count_votes(folder, [write_ballot(folder, "AB", b_wins=(12, 10), undecided=2)])
    first, second = count.results
    assert (first.preference.first, first.preference.second, first.preference.neither) == (6, 12, 2)
    # how many more would tell, two-sided and of two comparisons: one-sided at 0.0125; 18 of 20 votes decide
    assert first.more == -(-votes_needed(12 / 18, 0.0125) * 20 // 18) - 20 and second.more > 500
    votes = [each for each in json.loads((folder / "AB.json").read_text())["votes"] if each["ms"] < 1042]
    count = count_votes(folder, [write_ballot(folder, "AB", votes=votes)])
    assert dict(count.dropped) == {"AB": "has voted on no pair with a damaged image"}
    assert notes(count)[0] == "Counted: nobody." and all(each.preference.votes == 0 for each in count.results)
    assert as_text(votes_table(count)) == [] and write_count(count, folder)


def test_voters_are_named_dropped_by_the_rule(folder):
    voters = {
        "AB": {}, "CD": {"b_wins": (12, 18)}, "E": {"decided": 1}, "slips": {"missed": 1}, "guesses": {"decided": 2},
    }  # fmt: skip
    count = count_votes(folder, [write_ballot(folder, name, **knobs) for name, knobs in voters.items()])
    assert dict(count.dropped) == {
        "slips": "did not choose the whole image in 1 of 2 pairs with a damaged one",
        "guesses": "preferred one in 2 of 2 pairs of equal images",
    }
    assert [each.preference.votes for each in count.results] == [60, 60]
    said = notes(count)
    assert "Counted: AB, CD, E." in said and "3 people's votes are a statement about these people." in said
    first, _ = write_count(count, folder)
    rows = list(csv.DictReader(first.read_text().splitlines()))
    found = [(row["b"], row["prefer_b"], row["cannot_tell"]) for row in rows]
    assert found == [("int8", "32", "0"), ("nvfp4", "54", "0")]
    written = json.loads((folder / "votes.json").read_text())
    not_counted = [each["voter"] for each in written["voters"] if each["not_counted"]]
    assert written["rule"] == RULE and not_counted == ["slips", "guesses"]


def test_the_count_replaces_no_voters_file(folder):
    path = write_ballot(folder, "AB").rename(folder / "votes.json")
    assert "the count of the votes would replace" in refused(folder, path, ConfigError) and "AB" in path.read_text()
    write_count(count_votes(folder, [path.rename(folder / "AB.json")]), folder)
    assert count_votes(folder, [folder / "AB.json"])  # its own is replaced


def test_voters_without_a_name_and_of_one_name_are_told_apart(folder):
    """Also where names and the beginnings of sessions are equal, and where a name is none that a page takes."""
    voters = {"x": " ", "y": "AB", "z": "AB", "z2": "", "z3": "", "z4": "AB", "long": 10**6 * "x"}
    sessions = {"z2": "session 2", "z3": "session 3", "z4": "of z again"}
    paths = [
        write_ballot(folder, name, voter=voter, session=sessions.get(name, f"of {name}"))
        for name, voter in voters.items()
    ]
    count = count_votes(folder, paths)
    assert list(count.voters) == [
        "voter (of x)", "AB (of y)", "AB (of z)", "voter (sessio)", "voter (sessio) of z3.json", "AB (of z a)",
        57 * "x" + "...",
    ]  # fmt: skip
    assert count.results[0].preference.votes == 7 * 20


def refused(folder, path, error=ArtifactError) -> str:
    with pytest.raises(error) as caught:
        count_votes(folder, [path] if not isinstance(path, list) else path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_votes_of_another_report_and_of_one_session_twice_are_refused_and_of_a_replaced_page_counted(folder):
    said = refused(folder, write_ballot(folder, "AB", page="fedcba9876543210"))
    assert "AB.json holds votes of another page (fedcba98), expected those of" in said and "(01234567)" in said
    assert "no whole file" in refused(folder, write_ballot(folder, "CD", page="../../ab"))
    path = write_ballot(folder, "EF")
    later = folder / "EF (1).json"
    later.write_bytes(path.read_bytes())
    said = refused(folder, [path, later], ConfigError)
    assert "hold votes of one voter's session, expected each once; leave out the one that was saved first" in said
    key = json.loads((folder / "votes_key.json").read_text())
    (folder / f"votes_key_{PAGE[:8]}.json").write_text(json.dumps(key))
    (folder / "votes_key.json").write_text(json.dumps(key | {"page": "f" * 16}))
    assert count_votes(folder, [path]).page == PAGE
    (folder / "votes_key.json").unlink()
    assert "has no votes_key.json" in refused(folder, path, ConfigError)


def test_a_file_that_was_edited_is_refused(folder):
    path = write_ballot(folder, "AB")
    plain = json.loads(path.read_text())
    first, *others = plain["votes"]
    answer = "second" if first["answer"] == "first" else "first"
    votes = others, [first | {"answer": answer}, *others], [first | {"ms": first["ms"] + 1}, *others]
    for change in (*({"votes": each} for each in votes), *({name: "a"} for name in ("voter", "session", "page"))):
        path.write_text(json.dumps(plain | change))
        assert "AB.json was changed after it was saved: its checksum is" in refused(folder, path)


def test_a_file_that_no_page_has_saved_is_refused_though_its_checksum_is_right(folder):
    content = json.loads(write_ballot(folder, "AB").read_text())
    first, *others = content["votes"]
    for cast, said in (
        ([first, first, *others], "is there twice"),
        ([first | {"pair": "pair99"}, *others], "pair99 is not on the page"),
        ([first | {"first": "a99"}, *others], "has another image"),
        ([], "holds no votes"),
    ):
        assert said in refused(folder, write_ballot(folder, "CD", votes=cast))


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"\xff", b'{"format": "sd-quant votes 2"}', b"[" * 10**5, b'{"page": "a"}',
    b'{"format": "x", "page": "a", "session": "", "voter": "", "votes": [], "checksum": ""}',
])  # fmt: skip
def test_what_is_no_file_of_votes_is_refused(folder, content):
    path = folder / "AB.json"
    path.write_bytes(content)
    assert "AB.json is no whole file of votes (" in refused(folder, path)


def call(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["votes", *map(str, words)])
    try:
        command.main()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.parametrize(("words", "said"), [
    ("{}", "no file of votes is given"),
    ("{}/nowhere a.json", "the first argument names .*nowhere, which does not exist"),
    ("{} nowhere.json", "a file of votes names nowhere.json, which does not exist"),
    ("{} a.json pairs=3", "a.json is given beside pairs="),
    ("{} pairs=0", "pairs is 0, expected a whole number from 1 to 1000"), ("{} pairs=1e3", "pairs is 1e3"),
    ("{} against=int9", "against is int9, which is no recipe of this report"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(words, said, tmp_path, monkeypatch):
    write_job(tmp_path / "int8")
    write_plan(tmp_path, {"int8": {"quantize": "int8"}})
    with pytest.raises(ConfigError, match=said):
        call(monkeypatch, *words.format(tmp_path, tmp_path).split())


def test_votes_are_counted_and_written(tmp_path, monkeypatch, capsys):
    paths = [write_ballot(write_key(tmp_path), name, missed=missed) for name, missed in (("AB", 0), ("C=D", 1))]
    assert call(monkeypatch, tmp_path, *paths) == 0
    told = capsys.readouterr().out
    assert "nvfp4 is preferred" in told and "Not counted: C=D, who did not choose the whole image" in told
    assert (tmp_path / "votes.csv").is_file() and (tmp_path / "votes.json").is_file()
    assert call(monkeypatch, tmp_path, paths[1]) == UNDECIDED


def test_other_pairs_are_drawn(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        write_job(tmp_path / name)
    write_plan(tmp_path, {name: {"alpha": name} for name in "ab"})
    assert call(monkeypatch, tmp_path, "against=alpha=a", "pairs=1") == 0
    assert capsys.readouterr().out == f"votes: {(tmp_path / 'votes.html').as_uri()}\n"
    key = read_key(tmp_path)
    assert key["comparisons"] == [{"a": "alpha=a", "b": "alpha=b"}] and key["most_pairs"] == 1


def test_the_page_of_the_documentation_has_the_commands(capsys, monkeypatch):
    assert call(monkeypatch) == 0
    usage = capsys.readouterr().out
    page = (HOME / "docs/votes.md").read_text(encoding="utf-8")
    for line in ("sd-quant votes <folder> a.json b.json", "sd-quant votes <folder> against=<recipe> pairs=96"):
        assert line in usage and line in page
