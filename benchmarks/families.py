"""Every family's denoiser at full size to INT8 ONNX, a plan and other tools: seconds, peak memory and bytes.

    python benchmarks/families.py [--families sd15,pixart,sd3,flux] [--plans] [--work outputs/families]
    python benchmarks/families.py --families flux,sdxl --hand-over diffusers_torchao:fp8,diffusers_sdnq:int8_weight_only
    python benchmarks/families.py --denoisers <file like denoisers.yaml, of smaller networks>

Weights are never there as a whole: each tensor is made when it is read, in fp16, of the same million random numbers, so
what is measured is the recipe, the graph and the streamed file, and neither a disk nor a generator. Statistics are
drawn too, because a pass of the larger ones in torch takes more memory than a small machine has; time and memory of a
recipe and an export do not depend on values. Each stage is a row
(``measurer.py``). Other tools get the denoiser alone.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from measurer import Figures, Rows, add_row, serve

from sd_quant.files import temporary_folder
from sd_quant.places import input_path

DENOISERS = Path(__file__).with_name("denoisers.yaml")
PLAN = ("export_trt=tensorrt_rtx", "trt.targets=[SM89]", "trt.max_batch_size=1", "trt.timing_cache=null")
LEVEL, ALPHA, STEPS, PROMPTS, ROWS = 3.0, 0.8, 2, 1, 16
DRAWN = 2**20  # random numbers, which weights repeat


def described(family: str, denoisers: Path) -> dict[str, Any]:
    return yaml.safe_load(denoisers.read_text(encoding="utf-8"))[family]


def checkpoint_of(family: str, given: dict[str, Any]):
    """A checkpoint with the denoiser alone, as a reader would return it."""
    import diffusers
    import torch
    from torch import Tensor

    from sd_quant.models.family import family_named

    kind = family_named(family)
    (component,) = (name for name, network in kind.NETWORKS.items() if network == given["class"])

    def build():
        return {component: getattr(diffusers, given["class"]).from_config(given["config"])}

    with torch.device("meta"):
        network = build()[component]
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}

    table = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0))

    class Drawn(Mapping[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            shape = shapes[name]
            deviation = 1 / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 0.02
            numbers = math.prod(shape)
            return (table * deviation).half().repeat(-(-numbers // DRAWN))[:numbers].view(shape)

        def __iter__(self) -> Iterator[str]:
            return iter(shapes)

        def __len__(self) -> int:
            return len(shapes)

    part = kind.parts(
        {component: dict(network.config), "vae": {"latent_channels": 4}}, given.get("tokens"), "diffusers"
    )[kind.DENOISER]
    return SimpleNamespace(
        family=kind, components={component: Drawn()}, parts=lambda: {kind.DENOISER: part}, build=build
    )


def statistics_of(roles: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]):
    import torch

    from sd_quant.quantization.statistics import LayerStatistics, Sample

    found = {}
    for name, role in roles.items():
        width, conv = math.prod(shapes[name][1:]), len(shapes[name]) == 4
        rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1)).half()
        amax = torch.full((PROMPTS, STEPS) if conv else (STEPS, width), 4.0)
        if role != "excluded":
            found[name] = LayerStatistics(
                "conv" if conv else "linear", amax, Sample(rows, torch.arange(ROWS, dtype=torch.float64))
            )
    return found


def derived(checkpoint, network, recipe, attentions: Mapping[str, Any] | None = None):
    """The assignment of ``network``, which has no weights."""
    from sd_quant.models.checkpoint import denoiser_weights
    from sd_quant.quantization.derivation import derive

    weights, family = denoiser_weights(checkpoint), checkpoint.family
    roles = family.layer_roles(network)
    shapes = {name: tuple(network.get_submodule(name).weight.shape) for name in roles}
    inputs = family.shared_inputs([name for name, role in roles.items() if role != "conv"])

    def bias_of(name: str):
        return weights[bias] if (bias := f"{name}.bias") in weights else None

    return derive(
        roles, lambda name: weights[f"{name}.weight"], statistics_of(roles, shapes), recipe, inputs,
        attentions=attentions or {}, bias_of=bias_of,
    )  # fmt: skip


def export(family: str, given: dict[str, Any], path: Path) -> Figures:
    from sd_quant.export.parts import trace_part, write_part
    from sd_quant.models.checkpoint import empty_denoiser
    from sd_quant.quantization.recipe import Recipe

    checkpoint = checkpoint_of(family, given)
    network, start = empty_denoiser(checkpoint), time.perf_counter()
    assignment, known = derived(checkpoint, network, Recipe(LEVEL, ALPHA)), time.perf_counter()
    graph, traced = trace_part(checkpoint, checkpoint.family.DENOISER), time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_part(graph, checkpoint, checkpoint.family.DENOISER, path, assignment)
    seconds = {"recipe_seconds": known - start, "trace_seconds": traced - known}
    return written(network, assignment, path.parent) | seconds | {"write_seconds": time.perf_counter() - traced}


def hand_over(family: str, given: dict[str, Any], target: str, preset: str, work: Path) -> Figures:
    """Write the denoiser as ``target`` reads it, without the pipeline's other networks, into a temporary folder."""
    from common import recipe_of

    from sd_quant.interchange import TARGETS
    from sd_quant.interchange.holding import adapted
    from sd_quant.models.checkpoint import denoiser_part, empty_denoiser

    checkpoint = checkpoint_of(family, given)
    network, start = empty_denoiser(checkpoint), time.perf_counter()
    recipe = replace(recipe_of(preset, f"quant_level={LEVEL}"), rounding="nearest")  # chosen codes are kept in memory
    assignment, known = adapted(derived(checkpoint, network, recipe), TARGETS[target]), time.perf_counter()
    work.mkdir(parents=True, exist_ok=True)
    with temporary_folder(work) as folder:
        place = Path(folder)
        network.save_config(place / denoiser_part(checkpoint).component)  # which a pipeline's folder has
        TARGETS[target].module.write(checkpoint, assignment, place)
        found = written(network, assignment, place)
    return found | {"recipe_seconds": known - start, "write_seconds": time.perf_counter() - known}


