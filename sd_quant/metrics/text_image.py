"""CLIP score and FID, by networks whose weights the user provides or installs; nothing is downloaded.

The CLIP score measures whether images show what their prompts say (Hessel et al., EMNLP 2021; as in torchmetrics:
100 cos(image, prompt), averaged, at least 0). FID measures the distance of a set of images from photographs. Neither
measures quantization error; both allow comparison with published results.

FID models both sets of Inception's features as Gaussians, whose distance has a closed form (Dowson & Landau,
J. Multivariate Analysis 12, 1982; for images Heusel et al., GANs Trained by a Two Time-Scale Update Rule, 2017):

    ||mean - mean'||^2 + tr(C + C' - 2 (C^1/2 C' C^1/2)^1/2)
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from sd_quant.addons import at_work, loaded
from sd_quant.devices import full_precision
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.files import open_regular, refusing
from sd_quant.files.checks import bounded_modules
from sd_quant.metrics import SCORES, Score
from sd_quant.metrics.network_scores import DAMAGED, Opened, Opener, check_folder, config_of
from sd_quant.progress import progress
from sd_quant.text import counted, one_line

FEWEST_FOR_FID = 2049  # images: with fewer the covariance of Inception's 2048 features is singular
IMAGE_FORMATS = {".bmp": "BMP", ".jpeg": "JPEG", ".jpg": "JPEG", ".png": "PNG", ".webp": "WEBP"}  # Pillow's readers
CLIP_FILES = (  # one file of each line is required
    ("config.json",),
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    ("tokenizer.json", "vocab.json"),
    ("preprocessor_config.json", "processor_config.json"),
)


def clip_score(weights: Path) -> Opener:
    """Return a function that opens CLIP for the score; prompts are truncated to the network's length, as in MLPerf.

    ``weights`` is a folder of transformers' CLIPModel with its tokenizer and image processor; no weights are read yet.
    Raises SdQuantError for a folder that lacks files or holds another model.
    """
    clip_config(weights, SCORES["clip_score"])

    def opened() -> Opened:
        model, pixels, tokens = open_clip_folder(weights)
        vision = model.config.vision_config
        network = {"layers": vision.num_hidden_layers, "width": vision.hidden_size, "patch": vision.patch_size}
        score = lambda batch, texts: 100 * cosines(model, pixels(batch), tokens(texts))  # noqa: E731
        return Opened(model, score, {"network": network})

    return opened


def clip_config(weights: Path, score: Score) -> Any:
    """Read a folder's CLIPConfig, not its weights. Raises SdQuantError for missing files or another model."""
    from transformers import CLIPConfig

    check_folder(weights, score, *CLIP_FILES)
    config = config_of(weights, score, "clip")
    with refusing(f"{weights} has a config.json that is no CLIP's", advice=f"name {score.weights}"):
        return CLIPConfig.from_dict(config)


def fid(images: np.ndarray, references: Path) -> dict:
    """Compute FID of images uint8 [N, H, W, 3], N >= 2049: ``{value, reason, images, references, network}``.

    ``references`` is a folder of 2049 or more photographs, or an .npz with the ``mu`` [2048] and ``sigma`` [2048, 2048]
    of their features, as pytorch-fid writes it and MLPerf distributes it. ``value`` is None, with a ``reason``, for
    missing or damaged files and for too few images.
    """
    entry = {"value": None, "reason": None, "images": len(images), "references": references.name, "network": None}
    try:
        _check_number(len(images), "were made")
        check_references(references)
        with at_work("scores"):
            inception = loaded("scores", "inception", "FID")
            network, entry["network"] = inception.inception(), inception.NETWORK_NAME
        of_references = _reference_moments(references, network)
        of_images = moments(_features(network, len(images), lambda index: images[index]))
    except SdQuantError as error:
        return entry | {"reason": str(error)}
    if of_references[1].shape != of_images[1].shape:
        shapes = f"{list(of_references[1].shape)}, expected {list(of_images[1].shape)}"
        return entry | {"reason": f"{references} has a sigma of shape {shapes}; compute it with the same Inception"}
    distance = frechet_distance(*of_references, *of_images)
    return entry | ({"reason": DAMAGED} if distance is None else {"value": distance})


def check_inception() -> None:
    """Raise ResourceError unless the add-on package with Inception and its weights is installed; reads no weights."""
    loaded("scores", "inception", "metrics.fid_references").packaged_folder()


