"""Which engine computes each part of the three versions that are compared, and how it is opened.

A pool opens a part by its key: the framework's by its name, an engine's by the file that it is loaded from, what torch
computes itself by ``Native``, and the simulation by ``SIMULATED``.
"""

from dataclasses import dataclass
from pathlib import Path

from sd_quant.config import NATIVE_ENGINES, artifact
from sd_quant.engines import load_engine
from sd_quant.engines.base import Engine
from sd_quant.engines.native import on_device, with_native_layers
from sd_quant.engines.pool import Pool, Side
from sd_quant.engines.torch import TorchEngine
from sd_quant.models.loading import Checkpoint, contracts_of, denoiser_of, load_part
from sd_quant.quantization.simulate import simulate
from sd_quant.stages.compare import FRAMEWORK, FULL_PRECISION, QUANTIZED
from sd_quant.stages.export_onnx import Assignment

SIMULATED = "simulated"  # the key of the denoiser that torch computes as if it were quantized


@dataclass(frozen=True)
class Native:
    """The key of a part that torch computes on the GPU, where there is one."""

    part: str
    quantized: bool


def sides_of(checkpoint: Checkpoint, pool: Pool, engine: str, directory: Path, simulated: bool) -> dict[str, Side]:
    """The keys of every part of each version; only the denoiser differs between unquantized and quantized."""
    parts, denoiser = list(checkpoint.parts()), checkpoint.family.DENOISER
    framework = Side(pool, {part: part for part in parts})
    if engine in NATIVE_ENGINES:
        full_precision = {part: Native(part, quantized=False) for part in parts}
        quantized = full_precision | {denoiser: Native(denoiser, quantized=True)}
        return {FRAMEWORK: framework, FULL_PRECISION: Side(pool, full_precision), QUANTIZED: Side(pool, quantized)}
    kind = "plan" if engine.startswith("tensorrt") else "onnx"
    files = {part: artifact(directory, kind, part) for part in parts}
    unquantized = {denoiser: artifact(directory / "full_precision", kind, denoiser)}
    return {
        FRAMEWORK: framework,
        FULL_PRECISION: Side(pool, files | unquantized),
        QUANTIZED: Side(pool, files | ({denoiser: SIMULATED} if simulated else {})),
    }


def open_engine(checkpoint: Checkpoint, engine: str, assignment: Assignment, key: str | Path | Native) -> Engine:
    """``assignment`` is what a quantized part of torch's is made from."""
    if isinstance(key, Path):
        return load_engine(engine, key)
    if isinstance(key, Native):
        return open_native(checkpoint, engine, assignment, key)
    return simulated_denoiser(checkpoint, assignment) if key == SIMULATED else load_part(checkpoint, key)


def simulated_denoiser(checkpoint: Checkpoint, assignment: Assignment) -> Engine:
    part = load_part(checkpoint, checkpoint.family.DENOISER)
    simulate(denoiser_of(checkpoint, part.module), assignment)
    return part


def open_native(checkpoint: Checkpoint, engine: str, assignment: Assignment, key: Native) -> Engine:
    contract = contracts_of(checkpoint)[key.part]
    module = load_part(checkpoint, key.part).module
    if key.quantized:
        with_native_layers(denoiser_of(checkpoint, module), assignment)
    on_device(module, contract.weights)
    if engine == "torch_compiled":
        module.compile()
    return TorchEngine(module, contract)
