import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from sd_quant.report.sensitivity_plot import COLOURS, plot_sensitivity

pytestmark = pytest.mark.commit

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
    """One layer costs nothing, on an axis that is logarithmic."""
    path, free = tmp_path / "plots" / "sensitivity.png", ROWS[0] | {"rank": 41, "network_error": 0.0, "kept": False}
    plot_sensitivity([row for row in (*ROWS, free) if row["role"] != "qkv"], CURVE, path)
    assert [file.name for file in path.parent.iterdir()] == ["sensitivity.png"]
    image = pixels(path)
    assert image.shape == (600, 1600, 3)
    bars = image[:, :700]  # the left plot, without its legend at the right
    for role, colour in COLOURS.items():
        painted = (abs(bars - np.multiply(to_rgb(colour), 255)) < 2).all(axis=-1).sum()
        assert (painted > 500) == (role != "qkv"), role
