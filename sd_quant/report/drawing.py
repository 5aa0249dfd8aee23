"""Style of the plots, and their conversion to SVG for the page.

Each plot is drawn once, in the colours of ``PALETTE``. A PNG keeps these colours; in the page's SVG they become CSS
variables, so a plot is dark where the page is dark. Alternative not taken: a plotting library in the browser; a report
has to open from a mail, years later, and load nothing.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

from matplotlib import rc_context
from matplotlib.figure import Figure

COLOURS = {"conv": "#4c72b0", "ffn": "#dd8452", "qkv": "#55a868", "linear": "#8172b3"}  # by role
LINES = [*COLOURS.values(), "#c44e52", "#64b5cd"]
PAPER, INK, SOFT, FAINT, ACCENT = "#ffffff", "#202124", "#5f6368", "#dfe1e5", "#0f766e"
OTHER = "#b9bec5"  # a line among too many to tell apart
PALETTE = {  # colour -> the page's variable; all differ, as the colour is what becomes the variable
    PAPER: "paper", INK: "ink", SOFT: "soft", FAINT: "faint", ACCENT: "accent", OTHER: "other",
    **{colour: f"line-{number}" for number, colour in enumerate(LINES, 1)},
}  # fmt: skip
STYLE: dict[Any, Any] = {
    "axes.edgecolor": SOFT,
    "axes.facecolor": PAPER,
    "axes.labelcolor": SOFT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.facecolor": PAPER,
    "font.size": 10,
    "grid.color": FAINT,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "sd-quant",  # ids that are the same every time
    "text.color": INK,
    "text.parse_math": False,  # a name may have dollar signs
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}
WIDTH, HEIGHT = 5.6, 3.8  # inches: half of a page, or a telephone, on which text of 10 points can still be read


@contextmanager
def style() -> Iterator[None]:
    """Apply the plots' matplotlib settings within a ``with`` block; both drawing and saving need them."""
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box in the PNG; a browser has more fonts
        yield


def new_figure(height: float = HEIGHT) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def svg(figure: Figure, name: str) -> str:
    """Convert a figure to an ``<svg>`` element for the page: colours are CSS variables, ids begin with ``name``."""
    text = io.StringIO()
    with style():
        figure.savefig(text, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # the latter would apply to the whole page
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
        element.attrib = {key.rpartition("}")[2]: for_page(value, name) for key, value in element.attrib.items()}
        if "id" in element.attrib:
            element.attrib["id"] = f"{name}-{element.attrib['id']}"
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "style": "stroke-linejoin: round"}
    return ElementTree.tostring(root, encoding="unicode")


def for_page(value: str, name: str) -> str:
    """Adapt an SVG attribute's value to the page: CSS variables for colours, ``name-`` before ids, no font family."""
    value = re.sub(
        r"#[0-9a-f]{6}\b", lambda found: f"var(--plot-{PALETTE[found[0]]})" if found[0] in PALETTE else found[0], value
    )
    value = re.sub(r"^#|(?<=url\()#", f"#{name}-", value)
    return re.sub(r"(font:[^;]*?px) [^;]*|font-family:[^;]*;?", r"\1", value)
