"""Opens exports with the programs that they are for, each in an environment of its own.

``make programs-check`` writes tiny checkpoints with random weights, one for every preset that a target holds. A
program's script loads them without this project and states missing and unused tensors, the number of quantized layers,
their outputs and that of a call of the denoiser. Programs that make images of a whole pipeline are in ``pipelines``.

A script and its requirements have the program's name; without requirements the project's own Python runs it beside the
consumers. A program that is no package is a checkout in the folder ``$PROGRAMS``.

A layer's output, of our layer's input, is compared with that of our reader's weight and rounded inputs, or of unrounded
ones where the hardware lacks the former. A call is compared likewise. Rounded inputs within rounding of a half change
all behind them: our own call of Stable Diffusion 2 in INT8 is 1.2e-2 from itself when its inputs move by 2e-7. So such
a call shows gross faults alone; where a program can leave inputs unrounded, that call is compared too.

``benchmarks/results/programs.tsv`` keeps the rows, of which docs/targets.md is made. The check fails for a worse row.
"""

import argparse
import inspect
import math
import os
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd_quant.checkpoints.diffusers_pipeline import open_pipeline
from sd_quant.config.recipe import own_recipe, presets
from sd_quant.config.targets import inputs_held
from sd_quant.interchange import TARGETS
from sd_quant.interchange.denoiser import QuantizedDenoiser
from sd_quant.interchange.holding import why_not_served
from sd_quant.interchange.weights import JoinedLayers, by_authors_names
from sd_quant.models.family import family_named
from sd_quant.names.authors import assembled
from sd_quant.numbers import relative_error

from ..unit.tiny import TOKENS, Tiny
from ..zoo.families import COMFYUI, PUBLISHED, TINY, WIDE
from .pipelines import PIPELINES, pipeline_rows
from .rows import Row, facts_of, is_worse, kept, listed, save, shown, with_facts
from .sampled import sampled_row, weights_alone

AUTHORS = ("comfyui", "gguf")  # targets whose files have the names of a model's authors


@dataclass(frozen=True)
class Program:
    """A program that opens files of the ``targets``: of the first family all presets, of the others one."""

    script: str
    targets: Mapping[str, tuple[str, ...]]
    source: str = ""  # the folder of its checkout below $PROGRAMS; "": it is a package
    makers: Mapping[str, Callable[[Path], None]] = field(default_factory=lambda: EVERY)
    # Limits of relative errors, both sides in fp32, where another order of sums is all that differs
    layer: float = 1e-5  # of a layer
    call: float = 1e-5  # of a call whose inputs are not rounded
    rounded: float = 3e-2  # of a call whose inputs are
    holds_all: bool = True  # False: it dequantizes some layers as it loads them
    absent: frozenset[str] = frozenset()  # what it does not find in any file of diffusers, and never uses
    samples: bool = False  # whether its own sampler makes images of the shipped SDXL, see ``sampled``
    image: float = 50.0  # dB of an image to that of the same weights in fp16, where a program gives no more


