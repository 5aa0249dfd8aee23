"""Images of the report's page: pairs of full precision and quantized, embedded as data, worst prompts first."""

import base64
import hashlib
import io
import math
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from sd_quant.files import read_regular
from sd_quant.metrics import SCORES, Against, Score, scores_against
from sd_quant.report.readings import are_identical, degenerate_of, score_of
from sd_quant.report.record import VARIANTS
from sd_quant.report.summary import Job, Sweep
from sd_quant.report.table import DASH
from sd_quant.text import printable

SMALL_EDGE, LONGEST_EDGE = 256, 768  # images up to the first are kept, larger ones are reduced to the second
WEBP_QUALITY = 90
MOST_PROMPTS = 24
MOST_BYTES = 40e6  # of images; a browser opens a page with more of them slowly
NOT_AN_IMAGE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # that PIL raises for a damaged file


def gallery(sweep: Sweep, badges: Mapping[str | None, str], best: str | None) -> tuple[dict, list[str]]:
    """Return data for the page's script: images, recipes, prompts (lowest PSNR first); and notes on images left out.

    Each prompt has two indices into ``images`` for each recipe. ``badges``: labels by job. Job ``best`` is shown first.
    """
    done, names = sweep.done, sweep.recipes
    jobs_of: dict[tuple[int, str], list[tuple[int, Job]]] = {}  # a prompt's place and text -> recipes that drew it
    for recipe, job in enumerate(done):
        for index, prompt in enumerate(job.record["prompts"]):
            jobs_of.setdefault((index, str(prompt)), []).append((recipe, job))

    def closeness(item: tuple[tuple[int, str], list[tuple[int, Job]]]) -> float:
        values = [score(job, SCORES["psnr"], item[0][0]) for _, job in item[1]]
        return min((value for value in values if value is not None), default=math.inf)

    embedded: dict[str, dict] = {}  # by the hash of its file, as full precision's image is the same for all recipes

    def embed(path: Path) -> int | None:
        try:
            content = read_regular(path, MOST_BYTES)
            digest = hashlib.sha256(content).hexdigest()
            if digest not in embedded:
                embedded[digest] = for_page(content)
            return [*embedded].index(digest)
        except NOT_AN_IMAGE:
            return None

    prompts: list[dict] = []
    absent = dict.fromkeys((job.name for job in done), 0)
    for (index, prompt), jobs in sorted(jobs_of.items(), key=closeness):
        if len(prompts) == MOST_PROMPTS or sum(len(image["source"]) for image in embedded.values()) > MOST_BYTES:
            break
        pairs = []
        for recipe, job in jobs:
            full, quantized = (embed(job.directory / "images" / variant / f"{index:04d}.png") for variant in VARIANTS)
            absent[job.name] += full is None or quantized is None
            if full is not None or quantized is not None:
                measured = {"psnr": score(job, SCORES["psnr"], index), "scores": scores(job, index)}
                pairs.append({"recipe": recipe, "full": full, "quantized": quantized, **measured})
        if pairs:
            prompts.append({"text": printable(prompt), "pairs": pairs})

    notes = [] if prompts else ["There are no images to show."]
    if prompts and len(prompts) < len(jobs_of):
        worst = f"The {len(prompts)} worst of {len(jobs_of)} prompts are here"
        notes.append(f"{worst}; the others are in the jobs' folders.")
    if any(image["reduced"] for image in embedded.values()):
        notes.append(f"Images are compressed and at most {LONGEST_EDGE} pixels long here; the jobs keep the originals.")
    for name, count in absent.items():
        pairs_are = "pair of images is" if count == 1 else "pairs of images are"
        notes += [f"{names[name]}: {count} {pairs_are} missing or damaged."] if count else []
    recipes = [
        {"name": printable(names[job.name]), "badge": badges.get(job.name), "first": job.name == best} for job in done
    ]
    return {"images": [*embedded.values()], "recipes": recipes, "prompts": prompts}, notes


def for_page(content: bytes) -> dict:
    """Return a PNG file's image, reduced if large, as a data URL. Raises one of NOT_AN_IMAGE for a damaged file."""
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        pixels = image.convert("RGB")
    encoded, reduced = io.BytesIO(), max(pixels.size) > SMALL_EDGE
    if reduced:
        pixels.thumbnail((LONGEST_EDGE, LONGEST_EDGE), Image.Resampling.LANCZOS)
        pixels.save(encoded, "WEBP", quality=WEBP_QUALITY)
    else:
        pixels.save(encoded, "PNG", optimize=True)
    source = f"data:image/{'webp' if reduced else 'png'};base64,{base64.b64encode(encoded.getvalue()).decode()}"
    return {"source": source, "width": pixels.width, "height": pixels.height, "reduced": reduced}


def score(job: Job, measure: Score, index: int) -> float | None:
    """Return the score ``measure`` of one image; None where it is missing or infinite (PSNR of identical images)."""
    values = score_of(job.record["fidelity"], measure).values
    return values[index] if index < len(values) else None


def scores(job: Job, index: int) -> str:
    """Format the scores of one image as the text below the image."""
    of_images = scores_against(Against.IMAGES)
    values = {each.key: score(job, each, index) for each in of_images}
    if are_identical(values["psnr"], values["ssim"]):
        return "identical"
    texts = {each: DASH if (value := values[each.key]) is None else each.text(value) for each in of_images}
    broken = [words for place, words in degenerate_of(job.record).items() if place == index]
    return " · ".join([*(f"{each.title} {text}" for each, text in texts.items()), *broken])
