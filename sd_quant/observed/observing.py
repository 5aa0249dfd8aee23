"""Opening of any diffusers pipeline: run it, record its networks' calls, export each network, find its layers' roles.

The result is cached under a hash of the folder's files, the request and this code, so that a job, its helpers and the
jobs of a sweep run and export the pipeline only once.
"""

import json
import logging
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.cache import Cache
from sd_quant.calibration.store import content_digest
from sd_quant.checkpoints.diffusers_network import network_of, with_small_weights
from sd_quant.checkpoints.diffusers_pipeline import Folder, open_folder
from sd_quant.devices import threads
from sd_quant.engines import RUNTIMES
from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.files import write_json
from sd_quant.files.images import drawn, has_images, kinds
from sd_quant.files.tensors import Weights
from sd_quant.layers.roles import observed_layers
from sd_quant.models import Dtypes
from sd_quant.models.parts import Axis, Part
from sd_quant.observed.calls import Call, one_structure, signature_of, with_outputs
from sd_quant.observed.checkpoint import OBSERVED_JSON, Observation, ObservedCheckpoint, ObservedPart
from sd_quant.observed.ladder import LARGE, climb
from sd_quant.observed.part import Rung, part_of
from sd_quant.observed.watching import Asked, Facts, Watched, runs_of, watch
from sd_quant.report.provenance import fingerprint, versions
from sd_quant.source import source_digest

LOG = logging.getLogger(__name__)
PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "onnx", "onnx-ir", "onnxscript")
GRAIN = 64  # pixels; the sides of the images with which large networks are recorded are multiples of it
SMALL = 200_000_000  # parameters; networks above it are recorded on the meta device, without weights in memory
MOST_OTHER = 2**30  # bytes of a component that is no network
OF = ("batch", "width*height", "width", "height", "batch*width*height", "batch*width", "batch*height")
GRAINS = (1, 4, 8, 16, 32, 64)  # pixels along a side of a latent, or of a token


