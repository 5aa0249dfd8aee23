"""The one statistics pass: the real pipeline on the calibration prompts, without decoding a picture.

Prompts are calibrated in segments that end at the snapshots. Each segment is cached as soon as it is done, so a pass
that was cancelled goes on at the last snapshot, and another calib_size pays only for the prompts it adds; of processes
that want the same, one calibrates and the others wait. Lightning Fabric places the work: on one device it happens in
this process; on several, each process takes its share of a segment's prompts and leaves its statistics in a file, and
merging them is exact.
"""

import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sd_quant.cache import locked
from sd_quant.calibration.hooks import collect, draw
from sd_quant.calibration.store import Shelf, pack, unpack
from sd_quant.errors import ResourceError, SdQuantError
from sd_quant.files import digest
from sd_quant.inference.loading import LoadedModel, load_model, pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.checkpoint import Checkpoint, denoiser_part
from sd_quant.progress import progress
from sd_quant.quantization.statistics import CALLS, ROWS, Statistics, merge
from sd_quant.source import source_digest

LOG = logging.getLogger(__name__)


def origin(checkpoint_sha256: str, names: Iterable[str], sampling: Sampling, device: str) -> dict:
    """Everything that the statistics depend on but the prompts."""
    return {
        "checkpoint": checkpoint_sha256,
        "layers": digest(*names),
        "sampling": asdict(sampling),
        "device": device,
        "kept": [ROWS, CALLS],
        "versions": {package: version(package) for package in ("torch", "diffusers", "transformers")},
        "source": source_digest("calibration.collection", "checkpoints.kinds"),
    }


def segments(start: int, stop: int, snapshots: Iterable[int]) -> list[range]:
    """The prompts from ``start`` to ``stop``, cut at the snapshots."""
    ends = sorted({size for size in snapshots if start < size < stop} | {stop})
    return [range(first, last) for first, last in zip([start, *ends], ends, strict=False)]


def calibrate(
    model: LoadedModel,
    names: Sequence[str],
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    checkpoint_sha256: str,
    snapshots: Iterable[int] = (),
    cache: Path | None = None,
    accelerator: str = "auto",
    devices: int = 1,
    announce: Callable[[str, int], object] = lambda device, prompts: None,
) -> Statistics:
    """Statistics of the denoiser's layers in ``names`` over all ``prompts``, from the cache as far as it has them.

    ``announce`` is told, before anything is collected, on what kind of device and how many prompts there are to do.

    Raises SdQuantError naming layer, prompt and step when an input of a layer is not finite, ResourceError when there
    are fewer GPUs than asked for.
    """
    fabric = place(accelerator, devices)
    inputs = digest(repr(denoiser_part(model.checkpoint).contract))  # one checkpoint can be read in several ways
    made_from = origin(checkpoint_sha256, names, sampling, fabric.device.type) | {"inputs": inputs}
    shelf = Shelf(cache, made_from, prompts) if cache else None
    found: list[Statistics] = []
    done, collected = 0, False
    alone = locked(shelf.folder / ".lock", "waiting for another process, which calibrates the same") if shelf else None
    with alone or nullcontext():
        while done < len(prompts):
            if shelf and (entry := shelf.longest(done, len(prompts))):
                segment, statistics = entry
                LOG.info("statistics of prompts %d to %d come from the cache", segment.start + 1, segment.stop)
            else:
                if not collected:
                    announce(fabric.device.type, len(prompts) - done)
                collected = True
                segment = segments(done, len(prompts), snapshots)[0]
                arguments = (names, prompts, segment, sampling)
                statistics = (
                    run(fabric, model, *arguments) if devices == 1 else run_shared(fabric, model.checkpoint, *arguments)
                )
                if shelf:
                    shelf.write(segment, statistics)
            found.append(statistics)
            done = segment.stop
    statistics = merge(found)
    if unreached := [name for name in names if name not in statistics.layers]:
        LOG.warning("%d layers were never reached during calibration, such as %s", len(unreached), unreached[0])
    if shelf:
        LOG.info("statistics: %s; use them elsewhere with calibration=%s", shelf.folder, shelf.folder)
    return statistics


