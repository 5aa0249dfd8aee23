"""The speed-up of quantized convolutions on this machine.

    python benchmarks/convolutions.py

The sizes are those of SDXL's UNet at 1024x1024 with guidance. Each side quantizes its input itself and is called in
turn with the model's own convolution; a ratio is the median over rounds. ``rounded`` computes with rounded numbers,
``unfolded`` multiplies codes with torch's own product, ``kernel`` with ours (on a GPU only). ``simulation/native.py``
uses what is fastest here.
"""

import argparse
from functools import partial

import torch
from torch import nn

from sd_quant.devices import best_device
from sd_quant.engines.torch import placed
from sd_quant.metrics.latency import clock_of, measure_in_turn, ratio
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.formats import FORMATS
from sd_quant.simulation.native import Products, int_mm, kernel_convolution, layer_of, scaled_mm, unfolded_int_mm

SIZES = ((320, 320, 128), (640, 640, 64), (1280, 1280, 32), (1920, 640, 64))  # channels in and out, height and width


def assignment_of(weight: torch.Tensor, fmt: str) -> LayerAssignment:
    amax = weight.abs().flatten(1).amax(1)
    per_row = fmt == "int8"
    return LayerAssignment(
        "conv", "conv", tuple(weight.shape), fmt, fmt,
        weight_axis=0 if per_row else None, weight_amax=amax if per_row else amax.amax().view(1), activation_amax=4.0,
    )  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds (%(default)s)")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="all sides after torch.compile")
    chosen = parser.parse_args()
    device = best_device()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    sides = {"int8 rounded": ("int8", None), "fp8 rounded": ("fp8", None), "int8 unfolded": ("int8", unfolded_int_mm)}
    if device.type == "cuda":
        import sd_quant.simulation.kernels  # noqa: F401  # registers its operator

        sides |= {"int8 kernel": ("int8", kernel_convolution), "fp8 kernel": ("fp8", kernel_convolution)}
    for inputs, outputs, size in SIZES[: chosen.sizes]:
        torch.manual_seed(0)
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        weight, x = conv.weight.detach(), torch.randn(2, inputs, size, size)
        x = x.to(device, dtype, memory_format=torch.channels_last)
        made = {}
        for name, (fmt, product) in sides.items():
            linear = int_mm if fmt == "int8" else scaled_mm
            made[name] = layer_of(conv, assignment_of(weight, fmt), {FORMATS[fmt].onnx_type: Products(linear, product)})
        made["model's own"] = conv
        for module in made.values():
            placed(module, device, dtype)
            if chosen.compile:
                module.compile()
        calls = {name: partial(module, x) for name, module in made.items()}
        times = measure_in_turn(calls, 3, chosen.repeats, dict.fromkeys(calls, clock_of(device)))
        own = times["model's own"]
        told = [f"{name} {ratio(own, times[name]).value:.2f}x" for name in sides]
        print(f"{inputs:4} to {outputs:4}, {size:3}x{size:<3} {dtype} {own['p50_ms']:7.2f} ms; " + "; ".join(told))


if __name__ == "__main__":
    main()
