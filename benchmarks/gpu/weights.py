"""A linear whose weight alone is MXFP4: our kernel, which dequantizes tile by tile, or the whole weight first?

    python -m benchmarks.gpu.weights

For each size of a weight and number of rows of inputs, one call of the linear in fp16, by the kernel, and by
``torch.compile``'s dequantization before cuBLAS's product, each recorded as a CUDA graph and timed in turn. Errors are
relative to the same codes multiplied in fp32. Weights and inputs are random.
"""

import argparse
import copy
from functools import partial

import torch
from torch import nn

from sd_quant.devices import CPU
from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine, compiled, placed
from sd_quant.metrics.latency import clock_of, measure_in_turn, ratio
from sd_quant.models.parts import Contract
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.simulation.native import WEIGHT_PRODUCTS, layer_of

SIZES = [(1280, 1280), (10240, 1280), (1280, 5120), (12288, 3072), (3072, 12288)]  # outputs, inputs: SDXL's and Flux's
ROWS = [1, 16, 154, 1024, 4096]  # of inputs: a timestep's, a text's, tokens
COPIES = 16  # of a layer in one CUDA graph: starting it costs little then, and no cache holds all their weights


class InTurn(nn.Module):
    """Layers that have the same inputs; the output is the first one's."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return [layer(x) for layer in self.layers][0]


@torch.no_grad()
def row_of(outputs: int, inputs: int, rows: int, device: torch.device, repeats: int) -> str:
    torch.manual_seed(0)
    linear, x = nn.Linear(inputs, outputs), torch.randn(rows, inputs)
    layer = LayerAssignment(
        "", "linear", (outputs, inputs), "mxfp4", None, weight_amax=linear.weight.detach().abs().amax().view(1)
    )
    expected = placed(layer_of(copy.deepcopy(linear), layer, {}), CPU, torch.float32)(x)
    dtype = torch.float32 if device == CPU else torch.float16
    sides = {
        "fp16": lambda: copy.deepcopy(linear),
        "the kernel": lambda: layer_of(copy.deepcopy(linear), layer, {}, WEIGHT_PRODUCTS.get(device.type, {})),
        "dequantized first": lambda: compiled(layer_of(copy.deepcopy(linear), layer, {})),
    }
    contract = Contract({"x": ("rows", inputs)}, ("y",), {"x": dtype}, dtype)
    x = x.to(device, dtype)
    calls, errors = {}, {}
    for name, made in sides.items():
        layers = InTurn([placed(made(), device, dtype) for _ in range(COPIES)])
        errors[name] = relative_error(expected, layers(x).float().cpu())
        engine = TorchEngine(layers, contract)
        calls[name] = partial(engine if device == CPU else Replayed(engine), x=x)
    times = measure_in_turn(calls, 3, repeats, dict.fromkeys(calls, clock_of(device)))
    microseconds = {name: 1e3 * each["p50_ms"] / COPIES for name, each in times.items()}
    faster = ratio(times["dequantized first"], times["the kernel"])
    return (
        f"| {outputs} x {inputs} | {rows} | {' | '.join(f'{each:.1f}' for each in microseconds.values())} | "
        f"{faster.value:.2f}x ({faster.low:.2f} to {faster.high:.2f}) | "
        f"{' | '.join(f'{errors[name]:.1e}' for name in list(errors)[1:])} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="timed calls of each (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of inputs (%(default)s)")
    parser.add_argument("--sizes", nargs="+", default=["x".join(map(str, each)) for each in SIZES], help="of weights")
    parser.add_argument("--on-cpu", action="store_true", help="all the same, in fp32: only to try the script")
    chosen = parser.parse_args()
    if not (chosen.on_cpu or torch.cuda.is_available()):
        raise SystemExit("there is no NVIDIA GPU on this machine; --on-cpu only tries the script")
    device = torch.device("cpu" if chosen.on_cpu else "cuda")
    if device != CPU:
        import sd_quant.simulation.kernels  # noqa: F401
    columns = [
        "weight", "rows", "fp16, us", "kernel, us", "dequantized first, us", "kernel over dequantized first",
        "error of the kernel", "of dequantized first",
    ]  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for size in chosen.sizes:
        for rows in chosen.rows:
            print(row_of(*map(int, size.split("x")), rows, device, chosen.repeats), flush=True)


if __name__ == "__main__":
    main()
