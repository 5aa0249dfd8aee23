"""Run the calibration: the pipeline on the calibration prompts, with hooks, and without decoding most images.

Prompts are calibrated in segments that end at given numbers of prompts (snapshots); each finished segment is cached. So
a cancelled calibration continues at the last snapshot, and a larger calib_size costs only the added prompts. Processes
that need the same statistics, also on machines with a common cache, each calibrate another segment, and wait only when
no segment is free. Segments are merged in their order, so the result is that of a single process.

Lightning Fabric chooses the device. For several devices it starts one process per device, which calibrates a share of
the segment's prompts and writes its statistics to a file. Merging these files is exact.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sd_quant.cache import lockable
from sd_quant.calibration.hooks import collect, draw
from sd_quant.calibration.overflow import watch
from sd_quant.calibration.store import Entries, pack, unpack
from sd_quant.errors import ResourceError, SdQuantError
from sd_quant.files import digest
from sd_quant.inference.loading import LoadedModel, load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models import VAE_ENCODER
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, in_place, key_of
from sd_quant.models.family import Observed
from sd_quant.models.parts import network_in, text_readers
from sd_quant.progress import progress
from sd_quant.quantization.statistics import CALLS, ROWS, Statistics, layer_kind, merge
from sd_quant.source import source_digest
from sd_quant.text import counted

OnLatent = Callable[[int, torch.Tensor], object]

LOG = logging.getLogger(__name__)


def origin(checkpoint_sha256: str, names: Iterable[str], sampling: Sampling, device: str) -> dict:
    """Return, as part of a cache key, all that statistics of the layers ``names`` depend on, except the prompts."""
    return {
        "checkpoint": checkpoint_sha256,
        "layers": digest(*names),
        "sampling": replace(sampling, arguments=None).described(),
        "device": device,
        "kept": [ROWS, CALLS],
        "versions": {package: version(package) for package in ("torch", "diffusers", "transformers")},
        "source": source_digest("calibration.collection", "checkpoints.kinds"),
    }


def segment_of(start: int, stop: int, snapshots: Iterable[int]) -> range:
    """Return the prompt numbers from ``start`` to the first of the ``snapshots`` behind it, at most to ``stop``."""
    return range(start, min([stop, *(size for size in snapshots if size > start)]))


@dataclass(frozen=True)
class Pass:
    """A calibration job: the model, the layers to collect statistics of, and the prompts with their sampling."""

    model: LoadedModel
    names: Sequence[str]  # layers of the first denoiser; of a further denoiser ``<part>:<layer>``
    prompts: Sequence[str]
    sampling: Sampling

    def entries(self, cache: Path, checkpoint_sha256: str, device: str, **more: str) -> Entries:
        """Return this job's cache entries in the folder ``cache``; ``more`` are further parts of the cache key."""
        # a checkpoint can be opened with other names of inputs, with fewer text encoders, and with other arguments
        inputs = digest(key_of(self.model.checkpoint))
        made_from = origin(checkpoint_sha256, self.names, self.sampling, device)
        return Entries(cache, made_from | {"inputs": inputs} | more, self.sampling.texts_of(self.prompts))


