"""SDXL's UNet on this GPU, by torch in fp16, INT8 and FP8 and by TensorRT: one run, every side in turn with the same.

    python benchmarks/gpu_table.py --out outputs/benchmarks/gpu

The network has its full size and random weights, because latency does not depend on them; the scales come from one real
pass over random inputs. Each quantized side is timed in turn with compiled fp16, call by call, and its ratio is the
median of the pairs'. Everything compiled is compiled the same way, block by block (70 transformer blocks share a few
graphs; the whole network at once takes minutes a side), and replayed as a CUDA graph, so no side waits for Python.
Errors are relative to the fp16 output: the native side's, and beside it the simulation's, which is what the recipe
itself costs. ``--plan int8=<run>/plan/unet_xl.plan`` adds plans that were built before.

The road not taken is a picture from prompt to image on each side: its other parts are the same everywhere and hide the
difference. The loop of ``--steps`` calls with its scheduler stands for it. Convolutions of a quantized side compute in
fp16 with rounded numbers, because torch has no other kernel for them, and attention's products (level 4) are not here.
"""

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch._dynamo
import yaml
from torch import Tensor

from sd_quant.calibration.statistics import Statistics, collect, draw
from sd_quant.checkpoints.synthetic import sdxl_base_config
from sd_quant.engines import load_engine
from sd_quant.engines.native import with_native_layers
from sd_quant.files import write_json, write_text
from sd_quant.metrics.fidelity import relative_error
from sd_quant.metrics.flops import operations
from sd_quant.metrics.latency import clock_of, cuda_events, measure_in_turn, ratio
from sd_quant.models.parts import LATENT_FACTOR
from sd_quant.models.sdxl import NemoUnetPart
from sd_quant.models.sdxl_nemo import CONTEXT_TOKENS, unet_config
from sd_quant.models.unet import layer_roles, shared_inputs
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.derivation import Recipe, derive
from sd_quant.quantization.levels import Enable, Pair
from sd_quant.quantization.simulate import simulate
from sd_quant.report.provenance import machine, versions

BLOCKS = ("BasicTransformerBlock", "ResnetBlock2D", "Downsample2D", "Upsample2D")
LEVELS, HIGHEST = (1.0, 2.0, 2.5, 3.0), 3.0
INT8, FP8 = Pair("int8", "int8"), Pair("fp8", "fp8")
RECIPES = {  # as conf/quantize has them; one step is calibrated, so its largest is its mean
    "int8": Recipe(HIGHEST, 0.8, collect_method="min-max", enable=Enable(INT8, INT8, None)),
    "fp8": Recipe(HIGHEST, None, collect_method="min-max", enable=Enable(FP8, FP8, None), per_channel=False,
                  smoothing="none"),
}  # fmt: skip
GUIDANCE, SIDE = 8.0, 8192  # of the matrices that the peaks are measured on

# What others have published, to stand beside: another machine, other software, other lengths of loop.
PUBLISHED = (
    "NeMo's documentation, H100, TensorRT 9.3, batch 1/2/4: fp16 1724/3004/5657 ms, INT8 1407/2403/4253 ms a picture; "
    "the framework 3056/4832/8434 ms",
    "NVIDIA's article, RTX 6000 Ada, 50 steps, against torch.compile in fp16: INT8 1.72x, FP8 1.95x",
    "MLPerf Inference, SDXL offline, 20 steps, a GPU: H100 2.263, H200 2.399, B200 4.071 pictures a second",
)

Call = Callable[[], Tensor]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4], help="pictures at a time (%(default)s)")
    parser.add_argument("--size", type=int, default=1024, help="of a picture, in pixels (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of a loop (%(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each side (%(default)s)")
    parser.add_argument("--levels", type=float, nargs="+", default=LEVELS, help="at the first batch; others have 3")
    parser.add_argument("--plan", action="append", default=[], help="name=path of a plan of unet_xl; may be repeated")
    parser.add_argument("--model", type=Path, help="a model_config.yaml of another size")
    parser.add_argument("--on-cpu", action="store_true", help="all the same, in fp32: slow, and only to try the script")
    parser.add_argument("--seconds", type=float, default=480, help="after which no further side is begun (%(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for table.md and table.json")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------- what is measured


def build(config: dict, device: str, dtype: torch.dtype) -> NemoUnetPart:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    with torch.device(device):
        unet = UNet2DConditionModel(**unet_config(config))
    return wrapped(unet.to(dtype, memory_format=torch.channels_last).eval().requires_grad_(False))


