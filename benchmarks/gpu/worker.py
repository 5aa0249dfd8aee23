"""The process that measures: it builds a network once and answers one row of the table after the other.

Every side is timed by the GPU's own events, call by call in turn with eager and with compiled fp16; a ratio has the
interval of its rounds. What a row says of itself that cannot be is in ``doubts``: an output that is further from full
precision than the same numbers multiplied in fp32, more than the GPU's measured peak, or no kernel that multiplies
codes.
"""

import argparse
import gc
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.checkpoints.synthetic import CLIP_L, OPEN_CLIP_BIGG
from sd_quant.devices import CPU
from sd_quant.engines.base import Engine
from sd_quant.engines.replayed import Replayed
from sd_quant.metrics.flops import operations
from sd_quant.metrics.intervals import Interval, ratio_interval
from sd_quant.metrics.latency import Call, Clock, Stopping, clock_of, cuda_events, measure, measure_together
from sd_quant.models.parts import first_output
from sd_quant.models.sdxl_nemo import TextShape
from sd_quant.numbers import relative_error
from sd_quant.quantization.formats import FORMATS

from .common import add_options
from .network import Inputs, engine_of, inputs_of, twin
from .sides import (
    COMPILED,
    EAGER,
    NETWORKS,
    SIDES,
    Assignments,
    Side,
    compiled_as,
    config_of,
    fast,
    network_of,
    others_of,
)
from .supervise import serve

SIDE = 8192  # of the matrices that the peaks are measured on
MOST_ERROR = 1.5  # times the simulation's, before a row is doubted
KERNELS_OF_CODES = re.compile(  # nvjet_sm90_qq: cuBLAS's own, of FP8
    r"product_kernel|nvjet_(sm\d+_)?qq|e4m3|fp8|f8|int8|s8|imma|igemm|i8816|i16832", re.IGNORECASE
)
SMALL_TEXT = TextShape(vocab_size=64, width=64, layers=1, context=77, mlp_width=64, projection=64)


class Bench:
    """A network, by its name in NETWORKS, and its baselines, which every row is measured beside."""

    def __init__(self, chosen: argparse.Namespace, name: str):
        self.chosen, self.name, self.on_gpu = chosen, name, torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.on_gpu else CPU
        self.network = NETWORKS[name](chosen.model, self.device)
        self.assignments = Assignments(self.network, chosen.size, chosen.scales)
        self.eager = engine_of(self.network, self.network.module)
        self.simulated: dict[str, float] = {}

    @cached_property
    def compiled(self) -> Engine:
        return fast(engine_of(self.network, self.compiled_as(COMPILED[self.name], twin(self.network.module))))

    def compiled_as(self, side: Side, module: nn.Module) -> nn.Module:
        return module if self.chosen.no_compile else compiled_as(side, module)

    @cached_property
    def operations(self) -> int:
        """Of one call for one picture."""
        meta = {name: tensor.to("meta") for name, tensor in self.inputs(1).items()}
        return operations(twin(self.network.module, lambda tensor: tensor.to("meta")), meta)[0]

    def inputs(self, batch: int) -> Inputs:
        return inputs_of(self.network, batch, self.chosen.size)

    def simulation_error(self, side: Side) -> float:
        """Of the recipe itself: the same codes multiplied in fp32, without anything that makes them fast."""
        key = str(side.recipe)
        if key not in self.simulated:
            inputs, plain = self.inputs(1), Side("", key, products="simulated")
            simulated = network_of(self.network, plain, self.assignments)
            self.simulated[key] = error_of(self.network.module(**inputs), simulated(**inputs))
        return self.simulated[key]


def one_at_a_time(opened: Callable[[str], Bench]) -> Callable[[str], Bench]:
    """Benches by name. Whoever asks for another frees what the last one has on the GPU."""
    kept: dict[str, Bench] = {}

    def bench(name: str) -> Bench:
        if name not in kept:
            kept.clear()
            gc.collect()
            torch.cuda.empty_cache()
            kept[name] = opened(name)
        return kept[name]

    return bench


def computed(engine: Engine, inputs: Inputs) -> Tensor:
    return first_output(engine(**inputs))[0]


def error_of(full: Tensor, found: Tensor) -> float:
    """Relative, and infinite where it is undefined."""
    error = relative_error(full.float(), found.float())
    return math.inf if error is None else error


@cache
def measured_peaks() -> dict[str, float]:
    """Operations a second of this GPU's matrix products, measured: what a data sheet promises is never reached."""
    if not torch.cuda.is_available():
        return {}
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
    found = measure_in_turn(calls, 3, 10, cuda_events)
    return {name: 2 * SIDE**3 / (times["p50_ms"] / 1e3) for name, times in found.items()}


def measure_in_turn(calls: Mapping[str, Call], warmup: int, repeats: int, clock: Clock) -> dict[str, dict[str, Any]]:
    """The latencies of ``calls`` by their names, from the same rounds."""
    rounds = measure_together(calls, warmup, Stopping(repeats, 1, 0), dict.fromkeys(calls, clock))
    return {name: rounds.statistics(name) for name in calls}


