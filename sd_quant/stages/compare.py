"""Images of the three variants of the model from the same seeds, and outputs of their parts for the same inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd_quant.config import Infer
from sd_quant.engines.base import Engine
from sd_quant.errors import ConfigError
from sd_quant.files import sha256, temporary_folder
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.parity import Outputs
from sd_quant.inference.pipeline import ByBatch, Generated, Sampling, Tensors, in_turn
from sd_quant.inference.samplers import COMPUTED, NOT_COMPUTED, engine_of_letter
from sd_quant.inference.watched import WatchedVariant
from sd_quant.metrics.images import Images
from sd_quant.models.checkpoint import Checkpoint, denoisers_of, key_of, samples_per_image
from sd_quant.report.images import comparison_grid, save_animations, save_images
from sd_quant.source import source_digest
from sd_quant.stages.generate import generate, image_names, recipe_sampling, sampling_of
from sd_quant.stages.shared import Shared
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED, Variants

SAMPLED = 4  # calls of the denoiser that are kept
BATCH = "batch.safetensors"
COUNTED = "counted"
HALF = "half"  # a call of the conditional half of a guided batch


@dataclass(frozen=True)
class CallsOfAnImage:
    """The number of the denoiser's calls by which an image is made."""

    whole: int
    half: int = 0  # of the conditional half of a guided batch alone
    precise: Mapping[str, int] = field(default_factory=dict)  # of all these, by the letter of a precise step
    in_a_step: float = 1.0  # that is computed: some pipelines call for each half, some samplers twice
    by_denoiser: Mapping[str, int] = field(default_factory=dict)  # of each, where the pipeline has several

    def share(self, costs: Mapping[str, float], steps: int) -> float:
        """The time of these calls as a share of the whole ones of ``steps`` of the recipe.

        ``costs`` are those of a call of each precise letter, and of HALF a call, in whole ones.
        """
        more = sum(count * (costs[letter] - 1) for letter, count in self.precise.items())
        return (self.whole + self.half * costs.get(HALF, 1.0) + more) / (self.in_a_step * steps)


@dataclass(frozen=True)
class VariantOutputs:
    """Images and outputs that variants of the model have made of the same prompts and seeds."""

    images: dict[str, Generated]  # by variant
    inputs: dict[str, dict]  # by part: the inputs of one call in torch's pipeline, the denoiser's from half way
    outputs: dict[str, Outputs]  # by variant: what the parts computed from these inputs
    calls: dict[str, dict]  # inputs of further calls of the denoiser in that pipeline, spread over images and steps
    of_an_image: CallsOfAnImage | None = None  # the calls by which the quantized variant has made each of its images


@dataclass(frozen=True)
class KeptOutputs(Shared):
    """Outputs of variants in the cache. No recipe changes those of unquantized ones."""

    def provide(
        self,
        checkpoint: Checkpoint,
        prompts: list[str],
        infer: Infer,
        make: Callable[[ByBatch], VariantOutputs],
        engine: Mapping[str, Any] = {},
        sampling: Sampling | None = None,
    ) -> VariantOutputs:
        """Return what ``make`` returns, or what the cache has for the same model, machine, images and ``engine``.

        Jobs that want the same at once divide the batches. ``sampling`` is the reference's by default.
        """
        origin = self.origin(checkpoint, prompts, infer, engine, sampling or sampling_of(infer))
        made = cache(lambda: make(partial(self.divided, origin)))
        if not self.cache.holds("images", origin):
            made()  # beside others that do the same, which is why no lock is held yet
        with temporary_folder(self.directory) as temporary:
            path = Path(temporary) / "images.safetensors"
            self.cache.provide(
                "images", origin, path.parent, lambda folder: save_file(pack(made()), folder / path.name)
            )
            return unpack(load_file(path))

    def divided(
        self,
        origin: Mapping[str, Any],
        batches: Sequence[Sequence[int]],
        make: Callable[[int], Tensors],
        also: Sequence[Any] = (),
    ) -> list[Tensors]:
        """Batches of the images of this ``origin``, each from the cache or made here: a ``pipeline.ByBatch``."""
        prompts, more = origin["prompts"], also or [None] * len(batches)
        origins = {
            str(place): {
                **origin,
                "prompts": [prompts[number] for number in batch],
                "numbers": list(batch),
                "also": each,
            }
            for place, (batch, each) in enumerate(zip(batches, more, strict=True))
        }

        def write(place: str, folder: Path) -> None:
            made = make(int(place))
            save_file({name: tensor.cpu().contiguous().clone() for name, tensor in made.items()}, folder / BATCH)

        with temporary_folder(self.directory) as temporary:
            self.cache.provide_all("latents", origins, Path(temporary), write)
            return [load_file(Path(temporary) / place / BATCH) for place in origins]

    def origin(
        self, checkpoint: Checkpoint, prompts: list[str], infer: Infer, engine: Mapping[str, Any], sampling: Sampling
    ) -> dict[str, Any]:
        """All that images depend on, as a key of the cache. ``engine`` names the engine that makes them."""
        return {
            **self.made_of("export.parts", "inference.parity", "inference.loading"),
            "packed": sha256(Path(__file__)),  # which calls are kept, under which names
            "contracts": key_of(checkpoint),  # knobs may give a checkpoint's parts other shapes
            "prompts": prompts,
            "sampling": sampling.described(),
            "precision": infer.precision,
            **engine,
        }


