"""Plans of the table's network, built on this GPU from the ONNX that quantize.py would export."""

from collections.abc import Mapping
from pathlib import Path

from sd_quant.devices import CPU
from sd_quant.models.parts import axes
from sd_quant.quantization.assignment import LayerAssignment

from .network import Network
from .sides import moved


def write_onnx_of(network: Network, known: Mapping[str, LayerAssignment], path: Path) -> None:
    """The network with its weights and an assignment as ONNX."""
    from diffusers import UNet2DConditionModel

    from sd_quant.export.qdq import write_onnx
    from sd_quant.export.tracing import trace

    graph = trace(lambda: network.part.wrap(UNet2DConditionModel(**network.inner.config)), network.part.contract)
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = network.module.state_dict()
    write_onnx(graph, path, inputs=len(network.part.contract.inputs), prefix="unet.",
               read=lambda name: weights[name].cpu().float(), assignment=known)  # fmt: skip


def built_plan(
    network: Network, known: Mapping[str, LayerAssignment], library: str, batch: int, size: int, folder: Path, **more
) -> Path:
    """A plan for guidance at one batch size, whose kernels are chosen for that; ``more`` goes to the build."""
    from sd_quant.engines.tensorrt.build import build_plan

    write_onnx_of(network, moved(known, CPU), folder / "unet_xl.onnx")
    shapes = network.part.contract.shapes(**axes(2 * batch, size, size))
    profile = {name: (shapes[name],) * 3 for name in network.part.contract.inputs}
    cache = folder.parent if library == "tensorrt" else None
    report = build_plan(folder / "unet_xl.onnx", folder / "unet_xl.plan", library=library, profile=profile,
                        timing_cache=cache, **more)  # fmt: skip
    print(f"plan {folder.name}: {report.seconds:.0f} s, {report.bytes / 1e9:.2f} GB", flush=True)
    return folder / "unet_xl.plan"
