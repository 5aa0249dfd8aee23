"""Statistics of other parts than the denoiser: text encoders on the calibration prompts, the decoder on their latents.

Each part has an entry of its own in the cache, so that the denoiser's entries serve jobs with and without such parts.
Text encoders are called without denoising. The decoder gets the final latents of the denoiser's pass; where that came
from the cache, the prompts are denoised again. An observed pipeline encodes, denoises and decodes in one call, and is
run as a whole.

Everything runs in this process, whatever ``quantize.devices`` is: an encoder is called once for a prompt, the denoiser
some twenty times. Rows are drawn by text and by latent, in the order in which they first come, so a negative prompt
that all images share counts once.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sd_quant.cache import lockable, locked
from sd_quant.calibration.collection import fabric_for, on_device, origin
from sd_quant.calibration.hooks import collect, draw
from sd_quant.calibration.overflow import watch
from sd_quant.calibration.store import Entries
from sd_quant.engines.base import Engine
from sd_quant.files import digest
from sd_quant.inference.loading import LoadedModel, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.watched import WatchedEngine
from sd_quant.models import VAE_ENCODER
from sd_quant.models.checkpoint import key_of
from sd_quant.models.family import Observed
from sd_quant.models.parts import network_in
from sd_quant.quantization.hessians import NO_HESSIANS, Hessians
from sd_quant.quantization.statistics import Statistics
from sd_quant.source import source_digest

LOG = logging.getLogger(__name__)
DECODER = "vae"


class Encoded(BaseException):
    """Ends a pipeline's call before it denoises; no ``Exception``, which some catch."""


def calibrate_parts(
    model: LoadedModel,
    names: Mapping[str, Sequence[str]],
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    checkpoint_sha256: str,
    latents: Mapping[int, Tensor] = {},
    cache: Path | None = None,
    accelerator: str = "auto",
    hessians: Mapping[str, Hessians] = {},
) -> dict[str, Statistics]:
    """The statistics of the layers ``names``, by part, over all ``prompts``, from the cache where it has them.

    ``latents`` are what is decoded of prompts by number, as far as it is known, ``hessians`` what is summed besides, by
    part. Raises SdQuantError naming layer and text when an input of a layer is not finite.
    """
    fabric, everything, found = fabric_for(accelerator, 1), range(len(prompts)), dict[str, Statistics]()
    inputs = digest(key_of(model.checkpoint))
    source = source_digest("calibration.parts")
    with ExitStack() as stack:
        entries = {}
        for part, layers in names.items() if cache else ():
            summed = hessians.get(part, NO_HESSIANS)
            made_from = origin(checkpoint_sha256, layers, sampling, fabric.device.type, summed)
            made_from |= {"inputs": inputs, "part": part, "of_parts": source}
            kept = Entries(cache, made_from, sampling.texts_of(prompts))
            if lockable(kept.folder):
                stack.enter_context(locked(kept.folder / ".lock", "waiting for another process, as it calibrates"))
                entries[part] = kept
            if kept.path(everything).exists() and (read := kept.read(everything)) is not None:
                LOG.info("from the cache: statistics of %s", part)
                found[part] = read
        missing = {part: layers for part, layers in names.items() if part not in found}
        if missing:
            LOG.info("calibrating %s on %d prompts", " and ".join(missing), len(prompts))
            found |= collect_parts(fabric, model, missing, prompts, sampling, latents, hessians)
        for part in missing.keys() & entries.keys():
            entries[part].write(everything, found[part])
    return found


def collect_parts(
    fabric,
    model: LoadedModel,
    names: Mapping[str, Sequence[str]],
    prompts: Sequence[str],
    sampling: Sampling,
    latents: Mapping[int, Tensor] = {},
    hessians: Mapping[str, Hessians] = {},
) -> dict[str, Statistics]:
    """The statistics of the layers ``names``, by part. ``latents`` and ``hessians`` as for ``calibrate_parts``."""
    checkpoint, everything = model.checkpoint, range(len(prompts))
    observed = isinstance(checkpoint.family, Observed)
    known = not observed and all(number in latents for number in everything)
    denoised = observed or (DECODER in names and not known)
    left_out = set() if denoised else {checkpoint.family.DENOISER, DECODER}
    used = [part for part in model.parts if part in names or part not in left_out]
    if sampling.source is None and not observed:
        used = [part for part in used if part != VAE_ENCODER]
    with on_device(fabric, model, used), ExitStack() as stack:
        networks = {part: network_in(checkpoint.parts()[part], model.parts[part]) for part in names}
        seen: dict[str, dict[bytes, int]] = {part: {} for part in names}  # texts or latents, numbered as they come
        batch: dict[str, list[int]] = {}
        texts = len({*prompts}) + len({*(sampling.negative_prompts or [""])})
        statistics = {}

        def number(part: str, inputs: Mapping[str, Tensor]) -> None:
            """Note which texts or latents the part is called with."""
            rows, order = next(iter(inputs.values())).detach().cpu(), seen[part]
            numbers = [order.setdefault(row.contiguous().numpy().tobytes(), len(order)) for row in rows]
            batch[part] = [min(each, texts - 1) for each in numbers]

        engines: dict[str, Engine] = {}
        for part in used:
            engines[part] = model.torch_engine(part)
            if part not in names:
                continue
            engines[part] = WatchedEngine(engines[part], partial(number, part))
            layers = {name: networks[part].get_submodule(name) for name in names[part]}
            bound = range(len(prompts) if part == DECODER else texts)
            reads_text = [] if part == DECODER else list(layers)
            wanted = draw(layers, bound, 1, sampling.seed, reads_text)
            position = partial(lambda part: (0, batch[part]), part)
            summed = hessians.get(part, NO_HESSIANS)
            collecting = collect(model.parts[part], layers, bound, 1, position, wanted, hessians=summed)
            statistics[part] = stack.enter_context(collecting)
        peaks = stack.enter_context(watch(networks))
        pipeline = pipeline_of(checkpoint, engines)

        def encoded(numbers: Sequence[int]) -> None:
            if not denoised:
                raise Encoded

        with suppress(Encoded):
            pipeline(prompts, sampling, on_batch=encoded)
        if DECODER in names and not denoised:
            for numbers in sampling.batches(everything):
                engines[DECODER](z=torch.stack([latents[each] for each in numbers]))
    for part, found in statistics.items():
        found.peaks |= {part: peaks[part]} if part in peaks else {}
        for layer in found.layers.values():
            if layer.kind == "conv":  # fewer texts may have come
                layer.amax = layer.amax[: max(1, len(seen[part]))]
    return statistics
