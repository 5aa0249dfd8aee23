"""A third-party quantized checkpoint as a candidate of ``judge``, computed as in the tool for which it was made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sd_quant.devices import CPU, best_device
from sd_quant.engines.base import Engine, cast_inputs
from sd_quant.engines.torch import TorchEngine
from sd_quant.interchange.beside import BESIDE, FUSED, adapted_of, holds_loras, with_loras
from sd_quant.interchange.denoiser import QuantizedDenoiser, QuantizedLayer, with_denoiser
from sd_quant.interchange.errors import plain_weight, unfolded
from sd_quant.interchange.other_parts import read_parts
from sd_quant.interchange.sampling import check_marks
from sd_quant.models.checkpoint import Checkpoint, denoiser_part, denoiser_weights, empty_denoiser, in_place
from sd_quant.models.roles import roles_of
from sd_quant.numbers import relative_error
from sd_quant.report.candidates import HIGH_PRECISION
from sd_quant.report.provenance import fingerprint
from sd_quant.stages.baseline import Baseline
from sd_quant.stages.open_parts import open_changed
from sd_quant.stages.targets import sampled

WITHOUT_LORAS = "what its own library or runtime computes is without the LoRAs, which are beside it here"
BITS = {torch.float32: 32.0, torch.float16: 16.0, torch.bfloat16: 16.0, torch.float64: 64.0}


@dataclass(frozen=True)
class OwnLibrary:
    """The library or runtime for which a checkpoint was made, if it works on this machine."""

    name: str
    open: Callable[[], Engine]  # third-party code, which may raise anything


@dataclass(frozen=True)
class SubjectPart:
    """A part of a third-party checkpoint or run."""

    reader: str  # a name of ``interchange.FORMATS``, or RUN
    maker: str  # the tool that wrote it, for display
    stored_bytes: int  # of its network; a third party's autoencoder includes the encoder
    bits: float  # bits per weight
    rows: list[dict[str, Any]]  # of ``layers.csv``: every layer, quantized or not
    open: Callable[[], Engine]  # simulated in torch, fp32, as its consumer computes
    # relative errors of quantized weights by row name; empty for runs and denoisers
    weight_errors: Callable[[], Mapping[str, float | None]] = dict


@dataclass(frozen=True)
class Subject:
    """A candidate: a third-party checkpoint or a run of sd-quant, opened."""

    name: str  # in tables, and of its results' folder
    path: Path
    file: Mapping[str, Any]  # its ``provenance.fingerprint``
    parts: Mapping[str, SubjectPart]  # quantized parts, the denoiser first; the rest are the model's own
    # quantized layers of the denoiser that take inputs of the full-precision network; empty for a run
    layers: Mapping[str, QuantizedLayer] = field(default_factory=dict)
    runtime: OwnLibrary | None = None
    no_runtime: str = "no library that opens it computes on this machine"  # why ``runtime`` is None
    loras: str | None = None  # where the model's LoRAs are: FUSED or BESIDE; None without LoRAs

    @property
    def denoiser(self) -> SubjectPart:
        return next(iter(self.parts.values()))

    @property
    def others(self) -> dict[str, SubjectPart]:
        return dict(list(self.parts.items())[1:])


def third_party(name: str, path: Path, baseline: Baseline) -> Subject:
    """Open the third-party checkpoint at ``path``. Raises SdQuantError for an unreadable one."""
    checkpoint = baseline.session.checkpoint
    others = read_parts(path, checkpoint)
    denoiser = others.pop(baseline.denoiser)
    if denoiser.marks:
        check_marks(path, denoiser.marks, sampled(checkpoint))
    rows = rows_of(denoiser, checkpoint.family.layer_roles(empty_denoiser(checkpoint)))
    layers, loras = unfolded(denoiser, checkpoint), None
    if adapted_of(checkpoint):
        loras = FUSED if holds_loras(denoiser, layers, checkpoint) else BESIDE
    if loras == BESIDE:
        denoiser = with_loras(denoiser, layers, checkpoint)
        layers = unfolded(denoiser, checkpoint)
    return Subject(
        name, path, fingerprint(path),
        {baseline.denoiser: subject_part(denoiser, checkpoint, rows)}
        | {part: other_part(read, in_place(checkpoint, part), part) for part, read in others.items()},
        layers, runtime_of(denoiser, checkpoint), WITHOUT_LORAS if loras == BESIDE else Subject.no_runtime,
        loras,
    )  # fmt: skip


def subject_part(
    read: QuantizedDenoiser,
    checkpoint: Checkpoint,
    rows: list[dict[str, Any]],
    weight_errors: Callable[[], Mapping[str, float | None]] = dict,
) -> SubjectPart:
    opened = partial(open_computed, checkpoint, read)
    return SubjectPart(read.format, read.maker, read.stored_bytes, read.bits, rows, opened, weight_errors)


def other_part(read: QuantizedDenoiser, checkpoint: Checkpoint, part: str) -> SubjectPart:
    """Return a non-denoiser part of the candidate; ``checkpoint``: the model with ``part`` in the denoiser's place."""
    weights, network = denoiser_weights(checkpoint), empty_denoiser(checkpoint)
    denoises = part in checkpoint.family.DENOISERS
    rows = rows_of(read, checkpoint.family.layer_roles(network) if denoises else roles_of(network, ()))
    if adapted_of(checkpoint) and not holds_loras(read, read.layers, checkpoint):
        read = with_loras(read, read.layers, checkpoint)

    def weight_errors() -> dict[str, float | None]:
        return {
            f"{part}:{name}": relative_error(weights[f"{name}.weight"].float(), plain_weight(layer))
            for name, layer in read.layers.items()
        }

    named = [row | {"name": f"{part}:{row['name']}"} for row in rows]
    return subject_part(read, checkpoint, named, weight_errors)


