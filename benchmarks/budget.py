"""Presets under a budget of bytes: our choice for each layer against ModelOpt's ``auto_quantize`` and one for all.

There are two tables. In ``weights``, all choose between INT4 in blocks of 64, INT8 by channel and fp16 for the weights
of all layers of level 3, with inputs in fp16. In ``inputs``, INT8 quantizes inputs too, one range a tensor, and FP8
of both is a fourth choice. Everything is rounded to nearest, and nothing is smoothed. ModelOpt scores a format by the
gradient of a loss (its default), here the squared distance to the network's output plus noise, on the calls on which
our sensitivity is measured. Ours is corrected by images of four calibration prompts. Both choices are derived and
simulated alike, so images differ by the choice alone. Our budget is the bytes that ModelOpt's choice takes; the best
single format is that of all that fit, by the same four images.

    python benchmarks/budget.py --out outputs/benchmarks/budget.json
"""

import contextlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    GUIDANCE,
    PROMPTS,
    FullPrecision,
    Subject,
    image_parser,
    open_subject,
    paired,
    reference_of,
    report,
    timed,
)
from diffusers.models.attention_processor import AttnProcessor

from sd_quant.calibration.prompts import read_prompts
from sd_quant.inference.loading import load_part
from sd_quant.models.checkpoint import denoiser_of
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import KEPT, Choice, Limit, Solved, all_in, solve, stored_bytes
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.stages.assign import measure_sensitivity
from sd_quant.stages.fit import quantized_alone
from sd_quant.stages.open_parts import open_simulated


@dataclass(frozen=True)
class Format:
    """A choice of both: our recipe, and the same in ModelOpt's configuration of quantizers."""

    recipe: Recipe
    weight: Mapping[str, Any]
    inputs: Mapping[str, Any] | None

    def config(self) -> dict:
        quantizers = {"weight": self.weight} | ({"input": self.inputs} if self.inputs else {})
        named = [{"quantizer_name": f"*{name}_quantizer", "cfg": dict(cfg)} for name, cfg in quantizers.items()]
        return {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *named], "algorithm": "max"}


def recipe(weight: str, inputs: str | None = None) -> Recipe:
    pair = Pair(weight, inputs)
    return Recipe(3.0, None, smoothing="none", enable=Enable(pair, pair, None), per_channel=weight == "int8",
                  collect_method="default")  # fmt: skip


INT4 = Format(recipe("int4"), {"num_bits": 4, "block_sizes": {-1: 64}}, None)
BY_CHANNEL, BY_TENSOR = {"num_bits": 8, "axis": 0}, {"num_bits": 8, "axis": None}
E4M3 = {"num_bits": (4, 3), "axis": None}
FORMATS: dict[str, dict[str, Format]] = {
    "weights": {"int4": INT4, "int8": Format(recipe("int8"), BY_CHANNEL, None)},
    "inputs": {
        "int4": INT4, "int8": Format(recipe("int8", "int8"), BY_CHANNEL, BY_TENSOR),
        "fp8": Format(recipe("fp8", "fp8"), E4M3, E4M3),
    },
}  # fmt: skip
NAMES = {4: "int4", 8: "int8", (4, 3): "fp8"}  # by what ModelOpt calls bits
CHOOSING = 4  # prompts whose images correct our choice
LOUD = 1e5  # ModelOpt's solver has absolute tolerances, for which scores of 1e-8 are zero


def calls_of(statistics: Statistics) -> list[dict[str, torch.Tensor]]:
    inputs = {name: sample.values for name, sample in statistics.calls.items()}
    return [dict(zip(inputs, values, strict=True)) for values in zip(*inputs.values(), strict=True)]


def modelopts_choice(
    subject: Subject, statistics: Statistics, formats: Mapping[str, Format], effective_bits: float
) -> dict[str, str]:
    """The format that ``auto_quantize`` gives each layer."""
    import modelopt.torch.quantization as mtq

    checkpoint = subject.model.checkpoint
    module = load_part(checkpoint, "unet_xl").module.float()
    unet, inputs = denoiser_of(checkpoint, module), checkpoint.parts()["unet_xl"].contract.inputs
    left_out = [f"*{name}*" for name, layer in unet.named_modules()
                if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d) and name not in subject.names]  # fmt: skip
    random = torch.Generator().manual_seed(0)

    def forward(network: torch.nn.Module, call: dict[str, torch.Tensor]) -> torch.Tensor:
        return module(*(call[name] for name in inputs))

    def loss(output: torch.Tensor, call: dict[str, torch.Tensor]) -> torch.Tensor:
        return LOUD * F.mse_loss(output, output.detach() + torch.randn(output.shape, generator=random))

    calls = calls_of(statistics)
    unet.set_attn_processor(AttnProcessor())  # ModelOpt replaces torch's own by one without a gradient
    unet.requires_grad_(True)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        mtq.auto_quantize(
            unet,
            constraints={"effective_bits": effective_bits},
            quantization_formats=[each.config() for each in formats.values()],
            data_loader=calls, forward_step=forward, loss_func=loss, disabled_layers=left_out,
            num_calib_steps=len(calls), num_score_steps=len(calls),
        )  # fmt: skip
    chosen = {}
    for name in subject.names:
        quantizer = unet.get_submodule(name).weight_quantizer
        chosen[name] = NAMES[quantizer.num_bits] if quantizer.is_enabled else KEPT
    return chosen


