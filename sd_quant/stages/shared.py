"""Results that jobs of one model share through the cache: measurements, images and outputs of parts."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd_quant.cache import Cache
from sd_quant.calibration.store import content_digest
from sd_quant.config import CacheFolder, Infer
from sd_quant.engines import RUNTIMES
from sd_quant.files import read_regular, sha256, temporary_folder
from sd_quant.inference.parity import Outputs
from sd_quant.inference.pipeline import ByBatch, Generated, Sampling, Tensors
from sd_quant.models.checkpoint import Checkpoint, key_of
from sd_quant.places import output_path
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.report.record import weights_sha256
from sd_quant.source import source_digest
from sd_quant.stages.export_onnx import assignment_digest
from sd_quant.stages.generate import sampling_of

FOUND, BATCH = "found.json", "batch.safetensors"


@dataclass(frozen=True)
class CallsOfAnImage:
    """The number of denoiser calls for one image, by kind."""

    number: int
    precise: Mapping[str, int] = field(default_factory=dict)  # calls in precise steps, by the schedule's letter
    in_a_step: float = 1.0  # calls a computed step, e.g. 2 if guidance is two calls, or a sampler calls twice
    by_denoiser: Mapping[str, int] = field(default_factory=dict)  # calls of each denoiser, if the pipeline has several

    def share(self, costs: Mapping[str, float], steps: int) -> float:
        """Return the time of these calls relative to ``steps`` whole steps; ``costs``: from ``latency.costs_of``."""
        more = sum(count * (costs[letter] - 1) for letter, count in self.precise.items())
        return (self.number + more) / (self.in_a_step * steps)


@dataclass(frozen=True)
class VariantOutputs:
    """Images and part outputs of the model's variants (torch, engines) for the same prompts and seeds."""

    images: dict[str, Generated]  # by variant
    inputs: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)  # by part: of one call of torch's pipeline
    outputs: Mapping[str, Outputs] = field(default_factory=dict)  # by variant: outputs of the parts for ``inputs``
    # of torch's pipeline: inputs of further calls of the denoiser, spread over images and steps
    calls: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)
    of_an_image: CallsOfAnImage | None = None  # of the quantized variant


