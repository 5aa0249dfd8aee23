"""The latency of a call behind calls of the same engine, as in an image, and behind another engine's.

    python benchmarks/rows.py

Unquantized and INT8 engines of one network are timed in the same rounds, each called once, or several times in a row,
beside nothing else and beside four more INT8 engines. The networks are the shipped UNet, whose weights fit into the
caches of most processors or nearly, and products of 4096 by 4096 numbers, 1.1 GB of them in fp32, which fit into none.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import torch
from common import calls_of, drawn_inputs, load, parser, recipe_of, report
from graphs import export
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from sd_quant.engines import openvino
from sd_quant.metrics.intervals import ratio_interval
from sd_quant.metrics.latency import Stopping, in_a_row, measure_together, wall_clock

WIDTH, TOKENS = 4096, 64
MORE = 4  # INT8 engines


def products(count: int, int8: bool, path: Path) -> Path:
    """An ONNX file of ``count`` products in a row, with weights in fp32 or in INT8 as in an export."""
    generator, nodes, constants = np.random.default_rng(0), list[NodeProto](), dict[str, np.ndarray]()
    constants |= {"scale": np.float32(2**-5), "zero": np.int8(0), "scales": np.full(WIDTH, 2.0**-12, np.float32)}
    constants["zeros"] = np.zeros(WIDTH, np.int8)
    for index in range(count):
        codes = generator.integers(-127, 128, (WIDTH, WIDTH), np.int8)
        x, weight = f"x{index}", f"w{index}"
        constants[weight] = codes if int8 else codes * np.float32(2**-12)
        if int8:
            nodes.append(helper.make_node("QuantizeLinear", [x, "scale", "zero"], [f"{x}_codes"]))
            nodes.append(helper.make_node("DequantizeLinear", [f"{x}_codes", "scale", "zero"], [f"{x}_rounded"]))
            nodes.append(helper.make_node("DequantizeLinear", [weight, "scales", "zeros"], [f"{weight}_read"], axis=1))
            x, weight = f"{x}_rounded", f"{weight}_read"
        nodes.append(helper.make_node("MatMul", [x, weight], [f"x{index + 1}"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", WIDTH]) for name in ("x0", f"x{count}")]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.stem}.bin")
    return path


def speedups(
    paths: Mapping[str, Path], inputs: Mapping[str, Tensor], rows: list[int], seconds: float
) -> dict[str, tuple[float, float, float]]:
    """Milliseconds of a call, unquantized and INT8, and their ratio, by the length of a row and the other engines."""
    found = {}
    for others in (0, MORE):
        engines = {"unquantized": openvino.load(paths["unquantized"])}
        engines |= {f"int8 {number}": openvino.load(paths["int8"]) for number in range(1 + others)}
        calls = calls_of(engines, inputs)
        for row in rows:
            clocks = dict.fromkeys(calls, in_a_row(wall_clock, row))
            samples = measure_together(calls, 2, Stopping(5, 1e-9, seconds), clocks).samples
            full, quantized = samples["unquantized"], samples["int8 0"]
            ratio = ratio_interval(full, quantized)
            found[f"{row} in a row, {others} more engines"] = (median(full), median(quantized), ratio.value)
            print(
                f"| {row} | {others} | {median(full):.2f} | {median(quantized):.2f} | {ratio.value:.3f} "
                f"({ratio.low:.3f} to {ratio.high:.3f}) |", flush=True,
            )  # fmt: skip
    return found


def main() -> None:
    arguments = parser(__doc__, prompts=8)
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 20], help="calls (%(default)s)")
    arguments.add_argument("--seconds", type=float, default=8, help="for each row of a table (%(default)s)")
    arguments.add_argument("--products", type=int, default=16, help="of 67 MB each in fp32 (%(default)s)")
    options = arguments.parse_args()
    subject, figures = load(options.prompts), {}
    statistics = subject.statistics(subject.sampling(options.steps, batch_size=8))
    assignments = {"unquantized": {}, "int8": subject.assignment(statistics, recipe_of("int8", "quant_level=3"))}
    with tempfile.TemporaryDirectory() as folder:
        unet = export(subject, assignments, Path(folder))
        large = {name: products(options.products, name == "int8", Path(folder, f"{name}.onnx")) for name in unet}
        networks = {
            "the shipped UNet": (unet, drawn_inputs(subject.model.contracts["unet_xl"], 2, subject.size // 8)),
            f"{options.products} products": (large, {"x0": torch.full((TOKENS, WIDTH), 0.5)}),
        }
        for name, (paths, inputs) in networks.items():
            print(f"\n{name}\n| calls in a row | more engines | unquantized, ms | INT8, ms | ratio |")
            print("|---|---|---|---|---|")
            figures[name] = speedups(paths, inputs, options.rows, options.seconds)
    report(options, figures)


if __name__ == "__main__":
    main()
