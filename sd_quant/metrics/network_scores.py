"""Score single images, in batches, by a network whose weights the user provides, such as CLIP.

A network is in memory only while its score is computed, because large networks take 4 GB.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sd_quant.devices import full_precision
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.files import refusing
from sd_quant.files.folders import read_json
from sd_quant.metrics import Score
from sd_quant.metrics.images import Images
from sd_quant.progress import progress

BATCH = 16
DAMAGED = "the network gave NaN or infinity; its weights are damaged"


class Opened(NamedTuple):
    network: nn.Module
    score: Callable[[Sequence[np.ndarray], Sequence[Any]], Tensor]  # images [H, W, 3] and what is beside each -> [N]
    facts: Mapping[str, Any]  # for the record


Opener = Callable[[], Opened]


def score_images(score: Score, images: Images, beside: Sequence[Any], weights: Path) -> dict:
    """Score uint8 images by the network in ``weights``; return ``{value, reason, values, images}`` and facts about it.

    ``beside`` has what each image is compared with, its prompt or another image. ``value`` is the mean, clipped to the
    score's minimum, or None with a ``reason`` where the network fails or a value is not finite.
    """
    entry = {"value": None, "reason": None, "values": [None] * len(images), "images": len(images)}
    starts, values = range(0, len(images), BATCH), list[float]()
    try:
        opened = score.opener(weights)()
        with full_precision() as device, torch.inference_mode(), progress(len(starts), score.title) as advance:
            opened.network.to(device)
            for start in starts:
                batch = slice(start, start + BATCH)
                with refusing(f"{score.title} cannot be computed"):  # a folder's processor may be anybody's
                    values += opened.score(list(images[batch]), list(beside[batch])).flatten().tolist()
                advance()
    except SdQuantError as error:
        return entry | {"reason": str(error)}
    entry |= opened.facts
    known = [value if math.isfinite(value) else None for value in values]
    outcome = {"reason": DAMAGED} if None in known else {"value": max(score.least, fmean(values))}
    return entry | outcome | {"values": known}


def check_folder(weights: Path, score: Score, *files: Sequence[str]) -> None:
    """Raise ConfigError unless the folder has at least one file of every tuple of alternatives in ``files``."""
    for names in files:
        if not any((weights / name).is_file() for name in names):
            raise ConfigError(
                f"the folder {weights} has no {' or '.join(names)}, expected for {score.title}; name {score.weights}"
            )


def config_of(weights: Path, score: Score, *kinds: str) -> dict:
    """Read the folder's config.json. Raises ArtifactError unless its ``model_type`` is one of ``kinds``."""
    config = read_json(weights, "config.json")
    if (kind := config.get("model_type")) not in kinds:
        raise ArtifactError(
            f"{weights} holds a model of type {kind}, expected {' or '.join(kinds)}, for {score.title}; name "
            f"{score.weights}"
        )
    return config