def wrapped(unet) -> NemoUnetPart:
    config = unet.config
    return NemoUnetPart(unet, config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim)


def inputs_of(part: NemoUnetPart, pictures: int, size: int) -> dict[str, Tensor]:
    """Of one call with guidance: two samples for each picture."""
    config, weight, samples = part.unet.config, next(part.parameters()), 2 * pictures
    random = torch.Generator().manual_seed(1)
    shapes = {
        "x": (samples, config.in_channels, size // LATENT_FACTOR, size // LATENT_FACTOR),
        "timesteps": (samples,),
        "context": (samples, CONTEXT_TOKENS, config.cross_attention_dim),
        "y": (samples, config.projection_class_embeddings_input_dim),
    }
    inputs = {name: torch.randn(shape, generator=random).to(weight) for name, shape in shapes.items()}
    inputs["timesteps"].fill_(500)
    return inputs


def statistics_of(part: NemoUnetPart, inputs: dict[str, Tensor]) -> Statistics:
    """Of one picture and one step, both halves of guidance."""
    layers = {
        name: part.unet.get_submodule(name) for name, role in layer_roles(part.unet).items() if role != "excluded"
    }
    with collect(part, layers, range(1), 1, lambda: (0, [0]), draw(layers, range(1), 1, seed=0)) as statistics:
        part(**inputs)
    return statistics


def assignment_of(part: NemoUnetPart, statistics: Statistics, recipe: Recipe) -> dict[str, LayerAssignment]:
    """Derived on the processor, as everywhere, with its tensors then where the weights are."""
    roles, device = layer_roles(part.unet), next(part.parameters()).device
    known = derive(
        roles, lambda name: part.unet.get_parameter(f"{name}.weight").cpu().float(), statistics.layers, recipe,
        shared_inputs(roles),
    )  # fmt: skip

    def moved(layer: LayerAssignment) -> LayerAssignment:
        found = {field.name: getattr(layer, field.name) for field in fields(layer)}
        return replace(layer, **{name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)})

    return {name: moved(layer) for name, layer in known.items()}


def compiled(part: NemoUnetPart) -> NemoUnetPart:
    for module in part.modules():
        if type(module).__name__ in BLOCKS:
            module.compile(dynamic=False)
    return part


