"""A quantized denoiser handed over to other tools: their files, and the figures of what they compute of them.

The assignment is derived again from the run's knobs and its statistics, which the cache has, and has to be the run's
own. The road not taken is to keep it in the run's folder: with chosen codes it is as large as the exported file.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sd_quant.checkpoints.pipeline_folder import write_pipeline_without
from sd_quant.config import HandOverJob, QuantizeJob, run_job
from sd_quant.devices import best_device, threads
from sd_quant.engines.torch import TorchEngine
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import atomic_path, temporary_folder, write_json, write_text
from sd_quant.hand_over import TARGETS, Target, writer
from sd_quant.hand_over.adapt import adapted, simulate_target
from sd_quant.hand_over.model_card import model_card
from sd_quant.inference.loading import load_part, pipeline_of
from sd_quant.metrics.fidelity import Against, fidelity_scores, summary
from sd_quant.metrics.memory import StageTimer
from sd_quant.models.checkpoint import contracts_of, denoiser_of, denoiser_part
from sd_quant.places import input_path, shown
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.report.provenance import versions
from sd_quant.report.record import at, read_record
from sd_quant.stages.calibrate import statistics_of
from sd_quant.stages.choose import choose
from sd_quant.stages.generate import generate
from sd_quant.stages.load import Loaded, check_weights, layers_of, open_model
from sd_quant.stages.open_parts import open_torch
from sd_quant.stages.variants import FULL_PRECISION

LOG = logging.getLogger(__name__)
FIGURES = "hand_over.json"  # written last; a folder that has it is ours
PACKAGES = ("sd-quant", "torch", "diffusers", "transformers", "nvidia-modelopt")


def hand_over(job: HandOverJob, directory: Path) -> None:
    """Write a folder for each target into ``directory``.

    Raises ConfigError for a recipe or a family that a target cannot hold, ArtifactError when the run's checkpoint or
    assignment is another now.
    """
    torch.set_num_threads(threads())
    run = input_path(job.run)
    targets, knobs = [TARGETS[name] for name in job.targets()], run_job(job.run)
    folders = {target.name: free_folder(directory / target.name) for target in targets}
    for target in targets:
        check_family(target, knobs.model.family)
    record, step = read_record(run), StageTimer()
    loaded, assignment = assignment_of(knobs, run, record, step)
    rows = {target.name: adapted(assignment, target) for target in targets}  # refused before anything is written
    for target in targets:
        with step(target.name):
            figures = {**described(target, loaded, rows[target.name], assignment), "run": shown(run)}
            figures["command"] = f"python hand_over.py run={shown(run)} to={target.name}"
            figures["knobs"] = {
                name: at(record, "knobs", name) for name in ("format", "quant_level", "alpha", "smoothing")
            }
            figures["fidelity"] = fidelity_of(loaded, rows[target.name], target, knobs, run) if job.images else None
            with atomic_path(folders[target.name]) as folder:
                write_folder(folder, target, loaded, rows[target.name])
                figures["bytes"] = {
                    str(file.relative_to(folder)): file.stat().st_size
                    for file in sorted(folder.rglob("*.*")) if file.stat().st_size > 1e5
                }  # fmt: skip
                write_text(folder / "README.md", model_card(figures, target, folders[target.name]))
                write_json(folder / FIGURES, figures)
        print(f"{target.name}: {shown(folders[target.name])}")


def free_folder(folder: Path) -> Path:
    """``folder`` if nothing stands there but an earlier result. Raises ConfigError else."""
    if folder.exists() and not (folder / FIGURES).is_file() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and was not handed over by us; set hydra.run.dir to another folder")
    return folder


def check_family(target: Target, family: str) -> None:
    if target.families is not None and family not in target.families:
        raise ConfigError(f"{target.name} holds {', '.join(sorted(target.families))} and this run is of {family}")


def assignment_of(
    job: QuantizeJob, run: Path, record: Mapping, step: StageTimer
) -> tuple[Loaded, dict[str, LayerAssignment]]:
    """The run's checkpoint and the assignment that its knobs give, which is the one that it has written down."""
    checkpoint = open_model(job.model)
    sha256 = at(record, "inputs", "checkpoint", "sha256")
    with step("load"):
        loaded = layers_of(checkpoint, job)
        check_weights(checkpoint)
    with step("calibrate"):
        statistics = statistics_of(checkpoint, loaded.roles, job, sha256)
    with temporary_folder(run.parent) as folder:
        assignment = choose(loaded, statistics, Path(folder), step).assignment
        if (Path(folder) / "layers.csv").read_bytes() != (run / "layers.csv").read_bytes():
            raise ArtifactError(
                f"{run / 'layers.csv'} is not what the run's knobs give with this version and checkpoint; "
                "make the run again, and hand that over"
            )
    return loaded, assignment


def described(
    target: Target, loaded: Loaded, rows: Mapping[str, LayerAssignment], assignment: Mapping[str, LayerAssignment]
) -> dict:
    """What of the recipe the target holds."""
    wanted = [name for name, layer in assignment.items() if layer.format is not None]
    lost = {name: rows[name].reason for name in wanted if rows[name].format is None}
    attentions = [name for name, layer in assignment.items() if layer.attention_amax is not None]
    lost |= {name: rows[name].reason for name in attentions if rows[name].attention_amax is None}
    return {
        "target": target.name,
        "consumer": target.consumer,
        "tried": target.tried,
        "part": loaded.denoiser,
        "quantized": sum(layer.format is not None for layer in rows.values()),
        "of": len(wanted),
        "inputs": {
            name: how for name, how in target.formats.items() if any(row.format == name for row in rows.values())
        },
        "lost": lost,
        "versions": versions(*PACKAGES),
    }


def write_folder(folder: Path, target: Target, loaded: Loaded, rows: Mapping[str, LayerAssignment]) -> None:
    folder.mkdir(exist_ok=True)
    if target.others is not None:
        denoiser = denoiser_part(loaded.checkpoint).component
        written = {denoiser} if target.others else set(loaded.checkpoint.components)
        write_pipeline_without(loaded.checkpoint, written, folder)
    writer(target)(loaded.checkpoint, rows, folder)


def fidelity_of(
    loaded: Loaded, rows: Mapping[str, LayerAssignment], target: Target, job: QuantizeJob, run: Path
) -> dict:
    """PSNR, SSIM and LPIPS of the images of what the consumer computes, against the run's full-precision images."""
    checkpoint, infer = loaded.checkpoint, job.infer
    engines = {part: open_torch(checkpoint, infer, part) for part in loaded.parts}
    module = load_part(checkpoint, loaded.denoiser).module
    simulate_target(denoiser_of(checkpoint, module), rows, target)
    contract = contracts_of(checkpoint)[loaded.denoiser]
    engines[loaded.denoiser] = TorchEngine(module.to(best_device(), torch.float32), contract)
    images = generate(pipeline_of(checkpoint, engines), infer.prompt_list(), infer, target.name).images
    files = sorted((run / "images" / FULL_PRECISION).glob("[0-9]*.png"))
    reference = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    return {
        score.key: summary(score.compute(reference, images), score.undefined, not score.more_is_better)
        for score in fidelity_scores() if score.against is Against.IMAGES
    }  # fmt: skip
