"""A pipeline's networks, inputs and layers, as recorded by watching one run of it, printed as tables."""

import math
from collections import Counter
from pathlib import Path

from sd_quant.config import InspectJob, Model
from sd_quant.observed.checkpoint import OBSERVED_JSON, Observation, ObservedCheckpoint
from sd_quant.report.table import DASH, Table, as_text, table_of_texts
from sd_quant.stages.resources import GB, memory_of_calibration
from sd_quant.stages.session import Session, observed_checkpoint, write_observed


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
    """Return sentences about the pipeline: shared layer inputs, batches and memory."""
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
        f"observed in {observation.seconds:.1f} s",
    ]
    if observation.unequal:
        lines.append(f"prompts of unequal length cannot be in one batch: {observation.unequal}")
    return lines + [f"{what} is fixed: {failure}" for what, failure in observation.fixed.items()]
