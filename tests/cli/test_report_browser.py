"""The report in a browser: what its script does, that it loads nothing, and that other people's text does nothing."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.report.sweeps import change_record, report_of, write_job, write_plan

from .browsing import HOSTILE, needs_chromium, pages

pytestmark = [pytest.mark.commit, needs_chromium]
RED, BLUE = (220, 20, 20), (20, 20, 220)  # full precision and quantized
PROMPTS = ["a red apple", HOSTILE, "a glossy icon of a rocket"]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """Three recipes, of which the middle one is recommended, and a failed one."""
    folder = tmp_path_factory.mktemp("sweep")
    for name, decibels, speedup in (("a", 44.0, 1.0), ("b", 39.0, 1.3), ("c", 30.0, 1.35)):
        job = write_job(folder / name, decibels, speedup, 1 / speedup, PROMPTS)
        psnr = {"mean": decibels, "min": decibels - 2, "values": [decibels, decibels - 2, decibels - 1]}
        fidelity = {"psnr": psnr, "latent_sqnr_db": [decibels, decibels - 3]}  # without SSIM and LPIPS
        change_record(job, {"knobs.model.path": f"{HOSTILE}.nemo", "fidelity": fidelity})
        for side, colour in (("full_precision", RED), ("quantized", BLUE)):
            for image in (job / "images" / side).iterdir():
                Image.new("RGB", (64, 64), colour).save(image)
        rows = f"name,role,output_error\nconv_in,conv,0.01\n{HOSTILE.replace(',', '')},qkv,0.1\n"
        (job / "layers.csv").write_text(rows)
    (folder / "b/onnx/unet_xl").mkdir(parents=True)
    (folder / "b/onnx/unet_xl/unet_xl.onnx").touch()
    (folder / "d").mkdir()
    (folder / "d" / "failure.json").write_text(json.dumps({"status": "failed", "reason": HOSTILE}))
    varied = {name: {"alpha": value} for name, value in zip("abcd", (0.5, 0.8, HOSTILE, 10), strict=True)}
    return report_of(write_plan(folder, varied, command=[HOSTILE]))


@pytest.fixture
def open_report(browser, report):
    with pages(browser, report) as opened:
        yield opened


def jobs(page) -> str:
    """In the table's order, those that are visible, by the first letter of each; u is the unquantized engine."""
    visible = (row for row in page.locator("#results tbody tr").all() if row.is_visible())
    return "".join(row.locator("th").get_attribute("title")[0] for row in visible)


def header(page, text: str):
    return page.locator("#results thead th", has_text=text).first


