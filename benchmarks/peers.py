"""Compares the fidelity of other quantizers on the same denoisers, with everything else held equal.

All peers get the same checkpoint, recorded inputs of the denoiser to calibrate on, evaluation prompts, seeds and
layers: weights and inputs of every Linear and Conv2d that the family does not exclude (``quant_level`` 3), and no
attention product. Each peer excludes the others by its own means, and the layers that it quantized are read back from
its result. The rest of the pipeline is full precision in torch. The quantized denoiser runs on the runtime that
executes the peer's result: torch's simulated quantization, ONNX Runtime or OpenVINO.

    python benchmarks/peers.py
    python benchmarks/peers.py --checkpoints sdxl_mini sd3_mini glyphs textures faces   # of the bench, see bench.py

The road not taken is each peer's own choice of layers, and of outputs beside inputs, which would compare lists of
layers and not arithmetic. A peer that is not installed has a row that says so: ``pip install '.[peers]'``.
"""

import argparse
import copy
import dataclasses
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean

import numpy as np
import onnx
import torch
from bench import FOLDER, opened
from common import GUIDANCE, SEED, FullPrecision, Subject, paired, timed
from measurer import markdown
from quality import DEFAULT, PLAIN
from torch import Tensor, nn

from sd_quant.devices import threads
from sd_quant.engines import load_engine
from sd_quant.engines.base import Engine
from sd_quant.engines.torch import TorchEngine
from sd_quant.export.parts import trace_part, write_part
from sd_quant.export.tracing import trace
from sd_quant.files import write_json, write_text
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.parts import Part
from sd_quant.places import HOME
from sd_quant.quantization.recipe import Recipe

CALIBRATION_STEPS = 20
PRODUCTS = ["Conv", "MatMul", "Gemm"]

Call = dict[str, Tensor]  # the inputs of one call of the denoiser, such as x, timesteps, context, y


@dataclass(frozen=True)
class Context:
    """The inputs of every peer. ``calls`` are fp32, in the pipeline's order: prompt by prompt, step by step."""

    subject: Subject
    calls: list[Call]
    folder: Path

    @property
    def layers(self) -> set[str]:
        return set(self.subject.names)

    @property
    def part(self) -> Part:
        return self.subject.model.checkpoint.parts()[self.subject.denoiser]

    @property
    def excluded(self) -> list[str]:
        """The other layers, as they are called in the denoiser's part."""
        return [self.part.prefix + name for name in self.subject.roles if name not in self.layers]

    def network(self) -> nn.Module:
        """A denoiser of the peer's own to change."""
        return copy.deepcopy(self.subject.model.parts[self.subject.denoiser])

    def torch_engine(self, network: nn.Module) -> TorchEngine:
        return TorchEngine(network, self.subject.model.contracts[self.subject.denoiser])


@dataclass(frozen=True)
class Quantized:
    """``layers`` have weight and input quantized, as read from what was made; ``seconds`` are the quantizer's alone."""

    engine: Engine
    layers: set[str]
    seconds: float


def arrays(call: Call) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in call.items()}


# ------------------------------------------------------------------------------------------------------------- peers


def ours(context: Context) -> Quantized:
    """The defaults of ``quantize=int8``: an alpha per layer, ranges by role, shifted inputs of convolutions."""
    return derived(context, DEFAULT)


def ours_plain(context: Context) -> Quantized:
    """Plain INT8: alpha 0.8, the mean over the steps of the largest numbers for convolutions, symmetric inputs."""
    return derived(context, PLAIN)


def derived(context: Context, recipe: Recipe) -> Quantized:
    """Calibrate and derive as the main job does; its pass makes the recorded calls again."""
    subject = context.subject
    assignment, seconds = timed(lambda: subject.assignment(subject.statistics(CALIBRATION_STEPS, cached=False), recipe))
    path, checkpoint = context.folder / "ours.onnx", subject.model.checkpoint
    write_part(trace_part(checkpoint, subject.denoiser), checkpoint, subject.denoiser, path, assignment)
    return Quantized(load_engine("openvino", path), quantized_onnx_layers(path, context.part.prefix), seconds)


def unquantized(context: Context) -> Quantized:
    """The same file that the ONNX peers start from, on OpenVINO: what another runtime alone costs."""
    return Quantized(load_engine("openvino", full_precision_onnx(context)), set(), 0.0)


