"""SDXL's UNet on this GPU, by torch in fp16, INT8 and FP8 and by TensorRT: one run, every side in turn with the same.

    python benchmarks/gpu_table.py --out outputs/benchmarks/gpu

The network has its full size and random weights, because latency does not depend on them; the scales come from one real
pass over random inputs. Every side is an engine as quantize.py opens it: eager, compiled block by block and replayed
as a CUDA graph, or TensorRT's. Each is timed by the GPU's own events, call by call in turn with eager and with compiled
fp16; a ratio is the median of the rounds'. Errors are relative to the fp16 output: the side's own, and beside it the
simulation's, which is what the recipe itself costs.

What is wanted comes first, level 3 at every batch; then the other levels, other ways to the same products, so that what
is slow is known with what would be faster, and plans. For each kind of side the kernels that take longest are told.

The road not taken is a picture from prompt to image on each side: its other parts are the same everywhere and hide the
difference. The loop of ``--steps`` calls with its scheduler stands for it.
"""

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from sd_quant.calibration.hooks import collect, draw
from sd_quant.checkpoints.nemo_networks import sdxl_base_config
from sd_quant.devices import CPU
from sd_quant.engines.base import Engine, cast_inputs
from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine, compiled, placed
from sd_quant.files import write_json, write_text
from sd_quant.metrics.flops import operations
from sd_quant.metrics.latency import clock_of, cuda_events, measure, measure_in_turn, ratio
from sd_quant.models.parts import Contract, axes
from sd_quant.models.roles import attention_widths
from sd_quant.models.sdxl import NemoUnetPart, unet_part
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, unet_config
from sd_quant.models.unet import layer_roles, shared_inputs
from sd_quant.numbers import relative_error
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import derive
from sd_quant.quantization.formats import FORMATS
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.report.provenance import machine, versions
from sd_quant.simulation.modelopt import simulate
from sd_quant.simulation.native import (
    PRODUCTS,
    Products,
    aligned_scaled_mm,
    int_mm,
    kernel_convolution,
    kernel_linear,
    unfolded_int_mm,
    with_native_layers,
)

MAIN_LEVEL = 3.0
LEVELS = {"int8": (2.5, 2.0, 1.0), "fp8": (2.5, 2.0, 1.0, 4.0)}  # beside it; level 4's attention gains nothing in torch
INT8, FP8 = Pair("int8", "int8"), Pair("fp8", "fp8")
RECIPES = {  # as conf/quantize has them; one step is calibrated, so its largest is its mean
    "int8": Recipe(MAIN_LEVEL, 0.8, collect_method="min-max", shift=True, enable=Enable(INT8, INT8, None)),
    "fp8": Recipe(MAIN_LEVEL, None, collect_method="min-max", enable=Enable(FP8, FP8, "fp8"), per_channel=False,
                  smoothing="none"),
}  # fmt: skip
PER_ROW = {"fp8": replace(RECIPES["fp8"], per_channel=True)}
GUIDANCE, SIDE = 8.0, 8192  # of the matrices that the peaks are measured on
OVER_COMPILED, OVER_EAGER = 1.33, 2.2  # what the best quantized side is to reach on a Hopper card

# What others have published, to stand beside: another machine, other software, other lengths of loop.
PUBLISHED = (
    "NeMo's documentation, H100, TensorRT 9.3, batch 1/2/4: fp16 1724/3004/5657 ms, INT8 1407/2403/4253 ms a picture; "
    "the framework 3056/4832/8434 ms",
    "NVIDIA's article, RTX 6000 Ada, 50 steps, against torch.compile in fp16: INT8 1.72x, FP8 1.95x",
    "MLPerf Inference, SDXL offline, 20 steps, a GPU: H100 2.263, H200 2.399, B200 4.071 pictures a second",
)


@dataclass(frozen=True)
class Way:
    """To the products of one recipe's layers; ``products`` None for the device's own."""

    name: str
    fmt: str
    recipe: Recipe
    products: Mapping[str, Products] | None = None


def main_ways() -> list[Way]:
    return [Way(f"{fmt} level {MAIN_LEVEL:g}", fmt, recipe) for fmt, recipe in RECIPES.items()]


def other_ways(levels: Sequence[float]) -> list[Way]:
    """The other levels."""
    return [
        Way(f"{fmt} level {level:g}", fmt, replace(RECIPES[fmt], quant_level=level))
        for fmt, own in LEVELS.items()
        for level in own
        if level in levels
    ]


