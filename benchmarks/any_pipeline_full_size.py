"""``python -m benchmarks.any_pipeline_full_size``: SANA 1.6B, a model that no file here knows, at its full size.

Weights are random and stored in bf16; text encoder and decoder are the tiny ones of ``tests.zoo``. Each
step is a row (``measurer.py``): observing (without weights in memory), calibration (in fp32, by torch), and the ONNX
file in INT8.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from benchmarks.measurer import Figures, Rows, add_row, serve
from sd_quant.checkpoints.synthetic import random_parameter
from sd_quant.files.safetensors import write_safetensors
from sd_quant.files.tensors import LazyTensor
from sd_quant.places import input_path
from tests.zoo import build

PIPELINE, SIDE, PROMPT, STEPS = "SanaPipeline", 64, ["a red bicycle"], 2
FULL = {"num_layers": 20, "num_attention_heads": 70, "attention_head_dim": 32, "num_cross_attention_heads": 20,
        "cross_attention_head_dim": 112, "cross_attention_dim": 2240}  # fmt: skip  # SANA 1.6B, beside tiny inputs


def write_folder(folder: Path, layers: int) -> dict:
    """The pipeline's folder with a full-size denoiser; its weights are drawn one at a time."""
    from diffusers import SanaTransformer2DModel

    pipeline = build(PIPELINE)
    pipeline.save_pretrained(folder)
    known = set(SanaTransformer2DModel.__init__.__wrapped__.__code__.co_varnames)
    config = {key: value for key, value in pipeline.transformer.config.items() if key in known} | FULL
    with torch.device("meta"):
        network = SanaTransformer2DModel(**config | {"num_layers": layers})
    network.save_config(folder / "transformer")
    tensors = {}
    for name, parameter in network.named_parameters():
        kind = type(network.get_submodule(name.rpartition(".")[0])).__name__
        draw = partial(random_parameter, name, tuple(parameter.shape), kind, 0)
        tensors[name] = LazyTensor(tuple(parameter.shape), torch.bfloat16, lambda draw=draw: draw().bfloat16())
    for old in (folder / "transformer").glob("*.safetensors*"):
        old.unlink()
    write_safetensors(folder / "transformer/diffusion_pytorch_model.safetensors", tensors)
    return {"parameters": sum(parameter.numel() for parameter in network.parameters())}


def opened(work: Path):
    import sd_quant

    arguments = {"max_sequence_length": 32, "use_resolution_binning": False}
    return sd_quant.open(
        "diffusers", work / "pipeline", width=SIDE, height=SIDE, arguments=arguments, cache=work / "cache"
    )


def step(options: argparse.Namespace, name: str) -> Figures:
    if name == "write":
        return write_folder(options.work / "pipeline", options.layers)
    model = opened(options.work)
    if name == "observe":
        rung = model.session.checkpoint.observation.parts[model.session.denoiser].rung
        return {"rung": rung.name, "verified": {runtime: str(each) for runtime, each in rung.verified.items()}}
    statistics = model.calibrate(PROMPT, n_steps=STEPS)
    if name == "calibrate":
        return {"layers": len(statistics.layers)}
    quantized = model.quantize(statistics, "int8", quant_level=3)
    file = quantized.export(options.work / "int8")[model.session.denoiser]
    return {"bytes": sum(each.stat().st_size for each in file.parent.iterdir()), "layers": repr(quantized)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=input_path, default="outputs/any_pipeline_full_size")
    parser.add_argument("--layers", type=int, default=FULL["num_layers"], help="blocks; 20 is the full size")
    add_row(parser)
    options = parser.parse_args()
    if options.row:
        return serve({"step": step}, options)
    rows = Rows(options.work)
    for name in ("write", "observe", "calibrate", "export"):
        rows.measure(f"step:{name}")


if __name__ == "__main__":
    main()