def written(network, assignment, folder: Path) -> Figures:
    return {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "layers": sum(layer.format is not None for layer in assignment.values()),
        "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
    }


def plan(given: dict[str, Any], path: Path) -> Figures:
    """Build the plan. Raises ResourceError where the machine has less memory than that takes."""
    from common import job_with

    from sd_quant.cache import Cache
    from sd_quant.config import ExportShape
    from sd_quant.stages.export_trt import build_plans, numbers_in
    from sd_quant.stages.resources import check_machine, plans_need

    name = path.stem
    check_machine(plans_need({name: numbers_in(path)}, 0))
    trt = job_with("int8", *PLAN).trt
    start = time.perf_counter()
    build_plans({name: path}, path.parents[2], trt, ExportShape(None, given["width"], given["height"], 1), Cache(None))
    built = path.parents[2] / "plan" / f"{name}.plan"
    return {"plan_seconds": time.perf_counter() - start, "plan_bytes": built.stat().st_size}


def measured(options: argparse.Namespace, family: str, stage: str, preset: str = "") -> Figures:
    from sd_quant.models.family import family_named

    denoiser, given = family_named(family).DENOISER, described(family, options.denoisers)
    path = options.work / family / "onnx" / denoiser / f"{denoiser}.onnx"
    if preset:
        return hand_over(family, given, stage, preset, options.work)
    return export(family, given, path) if stage == "export" else plan(given, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--families", default="sd15,pixart,sd3,flux")
    parser.add_argument("--plans", action="store_true", help="build plans too")
    parser.add_argument("--hand-over", default="", help="targets with presets, such as modelopt:fp8, and no ONNX")
    parser.add_argument("--work", type=input_path, default="outputs/families")
    parser.add_argument("--denoisers", type=input_path, default=DENOISERS, help="what the networks are (%(default)s)")
    add_row(parser)
    options = parser.parse_args()
    if options.row:
        return serve({"stage": measured}, options)
    stages = options.hand_over.split(",") if options.hand_over else ["export", *(["plan"] if options.plans else [])]
    rows = Rows(options.work)
    for family in options.families.split(","):
        for stage in stages:
            rows.measure(f"stage:{family}:{stage}")


if __name__ == "__main__":
    main()
