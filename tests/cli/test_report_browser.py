"""The report in a browser: what its script does, that it loads nothing, and that other people's text does nothing."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd_quant.report.page import write_report
from sd_quant.report.summary import read_sweep

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.commit, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]
RED, BLUE = (220, 20, 20), (20, 20, 220)  # full precision and quantized
HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=2">'
PROMPTS = ["a red apple", HOSTILE, "a glossy icon of a rocket"]


def write_job(folder: Path, decibels: float, speedup: float) -> None:
    for side, colour in (("full_precision", RED), ("quantized", BLUE)):
        (folder / "images" / side).mkdir(parents=True)
        for index in range(len(PROMPTS)):
            Image.new("RGB", (64, 64), colour).save(folder / "images" / side / f"{index:04d}.png")
    values = [decibels, decibels - 2, decibels - 1]
    times = {"full_precision": {"p50_ms": 60.0, "rest": 0}, "quantized": {"p50_ms": 60 / speedup}, "speedup": speedup}
    rounds = [60 + 0.1 * (index % 3) for index in range(12)]
    call = {
        "full_precision": {"samples_ms": rounds},
        "quantized": {"samples_ms": [each / speedup for each in reversed(rounds)]},
    }
    record = {
        "status": "done",
        "knobs": {"model": {"path": f"{HOSTILE}.nemo"}, "infer": {"engine": "openvino", "batch_size": 1}},
        "prompts": PROMPTS,
        "latency": {"openvino": {"unet_xl": {"2": call}, "image": {"1": times}}},
        "sizes_bytes": {"unet_xl": {"onnx_full_precision": 17e6, "onnx_quantized": 17e6 / speedup}},
        "fidelity": {
            "psnr": {"mean": decibels, "min": min(values), "values": values},
            "latent_sqnr_db": [decibels, decibels - 3],
        },
    }
    (folder / "metrics.json").write_text(json.dumps(record))
    (folder / "layers.csv").write_text(
        f"name,role,output_error\nconv_in,conv,0.01\n{HOSTILE.replace(',', '')},qkv,0.1\n"
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """Three recipes, of which the middle one is recommended, and a failed one."""
    folder = tmp_path_factory.mktemp("sweep")
    for name, decibels, speedup in (("a", 44.0, 1.0), ("b", 39.0, 1.3), ("c", 30.0, 1.35)):
        write_job(folder / name, decibels, speedup)
    (folder / "d").mkdir()
    (folder / "d" / "failure.json").write_text(json.dumps({"status": "failed", "reason": HOSTILE}))
    jobs = [
        {"name": name, "varied": {"alpha": value}} for name, value in zip("abcd", (0.5, 0.8, HOSTILE, 10), strict=True)
    ]
    plan = {"schema_version": 1, "command": [HOSTILE], "varied": ["alpha"], "jobs": jobs}
    (folder / "sweep.json").write_text(json.dumps(plan))
    return write_report(read_sweep(folder))


@pytest.fixture(scope="module")
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_report(browser, report) -> Iterator:
    """``open_report(width, scheme)``: a page. In the end: no error, no message, no request but for the file itself."""
    told, requests, contexts = [], [], []

    def opened(width: int = 1280, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("dialog", lambda dialog: told.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(report.as_uri())
        return page

    yield opened
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("window.hacked") is None
        context.close()
    assert told == []
    assert [url for url in requests if not url.startswith("data:")] == [report.as_uri()] * len(contexts)


def jobs(page) -> list[str]:
    """In the table's order, those that are visible."""
    return [row.locator("th").inner_text()[0] for row in page.locator("#results tbody tr").all() if row.is_visible()]


def header(page, text: str):
    return page.locator("#results thead th", has_text=text).first