def shades(page) -> list[tuple]:
    """What the viewer shows at a quarter and at three quarters of its width, half way down."""
    with Image.open(io.BytesIO(page.locator("#stage").screenshot())) as image:
        pixels = np.asarray(image.convert("RGB"))
    height, width, _ = pixels.shape
    return [tuple(map(int, pixels[height // 2, width * quarter // 4])) for quarter in (1, 3)]


def test_a_header_sorts_both_ways_and_what_has_no_value_stays_last_and_the_filter_hides_rows(open_report):
    page = open_report()
    assert jobs(page) == "uabcd"
    for text, first, ways in (
        ("PSNR, dB", "descending", ["abcud", "cbaud"]),
        ("image, ms", "ascending", ["cbaud", "aubcd"]),
        ("recipe", "ascending", ["cabdu", "udbac"]),  # text, 0.5, 0.8, 10
    ):
        second = {"ascending": "descending", "descending": "ascending"}[first]
        for order, said in zip(ways, (first, second), strict=True):
            header(page, text).locator("button").click()
            assert jobs(page) == order and header(page, text).get_attribute("aria-sort") == said, text
    assert page.locator('#results [aria-sort="none"]').count() == page.locator("#results thead th").count() - 1
    header(page, "PSNR, dB").locator("button").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert jobs(page) == "cbaud"
    for text, shown, count in (("RECOMMENDED", "b", "1 of 5"), ("<script>", "cd", "2 of 5"), ("", "cbaud", "")):
        page.fill("#filter", text)
        assert (jobs(page), page.locator("#count").inner_text()) == (shown, count)


def test_a_command_is_copied(open_report):
    page = open_report(permissions=["clipboard-read", "clipboard-write"])
    page.locator(".copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("sd-quant infer ")


@pytest.mark.nightly
def test_the_slider_a_drag_and_flip_move_the_border_between_the_two_images(open_report):
    page = open_report()
    split, half, full, quantized = page.locator("#split"), [RED, BLUE], [RED, RED], [BLUE, BLUE]
    assert shades(page) == half
    for share, shown in ((0, quantized), (100, full), (50, half)):
        split.fill(str(share))
        assert shades(page) == shown
    split.press("End")
    assert shades(page) == full
    for _ in range(60):
        split.press("ArrowLeft")
    assert split.input_value() == "40" and shades(page) == half
    page.locator("#stage").scroll_into_view_if_needed()
    box = page.locator("#stage").bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + 5, box["y"] + 200, steps=4)
    page.mouse.up()
    assert shades(page) == quantized
    page.mouse.move(box["x"] + box["width"], box["y"] + 200)
    assert shades(page) == quantized  # it was let go
    split.fill("50")
    page.locator("#filter").focus()
    page.keyboard.type("a b")
    assert page.locator("#filter").input_value() == "a b" and shades(page) == half  # space elsewhere is not taken
    for shown, name in ((full, "full precision"), (quantized, "quantized"), (full, "full precision")):
        page.locator("#flip").click()
        assert shades(page) == shown and page.locator("#shown").inner_text() == name
    page.keyboard.press(" ")  # on the button, which has the focus
    assert shades(page) == quantized
    split.focus()
    page.keyboard.press(" ")
    assert shades(page) == full
    page.keyboard.press("ArrowRight")
    assert shades(page) == half  # the slider shows both again


def test_the_worst_image_of_the_recommended_recipe_comes_first_and_hostile_text_is_shown(open_report):
    """Hostile text runs no script: every test here ends with that check."""
    page = open_report()
    assert page.locator("#gallery figcaption").all_inner_texts() == [PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    assert page.locator("#recipe option:checked").inner_text() == "alpha=0.8 (recommended)"
    assert page.locator("#scores").inner_text() == "alpha=0.8: PSNR 37.00 dB · SSIM – · LPIPS –"
    assert page.locator("#prompt").inner_text() == HOSTILE and page.locator("#previous").is_disabled()
    assert HOSTILE in page.locator(".reason").inner_text() and HOSTILE in page.locator(".warnings").inner_text()
    assert page.locator("script").count() == 2 and page.locator("img:not([src^='data:'])").count() == 0
    page.locator("#next").click()
    page.locator("#next").click()
    assert page.locator("#prompt").inner_text() == PROMPTS[0] and page.locator("#next").is_disabled()
    page.locator("#gallery button").nth(1).click()
    assert page.locator("#prompt").inner_text() == PROMPTS[2]
    assert page.locator('#gallery [aria-current="true"]').count() == 1


@pytest.mark.nightly
def test_another_recipe_and_all_of_them(open_report):
    page = open_report()
    page.select_option("#recipe", label="alpha=0.5")
    assert page.locator("#scores").inner_text() == "alpha=0.5: PSNR 42.00 dB · SSIM – · LPIPS –"
    assert page.locator("#gallery button").count() == 3
    page.select_option("#recipe", label="all recipes, side by side")
    assert page.locator("#gallery figure").count() == 3 and page.locator("#gallery button").count() == 9
    assert page.locator("#viewer").is_hidden()
    page.locator("#gallery button").nth(2).click()  # opens it in the viewer, among its recipe's
    assert page.locator("#viewer").is_visible() and page.locator("#gallery button").count() == 3
    assert page.locator("#scores").inner_text() == f"alpha={HOSTILE}: PSNR 28.00 dB · SSIM – · LPIPS –"


def test_hostile_text_is_shown(open_report):
    """Hostile text runs no script: every test here ends with that check."""
    page = open_report()
    assert page.locator("#prompt").inner_text() == HOSTILE
    assert HOSTILE in page.locator(".reason").inner_text() and HOSTILE in page.locator(".warnings").inner_text()
    assert page.locator("script").count() == 2 and page.locator("img:not([src^='data:'])").count() == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_fits_the_screen_and_follows_its_colours(open_report, width, scheme):
    page = open_report(width, color_scheme=scheme)
    for image in (page.locator("#full"), page.locator("#gallery img").first):  # small ones, enlarged
        assert image.evaluate("image => getComputedStyle(image).imageRendering") == "pixelated"
        assert image.bounding_box()["width"] >= 128
    for recipe in ("alpha=0.5", "all recipes, side by side"):
        page.select_option("#recipe", label=recipe)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    inside, shown = page.locator(".scroll").evaluate("frame => [frame.scrollWidth, frame.clientWidth]")
    assert inside == shown < width  # nothing of the table is cut
    page.select_option("#recipe", label="alpha=0.5")
    stage = page.locator("#stage").bounding_box()
    assert 300 < stage["width"] <= min(width, 512) and stage["width"] == pytest.approx(stage["height"], abs=1)
    colours = page.evaluate(
        """() => [document.body, document.querySelector('svg text'), document.querySelector('svg path')].map(
            element => getComputedStyle(element)).flatMap(style => [style.backgroundColor, style.color, style.fill])"""
    )
    page_text_plot = (colours[0], colours[1], colours[5], colours[8])
    light = [sum(map(int, colour[4:-1].split(","))) > 3 * 128 for colour in page_text_plot]
    paper = scheme == "light"
    assert light == [paper, not paper, not paper, paper]  # page, its text, the text and the paper of a plot
