"""Blind test: ``votes.html`` shows pairs of images without their recipes, and ``votes_key.json`` has the recipes.

Nothing in the page identifies an image: ids are random, pixels are encoded again without loss, and random bytes behind
the encoded images make the two of a pair equally long. Comparing pixels with the folder's images would reveal them. A
page is drawn once, by a seed stored in the key, and kept while the images stay the same, so that rebuilding the report
does not invalidate votes. Alternative not taken: JPEG, whose loss is as visible as the differences that are judged.
"""

import base64
import hashlib
import io
import random
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from jinja2.utils import htmlsafe_json_dumps
from PIL import Image
from typing_extensions import TypedDict

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import digest, read_regular, refusing, write_json, write_text
from sd_quant.knobs import near
from sd_quant.report.gallery import NOT_AN_IMAGE
from sd_quant.report.page import model_name, rendered
from sd_quant.report.record import VARIANTS, read_object
from sd_quant.report.summary import Job, Sweep
from sd_quant.text import printable

PAGE, KEY = "votes.html", "votes_key.json"
MOST_PAIRS = 64  # a quarter of an hour
MOST_BYTES = 100e6  # of embedded images: about 30 pairs of 1024 x 1024
MOST_PIXELS = 2**25
CATCH_SHARE, FEWEST_CATCHES = 0.08, 2
TAIL = 16  # random bytes behind every image, so that one that is shown twice is not written twice
BLOCKS = 16  # along the longer edge of a damaged image
VOTE, EQUAL, DAMAGED = "vote", "equal", "damaged"
FULL_PRECISION = "full precision"
RULE = (
    "A few pairs test the voter: the same image twice, or an image beside itself in coarse blocks. A voter is not "
    "counted who does not choose the image without blocks in each of these pairs, or who answers fewer than half of "
    "the equal pairs with “cannot tell”."
)


class Compared(TypedDict):
    a: str
    b: str


class Shown(TypedDict):
    """A pair of images on the page, as stored in the key."""

    kind: str  # VOTE, EQUAL or DAMAGED
    comparison: int | None  # its place in ``comparisons``; None of a pair that tests the voter
    prompt: str
    index: int  # of the prompt
    a: str  # ids of the images of ``a`` and ``b``; of a damaged pair ``a`` is the whole one
    b: str


class Key(TypedDict):
    """Content of ``votes_key.json``: the images and recipes behind the ids of the page."""

    schema_version: int
    page: str  # the digest of its pairs
    seed: int
    against: str | None  # the job that the others are compared with in place of full precision
    most_pairs: int
    rule: str
    comparisons: list[Compared]  # by the recipes' names
    pairs: dict[str, Shown]


def write_votes(sweep: Sweep) -> Path | None:
    """Write the page and its key unless a page of the same images exists; return its path, or None without pairs.

    The number of pairs and the comparison of an earlier page are kept. Raises ResourceError when the disk is full.
    """
    try:
        earlier = read_key(sweep.directory)
    except (ArtifactError, ConfigError):
        return draw_votes(sweep)
    against = next((job for job in sweep.done if job.name == earlier["against"]), None)
    page, *_ = draw(sweep, against, earlier["most_pairs"], earlier["seed"])
    if page == earlier["page"] and (sweep.directory / PAGE).is_file():
        return sweep.directory / PAGE
    return draw_votes(sweep, against, earlier["most_pairs"])