def modelopt_max(context: Context) -> Quantized:
    """NVIDIA ModelOpt, its INT8 preset: per-channel weights, per-tensor inputs, the largest value seen."""
    return modelopt(context, "INT8_DEFAULT_CFG", "max")


def modelopt_smoothquant(context: Context) -> Quantized:
    """NVIDIA ModelOpt, its SmoothQuant preset with the alpha of its diffusion examples; convolutions as above."""
    return modelopt(context, "INT8_SMOOTHQUANT_CFG", {"method": "smoothquant", "alpha": 0.8})


def modelopt(context: Context, preset: str, algorithm: str | dict) -> Quantized:
    """The preset without the family's excluded layers, and with ``proj_out``.

    Presets leave that one alone, because output heads of language models have the name; here it is the last
    linear of every transformer.
    """
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(getattr(mtq, preset))
    numerics = {rule["quantizer_name"]: rule["cfg"] for rule in config["quant_cfg"] if rule.get("cfg")}
    config["quant_cfg"] += [
        {"quantizer_name": f"*proj_out.{kind}", "cfg": numerics[f"*{kind}"]}
        for kind in ("weight_quantizer", "input_quantizer")
    ]
    config["quant_cfg"] += [{"quantizer_name": f"{name}.*", "enable": False} for name in context.excluded]
    config["algorithm"] = algorithm

    @torch.no_grad()
    def replay(network: nn.Module) -> None:
        for call in context.calls:
            network(**call)

    network, seconds = timed(lambda: mtq.quantize(context.network(), config, replay))
    layers = torch_layers(network, "weight_quantizer", "input_quantizer", lambda quantizer: bool(quantizer.is_enabled))
    return Quantized(context.torch_engine(network), named(layers, context), seconds)