def ratio(a: Mapping[str, Any], b: Mapping[str, Any]) -> Interval:
    """a / b over the rounds, for two results of one ``measure_in_turn``: above 1 where b is faster."""
    return ratio_interval(a["samples_ms"], b["samples_ms"])


# --------------------------------------------------------------------------------------------------------------- rows


def row_of(bench: Bench, name: str, batch: int, told: bool = False) -> dict[str, Any]:
    """A side at a batch size; ``told``: with a loop of steps, and the kernels that take longest."""
    side, inputs, begun = SIDES[name], bench.inputs(batch), time.monotonic()
    for engine in (bench.eager, bench.compiled):
        engine(**inputs)
    full, found = computed(bench.eager, inputs), dict[str, Any](recipe=side.recipe)
    if side in COMPILED.values():
        return found | timed(bench, side, bench.compiled, batch, begun, told)
    if side in EAGER.values():
        return found | timed(bench, side, bench.eager, batch, begun, told)
    module = network_of(bench.network, side, bench.assignments)
    plain = engine_of(bench.network, bench.compiled_as(side, module))
    output = computed(plain, inputs)
    if bench.on_gpu:
        found["memory_gb"] = memory_of(plain, inputs)
        found["kernels"] = longest_kernels(plain, inputs) if told else []
    found["error"] = error_of(full, output)
    engine = plain if side.eager else fast(plain)
    if side.recipe is not None:
        found["simulation_error"] = bench.simulation_error(side)
    found |= timed(bench, side, engine, batch, begun, told)
    engine.close()
    return found | {"doubts": doubts_of(side, found)}


def timed(bench: Bench, side: Side, engine: Engine, batch: int, begun: float, told: bool) -> dict[str, Any]:
    """Latency beside the baselines', in turn."""
    inputs, clock, repeats = bench.inputs(batch), clock_of(bench.device), bench.chosen.repeats
    sides = {"side": engine, "eager": bench.eager, "compiled": bench.compiled}
    calls = {key: partial(each, **inputs) for key, each in sides.items() if key == "side" or each is not engine}
    ready = time.monotonic()
    times = measure_in_turn(calls, 3, repeats, clock)
    milliseconds = times["side"]["p50_ms"]
    rate = batch * bench.operations / (milliseconds / 1e3)
    row: dict[str, Any] = {
        "p50_ms": milliseconds,
        "p90_ms": times["side"]["p90_ms"],
        "eager_ms": times["eager"]["p50_ms"] if "eager" in times else milliseconds,
        "compiled_ms": times["compiled"]["p50_ms"] if "compiled" in times else milliseconds,
    }
    for key in ("compiled", "eager"):
        if key in times:
            interval = ratio(times[key], times["side"])
            row[f"over_{key}"], row[f"over_{key}_interval"] = interval.value, [interval.low, interval.high]
    for fmt, peak in measured_peaks().items():
        if fmt == "fp16" or (side.recipe or "").startswith(fmt):
            row[f"share_of_{fmt}_peak"] = rate / peak
    if told and bench.network.loop:
        loop = measure(bench.network.loop(engine, inputs, bench.chosen.steps), 1, 3, clock)["p50_ms"]
        row |= {"loop_ms": loop, "pictures_a_second": 1e3 * batch / loop}
    return row | {"seconds_before_timing": ready - begun, "seconds_of_timing": time.monotonic() - ready}


def doubts_of(side: Side, row: Mapping[str, Any]) -> list[str]:
    """The reasons to doubt the figures of a row."""
    doubts = []
    if side.recipe is not None and not row["error"] <= MOST_ERROR * row["simulation_error"] + 1e-3:
        doubts.append(f"its error is {row['error'] / row['simulation_error']:.2g} times that of its recipe")
    if side.recipe is None and not row.get("error", 0.0) <= 2e-2:
        doubts.append(f"it differs from eager by {row['error']:.2g}")
    own = f"share_of_{'fp16' if side.recipe is None else side.recipe.partition(' ')[0]}_peak"  # codes may pass fp16's
    if row.get(own, 0.0) > 1:
        doubts.append(f"{own} is {row[own]:.2f}")
    names = " ".join(kernel["kernel"] for kernel in row.get("kernels", []))
    if side.recipe is not None and names and not KERNELS_OF_CODES.search(names):
        doubts.append("none of its longest kernels multiplies codes")
    return doubts


def memory_of(engine: Engine, inputs: Inputs) -> float:
    """Most that this side has on the GPU in a call, in GB: its weights and what the call needs."""
    module = engine.module  # type: ignore[attr-defined]
    weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine(**inputs)
    return (weights + torch.cuda.max_memory_allocated() - before) / 1e9


