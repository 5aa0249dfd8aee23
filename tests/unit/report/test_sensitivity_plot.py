import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from sd_quant.report.sensitivity_plot import COLOURS, plot_sensitivity

ROLES = ["conv", "ffn", "qkv", "linear"]
ROWS = [
    {"rank": rank, "name": f"layer{rank}", "role": ROLES[rank % 4], "network_error": 0.5 / rank, "kept": rank <= 3}
    for rank in range(1, 41)
]
CURVE = [{"kept": kept, "relative_error": 0.3 / (1 + kept), "predicted": 0.25 / (1 + kept)} for kept in (0, 1, 2, 3, 4)]


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test_the_plot_has_its_size_and_the_colours_of_the_roles_that_there_are(tmp_path):
    path = tmp_path / "plots" / "sensitivity.png"
    plot_sensitivity([row for row in ROWS if row["role"] != "qkv"], CURVE, path)
    assert [file.name for file in path.parent.iterdir()] == ["sensitivity.png"]
    image = pixels(path)
    assert image.shape == (600, 1600, 3)
    bars = image[:, :700]  # the left plot, without its legend at the right
    for role, colour in COLOURS.items():
        painted = (abs(bars - np.multiply(to_rgb(colour), 255)) < 2).all(axis=-1).sum()
        assert (painted > 500) == (role != "qkv"), role


def test_more_layers_kept_move_the_line_and_one_that_costs_nothing_has_no_bar_but_a_place(tmp_path):
    """The axis is logarithmic: a zero must not warn or fail."""
    free = ROWS[-1] | {"rank": 41, "network_error": 0.0}
    for kept in (3, 20):
        rows = [row | {"kept": row["rank"] <= kept} for row in (*ROWS, free)]
        plot_sensitivity(rows, CURVE, tmp_path / f"{kept}.png")
    few, many = pixels(tmp_path / "3.png"), pixels(tmp_path / "20.png")
    assert (few[:, :800] != many[:, :800]).any()
    assert np.array_equal(few[:, 800:], many[:, 800:])


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "sensitivity.png"
    path.write_bytes(b"an earlier plot")

    def half(self, target, **_) -> None:
        target.write_bytes(b"\x89PNG half of it")
        raise RuntimeError("the renderer broke")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(RuntimeError, match="the renderer broke"):
        plot_sensitivity(ROWS, CURVE, path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"an earlier plot"
