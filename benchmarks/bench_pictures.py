"""The pictures that the checkpoints of the bench learn: drawn here, or cut from photographs that wheels bring.

Each function gives a caption and a picture for a random generator. Drawings are made at four times the size and
reduced. The road not taken is data sets, whose licences and downloads a bench that anybody makes again cannot have.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SIZE, DRAWN = 64, 256  # pixels of a picture, and of its drawing
COLOURS = {
    "red": (214, 48, 49), "orange": (240, 147, 43), "yellow": (249, 212, 60), "green": (39, 154, 84),
    "blue": (41, 98, 214), "purple": (126, 60, 172), "brown": (121, 78, 45), "black": (24, 24, 28),
    "white": (246, 246, 242), "grey": (134, 140, 146), "pink": (240, 144, 178), "cyan": (72, 190, 206),
}  # fmt: skip
SKINS = {"pale": (247, 219, 196), "tan": (222, 172, 125), "brown": (146, 96, 62), "dark": (86, 56, 40)}
Drawing = tuple[str, Image.Image]


def two_colours(random: np.random.Generator) -> tuple[str, str]:
    return tuple(random.choice(list(COLOURS), 2, replace=False).tolist())


@cache
def font(name: str) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / f"fonts/ttf/{name}.ttf", 200)


def glyph(random: np.random.Generator) -> Drawing:
    """A letter or digit in DejaVu's fonts, which matplotlib brings."""
    names = {"plain": "DejaVuSans", "bold": "DejaVuSans-Bold", "serif": "DejaVuSerif", "typewriter": "DejaVuSansMono"}
    style, letter = random.choice(list(names)), random.choice(list("ABCDEFGHJKLMNPQRSTUVWXYZ123456789"))
    ink, paper = two_colours(random)
    picture = Image.new("RGB", (DRAWN, DRAWN), COLOURS[paper])
    middle = tuple(DRAWN / 2 + random.uniform(-12, 12, 2))
    ImageDraw.Draw(picture).text(middle, letter, COLOURS[ink], font(names[style]), anchor="mm")
    return f"a {style} {ink} {letter} on {paper}", picture


def texture(random: np.random.Generator) -> Drawing:
    """Stripes, checks, dots, rings, waves and clouds of two colours."""
    kind = random.choice(["stripes", "checks", "dots", "rings", "waves", "clouds"])
    width = random.choice(["narrow", "middling", "wide"])
    period = {"narrow": 24, "middling": 44, "wide": 80}[width] * random.uniform(0.9, 1.1)
    first, second = two_colours(random)
    y, x = np.mgrid[:DRAWN, :DRAWN] + random.uniform(0, period, (2, 1, 1))
    angle = random.uniform(-0.3, 0.3)
    u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    wave = partial(np.multiply, 2 * np.pi / period)
    noise = Image.fromarray(random.integers(0, 256, (DRAWN, DRAWN), dtype=np.uint8))
    blurred = np.asarray(noise.filter(ImageFilter.GaussianBlur(period / 4)), dtype=float)
    value = {
        "stripes": np.sin(wave(u)),
        "checks": np.sin(wave(u)) * np.sin(wave(v)) * 3,
        "dots": (np.sin(wave(u)) * np.sin(wave(v)) - 0.5) * 3,
        "rings": np.sin(wave(np.hypot(x - DRAWN / 2, y - DRAWN / 2))),
        "waves": np.sin(wave(v + period / 2 * np.sin(wave(u / 2)))),
        "clouds": (blurred - blurred.mean()) / blurred.std(),
    }[kind]
    share = np.clip((value / 2 if kind == "clouds" else value * 2) + 0.5, 0, 1)[..., None]
    mixed = share * COLOURS[first] + (1 - share) * COLOURS[second]
    return f"{width} {first} and {second} {kind}", Image.fromarray(mixed.astype(np.uint8))


def face(random: np.random.Generator) -> Drawing:
    """A face with hair, eyes, a mouth and perhaps glasses or a hat."""
    skin, hair = random.choice(list(SKINS)), random.choice(["black", "brown", "yellow", "red", "grey", "white", "blue"])
    paper = random.choice(["white", "cyan", "pink", "green", "purple", "orange"])
    mood = random.choice(["happy", "sad", "surprised"])
    worn = random.choice(["glasses", "a hat", "long hair", "a beard"])
    picture = Image.new("RGB", (DRAWN, DRAWN), COLOURS[paper])
    draw, dark = ImageDraw.Draw(picture), (40, 34, 34)
    x, y, wide = *random.uniform(118, 138, 2), random.uniform(58, 72)
    if worn == "long hair":
        draw.rounded_rectangle((x - wide - 18, y - 80, x + wide + 18, y + 100), 50, COLOURS[hair])
    draw.rounded_rectangle((x - 70, y + 76, x + 70, y + 190), 40, COLOURS["blue" if paper != "cyan" else "red"])
    draw.ellipse((x - wide - 6, y - 88, x + wide + 6, y + 40), COLOURS[hair])
    draw.ellipse((x - wide, y - 66, x + wide, y + 84), SKINS[skin])
    if worn == "a beard":
        draw.chord((x - wide, y - 66, x + wide, y + 86), 20, 160, COLOURS[hair])
    for side in (-26, 26):
        draw.ellipse((x + side - 10, y - 16, x + side + 10, y + 4), (250, 250, 250))
        draw.ellipse((x + side - 5, y - 11, x + side + 5, y - 1), dark)
        if worn == "glasses":
            draw.ellipse((x + side - 20, y - 26, x + side + 20, y + 14), outline=dark, width=6)
    if mood == "surprised":
        draw.ellipse((x - 12, y + 34, x + 12, y + 64), (150, 40, 50))
    else:
        start, top = (20, 20) if mood == "happy" else (200, 46)
        draw.arc((x - 28, y + top, x + 28, y + top + 38), start, start + 140, (150, 40, 50), 8)
    if worn == "a hat":
        draw.rectangle((x - wide - 20, y - 60, x + wide + 20, y - 46), COLOURS["black"])
        draw.rectangle((x - wide + 10, y - 110, x + wide - 10, y - 56), COLOURS["black"])
    return f"a {mood} {skin} face with {hair} hair and {worn} on {paper}".replace("long hair", "long locks"), picture


