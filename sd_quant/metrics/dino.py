"""The distance of images from full precision's in the features of DINOv2 (Oquab et al., 2023): 1 - cosine.

It notices another composition and is blind to grain: PSNR and LPIPS are the other way round.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import refusing
from sd_quant.files.folders import read_json
from sd_quant.metrics import SCORES
from sd_quant.metrics.images import Images, check_rgb
from sd_quant.metrics.network_scores import Opened, score_images

MOST_LAYERS = 100  # dinov2-giant has 40; transformers makes a name for each, whatever their number
KINDS = ("dinov2", "dinov2_with_registers")  # ``model_type`` in config.json
FILES = ("config.json", "model.safetensors", "preprocessor_config.json")


def dino_distance(reference: Images, images: Images, weights: Path) -> dict:
    """1 - cosine, 0 to 2, of the pooled features of each of two uint8 [N, H, W, 3], as ``score_images`` returns it.

    ``weights``: a folder of transformers' Dinov2Model with its image processor. The pooled feature is the class token's
    behind the last norm. Raises ArtifactError as ``score_images`` does.
    """
    check_rgb(reference)

    def opened() -> Opened:
        from transformers import AutoImageProcessor, AutoModel

        check_dino(weights)
        advice = f"name {SCORES['dino_distance'].weights}"
        with refusing(f"{weights} cannot be loaded as a Dinov2Model", advice=advice, folder=weights):
            model = AutoModel.from_pretrained(weights, local_files_only=True, dtype=torch.float32).eval()
            processor = AutoImageProcessor.from_pretrained(weights, local_files_only=True)

        def features(batch: Sequence[np.ndarray]) -> Tensor:
            pixels = processor([torch.tensor(image).permute(2, 0, 1) for image in batch], return_tensors="pt")
            return model(pixels["pixel_values"].to(model.device)).pooler_output

        return Opened(
            model,
            lambda batch, others: 1 - F.cosine_similarity(features(batch), features(others)),
            {"weights": weights.name},
        )

    return score_images("DINOv2 distance", images, list(reference), opened)


def check_dino(weights: Path) -> None:
    """Raise SdQuantError unless the folder is complete and DINOv2's; reads no weights."""
    wanted = SCORES["dino_distance"].weights
    for name in FILES:
        if not (weights / name).is_file():
            raise ConfigError(f"there is no {name} in {weights}, expected in the folder of DINOv2; name {wanted}")
    config = read_json(weights, "config.json")
    kind, layers = config.get("model_type"), config.get("num_hidden_layers", 0)
    if kind not in KINDS or not isinstance(layers, int) or layers > MOST_LAYERS:
        raise ArtifactError(
            f"{weights} holds a model of type {kind} with {layers} layers, expected one of {', '.join(KINDS)} with at "
            f"most {MOST_LAYERS}; name {wanted}"
        )
