"""The folder of a model exported to another tool: its files, its model card and its figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sd_quant.checkpoints.pipeline_folder import write_pipeline_without
from sd_quant.checkpoints.unopened import licence_of
from sd_quant.files import atomic_path, write_json, write_text
from sd_quant.files.tensors import Readable
from sd_quant.interchange import ForeignFormat
from sd_quant.interchange.holding import servers_of
from sd_quant.interchange.model_card import model_card
from sd_quant.interchange.other_parts import place_of
from sd_quant.interchange.result_folder import FIGURES, check_free, remove_result
from sd_quant.interchange.sampling import for_files, for_folders, written_marks
from sd_quant.interchange.weights import sixteen_bits
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, in_place
from sd_quant.places import shown
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.report.provenance import versions
from sd_quant.report.record import HandedOver
from sd_quant.stages import targets
from sd_quant.stages.consumer import Measure
from sd_quant.stages.load import Loaded

PACKAGES = ("sd-quant", "torch", "diffusers", "transformers", "nvidia-modelopt")
KNOBS = (
    "format", "quant_level", "attention", "alpha", "smoothing", "per_token", "rotation", "keep", "budget", "fit",
    "assignment", "parts", "calib_size", "n_steps",
)  # fmt: skip
count = targets.quantized_in
ROUGHLY = 1e5  # bytes below which a card does not name a file


def write_target(
    target: ForeignFormat,
    loaded: Loaded,
    assignments: targets.Assignments,
    held: targets.Assignments,
    folder: Path,
    command: str,
    measure: Measure | None,
    run: Path | None = None,
) -> HandedOver:
    """Write a target's ``folder``, whole or not at all, with its model card; return its facts.

    ``held``: the ``assignments`` as the target can store them. ``command``: what repeats the export, for the card.
    """
    checkpoint, parts = loaded.checkpoint, loaded.checkpoint.parts()
    assignment, rows, described_part = assignments[loaded.denoiser], held[loaded.denoiser], denoiser_part(checkpoint)
    written: HandedOver = {
        "folder": shown(folder),
        "quantized": count(rows),
        "of": count(assignment),
        "inputs": targets.computed_inputs(rows, target),
        "lost": targets.lost(assignment, rows),
        "parts": {
            part: {
                "quantized": targets.quantized_in(held[part]),
                "of": targets.quantized_in(own),
                "lost": targets.lost(own, held[part]),
            }
            for part, own in assignments.items()
            if part != loaded.denoiser
        },
        "fidelity": None,
        "bytes": {},
    }
    with atomic_path(folder) as place:
        own = targets.sampled(checkpoint, loaded.model.family)
        result = write_folder(place, target, checkpoint, held, written_marks(own))
        if measure is not None:
            written["fidelity"] = measure(target, held, result)
        files = sorted(file for file in place.rglob("*") if file.is_file())
        sizes = {str(file.relative_to(place)): file.stat().st_size for file in files}
        written["bytes"] = {name: size for name, size in sizes.items() if size > ROUGHLY}
        described: dict[str, Any] = {
            "target": target.name,
            "part": loaded.denoiser,
            "family": loaded.model.family,
            "dtype": "bf16" if sixteen_bits(described_part) == torch.bfloat16 else "fp16",
            "component": described_part.component,
            "network": checkpoint.family.NETWORKS[described_part.component],
            "components": {part: parts[part].component for part in written["parts"]},
            "run": run and shown(run),
            "command": command,
            "left_out": targets.left_out(target, checkpoint, assignment, rows),
            "absent": targets.absent(checkpoint),
            "servers": servers_of(
                target, checkpoint, rows, {parts[part].component: each for part, each in held.items()}
            ),
            "sampling": for_files(own) if target.marks else for_folders(own),
            "licence": licence_of(checkpoint.path),
            "loras": {
                f"{lora.path.name}:{lora.strength:g}{lora.place}": licence_of(lora.path)
                for lora in loaded.model.adapters()
            },
            "knobs": {name: getattr(loaded.recipe, name) for name in KNOBS},
            "versions": versions(*PACKAGES),
            "files": [*sizes, "README.md", FIGURES],
            **written,
        }
        write_text(place / "README.md", model_card(described, target))
        write_json(place / FIGURES, described)
        check_free(folder)  # checked again, as the work may have taken hours
        remove_result(folder)  # an earlier result, which a rename does not replace
    return written


def write_folder(
    folder: Path,
    target: ForeignFormat,
    checkpoint: Checkpoint,
    held: targets.Assignments,
    marks: Mapping[str, Readable] | None = None,
) -> dict[str, Path]:
    """Write the files that the target's consumer opens to ``folder``; return their paths, by quantized part.

    ``marks``: tensors that tell how the checkpoint samples.
    """
    folder.mkdir(exist_ok=True)
    parts, denoiser = checkpoint.parts(), checkpoint.family.DENOISER
    quantized = {
        part: parts[part].component for part, rows in held.items() if part == denoiser or targets.quantized_in(rows)
    }
    rows: dict[str, dict[str, LayerAssignment]] = {}  # by component, which two parts may share
    for part, component in quantized.items():
        rows.setdefault(component, {}).update(held[part])
    if target.others is not None:
        without = set(quantized.values()) if target.others else set(checkpoint.components)
        write_pipeline_without(checkpoint, without, folder)
    if target.runtime is not None:  # such a target's module writes all graphs at once
        own = rows.pop(quantized[denoiser])
        return dict.fromkeys(quantized, target.module.write(checkpoint, own, folder, rows))
    places = {component: in_place(checkpoint, part) for part, component in reversed(quantized.items())}
    marked: dict[str, dict[str, Any]] = {quantized[denoiser]: {"marks": marks}} if target.marks else {}
    written = {
        component: target.module.write(places[component], own, folder, **marked.get(component, {}))
        for component, own in rows.items()
    }
    paths = {part: written[component] for part, component in quantized.items()}
    return {part: place_of(path, checkpoint, part) if path == folder else path for part, path in paths.items()}
