"""A pipeline's networks, inputs and layers, as recorded by watching one run of it, printed as tables."""

import math
from collections import Counter
from pathlib import Path

from sd_quant.config import InspectJob, Model
from sd_quant.inference.memory import GB, memory_of_calibration
from sd_quant.metrics.flops import operations, rate
from sd_quant.models.checkpoint import empty_call
from sd_quant.observed.checkpoint import OBSERVED_JSON, Observation, ObservedCheckpoint
from sd_quant.progress import duration
from sd_quant.report.table import DASH, Table, as_text, table_of_texts
from sd_quant.stages.session import Session, observed_checkpoint, write_observed
from sd_quant.text import counted, one_line

STEPS = 20  # of denoising, for a model whose config file recommends no number


def inspect(job: InspectJob, directory: Path) -> None:
    """Print the tables and write ``observed.json`` to ``directory``. Raises SdQuantError for an unusable folder."""
    session = Session(checkpoint := observed_checkpoint(job.model))
    write_observed(session, directory)
    tables = [parts_table(session, checkpoint.observation), inputs_table(session), layers_table(session)]
    print("\n\n".join("\n".join(as_text(table)) for table in tables))
    print("\n" + "\n".join(facts(session, job.model, checkpoint.observation)))
    print(f"observed: {directory / OBSERVED_JSON}")


def parts_table(session: Session, observation: Observation) -> Table:
    """Return a row for each network: its class, its size, and how it is exported or why it is not."""
    rows, notes = [], []
    for name, part in observation.parts.items():
        rung = part.rung
        runtimes = [f"{runtime} ({verified})" for runtime, verified in rung.verified.items()]
        notes += [f"{name} is not exported: {rung.cause}"] if rung.cause else []
        notes += [f"{name} in {runtime}: {cause}" for runtime, cause in rung.refused.items() if not rung.cause]
        notes += [f"{name}: {note}" for note in rung.notes]
        rows.append([
            name, session.checkpoint.family.NETWORKS[part.component], f"{session.parameters[name] / 1e6:,.1f} M",
            f"{session.stored_bytes[name] / GB:.2f} GB", rung.name, ", ".join(runtimes) or DASH,
        ])  # fmt: skip
    titles = ["network", "class", "parameters", "exported", "graph", "verified in"]
    return Table(table_of_texts(titles, rows).columns, rows, notes=notes)


def inputs_table(session: Session) -> Table:
    """Return a row for each input of the denoiser's graph."""
    contract = session.parts[session.denoiser].contract
    rows = [
        [name, " x ".join(map(str, shape)) or "a number", str(contract.dtypes[name]).removeprefix("torch.")]
        for name, shape in contract.inputs.items()
    ]
    return table_of_texts([f"{session.denoiser} reads", "shape", "dtype"], rows)


def layers_table(session: Session) -> Table:
    """Return a row for each role of the denoiser's layers, and for each reason why layers are excluded."""
    assert isinstance(session.checkpoint, ObservedCheckpoint)
    family, observed = session.checkpoint.family, session.checkpoint.observation.layers[session.denoiser]
    roles = {
        name: role if role != "excluded" else f"excluded: {observed.reasons.get(name, 'model.excluded')}"
        for name, role in family.layer_roles(None).items()  # type: ignore[arg-type]
    }
    first = {role: name for name, role in reversed(roles.items())}
    rows = [[role, str(count), first[role]] for role, count in Counter(roles.values()).most_common()]
    return table_of_texts(["layers", "count", "such as"], rows)


def facts(session: Session, model: Model, observation: Observation) -> list[str]:
    """Return sentences about the pipeline: shared layer inputs, batches, memory and time."""
    pixels = model.width * model.height
    groups = observation.layers[session.denoiser].shared_inputs
    absorbed = sum(group.producer is not None for group in groups)
    calibration = memory_of_calibration(session.parameters, pixels)
    lines = [
        f"{len(groups)} inputs are read by linears, and smoothing of {absorbed} of them folds into the layer before",
        f"calls of the denoiser a step: {observation.calls_a_step}, samples in each for an image: "
        f"{observation.samples_per_image}",
        f"calibration takes about {calibration / GB:.1f} GB of memory, "
        f"all ONNX files {math.fsum(session.stored_bytes.values()) / GB:.2f} GB of disk",
        time_of(session, model, observation),
        f"observed in {observation.seconds:.1f} s",
    ]
    if observation.unequal:
        lines.append(f"prompts of unequal length cannot be in one batch: {observation.unequal}")
    return lines + [f"{what} is fixed: {failure}" for what, failure in observation.fixed.items()]


def time_of(session: Session, model: Model, observation: Observation) -> str:
    """Return a sentence: the least time of a step and of calibration in torch, by the denoiser's operations."""
    contract = session.parts[session.denoiser].contract
    shapes = contract.shapes_for(observation.samples_per_image, model.width, model.height)
    try:
        count, _ = operations(*empty_call(session.checkpoint, session.denoiser, shapes))
    except Exception as error:  # a network's code may raise anything on meta tensors
        return f"time is not estimated, because {session.denoiser} cannot be called without numbers: {one_line(error)}"
    count, per_second = count * observation.calls_a_step, rate()
    step = count / per_second
    steps, prompts = (int(model.recommended.get(name, usual)) for name, usual in (("steps", STEPS), ("calib_size", 64)))
    return (
        f"a step of an image of {model.width} x {model.height} takes at least {step:.2g} s in torch, the calibration "
        f"by {counted(prompts, 'prompt')} of {counted(steps, 'step')} {duration(step * steps * prompts)} "
        f"({count / 1e12:.2g} TFLOP a step; "
        f"products of matrices make {per_second / 1e9:.0f} GFLOP/s here and now)"
    )
