"""Images of the three variants of the model from the same seeds, and what their parts compute from the same inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd_quant.cache import Cache
from sd_quant.config import Infer
from sd_quant.engines import RUNTIMES
from sd_quant.engines.base import Engine
from sd_quant.files import temporary_folder
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.parity import Outputs, WatchedVariant
from sd_quant.inference.pipeline import Generated
from sd_quant.metrics.images import Images
from sd_quant.models.checkpoint import Checkpoint, contracts_of
from sd_quant.report.images import comparison_grid, save_images
from sd_quant.report.record import weights_sha256
from sd_quant.source import source_digest
from sd_quant.stages.generate import generate, image_names, sampling_of
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED

Engines = Mapping[str, Mapping[str, Engine]]  # by variant, which is FRAMEWORK, FULL_PRECISION or QUANTIZED, and part


@dataclass(frozen=True)
class Comparison:
    """What the variants have made of the same prompts and seeds."""

    images: dict[str, Generated]  # by variant
    inputs: dict[str, dict]  # by part: the inputs of one call in the framework's pipeline, the denoiser's from half way
    outputs: dict[str, Outputs]  # by variant: what the parts computed from these inputs


def compare_images(
    checkpoint: Checkpoint,
    engines: Engines,
    prompts: list[str],
    infer: Infer,
    facts: dict,
    directory: Path,
    cache: Cache,
) -> Comparison:
    """Images of all variants, and the outputs of their parts for the same inputs.

    Those of the unquantized variants are the same for every recipe, so they come from the cache where it has them.
    ``facts`` are the job's, which the cache key is made of; ``directory`` holds temporary files.
    """
    origin = {
        **unquantized_origin(facts),
        "contracts": repr(contracts_of(checkpoint)),  # knobs may give a checkpoint's parts other shapes
        "prompts": prompts,
        "sampling": sampling_of(infer).described(),
        "engine": infer.engine,
        "precision": infer.precision,
    }
    with temporary_folder(directory) as temporary:
        path = Path(temporary) / "pictures.safetensors"
        cache.provide(
            "pictures", origin, path.parent,
            lambda folder: save_file(
                pack(compare_unquantized(checkpoint, engines, prompts, infer)), folder / path.name
            ),
        )  # fmt: skip
        comparison = unpack(load_file(path))
    variant, denoiser = engines[QUANTIZED], checkpoint.family.DENOISER  # its other parts are the unquantized ones
    comparison.images[QUANTIZED] = generate(pipeline_of(checkpoint, variant), prompts, infer, "quantized")
    comparison.outputs[QUANTIZED] = {denoiser: variant[denoiser](**comparison.inputs[denoiser])}
    return comparison


def unquantized_origin(facts: dict) -> dict:
    """What unquantized images depend on besides the knobs; the machine counts, because processors round differently."""
    packages = dict.fromkeys(("torch", "diffusers", "transformers", *(row.package for row in RUNTIMES.values())))
    return {
        "checkpoint": weights_sha256(facts),
        "source": source_digest("checkpoints.kinds", "export.parts", "inference.parity", "inference.loading"),
        "versions": {name: facts["versions"].get(name) for name in packages},
        "machine": [facts["machine"][name] for name in ("cpu", "usable_cores", "gpus")],
    }


def compare_unquantized(checkpoint: Checkpoint, engines: Engines, prompts: list[str], infer: Infer) -> Comparison:
    """Images of framework and unquantized engine, and the outputs of their parts for the framework's inputs."""
    framework = WatchedVariant(engines[FRAMEWORK], {checkpoint.family.DENOISER: sampling_of(infer).steps_taken // 2})
    images: dict[str, Generated] = {}
    outputs: dict[str, Outputs] = {}
    for name, variant in {FRAMEWORK: framework, FULL_PRECISION: engines[FULL_PRECISION]}.items():
        images[name] = generate(pipeline_of(checkpoint, variant), prompts, infer, name.replace("_", " "))
        outputs[name] = {part: engines[name][part](**framework.seen[part]) for part in reversed(checkpoint.parts())}
    return Comparison(images, framework.seen, outputs)


def pack(comparison: Comparison) -> dict[str, Tensor]:
    """The comparison as a flat mapping of tensors, as safetensors stores them; their names are paths."""
    tensors: dict[str, Tensor] = {}
    for variant, generated in comparison.images.items():
        tensors |= named(f"images/{variant}/images", generated.images)
        tensors |= named(f"images/{variant}/latents", generated.latents)
    for part, inputs in comparison.inputs.items():
        tensors |= {f"inputs/{part}/{name}": tensor for name, tensor in inputs.items()}
    for variant, parts in comparison.outputs.items():
        tensors |= {f"outputs/{variant}/{part}/{name}": parts[part][name] for part in parts for name in parts[part]}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def named(path: str, values: Images | Tensor | list[Tensor]) -> dict[str, Tensor]:
    """The values of all images as one tensor of this name, or one for each image where their sizes differ."""
    if not isinstance(values, list):
        return {path: torch.as_tensor(values)}
    return {f"{path}/{number:06}": torch.as_tensor(value) for number, value in enumerate(values)}


def unpack(tensors: Mapping[str, Tensor]) -> Comparison:
    """The comparison that ``pack`` has made flat."""
    tree: dict = {}
    for path, tensor in sorted(tensors.items()):  # by number, where there is one for each image
        *folders, name = path.split("/")
        reduce(lambda node, folder: node.setdefault(folder, {}), folders, tree)[name] = tensor
    images = {}
    for variant, each in tree["images"].items():
        pixels = each["images"]
        images[variant] = Generated(
            [image.numpy() for image in pixels.values()] if isinstance(pixels, dict) else pixels.numpy(),
            list(each["latents"].values()) if isinstance(each["latents"], dict) else each["latents"],
        )
    return Comparison(images, tree["inputs"], tree["outputs"])


def save_pairs(comparison: Comparison, prompts: list[str], label: str, directory: Path) -> None:
    """Write full-precision and quantized images, and a grid of all pairs with ``label`` beside the quantized ones."""
    full, quantized = (comparison.images[variant].images for variant in (FRAMEWORK, QUANTIZED))
    for name, images in ((FULL_PRECISION, full), (QUANTIZED, quantized)):
        save_images(images, directory / "images" / name, image_names(prompts))
    grid = directory / "images" / "grid.png"
    comparison_grid(full, quantized, grid, captions=prompts, labels=("full precision", label))
