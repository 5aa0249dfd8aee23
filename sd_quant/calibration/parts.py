"""Calibrate text encoders (on the calibration prompts) and the VAE's decoder (on their final latents).

Each part has its own cache entry, so that the denoiser's entries serve jobs with and without these parts. Text encoders
are called without denoising. The decoder gets the final latents of the denoiser's calibration; if that was cached, the
prompts are denoised again. A pipeline known only from recording one run (``Observed``) is run as a whole.

Everything runs in this process, whatever ``quantize.devices`` is: an encoder is called once per prompt, the denoiser
about twenty times. Texts and latents are numbered in order of first appearance, and rows are drawn by this number, so a
negative prompt that all images share counts once.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sd_quant.cache import lockable, locked
from sd_quant.calibration.collection import Pass, on_device
from sd_quant.calibration.hooks import collect, draw
from sd_quant.calibration.overflow import watch
from sd_quant.engines.base import Engine
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.watched import WatchedEngine
from sd_quant.models import VAE_ENCODER
from sd_quant.models.family import Observed
from sd_quant.models.parts import network_in
from sd_quant.quantization.statistics import Statistics
from sd_quant.source import source_digest

LOG = logging.getLogger(__name__)
DECODER = "vae"


class Encoded(BaseException):
    """Signal that ends a pipeline's call before denoising; no ``Exception``, because pipelines may catch these."""


def calibrate_parts(
    wanted: Mapping[str, Pass],
    fabric,
    *,
    checkpoint_sha256: str,
    latents: Mapping[int, Tensor] = {},
    cache: Path | None = None,
) -> dict[str, Statistics]:
    """Return the statistics of each part over all prompts, from the cache or collected now.

    ``wanted`` has each part's layers, with the same model, prompts and sampling. ``latents`` are known inputs of the
    decoder, by prompt number. Raises SdQuantError naming the layer and the text when an input is not finite.
    """
    found, source = dict[str, Statistics](), source_digest("calibration.parts")
    with ExitStack() as stack:
        entries = {}
        for part, own in wanted.items() if cache else ():
            everything = range(len(own.prompts))
            kept = own.entries(cache, checkpoint_sha256, fabric.device.type, part=part, of_parts=source)
            if lockable(kept.folder):
                stack.enter_context(locked(kept.folder / ".lock", "waiting for another process, as it calibrates"))
                entries[part] = kept
            if kept.path(everything).exists() and (read := kept.read(everything)) is not None:
                LOG.info("from the cache: statistics of %s", part)
                found[part] = read
        missing = {part: own for part, own in wanted.items() if part not in found}
        if missing:
            found |= collect_parts(fabric, missing, latents)
        for part in missing.keys() & entries.keys():
            entries[part].write(range(len(missing[part].prompts)), found[part])
    return found


def collect_parts(fabric, wanted: Mapping[str, Pass], latents: Mapping[int, Tensor] = {}) -> dict[str, Statistics]:
    """Collect the statistics of ``calibrate_parts``, without the cache."""
    alike = next(iter(wanted.values()))
    model, prompts, sampling = alike.model, alike.prompts, alike.sampling
    LOG.info("calibrating %s on %d prompts", " and ".join(wanted), len(prompts))
    checkpoint, everything = model.checkpoint, range(len(prompts))
    observed = isinstance(checkpoint.family, Observed)
    known = not observed and all(number in latents for number in everything)
    denoised = observed or (DECODER in wanted and not known)
    left_out = set() if denoised else {checkpoint.family.DENOISER, DECODER}
    used = [part for part in model.parts if part in wanted or part not in left_out]
    if sampling.source is None and not observed:
        used = [part for part in used if part != VAE_ENCODER]
    with on_device(fabric, model, used), ExitStack() as stack:
        networks = {part: network_in(checkpoint.parts()[part], model.parts[part]) for part in wanted}
        seen: dict[str, dict[bytes, int]] = {part: {} for part in wanted}  # texts or latents, numbered as they come
        batch: dict[str, list[int]] = {}
        texts = len({*prompts}) + len({*(sampling.negative_prompts or [""])})
        statistics = {}

        def number(part: str, inputs: Mapping[str, Tensor]) -> None:
            """Store, for each text or latent of this call, its index among the part's distinct inputs."""
            rows, order = next(iter(inputs.values())).detach().cpu(), seen[part]
            numbers = [order.setdefault(row.contiguous().numpy().tobytes(), len(order)) for row in rows]
            batch[part] = [min(each, texts - 1) for each in numbers]

        engines: dict[str, Engine] = {}
        for part in used:
            engines[part] = model.torch_engine(part)
            if part not in wanted:
                continue
            engines[part] = WatchedEngine(engines[part], partial(number, part))
            layers = {name: networks[part].get_submodule(name) for name in wanted[part].names}
            bound = range(len(prompts) if part == DECODER else texts)
            rows = draw(layers, bound, 1, sampling.seed, [] if part == DECODER else list(layers))
            position = partial(lambda part: (0, batch[part]), part)
            collecting = collect(model.parts[part], layers, bound, 1, position, rows)
            statistics[part] = stack.enter_context(collecting)
        peaks = stack.enter_context(watch(networks))
        pipeline = pipeline_of(checkpoint, engines)

        def encoded(numbers: Sequence[int]) -> None:
            if not denoised:
                raise Encoded

        with suppress(Encoded):
            pipeline(prompts, sampling, on_batch=encoded)
        if DECODER in wanted and not denoised:
            for numbers in sampling.batches(everything):
                engines[DECODER](z=torch.stack([latents[each] for each in numbers]))
    for part, found in statistics.items():
        found.peaks |= {part: peaks[part]} if part in peaks else {}
        for layer in found.layers.values():
            if layer.kind == "conv":  # fewer texts may have come
                layer.amax = layer.amax[: max(1, len(seen[part]))]
    return statistics
