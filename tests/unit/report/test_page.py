import base64
import hashlib
import html
import io
import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image, ImageFont

from sd_quant.errors import ArtifactError
from sd_quant.report import drawing, gallery, images, page
from sd_quant.report.__main__ import main
from sd_quant.report.images import _wrap, comparison_grid, save_animations, save_images
from sd_quant.report.summary import read_sweep
from sd_quant.report.table import table_of_texts
from sd_quant.text import printable
from tests.pasting import words_of

from .sweeps import change_record, report_of, write_job, write_plan

pytestmark = pytest.mark.commit


class Parsed(HTMLParser):
    """Elements with their attributes, the text outside of scripts, and what each script holds."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.text, self.scripts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        (self.scripts if self.elements and self.cdata_elem == "script" else self.text).append(data)


def written(sweep, **options) -> tuple[str, Parsed, dict]:
    """The page as text and parsed, and the data of its script."""
    parsed = Parsed(text := report_of(sweep, **options).read_text(encoding="utf-8"))
    return text, parsed, json.loads(parsed.scripts[0])


def row(text: str, job: str) -> str:
    return next(line for line in re.findall(r"<tr class=.*?</tr>", text, re.DOTALL) if job in line)


def cells(row: str) -> list[str]:
    return [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", row)]


@pytest.mark.slow
def test_the_command_makes_everything_and_each_thing_stands_in_its_place(small_sweep, monkeypatch, capsys):
    directory = small_sweep.directory
    (directory / "level=2/onnx/unet_xl").mkdir(parents=True)
    (directory / "level=2/onnx/unet_xl/unet_xl.onnx").touch()
    monkeypatch.setattr(sys, "argv", ["report", str(directory)])
    main()
    assert {path.name for path in directory.iterdir() if path.is_file()} == {
        "sweep.json", "recommendation.json", "summary.csv", "summary.md", "report.html",
        "votes.html", "votes_key.json", "pareto_latency.png", "pareto_size.png", "trajectory.png", "layers.png",
    }  # fmt: skip
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"report: file://{directory}/report.html" and said[-1].startswith("Ship quant_level=2: 1.20x")
    text = (directory / "report.html").read_text(encoding="utf-8")
    order = [
        "small · sweep of 6 jobs", "<h1>Ship quant_level=2 <small>1.20x (1.18 to 1.22) as fast", "PSNR 39.0 dB (38.4",
        "<dt>folder</dt><dd>level=2</dd>", "<dt>ONNX</dt><dd>onnx/unet_xl/unet_xl.onnx</dd>",
        "sd-quant infer ", "<details>", "Worth of a recipe",
        "openvino 2026.4", "a processor, 2 cores, avx512_vnni, 16 GiB",
        "1 March 2026, 10:20 UTC", "quantize.py -m", "Warnings: 1 FAILED, 1 UNFINISHED",
        "FAILED: level=5: the disk is full", "UNFINISHED: level=6: it left no record", "Results", "Plots",
        'id="pareto_latency-figure_1"', 'id="pareto_size-figure_1"', 'id="trajectory-figure_1"',
        'id="layers-figure_1"',
        "<h2>Images</h2>",
    ]  # fmt: skip
    places = [text.find(part) for part in order]
    assert -1 not in places and places == sorted(places)
    assert not re.search("Handed over|What is in each candidate|Bits and other levers", text)
    ids = [attributes["id"] for _, attributes in Parsed(text).elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_table_has_units_dashes_marks_and_reasons(small_sweep, without_plots):
    incomplete = {
        "fidelity.lpips": {"mean": None, "reason": "not measured"},
        "fidelity.psnr.mean": None,
        "fidelity.ssim.mean": 1.0,
        "latency.openvino.unet_xl.2.full_precision.p50_ms": 90.0,  # the median of the jobs stays
    }
    change_record(small_sweep.directory / "level=4", incomplete)
    text, *_ = written(read_sweep(small_sweep.directory))
    assert cells(row(text, "level=2")) == [
        "39.00 ± 0.64", "38.95", "0.9800", "0.0100", "30.0", "15.0", "1.33x ± 0.02", "50", "1.20x ± 0.02", "11.3",
        "openvino", "12.5",
    ]  # fmt: skip
    assert cells(row(text, "unquantized"))[:6] == ["–"] * 5 + ["20.0"] and "16.2" in cells(row(text, "unquantized"))
    assert cells(row(text, "level=4"))[:3] == ["identical", "28.95", "1.0000"]
    assert 'class="done recommended"' in row(text, "level=2") and text.count('class="badge"') == 1
    assert cells(row(text, "level=5")) == ["failed: the disk is full"]
    assert cells(row(text, "level=6"))[0].startswith("unfinished: it left no record")
    headers = re.findall(r'aria-sort="none" data-first="(\w+)"><button type="button">(.*?)</button>', text)
    assert {("descending", "PSNR, dB"), ("ascending", "image, ms")} < {*headers} and len({*headers}) == 13
    assert re.findall('data-title="(.*?)"', row(text, "level=2")) == [title for _, title in headers][1:]


def test_where_the_unquantized_engine_is_to_ship_the_best_recipe_is_marked_and_shown_first(tmp_path, without_plots):
    for level, decibels in (("1", 34.0), ("2", 35.0)):
        change_record(write_job(tmp_path / level, decibels, 0.8), {"knobs.keep": 1, "knobs.format": "int8"})
    jobs = [
        {"name": level, "varied": {"quant_level": int(level)}, "same_as": twin} for level, twin in ("1 ", "2 ", "32")
    ]
    text, _, data = written(write_plan(tmp_path, {"1": {"quant_level": 1}}, jobs=jobs))
    assert "sweep of 3 jobs, 2 of them different" in text
    assert "<h1>Ship the unquantized engine <small>The best recipe, quant_level=2, is 0.80x" in text
    assert 'class="done recommended"' in row(text, "unquantized") and ">recommended<" in row(text, "unquantized")
    assert ">best recipe<" in row(text, "quant_level=2") and "badge" not in row(text, "quant_level=1")
    assert [(recipe["badge"], recipe["first"]) for recipe in data["recipes"]] == [(None, False), ("best recipe", True)]


def test_a_recipe_that_is_slower_or_of_another_version_or_that_no_engine_ran_is_called_so(small_sweep, without_plots):
    slower = {"latency.openvino.image.1.speedup": 0.8, "latency.openvino.unet_xl.2.speedup": 0.997}
    other = {"environment.versions.openvino": "1.0", "environment.machine.cpu_int8": ["amx"]}
    change_record(small_sweep.directory / "level=1", other)
    change_record(small_sweep.directory / "level=2", {"simulated": True})
    change_record(small_sweep.directory / "level=3", slower)
    change_record(small_sweep.directory / "level=4", {"degenerate": [{"index": 1, "reason": "black"}]})
    text, _, data = written(read_sweep(small_sweep.directory))
    captions = [pair["scores"] for prompt in data["prompts"] for pair in prompt["pairs"]]
    assert sum("image 1 is black" in caption for caption in captions) == 1
    warnings = re.findall("(?:DEGENERATE|SLOWER|SIMULATED|UNLIKE): [^<]*", text)
    assert warnings.pop(1).startswith("UNLIKE: quant_level=1 ran with processor") and set(warnings) == {
        "DEGENERATE: quant_level=4: image 1 is black.",
        "SIMULATED: no engine here executes quant_level=2; torch made its images.",
        "SLOWER: quant_level=3: prompt to image takes 1.25 times as long quantized as unquantized.",
        "UNLIKE: quant_level=1 ran with openvino 1.0, most jobs with 2026.4; compare with care.",
    }
    assert "simulation" in cells(row(text, "level=2"))


HOSTILE = [
    "</script><script>alert(1)</script>", '"><img src=x onerror="alert(1)">', "<!--<script>",
    "{{7*7}} ${data} $script %s", "a&amp;b\u2028c\u202ed\x00e\ud800",
]  # fmt: skip


def test_other_peoples_text_stays_text(tmp_path, without_plots):
    """In prompts, knobs, reasons, names of jobs and paths. The page loads nothing and runs only its own script."""
    jobs = {}
    for number, text in enumerate(HOSTILE):
        name = f"{number} {text}".replace("/", "").replace("\x00", "").replace("\ud800", "")
        folder = write_job(tmp_path / name, 34 + number, 1.1 if number else 0.9, prompts=HOSTILE)
        change_record(folder, {"knobs.model.path": text})
        jobs[name] = {"prompts": text, "<i>knob": 1}
    for number, reason in enumerate(HOSTILE):
        (tmp_path / f"failed {number}").mkdir()
        (tmp_path / f"failed {number}" / "failure.json").write_text(json.dumps({"reason": reason}))
        jobs[f"failed {number}"] = {}
    text, parsed, data = written(write_plan(tmp_path, jobs), tables=[table_of_texts(HOSTILE, [HOSTILE], *HOSTILE[:2])])

    named = ("script", "i", "img", "iframe", "object", "embed", "base", "form")
    assert [tag for tag, _ in parsed.elements if tag in named] == ["img", "img", "script", "script"]
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith(("on", "src"))]
    assert [attributes["href"] for tag, attributes in parsed.elements if tag == "link"] == ["data:,"]
    assert not re.search(r"https?:|url\((?!#)|@import|\bfetch\b|innerHTML|insertAdjacentHTML|\beval\b", text)
    assert parsed.scripts[1:] == [page.source(page.FOLDER / "page.js")]
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[1].encode()).digest()).decode()
    assert [attributes["content"] for _, attributes in parsed.elements if "http-equiv" in attributes] == [
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    ]
    assert not {"<", ">", "&"} & set(parsed.scripts[0])  # "</script " would end it, though Python's parser reads on
    assert sorted(prompt["text"] for prompt in data["prompts"]) == sorted(map(printable, HOSTILE))
    shown = "".join(parsed.text)
    for number, hostile in enumerate(map(printable, HOSTILE)):
        assert f"failed: {hostile}" in shown  # its reason, in the table
        assert data["recipes"][number]["name"] == f"prompts={hostile} <i>knob=1"
    assert "\u202e" not in text and "\x00" not in text and "\u2028" not in text


def image(data: dict, index: int) -> Image.Image:
    kind, _, content = data["images"][index]["source"].partition(";base64,")
    opened = Image.open(io.BytesIO(base64.b64decode(content)))
    assert kind == f"data:image/{opened.format.lower()}"
    return opened


def test_small_images_are_embedded_once_and_bit_for_bit(small_sweep, without_plots):
    _, _, data = written(small_sweep)
    assert [recipe["name"] for recipe in data["recipes"] if recipe["first"]] == ["quant_level=2"]
    assert len(data["images"]) == 2 + 4 * 2  # full precision of two prompts, and the images of four recipes
    for prompt in data["prompts"]:
        assert len({pair["full"] for pair in prompt["pairs"]}) == 1
        for pair, job in zip(prompt["pairs"], small_sweep.jobs, strict=False):
            index = ["a red apple", "a pear"].index(prompt["text"])
            with Image.open(job.directory / f"images/quantized/{index:04d}.png") as original:
                assert np.array_equal(np.asarray(image(data, pair["quantized"])), np.asarray(original))
            assert pair["scores"] == f"PSNR {pair['psnr']:.2f} dB · SSIM 0.9800 · LPIPS 0.0100"


def test_the_page_of_one_run_has_no_warnings_and_reduced_images_where_they_are_large(tmp_path, without_plots):
    run = write_job(tmp_path / "2026-11-29", size=1000)
    change_record(run, {"knobs.format": "int8", "knobs.quant_level": 3.0})
    text, parsed, data = written(read_sweep(run))
    assert "Warnings" not in parsed.text and "one job" in text and "at most 768 pixels" in text
    assert "<h1>Ship int8, level 3 <small>1.30x (1.28 to 1.32) as fast" in text
    assert [prompt["text"] for prompt in data["prompts"]] == ["a pear", "a red apple"]  # the worse one first
    assert (image(data, 0).size, image(data, 0).format, data["images"][0]["width"]) == ((768, 768), "WEBP", 768)


@pytest.mark.parametrize("given", [["prompts=[it's a rocket, a key]", 'model.path="<b> ${x}"'], []])
def test_the_command_of_a_page_pastes(tmp_path, without_plots, given):
    run = change_record(write_job(tmp_path / "run"), {"overrides": given})
    write_job(tmp_path / "level=1")
    write_plan(tmp_path, {"level=1": {"quant_level": 1.0}}, command=["sd-quant", "quantize", "-m", *given])
    for folder, expected in ((run, given), (tmp_path, ["-m", *given])):
        command = re.search("<dt>command</dt><dd>(.*?)</dd>", written(read_sweep(folder))[0])[1]
        assert words_of(html.unescape(command), tmp_path / "bin") == ["sd-quant", "quantize", *expected]
    assert read_sweep(change_record(run, {"judged": {"name": "a.gguf"}})).command == []  # which no command of ours made


def test_of_many_prompts_the_worst_are_embedded(tmp_path, without_plots, monkeypatch):
    sweep = read_sweep(write_job(tmp_path / "run", prompts=[f"prompt {number}" for number in range(40)]))
    text, _, data = written(sweep)
    assert [prompt["text"] for prompt in data["prompts"]] == [f"prompt {number}" for number in range(39, 15, -1)]
    assert "The 24 worst of 40 prompts" in text
    monkeypatch.setattr(gallery, "MOST_BYTES", 600)
    _, _, data = written(sweep)
    assert 0 < len(data["prompts"]) < 24


@pytest.mark.parametrize("content", [None, b"\x89PNG\r\n\x1a\n half", b"<svg onload='alert(1)'>", "too large"])
def test_an_image_that_is_missing_or_damaged_is_said_to_be(tmp_path, content, without_plots, monkeypatch):
    sweep = read_sweep(write_job(tmp_path / "run"))
    path = sweep.directory / "images/quantized/0000.png"
    path.unlink()
    if content == "too large":  # it would fill the memory
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
        Image.new("RGB", (100, 100)).save(path)
    elif content is not None:
        path.write_bytes(content)
    text, _, data = written(sweep)
    pairs = {prompt["text"]: prompt["pairs"][0] for prompt in data["prompts"]}
    missing = [(name, side) for name in pairs for side in ("full", "quantized") if pairs[name][side] is None]
    assert missing == [("a red apple", "quantized")] and len(pairs) == 2
    assert "run: 1 pair of images is missing or damaged" in text


def test_a_sweep_without_images_says_so(tmp_path):
    (tmp_path / "a").mkdir()
    text, parsed, data = written(write_plan(tmp_path, {"a": {"alpha": 0.8}}))
    assert "There are no images to show." in parsed.text and '<div id="comparison" hidden>' in text
    assert "No job has both images and a latency, so there is nothing to recommend." in parsed.text
    assert "Plots" not in parsed.text and data["prompts"] == []


def test_the_style_sheet_has_every_colour_of_the_plots_in_light_and_in_dark():
    light, dark = page.source(page.FOLDER / "page.css").split("@media (prefers-color-scheme: dark)")
    for name in drawing.PALETTE.values():
        found = re.search(rf"--plot-{name}: (?:var\(--(\w+)\)|#\w+)", light)
        assert found, name
        assert (f"--{found[1]}: #" if found[1] else f"--plot-{name}: #") in dark


# The files of images


def test_a_videos_frames_are_played_one_after_the_other(tmp_path):
    frames = [np.full((16, 24, 3), 40 * number, np.uint8) for number in range(1, 5)]
    [path] = save_animations(np.concatenate(frames, axis=1)[None], 24, tmp_path, ["0000"])
    with Image.open(path) as video:
        assert video.n_frames == 4 and video.size == (24, 16)
        for number, frame in enumerate(frames):
            video.seek(number)
            assert (np.asarray(video.convert("RGB")) == frame).all()


def test_hostile_captions_are_only_drawn_and_thousands_of_pairs_give_a_grid_that_still_opens(tmp_path):
    captions = ["\x1b[2J\x00\n\u202e=cmd|'!A0", "\ud800 " + "x" * 100_000, ""]
    black = np.zeros((3, 64, 64, 3), np.uint8)
    path = comparison_grid(black, black, tmp_path / "grid.png", captions)
    assert [file.name for file in tmp_path.iterdir()] == ["grid.png"]
    with Image.open(path) as image:
        assert image.info == {}
    font = ImageFont.load_default(size=12)
    for caption in [*captions, "a very long caption of many words that does not fit", "a " * 100]:
        lines = _wrap(caption, font, 60)
        assert len(lines) <= 2
        assert all(font.getlength(line) <= 60 and line.isprintable() for line in lines)
    many = np.zeros((1000, 16, 16, 3), np.uint8)
    path = comparison_grid(many, many, path, [""] * 1000)  # in rows, so that it opens
    with Image.open(path) as image:
        assert 8 * 2 * 16 < image.width < 1000 and 8 * 2 * 32 < image.height < 1000
    assert _wrap("a long caption that does not fit", font, 60)[-1].endswith("...")
    assert _wrap("it fits", font, 60) == ["it fits"]


def test_images_of_several_sizes_are_saved_and_drawn_as_they_are_and_of_another_type_refused(tmp_path, monkeypatch):
    with pytest.raises(ArtifactError, match="float64"):
        save_images(np.zeros((1, 8, 8, 3)), tmp_path / "images", ["a"])
    assert not (tmp_path / "images").exists()
    monkeypatch.setattr(images, "SCALE", 1)
    black = [np.zeros((height, width, 3), np.uint8) for height, width in ((64, 64), (32, 64), (64, 32))]
    for image, path in zip(black, save_images(black, tmp_path / "images", ["a", "b", "c"]), strict=True):
        with Image.open(path) as saved:
            assert np.array_equal(np.asarray(saved), image)
    white = [255 - image for image in black]
    with Image.open(comparison_grid(white, black, tmp_path / "grid.png", [""] * 3)) as image:
        grid = np.asarray(image)
    for place, (height, width, _) in enumerate(image.shape for image in black):
        left = grid.shape[1] - 16 - (3 - place) * 72 + 8  # the left edge of the pair
        below = grid[16 + 64 + 4 :, left : left + 64].max(-1) == 0
        assert below.sum() == height * width
        assert below[(64 - height) // 2 :, (64 - width) // 2 :][:height, :width].all()
