"""A quantized model exported to other tools: their files, and how far their images are from full precision.

``quantize.py`` exports the assignment that it has. For a run that is done, the assignment is derived again from the
run's knobs and its statistics, which the cache has; it has to be the run's own. What is written is read back by the
format's own reader, and images are made with what it has read. Other parts than the denoiser are written quantized
where the target's consumer opens them so, else as they are, which the card and the closing table say. The road not
taken is to keep the assignment in the run's folder: with chosen codes it is as large as the exported file.
"""

import csv
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sd_quant.cache import locked
from sd_quant.checkpoints.diffusers_pipeline import defaults_of, with_tokenizers
from sd_quant.checkpoints.pipeline_folder import write_pipeline_without
from sd_quant.checkpoints.unopened import licence_of
from sd_quant.config import HandOverJob, Infer, QuantizeJob, RecipeJob, recipe_of_run
from sd_quant.config.precise_steps import ends_of
from sd_quant.devices import threads
from sd_quant.engines.pool import Variant
from sd_quant.engines.torch import TorchEngine
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import MOST_TEXT, atomic_path, open_regular, read_regular, temporary_folder, write_json, write_text
from sd_quant.files.tensors import Readable
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.samplers import engine_of_letter
from sd_quant.interchange import TARGETS, ForeignFormat
from sd_quant.interchange.denoiser import weights_alone, with_denoiser
from sd_quant.interchange.holding import adapted, check_bf16, check_served, groups_of, inputs_of, servers_of
from sd_quant.interchange.model_card import model_card
from sd_quant.interchange.other_parts import adapted_part, place_of
from sd_quant.interchange.result_folder import FIGURES, check_free, remove_result
from sd_quant.interchange.sampling import Sampled, for_files, for_folders, written_marks
from sd_quant.interchange.weights import sixteen_bits
from sd_quant.metrics.fidelity import image_scores
from sd_quant.metrics.images import Images, joined
from sd_quant.metrics.memory import StageTimer
from sd_quant.models.checkpoint import Checkpoint, denoiser_of, denoiser_part, denoisers_of, empty_modules, in_place
from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.places import input_path, shown
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.report.provenance import versions
from sd_quant.report.record import HandedOver, ImageScores, at, read_record, why
from sd_quant.report.run_table import handed_over_table
from sd_quant.report.summary import LOCK
from sd_quant.report.table import as_text
from sd_quant.shell import literal
from sd_quant.stages.calibrate import calibrated_sha256, statistics_of
from sd_quant.stages.choose import choose
from sd_quant.stages.generate import generate, image_names, sampling_of
from sd_quant.stages.job_folder import remove_unfinished
from sd_quant.stages.load import Loaded, with_recipe
from sd_quant.stages.open_parts import open_changed, open_torch
from sd_quant.stages.resources import Needs, by_torch, simulation_needs, workload_of
from sd_quant.stages.session import Session, open_session
from sd_quant.stages.variants import FULL_PRECISION
from sd_quant.text import counted, one_line

PACKAGES = ("sd-quant", "torch", "diffusers", "transformers", "nvidia-modelopt")
KNOBS = (
    "format", "quant_level", "attention", "alpha", "smoothing", "per_token", "rotation", "keep", "budget", "fit",
    "assignment", "parts", "calib_size", "n_steps",
)  # fmt: skip
ROUGHLY = 1e5  # bytes below which a card does not name a file
TEXT = ("context", "encoder_hidden_states")  # names of the same input of a denoiser
Rows = Mapping[str, LayerAssignment]
Assignments = Mapping[str, Rows]  # by part, the denoiser first
Scores = dict[str, ImageScores]  # by name
# What quantization and the text change, of a result, the paths of ``write_folder``, with these assignments
Measure = Callable[[ForeignFormat, Assignments, Mapping[str, Path]], tuple[Scores, Scores | None]]