def compare_images(
    checkpoint: Checkpoint,
    framework: VariantOutputs,
    variants: Variants,
    prompts: list[str],
    infer: Infer,
    kept: KeptOutputs,
) -> VariantOutputs:
    """Make the images of both engines, and the outputs of their parts for torch's inputs; ``framework`` are torch's."""

    def make(by_batch: ByBatch) -> VariantOutputs:
        """Those of the unquantized engine."""
        own, description = variants.engines[FULL_PRECISION], FULL_PRECISION.replace("_", " ")
        images = generate(pipeline_of(checkpoint, own), prompts, sampling_of(infer), description, by_batch)
        outputs = {part: own[part](**framework.inputs[part]) for part in reversed(checkpoint.parts())}
        return VariantOutputs({FULL_PRECISION: images}, {}, {FULL_PRECISION: outputs}, {})

    unquantized = kept.provide(checkpoint, prompts, infer, make, {"engine": infer.engine})
    variant, sampling = variants.engines[QUANTIZED], recipe_sampling(infer)  # its other parts are the unquantized ones
    recipe = {
        "engine": infer.engine,
        "assignments": variants.digests(),
        "simulated": variants.simulated is not None,
        "opened": source_digest("stages.open_parts"),
    }
    images = framework.images | unquantized.images
    outputs = framework.outputs | unquantized.outputs
    watched, counts = WatchedVariant(variant, {}), list[Tensor]()
    letters = [COMPUTED, *sorted(infer.precise_letters)]
    engines = [engine_of_letter(checkpoint.family.DENOISER, letter) for letter in letters]
    denoisers = denoisers_of(checkpoint)
    engines += denoisers[1:]

    def counting(
        batches: Sequence[Sequence[int]], make: Callable[[int], Tensors], also: Sequence[Any] = ()
    ) -> list[Tensors]:
        """Let each batch bring the number of the denoiser's calls by letter, and of samples in them."""

        def made(place: int) -> Tensors:
            watched.count |= dict.fromkeys(engines, 0)
            watched.samples |= dict.fromkeys(engines, 0)
            return make(place) | {
                COUNTED: torch.tensor([[watched.count[name], watched.samples[name]] for name in engines])
            }

        found = kept.divided(kept.origin(checkpoint, prompts, infer, recipe, sampling), batches, made)
        counts.extend(tensors.pop(COUNTED) for tensors in found)
        return found

    images[QUANTIZED] = generate(pipeline_of(checkpoint, watched), prompts, sampling, "quantized", counting)
    outputs[QUANTIZED] = {part: variant[part](**framework.inputs[part]) for part in variants.assignments}
    totals = torch.stack(counts).sum(dim=0).tolist()
    own, others = totals[: len(letters)], totals[len(letters) :]
    of_an_image = counted(checkpoint, dict(zip(letters, own, strict=True)), prompts, infer)
    if others:
        calls = [sum(calls for calls, _ in own), *(calls for calls, _ in others)]
        by_denoiser = {part: each // len(counts) for part, each in zip(denoisers, calls, strict=True)}
        of_an_image = replace(of_an_image, by_denoiser=by_denoiser)
    return VariantOutputs(images, framework.inputs, outputs, framework.calls, of_an_image)


def counted(
    checkpoint: Checkpoint, of_letters: Mapping[str, Sequence[int]], prompts: list[str], infer: Infer
) -> CallsOfAnImage:
    """The denoiser's calls for each of the images of ``prompts``, of all calls and all samples in them, by letter."""
    batches, a_call = len(sampling_of(infer).batches(range(len(prompts)))), samples_per_image(checkpoint, infer.scale)
    by_letter = {letter: calls // batches for letter, (calls, _) in of_letters.items()}
    calls, samples = sum(by_letter.values()), sum(samples for _, samples in of_letters.values())
    halves = a_call * calls - samples // len(prompts) if a_call == 2 else 0
    precise = {letter: count for letter, count in by_letter.items() if letter != COMPUTED and count}
    schedule = infer.given_schedule or COMPUTED * infer.recipe_steps
    return CallsOfAnImage(calls - halves, halves, precise, calls / sum(each not in NOT_COMPUTED for each in schedule))


def framework_images(
    checkpoint: Checkpoint, variant: Mapping[str, Engine], prompts: list[str], infer: Infer, kept: KeptOutputs
) -> VariantOutputs:
    """Make torch's images in full precision, with which everything is compared."""
    return kept.provide(checkpoint, prompts, infer, partial(compare_framework, checkpoint, variant, prompts, infer))


def compare_framework(
    checkpoint: Checkpoint, variant: Mapping[str, Engine], prompts: list[str], infer: Infer, by_batch: ByBatch = in_turn
) -> VariantOutputs:
    """Make torch's images, and keep the inputs and outputs of some calls of its parts on the way."""
    steps, denoiser = sampling_of(infer).steps_taken, checkpoint.family.DENOISER
    calls = sampled_calls(len(sampling_of(infer).batches(range(len(prompts)))), steps)
    wanted = sorted({0, steps // 2, *calls})  # one of two denoisers is called in fewer steps
    watched = WatchedVariant(variant, {denoiser: wanted})
    seen: dict[str, dict[int, dict[str, Tensor]]] = {denoiser: {}}

    def watching(
        batches: Sequence[Sequence[int]], make: Callable[[int], Tensors], also: Sequence[Any] = ()
    ) -> list[Tensors]:
        """Let each batch bring the inputs of the calls that are wanted of it, and of parts that it is first to call."""
        of_batch = [[call for call in wanted if call // steps == place] for place in range(len(batches))]

        def made(place: int) -> Tensors:
            watched.count[denoiser], before = place * steps, set(watched.seen)
            tensors = make(place)
            first = {part: watched.seen[part] for part in watched.seen.keys() - before}
            watched.seen.pop(denoiser, None)
            return tensors | {
                f"call/{part}/{call}/{name}": tensor
                for part, calls in first.items()
                for call, inputs in calls.items()
                if part != denoiser or call in of_batch[place]
                for name, tensor in inputs.items()
            }

        found = by_batch(batches, made, of_batch)
        for path, tensor in [row for tensors in found for row in tensors.items() if row[0].startswith("call/")]:
            _, part, call, name = path.split("/", 3)
            seen.setdefault(part, {}).setdefault(int(call), {}).setdefault(name, tensor)
        return found

    images = generate(pipeline_of(checkpoint, watched), prompts, sampling_of(infer), "framework", watching)
    half_way = min(seen[denoiser], key=lambda number: abs(number - steps // 2), default=0)
    called = watched.seen | seen | {denoiser: {0: seen[denoiser].get(half_way)}}
    if uncalled := [part for part in checkpoint.parts() if not called.get(part, {}).get(0)]:
        raise ConfigError(f"infer.steps={steps} makes images without a call of {', '.join(uncalled)}; take more steps")
    inputs = {part: calls[0] for part, calls in called.items()}
    outputs = {part: variant[part](**inputs[part]) for part in reversed(checkpoint.parts())}
    kept = {  # copies, because one of them may be in inputs, and a file of safetensors holds no tensor twice
        str(number): {name: tensor.clone() for name, tensor in seen[denoiser][number].items()}
        for number in calls
        if number in seen[denoiser]
    }
    return VariantOutputs({FRAMEWORK: images}, inputs, {FRAMEWORK: outputs}, kept)


def sampled_calls(batches: int, steps: int) -> list[int]:
    """Numbers of up to SAMPLED calls of the denoiser, of different steps and, where there are several, batches."""
    return sorted({
        number * batches // SAMPLED * steps + (2 * number + 1) * steps // (2 * SAMPLED) for number in range(SAMPLED)
    })  # fmt: skip


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
        tensors |= {  # some outputs of a part are one tensor
            f"outputs/{variant}/{part}/{name}": parts[part][name].clone() for part in parts for name in parts[part]
        }
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
    return VariantOutputs(images, *(tree.get(name, {}) for name in ("inputs", "outputs", "calls")))


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
    comparison_grid(full, quantized, grid, prompts, label)