def quark_w8a8(context: Context) -> Quantized:
    """AMD Quark as its diffusers example does w8a8: static, one scale per tensor for weights too, min and max."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig

    rule = {"observer_method": "min_max", "symmetric": True, "scale_type": "float", "round_method": "half_even"}
    spec = Int8PerTensorSpec(**rule, is_dynamic=False).to_quantization_spec()
    config = QConfig(global_quant_config=QLayerConfig(weight=spec, input_tensors=spec), exclude=context.excluded)
    network, seconds = timed(lambda: ModelQuantizer(config).quantize_model(context.network(), context.calls))
    layers = torch_layers(network, "_weight_quantizer", "_input_quantizer", lambda quantizer: quantizer is not None)
    return Quantized(context.torch_engine(ModelQuantizer.freeze(network)), named(layers, context), seconds)


def onnxruntime_percentile(context: Context) -> Quantized:
    """ONNX Runtime's quantize_static: percentile calibration, Q/DQ, symmetric, a scale per output channel.

    By default it would quantize the output of every convolution as well.
    """
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    source, target = full_precision_onnx(context), context.folder / "onnxruntime.onnx"
    nodes = {layer: node.name for layer, node in onnx_layers(source, context).items() if layer in context.layers}
    extra = {
        "ActivationSymmetric": True,
        "OpTypesToExcludeOutputQuantization": PRODUCTS,
        "CalibStridedMinMax": CALIBRATION_STEPS,
    }  # one prompt at a time: it holds every tensor of a stride
    _, seconds = timed(lambda: quantize_static(
        source, target, Replay(context.calls), quant_format=QuantFormat.QDQ, op_types_to_quantize=PRODUCTS,
        nodes_to_quantize=list(nodes.values()), per_channel=True, activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8, calibrate_method=CalibrationMethod.Percentile, extra_options=extra,
    ))  # fmt: skip
    return Quantized(load_engine("onnxruntime", target), quantized_onnx_layers(target, context.part.prefix), seconds)


def nncf_default(context: Context) -> Quantized:
    """NNCF for transformers on the OpenVINO model: asymmetric inputs, SmoothQuant alpha 0.95, biases corrected."""
    return nncf_quantize(context, smoothquant_alpha=0.95)


def nncf_without_smoothquant(context: Context) -> Quantized:
    """NNCF as above without SmoothQuant."""
    return nncf_quantize(context, smoothquant_alpha=-1)


def nncf_symmetric(context: Context) -> Quantized:
    """NNCF without SmoothQuant and with symmetric inputs, which is what TensorRT takes."""
    import nncf

    return nncf_quantize(context, smoothquant_alpha=-1, preset=nncf.QuantizationPreset.PERFORMANCE)


def nncf_quantize(context: Context, smoothquant_alpha: float, preset=None) -> Quantized:
    """Without the model type it would quantize additions too, and with it still the input of an upsampling."""
    import nncf
    from nncf.quantization.advanced_parameters import AdvancedSmoothQuantParameters

    from sd_quant.engines import openvino as engines

    model = engines.core().read_model(full_precision_onnx(context))
    layers = {}  # a layer's multiplication to the layer
    others = []
    for node in model.get_ops():
        if node.get_type_name() in ("Convolution", "MatMul", "Interpolate"):
            name = node.input(1).get_source_output().get_node().friendly_name
            layer = name.removeprefix(context.part.prefix).removesuffix(".weight")
            if layer in context.layers:
                layers[node.friendly_name] = layer
            else:
                others.append(node.friendly_name)
    alphas = AdvancedSmoothQuantParameters(matmul=smoothquant_alpha)
    quantized, seconds = timed(lambda: nncf.quantize(
        model, nncf.Dataset(context.calls, arrays), subset_size=len(context.calls), preset=preset,
        model_type=nncf.ModelType.TRANSFORMER, ignored_scope=nncf.IgnoredScope(names=others),
        advanced_parameters=nncf.AdvancedQuantizationParameters(smooth_quant_alphas=alphas),
    ))  # fmt: skip
    found = {layers.get(node.friendly_name, node.friendly_name) for node in quantized.get_ops() if is_int8(node)}
    settings = engines.FP32 | {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads()}
    if engines.saturates():  # NNCF avoids that with weights of seven bits, where it is told to
        settings |= engines.DEQUANTIZED
    return Quantized(engines.OpenVinoEngine(quantized, full_precision_onnx(context), settings), found, seconds)


# Name of the row to the package whose version it has, and the function that quantizes.
PEERS: dict[str, tuple[str, Callable[[Context], Quantized]]] = {
    "unquantized": ("openvino", unquantized),
    "ours": ("sd-quant", ours),
    "ours_plain": ("sd-quant", ours_plain),
    "modelopt_max": ("nvidia-modelopt", modelopt_max),
    "modelopt_smoothquant": ("nvidia-modelopt", modelopt_smoothquant),
    "quark_w8a8": ("amd-quark", quark_w8a8),
    "onnxruntime_percentile": ("onnxruntime", onnxruntime_percentile),
    "nncf_default": ("nncf", nncf_default),
    "nncf_without_smoothquant": ("nncf", nncf_without_smoothquant),
    "nncf_symmetric": ("nncf", nncf_symmetric),
}


# -------------------------------------------------------------------------- what a peer starts from and what it made


class Replay:
    """Recorded calls as ONNX Runtime's ``CalibrationDataReader``."""

    def __init__(self, calls: list[Call]):
        self.calls = calls
        self.set_range(0, len(calls))

    def __len__(self) -> int:
        return len(self.calls)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.rest = iter(self.calls[start_index:end_index])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(map(arrays, self.rest), None)


def full_precision_onnx(context: Context) -> Path:
    """The denoiser in fp32, which is what quantizers of ONNX are made for, with every layer's weight as a constant.

    A linear's transposition is done here and its weight keeps its name: behind a Transpose, ONNX Runtime takes a weight
    for an activation.
    """
    path = context.folder / "full_precision.onnx"
    if path.exists():
        return path
    checkpoint, part = context.subject.model.checkpoint, context.part
    single = dict.fromkeys(part.contract.dtypes, torch.float32)
    contract = dataclasses.replace(part.contract, weights=torch.float32, dtypes=single)
    graph = trace(lambda: part.wrap(checkpoint.build()[part.component]), contract)
    write_part(graph, checkpoint, context.subject.denoiser, path, {})
    model = onnx.load(path)
    weights = {stored.name: stored for stored in model.graph.initializer}
    transposed = {node.output[0]: node for node in model.graph.node if node.op_type == "Transpose"}
    for node in list(model.graph.node):
        source = transposed.get(node.input[1]) if node.op_type == "MatMul" else None
        if source and source.input[0] in weights:
            weight = weights[source.input[0]]
            weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight).T.copy(), weight.name))
            node.input[1] = weight.name
            model.graph.node.remove(source)
    del model.graph.value_info[:]  # it has the shapes from before
    onnx.save(model, path)
    return path