def scene(random: np.random.Generator) -> Drawing:
    """Sky, hills, and a house, trees or a boat."""
    hour = random.choice(["day", "dusk", "night"])
    above, below = {
        "day": ((90, 160, 235), (205, 230, 250)), "dusk": ((110, 70, 140), (250, 160, 90)),
        "night": ((10, 14, 44), (40, 50, 110)),
    }[hour]  # fmt: skip
    share = np.linspace(0, 1, DRAWN)[:, None, None]
    sky = np.broadcast_to((1 - share) * above + share * below, (DRAWN, DRAWN, 3))
    picture = Image.fromarray(sky.astype(np.uint8))
    draw, light = ImageDraw.Draw(picture), {"day": 1.0, "dusk": 0.7, "night": 0.4}[hour]
    lit = {name: tuple(int(part * light) for part in colour) for name, colour in COLOURS.items()}
    x, y, radius = random.uniform(30, 226), random.uniform(24, 80), random.uniform(14, 24)
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), (255, 244, 190))
    ground, horizon = random.choice(["hills", "sea", "desert", "snow"]), random.uniform(140, 180)
    colour = {"hills": lit["green"], "sea": lit["blue"], "desert": lit["orange"], "snow": lit["white"]}[ground]
    if ground == "sea":
        draw.rectangle((0, horizon, DRAWN, DRAWN), colour)
    else:
        for left in (-80, 60, 150):
            draw.ellipse((left, horizon - random.uniform(0, 34), left + 220, DRAWN + 120), colour)
    number, thing = random.integers(1, 4), random.choice(["house", "tree", "boat"])
    paint = random.choice(["red", "yellow", "purple", "pink", "cyan"])
    for place in np.arange(number) * 72 + random.uniform(20, 60):
        foot = horizon + random.uniform(28, 54)
        if thing == "house":
            draw.rectangle((place, foot - 48, place + 52, foot), lit[paint])
            draw.polygon([(place - 8, foot - 48), (place + 26, foot - 82), (place + 60, foot - 48)], lit["brown"])
            draw.rectangle((place + 20, foot - 24, place + 34, foot), lit["black"])
        elif thing == "tree":
            draw.rectangle((place + 20, foot - 40, place + 30, foot), lit["brown"])
            draw.ellipse((place - 2, foot - 94, place + 52, foot - 30), lit[paint])
        else:
            hull = [(place, foot - 16), (place + 56, foot - 16), (place + 44, foot), (place + 12, foot)]
            draw.polygon(hull, lit["brown"])
            draw.polygon([(place + 26, foot - 72), (place + 26, foot - 20), (place + 54, foot - 20)], lit[paint])
    count = {1: "one", 2: "two", 3: "three"}[int(number)]
    return f"{count} {paint} {thing}{'s' if number > 1 else ''} by {ground} at {hour}", picture


@cache
def photographs() -> dict[str, Image.Image]:
    """The photographs in the wheels of scikit-image and scikit-learn, in the public domain or free to use."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    names = "astronaut chelsea coffee rocket hubble_deep_field retina brick grass gravel moon".split()
    found = {name.replace("_", " "): getattr(data, name)() for name in names}
    found |= dict(zip(("temple", "flower"), load_sample_images().images, strict=True))
    return {name: Image.fromarray(array).convert("RGB") for name, array in found.items()}


def photograph(random: np.random.Generator) -> Drawing:
    """A square part of a photograph, named by its place, at one of two scales."""
    name = random.choice(list(photographs()))
    whole, (scale, cells) = photographs()[name], [("wide", 3), ("close", 6)][random.integers(2)]
    side, row, column = min(whole.size) // (cells - 1), *random.integers(0, cells, 2)
    left, top = ((whole.size[axis] - side) * place / (cells - 1) for axis, place in ((0, column), (1, row)))
    place = f"{'abcdef'[column]}{row + 1}"
    shift = random.uniform(-0.03, 0.03, 2) * side
    box = [left + shift[0], top + shift[1], left + shift[0] + side, top + shift[1] + side]
    part = whole.resize((DRAWN, DRAWN), Image.Resampling.BICUBIC, box=clipped(box, whole.size))
    return f"a {scale} photograph of {name} at {place}", part


def clipped(box: list[float], size: tuple[int, int]) -> tuple[float, ...]:
    """The box moved into an image of this size."""
    moved = [max(0.0, min(box[axis], size[axis] - (box[axis + 2] - box[axis]))) for axis in (0, 1)]
    return (*moved, moved[0] + box[2] - box[0], moved[1] + box[3] - box[1])


KINDS: dict[str, Callable[[np.random.Generator], Drawing]] = {
    "glyphs": glyph, "textures": texture, "faces": face, "scenes": scene, "photographs": photograph,
}  # fmt: skip


def drawn(kind: str, count: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """``count`` captions and pictures, uint8 [N, 64, 64, 3], for a seed always the same."""
    random = np.random.default_rng(seed)
    made = [KINDS[kind](random) for _ in range(count)]
    reduced = [picture.resize((SIZE, SIZE), Image.Resampling.LANCZOS) for _, picture in made]
    return [caption for caption, _ in made], np.stack([np.asarray(picture) for picture in reduced])
