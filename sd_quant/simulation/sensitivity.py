"""The sensitivity of layers to quantization, and which of them to keep in fp16 under a budget.

A layer's sensitivity is the relative error of the whole network's output when only that layer is quantized, on network
inputs sampled during calibration, after guidance: an error common to both halves counts once, an error in their
difference is multiplied by the guidance scale. Squared errors of single layers are assumed to add up, which holds while
they are small and independent; then the best n layers to keep are the n most sensitive ones. A curve measured with
several layers kept at once shows how well that holds. The road not taken is an integer program over pairs of layers,
which requires the square of this many passes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


@torch.no_grad()
def sensitivity_of(
    simulated: nn.Module,
    run: Callable[[], Tensor],
    layers: Sequence[str],
    kept: int,
    advance: Callable[[], object] = lambda: None,
) -> Sensitivity:
    """Sensitivity of ``layers`` of the ModelOpt model ``simulated``; ``kept`` is one point of its curve.

    ``run`` returns the output of the network that contains the model, for the sampled inputs. ``advance`` is called
    after each of the ``1 + len(layers) + len(curve_points(...))`` measurements. Afterwards all layers are quantized.
    """
    quantizers = {}
    for name in layers:
        layer = simulated.get_submodule(name)
        quantizers[name] = [each for each in (layer.input_quantizer, layer.weight_quantizer) if each.is_enabled]

    def switch(names: Sequence[str], on: bool) -> None:
        for quantizer in (quantizer for name in names for quantizer in quantizers[name]):
            quantizer.enable() if on else quantizer.disable()

    switch(layers, False)
    expected = run()
    advance()
    errors = {}
    for name in layers:
        switch([name], True)
        errors[name] = relative_error(expected, run())
        switch([name], False)
        advance()
    ranked = dict(sorted(errors.items(), key=lambda item: -item[1]))
    order, curve = list(ranked), []
    switch(layers, True)
    for count in curve_points(kept, len(layers)):
        switch(order[:count], False)
        predicted = sum(ranked[name] ** 2 for name in order[count:]) ** 0.5
        curve.append({"kept": count, "relative_error": relative_error(expected, run()), "predicted": predicted})
        advance()
    switch(layers, True)
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
