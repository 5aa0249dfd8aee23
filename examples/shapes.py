"""Draws the images of conf/model/prompts/shapes, and the tables beside them: calls of a pipeline that takes an image.

    python examples/shapes.py conf/model/prompts

Each is a shape of 64 x 64 pixels on a plain ground; ours, of the project's licence.
"""

import sys
from itertools import product
from pathlib import Path

from PIL import Image, ImageDraw

SHAPES = ("disc", "square", "triangle")
COLOURS = {"red": "#d03030", "blue": "#3050c0", "green": "#30a050", "yellow": "#e0c030"}
EDITS = ("make it {}", "put it on a table of {} wood", "draw it as a {} icon", "a {} sky behind it")


def draw(shape: str, colour: str, ground: str) -> Image.Image:
    image = Image.new("RGB", (64, 64), ground)
    pen, box = ImageDraw.Draw(image), (14, 18, 46, 50)
    if shape == "disc":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(14, 50), (46, 50), (30, 18)], fill=colour)
    return image


def main(folder: Path) -> None:
    (folder / "shapes").mkdir(exist_ok=True)
    calls = []
    for shape, (name, colour) in zip(SHAPES * 2, list(COLOURS.items()) * 2, strict=False):
        draw(shape, colour, "#f0f0f0").save(folder / "shapes" / f"{name}_{shape}.png", optimize=True)
        calls += [f"{edit.format(other)},shapes/{name}_{shape}.png" for edit, other in product(EDITS, COLOURS)]
    for table, rows in {"shapes.csv": calls[::5][:16], "shapes_evaluation.csv": calls[3::23][:4]}.items():
        (folder / table).write_text("\n".join(["prompt,image", *rows]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
