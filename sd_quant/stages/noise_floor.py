"""The noise floor: how far full-precision images change if the same model is computed in another way (see WAYS).

A recipe whose images are nearer to the reference than full-precision images with another batch size, number of threads,
precision, engine or CPU instruction set cannot be told from full precision computed in that way. Torch makes images in
each way once for a sweep, except by another engine (RUNTIME), whose images every job has. Alternatives not taken: other
seeds, which change the image itself, not its arithmetic; stored figures, which would measure another machine.
"""

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sd_quant.config import Infer, Model
from sd_quant.config.comparison import ALL, BATCH, ISA, RUNTIME, THREADS, WAYS
from sd_quant.devices import best_device, threads
from sd_quant.engines import RUNTIMES
from sd_quant.engines.base import Engine
from sd_quant.engines.torch import PRECISIONS, dtype_on
from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.files import temporary_folder
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import ByBatch, Generated, in_turn
from sd_quant.metrics.fidelity import fidelity
from sd_quant.models.checkpoint import contracts_of
from sd_quant.stages.generate import generate, sampling_of
from sd_quant.stages.load import Loaded
from sd_quant.stages.session import Session, open_unchecked
from sd_quant.stages.shared import VariantOutputs, pack, unpack
from sd_quant.stages.variants import FRAMEWORK, Variants, torch_variant

LOG = logging.getLogger(__name__)
# By the instruction set that torch uses on this CPU: the next lower set, in the names of torch, oneDNN and MKL, the
# values of CLASS_VARIABLES.
LOWER_CLASS = {"AVX512": ("avx2", "AVX2", "AVX2"), "AVX2": ("default", "SSE41", "SSE4_2")}
CLASS_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def noise_floor(ways: Sequence[str], variants: Variants, framework: VariantOutputs) -> dict[str, dict[str, Any]]:
    """Score images by each of ``ways``, such as BATCH, against torch's, or give a ``reason``; RUNTIME is left empty."""
    theirs, floor = framework.images[FRAMEWORK], dict[str, dict[str, Any]]()
    for way in ways_of(ways):
        reason = why_not_made(way, variants.loaded)
        if reason is None and way != RUNTIME:
            variants.make_room()
            try:
                own = images_by(way, variants, theirs)
                floor[way] = fidelity(theirs.images, own.images, theirs.latents, own.latents)
                continue
            except SdQuantError as error:  # such as latents that overflow in fp16
                reason = str(error)
        if reason is not None:
            LOG.info("no noise floor by %s: %s", way, reason)
        floor[way] = {} if reason is None else {"reason": reason}
    return floor


def ways_of(ways: Sequence[str]) -> list[str]:
    """Return the ways to compute that the setting names, without duplicates; ALL stands for every entry of WAYS."""
    return list(WAYS) if ALL in ways else list(dict.fromkeys(ways))


def check_noise_floor(ways: Sequence[str], loaded: Loaded) -> None:
    """Raise ConfigError if one of the ``ways`` to compute (unless ALL) is not possible for this job or machine."""
    for way in () if ALL in ways else ways:
        if reason := why_not_made(way, loaded):
            raise ConfigError(f"noise_floor has {way}, but {reason}; leave it out, or give noise_floor={ALL}")


def why_not_made(way: str, loaded: Loaded) -> str | None:
    """Return why computing by ``way``, such as BATCH, equals the reference or is impossible here; None if usable."""
    infer = loaded.infer
    if way == RUNTIME:
        runtime = RUNTIMES[infer.engine]
        same = runtime.file is None and not runtime.compiled
        return f"infer.engine={infer.engine} computes the unquantized model as the reference does" if same else None
    if way == BATCH:
        other, numbers = other_batch(infer), range(len(infer.prompt_list()))
        if sampling_of(other).batches(numbers) == sampling_of(infer).batches(numbers):
            return "no two of these images fit into one batch"
        try:
            loaded.check(loaded.model, other)
        except ConfigError as error:
            return str(error)
        return None
    device = best_device()
    if way in PRECISIONS:
        contracts = contracts_of(loaded.checkpoint).values()
        same = all(dtype_on(device, infer.precision, each) == dtype_on(device, way, each) for each in contracts)
        return f"the reference is computed in {way}, as far as these parts can be" if same else None
    if device.type == "cuda":
        return "torch computes on the GPU, where the processor decides nothing"
    if way == ISA and torch.backends.cpu.get_cpu_capability() not in LOWER_CLASS:
        return "no class below this processor's is known"
    return None


