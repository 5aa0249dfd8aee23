import csv
import io
import re

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text
from PIL import Image

from sd_quant.report import drawing, plots
from sd_quant.report.recommendation import Recommendation, recommend
from sd_quant.report.summary import read_sweep

from .sweeps import change_record, write_job, write_plan, write_sweep

pytestmark = [pytest.mark.commit, pytest.mark.slow]


def words(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def figures_of(sweep) -> dict:
    return plots.figures(sweep, recommend(sweep))


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict:
    """Of a small sweep. Nothing changes them."""
    return figures_of(write_sweep(tmp_path_factory.mktemp("sweep")))


def test_the_front_joins_the_recipes_that_no_other_beats(figures):
    axes = figures["pareto_latency"].axes[0]
    top = 44 + 0.635 + plots.DB_BEYOND  # the end of the highest interval
    front = [[100 / 1.3, 30], [100 / 1.2, 39], [100 / 1.05, 44], [100, top]]
    assert axes.lines[0].get_xydata() == pytest.approx(np.array(front), abs=1e-3)
    assert set(words(axes.figure)) == {"1", "2", "3", "4", "unquantized"}  # none of the failed and unfinished
    stars = [line for line in axes.lines if line.get_marker() == "*"]
    assert [star.get_xydata()[0, 1] for star in stars] == [39]
    assert sum(len(line.get_xydata()) == 2 for line in axes.lines) == 4 + 4  # intervals of PSNR and of time
    sizes = figures["pareto_size"].axes[0]
    assert sizes.lines[0].get_xydata()[:, 0] * 2**20 == pytest.approx([10.2e6, 11.9e6, 13.6e6, 17e6])
    assert sizes.get_xlim()[0] == 0


def test_no_name_lies_on_an_interval():
    axes = drawing.new_figure().subplots()
    axes.plot([0, 10], [5, 5])
    plots.name_points(axes, [((5, 5), "a name", False)])
    axes.figure.draw_without_rendering()
    box, height = Text.get_window_extent(axes.texts[0]), axes.transData.transform((5, 5))[1]
    assert not box.y0 < height < box.y1


def test_where_the_unquantized_engine_is_shipped_it_has_the_star_and_the_best_recipe_its_colour(tmp_path):
    engine = {"psnr": {"mean": 61.9, "min": 60.0, "values": [61.9, 61.9]}}
    for level in "12":
        job = write_job(tmp_path / level, 35.0 + int(level) / 10, 0.8)
        change_record(job, {"fidelity_unquantized_engine": engine})
    axes = figures_of(write_plan(tmp_path, {level: {"level": level} for level in "12"}))["pareto_latency"].axes[0]
    assert set(words(axes.figure)) == {"1", "2, best recipe", "unquantized, 61.9 dB ↑"}
    signs = {line.get_marker(): line for line in axes.lines if to_hex(line.get_color()) == drawing.ACCENT}
    assert signs["*"].get_xdata() == [100] and signs["o"].get_xdata() == [125]
    assert axes.lines[0].get_xdata() == [100]  # no recipe that is slower is on the front


def test_identical_images_stand_above_the_rest_and_a_step_without_a_ratio_is_a_gap_in_its_line(small_sweep):
    identical = {"mean": None, "min": None, "values": [None, None]}
    change_record(small_sweep.directory / "level=1", {"fidelity.psnr": identical, "fidelity.ssim.mean": 1.0})
    for level, ratios in ((3, [9, None, 7]), (4, [None])):
        change_record(small_sweep.directory / f"level={level}", {"fidelity.latent_sqnr_db": ratios})
    drawn = figures_of(read_sweep(small_sweep.directory))
    assert "1, identical" in words(drawn["pareto_latency"])
    highest = max(drawn["pareto_latency"].axes[0].lines[0].get_ydata())
    assert highest == pytest.approx(39 + 0.635 + plots.DB_BEYOND, abs=1e-3)
    axes = drawn["trajectory"].axes[0]
    assert [list(line.get_ydata()) for line in axes.lines][:2] == [[44, 39, 35], [39, 34, 30]]
    assert axes.lines[2].get_xydata() == pytest.approx(np.array([[1, 9], [2, np.nan], [3, 7]]), nan_ok=True)
    assert len(axes.lines) == 3 and words(axes.figure) == ["3", "2", "1"]
    assert [to_hex(line.get_color()) == drawing.ACCENT for line in axes.lines] == [False, True, False]


def test_layers_stand_in_the_order_of_the_network_and_the_worst_have_names(figures):
    axes, key = figures["layers"].axes
    errors = sorted((x, y) for line in axes.lines if line.get_label()[0] != "_" for x, y in line.get_xydata())
    assert [error for _, error in errors] == pytest.approx([2, 0.6, 3, 5, 1])  # the resnet is called before attention
    assert [text.get_text() for text in axes.get_xticklabels()] == ["down\n1", "mid", "up\n0"]
    shown = [text.get_text() for text in key.texts]
    assert shown[:4] == ["1: 5 %", "mid.resnet.0.conv1", "2: 3 %", "down.1.attention.0.block.0.ff.net.2"]
    assert axes.get_title("left") == "2"
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"conv", "ffn", "qkv"}


