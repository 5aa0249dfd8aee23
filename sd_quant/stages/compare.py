"""Images of the three variants of the model from the same seeds, and outputs of their parts for the same inputs."""

from collections.abc import Callable, Collection, Mapping
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
from sd_quant.inference.parity import Outputs
from sd_quant.inference.pipeline import Generated
from sd_quant.inference.watched import WatchedVariant
from sd_quant.metrics.images import Images
from sd_quant.models.checkpoint import Checkpoint, contracts_of
from sd_quant.report.images import comparison_grid, save_animations, save_images
from sd_quant.report.record import weights_sha256
from sd_quant.source import source_digest
from sd_quant.stages.generate import generate, image_names, sampling_of
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED

Engines = Mapping[str, Mapping[str, Engine]]  # by variant, which is FRAMEWORK, FULL_PRECISION or QUANTIZED, and part
SAMPLED = 4  # calls of the denoiser that are kept


@dataclass(frozen=True)
class VariantOutputs:
    """Images and outputs that variants of the model have made of the same prompts and seeds."""

    images: dict[str, Generated]  # by variant
    inputs: dict[str, dict]  # by part: the inputs of one call in torch's pipeline, the denoiser's from half way
    outputs: dict[str, Outputs]  # by variant: what the parts computed from these inputs
    calls: dict[str, dict]  # inputs of further calls of the denoiser in that pipeline, spread over images and steps


@dataclass(frozen=True)
class KeptOutputs:
    """Outputs of unquantized variants, which no recipe changes, in the cache."""

    facts: dict  # of the job, which the key is made of
    directory: Path  # for temporary files
    cache: Cache

    def provide(
        self,
        checkpoint: Checkpoint,
        prompts: list[str],
        infer: Infer,
        make: Callable[[], VariantOutputs],
        engine: Mapping[str, str] = {},
    ) -> VariantOutputs:
        """Return what ``make`` returns, or what the cache has for the same model, machine, images and ``engine``."""
        packages = dict.fromkeys(("torch", "diffusers", "transformers", *(row.package for row in RUNTIMES.values())))
        origin = {
            "checkpoint": weights_sha256(self.facts),
            "source": source_digest("checkpoints.kinds", "export.parts", "inference.parity", "inference.loading"),
            "versions": {name: self.facts["versions"].get(name) for name in packages},
            # processors round differently
            "machine": [self.facts["machine"][name] for name in ("cpu", "usable_cores", "gpus")],
            "contracts": repr(contracts_of(checkpoint)),  # knobs may give a checkpoint's parts other shapes
            "prompts": prompts,
            "sampling": sampling_of(infer).described(),
            "precision": infer.precision,
            **engine,
        }
        with temporary_folder(self.directory) as temporary:
            path = Path(temporary) / "images.safetensors"
            self.cache.provide(
                "images", origin, path.parent, lambda folder: save_file(pack(make()), folder / path.name)
            )
            return unpack(load_file(path))


def compare_images(
    checkpoint: Checkpoint,
    framework: VariantOutputs,
    engines: Engines,
    quantized: Collection[str],
    prompts: list[str],
    infer: Infer,
    kept: KeptOutputs,
) -> VariantOutputs:
    """Make the images of both engines, and the outputs of their parts for torch's inputs; ``framework`` are torch's.

    ``quantized`` names the parts that are quantized.
    """
    unquantized = kept.provide(
        checkpoint, prompts, infer,
        lambda: compare_unquantized(checkpoint, engines[FULL_PRECISION], framework.inputs, prompts, infer),
        {"engine": infer.engine},
    )  # fmt: skip
    variant = engines[QUANTIZED]  # its other parts are the unquantized ones
    images = framework.images | unquantized.images
    outputs = framework.outputs | unquantized.outputs
    images[QUANTIZED] = generate(pipeline_of(checkpoint, variant), prompts, infer, "quantized")
    outputs[QUANTIZED] = {part: variant[part](**framework.inputs[part]) for part in quantized}
    return VariantOutputs(images, framework.inputs, outputs, framework.calls)


def framework_images(
    checkpoint: Checkpoint, variant: Mapping[str, Engine], prompts: list[str], infer: Infer, kept: KeptOutputs
) -> VariantOutputs:
    """Make torch's images in full precision, with which everything is compared."""
    return kept.provide(checkpoint, prompts, infer, lambda: compare_framework(checkpoint, variant, prompts, infer))