def place(accelerator: str, devices: int):
    """Lightning's Fabric for ``devices`` processes; ``auto`` takes GPUs where there are any."""
    from lightning.fabric import Fabric

    gpus = torch.cuda.device_count()
    on_gpus = accelerator == "cuda" or (accelerator == "auto" and gpus > 0)
    if on_gpus and devices > gpus:
        raise ResourceError(
            f"calibration on {devices} GPUs was asked for and this machine has {gpus}; lower quantize.devices or set "
            "quantize.accelerator=cpu"
        )
    return Fabric(
        accelerator="cuda" if on_gpus else "cpu", devices=devices, strategy="ddp_spawn" if devices > 1 else "auto"
    )


def run(
    fabric,
    model: LoadedModel,
    names: Sequence[str],
    prompts: Sequence[str],
    segment: range,
    sampling: Sampling,
    share: slice = slice(None),
) -> Statistics:
    """Statistics of this process's ``share`` of the segment's prompts. The model is back on the CPU afterwards."""
    mine = segment[share]
    if not mine:  # more processes than prompts
        return Statistics({}, {})
    checkpoint = model.checkpoint
    used = [part for part in model.parts if part != "vae"]
    for part in used:
        fabric.to_device(model.parts[part])
    pipeline = pipeline_of(checkpoint, {part: model.torch_engine(part) for part in used})
    layers = {name: model.denoiser.get_submodule(name) for name in names}
    batched = [name for name, shape in denoiser_part(checkpoint).contract.inputs.items() if shape[0] == "batch"]
    wanted = draw(names, segment, sampling.steps, sampling.seed)
    now: dict = {}
    batches = -(-len(mine) // sampling.batch_size)
    with (
        progress(batches * sampling.steps, f"calibrate on prompts {segment.start + 1} to {segment.stop}") as advance,
        collect(
            model.parts[checkpoint.family.DENOISER],
            layers,
            mine,
            sampling.steps,
            lambda: (now["step"], now["batch"]),
            wanted,
            batched,
        ) as statistics,  # fmt: skip
    ):

        def on_step(step: int) -> None:
            if (step, now["batch"]) != (now.get("step"), now.get("counted")):  # not again for a second call in a step
                advance()
            now.update(step=step, counted=now["batch"])

        pipeline(
            prompts,
            sampling,
            numbers=mine,
            decode=False,
            on_batch=lambda numbers: now.update(batch=list(numbers)),
            on_step=on_step,
        )
    for part in used:
        model.parts[part].to("cpu")
    return statistics


def run_shared(fabric, checkpoint: Checkpoint, *arguments) -> Statistics:
    """The same by several processes, which load the model themselves."""
    with tempfile.TemporaryDirectory() as folder:
        # Fabric would rebuild collections among the arguments of a launch, and cannot rebuild a range.
        fabric.launch(partial(leave_share, checkpoint, Path(folder), arguments))
        if failures := sorted(Path(folder).glob("*.error")):
            raise SdQuantError(failures[0].read_text(encoding="utf-8"))
        return merge([unpack(load_file(path)) for path in sorted(Path(folder).glob("*.safetensors"))])


def leave_share(checkpoint: Checkpoint, folder: Path, arguments: tuple, fabric) -> None:
    """What one process does: its share of the prompts, into a file that only the parent process reads."""
    rank, processes = fabric.global_rank, fabric.world_size
    if fabric.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    try:
        statistics = run(fabric, load_model(checkpoint), *arguments, share=slice(rank, None, processes))
        save_file(pack(statistics), folder / f"{rank}.safetensors")
    except SdQuantError as error:
        (folder / f"{rank}.error").write_text(str(error), encoding="utf-8")