def calibrate(
    wanted: Pass,
    fabric,
    *,
    checkpoint_sha256: str,
    cache: Path | None = None,
    snapshots: Iterable[int] = (),
    announce: Callable[[str, int], object] = lambda device, prompts: None,
    on_latent: OnLatent = lambda number, latent: None,
) -> Statistics:
    """Collect the statistics of all layers over all prompts, or read them from the cache. Those of further denoisers
    are in ``parts``.

    ``fabric`` comes from ``fabric_for``. Before the first prompt, unless all are cached, ``announce`` is called with
    the device's type and the number of prompts to calibrate. ``on_latent`` gets number and final latent, fp32
    [C, h, w], of each prompt not in the cache.
    Raises SdQuantError naming layer, prompt and step when an input of a layer is not finite.
    """
    prompts, processes = wanted.prompts, fabric.world_size
    entries = wanted.entries(cache, checkpoint_sha256, fabric.device.type) if cache else None
    merged, done, announced = Statistics({}, {}), 0, False
    while done < len(prompts):
        if entries and (entry := entries.longest(done, len(prompts))):
            segment, statistics = entry
            LOG.info("from the cache: statistics of prompts %d to %d", segment.start + 1, segment.stop)
        else:
            segment = segment_of(done, len(prompts), snapshots)
            entries = entries if entries and lockable(entries.folder) else None
            with entries.claimed(segment) if entries else nullcontext(True) as is_left:
                if not is_left:  # another process has made it
                    continue
                if not announced:
                    announce(fabric.device.type, len(prompts) - done)
                announced = True
                collect_all = collect_segment if processes == 1 else collect_in_processes
                statistics = collect_all(fabric, wanted, segment, on_latent=on_latent)
                if entries:
                    entries.write(segment, statistics)
        merged = merge([merged, statistics])
        done = segment.stop
    reached = merged.layers.keys() | {f"{part}:{name}" for part, own in merged.parts.items() for name in own.layers}
    if unreached := [name for name in wanted.names if name not in reached]:
        LOG.warning("%d layers were never reached during calibration, such as %s", len(unreached), unreached[0])
    if entries:
        LOG.info("statistics: %s; use them elsewhere with calibration=%s", entries.folder, entries.folder)
    return merged


def fabric_for(accelerator: str, devices: int = 1):
    """Create Lightning's Fabric for ``devices`` processes; ``accelerator`` "auto" uses GPUs if there are any.

    Lightning's hints about srun and TF32 are silenced. Raises ResourceError when there are fewer GPUs than ``devices``.
    """
    from lightning.fabric import Fabric

    gpus = torch.cuda.device_count()
    on_gpus = accelerator == "cuda" or (accelerator == "auto" and gpus > 0)
    if on_gpus and devices > gpus:
        raise ResourceError(
            f"calibration on {counted(devices, 'GPU')} was asked for and this machine has {gpus}; lower "
            "quantize.devices or set quantize.accelerator=cpu"
        )
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `srun` command is available")
        return Fabric(
            accelerator="cuda" if on_gpus else "cpu", devices=devices, strategy="ddp_spawn" if devices > 1 else "auto"
        )


def collect_segment(
    fabric, wanted: Pass, segment: range, subset: slice = slice(None), on_latent: OnLatent = lambda number, latent: None
) -> Statistics:
    """Collect the statistics of the prompts ``segment[subset]`` in this process. Afterwards the model is on the CPU.

    The batch of prompt 0 is decoded too, for the VAE decoder's largest activation, except in ``Observed`` pipelines.
    """
    mine = segment[subset]
    if not mine:  # more processes than prompts
        return Statistics({}, {})
    model, sampling = wanted.model, wanted.sampling
    checkpoint, steps = model.checkpoint, sampling.steps_taken
    is_observed = isinstance(checkpoint.family, Observed)
    unused = {"vae"} if is_observed or sampling.source is not None else {"vae", VAE_ENCODER}
    decoder = "vae" if 0 in mine and not is_observed else None
    used = [part for part in model.parts if part not in unused or part == decoder]
    networks = {part: network_in(checkpoint.parts()[part], model.parts[part]) for part in used}
    whole = [number for number in segment if sampling.size_of(number) == sampling.size_of(0)]
    now: dict = {}

    def collecting(part: str, own: Sequence[str]) -> AbstractContextManager[Statistics]:
        """Return a context that collects statistics of the layers ``own`` of a denoiser; "" is the first denoiser."""
        place = in_place(checkpoint, part or checkpoint.family.DENOISER)
        network = networks[place.family.DENOISER]
        layers = {name: network.get_submodule(name) for name in own}
        linears = [name for name, layer in layers.items() if layer_kind(layer) == "linear"]
        text, some_steps = text_readers(place.family.shared_inputs(linears)), checkpoint.family.SOME_STEPS
        rows = draw(own, segment, steps, sampling.seed, text, whole, some_steps=some_steps)
        return collect(
            model.parts[place.family.DENOISER], layers, mine, steps, lambda: (now["step"], now["batch"]), rows,
            denoiser_part(place).contract.batched,
        )  # fmt: skip

    calls, title = len(sampling.batches(mine)) * steps, f"prompts {segment.start + 1} to {segment.stop}"
    with (
        on_device(fabric, model, used),
        progress(calls, f"calibrate on {title}") as advance,
        ExitStack() as stack,
        watch(networks) as peaks,
    ):
        collected = {part: stack.enter_context(collecting(part, own)) for part, own in by_part(wanted.names).items()}

        def on_step(step: int) -> None:
            if (step, now["batch"]) != (now.get("step"), now.get("counted")):  # once for all calls of a step
                advance()
            now.update(step=step, counted=now["batch"])

        made = pipeline_of(checkpoint, {part: model.torch_engine(part) for part in used})(
            wanted.prompts, sampling, numbers=mine, decode=[0] if decoder else (),
            on_batch=lambda numbers: now.update(batch=numbers), on_step=on_step,
        )  # fmt: skip
        for number, latent in zip(mine, made.decoded or (), strict=made.decoded is not None):
            on_latent(number, latent)
    statistics = collected.pop("")
    statistics.parts |= collected
    statistics.peaks |= peaks
    return statistics