def hand_over(job: HandOverJob, directory: Path) -> None:
    """Write a folder for each target into ``directory``.

    Raises ConfigError for a recipe that a target cannot hold, ArtifactError when the run's checkpoint or assignment is
    another now, ResourceError when the disk is too small.
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
        schedule = at(record_of_run(run), "levers", "schedule")
        knobs.infer = replace(knobs.infer, precise_steps=None, reuse=None, schedule=schedule)
        check_schedule(job.targets(), knobs.infer)
        loaded, assignments = assignment_of(knobs, run, step, session, directory)
        rows = rows_of(job.targets(), assignments, loaded.checkpoint)
        measure, written = None, {}
        if job.images:
            reference = images_of_run(run, image_names(knobs.infer.prompt_list()))
            measure = measured_by(loaded, knobs.infer, reference)
        for name, held in rows.items():
            unseen = [] if job.images else ["images=false"]
            command = shlex.join(["sd-quant", "hand_over", f"run={literal(shown(run))}", f"to={name}", *unseen])
            with step(name):
                written[name] = write_target(
                    TARGETS[name], loaded, assignments, held, knobs, directory / name, command, measure, run
                )
    print("\n".join([*as_text(handed_over_table(written)), "", f"folders, each with a README.md: {shown(directory)}"]))


def hand_over_run(
    loaded: Loaded,
    assignments: Assignments,
    rows: Mapping[str, Assignments],
    job: QuantizeJob,
    directory: Path,
    overrides: list[str],
) -> dict[str, HandedOver]:
    """Write a folder for each target of ``rows`` into ``hand_over`` in the ``directory`` of a run."""
    command = shlex.join(["sd-quant", "quantize", *overrides])
    reference, written = images_of_run(directory, image_names(job.infer.prompt_list())), {}
    measure = measured_by(loaded, job.infer, reference)
    for name, held in rows.items():
        folder = directory / "hand_over" / name
        written[name] = write_target(TARGETS[name], loaded, assignments, held, job, folder, command, measure, directory)
    return written


def check_servers(targets: Collection[str], checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a target whose servers do not load the checkpoint's pipeline, or that lacks its bf16."""
    for name in targets:
        check_served(TARGETS[name], checkpoint)
        check_bf16(TARGETS[name], checkpoint)


def check_schedule(targets: Collection[str], infer: Infer) -> None:
    """Raises ConfigError for a target that does not say which steps are precise, or not of these."""
    letters = infer.precise_letters
    for target in map(TARGETS.__getitem__, targets) if letters else ():
        able = ", ".join(name for name, each in TARGETS.items() if each.policy)
        if not target.policy:
            raise ConfigError(
                f"{target.name} cannot say which steps are precise, and this recipe has such steps; export to {able}, "
                "or a run without infer.precise_steps and infer.schedule"
            )
        if infer.chooses_precise or ends_of(infer.given_schedule) is None:
            raise ConfigError(
                f"{target.name} says how many first and last steps are h, and the schedule is "
                f"{infer.given_schedule or 'chosen later'}; give places such as infer.precise_steps=first3,last3"
            )


def rows_of(targets: Collection[str], assignments: Assignments, checkpoint: Checkpoint) -> dict[str, Assignments]:
    """The rows of each part's assignment as each target holds them.

    Raises ConfigError if a target holds none of a denoiser's.
    """
    denoisers = denoisers_of(checkpoint)
    return {
        name: {
            part: adapted(rows, TARGETS[name])
            if part in denoisers
            else adapted_part(rows, TARGETS[name], checkpoint, part)
            for part, rows in assignments.items()
        }
        for name in targets
    }


def assignment_of(
    job: RecipeJob, run: Path, step: StageTimer, session: Session, directory: Path
) -> tuple[Loaded, Assignments]:
    """The assignments that a run's knobs give of its checkpoint, if they are those that the run has written down.

    Files in progress are in ``directory``. Raises ArtifactError for a run whose files are damaged, or say otherwise.
    """
    with step("load"):
        loaded = with_recipe(session, job.model, job.infer, job.quantize)
    with step("calibrate"):
        sha256 = calibrated_sha256(job, record_of_run(run))
        statistics = statistics_of(loaded, job, sha256)
    with temporary_folder(directory) as folder:
        chosen = choose(loaded, statistics, Path(folder), step)
        if decided(Path(folder) / "layers.csv") != decided(run / "layers.csv"):
            raise ArtifactError(
                f"{run / 'layers.csv'} is not what the run's knobs give with this version and checkpoint; "
                "make the run again, and hand that over"
            )
    return loaded, {loaded.denoiser: chosen.assignment, **chosen.parts}


def record_of_run(run: Path) -> Mapping[str, Any]:
    """The record of a finished run. Raises ArtifactError when it is damaged."""
    try:
        return read_record(run) or {}
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{run} has no record that can be read ({why(error)}); give another run") from error


def decided(table: Path) -> list[dict[str, str]]:
    """The rows of a ``layers.csv`` without the errors, whose last digit depends on how many threads add them up.

    Raises ArtifactError when it is none.
    """
    try:
        lines = read_regular(table).decode("utf-8").splitlines()
        return [{name: value for name, value in row.items() if "error" not in name} for row in csv.DictReader(lines)]
    except (OSError, ValueError, AttributeError, csv.Error) as error:
        raise ArtifactError(f"{table} is not a run's table of layers ({why(error)}); give another run") from error


