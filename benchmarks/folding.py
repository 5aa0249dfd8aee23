"""The latency that folding the smoothing saves: one recipe folded and with ModelOpt's multiplications, and unquantized.

Three graphs of one trace run in OpenVINO in turn, on inputs that calibration kept, for one image and for eight, each
with the two samples of guidance. The error of each output against the unquantized graph stands beside its latency,
because a faster graph that computes something else would be no gain.

    python benchmarks/folding.py --repeats 200
"""

import argparse
import statistics
import tempfile
from collections import Counter
from pathlib import Path

import onnx
import torch
from common import calls_of, load, parser, report
from graphs import UNQUANTIZED, export
from torch import Tensor

from sd_quant.engines import load_engine
from sd_quant.engines.base import Engine
from sd_quant.engines.openvino import int8_layers
from sd_quant.metrics.latency import measure_in_turn
from sd_quant.numbers import relative_error
from sd_quant.quantization.recipe import Recipe

PER_LAYER, FOLDED = "modelopt", "folded"


def nodes(path: Path, engine: Engine) -> dict[str, int]:
    """Counts of nodes in the exported graph and in the one that OpenVINO made of it."""
    graph = onnx.load(path, load_external_data=False).graph
    kinds = Counter(node.op_type for node in graph.node)
    runtime = engine.compiled.get_runtime_model().get_ops()
    return {
        "multiplications": kinds["Mul"],
        "smoothing_multiplications": sum(node.output[0].endswith(".smoothed") for node in graph.node),
        "quantize": kinds["QuantizeLinear"],
        "int8_layers": int8_layers(engine),
        "executed": sum(
            op.get_rt_info()["layerType"].astype(str) not in ("Const", "Input", "Output") for op in runtime
        ),
    }


def compare(engines: dict[str, Engine], inputs: dict[str, Tensor], options: argparse.Namespace) -> dict:
    """The latency of each engine and the error of its output; the second half of the rounds is in reverse order.

    The engine that follows the one with the largest graph finds the processor's caches full of its weights.
    """
    calls = calls_of(engines, inputs)
    reference = calls[UNQUANTIZED]()["out"]
    halves = [
        measure_in_turn({name: calls[name] for name in order}, options.warmup, options.repeats // 2)
        for order in (list(calls), list(calls)[::-1])
    ]
    found = {}
    for name, call in calls.items():
        samples = [sample for half in halves for sample in half[name]["samples_ms"]]
        found[name] = {
            "p50_ms": statistics.median(samples),
            "min_ms": min(samples),
            "relative_error": relative_error(reference, call()["out"]),
            "samples_ms": samples,
        }
    return found


def quartiles(a: dict, b: dict) -> list[float]:
    """The quartiles of the rounds' ratios a / b, above 1 where b is faster."""
    return statistics.quantiles(x / y for x, y in zip(a["samples_ms"], b["samples_ms"], strict=True))


def main() -> None:
    arguments = parser(__doc__, prompts=8)
    arguments.add_argument("--level", type=float, default=3.0)
    arguments.add_argument("--alpha", type=float, default=0.8)
    arguments.add_argument("--images", type=int, nargs="+", default=[1, 8], help="a call, each twice for guidance")
    arguments.add_argument("--warmup", type=int, default=20)
    arguments.add_argument("--repeats", type=int, default=200)
    arguments.add_argument("--threads", type=int, help="of OpenVINO; its own choice by default")
    options = arguments.parse_args()
    subject = load(options.prompts)
    collected = subject.statistics(subject.sampling(options.steps))
    assignments = {UNQUANTIZED: {}} | {
        smoothing: subject.assignment(collected, Recipe(options.level, options.alpha, smoothing=smoothing))
        for smoothing in (PER_LAYER, FOLDED)
    }
    print(f"level {options.level:g}, alpha {options.alpha}; OpenVINO\n")
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = export(subject, assignments, Path(folder))
        engines = {name: load_engine("openvino", path, threads=options.threads) for name, path in paths.items()}
        counts = {name: nodes(paths[name], engine) for name, engine in engines.items()}
        for name, count in counts.items():
            print(f"{name:12}", "  ".join(f"{kind.replace('_', ' ')} {number}" for kind, number in count.items()))
        for images in options.images:
            inputs = {
                name: torch.cat([sample.values[index % len(sample.values)] for index in range(images)])
                for name, sample in collected.calls.items()
            }
            figures[2 * images] = found = compare(engines, inputs, options)
            print(f"\nbatch {2 * images}, {options.repeats} rounds")
            for name, latency in found.items():
                low, middle, high = quartiles(found[UNQUANTIZED], latency)
                print(
                    f"{name:12} median {latency['p50_ms']:7.2f} ms, least {latency['min_ms']:7.2f} ms, "
                    f"faster than unquantized {middle:.3f}x ({low:.3f}..{high:.3f}), "
                    f"error {latency['relative_error']:.4f}"
                )
            low, middle, high = quartiles(found[PER_LAYER], found[FOLDED])
            least = found[PER_LAYER]["min_ms"] / found[FOLDED]["min_ms"]
            print(
                f"folding buys {middle:.3f}x (quartiles {low:.3f}..{high:.3f}), of the least {least:.3f}x", flush=True
            )
    report(options, {"nodes": counts, "latency": figures})


if __name__ == "__main__":
    main()
