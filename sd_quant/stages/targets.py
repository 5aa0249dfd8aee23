"""Export targets: which layers of a recipe a target's files can store, and what of the pipeline is lost."""

from collections import Counter
from collections.abc import Collection, Mapping

import torch

from sd_quant.checkpoints.diffusers_network import defaults_of
from sd_quant.checkpoints.diffusers_pipeline import tokenizers_of
from sd_quant.config import Infer
from sd_quant.errors import ConfigError
from sd_quant.inference.loading import pipeline_of
from sd_quant.interchange import TARGETS, ForeignFormat
from sd_quant.interchange.holding import adapted, check_bf16, check_served, inputs_of
from sd_quant.interchange.other_parts import adapted_part
from sd_quant.interchange.sampling import Sampled
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, denoisers_of, empty_modules
from sd_quant.models.clip_tokenizer import CONTEXT_LENGTH
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.text import counted

TEXT = ("context", "encoder_hidden_states")  # names of a denoiser's text input
Rows = Mapping[str, LayerAssignment]
Assignments = Mapping[str, Rows]  # by part, the denoiser first


def check_servers(targets: Collection[str], checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a target whose tools cannot load the checkpoint's pipeline or do not support its bf16."""
    for name in targets:
        check_served(TARGETS[name], checkpoint)
        check_bf16(TARGETS[name], checkpoint)


def check_schedule(targets: Collection[str], infer: Infer) -> None:
    """Raise ConfigError for a recipe with precise steps, which no target's file can state."""
    if targets and infer.precise_letters:
        raise ConfigError(
            f"{', '.join(targets)} cannot say which steps are precise, and this recipe has such steps; export a run "
            "without infer.precise_steps and infer.schedule"
        )


def rows_of(targets: Collection[str], assignments: Assignments, checkpoint: Checkpoint) -> dict[str, Assignments]:
    """Convert the assignments for each target. Raises ConfigError if a target can store no layer of a denoiser."""
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


def quantized_in(rows: Rows) -> int:
    """Count the quantized layers of an assignment."""
    return sum(layer.format is not None for layer in rows.values())


def computed_inputs(rows: Rows, target: ForeignFormat) -> dict[str, str]:
    """Return how the target's consumer computes layer inputs, by weight format in use."""
    ways: dict[str, set[str]] = {}
    for row in rows.values():
        if row.format is not None:
            ways.setdefault(row.format, set()).add(inputs_of(row, target))
    return {name: " or ".join(sorted(ways[name])) for name in target.formats if name in ways}


def lost(assignment: Rows, rows: Rows) -> dict[str, int]:
    """Count, by reason, the layers and attentions quantized in the recipe's ``assignment`` and not in ``rows``."""
    names = [
        name
        for name, layer in assignment.items()
        if (layer.format, layer.attention_amax is None) != (rows[name].format, rows[name].attention_amax is None)
    ]
    return dict(Counter(rows[name].reason for name in names))


def widened(assignment: Rows, rows: Rows) -> list[str]:
    """Say how many layers get a larger quantization range than in the recipe: a fused tensor has a single range."""
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


def left_out(target: ForeignFormat, checkpoint: Checkpoint, assignment: Rows, rows: Rows) -> list[str]:
    """Say what of the pipeline and of the recipe's ``assignment`` the target's files lack."""
    text = f"the zeros behind a text's {CONTEXT_LENGTH} tokens, with which the checkpoint was trained"
    nets = ["ControlNets, which are added to it as to any checkpoint"] * bool(getattr(checkpoint, "controlnets", ()))
    cut = [text] * cuts_padding(target, checkpoint)
    return [*target.left_out, *cut, *nets, *widened(assignment, rows)]


def cuts_padding(target: ForeignFormat, checkpoint: Checkpoint) -> bool:
    """Return whether the target's consumer passes only CLIP's tokens, without NeMo's zero padding."""
    tokens = [shape[1] for name, shape in denoiser_part(checkpoint).contract.inputs.items() if name in TEXT]
    return not target.pads and checkpoint.family.PADDED and tokens[0] > CONTEXT_LENGTH


def absent(checkpoint: Checkpoint) -> list[str]:
    """Return the optional components that the pipeline lacks; diffusers needs their names at opening."""
    names = [name for name in checkpoint.family.OPTIONAL if name not in checkpoint.components]
    return [*names, *tokenizers_of(names)]


def sampled(checkpoint: Checkpoint, family: str = "") -> Sampled:
    """Return how the ``checkpoint`` samples: its own scheduler, and its networks' configs."""
    scheduler, modules = pipeline_of(checkpoint, {}).own_sampler, empty_modules(checkpoint)
    kind = next(each for each in type(scheduler).__mro__ if each.__module__.startswith("diffusers."))
    vae, denoiser = (getattr(modules.get(name), "config", {}) for name in ("vae", denoiser_part(checkpoint).component))
    return Sampled(family, kind.__name__, scheduler.config, defaults_of(kind), vae, denoiser)