def write_target(
    target: ForeignFormat,
    loaded: Loaded,
    assignments: Assignments,
    held: Assignments,
    job: RecipeJob,
    folder: Path,
    command: str,
    measure: Measure | None,
    run: Path | None = None,
) -> HandedOver:
    """Write a target's ``folder``, whole or not at all, with its card, and return the facts of it.

    ``held`` are the target's of the ``assignments`` that the ``job`` has given, in a ``run`` or from Python by the
    lines ``command``. ``measure`` is that of ``measured_by``.
    """
    assignment, rows = assignments[loaded.denoiser], held[loaded.denoiser]
    written: HandedOver = {
        "folder": shown(folder),
        "quantized": quantized_in(rows),
        "of": quantized_in(assignment),
        "inputs": computed_inputs(rows, target),
        "lost": lost(assignment, rows),
        "parts": {
            part: {"quantized": quantized_in(held[part]), "of": quantized_in(own), "lost": lost(own, held[part])}
            for part, own in assignments.items()
            if part != loaded.denoiser
        },
        "fidelity": None,
        "text": None,
        "bytes": {},
    }
    with atomic_path(folder) as place:
        own = sampled(loaded.checkpoint, job.model.family)
        ends = (ends_of(job.infer.given_schedule) or (0, 0)) if target.policy else (0, 0)
        result = write_folder(place, target, loaded.checkpoint, held, written_marks(own), ends)
        if measure is not None:
            written["fidelity"], written["text"] = measure(target, held, result)
        files = sorted(file for file in place.rglob("*") if file.is_file())
        sizes = {str(file.relative_to(place)): file.stat().st_size for file in files}
        written["bytes"] = {name: size for name, size in sizes.items() if size > ROUGHLY}
        described: dict[str, Any] = {
            "target": target.name,
            "part": loaded.denoiser,
            "family": job.model.family,
            "dtype": "bf16" if sixteen_bits(denoiser_part(loaded.checkpoint)) == torch.bfloat16 else "fp16",
            "component": (component := denoiser_part(loaded.checkpoint).component),
            "network": loaded.checkpoint.family.NETWORKS[component],
            "components": {part: loaded.checkpoint.parts()[part].component for part in written["parts"]},
            "run": run and shown(run),
            "command": command,
            "left_out": [*left_out(target, loaded.checkpoint), *widened(assignment, rows), *stacked(target, rows)],
            "absent": absent(loaded.checkpoint),
            "servers": servers_of(
                target, loaded.checkpoint, rows, {loaded.parts[part].component: each for part, each in held.items()}
            ),
            "precise_ends": ends,
            "sampling": for_files(own) if target.marks else for_folders(own),
            "licence": licence_of(loaded.checkpoint.path),
            "loras": {
                f"{lora.path.name}:{lora.strength:g}{lora.place}": licence_of(lora.path)
                for lora in job.model.adapters()
            },
            "knobs": {name: getattr(job.quantize, name) for name in KNOBS},
            "versions": versions(*PACKAGES),
            "files": [*sizes, "README.md", FIGURES],
            **written,
        }
        write_text(place / "README.md", model_card(described, target))
        write_json(place / FIGURES, described)
        check_free(folder)  # once more, after all the time that the work has taken
        remove_result(folder)  # an earlier one, which a rename does not replace
    return written


def quantized_in(rows: Rows) -> int:
    """How many layers are quantized."""
    return sum(layer.format is not None for layer in rows.values())


def computed_inputs(rows: Rows, target: ForeignFormat) -> dict[str, str]:
    """How the target's consumer computes inputs, by the format of the weight, of those that a layer has."""
    ways: dict[str, set[str]] = {}
    for row in rows.values():
        if row.format is not None:
            ways.setdefault(row.format, set()).add(inputs_of(row, target))
    return {name: " or ".join(sorted(ways[name])) for name in target.formats if name in ways}


def lost(assignment: Rows, rows: Rows) -> dict[str, int]:
    """How many of the layers and attentions that the recipe quantizes are in high precision, by the reason."""
    names = [
        name
        for name, layer in assignment.items()
        if (layer.format, layer.attention_amax is None) != (rows[name].format, rows[name].attention_amax is None)
    ]
    return dict(Counter(rows[name].reason for name in names))


