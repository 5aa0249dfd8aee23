"""One pass of a transformer at full size: presets against torch and OpenVINO unquantized, in fp32 and bf16.

    python benchmarks/passes.py --families pixart,sd3
    python benchmarks/passes.py --families pixart --sides torch,compiled,compiled:bf16,torchao_int8,int8:3
    python benchmarks/passes.py --families sana

Weights and statistics are drawn as in ``families.py``, because time does not depend on their values; the error stands
beside each time to show that the sides compute the same function. Each side is a row (``measurer.py``) and is called
once before it is timed. A machine may change its speed between processes: the first side is timed again at the end. A
side is torch, compiled (torch.compile), torchao_int8 (its INT8 linears by torch.compile; it has to be importable) or
unquantized (OpenVINO), or a preset and its quant_level; behind it ``:bf16`` computes in bf16 what is not quantized.
SANA 1.6B, which is no family, is the pipeline of ``any_pipeline_full_size.py``, observed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from families import DENOISERS, checkpoint_of, derived, described
from measurer import Figures, Rows, add_row, markdown, serve

from sd_quant.places import input_path

TORCH, COMPILED, TORCHAO_INT8, UNQUANTIZED, BF16 = "torch", "compiled", "torchao_int8", "unquantized", "bf16"
SIDES = "torch,torch:bf16,unquantized,unquantized:bf16,int8:3,int8:3:bf16,int8_dynamic:3,int8_dynamic:3:bf16,int8:4"
OBSERVED = {"sana": {"width": 256, "height": 256}}  # the tokens that its own decoder makes 1024 x 1024 pixels of


def subject(family: str, options: argparse.Namespace):
    """The checkpoint, and the inputs of a call for one sample, the same in every process."""
    import torch

    if family in OBSERVED:
        from benchmarks.any_pipeline_full_size import opened, write_folder

        given, work = OBSERVED[family], options.work / family
        if not (work / "pipeline").exists():
            write_folder(work / "pipeline", options.layers)
        checkpoint = opened(work).session.checkpoint
    else:
        given = described(family, options.denoisers)
        checkpoint = checkpoint_of(family, given)
    contract = checkpoint.parts()[checkpoint.family.DENOISER].contract

    def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return values.to(dtype).float() if dtype.is_floating_point else torch.ones(shape, dtype=dtype)

    shapes = contract.shapes_for(1, given["width"], given["height"])
    return checkpoint, {name: drawn(shape, contract.dtypes[name]) for name, shape in shapes.items()}


def torch_call(checkpoint, side: str, half: bool):
    """The network with its weights, by torch, as a function of named inputs."""
    import torch

    from sd_quant.models.parts import wrapped

    description, modules = checkpoint.parts()[checkpoint.family.DENOISER], checkpoint.build()
    dtype, stored = torch.bfloat16 if half else torch.float32, checkpoint.components[description.component]
    network = modules[description.component].to(dtype)
    for name in network.state_dict():
        network.load_state_dict({name: stored[name].to(dtype)}, strict=False, assign=True)
    part = wrapped(checkpoint.parts(), modules)[checkpoint.family.DENOISER].requires_grad_(False).eval()
    if side == TORCHAO_INT8:
        part = quantized_by_torchao(part)
    if side != TORCH:
        part = torch.compile(part)

    @torch.no_grad()
    def call(**inputs):
        cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        output = part(**cast)
        return (output if isinstance(output, torch.Tensor) else output[0]).float()

    return call


def quantized_by_torchao(part):
    """The network as torchao quantizes it for torch.compile: its linears, with inputs scaled token by token."""
    import torch._inductor.config
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    torch._inductor.config.freezing = True  # which makes its INT8 products faster on a CPU
    quantize_(part, Int8DynamicActivationInt8WeightConfig())
    return part


def engine_call(checkpoint, side: str, half: bool, work: Path):
    """The network's file by OpenVINO, as a function of named inputs, and the number of layers with int8 kernels."""
    import onnx_ir
    import torch
    from common import recipe_of

    from sd_quant.engines import openvino
    from sd_quant.export.parts import trace_part, write_part
    from sd_quant.models.checkpoint import empty_denoiser

    part, name = checkpoint.family.DENOISER, side.replace(":", "_")
    path, graph = work / name / f"{part}.onnx", work / "graph.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not graph.exists():
            onnx_ir.save(trace_part(checkpoint, part), graph)
        (preset, _, level), network, known = side.partition(":"), empty_denoiser(checkpoint), {}
        if level:  # alpha is given: a search takes minutes
            recipe = recipe_of(preset, f"quant_level={level}", "alpha=0.5")
            known = derived(checkpoint, network, recipe, checkpoint.family.attentions(network))
        write_part(onnx_ir.load(graph), checkpoint, part, path, known)
    engine = openvino.load(path, threads=torch.get_num_threads())
    if half:
        engine.settings["INFERENCE_PRECISION_HINT"] = "bf16"

    def call(**inputs):
        return next(iter(engine(**inputs).values())).float()

    return call, lambda: openvino.int8_layers(engine)