def rows_of(denoiser: QuantizedDenoiser, roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows of ``layers.csv``, with the columns that are known before anything is computed."""
    rows = []
    for name, role in roles.items():
        layer = denoiser.layers.get(name)
        stored = layer.weight if layer is not None else denoiser.parameters[f"{name}.weight"]
        inputs = denoiser.rounded.get(name) if layer is None else layer.inputs
        rows.append({
            "name": name,
            "role": role,
            "weight_shape": "x".join(map(str, stored.shape)),
            "format": layer.format if layer is not None else HIGH_PRECISION,
            "bits": layer.bits if layer is not None else BITS[stored.dtype],
            "scales": layer.scales if layer is not None else "",
            "inputs": HIGH_PRECISION if inputs is None else str(inputs),
        })  # fmt: skip
    return rows


def open_computed(checkpoint: Checkpoint, denoiser: QuantizedDenoiser) -> TorchEngine:
    """Open the denoiser in torch, simulated as its consumer computes it."""
    return open_changed(checkpoint, lambda module: with_denoiser(module, checkpoint, denoiser))


class LibraryEngine(TorchEngine):
    """A denoiser opened by another library; its input ``dtype`` is given, because its weights may be of any kind.

    It runs without inference mode, in which quanto fails.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype, *arguments: Any):
        super().__init__(module, *arguments)
        self.inputs = {name: dtype if each.is_floating_point else each for name, each in self.inputs.items()}

    @torch.no_grad()
    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        output = self.module(**cast_inputs(self.inputs, inputs, self.device))
        outputs = output if isinstance(output, tuple) else (output,)
        return {name: each.float() for name, each in zip(self.outputs, outputs, strict=True)}

    def reopen(self) -> bool:
        return False  # weights of any kind are not to be moved


def runtime_of(denoiser: QuantizedDenoiser, checkpoint: Checkpoint) -> OwnLibrary | None:
    if denoiser.runtime is None:
        return None
    opened, part = denoiser.runtime, denoiser_part(checkpoint)

    def open_library() -> Engine:
        network, device = opened().eval().requires_grad_(False), best_device()
        network = network if device == CPU else network.to(device)  # some libraries refuse ``to``, even to the same
        return LibraryEngine(part.wrap(network), cast(torch.dtype, network.dtype), part.contract)

    return OwnLibrary(denoiser.maker, open_library)