@dataclass(frozen=True)
class Shared:
    """A job's access to the cache that all jobs share, with the facts for cache keys."""

    facts: dict  # of the job: versions, machine, inputs; for keys
    directory: Path  # for temporary files
    cache: Cache

    @property
    def sha256(self) -> str | None:
        """The hash of the model's weights."""
        return weights_sha256(self.facts)

    def made_of(self, *modules: str) -> dict[str, Any]:
        """Return the key entries of every result: the model, the code of ``modules``, package versions, the machine."""
        packages = dict.fromkeys(("torch", "diffusers", "transformers", *(row.package for row in RUNTIMES.values())))
        return {
            "checkpoint": self.sha256,
            "source": source_digest("checkpoints.kinds", *modules),
            "versions": {name: self.facts["versions"].get(name) for name in packages},
            # CPUs and GPUs round differently
            "machine": [self.facts["machine"][name] for name in ("cpu", "usable_cores", "gpus")],
        }

    def found(self, kind: str, origin: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the result for key ``origin`` from the cache, or else from ``make`` (a value that JSON can hold)."""

        def write(folder: Path) -> None:
            (folder / FOUND).write_text(json.dumps({"found": make()}), encoding="utf-8")

        with temporary_folder(self.directory) as temporary:
            self.cache.provide(kind, origin, Path(temporary), write)
            return json.loads(read_regular(Path(temporary) / FOUND))["found"]

    def sensitivities(
        self,
        assignment: Mapping[str, LayerAssignment],
        calls: Mapping[str, Tensor],
        guidance_scale: float,
        layers: Sequence[str],
        error: Callable[[str], float],
    ) -> dict[str, float]:
        """Return each layer's ``error`` by ``assignment`` on the inputs ``calls``, from the cache or computed."""
        origin = self.made_of("simulation.sensitivity", "stages.open_parts") | {
            "modelopt": self.facts["versions"].get("nvidia-modelopt"),
            "assignment": assignment_digest(assignment),
            "calls": content_digest("", "", calls),
            "guidance_scale": guidance_scale,
            "quantized": list(layers),
        }
        return self.found("sensitivities", origin, lambda: {name: error(name) for name in layers})

    def provide(
        self,
        checkpoint: Checkpoint,
        infer: Infer,
        make: Callable[[ByBatch], VariantOutputs],
        engine: Mapping[str, Any] = {},
        sampling: Sampling | None = None,
    ) -> VariantOutputs:
        """Return ``make``'s images, or the cache's for the same model, machine, ``sampling`` and ``engine``."""
        origin = self.origin(checkpoint, infer.prompt_list(), infer, engine, sampling or sampling_of(infer))
        made = cache(lambda: pack(make(partial(self.batches, origin))))
        with temporary_folder(self.directory) as temporary:
            path = Path(temporary) / "images.safetensors"
            self.cache.provide("images", origin, path.parent, lambda folder: save_file(made(), folder / path.name))
            return unpack(load_file(path))

    def batches(
        self,
        origin: Mapping[str, Any],
        batches: Sequence[Sequence[int]],
        make: Callable[[int], Tensors],
        also: Sequence[Any] = (),
    ) -> list[Tensors]:
        """Return each batch of images from the cache or ``make``; key: ``origin``, its numbers and ``also``."""
        prompts = origin["prompts"]
        origins = {
            str(place): {
                **origin,
                "prompts": [prompts[number] for number in batch],
                "numbers": list(batch),
                "also": each,
            }
            for place, (batch, each) in enumerate(zip(batches, also or [None] * len(batches), strict=True))
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
        """Return the cache key of images: all that they depend on. ``engine``: key entries of the engine."""
        return {
            **self.made_of("export.parts", "inference.parity", "inference.loading"),
            # the code that decides which calls are kept, and their names
            "packed": [sha256(Path(__file__).with_name(name)) for name in ("shared.py", "compare.py")],
            "contracts": key_of(checkpoint),  # knobs may change the shapes of parts
            "prompts": prompts,
            "sampling": sampling.described(),
            "precision": infer.precision,
            **engine,
        }


def cache_of(folder: CacheFolder) -> Cache:
    """Return the cache that the knobs name, or a cache that keeps nothing."""
    return Cache(output_path(folder.dir) if folder.dir else None, folder.limit_gb * 1e9)


def pack(made: VariantOutputs) -> dict[str, Tensor]:
    """Flatten images and outputs to tensors by path, for a safetensors file. Reverse: ``unpack``."""
    images = {name: {"images": each.images, "latents": each.latents} for name, each in made.images.items()}
    found = flat({"images": images, "inputs": made.inputs})
    # cloned, because safetensors stores no tensor twice, and outputs or calls may share one
    found |= {path: each.clone() for path, each in flat({"outputs": made.outputs, "calls": made.calls}).items()}
    return {path: tensor.contiguous() for path, tensor in found.items()}


def flat(tree: Any, path: str = "") -> dict[str, Tensor]:
    """Flatten a tree of mappings and lists to tensors by path (``a/b/000000``)."""
    if isinstance(tree, list):
        tree = {f"{number:06}": each for number, each in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {path: torch.as_tensor(tree)}
    found = dict[str, Tensor]()
    for name, each in tree.items():
        found |= flat(each, f"{path}/{name}" if path else name)
    return found


def tree_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Rebuild the tree that ``flat`` has flattened; lists become mappings in the same order."""
    tree: dict = {}
    for path, tensor in sorted(tensors.items()):
        *folders, name = path.split("/")
        reduce(lambda node, folder: node.setdefault(folder, {}), folders, tree)[name] = tensor
    return tree


def unpack(tensors: Mapping[str, Tensor]) -> VariantOutputs:
    """Rebuild the images and outputs that ``pack`` has flattened."""
    tree, images = tree_of(tensors), dict[str, Generated]()
    for variant, each in tree["images"].items():
        pixels, latents = each["images"], each["latents"]
        images[variant] = Generated(
            [image.numpy() for image in pixels.values()] if isinstance(pixels, dict) else pixels.numpy(),
            list(latents.values()) if isinstance(latents, dict) else latents,
        )
    return VariantOutputs(images, *(tree.get(name, {}) for name in ("inputs", "outputs", "calls")))