def shades(page) -> list[tuple]:
    """What the viewer shows at a quarter and at three quarters of its width, half way down."""
    with Image.open(io.BytesIO(page.locator("#stage").screenshot())) as image:
        pixels = np.asarray(image.convert("RGB"))
    height, width, _ = pixels.shape
    return [tuple(map(int, pixels[height // 2, width * quarter // 4])) for quarter in (1, 3)]


def test_a_header_sorts_both_ways_and_what_has_no_value_stays_last(open_report):
    page = open_report()
    assert jobs(page) == ["a", "b", "c", "d"]
    for text, first, ways in (
        ("PSNR, dB", "descending", ["abcd", "cbad"]),
        ("image, ms", "ascending", ["cbad", "abcd"]),
        ("job", "ascending", ["abcd", "dcba"]),
        ("alpha", "ascending", ["abdc", "cdba"]),  # 0.5, 0.8, 10, text
    ):
        for order in ways:
            header(page, text).locator("button").click()
            assert "".join(jobs(page)) == order, text
            second = {"ascending": "descending", "descending": "ascending"}[first]
            assert header(page, text).get_attribute("aria-sort") == (first if order == ways[0] else second)
    assert page.locator('#results [aria-sort="none"]').count() == page.locator("#results thead th").count() - 1


@pytest.mark.nightly
def test_the_keyboard_sorts(open_report):
    page = open_report()
    header(page, "PSNR, dB").locator("button").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert jobs(page) == ["c", "b", "a", "d"]


def test_the_filter_hides_rows(open_report):
    page = open_report()
    page.fill("#filter", "RECOMMENDED")
    assert jobs(page) == ["b"] and page.locator("#count").inner_text() == "1 of 4"
    page.fill("#filter", "<script>")
    assert jobs(page) == ["c", "d"]
    page.fill("#filter", "")
    assert jobs(page) == ["a", "b", "c", "d"] and page.locator("#count").inner_text() == ""


@pytest.mark.nightly
def test_the_slider_moves_the_border_between_the_two_images(open_report):
    page = open_report()
    assert shades(page) == [RED, BLUE]
    for share, shown in ((0, [BLUE, BLUE]), (100, [RED, RED]), (50, [RED, BLUE])):
        page.locator("#split").fill(str(share))
        assert shades(page) == shown
    page.locator("#split").press("End")
    assert shades(page) == [RED, RED]
    for _ in range(60):
        page.locator("#split").press("ArrowLeft")
    assert page.locator("#split").input_value() == "40" and shades(page) == [RED, BLUE]


@pytest.mark.nightly
def test_the_border_is_dragged(open_report):
    page = open_report()
    page.locator("#stage").scroll_into_view_if_needed()
    box = page.locator("#stage").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + 5, box["y"] + 200, steps=4)
    page.mouse.up()
    assert shades(page) == [BLUE, BLUE]
    page.mouse.move(box["x"] + box["width"], box["y"] + 200)
    assert shades(page) == [BLUE, BLUE]  # it was let go


@pytest.mark.nightly
def test_flip_shows_one_then_the_other(open_report):
    page = open_report()
    for shown, name in (([RED, RED], "full precision"), ([BLUE, BLUE], "quantized"), ([RED, RED], "full precision")):
        page.locator("#flip").click()
        assert shades(page) == shown and page.locator("#shown").inner_text() == name
    page.keyboard.press(" ")  # on the button, which has the focus
    assert shades(page) == [BLUE, BLUE]
    page.locator("#split").focus()
    page.keyboard.press(" ")
    assert shades(page) == [RED, RED]
    page.keyboard.press("ArrowRight")
    assert shades(page) == [RED, BLUE]  # the slider shows both again


@pytest.mark.nightly
def test_space_elsewhere_is_not_taken(open_report):
    page = open_report()
    page.locator("#filter").focus()
    page.keyboard.type("a b")
    assert page.locator("#filter").input_value() == "a b" and shades(page) == [RED, BLUE]


def test_the_worst_image_of_the_recommended_recipe_comes_first(open_report):
    page = open_report()
    captions = page.locator("#gallery figcaption")
    assert captions.all_inner_texts() == [PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    assert page.locator("#recipe option:checked").inner_text() == "alpha=0.8 (recommended)"
    assert page.locator("#scores").inner_text() == "alpha=0.8: PSNR 37.00 dB · SSIM – · LPIPS –"
    assert page.locator("#previous").is_disabled()
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
    page.locator("#gallery button").nth(2).click()
    assert page.locator("#scores").inner_text() == f"alpha={HOSTILE}: PSNR 28.00 dB · SSIM – · LPIPS –"


@pytest.mark.nightly
def test_small_images_are_enlarged_pixel_by_pixel(open_report):
    page = open_report()
    for image in (page.locator("#full"), page.locator("#gallery img").first):
        assert image.evaluate("image => getComputedStyle(image).imageRendering") == "pixelated"
        assert image.bounding_box()["width"] >= 128


def test_hostile_text_is_shown(open_report):
    """That it does nothing is what every test here ends with."""
    page = open_report()
    assert page.locator("#prompt").inner_text() == HOSTILE
    assert HOSTILE in page.locator(".reason").inner_text() and HOSTILE in page.locator(".warnings").inner_text()
    assert page.locator("script").count() == 2 and page.locator("img:not([src^='data:'])").count() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_the_screen_and_follows_its_colours(open_report, width, scheme):
    page = open_report(width, scheme)
    for recipe in ("alpha=0.5", "all recipes, side by side"):
        page.select_option("#recipe", label=recipe)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    stage = page.locator("#stage").bounding_box()
    assert 300 < stage["width"] <= min(width, 512) and stage["width"] == pytest.approx(stage["height"], abs=1)
    colours = page.evaluate(
        """() => [document.body, document.querySelector('svg text'), document.querySelector('svg path')].map(
            element => getComputedStyle(element)).flatMap(style => [style.backgroundColor, style.color, style.fill])"""
    )
    light = [
        sum(map(int, colour[4:-1].split(","))) > 3 * 128 for colour in (colours[0], colours[1], colours[5], colours[8])
    ]
    paper = scheme == "light"
    assert light == [paper, not paper, not paper, paper]  # page, its text, the text and the paper of a plot


@pytest.mark.nightly
def test_the_table_scrolls_in_its_own_frame(open_report):
    page = open_report(390)
    inside = page.locator(".scroll").evaluate("frame => [frame.scrollWidth, frame.clientWidth]")
    assert inside[0] > inside[1] and inside[1] <= 390