def replayed(part: NemoUnetPart, inputs: dict[str, Tensor]) -> Call:
    """A call without Python: a CUDA graph of it. On a processor, the call itself."""
    if not inputs["x"].is_cuda:
        return lambda: part(**inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and lets libraries choose their kernels, before anything is recorded
            part(**inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = part(**inputs)

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


def loop_of(call: Call, inputs: dict[str, Tensor], steps: int) -> Callable[[], None]:
    """What a picture takes beside its text and its decoding: guidance and Euler's steps around the calls."""
    from diffusers import EulerDiscreteScheduler

    scheduler, x = EulerDiscreteScheduler(), inputs["x"]

    def run() -> None:
        scheduler.set_timesteps(steps, device=x.device)
        latents = torch.randn_like(x[: len(x) // 2]) * scheduler.init_noise_sigma
        for timestep in scheduler.timesteps:
            x.copy_(scheduler.scale_model_input(torch.cat([latents, latents]), timestep))
            inputs["timesteps"].copy_(timestep.expand(len(x)))
            unconditional, conditional = call().chunk(2)
            latents = scheduler.step(torch.lerp(unconditional, conditional, GUIDANCE), timestep, latents)[0].to(x)

    return run


def fp16_peak() -> float:
    """Operations a second of this GPU's matrix product, measured: what a data sheet promises is never reached."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.float16) for _ in range(2))
    found = measure_in_turn({"": lambda: a @ b}, 3, 10, {"": cuda_events})[""]
    return 2 * SIDE**3 / (found["p50_ms"] / 1e3)


def operations_of(part: NemoUnetPart, size: int) -> int:
    """Of one call for one picture."""
    meta = {name: tensor.to("meta") for name, tensor in inputs_of(part, 1, size).items()}
    return operations(copy.deepcopy(part).to("meta"), meta)[0]


def memory_of(part: NemoUnetPart, inputs: dict[str, Tensor]) -> float | None:
    """Most that this side has on the GPU in a call, in GB: its weights and what the call needs."""
    if not inputs["x"].is_cuda:
        return None
    weights = sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers()))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    part(**inputs)
    return (weights + torch.cuda.max_memory_allocated() - before) / 1e9


# ---------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Bench:
    """What every row is measured with; ``peak`` of the GPU and ``operations`` of a picture's call."""

    steps: int
    repeats: int
    operations: int
    peak: float | None

    def row(self, side: str, call: Call, inputs: dict[str, Tensor], baseline: Call | None = None, **more) -> dict:
        """``baseline`` is called in turn with ``call``; both work on ``inputs``."""
        clock = clock_of(inputs["x"].device)
        calls = {"side": call} | ({"baseline": baseline} if baseline else {})
        times = measure_in_turn(calls, 3, self.repeats, dict.fromkeys(calls, clock))
        loop = measure_in_turn({"": loop_of(call, inputs, self.steps)}, 1, 3, {"": clock})[""]["p50_ms"]
        pictures, milliseconds = len(inputs["x"]) // 2, times["side"]["p50_ms"]
        row = {
            "side": side,
            "batch": pictures,
            "p50_ms": milliseconds,
            "p90_ms": times["side"]["p90_ms"],
            "times_as_fast_as_compiled": ratio(times["baseline"], times["side"]) if baseline else None,
            "loop_ms": loop,
            "pictures_a_second": 1e3 * pictures / loop,
            "share_of_fp16_peak": pictures * self.operations / (milliseconds / 1e3) / self.peak if self.peak else None,
            **more,
        }
        print("  ".join(f"{column} {cell(value)}" for column, value in row.items() if value is not None), flush=True)
        return row


def rows_of(chosen: argparse.Namespace, part: NemoUnetPart) -> Iterator[dict]:
    began, on_gpu = time.monotonic(), next(part.parameters()).is_cuda
    bench = Bench(chosen.steps, chosen.repeats, operations_of(part, chosen.size), fp16_peak() if on_gpu else None)
    statistics = statistics_of(part, inputs_of(part, 1, chosen.size))
    for pictures in chosen.batches:
        inputs = inputs_of(part, pictures, chosen.size)
        first = pictures == chosen.batches[0]
        full = part(**inputs).float()
        yield bench.row("fp16 eager", lambda inputs=inputs: part(**inputs), inputs, memory_gb=memory_of(part, inputs))
        fast = compiled(copy.deepcopy(part))
        baseline = replayed(fast, inputs)
        yield bench.row("fp16 compiled", baseline, inputs, memory_gb=memory_of(fast, inputs))
        for form, recipe in RECIPES.items():
            for level in sorted(chosen.levels, reverse=True) if first else [HIGHEST]:
                if time.monotonic() - began > chosen.seconds:
                    print(f"{form} level {level:g} at batch {pictures} was not begun: the time is over")
                    continue
                known = assignment_of(part, statistics, replace(recipe, quant_level=level))
                side = wrapped(with_native_layers(copy.deepcopy(part.unet), known))
                inputs = inputs_of(part, pictures, chosen.size)  # the loop has changed them
                errors = {"error": relative_error(full, side(**inputs).float())}
                if first and importlib.util.find_spec("modelopt"):
                    imitation = copy.deepcopy(part)
                    simulate(imitation.unet, known)
                    errors["simulation_error"] = relative_error(full, imitation(**inputs).float())
                    del imitation
                call = replayed(compiled(side), inputs)
                yield bench.row(
                    f"{form} level {level:g}", call, inputs, replayed(fast, inputs), memory_gb=memory_of(side, inputs),
                    **errors,
                )  # fmt: skip
        for name, path in (given.split("=", 1) for given in chosen.plan):
            engine = load_engine("tensorrt", Path(path))
            call = lambda engine=engine, inputs=inputs: engine(**inputs)["out"].to(inputs["x"])  # noqa: E731
            yield bench.row(f"TensorRT {name}", call, inputs, replayed(fast, inputs))


def markdown(rows: Sequence[dict], about: dict) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    told = [*(f"{key}: {value}" for key, value in about.items()), "", "Published elsewhere:", *PUBLISHED]
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
    torch._dynamo.config.recompile_limit = 256  # a block for every kind of side, level and batch
    start = time.monotonic()
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    config = yaml.safe_load(chosen.model.read_text(encoding="utf-8")) if chosen.model else sdxl_base_config()
    rows = list(rows_of(chosen, build(config, device, dtype)))
    about = {"machine": machine(), "versions": versions("torch", "diffusers"),
             "seconds": round(time.monotonic() - start)}  # fmt: skip
    print(f"{about['seconds']} s")
    if chosen.out:
        write_json(chosen.out / "table.json", {"rows": rows, **about, "published": PUBLISHED})
        write_text(chosen.out / "table.md", markdown(rows, about))
        print(f"written: {chosen.out}")


if __name__ == "__main__":
    main()
