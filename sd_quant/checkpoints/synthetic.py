"""A full-size SDXL checkpoint with random weights, for tests and benchmarks where the real one cannot be had.

    python -m sd_quant.checkpoints.synthetic full.nemo --dtype float16

Sizes, speed and memory are those of the real model; its images are noise. Weights are about as hard to quantize as
trained ones: a normal distribution times a log-normal factor per row and per column, so that channels have very
different ranges. Layers that end a residual branch are smaller, so that activations stay within fp16. Each tensor is
drawn when it is written, from its own seed, made from the checkpoint's seed and its key; one is in memory at a time.
Alternative not taken: saving freshly initialized networks, whose channels all look alike, and which needs 14 GB.
"""

import argparse
import math
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_quant.checkpoints.nemo import write_archive
from sd_quant.checkpoints.nemo_networks import sdxl_base_config, state_of
from sd_quant.errors import exit_with_its_code
from sd_quant.files import check_room
from sd_quant.files.tensors import LazyTensor, size_of
from sd_quant.models.sdxl_nemo import TextShape, build_modules
from sd_quant.progress import progress

CLIP_L = TextShape(vocab_size=49408, width=768, layers=12, context=77, mlp_width=3072)
OPEN_CLIP_BIGG = TextShape(vocab_size=49408, width=1280, layers=32, context=77, mlp_width=5120, projection=1280)

SPREAD = 0.3  # of the log-normal factors
BRANCH_ENDS = ("to_out.0", "ff.net.2", "proj_out", "conv2", "out_proj", "fc2", "conv_out")
BRANCH_GAIN = 0.3  # of a layer that ends a residual branch


def random_parameter(name: str, shape: tuple[int, ...], kind: str, seed: int) -> Tensor:
    """Return an fp32 tensor drawn as the module docstring says. ``kind`` is the class of the module that owns it."""
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator)
    if "Norm" in kind:
        return 0.1 * drawn + (1 if name.endswith("weight") else 0)
    if len(shape) < 2 or kind == "Embedding":
        return 0.02 * drawn
    gain = BRANCH_GAIN if name.rpartition(".")[0].endswith(BRANCH_ENDS) else 1.0
    drawn *= gain / math.sqrt(drawn[0].numel())
    for axis in (0, 1):
        factor = torch.randn(shape[axis], generator=generator).mul(SPREAD).exp()
        drawn *= factor.view([-1 if index == axis else 1 for index in range(len(shape))])
    return drawn


def random_component(component: str, module: nn.Module, dtype: torch.dtype, seed: int) -> dict[str, LazyTensor]:
    """Return the parameters of a module by name, each drawn at random when it is read."""
    tensors = {}
    for name, parameter in module.named_parameters():
        kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
        draw = partial(random_parameter, f"{component}.{name}", tuple(parameter.shape), kind, seed)
        tensors[name] = LazyTensor(tuple(parameter.shape), dtype, lambda draw=draw: draw().to(dtype))
    return tensors


def write_synthetic(
    path: Path,
    dtype: torch.dtype,
    seed: int = 0,
    model_config: Mapping | None = None,
    clip1: TextShape = CLIP_L,
    clip2: TextShape = OPEN_CLIP_BIGG,
) -> None:
    """Write a ``.nemo`` archive of random weights, by default of SDXL's size. Raises ResourceError on a full disk."""
    config = dict(model_config or sdxl_base_config())
    with torch.device("meta"):
        modules = build_modules(config, clip1, clip2)
    state = state_of(
        {component: random_component(component, module, dtype, seed) for component, module in modules.items()}, config
    )
    check_room(path, size_of(state.values()))
    with progress(len(state), f"write {path.name}") as advance:
        write_archive(path, config, state, advance)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a full-size SDXL .nemo with random weights.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_synthetic(given.path, getattr(torch, given.dtype), given.seed)
    print(f"{given.path}: {given.path.stat().st_size / 1e9:.2f} GB, random {given.dtype} weights of seed {given.seed}")


if __name__ == "__main__":
    exit_with_its_code(main)