def measured(options: argparse.Namespace, family: str, *names: str) -> Figures:
    import torch
    from common import timed

    from sd_quant.metrics.memory import peak_memory_bytes
    from sd_quant.numbers import relative_error
    from sd_quant.process import reset_peak

    work, side = options.work / family, ":".join(names)
    checkpoint, inputs = subject(family, options)
    plain, half = side.removesuffix(f":{BF16}"), side.endswith(f":{BF16}")
    layers = lambda: None  # noqa: E731
    if plain in (TORCH, COMPILED, TORCHAO_INT8):
        call = torch_call(checkpoint, plain, half)
    else:
        call, layers = engine_call(checkpoint, plain, half, work)
    output = call(**inputs)
    reset_peak()
    samples = [timed(lambda: call(**inputs))[1] for _ in range(options.repeats)]
    expected = work / "torch_output.pt"
    if side == TORCH:
        torch.save(output, expected)
    error = relative_error(torch.load(expected), output) if expected.exists() else None
    return {
        "seconds": median(samples), "samples": samples, "relative_error": error, "int8_layers": layers(),
        "peak_memory_bytes": peak_memory_bytes(), "threads": torch.get_num_threads(),
    }  # fmt: skip


def table(rows: dict[str, dict], sides: list[str]) -> str:
    """A Markdown table: seconds, and the speed-up over torch and over OpenVINO unquantized, in fp32 and in bf16."""
    baselines = [side for side in (TORCH, f"{TORCH}:{BF16}", UNQUANTIZED, f"{UNQUANTIZED}:{BF16}") if side in rows]
    header, lines = ["", "a pass", *(f"over {side}" for side in baselines), "int8 layers", "memory", "error"], []
    for side in sides:
        row = rows[side]
        if "failed" in row:
            lines.append([side, row["failed"], *[""] * (len(header) - 2)])
            continue
        ratios = [
            f"{rows[other]['seconds'] / row['seconds']:.2f}x" if "seconds" in rows[other] else "" for other in baselines
        ]
        error = "" if row["relative_error"] is None else f"{row['relative_error']:.2g}"
        memory = f"{row['peak_memory_bytes'] / 1e9:.1f} GB"
        lines.append([side, f"{row['seconds']:.2f} s", *ratios, str(row["int8_layers"] or ""), memory, error])
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--families", default="pixart,sd3")
    parser.add_argument("--sides", default=SIDES, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="timed calls of each side (%(default)s)")
    parser.add_argument("--work", type=input_path, default="outputs/passes")
    parser.add_argument("--denoisers", type=input_path, default=DENOISERS, help="what the networks are (%(default)s)")
    parser.add_argument("--layers", type=int, default=20, help="blocks of SANA; 20 is the full size")
    add_row(parser)
    options = parser.parse_args()
    if options.row:
        return serve({"pass": measured}, options)
    sides = options.sides.split(",")
    for family in options.families.split(","):
        measurer = Rows(options.work / family)
        rows = {side: measurer.measure(f"pass:{family}:{side}") for side in sides}
        measurer.measure("again", lambda family=family, rows=measurer: rows.process(f"pass:{family}:{sides[0]}"))
        print(f"\n{family}\n\n{table(rows, sides)}", flush=True)


if __name__ == "__main__":
    main()
