"""Which words a prompt asks for, how alike texts are, and words that Pillow draws, read back."""

from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from sd_quant.errors import ResourceError
from sd_quant_scores import ocr
from sd_quant_scores.ocr import NO_WORDS, asked_texts, best_similarity, similarity

pytestmark = pytest.mark.commit

BLANK = np.full((2, 64, 96, 3), 200, np.uint8)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ('a sign that says "Let\'s PAINT!"', ["Let's PAINT!"]),
        ('"LOVE" on a mug, the other has "PEACE, now"', ["LOVE", "PEACE, now"]),
        ("a storefront with 'Hello World' written on it", ["Hello World"]),
        ("a book with the words 'Don't Panic!' on it.", ["Don't Panic!"]),
        ("a post with a blue '5', not '6'", ["5", "6"]),
        ("the word ‘openai’ and „Straße“, “so”, «ici»", ["openai", "Straße", "so", "ici"]),
        ("a dog's hat, a corgi’s head, the kids' toys and it's his", []),
        ("the sculpture wasn't level, it doesn't fit", []),
        ('a 5" pipe beside a 6" pipe', []),
        ('a sign with "" or "..." on it', []),
        ("a cat", []),
    ],
)
def test_words_in_quotes_are_asked_for_and_apostrophes_are_none(prompt, texts):
    assert asked_texts(prompt) == texts


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("kitten", "sitting", 1 - 3 / 7), ("abc", "abc", 1), ("abc", "", 0), ("stop", "xx", 0), ("helo", "hello", 0.8)],
)
def test_the_similarity_is_the_distance_by_the_longer_text(a, b, expected):
    assert similarity(a, b) == similarity(b, a) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("asked", "words", "expected"),
    [
        ("KEEP OFF", ["please", "Keep", "off", "the", "grass"], 1),  # over lines, whatever the case
        ("KEEP OFF", ["KEEPOFF"], 1),
        ("G I G G L E", ["giggle"], 1),
        ("START", ["START", "SMILING"], 1),
        ("OPEN", ["open!"], 0.8),
        ("OPEN", ["shop", "oren"], 0.75),
        ("Straße", ["STRASSE"], 1),
        ("ＯＰＥＮ", ["OPEN"], 1),
        ("STOP", [], 0),
        ("STOP", ["..."], 0),
    ],
)
def test_the_run_of_words_that_resembles_a_text_most_counts(asked, words, expected):
    assert best_similarity(asked, words) == pytest.approx(expected)


@pytest.fixture
def reads(monkeypatch):
    """A reader that finds what the test puts into it, image by image."""
    found: list[list[str]] = []
    monkeypatch.setattr(ocr, "reader", lambda: lambda image: found.pop(0))
    return found


def test_values_are_of_images_and_the_share_of_exact_ones_is_of_texts(reads):
    reads += [["stop", "here"], ["helo"]]
    images = [np.zeros((64, 64, 3), np.uint8), BLANK[0], BLANK[1]]
    found = ocr.ocr(images, ['"Stop" over "her"', "a cat", "'hello'"])
    assert found["values"] == [pytest.approx((1 + 0.75) / 2), None, pytest.approx(0.8)] and reads == []
    assert found["value"] == pytest.approx((0.875 + 0.8) / 2)
    assert (found["exact"], found["texts"], found["reason"]) == (pytest.approx(1 / 3), 3, None)


def test_prompts_without_words_have_no_score(monkeypatch):
    monkeypatch.setattr(ocr, "reader", lambda: pytest.fail("nothing is to be read"))
    expected = {"value": None, "reason": NO_WORDS, "values": [None, None], "exact": None, "texts": 0}
    assert ocr.ocr(BLANK, ["a cat", "a dog's hat"]) == expected


def test_without_the_package_there_is_a_reason(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rapidocr", None)
    ocr.reader.cache_clear()
    found = ocr.ocr(BLANK, ['"a"', "b"])
    assert found["value"] is None and found["values"] == [None, None]
    assert found["reason"].startswith("metrics.ocr needs the package rapidocr, which cannot be imported (")
    assert found["reason"].endswith("pip install 'sd-quant[ocr]', or set metrics.ocr=false")
    with pytest.raises(ResourceError):
        ocr.reader()


@pytest.mark.consumer
@pytest.mark.skipif(find_spec("rapidocr") is None, reason="pip install 'sd-quant[ocr]', 92 MB")
def test_words_that_are_drawn_are_read():
    """Of two sizes of images; those that show something else have less."""
    ocr.reader.cache_clear()
    images = []
    for size, lines in ((128, ("Fly an", "airplane")), (256, ("OPEN", "Hello World")), (256, ("CLOSED",))):
        image = Image.new("RGB", (size, size), (250, 240, 200))
        for row, line in enumerate(lines):
            at = size // 10, size // 5 + row * size // 3
            ImageDraw.Draw(image).text(at, line, fill=(20, 20, 120), font=ImageFont.load_default(size // 8))
        images.append(np.asarray(image))
    found = ocr.ocr(images, ['the words "Fly an airplane"', "'OPEN' over 'Hello World'", "a sign with “open”"])
    assert found["values"][:2] == [1, 1] and found["values"][2] < 0.6 and found["exact"] == 0.75