def draw_votes(sweep: Sweep, against: Job | None = None, most_pairs: int = MOST_PAIRS) -> Path | None:
    """Draw new pairs and write the page and its key, keeping earlier keys; return its path, or None without pairs.

    Pairs compare each recipe with full precision, or with the job ``against``. Raises ResourceError for a full disk.
    """
    page, comparisons, drawn = draw(sweep, against, most_pairs, seed := secrets.randbits(63))
    data, pairs = embedded(drawn, seed)
    if not any(pair["kind"] == VOTE for pair in pairs.values()):
        return None
    text = rendered(
        Path(__file__).with_name("votes.html"),
        title=model_name(sweep),
        rule=RULE,
        count=len(data),
        left_out=len(drawn) - len(data),
        data=htmlsafe_json_dumps({"page": page, "pairs": data}),
    )
    key: Key = {
        "schema_version": 1, "page": page, "seed": seed, "against": against.name if against else None,
        "most_pairs": most_pairs, "rule": RULE, "comparisons": comparisons, "pairs": pairs,
    }  # fmt: skip
    path = sweep.directory / KEY
    with suppress(ArtifactError, ConfigError):  # there is none, or a damaged one
        path.rename(earlier_key(sweep.directory, read_key(sweep.directory)["page"]))
    write_text(sweep.directory / PAGE, text)
    write_json(path, key)
    return sweep.directory / PAGE


def earlier_key(folder: Path, page: str) -> Path:
    return folder / f"votes_key_{page[:8]}.json"


def read_key(folder: Path) -> Key:
    """Read the key of the folder's page. Raises ConfigError if the key is missing, ArtifactError if it is damaged."""
    path = folder / KEY
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no {KEY}, expected the folder of a report with a {PAGE}; make them: sd-quant report {folder}"
        )
    return read_key_file(path)


def read_key_file(path: Path) -> Key:
    """Read a ``votes_key.json``. Raises ArtifactError if the file is damaged or no such key."""
    from pydantic import TypeAdapter

    advice = "take it from the folder in which the page was made"
    with refusing(f"{path} is damaged", OSError, ValueError, advice=advice):  # pydantic's are ValueErrors
        key = TypeAdapter(Key).validate_python(read_object(path), strict=True)
        if not key["page"].isalnum():  # it becomes part of a file's name
            raise ValueError(f"its page is {key['page']}")
        for name, pair in key["pairs"].items():
            known = pair["kind"] != VOTE or pair["comparison"] in range(len(key["comparisons"]))
            if pair["kind"] not in (VOTE, EQUAL, DAMAGED) or not known:
                raise ValueError(f"pair {name} is of no comparison")
    return key


# Which pairs


@dataclass(frozen=True)
class Pair:
    """Two image files of one prompt; ``b`` equals ``a`` in a pair that tests the voter."""

    kind: str
    comparison: int | None
    prompt: str
    index: int
    a: Path
    b: Path


def named(against: str, sweep: Sweep) -> Job:
    """Return the finished job with this folder or recipe name. Raises ConfigError for an unknown name."""
    for job in sweep.done:
        if against in (job.name, sweep.recipes[job.name]):
            return job
    known = [sweep.recipes[job.name] for job in sweep.done]
    raise ConfigError(f"against is {against}, which is no recipe of this report; {near(against, known)}")