EVERY = TINY | WIDE
UNETS = ("sdxl", "sd15", "sd21")
# diffusers, InvokeAI and ComfyUI-GGUF's plain node decode GGUF in fp16, ModelOpt's file has its weights in it
HALF = 4e-3
OF_COMFYUI: Any = {"makers": EVERY | COMFYUI, "absent": frozenset({"y_embedder.y_embedding"}), "samples": True}
PROGRAMS = {
    "ComfyUI": Program("comfyui", {"comfyui": ("flux", "sd3", "pixart", *UNETS)}, "ComfyUI", **OF_COMFYUI),
    "ComfyUI's server": Program("comfyui_server", {"comfyui": ()}, "ComfyUI", samples=True),
    "ComfyUI-GGUF": Program("comfyui", {"gguf": ("flux", "sd3", *UNETS)}, "ComfyUI", **OF_COMFYUI),
    "InvokeAI": Program("by_invokeai", {"gguf": ("flux",), "diffusers_sdnq": ("flux",)}, "", PUBLISHED, HALF, HALF,
                        holds_all=False),
    "stable-diffusion.cpp": Program("by_stable_diffusion_cpp", {name: ("flux",) for name in AUTHORS}, "", PUBLISHED),
    "diffusers": Program("by_diffusers", {
        "diffusers_torchao": ("flux", "sd21", "sdxl", "sd3", "pixart"), "diffusers_sdnq": ("flux", "sd21", "sd3"),
        "diffusers_autoround": ("flux", "sd21"), "diffusers_bfl": ("flux", "sd21", "sdxl", "sd3"),
    }),
    "diffusers with ModelOpt": Program(
        "by_diffusers", {"diffusers_modelopt": ("sd21", "flux")}, layer=HALF, call=HALF, rounded=0.1,
    ),
    "diffusers' GGUF": Program("by_diffusers", {"gguf": (*UNETS, "sd3", "flux")}, "", EVERY, HALF, HALF),
    # A layer rounds the inputs of 576 tokens: one FP8 code that flips is 3e-5 of its output
    "vLLM-Omni": Program("vllm_omni_server", {"modelopt_export": ("flux",), "vllm_int8": ("flux",)}, layer=1e-4),
    "SGLang": Program("sglang_server", {"modelopt_export": ("flux",), "sglang_fp8": ("flux",)}),
    "nunchaku": Program("nunchaku_loader", {"nunchaku": ("flux", "sdxl_wide")}, "nunchaku"),
    "diffusers with nunchaku": Program("nunchaku_loader", {"diffusers_nunchaku_lite": ("flux",)}, "nunchaku"),
}  # fmt: skip


def source_of(program: Program) -> tuple[Path | None, str]:
    """The checkout of a program that is no package, and why there is none; a package has neither."""
    if not program.source:
        return None, ""
    place = os.environ.get("PROGRAMS")
    if place is None or not (folder := Path(place) / program.source).is_dir():
        return None, f"it is no package; set PROGRAMS to a folder that has a checkout {program.source}"
    return folder.resolve(), ""


# What is opened


@dataclass(frozen=True)
class Called(Tiny):
    """A tiny checkpoint whose random inputs have the positions of pixels, and a mask that hides words of one text."""

    SIZE = {"width": 256, "height": 288}  # ComfyUI 0.33.0 divides by zero where both sides of PixArt are below 528

    def inputs(self, seed: int = 7) -> dict[str, Tensor]:
        found = super().inputs(seed)
        if "img_ids" in found:
            patches = (torch.arange(self.SIZE[side] / 16) for side in ("height", "width"))  # of 2 x 2 latents
            found["img_ids"] = torch.cartesian_prod(torch.zeros(1), *patches)
            found["txt_ids"] = torch.zeros_like(found["txt_ids"])
        if (mask := found.get("encoder_attention_mask")) is not None:
            words = torch.tensor([[mask.shape[1]], [5]])
            found["encoder_attention_mask"] = (torch.arange(mask.shape[1]) < words).float()
        return found


@dataclass(frozen=True)
class Case:
    """A written file, what our reader makes of it, and both predictions of a call."""

    row: Row
    request: Mapping[str, Any]
    predicted: Mapping[str, Tensor]  # by the kind of inputs


def preset_names(target: str) -> list[str]:
    """Presets whose linears the target holds."""
    recipes = {name: own_recipe(name) for name in presets()}
    return [name for name, each in recipes.items() if each and inputs_held(TARGETS[target], each) is not None]


def cases_of(name: str, program: Program, folder: Path) -> Iterator[Case]:
    @cache
    def tiny(family: str) -> Tiny:
        pipeline = folder / family
        program.makers[family](pipeline)
        family = family.partition("_")[0]
        tokens = TOKENS if family_named(family).TOKENS else None
        return Called(open_pipeline(pipeline, family, tokens, "diffusers"))

    for target, families in program.targets.items():
        for family in families:
            wanted = preset_names(target)
            for preset in wanted if family == families[0] else ["int8" if "int8" in wanted else wanted[0]]:
                row = Row(name, target, family, preset)
                if (case := written(tiny(family), row, folder / target / family / preset)) is not None:
                    yield case


