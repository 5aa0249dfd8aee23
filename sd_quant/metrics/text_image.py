"""CLIP score and FID, for who has their networks' weights, and the window in which MLPerf accepts both.

CLIP score says whether images show what their prompts say (Hessel et al., EMNLP 2021; as torchmetrics defines it:
100 cos(image, prompt), averaged, at least 0); FID how far they are, as a set, from photographs (Heusel et al. 2017,
frechet.py has the formula). Neither is about quantization: they compare with what others publish, fidelity.py with
full precision. The networks are named or installed and never downloaded: the road not taken is torchmetrics' default of
fetching hundreds of megabytes when it is first called.

MLPerf judges with its own code (github.com/mlcommons/inference, ``text_to_image``), CLIP from open_clip and Inception
from pytorch-fid. Weights and definitions are the same; the resizing for Inception is not: here it is that of Heusel et
al., whose pixels lie half a pixel off from pytorch-fid's. Of CLIP the layers are looked at, not the weights. So what
passes here has still to pass there.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sd_quant.devices import full_precision
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.files import open_regular, read_regular
from sd_quant.metrics.frechet import check_images, frechet_distance, moments
from sd_quant.metrics.inception import inception
from sd_quant.progress import progress
from sd_quant.text import one_line

BATCH = 16
FEWEST_FOR_FID = 2049  # images: with fewer the covariance of Inception's 2048 features is singular
IMAGES = {".bmp": "BMP", ".jpeg": "JPEG", ".jpg": "JPEG", ".png": "PNG", ".webp": "WEBP"}  # Pillow's readers
CLIP_FILES = (  # of each line, one has to be there
    ("config.json",),
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    ("tokenizer.json", "vocab.json"),
    ("preprocessor_config.json", "processor_config.json"),
)

# MLPerf Inference up to v5.1, stable-diffusion-xl, closed division: within 0.2 % and 2 % of the fp32 reference's
# 31.74981837 and 23.48046692 (docs/index.md there); how the images are made: backend_pytorch.py, what they are judged
# by: coco.py.
MLPERF_CLIP = (31.68631873, 31.81331801)
MLPERF_FID = (23.01085758, 23.95007626)
MLPERF_PROTOCOL = {
    "prompts": "635b5177356209894f672f272f62632d67099a015e483bb19e8af97d5050fa34",  # by captions_sha256
    "scheduler": {"class": "EulerDiscreteScheduler", "timestep_spacing": "leading", "steps_offset": 1},
    "steps": 20,
    "guidance_scale": 8.0,
    "height": 1024,
    "width": 1024,
    "negative_prompt": "normal quality, low quality, worst quality, low res, blurry, nsfw, nude",
    "latents": "ea2c5d770d8921c79b43fade2dcecab9c95baae0500f5a2bc860ceb45faeccb1",  # by inference.latents.digest_of
    "clip_network": {"layers": 12, "width": 768, "patch": 32},  # openai/clip-vit-base-patch32
    "fid_network": "inception-2015-12-05",
    "fid_references": "806479d0693a33110526b6689aa26baddd995c7b",  # by git_blob
}
MLPERF_FILES = {  # what is told by a digest, as people know it; all in text_to_image there
    "prompts": "the 5000 captions of captions_source.tsv",
    "latents": "the one noise of tools/latents.pt",
    "fid_references": "tools/val2014.npz",
}


def clip_score(images: np.ndarray, prompts: Sequence[str], weights: Path) -> dict:
    """CLIP score of uint8 [N, H, W, 3] and N prompts as ``{value, reason, images, network}``; the mean, 0 to 100.

    ``weights``: a folder of transformers' CLIPModel with its tokenizer and image processor. Where it cannot be used,
    or there are no images, ``value`` is None and ``reason`` says why. Prompts are cut to what the network reads, as
    MLPerf does. Raises ArtifactError for other images and when the numbers differ.
    """
    check_images(images)
    if len(images) != len(prompts):
        raise ArtifactError(f"{len(images)} images came with {len(prompts)} prompts, expected a prompt for each")
    entry = {"value": None, "reason": None, "images": len(images), "network": None}
    if not len(images):
        return entry | {"reason": "there are no images"}
    try:
        model, processor = _clip(weights)
    except SdQuantError as error:
        return entry | {"reason": str(error)}
    from torchmetrics.multimodal import CLIPScore

    metric = CLIPScore(lambda: (model, processor))  # type: ignore[arg-type, return-value]  # look like them
    starts = range(0, len(images), BATCH)
    with full_precision() as device, progress(len(starts), "CLIP score") as advance:
        metric.to(device)
        for start in starts:
            batch = slice(start, start + BATCH)
            metric.update(_pixels(images[batch]).to(device), list(prompts[batch]))
            advance()
    vision = model.config.vision_config
    network = {"layers": vision.num_hidden_layers, "width": vision.hidden_size, "patch": vision.patch_size}
    return entry | {"network": network} | _number(metric.compute().item())


def check_clip_weights(weights: Path) -> None:
    """Raise ConfigError unless the folder is there and complete; reads no weights."""
    if not weights.is_dir():
        raise ConfigError(f"there is no folder {weights} with CLIP's weights; save a transformers CLIPModel there")
    for names in CLIP_FILES:
        if not any((weights / name).is_file() for name in names):
            raise ConfigError(
                f"the folder {weights} of CLIP's weights has no {' or '.join(names)}; save the model and its processor "
                "there with save_pretrained"
            )


def fid(images: np.ndarray, references: Path, weights: Path | None = None) -> dict:
    """FID of uint8 [N, H, W, 3], N at least 2049, as ``{value, reason, images, references, network}``.

    ``references``: a folder of at least as many images, or an .npz with Inception's ``mu`` [2048] and ``sigma``
    [2048, 2048] over them, as pytorch-fid writes and MLPerf ships it. ``weights`` as ``inception`` takes them. Where
    anything is missing or broken or too few, ``value`` is None and ``reason`` says why. Raises ArtifactError for other
    images.
    """
    check_images(images)
    entry = {"value": None, "reason": None, "images": len(images), "references": references.name, "network": None}
    try:
        _check_number(len(images), "were made")
        check_references(references)
        network, entry["network"] = inception(weights)
        of_references = _reference_moments(references, network)
        of_images = moments(_features(network, len(images), lambda index: images[index]))
    except SdQuantError as error:
        return entry | {"reason": str(error)}
    if of_references[1].shape != of_images[1].shape:
        shapes = f"{list(of_references[1].shape)}, expected {list(of_images[1].shape)}"
        return entry | {"reason": f"{references} has a sigma of shape {shapes}; compute it with the same Inception"}
    return entry | _number(frechet_distance(*of_references, *of_images))


def check_references(references: Path) -> None:
    """Raise ConfigError unless there is an .npz or a folder with enough images; opens none of them."""
    if references.is_dir():
        _check_number(len(_image_files(references)), f"are in {references}")
    elif references.suffix != ".npz" or not references.is_file():
        raise ConfigError(f"{references} is neither a folder of images nor an .npz with mu and sigma; name one of them")


def mlperf_window(clip_score: float | None, fid: float | None, made: Mapping[str, Any]) -> dict:
    """Whether both are inside MLPerf's window: ``{passes, reason}``, None where images were not made its way.

    ``made`` says how they were made and judged, by the names of MLPERF_PROTOCOL.
    """
    differing = [
        f"{name} {'are' if name.endswith('s') else 'is'} not {MLPERF_FILES[name]}"
        if name in MLPERF_FILES
        else f"{name} is {made.get(name)!r} instead of {expected!r}"
        for name, expected in MLPERF_PROTOCOL.items()
        if made.get(name) != expected
    ]
    if differing:
        return {"passes": None, "reason": f"not MLPerf's protocol: {'; '.join(differing)}"}
    if clip_score is None or fid is None:
        missing = " and no ".join(name for name, value in (("CLIP score", clip_score), ("FID", fid)) if value is None)
        return {"passes": None, "reason": f"there is no {missing}"}
    outside = [
        f"{name} {value:.5f} is not within {low:.5f} and {high:.5f}"
        for name, value, (low, high) in (("CLIP score", clip_score, MLPERF_CLIP), ("FID", fid, MLPERF_FID))
        if not low <= value <= high
    ]
    return {"passes": not outside, "reason": "; ".join(outside) or None}


def captions_sha256(prompts: Sequence[str]) -> str:
    """SHA-256 of the sorted prompts in UTF-8, joined by line feeds: it does not depend on their order."""
    return hashlib.sha256("\n".join(sorted(prompts)).encode()).hexdigest()


def git_blob(path: Path) -> str | None:
    """The name that git has for a file's content, None for a folder. MLPerf's repository is what states these files."""
    if not path.is_file():
        return None
    content = read_regular(path, math.inf)
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class ProjectedClip(nn.Module):
    """CLIP as torchmetrics 1.9 calls it: since transformers 5 a feature comes inside an object with other outputs."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return self.model.get_image_features(pixel_values).pooler_output

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model.get_text_features(input_ids, attention_mask).pooler_output


