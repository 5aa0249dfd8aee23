"""``python -m benchmarks.full_size_parts``: text encoders of SD3 and Flux at full size to ONNX in INT8, one at a time.

T5-XXL, which both have, and SD3's OpenCLIP bigG, with random weights in fp16 that are drawn one at a time; what stands
around them is tiny. Each row (``measurer.py``) opens the pipeline, checks that all weights are finite, derives the
layers' scales and writes the file, as ``quantize.py`` does. Its peak (VmHWM) is that of the process with its libraries;
weights are read and not mapped. ``--call`` opens the INT8 files in OpenVINO too and calls them once, and
compares with torch's output where memory holds that.
"""

import argparse
import shutil
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import job_with, timed
from benchmarks.measurer import Figures, Rows, add_row, serve
from sd_quant.checkpoints.synthetic import random_parameter
from sd_quant.export.parts import trace_part, write_part
from sd_quant.files.safetensors import write_safetensors
from sd_quant.files.tensors import LazyTensor
from sd_quant.places import input_path
from sd_quant.process import available_memory_bytes, peak_memory_bytes, reset_peak
from sd_quant.stages.assign import assign_parts
from sd_quant.stages.load import Loaded, with_recipe
from sd_quant.stages.resources import TORCH_BYTES
from sd_quant.stages.session import open_session
from tests.zoo import write

INT8, UNQUANTIZED = "int8_weight_only", "unquantized"
PIPELINES = {"sd3": "StableDiffusion3Pipeline", "flux": "FluxPipeline"}
T5_XXL = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "vocab_size": 32128,
          "feed_forward_proj": "gated-gelu"}  # fmt: skip
BIGG = {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20, "projection_dim": 1280,
        "vocab_size": 49408, "hidden_act": "gelu"}  # fmt: skip
T5_QUERY = T5_XXL["d_kv"] ** -0.5  # of its first queries, as its attention divides by nothing
LAYERS = {"t5_xxl": 24, "bigg": 32}
PLACES = {"sd3": {"text_encoder_3": "t5_xxl", "text_encoder_2": "bigg"}, "flux": {"text_encoder_2": "t5_xxl"}}
ROWS = [  # model, part, preset
    ("sd3", "text_encoder_3", UNQUANTIZED),
    ("sd3", "text_encoder_3", INT8),
    ("flux", "text_encoder_2", INT8),
    ("sd3", "text_encoder_2", UNQUANTIZED),
    ("sd3", "text_encoder_2", INT8),
]


def network_of(name: str, layers: int) -> torch.nn.Module:
    """A text encoder without weights."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    with torch.device("meta"):
        if name == "bigg":
            return CLIPTextModelWithProjection(CLIPTextConfig(num_hidden_layers=layers, **BIGG))
        return T5EncoderModel(T5Config(num_layers=layers, **T5_XXL))


def write_encoder(folder: Path, name: str, layers: int) -> int:
    """Write a text encoder as ``save_pretrained`` does; returns the number of its parameters."""
    network = network_of(name, layers)
    tensors = {}
    for key, parameter in network.named_parameters():
        kind = type(network.get_submodule(key.rpartition(".")[0])).__name__
        draw = partial(random_parameter, key, tuple(parameter.shape), kind, 0)
        gain = T5_QUERY if key.endswith(".q.weight") else 1.0
        tensors[key] = LazyTensor(
            tuple(parameter.shape), torch.float16, lambda draw=draw, gain=gain: draw().mul_(gain).half()
        )
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    write_safetensors(folder / "model.safetensors", tensors)
    return sum(parameter.numel() for parameter in network.parameters())


def write_pipelines(options: argparse.Namespace) -> Figures:
    """Write the folders of both pipelines, which share T5's file."""
    work = options.work
    counts = {name: write_encoder(work / name, name, options.layers or LAYERS[name]) for name in LAYERS}
    for model, places in PLACES.items():
        write(PIPELINES[model], work / model)
        for part, name in places.items():
            shutil.rmtree(work / model / part)
            shutil.copytree(work / name, work / model / part, copy_function=lambda a, b: Path(b).hardlink_to(a))
    return {"parameters": counts}


def opened(work: Path, model: str, part: str, preset: str) -> Loaded:
    job = job_with("int8", f"model={model}", f"model.path={work / model}", f"quantize.parts={{{part}: {preset}}}")
    return with_recipe(open_session(job.model), job.model, job.infer, job.quantize)


def export(options: argparse.Namespace, model: str, part: str, preset: str) -> Figures:
    """Write one file, and return its figures."""
    work, loaded = options.work, opened(options.work, model, part, INT8)
    read = time.perf_counter()
    assignment = {} if preset == UNQUANTIZED else assign_parts(loaded, {})[part]
    derived = time.perf_counter()
    graph, traced = trace_part(loaded.checkpoint, part), time.perf_counter()
    folder = work / f"{model}_{part}_{preset}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_part(graph, loaded.checkpoint, part, folder / f"{part}.onnx", assignment)
    return {
        "parameters": loaded.parameters[part],
        "layers": sum(layer.format is not None for layer in assignment.values()),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "recipe_seconds": derived - read,
        "trace_seconds": traced - derived,
        "write_seconds": time.perf_counter() - traced,
    }


def call(options: argparse.Namespace, model: str, part: str, preset: str) -> Figures:
    """Call the exported file once in OpenVINO; where memory holds torch's fp32 too, compare with it."""
    from sd_quant.engines import openvino
    from sd_quant.inference.loading import load_part
    from sd_quant.numbers import relative_error

    work, loaded = options.work, opened(options.work, model, part, INT8)
    shapes = loaded.parts[part].contract.shapes_for(1, 64, 64)
    inputs = {name: torch.randint(1, 1000, shape, dtype=torch.int32) for name, shape in shapes.items()}
    engine = openvino.load(work / f"{model}_{part}_{preset}" / f"{part}.onnx")
    _, opening_seconds = timed(lambda: engine(**inputs))  # compiles for these shapes
    opening_peak = peak_memory_bytes()
    reset_peak()
    output, seconds = timed(lambda: engine(**inputs))
    found = {"opening_seconds": opening_seconds, "opening_peak_bytes": opening_peak}
    found |= {"call_seconds": seconds, "call_peak_bytes": peak_memory_bytes()}
    engine.close()
    if available_memory_bytes() < 2 * TORCH_BYTES * loaded.parameters[part]:
        return found
    expected = load_part(loaded.checkpoint, part)(**inputs)
    return found | {"errors": {name: relative_error(expected[name], output[name]) for name in expected}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=input_path, default="outputs/full_size_parts")
    parser.add_argument("--layers", type=int, help="of each encoder; by default T5's 24 and bigG's 32")
    parser.add_argument("--call", action="store_true", help="call the INT8 files too")
    parser.add_argument("--keep", action="store_true", help="keep the ONNX files")
    add_row(parser)
    options = parser.parse_args()
    if options.row:
        reset_peak()
        return serve({"write": write_pipelines, "export": export, "call": call}, options)
    rows = Rows(options.work)
    if not rows.found and options.work.exists() and any(options.work.iterdir()):  # its folders are replaced
        parser.error(
            f"--work is {options.work}, which has files that this script has not written; name an empty folder"
        )
    rows.measure("write")
    for row in ROWS:
        rows.measure(":".join(("export", *row)))
        if options.call and row[2] == INT8:
            rows.measure(":".join(("call", *row)))
        if not (options.keep or options.call):
            shutil.rmtree(options.work / "_".join(row), ignore_errors=True)


if __name__ == "__main__":
    main()