def tries(device: torch.device) -> list[Way]:
    """Other ways to the same numbers, to know which is fastest on this machine."""
    at, int8, fp8 = f"level {MAIN_LEVEL:g}", RECIPES["int8"], RECIPES["fp8"]
    usual = PRODUCTS[device.type]
    ways = [
        Way(f"int8 {at}, convolutions rounded", "int8", int8, {"INT8": Products(usual["INT8"].linear, None)}),
        Way(f"int8 {at}, torch's products", "int8", int8, {"INT8": Products(int_mm, unfolded_int_mm)}),
        Way(f"fp8 {at}, scales per row", "fp8", PER_ROW["fp8"]),
    ]
    if device.type == "cuda":
        ways += [
            Way(f"fp8 {at}, convolutions rounded", "fp8", fp8, {"FLOAT8E4M3FN": Products(aligned_scaled_mm, None)}),
            Way(
                f"fp8 {at}, the kernel's products",
                "fp8",
                fp8,
                {"FLOAT8E4M3FN": Products(kernel_linear, kernel_convolution)},
            ),
        ]
    return ways


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4], help="pictures at a time (%(default)s)")
    parser.add_argument("--size", type=int, default=1024, help="of a picture, in pixels (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of a loop (%(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each side (%(default)s)")
    levels = sorted({level for own in LEVELS.values() for level in own})
    parser.add_argument("--levels", type=float, nargs="*", default=levels, help="beside 3, at the first batch")
    parser.add_argument("--no-tries", action="store_true", help="leave the other ways to the same products out")
    parser.add_argument("--plan", action="append", default=[], help="name=path of a plan of unet_xl; may be repeated")
    parser.add_argument("--model", type=Path, help="a model_config.yaml of another size")
    parser.add_argument("--on-cpu", action="store_true", help="all the same, in fp32: slow, and only to try the script")
    parser.add_argument("--seconds", type=float, default=480, help="after which no further side is begun (%(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for table.md, table.json and plans")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------- what is measured


def build(config: dict, device: torch.device, dtype: torch.dtype) -> NemoUnetPart:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    with torch.device(device):
        unet = UNet2DConditionModel(**unet_config(config))
    return placed(wrapped(unet.eval().requires_grad_(False)), device, dtype)


def wrapped(unet) -> NemoUnetPart:
    config = unet.config
    return NemoUnetPart(unet, config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim)


def contract_of(part: NemoUnetPart) -> Contract:
    return unet_part(part.unet.config, CONTEXT_TOKENS, "nemo").contract


def inputs_of(part: NemoUnetPart, pictures: int, size: int) -> dict[str, Tensor]:
    """Of one call with guidance, where the network is: the same two samples for each picture, which are calibrated."""
    engine, random = TorchEngine(part, contract_of(part)), torch.Generator().manual_seed(1)
    shapes = contract_of(part).shapes(**axes(2, size, size))
    inputs = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    inputs["timesteps"].fill_(500)
    repeated = {name: torch.cat([tensor] * pictures) for name, tensor in inputs.items()}
    return cast_inputs(engine.inputs, repeated, engine.device)


def statistics_of(part: NemoUnetPart, inputs: dict[str, Tensor]) -> Statistics:
    """Of one picture and one step, both halves of guidance."""
    layers = {
        name: part.unet.get_submodule(name) for name, role in layer_roles(part.unet).items() if role != "excluded"
    }
    with collect(part, layers, range(1), 1, lambda: (0, [0]), draw(layers, range(1), 1, seed=0)) as statistics:
        part(**inputs)
    return statistics


def assignment_of(part: NemoUnetPart, statistics: Statistics, recipe: Recipe) -> dict[str, LayerAssignment]:
    """Derived on the processor, as everywhere."""
    roles = layer_roles(part.unet)

    def read(kind: str) -> Callable[[str], Tensor]:
        return lambda name: part.unet.get_parameter(f"{name}.{kind}").cpu().float()

    return derive(
        roles, read("weight"), statistics.layers, recipe,
        shared_inputs(roles), (), attention_widths(part.unet) if recipe.quant_level >= 4 else {}, bias_of=read("bias"),
    )  # fmt: skip


def moved(assignment: Mapping[str, LayerAssignment], device: torch.device) -> dict[str, LayerAssignment]:
    """To where the weights are."""

    def layer_there(layer: LayerAssignment) -> LayerAssignment:
        found = {field.name: getattr(layer, field.name) for field in fields(layer)}
        return replace(layer, **{name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)})

    return {name: layer_there(layer) for name, layer in assignment.items()}


def quantized(part: NemoUnetPart, known: Mapping[str, LayerAssignment], way: Way) -> NemoUnetPart:
    device = next(part.parameters()).device
    return wrapped(with_native_layers(copy.deepcopy(part.unet), moved(known, device), device, way.products))


