"""Images by torch, the unquantized and the quantized engine from equal seeds, and part outputs for equal inputs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sd_quant.config import Infer
from sd_quant.engines.base import Engine
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import MOST_TEXT, open_regular
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import ByBatch, Generated, Tensors, in_turn
from sd_quant.inference.schedules import COMPUTED, NOT_COMPUTED, engine_of_letter
from sd_quant.inference.watched import WatchedVariant
from sd_quant.metrics.images import Images, joined
from sd_quant.models.checkpoint import Checkpoint, denoisers_of
from sd_quant.report.images import comparison_grid, save_animations, save_images
from sd_quant.source import source_digest
from sd_quant.stages.generate import generate, image_names, recipe_sampling, sampling_of
from sd_quant.stages.shared import CallsOfAnImage, Shared, VariantOutputs, flat, tree_of
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED, Variants
from sd_quant.text import one_line

SAMPLED = 4  # calls of the denoiser whose inputs are kept
COUNTED = "counted"


def compare_images(variants: Variants, framework: VariantOutputs, infer: Infer) -> VariantOutputs:
    """Make the unquantized and the quantized engine's images; run their parts on torch's inputs in ``framework``."""
    checkpoint, engines = variants.loaded.checkpoint, variants.engines

    def make(by_batch: ByBatch) -> VariantOutputs:
        """Make images and outputs of the unquantized engine."""
        own, description = engines[FULL_PRECISION], FULL_PRECISION.replace("_", " ")
        images = generate(pipeline_of(checkpoint, own), infer.prompt_list(), sampling_of(infer), description, by_batch)
        outputs = {part: own[part](**framework.inputs[part]) for part in reversed(checkpoint.parts())}
        return VariantOutputs({FULL_PRECISION: images}, outputs={FULL_PRECISION: outputs})

    unquantized = variants.shared.provide(checkpoint, infer, make, {"engine": infer.engine})
    quantized, of_an_image = quantized_images(variants, infer)
    outputs = {part: engines[QUANTIZED][part](**framework.inputs[part]) for part in variants.assignments}
    return VariantOutputs(
        framework.images | unquantized.images | {QUANTIZED: quantized}, framework.inputs,
        {**framework.outputs, **unquantized.outputs, QUANTIZED: outputs}, framework.calls, of_an_image,
    )  # fmt: skip


def quantized_images(variants: Variants, infer: Infer) -> tuple[Generated, CallsOfAnImage]:
    """Make the quantized variant's images, and count the denoisers' calls."""
    checkpoint, shared, prompts = variants.loaded.checkpoint, variants.shared, infer.prompt_list()
    recipe = {
        "engine": infer.engine,
        "assignments": variants.digests(),
        "simulated": variants.simulated is not None,
        "opened": source_digest("stages.open_parts"),
    }
    sampling, counts = recipe_sampling(infer), list[Tensor]()
    origin = shared.origin(checkpoint, prompts, infer, recipe, sampling)
    watched = WatchedVariant(variants.engines[QUANTIZED], {})  # other parts are the unquantized engine's
    denoiser, *others = denoisers_of(checkpoint)
    letters = [COMPUTED, *sorted(infer.precise_letters)]
    names = [*(engine_of_letter(denoiser, letter) for letter in letters), *others]

    def counting(
        batches: Sequence[Sequence[int]], make: Callable[[int], Tensors], also: Sequence[Any] = ()
    ) -> list[Tensors]:
        def made(place: int) -> Tensors:
            watched.count |= dict.fromkeys(names, 0)
            return make(place) | {COUNTED: torch.tensor([watched.count[name] for name in names])}

        found = shared.batches(origin, batches, made)
        counts.extend(tensors.pop(COUNTED) for tensors in found)
        return found

    images = generate(pipeline_of(checkpoint, watched), prompts, sampling, "quantized", counting)
    totals = dict(zip([*letters, *others], torch.stack(counts).sum(dim=0).tolist(), strict=True))
    return images, counted(checkpoint, totals, infer, len(counts))


def counted(checkpoint: Checkpoint, totals: Mapping[str, int], infer: Infer, batches: int) -> CallsOfAnImage:
    """Count denoiser calls in an image; ``totals``: calls of all batches, by schedule letter or denoiser."""
    denoiser, *others = denoisers_of(checkpoint)
    each = {name: calls // batches for name, calls in totals.items()}
    by_denoiser = {part: each.pop(part) for part in others}
    calls = sum(each.values())
    precise = {letter: count for letter, count in each.items() if letter != COMPUTED and count}
    schedule = infer.given_schedule or COMPUTED * infer.recipe_steps
    return CallsOfAnImage(
        calls, precise, calls / sum(letter not in NOT_COMPUTED for letter in schedule),
        {denoiser: calls, **by_denoiser} if others else {},
    )  # fmt: skip


def framework_images(
    checkpoint: Checkpoint, engines: Mapping[str, Engine], infer: Infer, shared: Shared
) -> VariantOutputs:
    """Make torch's full-precision images, the reference of all comparisons, or take them from the cache."""
    return shared.provide(checkpoint, infer, partial(compare_framework, checkpoint, engines, infer))