def widened(assignment: Rows, rows: Rows) -> list[str]:
    """In words how many layers have a wider range than the recipe's, because their tensor has one range."""
    wider = [
        name for name, row in rows.items()
        if row.format and row.weight_amax is not None and not torch.equal(row.weight_amax, assignment[name].weight_amax)
    ]  # fmt: skip
    if not wider:
        return []
    return [
        f"the ranges of {counted(len(wider), 'layer')}: query, key and value are one tensor, which has the largest of "
        f"theirs"
    ]


def stacked(target: ForeignFormat, rows: Rows) -> list[str]:
    """In words how many layers that the target fuses have more than one branch, which makes it slower."""
    groups = [[rows[name].low_rank for name in group] for _, _, group in groups_of(rows, target.fused)]
    downs = [[branch[1] for branch in group if branch is not None] for group in groups]
    apart = [own for own in downs if not all(torch.equal(down, own[0]) for down in own)]
    if not apart:
        return []
    return [
        f"speed: query, key and value are one layer, in which their branches are stacked, {len(apart)} times; the rank "
        "of the stack holds for the whole file. quantize.shared_branch=true has one branch for all three"
    ]


def left_out(target: ForeignFormat, checkpoint: Checkpoint) -> list[str]:
    """The parts of the pipeline that the target's result lacks, in words."""
    text = f"the zeros behind a text's {CONTEXT_LENGTH} tokens, with which the checkpoint was trained"
    nets = ["ControlNets, which are added to it as to any checkpoint"] * bool(getattr(checkpoint, "controlnets", ()))
    return [*target.left_out, *([text] if cuts_padding(target, checkpoint) else []), *nets]


def cuts_padding(target: ForeignFormat, checkpoint: Checkpoint) -> bool:
    """Whether the target's consumer gives the denoiser CLIP's tokens alone, without the zeros that NeMo adds."""
    tokens = [shape[1] for name, shape in denoiser_part(checkpoint).contract.inputs.items() if name in TEXT]
    return not target.pads and checkpoint.family.PADDED and tokens[0] > CONTEXT_LENGTH


def absent(checkpoint: Checkpoint) -> list[str]:
    """The components that the pipeline lacks, which diffusers has to be told when it opens a folder."""
    return with_tokenizers([name for name in checkpoint.family.OPTIONAL if name not in checkpoint.components])


def sampled(checkpoint: Checkpoint, family: str = "") -> Sampled:
    """How the ``checkpoint`` samples: its own scheduler, and its networks' configs."""
    scheduler, modules = pipeline_of(checkpoint, {}).own_sampler, empty_modules(checkpoint)
    kind = next(each for each in type(scheduler).__mro__ if each.__module__.startswith("diffusers."))
    vae, denoiser = (getattr(modules.get(name), "config", {}) for name in ("vae", denoiser_part(checkpoint).component))
    return Sampled(family, kind.__name__, scheduler.config, defaults_of(kind), vae, denoiser)


def write_folder(
    folder: Path,
    target: ForeignFormat,
    checkpoint: Checkpoint,
    held: Assignments,
    marks: Mapping[str, Readable] | None = None,
    precise_ends: tuple[int, int] = (0, 0),
) -> dict[str, Path]:
    """Write what the target's consumer opens into ``folder``, with ``marks`` of how the checkpoint samples.

    ``precise_ends`` are the numbers of first and last steps that are precise, of a target that says so.

    Returns the path that the format's reader opens, of each part that is quantized in it.
    """
    folder.mkdir(exist_ok=True)
    parts, denoiser = checkpoint.parts(), checkpoint.family.DENOISER
    quantized = {part: parts[part].component for part, rows in held.items() if part == denoiser or quantized_in(rows)}
    rows: dict[str, dict[str, LayerAssignment]] = {}  # by component, which two parts may share
    for part, component in quantized.items():
        rows.setdefault(component, {}).update(held[part])
    if target.others is not None:
        without = set(quantized.values()) if target.others else set(checkpoint.components)
        write_pipeline_without(checkpoint, without, folder)
    if target.runtime is not None:  # it writes all graphs at once
        own = rows.pop(quantized[denoiser])
        return dict.fromkeys(quantized, target.module.write(checkpoint, own, folder, rows))
    places = {component: in_place(checkpoint, part) for part, component in reversed(quantized.items())}
    marked: dict[str, dict[str, Any]] = {quantized[denoiser]: {"marks": marks}} if target.marks else {}
    if any(precise_ends):
        marked[quantized[denoiser]] = {"precise_ends": precise_ends}
    written = {
        component: target.module.write(places[component], own, folder, **marked.get(component, {}))
        for component, own in rows.items()
    }
    paths = {part: written[component] for part, component in quantized.items()}
    return {part: place_of(path, checkpoint, part) if path == folder else path for part, path in paths.items()}


