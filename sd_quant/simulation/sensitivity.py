"""Sensitivity of layers to quantization, to choose which layers to keep in fp16.

A layer's sensitivity is the relative error of the whole network's output, after guidance, when only that layer is
quantized, on network inputs sampled during calibration. Squared errors of single layers are assumed to add up, as small
independent errors do; then the best n layers to keep are the n most sensitive ones. Alternative not taken: an integer
program over pairs of layers, which requires quadratically many passes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from sd_quant.errors import ConfigError
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment


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


def sensitivity_rows(
    errors: Mapping[str, float], assignment: Mapping[str, LayerAssignment], kept: int
) -> list[dict[str, object]]:
    """Return the rows of ``sensitivity.csv`` for ``errors``, most sensitive first; ``assignment`` quantizes all."""
    return [
        {
            "rank": rank,
            "name": name,
            "role": assignment[name].role,
            "output_error": assignment[name].output_error,
            "network_error": error,
            "kept": rank <= kept,
        }
        for rank, (name, error) in enumerate(errors.items(), start=1)
    ]