def compare_framework(
    checkpoint: Checkpoint, variant: Mapping[str, Engine], prompts: list[str], infer: Infer
) -> VariantOutputs:
    """Make torch's images, and keep the inputs and outputs of some calls of its parts on the way."""
    steps, denoiser = sampling_of(infer).steps_taken, checkpoint.family.DENOISER
    calls = sampled_calls(len(sampling_of(infer).batches(range(len(prompts)))), steps)
    watched = WatchedVariant(variant, {denoiser: {steps // 2, *calls}})
    images = generate(pipeline_of(checkpoint, watched), prompts, infer, "framework")
    inputs = {part: seen[steps // 2 if part == denoiser else 0] for part, seen in watched.seen.items()}
    outputs = {part: variant[part](**inputs[part]) for part in reversed(checkpoint.parts())}
    seen = watched.seen[denoiser]
    kept = {str(number): copies_of(seen[number]) for number in calls if number in seen}  # one of them may be in inputs
    return VariantOutputs({FRAMEWORK: images}, inputs, {FRAMEWORK: outputs}, kept)


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, because a file of safetensors holds no tensor twice."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def sampled_calls(batches: int, steps: int) -> list[int]:
    """Numbers of up to SAMPLED calls of the denoiser, of different steps and, where there are several, batches."""
    return sorted({
        number * batches // SAMPLED * steps + (2 * number + 1) * steps // (2 * SAMPLED) for number in range(SAMPLED)
    })  # fmt: skip


def compare_unquantized(
    checkpoint: Checkpoint, variant: Mapping[str, Engine], inputs: dict[str, dict], prompts: list[str], infer: Infer
) -> VariantOutputs:
    """Make the images of the unquantized engine, and the outputs of its parts for torch's ``inputs``."""
    images = generate(pipeline_of(checkpoint, variant), prompts, infer, FULL_PRECISION.replace("_", " "))
    outputs = {part: variant[part](**inputs[part]) for part in reversed(checkpoint.parts())}
    return VariantOutputs({FULL_PRECISION: images}, {}, {FULL_PRECISION: outputs}, {})


def pack(comparison: VariantOutputs) -> dict[str, Tensor]:
    """A flat mapping of tensors, as safetensors stores them; their names are paths."""
    tensors: dict[str, Tensor] = {}
    for variant, generated in comparison.images.items():
        tensors |= named(f"images/{variant}/images", generated.images)
        tensors |= named(f"images/{variant}/latents", generated.latents)
    for part, inputs in comparison.inputs.items():
        tensors |= {f"inputs/{part}/{name}": tensor for name, tensor in inputs.items()}
    for number, inputs in comparison.calls.items():
        tensors |= {f"calls/{number}/{name}": tensor for name, tensor in inputs.items()}
    for variant, parts in comparison.outputs.items():
        tensors |= {f"outputs/{variant}/{part}/{name}": parts[part][name] for part in parts for name in parts[part]}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def named(path: str, values: Images | Tensor | list[Tensor]) -> dict[str, Tensor]:
    """All images as one tensor of this name, or as one tensor each where their sizes differ."""
    if not isinstance(values, list):
        return {path: torch.as_tensor(values)}
    return {f"{path}/{number:06}": torch.as_tensor(value) for number, value in enumerate(values)}


def unpack(tensors: Mapping[str, Tensor]) -> VariantOutputs:
    """Reverse ``pack``."""
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
    return VariantOutputs(images, tree.get("inputs", {}), tree.get("outputs", {}), tree.get("calls", {}))


def save_pairs(
    comparison: VariantOutputs, prompts: list[str], label: str, directory: Path, frame: int | None = None
) -> None:
    """Write full-precision and quantized images, and a grid of all pairs with ``label`` beside the quantized ones.

    Images that consist of frames of ``frame`` pixels across are videos, and are written as animations too.
    """
    full, quantized = (comparison.images[variant].images for variant in (FRAMEWORK, QUANTIZED))
    for name, images in ((FULL_PRECISION, full), (QUANTIZED, quantized)):
        save_images(images, directory / "images" / name, image_names(prompts))
        if frame is not None:
            save_animations(images, frame, directory / "images" / name, image_names(prompts))
    grid = directory / "images" / "grid.png"
    comparison_grid(full, quantized, grid, captions=prompts, labels=("full precision", label))