def by_part(names: Iterable[str]) -> dict[str, list[str]]:
    """Group layer names ``<part>:<layer>`` by part, without the prefix; "" is the first denoiser, without a prefix."""
    found: dict[str, list[str]] = {"": []}
    for name in names:
        part, _, own = name.rpartition(":")
        found.setdefault(part, []).append(own)
    return found


@contextmanager
def on_device(fabric, model: LoadedModel, parts: Sequence[str]) -> Iterator[None]:
    """Move these parts of the pipeline to Fabric's device in the ``with`` block, and to the CPU afterwards."""
    for part in parts:
        fabric.to_device(model.parts[part])
    try:
        yield
    finally:
        for part in parts:
            model.parts[part].to("cpu")


def collect_in_processes(fabric, wanted: Pass, segment: range, on_latent: OnLatent) -> Statistics:
    """Run ``collect_segment`` in several processes, each of which loads the model, and merge their statistics."""
    with tempfile.TemporaryDirectory() as folder:
        # a partial, because Fabric rebuilds the collections among launch's arguments and cannot rebuild a range
        asked = (wanted.names, wanted.prompts, wanted.sampling)
        fabric.launch(partial(collect_in_one_process, wanted.model.checkpoint, asked, segment, Path(folder)))
        if failures := sorted(Path(folder).glob("*.error")):
            raise SdQuantError(failures[0].read_text(encoding="utf-8"))
        for path in sorted(Path(folder).glob("*.latents")):
            for number, latent in load_file(path).items():
                on_latent(int(number), latent)
        return merge([unpack(load_file(path)) for path in sorted(Path(folder).glob("*.safetensors"))])


def collect_in_one_process(checkpoint: Checkpoint, asked: tuple, segment: range, folder: Path, fabric) -> None:
    """Calibrate this process's prompts with ``Pass(model, *asked)``; write statistics or an error to ``folder``."""
    rank, processes = fabric.global_rank, fabric.world_size
    if fabric.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    try:
        latents: dict[str, torch.Tensor] = {}
        statistics = collect_segment(
            fabric, Pass(load_model(checkpoint), *asked), segment, slice(rank, None, processes),
            on_latent=lambda number, latent: latents.update({str(number): latent.clone()}),
        )  # fmt: skip
        save_file(latents, folder / f"{rank}.latents")
        save_file(pack(statistics), folder / f"{rank}.safetensors")
    except SdQuantError as error:
        (folder / f"{rank}.error").write_text(str(error), encoding="utf-8")
