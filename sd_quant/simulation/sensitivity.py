"""The sensitivity of layers to quantization, for a choice of layers to keep in fp16.

A layer's sensitivity is the relative error of the whole network's output when only that layer is quantized, on network
inputs sampled during calibration, after guidance. Squared errors of single layers are assumed to add up, as small and
independent ones do; then the best n layers to keep are the n most sensitive ones. A measured curve with several layers
kept at once tests that. The road not taken is an integer program over pairs of layers, which requires the square of
this many passes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from sd_quant.errors import ConfigError
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The network's error by single layer, and with the most sensitive layers kept in high precision."""

    network_error: dict[str, float]  # relative error of the network's output by the one layer quantized, largest first
    # For several numbers of kept layers: {"kept", "relative_error", "predicted"}, predicted as the sum of squared
    # errors of the other layers, which are quantized.
    curve: list[dict[str, float]]


def layers_to_keep(keep: int | float, quantized: int) -> int:
    """The number of ``quantized`` layers to keep in high precision: ``keep``, or that fraction of them.

    Raises ConfigError when none would be left to quantize.
    """
    kept = keep if isinstance(keep, int) else round(keep * quantized)
    if kept and kept >= quantized:
        raise ConfigError(
            f"keep is {keep}, which keeps all {quantized} layers that quant_level selects and quantizes nothing; "
            f"keep at most {max(0, quantized - 1)}"
        )
    return kept


def curve_points(kept: int, quantized: int) -> list[int]:
    """The numbers of kept layers in the curve: 0, the powers of two, and ``kept``, in order."""
    powers = [2**power for power in range(quantized.bit_length()) if 2**power < quantized]
    return sorted({0, *powers, kept})


def guided(output: Tensor, guidance_scale: float) -> Tensor:
    """The output after guidance, of [2, ...], unconditional and conditional, for one prompt; [1, ...] is unchanged.

    It is ``u + guidance_scale * (c - u)`` (Ho and Salimans 2022, with ``guidance_scale`` as diffusers has it).
    """
    if len(output) != 2:
        return output
    unconditional, conditional = output.split(1)
    return unconditional + guidance_scale * (conditional - unconditional)


class Switched:
    """The ModelOpt model ``simulated`` with ``layers`` that are quantized one by one or together in a measurement.

    ``run`` returns the output of the network that contains the model, for the sampled inputs.
    """

    def __init__(self, simulated: nn.Module, run: Callable[[], Tensor], layers: Sequence[str]):
        self.run = run
        modules = {name: simulated.get_submodule(name) for name in layers}
        self.quantizers = {
            name: [each for each in (layer.input_quantizer, layer.weight_quantizer) if each.is_enabled]
            for name, layer in modules.items()
        }

    @torch.no_grad()
    def output(self, quantized: Collection[str]) -> Tensor:
        """The network's output with no other layers quantized."""
        for name, quantizers in self.quantizers.items():
            for quantizer in quantizers:
                quantizer.enable() if name in quantized else quantizer.disable()
        try:
            return self.run()
        finally:
            for quantizer in (quantizer for quantizers in self.quantizers.values() for quantizer in quantizers):
                quantizer.enable()

    @cached_property
    def expected(self) -> Tensor:
        return self.output(())

    def error(self, quantized: Collection[str]) -> float:
        """The relative error of the network's output with no other layers quantized."""
        return relative_error(self.expected, self.output(quantized))


# ``measure(choices, error)`` returns by name the ``error`` with each of the choices of layers quantized.
Measure = Callable[[Mapping[str, Collection[str]], Callable[[Collection[str]], float]], dict[str, float]]


def one_by_one(choices: Mapping[str, Collection[str]], error: Callable[[Collection[str]], float]) -> dict[str, float]:
    """Measure all errors here."""
    return {name: error(quantized) for name, quantized in choices.items()}


def sensitivity_of(
    error: Callable[[Collection[str]], float], layers: Sequence[str], kept: int, measure: Measure = one_by_one
) -> Sensitivity:
    """Sensitivity of ``layers`` by the network's ``error`` with some of them quantized; ``kept`` is one curve point.

    ``measure`` gets ``len(layers)`` choices of single layers first, and then the ``len(curve_points(...))`` of the
    curve.
    """
    errors = measure({name: [name] for name in layers}, error)
    ranked = dict(sorted(errors.items(), key=lambda item: -item[1]))
    rest = {str(count): list(ranked)[count:] for count in curve_points(kept, len(layers))}
    measured = measure(rest, error)
    curve = [
        {
            "kept": int(count),
            "relative_error": measured[count],
            "predicted": sum(ranked[name] ** 2 for name in quantized) ** 0.5,
        }
        for count, quantized in rest.items()
    ]
    return Sensitivity(ranked, curve)


def sensitivity_rows(
    sensitivity: Sensitivity, assignment: Mapping[str, LayerAssignment], kept: int
) -> list[dict[str, object]]:
    """The rows of ``sensitivity.csv``, most sensitive first; ``assignment`` is the one with no layer kept."""
    return [
        {
            "rank": rank,
            "name": name,
            "role": assignment[name].role,
            "output_error": assignment[name].output_error,
            "network_error": error,
            "kept": rank <= kept,
        }
        for rank, (name, error) in enumerate(sensitivity.network_error.items(), start=1)
    ]