def _clip(weights: Path) -> tuple[ProjectedClip, Callable]:
    """The network, and a function that torchmetrics takes for its processor."""
    from transformers import CLIPModel, CLIPProcessor

    check_clip_weights(weights)
    try:
        model = CLIPModel.from_pretrained(weights, local_files_only=True, dtype=torch.float32).eval()
        processor = CLIPProcessor.from_pretrained(weights, local_files_only=True)
    except Exception as error:  # whatever the files lead transformers to
        raise ArtifactError(f"{weights} cannot be loaded as a CLIPModel ({one_line(error)}); save it again") from error
    longest = model.config.text_config.max_position_embeddings

    def process(text: list[str] | None = None, images: list[Tensor] | None = None, **options) -> Mapping[str, Tensor]:
        """Inputs of the network. Texts are cut here, because torchmetrics would cut off the end token, where CLIP reads
        the text's feature."""
        if images is not None:
            return processor.image_processor(images, return_tensors="pt")
        return processor.tokenizer(text, truncation=True, max_length=longest, **options)

    return ProjectedClip(model), process


def _reference_moments(references: Path, network: nn.Module) -> tuple[Tensor, Tensor]:
    if references.is_dir():
        files = _image_files(references)
        return moments(_features(network, len(files), lambda index: _read_image(files[index])))
    try:
        with open_regular(references) as file, np.load(file, allow_pickle=False) as stored:
            mean, covariance = (torch.from_numpy(stored[name]).double() for name in ("mu", "sigma"))
    except Exception as error:  # the zip reader and numpy raise whatever the bytes lead them to
        raise ArtifactError(
            f"{references} cannot be read as mu and sigma ({one_line(error)}); copy it again"
        ) from error
    width = mean.numel()
    if mean.shape != (width,) or covariance.shape != (width, width) or not covariance.isfinite().all():
        raise ArtifactError(
            f"mu and sigma of {references} have the shapes {list(mean.shape)} and {list(covariance.shape)}, expected "
            "[D] and [D, D] of finite numbers; download or compute them again"
        )
    return mean, covariance


