"""Blind votes in a browser: keys, what a reload leaves, the file that is saved, and what the command makes of it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd_quant_votes import command
from sd_quant_votes.ballots import read_ballot
from sd_quant_votes.page import EQUAL, read_key, write_votes
from tests.cli.browsing import HOSTILE, chromium, needs_chromium, pages
from tests.unit.report.sweeps import write_job, write_plan

pytestmark = [pytest.mark.commit, needs_chromium]
PROMPTS = [HOSTILE, *(f"a long prompt on the number {index}, its colours and its materials" for index in range(9))]
PORTRAIT = (96, 64, 3)
ON_THE_SCREEN = """() => Object.fromEntries(["first", "second"].map((id) => {
    const source = document.getElementById(id).src;
    return [id, data.pairs.flatMap((pair) => pair.images.map((image) => ({ pair: pair.id, ...image })))
        .find((image) => image.source === source)];
}))"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run with ten prompts."""
    folder = tmp_path_factory.mktemp("run")
    write_job(folder / "int8", prompts=PROMPTS)
    chance = np.random.default_rng(0)
    for path in (folder / "int8/images").rglob("*.png"):
        Image.fromarray(chance.integers(0, 255, PORTRAIT, np.uint8)).save(path)
    write_votes(write_plan(folder, {"int8": {"quantize": "int8"}}))
    return folder


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def open_votes(browser, folder):
    """``open_votes(width, height)``: the page before the first vote."""
    with pages(browser, folder / "votes.html") as opened:
        yield opened


def begin(page, voter: str) -> None:
    page.fill("#voter", voter)
    page.keyboard.press("Enter")
    wait(page)


def wait(page) -> None:
    """Until the pair can be voted on, or there is none left. The page's policy forbids ``wait_for_function``."""
    for _ in range(500):
        if page.evaluate("shownAt !== null || !document.getElementById('end').hidden"):
            return
        page.wait_for_timeout(10)
    pytest.fail("no pair within five seconds")


def preferred(page, key) -> str:
    """The key of a voter who always prefers full precision, and tells no difference where there is none."""
    shown = page.evaluate(ON_THE_SCREEN)
    pair = key["pairs"][shown["first"]["pair"]]
    if pair["kind"] == EQUAL:
        return "0"
    return "1" if shown["first"]["id"] == pair["a"] else "2"


def vote(page, key, keys=("1", "2", "0")) -> None:
    page.keyboard.press(dict(zip("120", keys, strict=True))[preferred(page, key)])
    wait(page)


def saved(page, path: Path) -> dict:
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(path)
    return json.loads(path.read_text())


def overflow(page) -> list[int]:
    return page.evaluate("""() => [document.documentElement.scrollWidth - innerWidth,
        document.documentElement.scrollHeight - innerHeight]""")


@pytest.mark.parametrize(
    ("size", "keys"),
    [
        pytest.param((1280, 800), ("1", "2", "0"), marks=pytest.mark.nightly),
        ((390, 844), ("ArrowLeft", "ArrowRight", " ")),
    ],
)
def test_votes_are_cast_with_keys_saved_and_counted(open_votes, folder, size, keys, tmp_path, monkeypatch, capsys):
    page, key, prompts = open_votes(*size), read_key(folder), set()
    begin(page, "AB")
    for number in range(len(key["pairs"])):
        assert page.locator("#count").inner_text() == f"{number + 1} of 12"
        assert max(overflow(page)) <= 0
        first, second = (page.locator(f"#{name}").bounding_box() for name in ("first", "second"))
        assert first["height"] == second["height"] > 250 and first["width"] == pytest.approx(first["height"] / 1.5, 1)
        assert first["x"] == second["x"] if size[0] == 390 else first["y"] == second["y"]
        if number == 4:
            page.keyboard.press(keys[0])
            wait(page)
            page.keyboard.press("Backspace")
            wait(page)
            page.reload()
            page.click("#begin")  # Continue
            wait(page)
        prompts.add(page.locator("#prompt").inner_text())
        vote(page, key, keys)
    assert HOSTILE in prompts and page.locator("script").count() == 2
    assert page.locator("#end").is_visible() and max(overflow(page)) <= 0
    path = tmp_path / "AB.json"
    ballot = saved(page, path)
    assert (ballot["voter"], ballot["page"], len(ballot["votes"])) == ("AB", key["page"], 12)
    assert all(0 <= each["ms"] < 10_000 for each in ballot["votes"])
    monkeypatch.setattr(sys, "argv", ["votes", str(folder), str(path)])
    command.main()
    told = capsys.readouterr().out
    assert "10 0 0 % (0 to 31) 0.00195" in " ".join(told.split())
    assert "Counted: AB." in told and "about one person" in told


