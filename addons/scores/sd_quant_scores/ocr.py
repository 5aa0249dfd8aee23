"""Words that prompts ask for in quotes, read back from the images.

The similarity of an asked text to a read one is 1 - Levenshtein(a, b) / max(len(a), len(b)), the "1-N.E.D." of ICDAR
2019's robust reading (Chng et al., RRC on Arbitrary-Shaped Text) and the NED of AnyText (Tuo et al., ICLR 2024), which
also has the share of texts that are read exactly. Case and spaces do not count: signs are in capitals, and readers lose
spaces. An image shows more words than are asked for, on several lines, so an asked text is compared with each run of
words in reading order, and the best one counts.

Images are read by RapidOCR, PaddleOCR's PP-OCR networks in ONNX Runtime (Apache-2.0), which are inside its wheel:
nothing is downloaded. It errs too, so a value tells something only beside full precision's. The road not taken is
Tesseract, which is a program of its own and reads scans, not scenes.
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
    """``{value, reason, values, exact, texts}``: similarity of N images' words to the words that N prompts ask for.

    Images are uint8 [N, H, W, 3], of any sizes. ``values`` are the mean similarities of each image's texts, 0 to 1, or
    None, ``value`` is their mean, ``exact`` the share of all ``texts`` that are read exactly. Without texts or reader
    ``value`` is None with a ``reason``.
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
    """The texts in quotation marks, straight or typographic, with a letter or a digit."""
    texts = ["".join(filter(None, found)).strip() for found in QUOTED.findall(prompt)]
    return [text for text in texts if compared(text)]


def compared(text: str) -> str:
    """A text without case, spaces and widths (NFKC), so that these make no difference; empty if it has no letter."""
    text = "".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text if any(letter.isalnum() for letter in text) else ""


def best_similarity(asked: str, words: Sequence[str]) -> float:
    """The similarity of ``asked`` to the nearest run of ``words``, of at most twice its length; 0 without words."""
    text, pieces = compared(asked), [compared(word) for word in words]
    runs = {piece for piece in pieces}
    for start in range(len(pieces)):
        for run in accumulate(pieces[start:]):
            if len(run) > 2 * len(text):
                break
            runs.add(run)
    return max((similarity(text, run) for run in runs), default=0.0)


def similarity(a: str, b: str) -> float:
    """1 - Levenshtein(a, b) / max(len(a), len(b)): 1 for equal texts, 0 for such with nothing in common."""
    from torchmetrics.functional.text import edit_distance  # late: with all metrics of texts

    return 1 - edit_distance(a, b, reduction="sum").item() / max(len(a), len(b), 1)


@cache
def reader() -> Callable[[np.ndarray], list[str]]:
    """Reads the words of an image uint8 [H, W, 3], in reading order. Raises ResourceError where it cannot be had."""
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