def test_the_order_is_that_in_which_diffusers_calls_its_layers(build_unet, unet_inputs):
    import torch

    unet = build_unet()
    called = []
    for name, module in unet.named_modules():
        if re.search(r"resnets\.\d\.conv1$|attn1\.to_q$|samplers\.0\.conv$|^conv_(in|out)$", name):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    inputs = unet_inputs(batch=1)
    with torch.no_grad():
        condition = {"text_embeds": torch.zeros(1, 32), "time_ids": torch.zeros(1, 6)}
        unet(inputs["x"], inputs["timesteps"], inputs["context"], added_cond_kwargs=condition)
    declared = [name for name, _ in unet.named_modules() if name in called]
    assert declared != called
    assert sorted(declared, key=plots.network_order) == called


def test_layers_that_cannot_be_read_are_no_plot(tmp_path):
    sweep = read_sweep(write_job(tmp_path / "run"))
    layers = sweep.directory / "layers.csv"
    for bad in (b"\xff\xfe\x00", b"name,role\na,b\n", b"name,role,output_error\na,b,c\n"):
        layers.write_bytes(bad)
        assert plots.layers(sweep.jobs[0], "") is None
    layers.unlink()
    assert list(figures_of(sweep)) == ["trajectory"]


def test_plots_are_the_same_bytes_every_time(tmp_path):
    """And a page's drawing too; without anything but the resolution beside the pixels."""
    sweep = read_sweep(write_job(tmp_path / "run"))

    def files() -> dict:
        drawn = figures_of(sweep)
        plots.write_plots(drawn, sweep.directory)
        pngs = {path.stem: path.read_bytes() for path in sweep.directory.glob("*.png")}
        return pngs | {"svg": drawing.svg(drawn["layers"], "layers")}

    first = files()
    assert first.keys() == {"trajectory", "layers", "svg"} and files() == first
    with Image.open(sweep.directory / "layers.png") as image:
        assert image.width > 1500 and set(image.info) == {"dpi"}


def test_svgs_share_a_page(figures):
    """Ids are unique over all of them and every reference resolves; colours are the page's; nothing is loaded."""
    drawings = {name: drawing.svg(figure, name) for name, figure in figures.items()}
    assert list(drawings) == ["pareto_latency", "pareto_size", "trajectory", "layers"]
    page = "".join(drawings.values())
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and ids
    assert {*re.findall(r'href="#([^"]+)"', page), *re.findall(r"url\(#([^)]+)\)", page)} <= set(ids)
    assert not re.findall(r"#[0-9a-f]{6}\b", page)
    assert set(re.findall(r"var\(--plot-([^)]+)\)", page)) <= set(drawing.PALETTE.values())
    assert not re.search(r"http|<style|<script|metadata|DejaVu", page)
    for name, text in drawings.items():
        assert text.startswith('<svg viewBox="0 0 ') and f'id="{name}-axes_1"' in text


HOSTILE = ["</svg><script>alert(1)</script>", "$\\frac{$ {{7*7}}", "\x1b\x00\u202e\ud800 日本語", 'id="a" #5f6368']


def test_hostile_names_are_only_drawn(tmp_path):
    for number, name in enumerate(HOSTILE):
        folder, legal = write_job(tmp_path / str(number), 34 + number, 1.3), name.replace("\ud800", "")
        with (folder / "layers.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["name", "role", "output_error"], [legal, legal[:7], "0.1"]])
    figures = figures_of(write_plan(tmp_path, {str(number): {name: name} for number, name in enumerate(HOSTILE)}))
    with drawing.style():
        figures["layers"].savefig(io.BytesIO(), format="png")  # its font lacks letters: no reason to warn
    drawn = "".join(drawing.svg(figure, name) for name, figure in figures.items())
    assert "<script" not in drawn and "&lt;script&gt;" in drawn
    assert "{{7*7}}" in drawn and 'id="a" #5f6368' in drawn
    assert drawn.isprintable() or set(re.findall(r"[^ -~\xa0-\uffff]", drawn)) == {"\n"}


def test_a_sweep_of_twenty_is_named_where_it_matters(tmp_path):
    for number in range(20):
        write_job(tmp_path / str(number), 44 - number / 2, 1.1 + number / 50 * (-1) ** number, prompts=[])
    sweep = write_plan(tmp_path, {str(number): {"alpha": number} for number in range(20)})
    table = sweep.rows
    labels = {str(number): str(number) for number in range(20)}
    figure = plots.pareto(table, labels, plots.TIME, Recommendation("4", "", best="4"))
    assert set(words(figure)) == {row["job"] for row in plots.front(table, plots.TIME)} | {"4"}
    assert len(words(plots.trajectory(sweep.jobs, labels, "4"))) == 3  # the recommended one, the best, the worst


def test_the_plot_has_its_size_and_the_colours_of_the_roles_that_there_are(tmp_path):
    """One layer costs nothing, on an axis that is logarithmic."""
    rows = [
        {"rank": rank, "name": f"{rank}", "role": role, "network_error": 0.5 / rank * (rank < 30), "kept": rank < 4}
        for rank, role in enumerate(10 * ["conv", "ffn", "linear"], 1)
    ]
    path = tmp_path / "plots" / "sensitivity.png"
    plots.plot_sensitivity(rows, path)
    assert [file.name for file in path.parent.iterdir()] == ["sensitivity.png"]
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", (800, 600))
        bars = np.asarray(image.convert("RGB"))[:, :600]  # without the legend at the right
    for role, colour in drawing.COLOURS.items():
        painted = (abs(bars - np.multiply(to_rgb(colour), 255)) < 2).all(axis=-1).sum()
        assert (painted > 500) == (role != "qkv"), role