def longest_kernels(engine: Engine, inputs: Inputs, most: int = 12) -> list[dict[str, Any]]:
    """The kernels of one call by the time that the GPU spends in them, ``{kernel, calls, ms}``."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        engine(**inputs)
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.key_averages() if str(event.device_type).endswith("CUDA")]
    found = [{"kernel": event.key[:160], "calls": event.count, "ms": event.self_device_time_total / 1e3}
             for event in on_gpu]  # fmt: skip
    return sorted(found, key=lambda row: -row["ms"])[:most]


# ----------------------------------------------------------------------------------------------------------- pictures


def picture_of(bench: Bench, name: str, batch: int) -> dict[str, Any]:
    """Pictures from tokens to pixels on a side and on the baseline, with the decoder in every precision it could have.

    Random weights overflow in no precision; SDXL's own decoder does in fp16, which is why it is fp32 here unless a
    checkpoint was made for fp16.
    """
    side, inputs, clock = SIDES[name], bench.inputs(batch), clock_of(bench.device)
    shapes = (SMALL_TEXT, SMALL_TEXT) if bench.chosen.model else (CLIP_L, OPEN_CLIP_BIGG)
    dtype = next(bench.network.module.parameters()).dtype
    others = others_of(config_of(bench.chosen.model), *shapes, bench.device, dtype)
    vae, encoders = others.pop("vae"), list(others.values())
    tokens = torch.ones(2 * batch, shapes[0].context, dtype=torch.int64, device=bench.device)
    bench.compiled(**inputs)
    module = network_of(bench.network, side, bench.assignments)
    baseline = side in COMPILED.values()
    engine = bench.compiled if baseline else fast(engine_of(bench.network, bench.compiled_as(side, module)))
    engine(**inputs)

    def encode() -> None:
        for encoder in encoders:
            encoder(tokens, output_hidden_states=True)

    def decode(latents: Tensor) -> Tensor:
        return vae.decode(latents.to(next(vae.parameters()).dtype), return_dict=False)[0]

    def pictures(unet: Engine) -> Callable[[], object]:
        loop = bench.network.loop(unet, inputs, bench.chosen.picture_steps)

        def run() -> Tensor:
            encode()
            return decode(loop())

        return run

    latents = inputs["x"][:batch]
    row: dict[str, Any] = {"text_ms": measure(encode, 1, 5, clock)["p50_ms"]}
    for precision in (torch.float32, torch.bfloat16, dtype):
        vae.to(precision)
        row[f"decode_{str(precision).removeprefix('torch.')}_ms"] = measure(partial(decode, latents), 1, 3, clock)[
            "p50_ms"
        ]
    calls = {key: pictures(unet) for key, unet in {"side": engine, "compiled": bench.compiled}.items()}
    times = measure_in_turn(calls, 1, 5, clock)
    seconds, interval = times["side"]["p50_ms"] / 1e3, ratio(times["compiled"], times["side"])
    return row | {
        "steps": bench.chosen.picture_steps,
        "seconds_a_picture": seconds / batch,
        "compiled_seconds_a_picture": times["compiled"]["p50_ms"] / 1e3 / batch,
        "over_compiled": interval.value,
        "over_compiled_interval": [interval.low, interval.high],
    }


# -------------------------------------------------------------------------------------------------------------- plans


def plan_of(bench: Bench, library: str, name: str | None, batch: int) -> dict[str, Any]:
    """A plan of a recipe, or of fp16, for this batch alone, timed as the sides are."""
    from .plans import built_plan

    begun = time.monotonic()
    path = built_plan(bench.network, bench.assignments[name] if name else {}, library, batch, bench.chosen.size,
                      bench.chosen.plans / f"{library}-{name or 'fp16'}-{batch}".replace(" ", "-"))  # fmt: skip
    from sd_quant.engines import load_engine

    inputs = bench.inputs(batch)
    engine = Replayed(load_engine(library, path))
    error = error_of(computed(bench.eager, inputs), computed(engine, inputs))
    side = Side("", name)
    row = {"error": error, "plan_gb": path.stat().st_size / 1e9, **timed(bench, side, engine, batch, begun, False)}
    if name:
        row["simulation_error"] = bench.simulation_error(side)
    engine.close()
    return row | {"doubts": doubts_of(side, row)}


def answer(bench: Callable[[str], Bench], task: Mapping[str, Any]) -> dict[str, Any]:
    """Do one task of ``table``."""
    kind = task["kind"]
    if kind == "crash":
        os.abort()
    if kind == "hang":
        time.sleep(3600)
    with torch.no_grad():
        here = bench(SIDES[task["side"]].network if "side" in task else "sdxl")
        if kind == "picture":
            row = picture_of(here, task["side"], task["batch"])
        elif kind == "plan":
            row = plan_of(here, task["library"], task["recipe"], task["batch"])
        else:
            row = row_of(here, task["side"], task["batch"], task["told"])
    about = {"peaks": measured_peaks(), f"operations of {here.name}": here.operations,
             f"derived of {here.name}": here.assignments.derived}  # fmt: skip
    return row | {"network": here.name, "about": about}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--answers", type=int, required=True)
    chosen = parser.parse_args()
    serve(chosen.answers, partial(answer, one_at_a_time(partial(Bench, chosen))))


if __name__ == "__main__":
    sys.exit(main())
