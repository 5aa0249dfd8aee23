"""Sensitivity of layers to quantization, to choose which layers to keep in fp16.

A layer's sensitivity is the relative error of the whole network's output, after guidance, when only that layer is
quantized, on network inputs sampled during calibration. Squared errors of single layers are assumed to add up, as small
independent errors do; then the best n layers to keep are the n most sensitive ones. A curve of the measured error over
the number of kept layers tests this. Alternative not taken: an integer program over pairs of layers, which requires
quadratically many passes.
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
    """Output errors of the network: with one layer quantized, and with all but the most sensitive layers quantized."""

    network_error: dict[str, float]  # relative error of the network's output by the one layer quantized, largest first
    # For several numbers of kept layers: {"kept", "relative_error", "predicted"}, predicted as the sum of squared
    # errors of the other layers, which are quantized.
    curve: list[dict[str, float]]


def layers_to_keep(keep: int | float, quantized: int) -> int:
    """Return how many of ``quantized`` layers to keep in high precision: ``keep``, or the fraction ``keep`` of these.

    Raises ConfigError when no layer would be left to quantize.
    """
    kept = keep if isinstance(keep, int) else round(keep * quantized)
    if kept and kept >= quantized:
        raise ConfigError(
            f"keep is {keep}, which keeps all {quantized} layers that quant_level selects and quantizes nothing; "
            f"keep at most {max(0, quantized - 1)}"
        )
    return kept


def curve_points(kept: int, quantized: int) -> list[int]:
    """Return the numbers of kept layers to measure, ascending: 0, powers of two below ``quantized``, and ``kept``."""
    powers = [2**power for power in range(quantized.bit_length()) if 2**power < quantized]
    return sorted({0, *powers, kept})


def guided(output: Tensor, guidance_scale: float) -> Tensor:
    """Apply guidance to one prompt's output [2, ...], unconditional and conditional; other outputs are unchanged.

    Returns ``u + guidance_scale * (c - u)`` (Ho and Salimans 2022, with diffusers' meaning of ``guidance_scale``).
    """
    if len(output) != 2:
        return output
    unconditional, conditional = output.split(1)
    return unconditional + guidance_scale * (conditional - unconditional)


class Switched:
    """A fake-quantized ModelOpt model ``simulated``, in which the quantizers of ``layers`` can be switched on and off.

    ``run()`` returns the output of the network that contains the model, for the sampled inputs.
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
        """Return the network's output when, of ``layers``, only those in ``quantized`` are quantized."""
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
        """Return the relative error of the network's output when only the layers in ``quantized`` are quantized."""
        return relative_error(self.expected, self.output(quantized))


# ``measure(choices, error)`` returns by name the ``error`` with each of the choices of layers quantized.
Measure = Callable[[Mapping[str, Collection[str]], Callable[[Collection[str]], float]], dict[str, float]]


def one_by_one(choices: Mapping[str, Collection[str]], error: Callable[[Collection[str]], float]) -> dict[str, float]:
    """Measure ``error`` for each choice (the layers to quantize), one by one in this process; return it by name."""
    return {name: error(quantized) for name, quantized in choices.items()}


def sensitivity_of(
    error: Callable[[Collection[str]], float], layers: Sequence[str], kept: int, measure: Measure = one_by_one
) -> Sensitivity:
    """Measure the sensitivity of ``layers``: each layer quantized alone, then the curve of several layers kept.

    ``error`` returns the network's error with the given layers quantized. ``measure`` is called twice, with the single
    layers and with the curve's points. ``kept`` is one of the points.
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
    """Return the rows of ``sensitivity.csv``, most sensitive first; in ``assignment`` all layers are quantized."""
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
