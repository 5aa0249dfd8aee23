"""Compare the engines of a finished run with ONNX Runtime, which executes the same ONNX files on the CPU.

    python -m sd_quant.stages.compare_plans <folder of a run> tensorrt

ONNX Runtime shares no code with torch, the exporter or TensorRT, so it is an independent check. Inputs are random. The
tolerance of an unquantized part is that of fp16. In a quantized network one flipped rounding changes all later ones, so
SHARE_OF_COST of the output's change by quantization is tolerated too. This finds a wrong plan, but not a plan that
leaves layers unquantized: for those see ``parity`` and ``executed`` in the run's record, layer by layer.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import onnx
import torch
from torch import Tensor

from sd_quant.config import artifact
from sd_quant.engines import REFEREE, RUNTIMES, load_engine
from sd_quant.engines.tensorrt.build import profile_of
from sd_quant.errors import exit_with_its_code
from sd_quant.inference.parity import PART_TOLERANCE, SHARE_OF_COST, distance
from sd_quant.models.parts import first_output
from sd_quant.places import existing

TIMESTEP, TOKENS = 500, 64  # the value of rank-1 inputs; the bound of random token ids


def inputs_of(onnx_path: Path, part: str, size: tuple[int, int]) -> dict[str, Tensor]:
    """Return random inputs for one image of ``size`` (width, height), by the names of an ONNX file's inputs."""
    model = onnx.load(onnx_path, load_external_data=False)
    likely = {name: shapes[1] for name, shapes in profile_of(onnx_path, part, 1, None, size, guided=True).items()}
    random, found = torch.Generator().manual_seed(0), {}
    for value in model.graph.input:
        shape = tuple(likely[value.name])
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if kind.kind == "i" and len(shape) > 1:
            found[value.name] = torch.randint(TOKENS, shape, generator=random)
        else:
            drawn = torch.randn(shape, generator=random)
            found[value.name] = torch.full(shape, TIMESTEP) if len(shape) == 1 else drawn
    return found


def computed(engine: str, path: Path, inputs: dict[str, Tensor]) -> Tensor:
    """Run the file at ``path`` by ``engine`` once; return its first output, fp32 on the CPU."""
    with closing(load_engine(engine, path)) as opened:
        return first_output(opened(**inputs))[0].float().cpu()


def compare(run: Path, engine: str) -> Iterator[dict]:
    """Compare each part of a run that has files of ``engine``; yield ``{what, relative_error, tolerance}``."""
    record = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    knobs, kind = record["knobs"]["infer"], RUNTIMES[engine].file
    for folder in sorted((run / "onnx").iterdir()):
        part, unquantized = folder.name, artifact(run / "full_precision", "onnx", folder.name)
        path = artifact(run, "onnx", part)
        inputs = inputs_of(path, part, (knobs["width"], knobs["height"]))
        expected = computed(REFEREE, path, inputs)
        tolerance = PART_TOLERANCE[torch.float16]
        if unquantized.is_file():
            tolerance += SHARE_OF_COST * distance(computed(REFEREE, unquantized, inputs), expected)
        error = distance(expected, computed(engine, artifact(run, str(kind), part), inputs))
        yield {"what": f"{part} with ONNX Runtime", "relative_error": error, "tolerance": tolerance}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the folder of a finished run")
    parser.add_argument("engine", choices=[name for name, runtime in RUNTIMES.items() if runtime.file])
    given = parser.parse_args()
    for entry in compare(existing("run", given.run, "the folder of a finished run"), given.engine):
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    exit_with_its_code(main)
