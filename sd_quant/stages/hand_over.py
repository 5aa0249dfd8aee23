"""A quantized model exported to other tools: their files, and how far their images are from full precision.

``quantize.py`` exports the assignment that it has in memory. For a finished run, the assignment is derived again from
the run's knobs and cached statistics, and has to equal the run's ``layers.csv``. Parts other than the denoiser are
written quantized if the target's consumer can open them so, else unquantized; the card and the closing table say which.
Alternative not taken: storing the assignment in the run's folder; with its integer codes it is as large as the export.
"""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from sd_quant.cache import locked
from sd_quant.config import HandOverJob, recipe_of_run
from sd_quant.devices import threads
from sd_quant.interchange import TARGETS
from sd_quant.interchange.result_folder import check_free
from sd_quant.metrics.memory import StageTimer
from sd_quant.places import input_path, shown
from sd_quant.report.record import HandedOver
from sd_quant.report.run_table import handed_over_table
from sd_quant.report.summary import LOCK
from sd_quant.report.table import as_text
from sd_quant.shell import literal
from sd_quant.stages.choose import chosen_again, record_of_run
from sd_quant.stages.compare import images_of_run
from sd_quant.stages.consumer import measured_by
from sd_quant.stages.job_folder import HAND_OVER, remove_unfinished
from sd_quant.stages.resources import Needs, simulation_needs
from sd_quant.stages.session import Session, open_session
from sd_quant.stages.target_folder import write_target
from sd_quant.stages.targets import Assignments, check_schedule, check_servers, rows_of
from sd_quant.stages.variants import Variants


def hand_over(job: HandOverJob, directory: Path) -> None:
    """Write a finished run's model as a folder for each target into ``directory``.

    Raises ConfigError for a recipe that a target cannot hold, ArtifactError if the run's checkpoint or assignment has
    changed since, ResourceError if the disk is too small.
    """
    torch.set_num_threads(threads())
    run, knobs, step = input_path(job.run), recipe_of_run(job.run, job.cache), StageTimer()
    with locked(directory / LOCK, f"waiting for another process, which works in {directory}"):
        remove_unfinished(directory)
        for name in job.targets():
            check_free(directory / name)

        def needs(session: Session) -> Needs:
            images = simulation_needs(session.parameters, knobs.infer) if job.images else Needs()
            return images | Needs(disk={"hand_over": len(job.targets()) * sum(session.stored_bytes.values())})

        session = open_session(knobs.model, knobs.infer if job.images else None, needs, directory)
        check_servers(job.targets(), session.checkpoint)
        schedule = record_of_run(run)["levers"]["schedule"]
        knobs.infer = replace(knobs.infer, precise_steps=None, reuse=None, schedule=schedule)
        check_schedule(job.targets(), knobs.infer)
        loaded, assignments = chosen_again(knobs, run, step, session, directory)
        rows = rows_of(job.targets(), assignments, loaded.checkpoint)
        measure, written, unseen = None, {}, ["images=false"]
        if job.images:
            measure, unseen = measured_by(loaded, knobs.infer, images_of_run(run, knobs.infer.prompt_list())), []
        for name, held in rows.items():
            command = shlex.join(["sd-quant", "hand_over", f"run={literal(shown(run))}", f"to={name}", *unseen])
            with step(name):
                written[name] = write_target(
                    TARGETS[name], loaded, assignments, held, directory / name, command, measure, run
                )
    print("\n".join([*as_text(handed_over_table(written)), "", f"folders, each with a README.md: {shown(directory)}"]))


def rows_of_run(variants: Variants, targets: Collection[str]) -> dict[str, Assignments]:
    """Convert a run's assignments for each target. Raises ConfigError if a target's folder holds a foreign file."""
    rows = rows_of(targets, variants.assignments, variants.loaded.checkpoint)
    for name in rows:
        check_free(variants.directory / HAND_OVER / name)
    return rows


def hand_over_run(variants: Variants, rows: Mapping[str, Assignments]) -> dict[str, HandedOver]:
    """Write ``hand_over/<target>`` of a run for each target in ``rows`` (its assignments); return facts by target."""
    if not rows:
        return {}
    loaded, run = variants.loaded, variants.directory
    command = shlex.join(["sd-quant", "quantize", *variants.shared.facts["overrides"]])
    measure = measured_by(loaded, loaded.infer, images_of_run(run, loaded.infer.prompt_list()))
    return {
        name: write_target(
            TARGETS[name], loaded, variants.assignments, held, run / HAND_OVER / name, command, measure, run
        )
        for name, held in rows.items()
    }