@pytest.mark.nightly
def test_each_voter_has_an_order_and_sides_of_their_own(open_votes, folder, tmp_path):
    key, ballots = read_key(folder), []
    for name in ("Å. B", "CD"):
        page = open_votes()
        begin(page, name)
        for _ in range(8):
            vote(page, key)
        ballots.append(saved(page, tmp_path / f"{name}.json"))  # before the end
    orders = [[(each["pair"], each["first"]) for each in ballot["votes"]] for ballot in ballots]
    assert orders[0] != orders[1] and ballots[0]["session"] != ballots[1]["session"]
    assert ballots[0]["voter"] == "Å. B"  # and the command agrees on its checksum
    assert len(read_ballot(tmp_path / "Å. B.json").votes) == 8


@pytest.mark.nightly
def test_both_images_are_zoomed_alike_at_one_place(open_votes):
    page = open_votes()
    begin(page, "")
    style = "image => [getComputedStyle(image).transform, getComputedStyle(image).transformOrigin]"
    shown = [page.locator(f"#{name}") for name in ("first", "second")]
    assert shown[0].evaluate(style)[0] == "matrix(1, 0, 0, 1, 0, 0)"
    page.locator(".view").nth(1).click(position={"x": 30, "y": 40})
    zoomed = shown[0].evaluate(style)
    assert zoomed == shown[1].evaluate(style) and zoomed[0] == "matrix(2, 0, 0, 2, 0, 0)"
    assert [float(each.removesuffix("px")) for each in zoomed[1].split()] == pytest.approx([30, 40], abs=1)
    page.mouse.move(*(page.locator(".view").first.bounding_box()[axis] + 90 for axis in "xy"))
    moved = shown[0].evaluate(style)
    assert moved == shown[1].evaluate(style) and moved[0] == zoomed[0]
    assert [float(each.removesuffix("px")) for each in moved[1].split()] == pytest.approx([90, 90], abs=1)
    page.keyboard.press("z")
    assert shown[0].evaluate(style)[0] == "matrix(4, 0, 0, 4, 0, 0)"
    page.keyboard.press("1")  # and the next pair is whole again
    wait(page)
    assert shown[0].evaluate(style)[0] == "matrix(1, 0, 0, 1, 0, 0)"
    assert page.locator("#count").inner_text() == "2 of 12"


@pytest.mark.nightly
def test_votes_with_the_mouse_and_what_is_no_vote(open_votes, tmp_path):
    page = open_votes()
    page.locator("#voter").press_sequentially("0 1 2")  # in the field: no vote
    begin(page, "0 1 2")
    page.keyboard.press("Control+1")
    page.keyboard.press("Backspace")
    page.keyboard.press("x")
    assert page.locator("#count").inner_text() == "1 of 12"
    page.click("[data-answer=neither]")
    wait(page)
    page.keyboard.press(" ")  # is one vote, not also a press of the button that has been clicked
    wait(page)
    assert page.locator("#count").inner_text() == "3 of 12"
    page.click("[data-answer=second]")
    wait(page)
    page.click("#undo")
    wait(page)
    assert [each["answer"] for each in saved(page, tmp_path / "x.json")["votes"]] == ["neither", "neither"]
