"""The overhead of collecting statistics: time over the plain pipeline, and memory against ``bytes_bound``.

Time: two copies of the UNet, one with the hooks and one without, denoise the same prompts in turn, one batch each,
during one collection, so that both see the same machine. Drawing the sample and finishing happen once a pass; they are
timed apart and added. Memory: the bytes of the statistics and the growth of the peak against ``bytes_bound``, which is
also computed for the full-size SDXL UNet, without its weights.

    python benchmarks/overhead.py --prompts 32 --steps 20

``--hessian 256`` sums what GPTQ takes with ``quantize.hessian`` besides.
"""

import copy
import gc
from contextlib import ExitStack

import numpy as np
import torch
from common import Subject, load, parser, report, timed
from torch import nn

from sd_quant.calibration.hooks import collect, draw
from sd_quant.engines.torch import TorchEngine
from sd_quant.inference.loading import pipeline_of
from sd_quant.metrics.latency import measure_in_turn
from sd_quant.metrics.memory import peak_memory_bytes
from sd_quant.models.sdxl_nemo import unet_config
from sd_quant.models.unet import layer_roles, shared_inputs
from sd_quant.quantization.hessians import Hessians, hessians_of
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import Sample, Statistics, bytes_bound

PLAIN, COLLECTING = "plain", "collecting"
FULL_SIZE = {  # NeMo's config of SDXL base, as far as the UNet needs it
    "unet_config": {
        "adm_in_channels": 2816, "in_channels": 4, "out_channels": 4, "model_channels": 320, "image_size": 64,
        "attention_resolutions": [4, 2], "num_res_blocks": 2, "channel_mult": [1, 2, 4], "num_head_channels": 64,
        "use_linear_in_transformer": True, "transformer_depth": [1, 2, 10], "context_dim": 2048,
    },
    "conditioner_config": {"emb_models": [{}, {}, {"emb_model": {"outdim": 256}}]},
}  # fmt: skip


def statistics_bytes(statistics: Statistics) -> int:
    """Bytes of the layers' statistics; the few whole calls are left out, as in ``bytes_bound``."""
    samples: list[Sample] = [layer.rows for layer in statistics.layers.values()]
    tensors = [layer.amax for layer in statistics.layers.values()]
    tensors += [tensor for sample in samples for tensor in (sample.values, sample.priority)]
    tensors += {
        id(each.hessian): each.hessian for each in statistics.layers.values() if each.hessian is not None
    }.values()
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def layers_of(unet: nn.Module) -> dict[str, nn.Module]:
    return {name: unet.get_submodule(name) for name, role in layer_roles(unet).items() if role != "excluded"}


def hessians_of_unet(unet: nn.Module, block: int) -> Hessians:
    """Those of all layers, in blocks of as many inputs; none of 0."""
    roles, pair = layer_roles(unet), Pair("int4", None)
    inputs = shared_inputs([name for name, role in roles.items() if role != "conv"])
    return hessians_of(
        roles, inputs, Recipe(3.0, None, enable=Enable(pair, pair, None), rounding="gptq", hessian=block)
    )


def full_size_bound(prompts: int, steps: int, block: int = 0) -> int:
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(**unet_config(FULL_SIZE))
    return bytes_bound(layers_of(unet), prompts, steps, hessians_of_unet(unet, block))


def overhead(subject: Subject, steps: int, batch_size: int, block: int = 0) -> dict:
    """Time and memory of one collection over all prompts, in turn with the plain pipeline."""
    sampling, model = subject.sampling(steps, batch_size), subject.model
    parts = {PLAIN: model.parts["unet_xl"], COLLECTING: copy.deepcopy(model.parts["unet_xl"])}
    pipelines = {
        name: pipeline_of(
            model.checkpoint, model.torch_engines() | {"unet_xl": TorchEngine(part, model.contracts["unet_xl"])}
        )
        for name, part in parts.items()
    }
    numbers, now = range(len(subject.prompts)), {}

    def turn(name: str, batch: range) -> None:
        pipelines[name](
            subject.prompts,
            sampling,
            numbers=batch,
            decode=False,
            on_batch=lambda numbers: now.update(batch=list(numbers)),
            on_step=lambda step: now.update(step=step),
        )

    batches = [numbers[start : start + batch_size] for start in numbers[::batch_size]]
    rest = {name: iter(batches) for name in parts}
    calls = {name: lambda name=name: turn(name, next(rest[name])) for name in parts}
    for name in parts:
        turn(name, batches[0])
    gc.collect()  # of what loading left behind: nobody's cost here
    before = peak_memory_bytes()
    unet = parts[COLLECTING].get_submodule("unet")
    layers, hessians = layers_of(unet), hessians_of_unet(unet, block)
    wanted, drawing = timed(lambda: draw(layers, numbers, steps, sampling.seed))
    with ExitStack() as stack:
        position = lambda: (now["step"], now["batch"])  # noqa: E731
        statistics = stack.enter_context(
            collect(parts[COLLECTING], layers, numbers, steps, position, wanted, hessians=hessians)
        )
        latency = measure_in_turn(calls, warmup=0, repeats=len(batches))
        _, finishing = timed(stack.close)
    plain, collecting = latency[PLAIN], latency[COLLECTING]
    once = 1000 * (drawing + finishing) / sum(plain["samples_ms"])
    turns = np.divide(collecting["samples_ms"], plain["samples_ms"]) - 1
    low, middle, high = np.percentile(turns, [25, 50, 75]).tolist()
    return {
        "batch_size": batch_size,
        "latency": latency,
        "once": once,
        "quartiles": [low, middle, high],
        "overhead": middle + once,
        "overhead_of_least": collecting["min_ms"] / plain["min_ms"] - 1 + once,
        "statistics_bytes": statistics_bytes(statistics),
        "bound_bytes": bytes_bound(layers, len(subject.prompts), steps, hessians),
        "peak_growth_bytes": peak_memory_bytes() - before,
    }


def main() -> None:
    arguments = parser(__doc__, prompts=32)
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4], help="images at a time")
    arguments.add_argument("--hessian", type=int, default=0, help="inputs of a block (%(default)s)")
    options = arguments.parse_args()
    subject = load(options.prompts)
    found = []
    for batch_size in options.batches:
        found.append(row := overhead(subject, options.steps, batch_size, options.hessian))
        plain, collecting = row["latency"][PLAIN], row["latency"][COLLECTING]
        low, _, high = row["quartiles"]
        kept, bound, growth = (row[f"{name}_bytes"] / 2**20 for name in ("statistics", "bound", "peak_growth"))
        print(
            f"batch {batch_size}: overhead {row['overhead']:.1%} (quartiles of the turns {low:.1%}..{high:.1%}, of the "
            f"least {row['overhead_of_least']:.1%}), {row['once']:.1%} of it once a pass\n"
            f"  plain {plain['p50_ms']:.0f} ms a turn, collecting {collecting['p50_ms']:.0f} ms, "
            f"least {plain['min_ms']:.0f} and {collecting['min_ms']:.0f} ms, {plain['n']} turns each\n"
            f"  statistics {kept:.2f} MiB, bound {bound:.2f} MiB"
            + (f", peak memory grew by {growth:.2f} MiB" if row is found[0] else ""),  # later passes find it raised
            flush=True,
        )
    bound = full_size_bound(options.prompts, options.steps, options.hessian)
    print(f"bound for the full-size SDXL UNet: {bound / 2**20:.0f} MiB")
    report(options, {"overhead": found, "full_size_bound_bytes": bound})


if __name__ == "__main__":
    main()