def other_batch(infer: Infer) -> Infer:
    """Return ``infer`` with batch size 1, or 2 if the batch size is 1."""
    return replace(infer, batch_size=1 if infer.batch_size > 1 else 2)


def images_by(way: str, variants: Variants, theirs: Generated) -> Generated:
    """Make full-precision images with the change ``way``, an entry of WAYS; ``theirs``: images without the change."""
    infer = variants.loaded.infer
    reference = partial(generated, way, variants.loaded, variants.engines[FRAMEWORK])
    if way == BATCH:
        other = other_batch(infer)
        return made(way, variants, other, partial(reference, other))
    if way == THREADS:
        return with_other_threads(variants, partial(reference, infer), theirs)
    if way == ISA:
        capability = torch.backends.cpu.get_cpu_capability()
        return made(way, variants, infer, lambda _: on_lower_class(variants), capability)
    other = replace(infer, precision=way)
    return made(way, variants, other, partial(in_precision, variants.loaded, other))


def made(
    way: str, variants: Variants, infer: Infer, make: Callable[[ByBatch], Generated], detail: object = ""
) -> Generated:
    """Return images with the change ``way`` from the cache (key: ``way`` and ``detail``) or from ``make``."""
    outputs = variants.shared.provide(
        variants.loaded.checkpoint, infer, lambda by_batch: VariantOutputs({way: make(by_batch)}),
        {"noise_floor": f"{way} {detail}".rstrip()},
    )  # fmt: skip
    return outputs.images[way]


def generated(
    way: str, session: Session, engines: Mapping[str, Engine], infer: Infer, by_batch: ByBatch = in_turn
) -> Generated:
    pipeline = pipeline_of(session.checkpoint, engines)
    return generate(pipeline, infer.prompt_list(), sampling_of(infer), f"noise floor, {way}", by_batch)


def in_precision(loaded: Loaded, infer: Infer, by_batch: ByBatch) -> Generated:
    engines = torch_variant(loaded, infer, {})
    try:
        return generated(infer.precision, loaded, engines, infer, by_batch)
    finally:
        engines.pool.close()


def with_other_threads(variants: Variants, make: Callable[[ByBatch], Generated], theirs: Generated) -> Generated:
    """Make images with half of the threads (with two if there is one), or with all if half changes no bit.

    The reference itself may have had half of the threads, for example in another job that filled the cache.
    """

    def with_threads(number: int, by_batch: ByBatch) -> Generated:
        before = torch.get_num_threads()
        torch.set_num_threads(number)
        try:
            return make(by_batch)
        finally:
            torch.set_num_threads(before)

    for number in (2, 1) if threads() == 1 else (threads() // 2, threads()):
        found = made(THREADS, variants, variants.loaded.infer, partial(with_threads, number), number)
        if not all(torch.equal(*pair) for pair in zip(found.latents, theirs.latents, strict=True)):
            break
    return found


def on_lower_class(variants: Variants) -> Generated:
    """Make images in a new process without the CPU's newest instructions: libraries choose these at start."""
    names = LOWER_CLASS[torch.backends.cpu.get_cpu_capability()]
    variables = dict(zip(CLASS_VARIABLES, names, strict=True)) | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with temporary_folder(variants.directory) as temporary:
        path = Path(temporary) / "images.safetensors"
        with environment(variables), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            done = child.submit(write_images, variants.loaded.model, variants.loaded.infer, path)
            if isinstance(error := done.exception(), BrokenExecutor):  # killed, perhaps for lack of memory
                raise SdQuantError(f"its process ended before its images were made ({error})")
            done.result()
        return unpack(load_file(path)).images[ISA]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def write_images(model: Model, infer: Infer, path: Path) -> None:
    """Make images by torch in this process and write them to ``path`` (safetensors)."""
    session = open_unchecked(model)
    images = generated(ISA, session, torch_variant(session, infer, {}), infer)
    save_file(pack(VariantOutputs({ISA: images})), path)