@dataclass(frozen=True)
class Table:
    """What one table compares: the layers of a subject in some formats."""

    subject: Subject
    statistics: Statistics
    formats: Mapping[str, Format]
    choosing: FullPrecision  # of calibration prompts

    def derived(self, chosen: Mapping[str, str]) -> dict[str, LayerAssignment]:
        recipes = {name: self.formats[label].recipe for name, label in chosen.items() if label != KEPT}
        kept = [name for name, label in chosen.items() if label == KEPT]
        return self.subject.assignment(self.statistics, INT4.recipe, kept, recipes=recipes)

    def measured(self) -> tuple[list[dict[str, Choice]], dict[str, float]]:
        """What each layer costs and changes in each format, and what each format for all layers changes."""
        subject, found = self.subject, {}
        for label in self.formats:
            assignment = self.derived(dict.fromkeys(subject.names, label))
            found[label] = measure_sensitivity(subject.model.checkpoint, assignment, self.statistics, GUIDANCE)
        units = []
        for name in subject.names:
            shape, role = tuple(subject.model.modules["unet"].get_submodule(name).weight.shape), subject.roles[name]
            unit = {
                label: Choice(stored_bytes(shape, role, each.recipe), found[label][name] ** 2)
                for label, each in self.formats.items()
            }
            units.append(unit | {KEPT: Choice(stored_bytes(shape, role, None), 0.0)})
        alone = {label: self.derived(dict.fromkeys(subject.names, label)) for label in self.formats}
        return units, {label: self.error_of(assignment) for label, assignment in alone.items()}

    def error_of(self, assignment: Mapping[str, LayerAssignment]) -> float:
        """The root mean squared error of the images of calibration prompts, where white is 1."""
        psnr = self.choosing.fidelity_of(open_simulated(self.subject.model.checkpoint, assignment))["psnr"]["values"]
        return fmean(10 ** (-each / 10) for each in psnr) ** 0.5

    def whole(self, labels: Sequence[str]) -> float:
        return self.error_of(self.derived(dict(zip(self.subject.names, labels, strict=True))))

    def apart(self, labels: Sequence[str]) -> dict[str, float]:
        """What the layers of each label change together."""
        chosen = dict(zip(self.subject.names, labels, strict=True))
        groups = {label: {name for name, own in chosen.items() if own == label} for label in self.formats}
        assignment = self.derived(chosen)
        return {label: self.error_of(quantized_alone(assignment, names)) for label, names in groups.items() if names}


def best_single(solved: Solved) -> Sequence[str] | None:
    """The labels of the best format for all layers that fits; None where none fits."""
    alone = [each for name, each in solved.candidates.items() if name.startswith("all in ")]
    return min(alone, key=lambda each: each.measured).labels if alone else None


def main() -> None:
    parser, bits = image_parser(__doc__), [5.5, 6.5, 8]
    parser.add_argument("--bits", type=float, nargs="+", default=bits, help="effective ones, as ModelOpt counts")
    parser.add_argument("--tables", nargs="+", choices=FORMATS, default=list(FORMATS))
    options = parser.parse_args()
    subject = open_subject(None, None, options.calib_size, options.model)
    checkpoint, names = subject.model.checkpoint, subject.names
    statistics, reference = subject.statistics(options.steps), reference_of(subject, options)
    choosing = FullPrecision(subject, read_prompts(PROMPTS / "sdxl_mini.txt")[:CHOOSING], options.steps, CHOOSING)
    figures = []
    for title in options.tables:
        table = Table(subject, statistics, FORMATS[title], choosing)

        def psnr(labels: Sequence[str], table: Table = table) -> list[float]:
            chosen = dict(zip(names, labels, strict=True))
            return reference.fidelity_of(open_simulated(checkpoint, table.derived(chosen)))["psnr"]["values"]

        (offered, uniform), seconds = timed(table.measured)
        print(f"{title}: our errors of {', '.join(table.formats)}: {seconds:.0f} s")
        for bits in options.bits:
            theirs, seconds = timed(lambda bits=bits, table=table: modelopts_choice(
                subject, statistics, table.formats, bits
            ))  # fmt: skip
            size = sum(unit[label].cost for unit, label in zip(offered, theirs.values(), strict=True))
            solved = solve(
                offered, [Limit(size, range(len(offered)))], table.whole, table.apart, uniform,
                lambda units, uniform=uniform: {f"all in {label}": all_in(units, label) for label in uniform},
            )  # fmt: skip
            first, taken = solved.candidates["by layer"], solved.candidates[solved.taken]
            choices = {"ours": taken.labels, "by layer": first.labels, "modelopt": list(theirs.values())}
            if (single := best_single(solved)) is not None:
                choices["one format"] = single
            made: dict[tuple[str, ...], list[float]] = {}
            values = {}
            for who, labels in choices.items():
                made[tuple(labels)] = made.get(tuple(labels)) or psnr(labels)
                values[who] = made[tuple(labels)]
                counts = {label: list(labels).count(label) for label in (*table.formats, KEPT)}
                print(f"effective bits {bits:g}, {size} bytes, {who:10} {fmean(values[who]):.2f} dB {counts}")
            print(
                f"taken: {solved.taken}; error of images {taken.measured:.4g}; by layer {first.measured:.4g}, "
                f"{first.predicted:.4g} by the sum of layers; auto_quantize {seconds:.0f} s"
            )
            for who in choices.keys() - {"ours"}:
                print(f"ours - {who}: {paired(values['ours'], values[who])} dB")
            figures.append({"table": title, "bits": bits, "bytes": size, "psnr": values, "labels": choices})
    report(options, {"budgets": figures})


if __name__ == "__main__":
    main()