def compare_framework(
    checkpoint: Checkpoint, engines: Mapping[str, Engine], infer: Infer, by_batch: ByBatch = in_turn
) -> VariantOutputs:
    """Make torch's images, and keep the inputs and outputs of one call of each part (the denoiser's: in the middle).

    Also keep the inputs of up to SAMPLED denoiser calls. Raises ConfigError if some part is never called.
    """
    sampling, denoiser, prompts = sampling_of(infer), checkpoint.family.DENOISER, infer.prompt_list()
    steps = sampling.steps_taken
    sampled = sampled_calls(len(sampling.batches(range(len(prompts)))), steps)
    wanted = sorted({0, steps // 2, *sampled})  # of two denoisers, each is called in only some steps
    watched, brought = WatchedVariant(engines, {denoiser: wanted}), dict[str, Tensor]()

    def watching(
        batches: Sequence[Sequence[int]], make: Callable[[int], Tensors], also: Sequence[Any] = ()
    ) -> list[Tensors]:
        """Add to each batch the inputs of its ``wanted`` calls, and of the first call of each part."""
        of_batch = [[call for call in wanted if call // steps == place] for place in range(len(batches))]

        def made(place: int) -> Tensors:
            watched.count[denoiser], before = place * steps, set(watched.seen)
            tensors = make(place)
            own = {str(call): each for call, each in watched.seen.pop(denoiser, {}).items() if call in of_batch[place]}
            first = {part: {"0": watched.seen[part][0]} for part in watched.seen.keys() - before}
            return tensors | flat({"call": first | ({denoiser: own} if own else {})})

        found = by_batch(batches, made, of_batch)
        for tensors in reversed(found):  # of several batches with the same call, the first wins
            brought.update({path: tensor for path, tensor in tensors.items() if path.startswith("call/")})
        return found

    images = generate(pipeline_of(checkpoint, watched), prompts, sampling, "framework", watching)
    seen = tree_of(brought).get("call", {})
    calls = {call: seen[denoiser][call] for call in sorted(seen.get(denoiser, ()), key=int)}
    inputs = {part: each[0] for part, each in watched.seen.items()}
    inputs |= {part: each.get("0") for part, each in seen.items()}
    inputs[denoiser] = calls[min(calls, key=lambda call: abs(int(call) - steps // 2))] if calls else None
    if uncalled := [part for part in checkpoint.parts() if not inputs.get(part)]:
        raise ConfigError(f"infer.steps={steps} makes images without a call of {', '.join(uncalled)}; take more steps")
    outputs = {part: engines[part](**inputs[part]) for part in reversed(checkpoint.parts())}
    kept = {call: each for call, each in calls.items() if int(call) in sampled}
    return VariantOutputs({FRAMEWORK: images}, inputs, {FRAMEWORK: outputs}, kept)


def sampled_calls(batches: int, steps: int) -> list[int]:
    """Return the indices of up to SAMPLED denoiser calls, spread over steps and batches."""
    return sorted({
        number * batches // SAMPLED * steps + (2 * number + 1) * steps // (2 * SAMPLED) for number in range(SAMPLED)
    })  # fmt: skip


def save_run(variants: Variants, comparison: VariantOutputs) -> None:
    """Write a run's images with ``save_pairs``, the quantized ones labelled with the recipe."""
    recipe, infer = variants.loaded.recipe, variants.loaded.infer
    label = f"{'mixed' if recipe.mixes else recipe.format} level {recipe.quant_level:g}"
    frame = infer.width if variants.loaded.checkpoint.family.MOVES else None
    save_pairs(comparison, infer.prompt_list(), label, variants.directory, frame)


def save_pairs(
    comparison: VariantOutputs, prompts: list[str], label: str, directory: Path, frame: int | None = None
) -> None:
    """Write full-precision and quantized images, and a grid of all pairs; ``label`` names the quantized ones.

    With ``frame``, the width of a frame in pixels, images are videos (rows of frames), also written as animations.
    """
    full, quantized = (comparison.images[variant].images for variant in (FRAMEWORK, QUANTIZED))
    for name, images in ((FULL_PRECISION, full), (QUANTIZED, quantized)):
        save_images(images, directory / "images" / name, image_names(prompts))
        if frame is not None:
            save_animations(images, frame, directory / "images" / name, image_names(prompts))
    comparison_grid(full, quantized, directory / "images" / "grid.png", prompts, label)


def images_of_run(run: Path, prompts: list[str]) -> Images:
    """Read a run's full-precision images. Raises ArtifactError if a file is missing or is no PNG."""
    images, names = [], image_names(prompts)
    for file in (run / "images" / FULL_PRECISION / f"{name}.png" for name in names):
        try:
            with open_regular(file, MOST_TEXT) as opened, Image.open(opened, formats=["PNG"]) as image:
                images.append(np.asarray(image.convert("RGB")))
        except Exception as error:  # a decoder may raise anything for damaged bytes
            raise ArtifactError(
                f"{file} is not an image of the run ({one_line(error, 100)}); give another run, or images=false"
            ) from None
    return joined(images)
