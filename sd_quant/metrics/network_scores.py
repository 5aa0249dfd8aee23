"""Scores of images one by one by a network that the user has: batches, and weights with their authors' names.

A network is opened when its score is computed and let go with the last batch: the larger ones take 4 GB.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sd_quant.devices import full_precision
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.files import refusing
from sd_quant.files.checks import check_tensors
from sd_quant.files.folders import read_json
from sd_quant.files.tensors import Readable
from sd_quant.metrics import Score
from sd_quant.metrics.images import Images
from sd_quant.models.empty import Read
from sd_quant.names.nemo import Location
from sd_quant.progress import progress

BATCH = 16
DAMAGED = "the network gave NaN or infinity; its weights are damaged"
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the colours that CLIP and those who started from it were shown
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class Opened(NamedTuple):
    network: nn.Module
    score: Callable[[Sequence[np.ndarray], Sequence[Any]], Tensor]  # images [H, W, 3] and what is beside each -> [N]
    facts: Mapping[str, Any]  # for the record


Opener = Callable[[], Opened]


def score_images(score: Score, images: Images, beside: Sequence[Any], weights: Path) -> dict:
    """The scores of uint8 images as ``{value, reason, values, images}`` and the facts of the network of ``weights``.

    ``beside`` has for each image what it is scored with, its prompt or another image. ``value`` is the mean, at least
    the score's smallest number. Where the network cannot be opened or computed, or a number is not finite, it
    is None and ``reason`` says why.
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
    """Raise ConfigError unless the folder has one file of each of ``files``."""
    for names in files:
        if not any((weights / name).is_file() for name in names):
            raise ConfigError(
                f"the folder {weights} has no {' or '.join(names)}, expected for {score.title}; name {score.weights}"
            )


def config_of(weights: Path, score: Score, *kinds: str) -> dict:
    """The folder's config.json. Raises ArtifactError unless it is of a model of one of these ``kinds``."""
    config = read_json(weights, "config.json")
    if (kind := config.get("model_type")) not in kinds:
        raise ArtifactError(
            f"{weights} holds a model of type {kind}, expected {' or '.join(kinds)}, for {score.title}; name "
            f"{score.weights}"
        )
    return config


def reader_of(
    network: nn.Module,
    path: Path,
    tensors: Mapping[str, Readable],
    places: Mapping[str, Location],
    wanted: str,
    unused: Collection[str] = (),
) -> Read:
    """A function that reads a parameter of ``network`` from the tensor of ``places``. Reads none itself.

    Raises ArtifactError, with what is ``wanted``, unless ``tensors`` of ``path`` have the network's shapes.
    """
    shapes = {
        places[name].key: places[name].layout.shape(tuple(each.shape)) for name, each in network.named_parameters()
    }
    check_tensors(path, tensors, shapes, unused, f"of {type(network).__name__}", f"name {wanted}")
    return lambda name: places[name].layout.parameter(tensors[places[name].key].read())


def normalized(pixels: Tensor) -> Tensor:
    """Pixels [3, H, W] from 0 to 1 as CLIP takes them."""
    mean, std = (torch.tensor(each)[:, None, None] for each in (CLIP_MEAN, CLIP_STD))
    return (pixels - mean) / std
