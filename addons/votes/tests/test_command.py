"""The command that counts votes and draws pairs anew: its refusals and its exit codes."""

import sys

import pytest

from sd_quant.errors import UNDECIDED, ConfigError
from sd_quant.places import HOME
from sd_quant_votes import command
from sd_quant_votes.page import read_key
from tests.unit.report.sweeps import write_job, write_plan

from .cast import write_ballot, write_key

pytestmark = pytest.mark.commit


def call(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["votes", *map(str, words)])
    try:
        command.main()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("{}", "no file of votes is given"),
        ("{}/nowhere a.json", "the first argument names .*nowhere, which does not exist"),
        ("{} nowhere.json", "a file of votes names nowhere.json, which does not exist"),
        ("{} a.json pairs=3", "a.json is given beside pairs="),
        ("{} pairs=0", "pairs is 0, expected a whole number from 1 to 1000"),
        ("{} pairs=1e3", "pairs is 1e3"),
        ("{} against=int9", "against is int9, which is no recipe of this report"),
    ],
)
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