def open_observed(
    path: Path, asked: Asked, excluded: tuple[str, ...], denoiser: str | None, cache: Cache, dtypes: Dtypes = None
) -> ObservedCheckpoint:
    """Open the folder of a pipeline and run it to record its structure, or take the recording from the ``cache``.

    ``asked`` is the request to run; noise replaces its images. Networks above ``SMALL`` parameters run without
    weights. ``excluded`` are patterns of layer names, ``denoiser`` is the part to quantize (None: the first), and
    ``dtypes`` are those of exported weights. Raises ConfigError for an unsupported pipeline or unknown ``denoiser``,
    ArtifactError for a damaged or incomplete folder, and for a pipeline that fails, with the cause.
    """
    folder = open_folder(path, images=any(map(has_images, asked.called.values())))
    weights, kind = folder.components, folder.kind.__name__
    origin = {
        "index": folder.index, "configs": folder.configs,
        "request": [asked.width, asked.height, asked.scale, kinds(asked.called)],
        "weights": {name: content_digest("", "", each) for name, each in weights.items() if is_small(each)},
        "others": {name: hash_of(path / name) for name in folder.described.keys() - weights.keys()},
        "versions": versions(*PACKAGES, *(runtime.package for runtime in RUNTIMES.values() if runtime.package)),
        "source": source_digest("observed.observing"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary)

        def make(made: Path) -> None:
            LOG.info("observing %s: how it calls its networks, and which of them can be exported", kind)
            write_json(made / OBSERVED_JSON, observe(folder, asked).to_json())

        cache.provide("observed", origin, target, make)
        observation = Observation.from_json(json.loads((target / OBSERVED_JSON).read_text(encoding="utf-8")))
    if denoiser is not None and denoiser not in observation.denoisers:
        raise ConfigError(
            f"model.denoiser is {denoiser}, expected one of {', '.join(observation.denoisers)}, the networks that "
            f"{kind} calls in its denoising steps"
        )
    reopen = partial(open_observed, path, asked, excluded, denoiser, cache, dtypes)
    return ObservedCheckpoint(
        **vars(folder), arguments=dict(asked.arguments), excluded=excluded,
        denoiser=denoiser or observation.denoisers[0], observation=observation, reopen=reopen, dtypes=dtypes,
    )  # fmt: skip


def observe(folder: Folder, asked: Asked) -> Observation:
    """Run the pipeline and record its structure. Raises ArtifactError if the pipeline fails or has no denoiser."""
    started, described, configs, weights = time.perf_counter(), folder.described, folder.configs, folder.components
    networks = {
        name: filled(network_of(described[name].kind, config), weights[name]) for name, config in configs.items()
    }
    asked = replace(asked, arguments=drawn(asked.called), examples={})
    if not all(map(is_small, weights.values())):  # verifying a graph calls it a dozen times
        asked = replace(asked, width=smaller(asked.width), height=smaller(asked.height))
    watched = watch(folder.pipeline, networks, asked)
    called = [*watched.denoisers, *watched.conditioners]
    names = [*called, *(name for name in watched.calls if name not in called)]
    parts = {}
    for name in names:
        component = watched.components[name]
        prepared = watched.prepared.get(component, [])
        build = partial(network_of, described[component].kind, configs[component], prepared)
        dtype = torch.float16 if name in called else torch.float32  # T5 and autoencoders overflow in fp16
        recorded = chosen(watched.calls[name])
        rung = climb(
            build, recorded, weights[component], method=watched.methods[name], dtype=dtype,
            threads=threads(), large=LARGE if is_small(weights[component]) else 0,
        )  # fmt: skip
        rung = for_any_text(rung, recorded)
        if rung.cause is not None:
            LOG.warning("%s is not exported, and computed by torch: %s", name, rung.cause)
        calls = [watched.calls[name][number] for number in one_structure(watched.calls[name])]
        signature = rung.signature or with_outputs(signature_of(calls), watched.answers[name])
        part = part_of(component, signature, rung, build)
        axes = axes_of(part, watched, calls, asked, watched.samples_per_image if name in called else 1)
        served = tuple(dict.fromkeys(recorded[number].run for number in rung.serves))
        parts[name] = ObservedPart(component, signature, rung, axes, served)
    layers = {
        name: observed_layers(
            networks[name], watched.calls[name][0].arguments, text_of(watched.calls[name]), watched.methods[name]
        )
        for name in watched.denoisers
    }
    facts = {each.name: getattr(watched, each.name) for each in fields(Facts)}
    return Observation(
        **facts, pipeline=folder.kind.__name__, size=(asked.width, asked.height), parts=parts, layers=layers,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def for_any_text(rung: Rung, calls: Sequence[Call]) -> Rung:
    """Return the rung, or a refusal if its graph serves only texts of one length, because prompts differ in length."""
    alike = one_structure(calls)
    served = {calls[number].run for number in rung.serves}
    missed = any(calls[number].run == "prompt" and number not in rung.serves for number in alike)
    if rung.cause is None and missed and "prompt" not in served:
        cause = f"its graph serves texts of one length alone ({rung.name})"
        return Rung("refused", method=rung.method, notes=rung.notes, cause=cause)
    return rung


def hash_of(folder: Path) -> str | None:
    """Hash all files of a tokenizer, scheduler or processor. Raises ArtifactError above ``MOST_OTHER`` bytes."""
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > MOST_OTHER:
        raise ArtifactError(f"{folder} holds {size} bytes of files, expected at most {MOST_OTHER}; fetch it again")
    return fingerprint(folder)["sha256"]


def is_small(weights: Weights) -> bool:
    """Whether a network has at most ``SMALL`` parameters, so that it runs with weights, a part of the cache key."""
    return sum(math.prod(tensor.shape) for tensor in weights.tensors.values()) <= SMALL


def smaller(side: int) -> int:
    """Return a shorter image side in pixels for recording large networks; graphs of dynamic size serve ``side`` too."""
    return min(side, max(GRAIN, side // 8 // GRAIN * GRAIN))


def filled(network: nn.Module, weights: Weights) -> nn.Module:
    """Load the weights of a small network (``is_small``); return a large network unchanged."""
    if is_small(weights):
        with_small_weights(network, weights, math.inf)
    return network


def chosen(calls: Sequence[Call]) -> list[Call]:
    """Select calls for verification: the first of each run, and of the run "base" the first of each denoising step."""
    first: dict[tuple[str, int], Call] = {}
    for call in calls:
        first.setdefault((call.run, call.step if call.run == "base" else 0), call)
    return list(first.values())


def text_of(calls: Sequence[Call]) -> set[str]:
    """Return the names of arguments that hold text embeddings: float tensors that are equal in two denoising steps."""
    base = [call for call in calls if call.run == "base"]
    other = next((call for call in base if call.step != base[0].step), base[0])
    return {
        name
        for name, value in base[0].arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
        and other is not base[0] and torch.equal(value, other.arguments[name])
    }  # fmt: skip


def axes_of(part: Part, watched: Watched, calls: Sequence[Call], asked: Asked, samples: int) -> dict[str, Axis]:
    """Return the size of each dynamic axis as a formula of the batch and the image's width and height.

    ``samples`` is the number of samples in the batch for each image.
    """
    found: dict[str, list[int]] = {}
    runs = []
    for run, requests in runs_of(asked.width, asked.height, watched.style).items():
        call = next((call for call in calls if call.run == run and run != "prompt"), None)
        if call is None:
            continue
        size = watched.sizes[run]
        try:
            tensors = part.arguments(part.contract, call.arguments)
        except SdQuantError:  # a call that the graph does not serve
            continue
        runs.append({"batch": samples * len(requests[0].prompts), "width": size[0], "height": size[1]})
        for tensor, shape in part.contract.inputs.items():
            for axis, length in zip(shape, tensors[tensor].shape, strict=True):
                if isinstance(axis, str) and len(found.setdefault(axis, [])) < len(runs):
                    found[axis].append(length)
    return {axis: axis_of(sizes, runs) for axis, sizes in found.items()}


def axis_of(sizes: Sequence[int], runs: Sequence[Mapping[str, int]]) -> Axis:
    """Fit a formula to the ``sizes`` of an axis in ``runs``, each with a batch, a width and a height.

    Calls are timed, and TensorRT plans built, for sizes that were never run. All axes of diffusers' networks are
    proportional to the batch, the image's width, height or area, or a product of these, perhaps after a fixed number
    of text tokens. The simplest formula that fits all runs is returned; where no formula fits, the first size.
    """
    bases = {of: [math.prod(run[name] for name in of.split("*")) for run in runs] for of in OF}
    proportional = [(of, Fraction(sizes[0], base[0])) for of, base in bases.items()]
    grains = [(of, Fraction(1, grain ** (of.count("width") + of.count("height")))) for of in OF for grain in GRAINS]
    for of, factor in (*proportional, *grains):
        offsets = {size - factor * each for each, size in zip(bases[of], sizes, strict=True)}
        if len(offsets) == 1 < len(set(sizes)) and (offset := offsets.pop()) >= 0 and offset.denominator == 1:
            return Axis(of, factor.numerator, factor.denominator, int(offset))
    return Axis("", 0, 1, sizes[0])