def check_references(references: Path) -> None:
    """Raise ConfigError unless ``references`` is an .npz file or a folder with enough images; opens no file."""
    if references.is_dir():
        _check_number(len(_image_files(references)), f"are in {references}")
    elif references.suffix.lower() != ".npz" or not references.is_file():
        raise ConfigError(f"{references} is neither a folder of images nor an .npz with mu and sigma; name one of them")


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean [D] and covariance [D, D], float64, of features [N, D] of any float type, N >= 2."""
    features = features.double()
    return features.mean(0), features.T.cov()


def frechet_distance(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float | None:
    """Return the squared Fréchet distance of two Gaussians, means [D], covariances [D, D], float64; None if not finite.

    The formula is above. Square roots by eigenvalues also exist for singular covariances. Alternative not taken: the
    root of C C' (Heusel et al.), which is complex or fails for singular ones, as with fewer images than features.
    """
    if not all(part.isfinite().all() for part in (mean, covariance, other_mean, other_covariance)):
        return None
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * _positive(values).sqrt() @ vectors.T
    common = _positive(torch.linalg.eigvalsh(root @ other_covariance @ root)).sqrt().sum()
    distance = (mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * common
    return max(0.0, distance.item())  # rounding puts equal sets a little below


def _positive(eigenvalues: Tensor) -> Tensor:
    """Set eigenvalues below the rounding error to zero, because their square roots would be far larger than it."""
    floor = eigenvalues.max() * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps
    return eigenvalues.where(eigenvalues > floor, 0.0)


def open_clip_folder(weights: Path) -> tuple[Any, Callable, Callable]:
    """Load a CLIPModel, with functions that convert images [H, W, 3] to its pixels and prompts to its tokens."""
    from transformers import CLIPModel, CLIPProcessor

    advice = "save it again"
    with bounded_modules(), refusing(f"{weights} cannot be loaded as a CLIPModel", advice=advice, folder=weights):
        model = CLIPModel.from_pretrained(weights, local_files_only=True, dtype=torch.float32).eval()
        processor = CLIPProcessor.from_pretrained(weights, local_files_only=True)
    longest = model.config.text_config.max_position_embeddings

    def pixels(images: Sequence[np.ndarray]) -> Tensor:
        batch = [_pixels(image[None])[0] for image in images]
        return processor.image_processor(batch, return_tensors="pt")["pixel_values"]

    def tokens(prompts: Sequence[str]) -> Mapping[str, Tensor]:
        options = {"truncation": True, "max_length": longest, "padding": True, "return_tensors": "pt"}
        return processor.tokenizer(list(prompts), **options)

    return model, pixels, tokens


def cosines(model, pixels: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
    """Return the cosine similarity [N] of each image's and its text's embedding by a CLIPModel."""
    image = model.get_image_features(pixels.to(model.device)).pooler_output
    ids, mask = (tokens[name].to(model.device) for name in ("input_ids", "attention_mask"))
    return F.cosine_similarity(image, model.get_text_features(ids, attention_mask=mask).pooler_output)


def _reference_moments(references: Path, network: nn.Module) -> tuple[Tensor, Tensor]:
    if references.is_dir():
        files = _image_files(references)
        return moments(_features(network, len(files), lambda index: _read_image(files[index])))
    with refusing(f"{references} cannot be read as mu and sigma", advice="copy it again"):
        with open_regular(references) as file, np.load(file, allow_pickle=False) as stored:
            mean, covariance = (torch.from_numpy(stored[name]).double() for name in ("mu", "sigma"))
    width = mean.numel()
    if mean.shape != (width,) or covariance.shape != (width, width) or not covariance.isfinite().all():
        raise ArtifactError(
            f"mu and sigma of {references} have the shapes {list(mean.shape)} and {list(covariance.shape)}, expected "
            "[D] and [D, D] of finite numbers; download or compute them again"
        )
    return mean, covariance


def _features(network: nn.Module, number: int, image: Callable[[int], np.ndarray]) -> Tensor:
    """Compute Inception's features, fp32 [number, 2048], one image at a time, because photographs differ in size."""
    features = []
    with full_precision() as device, torch.inference_mode(), progress(number, "Inception features") as advance:
        network.to(device)
        for index in range(number):
            features.append(network(_pixels(image(index)[None]).to(device)).cpu())
            advance()
    return torch.cat(features)


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_FORMATS)


def _read_image(path: Path) -> np.ndarray:
    try:
        with open_regular(path) as file, Image.open(file, formats=[IMAGE_FORMATS[path.suffix.lower()]]) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ArtifactError(f"the reference {path} cannot be read ({one_line(error)}); remove it") from error


def _check_number(number: int, where: str) -> None:
    if number < FEWEST_FOR_FID:
        raise ConfigError(
            f"{counted(number, 'image')} {where}, which is too few for FID; it takes {FEWEST_FOR_FID} or more"
        )


def _pixels(images: np.ndarray) -> Tensor:
    """Convert images uint8 [N, H, W, 3] to a tensor uint8 [N, 3, H, W]."""
    return torch.tensor(images).permute(0, 3, 1, 2)