@torch.no_grad()
def written(tiny: Tiny, row: Row, folder: Path) -> Case | None:
    """The case of a row, None where the target holds no layer of its recipe, or the program loads none of its formats.
    Layers that a server loads in high precision, whatever a file says, are not quantized for it."""
    recipe = own_recipe(row.preset)
    assert recipe is not None
    if recipe.enable.linear.weight not in TARGETS[row.target].multiplied:
        recipe = replace(recipe, smoothing="none", alpha=None)
    server, pipelines = TARGETS[row.target].servers.get(row.program), tiny.checkpoint.family.PIPELINES
    plain = [] if server is None else [pattern for name in pipelines for pattern in server.plain.get(name, ())]
    assignment = tiny.assignment(recipe, row.target, plain)
    if server is not None and why_not_served(server, tiny.checkpoint, assignment) is not None:
        return None
    joined = by_authors_names(tiny.checkpoint, assignment)[1] if row.target in AUTHORS else None
    row.of = sum(layer.format is not None for layer in assignment.values()) if joined is None else len(joined)
    if row.of == 0:
        return None
    path = tiny.written(assignment, row.target, folder)
    read = tiny.read(path, row.target)
    networks = {"exact": tiny.network(weights_alone(read)), "rounded": tiny.network(read)}
    call, layers = folder / "call.safetensors", folder / "layers.safetensors"
    save_file({name: each.clone() for name, each in arguments(tiny).items()}, call)
    found = outputs_of_layers(tiny, networks, read)
    if joined is not None:
        found = by_stored_names(joined, found)
    save_file({name: each.contiguous().clone() for name, each in found.items()}, layers)
    request = {
        "name": f"{row.target} {row.family} {row.preset}", "target": row.target, "family": row.family.partition("_")[0],
        "format": row.preset, "path": str(path), "pipeline": str(tiny.checkpoint.path), "call": str(call),
        "layers": str(layers), "output": str(folder / "output.safetensors"),
    }  # fmt: skip
    return Case(row, request, {kind: tiny.output(network) for kind, network in networks.items()})


def arguments(tiny: Tiny) -> dict[str, Tensor]:
    """The inputs of ``Tiny.output`` by the arguments of diffusers' class."""
    given: dict[str, Tensor] = {}

    def take(module: nn.Module, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*positional, **named).arguments
        every = bound | (bound.get("added_cond_kwargs") or {})
        given.update({name: each.float() for name, each in every.items() if isinstance(each, Tensor)})

    denoiser = tiny.denoiser()
    denoiser.register_forward_pre_hook(take, with_kwargs=True)
    tiny.output(denoiser)
    return given


def outputs_of_layers(tiny: Tiny, networks: Mapping[str, nn.Module], candidate: QuantizedDenoiser) -> dict[str, Tensor]:
    """``NAME|input`` as a call brings it, ``NAME|exact`` and ``NAME|rounded`` of what is quantized, each [N, width]; of
    no convolution, which no program here computes quantized."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda layer, inputs: found.update({f"{name}|input": inputs[0].flatten(0, -2).float()})

    layers = {name: networks["exact"].get_submodule(name) for name in candidate.layers}
    names = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    hooks = [layers[name].register_forward_pre_hook(keep(name), prepend=True) for name in names]
    tiny.output(networks["exact"])
    for hook in hooks:
        hook.remove()
    for name in names:
        for kind, network in networks.items():
            found[f"{name}|{kind}"] = network.get_submodule(name)(found[f"{name}|input"])
    return found


def by_stored_names(joined: Mapping[str, JoinedLayers], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same by the authors' names, who store some layers as one."""

    def whole(layers: JoinedLayers, kind: str) -> Tensor:
        return assembled(layers.pieces, lambda name: found[f"{name.removesuffix('.weight')}|{kind}"].T).T

    stored = {}
    for weight, layers in joined.items():
        name, first = weight.removesuffix(".weight"), layers.pieces[0].name.removesuffix(".weight")
        if f"{first}|input" in found:
            stored[f"{name}|input"] = found[f"{first}|input"]
            stored |= {f"{name}|{kind}": whole(layers, kind) for kind in ("exact", "rounded")}
    return stored


