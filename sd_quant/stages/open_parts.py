"""Ways to open a part: from its file by a runtime, or from the checkpoint by torch, quantized or not.

Torch computes on the GPU where there is one.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from sd_quant.config import Infer
from sd_quant.devices import best_device
from sd_quant.engines import COMPILED, RUNTIMES, WITHOUT_A_GPU, load_engine
from sd_quant.engines.base import Engine
from sd_quant.engines.replayed import Replayed
from sd_quant.engines.torch import TorchEngine, compiled, dtype_on, placed
from sd_quant.errors import ResourceError
from sd_quant.inference.loading import load_part
from sd_quant.inference.tiles import SHAPES
from sd_quant.models.checkpoint import Checkpoint, contracts_of
from sd_quant.models.parts import network_in
from sd_quant.simulation.modelopt import simulate
from sd_quant.simulation.native import with_native_layers
from sd_quant.stages.export_onnx import Assignment

LOG = logging.getLogger(__name__)


def check_cuda_graph(infer: Infer) -> None:
    """Raise ResourceError if ``infer.cuda_graph`` is true and there is no NVIDIA GPU."""
    if infer.cuda_graph and not torch.cuda.is_available():
        raise ResourceError("infer.cuda_graph=true takes an NVIDIA GPU and this machine has none; leave it false")


def say_choice(infer: Infer) -> None:
    """Log which engine ``infer=auto`` has chosen, and why."""
    if infer.chosen_because is not None:
        LOG.info("infer=auto is %s: %s", infer.engine, infer.chosen_because)


def open_file(path: Path, infer: Infer, **options: object) -> Engine:
    """Load the part in the file at ``path`` by ``infer.engine``; ``options`` go to the engine's ``load``."""
    if infer.precision in RUNTIMES[infer.engine].precisions:
        options["precision"] = infer.precision
    if infer.vae_tile is not None and infer.engine == WITHOUT_A_GPU and path.stem == "vae":
        options["kept"] = SHAPES  # else the engine would compile again for each tile
    return replayed(load_engine(infer.engine, path, **options), infer)


def open_torch(checkpoint: Checkpoint, infer: Infer, part: str, assignment: Assignment | None = None) -> TorchEngine:
    """Open a part in torch, not compiled; with an ``assignment``, layers multiply quantized values (no simulation)."""
    contract, device = contracts_of(checkpoint)[part], best_device()
    module = load_part(checkpoint, part).module
    if assignment is not None:
        with_native_layers(network_in(checkpoint.parts()[part], module), assignment, device)
    return TorchEngine(placed(module, device, dtype_on(device, infer.precision, contract)), contract)


def open_torch_engine(checkpoint: Checkpoint, infer: Infer, part: str, assignment: Assignment | None = None) -> Engine:
    """Open a part in torch as ``infer.engine`` runs it: compiled, or behind a CUDA graph, if the knobs say so."""
    engine = open_torch(checkpoint, infer, part, assignment)
    if RUNTIMES[infer.engine].compiled:
        compiled(engine.module)
    return replayed(engine, infer)


def open_compiled(checkpoint: Checkpoint, infer: Infer, part: str) -> Engine:
    """Open a part compiled by torch.compile, whatever ``infer.engine`` is."""
    return open_torch_engine(checkpoint, replace(infer, engine=COMPILED), part)


def open_simulated(checkpoint: Checkpoint, assignment: Assignment, part: str | None = None) -> TorchEngine:
    """Open a part in torch with ModelOpt's fake quantizers; ``part=None``: the denoiser."""
    part = part or checkpoint.family.DENOISER
    described = checkpoint.parts()[part]
    return open_changed(checkpoint, lambda module: simulate(network_in(described, module), assignment), part)


def open_changed(checkpoint: Checkpoint, change: Callable[[nn.Module], object], part: str | None = None) -> TorchEngine:
    """Open a part in torch with its module changed by ``change``, in fp32 to add no error; default: the denoiser."""
    part = part or checkpoint.family.DENOISER
    change(module := load_part(checkpoint, part).module)
    return TorchEngine(placed(module, best_device(), torch.float32), contracts_of(checkpoint)[part])


def replayed(engine: Engine, infer: Infer) -> Engine:
    """Wrap ``engine`` in a CUDA graph if ``infer.cuda_graph`` is true; else return it unchanged."""
    return Replayed(engine) if infer.cuda_graph else engine


def module_of(engine: Engine) -> nn.Module:
    """Return the module of a torch engine, also if it is wrapped in a CUDA graph."""
    torch_engine = engine.engine if isinstance(engine, Replayed) else engine
    assert isinstance(torch_engine, TorchEngine)
    return torch_engine.module