def onnx_layers(path: Path, context: Context) -> dict[str, onnx.NodeProto]:
    """Layer to the node that multiplies with its weight."""
    suffix = ".weight"
    return {
        node.input[1].removeprefix(context.part.prefix).removesuffix(suffix): node
        for node in onnx.load(path).graph.node
        if node.op_type in PRODUCTS and node.input[1].endswith(suffix)
    }


def quantized_onnx_layers(path: Path, prefix: str) -> set[str]:
    """The layers, and other products by name, whose weight and input both come from a DequantizeLinear."""
    nodes = onnx.load(path).graph.node
    source = {node.output[0]: node.input[0] for node in nodes if node.op_type == "DequantizeLinear"}
    return {
        source[node.input[1]].removeprefix(prefix).partition(".weight")[0]
        for node in nodes
        if node.op_type in PRODUCTS and all(name in source for name in node.input[:2])
    }


def named(modules: set[str], context: Context) -> set[str]:
    """The layers of these names in the denoiser's part."""
    return {name.removeprefix(context.part.prefix) for name in modules}


def torch_layers(network: nn.Module, weight: str, value: str, active: Callable[[nn.Module], bool]) -> set[str]:
    """Modules whose quantizers of these names are both active."""
    return {
        name
        for name, layer in network.named_modules()
        if hasattr(layer, weight) and active(getattr(layer, weight)) and active(getattr(layer, value))
    }


def is_int8(node) -> bool:
    """Whether an OpenVINO node is a product of a FakeQuantize and a weight that is stored in 8-bit integers."""
    if node.get_type_name() not in ("Convolution", "MatMul"):
        return False
    value = behind(node.input(0), "Reshape", "Transpose")
    weight = behind(node.input(1), "Multiply", "Subtract", "Convert", "Reshape", "Transpose")
    return value.get_type_name() == "FakeQuantize" and weight.get_element_type().get_type_name() in ("i8", "u8")


def behind(port, *kinds: str):
    """The source of an OpenVINO input behind operations of these kinds."""
    node = port.get_source_output().get_node()
    return behind(node.input(0), *kinds) if node.get_type_name() in kinds else node


# ----------------------------------------------------------------------------------------------------------- the run


def record_calls(subject: Subject) -> list[Call]:
    """The denoiser's inputs in full precision on the calibration prompts, with both halves of guidance."""
    seen: list[Call] = []
    hook = subject.model.parts[subject.denoiser].register_forward_pre_hook(
        lambda network, args, inputs: seen.append(dict(inputs)), with_kwargs=True
    )
    engines = {name: engine for name, engine in subject.model.torch_engines().items() if name != "vae"}
    sampling = Sampling(CALIBRATION_STEPS, GUIDANCE, subject.size, subject.size, batch_size=1, seed=SEED)
    pipeline_of(subject.model.checkpoint, engines)(subject.prompts, sampling, decode=())
    hook.remove()
    # copies made here are ordinary tensors; those of inference mode cannot be changed in place outside it
    return [{name: tensor.clone() for name, tensor in call.items()} for call in seen]


def row(name: str, context: Context, reference: FullPrecision) -> dict:
    package, quantize = PEERS[name]
    found: dict = {"peer": name, "package": package, "method": (quantize.__doc__ or "").splitlines()[0]}
    try:
        found["version"] = version(package)
        quantized = quantize(context)
    except (PackageNotFoundError, ImportError) as error:
        return found | {"reason": f"not installed: {error}"}
    return found | {
        "runtime": quantized.engine.name,
        "layers": len(quantized.layers),
        "layers_missing": sorted(context.layers - quantized.layers),
        "layers_beyond": sorted(quantized.layers - context.layers),
        "calibration_seconds": quantized.seconds,
        "fidelity": reference.fidelity_of(quantized.engine),
    }