# What the program makes of it


def opened_by(program: Program, cases: list[Case], work: Path) -> list[Row]:
    """The rows of a program, which is run once."""
    source, why = source_of(program)
    rows = [case.row for case in cases]
    if why:
        return [replace(row, verdict="not run", far=why) for row in rows]
    try:
        versions, facts = facts_of(program.script, source, [case.request for case in cases], work)
    except subprocess.CalledProcessError as error:
        return [replace(row, verdict="not run", far=f"no environment: {error}"[:300]) for row in rows]
    return [
        judged(replace(case.row, versions=listed(fact.get("versions", versions))), fact, case, program)
        for case, fact in zip(cases, facts, strict=True)
    ]


def judged(row: Row, fact: Mapping[str, Any], case: Case, program: Program) -> Row:
    """The row with what the program said, and the verdict."""
    row = with_facts(row, fact, program.absent)
    if not row.opened:
        return replace(row, verdict="FAILED")
    whole = row.missing == row.left == 0 and (row.quantized == row.of or bool(row.quantized) and not program.holds_all)
    if "image" in fact:
        row.image = fact["image"]
        return replace(row, verdict="ok" if whole and row.image >= program.image else "FAILED")
    layers = {kind: fact["layers"][kind] for kind in case.predicted} if fact.get("layers") else {}
    if not layers:
        return replace(row, verdict="loaded" if whole and row.far else "FAILED")
    row.inputs = min(layers, key=lambda kind: layers[kind])
    row.layer, path = layers[row.inputs], Path(case.request["output"])
    outputs = load_file(path) if path.is_file() else {}
    kinds = {"output": row.inputs, "exact": "exact"}
    errors = {name: relative_error(case.predicted[kinds[name]], output.float()) for name, output in outputs.items()}
    row.call, row.unrounded = errors.get("output", math.nan), errors.get("exact", "")
    right = whole and row.layer <= program.layer and float(row.unrounded or 0) <= program.call
    right &= row.call <= (program.call if row.inputs == "exact" else program.rounded)
    return replace(row, verdict="ok" if right else "FAILED")


# The table


def run(wanted: argparse.Namespace) -> int:
    """Check the named programs, by default all. 1 when a row is worse than the kept one, else 0."""
    of_pipelines = {name for programs in PIPELINES.values() for name in programs}
    names = wanted.names or [*PROGRAMS, *of_pipelines]
    if unknown := {*names} - {*PROGRAMS, *of_pipelines}:
        raise SystemExit(f"no program {', '.join(sorted(unknown))}, expected {', '.join([*PROGRAMS, *of_pipelines])}")
    torch.set_num_threads(1)
    rows, before = [], kept()
    for row in chain(rows_of(names), pipeline_rows(names)):
        old = before.get(row.name)
        untried = old is not None and row.versions not in ("", old["versions"])
        said = [*row.name, row.verdict, *(["WORSE THAN KEPT"] if is_worse(row, old) else [])]
        said += [*(["this version was never tried:"] if untried else []), row.versions]
        figures = {"layer": row.layer, "call": row.call, "unrounded": row.unrounded, "image": row.image}
        figures |= {"inputs": row.inputs, "far": row.far, "missing": row.missing or "", "left": row.left or ""}
        figures["quantized"] = "" if row.quantized == row.of else f"{row.quantized} of {row.of}"
        print(*said, *(f"{name} {shown(each)}" for name, each in figures.items() if each != ""), flush=True)
        rows.append(row)
    if wanted.keep:
        save([row for row in rows if row.verdict != "not run"])
    return int(any(is_worse(row, before.get(row.name)) for row in rows))


def rows_of(names: Collection[str]) -> Iterator[Row]:
    for name in (name for name in names if name in PROGRAMS):
        with TemporaryDirectory() as temporary:
            work, program = Path(temporary), PROGRAMS[name]
            cases = list(cases_of(name, program, work))
            yield from opened_by(program, cases, work) if cases else ()
            source, _ = source_of(program)
            for target in program.targets if program.samples and source else ():
                yield sampled_row(name, program.script, target, source, work / "sampled")
