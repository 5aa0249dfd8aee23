"""DINOv2 distance (Oquab et al., 2023): 1 - cosine of the features of an image and of its full-precision counterpart.

The distance reacts to a changed composition and ignores grain; PSNR and LPIPS do the opposite.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sd_quant.errors import ArtifactError
from sd_quant.files import refusing
from sd_quant.metrics.network_scores import Opened, Opener, check_folder, config_of
from sd_quant_scores import DINO

MOST_LAYERS = 100  # dinov2-giant has 40; transformers makes a name for each, whatever their number
KINDS = ("dinov2", "dinov2_with_registers")  # ``model_type`` in config.json
FILES = (("config.json",), ("model.safetensors",), ("preprocessor_config.json",))


def dino_distance(weights: Path) -> Opener:
    """Return a loader of DINOv2 distance: 1 - cosine (0 to 2) of two images' pooled features (normalized class token).

    ``weights``: a folder of transformers' Dinov2Model with its image processor. Raises SdQuantError for another folder.
    """
    check_folder(weights, DINO, *FILES)
    layers = config_of(weights, DINO, *KINDS).get("num_hidden_layers", 0)
    if not isinstance(layers, int) or layers > MOST_LAYERS:
        raise ArtifactError(
            f"{weights} holds a DINOv2 with {layers} layers, expected at most {MOST_LAYERS}; name {DINO.weights}"
        )

    def opened() -> Opened:
        from transformers import AutoImageProcessor, AutoModel

        with refusing(f"{weights} cannot be loaded as a Dinov2Model", advice=f"name {DINO.weights}", folder=weights):
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

    return opened