def gains(by_checkpoint: dict[str, list[dict]]) -> str:
    """Markdown: by checkpoint our mean PSNR, and what we have over each peer on the same images."""
    peers = [found["peer"] for found in next(iter(by_checkpoint.values())) if found["peer"] != "ours"]

    def cell(values: dict[str, list[float]], peer: str) -> str:
        images = values["ours"], values.get(peer, [None])
        return "–" if any(None in each for each in images) else paired(*images)

    lines = []
    for name, rows in by_checkpoint.items():
        values = {found["peer"]: found["fidelity"]["psnr"]["values"] for found in rows if "reason" not in found}
        if "ours" in values:
            lines.append([name, f"{fmean(values['ours']):.2f}", *(cell(values, peer) for peer in peers)])
    return markdown(("checkpoint", "ours, dB", *(f"over {peer}" for peer in peers)), lines)


def table(rows: list[dict]) -> str:
    """Markdown; a row without figures has its reason in their place. The last column compares the same images."""
    header = ("peer", "version", "runs on", "layers", "calibration", "PSNR mean", "worst", "SSIM mean", "LPIPS mean",
              "latent SQNR, last step", "ours over it, dB")  # fmt: skip
    ours = next((found["fidelity"]["psnr"]["values"] for found in rows if found["peer"] == "ours"), None)

    def cells(found: dict) -> list[str]:
        if "reason" in found:
            return [found["peer"], found["reason"], *["–"] * (len(header) - 2)]
        close = found["fidelity"]
        lpips, psnr = close["lpips"].get("mean", close["lpips"].get("value")), close["psnr"]
        decibels, scores = (psnr["mean"], psnr["min"]), (close["ssim"]["mean"], lpips)
        shown = [f"{value:.2f} dB" for value in decibels]
        shown += ["–" if value is None else f"{value:.4f}" for value in scores]
        sqnr = close["latent_sqnr_db"][-1]
        shown.append("–" if sqnr is None else f"{sqnr:.2f} dB")
        seconds = f"{found['calibration_seconds']:.1f} s"
        theirs = psnr["values"]  # None where an image is the same
        over = ours and found["peer"] != "ours" and len(ours) > 1 and None not in (*ours, *theirs)
        compared = paired(ours, theirs) if over else "–"
        return [found["peer"], found["version"], found["runtime"], str(found["layers"]), seconds, *shown, compared]

    return markdown(header, [cells(found) for found in rows])


def compared(subject: Subject, prompts: list[str], options: argparse.Namespace, folder: Path) -> tuple[list[dict], str]:
    """The rows of one checkpoint, and their table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "full_precision.onnx").unlink(missing_ok=True)
    calls, seconds = timed(lambda: record_calls(subject))
    context, reference = Context(subject, calls, folder), FullPrecision(subject, prompts, options.steps, options.batch)
    rows = []
    with (folder / "peers.log").open("w", encoding="utf-8") as log:
        for name in options.peers:
            with redirect_stdout(log), redirect_stderr(log):  # most peers print a lot
                rows.append(row(name, context, reference))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    note = (
        f"{len(prompts)} images; {options.steps} steps, guidance {GUIDANCE}. {len(calls)} recorded calls "
        f"({len(subject.prompts)} prompts, {CALIBRATION_STEPS} steps; {seconds:.1f} s) to every peer; "
        f"{len(context.layers)} layers to quantize."
    )
    return rows, f"{table(rows)}\n{note}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--checkpoints", nargs="+", default=["sdxl_mini"], help="of the bench", metavar="NAME")
    parser.add_argument("--prompts", type=int, default=64, help="images to compare")
    parser.add_argument("--calibration-prompts", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20, help="denoising steps of the images")
    parser.add_argument("--batch", type=int, default=4, help="images at a time")
    parser.add_argument("--bench", type=Path, default=FOLDER, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=HOME / "outputs/benchmarks/peers")
    options = parser.parse_args()
    os.environ.setdefault("NNCF_CI", "1")  # NNCF then tells nobody that it was used
    found, texts = dict[str, list[dict]](), list[str]()
    for name in options.checkpoints:
        subject, _, prompts = opened(name, options.bench)
        subject = dataclasses.replace(subject, prompts=subject.prompts[: options.calibration_prompts])
        print(name, flush=True)
        found[name], text = compared(subject, prompts[: options.prompts], options, options.out / name)
        texts.append(f"## {name}\n\n{text}")
        summary = "\n".join(texts if len(found) == 1 else [gains(found), *texts])
        write_text(options.out / "peers.md", summary)
        write_json(options.out / "peers.json", {"checkpoints": found})
    print(f"\n{summary}\n{options.out}")


if __name__ == "__main__":
    main()