def draw(sweep: Sweep, against: Job | None, most: int, seed: int) -> tuple[str, list[Compared], list[Pair]]:
    """Draw a page: digest, comparisons and pairs, up to ``most`` in all; pairs that test the voter come first."""
    chance, names = random.Random(seed), sweep.recipes
    others = [job for job in sweep.done if job is not against][:most]
    first = names[against.name] if against else FULL_PRECISION
    found: dict[Path, tuple[str, tuple[int, int]]] = {}
    columns = []
    for number, job in enumerate(others):
        possible = list(pairs_of(number, job, against))
        chance.shuffle(possible)
        usable = (pair for pair in possible if is_usable(pair, found))
        columns.append([pair for pair, _ in zip(usable, range(most // len(others)), strict=False)])
    pairs = [pair for pair in chain.from_iterable(zip_longest(*columns)) if pair is not None]
    catches = []
    if pairs:
        count = max(FEWEST_CATCHES, round(CATCH_SHARE * len(pairs)))
        for number, pair in enumerate(chance.choices(pairs, k=count)):
            kind = EQUAL if number % 2 else DAMAGED
            catches.append(Pair(kind, None, pair.prompt, pair.index, pair.a, pair.a))
    content = [
        part for each in pairs for part in (str(each.comparison), each.prompt, found[each.a][0], found[each.b][0])
    ]
    comparisons: list[Compared] = [{"a": printable(first), "b": printable(names[job.name])} for job in others]
    page = digest(str(seed), str(most), *(name for each in comparisons for name in (each["a"], each["b"])), *content)
    return page, comparisons, catches + pairs


def pairs_of(number: int, job: Job, against: Job | None) -> Iterator[Pair]:
    """Yield the possible pairs of a comparison, one for each prompt in common; their files may be missing."""
    first, variant = (job, VARIANTS[0]) if against is None else (against, VARIANTS[1])
    prompts, theirs = ([str(prompt) for prompt in each.record["prompts"]] for each in (job, first))
    for index, (prompt, other) in enumerate(zip(prompts, theirs, strict=False)):
        if prompt == other:
            a, b = first.directory / "images" / variant, job.directory / "images" / VARIANTS[1]
            yield Pair(VOTE, number, prompt, index, a / f"{index:04d}.png", b / f"{index:04d}.png")


def is_usable(pair: Pair, found: dict[Path, tuple[str, tuple[int, int]]]) -> bool:
    """Check whether both files are images of equal size. Adds their digests and sizes to ``found``."""
    for path in (pair.a, pair.b):
        if path not in found:
            try:
                content = read_regular(path, MOST_BYTES)
                with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
                    size = image.size
            except NOT_AN_IMAGE:
                return False
            if size[0] * size[1] > MOST_PIXELS:
                return False
            found[path] = hashlib.sha256(content).hexdigest(), size
    return found[pair.a][1] == found[pair.b][1]


# The images


def embedded(pairs: Sequence[Pair], seed: int) -> tuple[list[dict], dict[str, Shown]]:
    """Encode the pairs up to MOST_BYTES, damaged ones skipped: in random order for the page, and the key's by id."""
    chance = random.Random(f"{seed} ids")
    shown: dict[str, Shown] = {}
    data: list[dict] = []
    total = 0
    for pair in pairs:
        try:
            a = pixels_of(pair.a)
            b = coarse(a) if pair.kind == DAMAGED else a if pair.kind == EQUAL else pixels_of(pair.b)
        except NOT_AN_IMAGE:
            continue
        files = [without_loss(each) for each in (a, b)]
        length = max(map(len, files)) + TAIL
        total += 2 * length * 4 // 3
        if total > MOST_BYTES:
            break
        name, *ids = (f"{chance.getrandbits(64):016x}" for _ in range(3))
        padded = [file + chance.randbytes(length - len(file)) for file in files]  # decoders do not read behind the end
        images = [
            {"id": each, "source": f"data:image/webp;base64,{base64.b64encode(file).decode()}"}
            for each, file in zip(ids, padded, strict=True)
        ]
        shown[name] = {
            "kind": pair.kind, "comparison": pair.comparison, "prompt": printable(pair.prompt),
            "index": pair.index, "a": ids[0], "b": ids[1],
        }  # fmt: skip
        images.sort(key=lambda image: image["id"])
        data.append(
            {"id": name, "text": printable(pair.prompt), "width": a.width, "height": a.height, "images": images}
        )
    return sorted(data, key=lambda pair: pair["id"]), shown


def pixels_of(path: Path) -> Image.Image:
    """Read a PNG as RGB without its metadata. Raises an exception of ``NOT_AN_IMAGE`` for a damaged file."""
    with Image.open(io.BytesIO(read_regular(path, MOST_BYTES)), formats=["PNG"]) as image:
        pixels = image.convert("RGB")
    pixels.info.clear()  # a colour profile or a comment would be written again
    return pixels


def coarse(image: Image.Image) -> Image.Image:
    """Pixelate an image into coarse blocks, as the visibly worse image of a pair that tests the voter."""
    block = max(2, max(image.size) // BLOCKS)
    small = image.resize([max(1, edge // block) for edge in image.size], Image.Resampling.BOX)
    return small.resize(image.size, Image.Resampling.NEAREST)


def without_loss(image: Image.Image) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, "WEBP", lossless=True, quality=0)
    return encoded.getvalue()