def _features(network: nn.Module, number: int, image: Callable[[int], np.ndarray]) -> Tensor:
    """Inception's features fp32 [number, 2048], one image at a time, as photographs differ in size."""
    features = []
    with full_precision() as device, torch.inference_mode(), progress(number, "Inception features") as advance:
        network.to(device)
        for index in range(number):
            features.append(network(_pixels(image(index)[None]).to(device)).cpu())
            advance()
    return torch.cat(features)


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGES)


def _read_image(path: Path) -> np.ndarray:
    try:
        with open_regular(path) as file, Image.open(file, formats=[IMAGES[path.suffix.lower()]]) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ArtifactError(f"the reference {path} cannot be read ({one_line(error)}); remove it") from error


def _check_number(number: int, where: str) -> None:
    if number < FEWEST_FOR_FID:
        raise ConfigError(f"{number} images {where}, which is too few for FID; it takes {FEWEST_FOR_FID} or more")


def _pixels(images: np.ndarray) -> Tensor:
    """[N, H, W, 3] -> [N, 3, H, W], uint8."""
    return torch.tensor(images).permute(0, 3, 1, 2)


def _number(value: float | None) -> dict:
    """``value`` as ``{value, reason}``; None for NaN and infinity."""
    if value is None or not math.isfinite(value):
        return {"value": None, "reason": "the network gave NaN or infinity; its weights are damaged"}
    return {"value": value, "reason": None}