def measured_by(loaded: Loaded, infer: Infer, reference: Images) -> Measure:
    """Measure results against the ``reference``, images of the same ``infer`` in full precision.

    A file is given full precision's text, so that its figure is of quantization alone, as ``judge``'s is; what the
    consumer's text changes is a figure of its own.
    """
    checkpoint, text = loaded.checkpoint, cache(partial(text_fidelity, loaded, infer, reference))

    def measure(target: ForeignFormat, held: Assignments, result: Mapping[str, Path]) -> tuple[Scores, Scores | None]:
        opened = {
            part: partial(open_consumed, in_place(checkpoint, part), held[part], target, path)
            for part, path in result.items()
        }
        for letter in infer.precise_letters:
            opened[engine_of_letter(loaded.denoiser, letter)] = partial(
                open_consumed, checkpoint, held[loaded.denoiser], target, result[loaded.denoiser], True
            )
        fidelity = fidelity_of(loaded, infer, reference, opened, target.name)
        return fidelity, text() if cuts_padding(target, checkpoint) else None

    return measure


def fidelity_of(
    session: Session, infer: Infer, reference: Images, opened: Mapping[str, Callable[[], TorchEngine]], label: str
) -> Scores:
    """PSNR, SSIM and LPIPS of images against the ``reference``; parts that are not ``opened`` are the checkpoint's."""

    def open_engine(part: str) -> TorchEngine:
        return opened[part]() if part in opened else open_torch(session.checkpoint, infer, part)

    pool = session.engines(open_engine, session.together(by_torch(workload_of(infer))))
    try:
        pipeline = pipeline_of(session.checkpoint, Variant(pool, {part: part for part in (*session.parts, *opened)}))
        sampling = replace(sampling_of(infer), schedule=infer.given_schedule if infer.precise_letters else None)
        return image_scores(reference, generate(pipeline, infer.prompt_list(), sampling, label).images)
    finally:
        pool.close()


def text_fidelity(session: Session, infer: Infer, reference: Images) -> Scores:
    """The scores of full precision whose text has CLIP's tokens alone, as most consumers pass it."""

    def open_denoiser() -> TorchEngine:
        engine = open_torch(session.checkpoint, infer, session.denoiser)
        engine.module.register_forward_pre_hook(without_padding, with_kwargs=True)
        return engine

    return fidelity_of(session, infer, reference, {session.denoiser: open_denoiser}, f"{CONTEXT_LENGTH} tokens")


def images_of_run(run: Path, names: Sequence[str]) -> Images:
    """The full-precision images that a run has left. Raises ArtifactError where one is missing or no PNG."""
    images = []
    for file in (run / "images" / FULL_PRECISION / f"{name}.png" for name in names):
        try:
            with open_regular(file, MOST_TEXT) as opened, Image.open(opened, formats=["PNG"]) as image:
                images.append(np.asarray(image.convert("RGB")))
        except Exception as error:  # whatever the bytes lead the decoder to
            raise ArtifactError(
                f"{file} is not an image of the run ({one_line(error, 100)}); give another run, or images=false"
            ) from None
    return joined(images)


def open_consumed(
    checkpoint: Checkpoint, rows: Rows, target: ForeignFormat, result: Path, precise: bool = False
) -> TorchEngine:
    """The ``checkpoint``'s denoiser as the target's consumer computes it, or a part in its place.

    It is read back from the ``result``, or, of a graph, simulated: see ``exported_parts.simulate_graph``. In a
    ``precise`` step its inputs are not quantized.
    """
    if target.runtime is None:
        denoiser = target.module.read(result, checkpoint)
        own = weights_alone(denoiser) if precise else denoiser
        return open_changed(checkpoint, lambda module: with_denoiser(module, checkpoint, own))
    from sd_quant.interchange.exported_parts import simulate_graph

    weights = denoiser_part(checkpoint).contract.weights
    return open_changed(checkpoint, lambda module: simulate_graph(denoiser_of(checkpoint, module), rows, weights))


def without_padding(module: nn.Module, arguments: tuple, inputs: Mapping[str, Tensor]) -> tuple:
    """A pre-hook: cuts the text among the inputs behind CLIP's tokens, because only NeMo pads it with zeros."""
    return arguments, {name: x[:, :CONTEXT_LENGTH] if name in TEXT else x for name, x in inputs.items()}
