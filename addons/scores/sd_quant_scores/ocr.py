"""OCR score: how well the images show the texts that prompts ask for in quotation marks.

The similarity of a requested text to a recognized text is 1 - Levenshtein(a, b) / max(len(a), len(b)), the "1-N.E.D."
of ICDAR 2019's robust reading (Chng et al., RRC on Arbitrary-Shaped Text) and the NED of AnyText (Tuo et al., ICLR
2024), which also reports the share of exact texts. Case and spaces are ignored: signs are in capitals, and OCR loses
spaces. An image shows more words than requested, on several lines, so a requested text is compared with each run of
consecutive words in reading order, and the best similarity counts.

OCR is by RapidOCR: PaddleOCR's PP-OCR networks in ONNX Runtime (Apache-2.0), which are inside its wheel, so nothing is
downloaded. OCR errs too, so compare a value with full precision's. Alternative not taken: Tesseract, a separate program
that reads scans, not scenes.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from statistics import fmean

import numpy as np

from sd_quant.devices import threads
from sd_quant.errors import ResourceError
from sd_quant.metrics.images import Images
from sd_quant.progress import progress

# A single mark opens behind no letter and closes before none, which leaves out apostrophes: dog's, Don't, kids'
QUOTED = re.compile(
    r'(?<!\w)"([^"]*)"|[“„]([^“”„]+)[“”]|«([^«»]+)»|‘([^‘]+?)’(?!\w)'
    r"|(?<![\w'])'(?=\S)([^\"]+?)(?<=\S)'(?!\w)"
)
NO_WORDS = "no prompt asks for words in quotes"


def ocr(images: Images, prompts: Sequence[str]) -> dict:
    """Return ``{value, reason, values, exact, texts}``: similarity of N images' words to those in N prompts' quotes.

    Images are uint8 [N, H, W, 3], of any sizes. ``values`` has each image's mean similarity, 0 to 1, or None without a
    requested text; ``value`` is their mean, ``texts`` the number of requested texts, ``exact`` the share of these read
    exactly. Without requested texts or without RapidOCR ``value`` is None with a ``reason``.
    """
    asked = list(map(asked_texts, prompts))
    entry = {"value": None, "reason": None, "values": [None] * len(asked), "exact": None, "texts": sum(map(len, asked))}
    if not entry["texts"]:
        return entry | {"reason": NO_WORDS}
    try:
        read = reader()
    except ResourceError as error:
        return entry | {"reason": str(error)}
    found: list[list[float]] = []
    with progress(len(asked), "words in images") as advance:
        for image, texts in zip(images, asked, strict=True):
            words = read(image) if texts else []
            found.append([best_similarity(text, words) for text in texts])
            advance()
    values = [fmean(each) if each else None for each in found]
    every = [similarity for each in found for similarity in each]
    return entry | {
        "value": fmean(value for value in values if value is not None),
        "values": values,
        "exact": sum(similarity == 1 for similarity in every) / len(every),
    }


def asked_texts(prompt: str) -> list[str]:
    """Return the prompt's texts in straight or typographic quotation marks that have a letter or a digit."""
    texts = ["".join(filter(None, found)).strip() for found in QUOTED.findall(prompt)]
    return [text for text in texts if compared(text)]


def compared(text: str) -> str:
    """Normalize a text for comparison: NFKC, case folded, no spaces; empty if it has no letter or digit."""
    text = "".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text if any(letter.isalnum() for letter in text) else ""


def best_similarity(asked: str, words: Sequence[str]) -> float:
    """Return the best similarity of ``asked`` to a word or a run of ``words`` of at most twice its length, else 0."""
    text, pieces = compared(asked), [compared(word) for word in words]
    runs = {piece for piece in pieces}
    for start in range(len(pieces)):
        for run in accumulate(pieces[start:]):
            if len(run) > 2 * len(text):
                break
            runs.add(run)
    return max((similarity(text, run) for run in runs), default=0.0)


def similarity(a: str, b: str) -> float:
    """Compute 1 - Levenshtein(a, b) / max(len(a), len(b)): 1 for equal texts, 0 if every letter has to be replaced."""
    from torchmetrics.functional.text import edit_distance  # late: with all metrics of texts

    return 1 - edit_distance(a, b, reduction="sum").item() / max(len(a), len(b), 1)


@cache
def reader() -> Callable[[np.ndarray], list[str]]:
    """Return a function from uint8 [H, W, 3] to words in reading order. Raises ResourceError without RapidOCR."""
    try:
        from rapidocr import RapidOCR
    except ImportError as error:
        raise ResourceError(
            f"metrics.ocr needs the package rapidocr, which cannot be imported ({error}); install it with: "
            "pip install 'sd-quant[ocr]', or set metrics.ocr=false"
        ) from error
    runtime = "EngineConfig.onnxruntime"
    options = {"Global.log_level": "critical", f"{runtime}.intra_op_num_threads": threads()}
    read = RapidOCR(params=options | {f"{runtime}.inter_op_num_threads": 1})

    def words(image: np.ndarray) -> list[str]:
        lines = read(image[..., ::-1]).txts or ()  # it takes OpenCV's order of channels
        return [word for line in lines for word in line.split()]

    return words