def engine_of(part: NemoUnetPart) -> TorchEngine:
    return TorchEngine(part, contract_of(part))


def fast(part: NemoUnetPart) -> Engine:
    """Compiled, and replayed where there is a GPU."""
    engine = engine_of(compiled(part))
    return Replayed(engine) if engine.device.type == "cuda" else engine


def loop_of(engine: Engine, inputs: dict[str, Tensor], steps: int) -> Callable[[], None]:
    """What a picture takes beside its text and its decoding: guidance and Euler's steps around the calls."""
    from diffusers import EulerDiscreteScheduler

    scheduler, x = EulerDiscreteScheduler(), inputs["x"]

    def run() -> None:
        scheduler.set_timesteps(steps, device=x.device)
        latents = torch.randn_like(x[: len(x) // 2]) * scheduler.init_noise_sigma
        for timestep in scheduler.timesteps:
            given = {
                "x": scheduler.scale_model_input(torch.cat([latents, latents]), timestep),
                "timesteps": timestep.expand(len(x)),
            }
            unconditional, conditional = engine(**inputs | given)["out"].to(x).chunk(2)
            latents = scheduler.step(torch.lerp(unconditional, conditional, GUIDANCE), timestep, latents)[0].to(x)

    return run


def peaks() -> dict[str, float]:
    """Operations a second of this GPU's matrix products, measured: what a data sheet promises is never reached."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.float16) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"fp16": lambda: a @ b}
    able = torch.cuda.get_device_capability()
    if able >= FORMATS["int8"].torch_compute_capability:
        whole = [matrix.mul(40).clamp(-127, 127).to(torch.int8) for matrix in (a, b)]
        calls["int8"] = lambda: torch._int_mm(whole[0], whole[1].T)
    if able >= FORMATS["fp8"].torch_compute_capability:
        eighths, one = [matrix.to(torch.float8_e4m3fn) for matrix in (a, b)], torch.ones((), device="cuda")
        calls["fp8"] = lambda: torch._scaled_mm(
            eighths[0], eighths[1].T, one, one, out_dtype=torch.float16, use_fast_accum=True
        )
    found = measure_in_turn(calls, 3, 10, dict.fromkeys(calls, cuda_events))
    return {name: 2 * SIDE**3 / (times["p50_ms"] / 1e3) for name, times in found.items()}


def operations_of(part: NemoUnetPart, size: int) -> int:
    """Of one call for one picture."""
    meta = {name: tensor.to("meta") for name, tensor in inputs_of(part, 1, size).items()}
    return operations(copy.deepcopy(part).to("meta"), meta)[0]


def memory_of(part: NemoUnetPart, inputs: dict[str, Tensor]) -> float | None:
    """Most that this side has on the GPU in a call, in GB: its weights and what the call needs."""
    if not inputs["x"].is_cuda:
        return None
    part(**inputs)  # what compiles takes memory, too
    weights = sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers()))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    part(**inputs)
    return (weights + torch.cuda.max_memory_allocated() - before) / 1e9


def longest_kernels(engine: Engine, inputs: dict[str, Tensor], most: int = 12) -> list[dict[str, Any]]:
    """Of one call: what a GPU spends its time on, ``{kernel, calls, ms}``."""
    from torch.profiler import ProfilerActivity, profile

    engine(**inputs)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        engine(**inputs)
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.key_averages() if str(event.device_type).endswith("CUDA")]
    found = [{"kernel": event.key[:160], "calls": event.count, "ms": event.self_device_time_total / 1e3}
             for event in on_gpu]  # fmt: skip
    return sorted(found, key=lambda row: -row["ms"])[:most]


# ---------------------------------------------------------------------------------------------------------- the table


@dataclass
class Table:
    """Rows so far, and what each is measured with: ``operations`` of a picture's call, ``peaks`` of the GPU."""

    part: NemoUnetPart
    size: int
    steps: int
    repeats: int
    operations: int
    peaks: dict[str, float]
    eager: Engine
    compiled: Engine

    def row(self, side: str, engine: Engine, pictures: int, **more) -> dict:
        inputs = inputs_of(self.part, pictures, self.size)
        sides = {"side": engine, "eager": self.eager, "compiled": self.compiled}
        calls = {name: partial(each, **inputs) for name, each in sides.items() if name == "side" or each is not engine}
        clock = clock_of(engine.device)
        times = measure_in_turn(calls, 3, self.repeats, dict.fromkeys(calls, clock))
        loop = measure(loop_of(engine, inputs, self.steps), 1, 3, clock)["p50_ms"]
        milliseconds = times["side"]["p50_ms"]
        rate, peak = pictures * self.operations / (milliseconds / 1e3), self.peaks.get("fp16")
        row = {
            "side": side,
            "batch": pictures,
            "p50_ms": milliseconds,
            "p90_ms": times["side"]["p90_ms"],
            "over_compiled": ratio(times["compiled"], times["side"]).value if "compiled" in times else None,
            "over_eager": ratio(times["eager"], times["side"]).value if "eager" in times else None,
            "loop_ms": loop,
            "pictures_a_second": 1e3 * pictures / loop,
            "share_of_fp16_peak": rate / peak if peak else None,
            **more,
        }
        print("  ".join(f"{column} {cell(value)}" for column, value in row.items() if value is not None), flush=True)
        return row


def table_of(chosen: argparse.Namespace, part: NemoUnetPart, peaks: dict[str, float]) -> Table:
    baseline = fast(copy.deepcopy(part))
    return Table(
        part, chosen.size, chosen.steps, chosen.repeats, operations_of(part, chosen.size), peaks, engine_of(part),
        baseline,
    )  # fmt: skip


def rows_of(chosen: argparse.Namespace, table: Table, kernels: dict[str, list[dict]]) -> Iterator[dict]:
    """What is wanted first. ``kernels`` is filled with the longest of the sides of the first batch."""
    part, began, first = table.part, time.monotonic(), chosen.batches[0]
    device = next(part.parameters()).device
    statistics = statistics_of(part, inputs_of(part, 1, chosen.size))

    def late(what: str) -> bool:
        over = time.monotonic() - began > chosen.seconds
        if over:
            print(f"{what} was not begun: the time is over", flush=True)
        return over

    def row(way: Way, pictures: int, told: bool = False) -> dict:
        inputs = inputs_of(part, pictures, chosen.size)
        known = assignment_of(part, statistics, way.recipe)
        side, full = quantized(part, known, way), part(**inputs).float()
        errors = {"error": relative_error(full, side(**inputs).float())}
        if told and importlib.util.find_spec("modelopt"):
            imitation = copy.deepcopy(part)
            simulate(imitation.unet, moved(known, device))
            errors["simulation_error"] = relative_error(full, imitation(**inputs).float())
            del imitation
        engine = fast(side)
        made = table.row(way.name, engine, pictures, memory_gb=memory_of(side, inputs), **errors)
        if told and device.type == "cuda":
            kernels[way.name] = longest_kernels(engine_of(side), inputs)
        engine.close()
        return made

    for pictures in chosen.batches:
        inputs = inputs_of(part, pictures, chosen.size)
        yield table.row("fp16 eager", table.eager, pictures, memory_gb=memory_of(part, inputs))
        yield table.row("fp16 compiled", table.compiled, pictures)
        if pictures == first and device.type == "cuda":
            kernels["fp16 compiled"] = longest_kernels(table.compiled.engine, inputs)
        for way in main_ways():
            if not late(f"{way.name} at batch {pictures}"):
                yield row(way, pictures, told=pictures == first)
    for way in [*other_ways(chosen.levels), *([] if chosen.no_tries else tries(device))]:
        if not late(way.name):
            yield row(way, first)
    plans = dict(given.split("=", 1) for given in chosen.plan)
    if chosen.out and device.type == "cuda" and importlib.util.find_spec("tensorrt"):
        for name, recipe in {"fp16": None, **RECIPES}.items():
            if not late(f"the plan {name}"):
                known = {} if recipe is None else assignment_of(part, statistics, recipe)
                plans[name] = build_plan_of(part, known, chosen.out / "plans" / name, chosen.batches, chosen.size)
    for name, path in plans.items():
        yield from plan_rows(name, Path(path), table, chosen.batches)


def plan_rows(name: str, path: Path, table: Table, batches: Sequence[int]) -> Iterator[dict]:
    from sd_quant.engines import load_engine

    engine = Replayed(load_engine("tensorrt", path))
    for pictures in batches:
        inputs = inputs_of(table.part, pictures, table.size)
        error = relative_error(table.part(**inputs).float(), engine(**inputs)["out"].float())
        yield table.row(f"TensorRT {name}", engine, pictures, error=error)
    engine.close()


def write_onnx_of(part: NemoUnetPart, known: Mapping[str, LayerAssignment], path: Path) -> None:
    """The network with its weights and an assignment as ONNX, as quantize.py exports it."""
    from diffusers import UNet2DConditionModel

    from sd_quant.export.qdq import write_onnx
    from sd_quant.export.tracing import trace

    graph = trace(lambda: wrapped(UNet2DConditionModel(**part.unet.config)), contract_of(part))
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = part.state_dict()
    write_onnx(graph, path, inputs=len(contract_of(part).inputs), prefix="unet.",
               read=lambda name: weights[name].cpu().float(), assignment=known)  # fmt: skip


def build_plan_of(
    part: NemoUnetPart, known: Mapping[str, LayerAssignment], folder: Path, batches: Sequence[int], size: int, **more
) -> Path:
    """A plan for guidance at all ``batches``; ``more`` goes to the build."""
    from sd_quant.engines.tensorrt.build import build_plan

    write_onnx_of(part, known, folder / "unet_xl.onnx")
    contract = contract_of(part)
    shapes = [contract.shapes(**axes(2 * batch, size, size)) for batch in (min(batches), batches[0], max(batches))]
    profile = {name: tuple(each[name] for each in shapes) for name in contract.inputs}
    report = build_plan(folder / "unet_xl.onnx", folder / "unet_xl.plan", profile=profile,
                        **{"library": "tensorrt", "timing_cache": folder.parent} | more)  # fmt: skip
    print(f"plan {folder.name}: {report.seconds:.0f} s, {report.bytes / 1e9:.2f} GB", flush=True)
    return folder / "unet_xl.plan"


def verdict(rows: Sequence[dict]) -> list[str]:
    """What was wanted beside what was found, for every batch, and the most pictures a second of every side."""
    told = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        sides = [row for row in rows if row["batch"] == batch and not row["side"].startswith("fp16")
                 and row["side"] != "TensorRT fp16" and row["over_compiled"] and row["over_eager"]]  # fmt: skip
        if sides:
            best = max(sides, key=lambda row: row["over_compiled"])
            reached = best["over_compiled"] >= OVER_COMPILED and best["over_eager"] >= OVER_EAGER
            told.append(
                f"batch {batch}: {best['side']} is the fastest quantized side, {best['over_compiled']:.2f}x compiled "
                f"fp16 and {best['over_eager']:.2f}x eager; wanted {OVER_COMPILED}x and {OVER_EAGER}x: "
                + ("reached" if reached else "not reached")
            )
    for side in dict.fromkeys(row["side"] for row in rows):
        best = max((row for row in rows if row["side"] == side), key=lambda row: row["pictures_a_second"])
        told.append(f"{side}: at most {best['pictures_a_second']:.3g} pictures a second, at batch {best['batch']}")
    return told


def markdown(rows: Sequence[dict], about: dict, kernels: Mapping[str, list[dict]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    told = [*verdict(rows), "", *(f"{key}: {value}" for key, value in about.items()), "", "Published elsewhere:",
            *PUBLISHED]  # fmt: skip
    for side, found in kernels.items():
        told += ["", f"Longest kernels of {side}, ms a call:"]
        told += [f"{row['ms']:.2f} in {row['calls']}: `{row['kernel']}`" for row in found]
    return "\n".join(
        [*(f"| {' | '.join(line)} |" for line in lines), "", *(f"- {line}" if line else "" for line in told), ""]
    )


def cell(value: object) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@torch.no_grad()
def main() -> None:
    chosen = options()
    if not torch.cuda.is_available() and not chosen.on_cpu:
        sys.exit("there is no NVIDIA GPU on this machine; --on-cpu tries the script without one")
    start, on_gpu = time.monotonic(), torch.cuda.is_available()
    device, dtype = (torch.device("cuda", 0), torch.float16) if on_gpu else (CPU, torch.float32)
    config = yaml.safe_load(chosen.model.read_text(encoding="utf-8")) if chosen.model else sdxl_base_config()
    found = peaks() if on_gpu else {}
    table, kernels, rows = table_of(chosen, build(config, device, dtype), found), {}, []
    about = {
        "machine": machine(),
        "versions": versions("torch", "triton", "diffusers", "tensorrt"),
        "measured peaks, TFLOP/s": {name: round(rate / 1e12) for name, rate in found.items()},
        "TFLOP of a picture's call": round(table.operations / 1e12, 3),
    }
    for row in rows_of(chosen, table, kernels):
        rows.append(row)
        about["seconds"] = round(time.monotonic() - start)
        if chosen.out:  # after every row, so that what stops the next leaves these
            record = {"rows": rows, **about, "verdict": verdict(rows), "kernels": kernels, "published": PUBLISHED}
            write_json(chosen.out / "table.json", record)
            write_text(chosen.out / "table.md", markdown(rows, about, kernels))
    print("\n".join(verdict(rows)))
    print(f"{about['seconds']} s" + (f"; written: {chosen.out}" if chosen.out else ""))


if __name__ == "__main__":
    main()
