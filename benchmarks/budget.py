"""Formats under a budget of bytes: our choice for each layer against that of ModelOpt's ``auto_quantize``.

Both choose between INT4 in blocks of 64, INT8 by channel and fp16 for the weights of all layers of level 3, rounded to
nearest, with inputs in fp16. ModelOpt scores a format by the gradient of a loss (its default), here the squared
distance to the network's output plus noise, on the calls on which our sensitivity is measured. Its choice is derived
and simulated like ours, so images differ by the choice alone. Our budget is the bytes that ModelOpt's choice takes.

    python benchmarks/budget.py --out outputs/benchmarks/budget.json
"""

import contextlib
import io
import warnings
from statistics import fmean

import torch
import torch.nn.functional as F
from common import GUIDANCE, PROMPTS, STATISTICS, FullPrecision, Subject, load, parser, report, timed
from diffusers.models.attention_processor import AttnProcessor
from quality import paired

from sd_quant.inference.loading import load_part
from sd_quant.models.checkpoint import denoiser_of
from sd_quant.quantization.assignment import LayerAssignment
from sd_quant.quantization.budget import Choice, choose, stored_bytes
from sd_quant.quantization.recipe import Enable, Pair, Recipe
from sd_quant.quantization.statistics import Statistics
from sd_quant.stages.assign import measure_sensitivity
from sd_quant.stages.open_parts import open_simulated


def weights_alone(fmt: str) -> Recipe:
    pair = Pair(fmt, None)
    return Recipe(3.0, None, smoothing="none", enable=Enable(pair, pair, None), per_channel=fmt == "int8")


RECIPES: dict[str, Recipe | None] = {"int4": weights_alone("int4"), "int8": weights_alone("int8"), "fp16": None}
LOUD = 1e5  # ModelOpt's solver has absolute tolerances, for which scores of 1e-8 are zero
MODELOPT = {  # the same formats in ModelOpt's configuration
    "int4": {"num_bits": 4, "block_sizes": {-1: 64}},
    "int8": {"num_bits": 8, "axis": 0},
}


def calls_of(statistics: Statistics) -> list[dict[str, torch.Tensor]]:
    inputs = {name: sample.values for name, sample in statistics.calls.items()}
    return [dict(zip(inputs, values, strict=True)) for values in zip(*inputs.values(), strict=True)]


def modelopts_choice(subject: Subject, statistics: Statistics, effective_bits: float) -> dict[str, str]:
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
            quantization_formats=[
                {"quant_cfg": [{"quantizer_name": "*", "enable": False},
                               {"quantizer_name": "*weight_quantizer", "cfg": cfg}], "algorithm": "max"}
                for cfg in MODELOPT.values()
            ],
            data_loader=calls, forward_step=forward, loss_func=loss, disabled_layers=left_out,
            num_calib_steps=1, num_score_steps=len(calls),
        )  # fmt: skip
    chosen = {}
    for name in subject.names:
        quantizer = unet.get_submodule(name).weight_quantizer
        chosen[name] = f"int{quantizer.num_bits}" if quantizer.is_enabled else "fp16"
    return chosen


def derived(subject: Subject, statistics: Statistics, chosen: dict[str, str]) -> dict[str, LayerAssignment]:
    recipes = {name: recipe for name, fmt in chosen.items() if (recipe := RECIPES[fmt])}
    kept = [name for name, fmt in chosen.items() if fmt == "fp16"]
    return subject.assignment(statistics, weights_alone("int4"), kept, recipes=recipes)


def main() -> None:
    arguments = parser(__doc__, prompts=32)
    arguments.add_argument(
        "--bits", type=float, nargs="+", default=[5.5, 6.5, 8], help="effective ones, as ModelOpt counts"
    )
    arguments.add_argument("--images", type=int, default=64)
    options = arguments.parse_args()
    subject = load(options.prompts)
    checkpoint = subject.model.checkpoint
    statistics = subject.statistics(subject.sampling(options.steps), cache=STATISTICS)
    reference = FullPrecision(subject, PROMPTS / "sdxl_mini_report.txt", options.images, options.steps)

    def psnr(chosen: dict[str, str]) -> list[float]:
        denoiser = open_simulated(checkpoint, derived(subject, statistics, chosen))
        return reference.fidelity_of(denoiser)["psnr"]["values"]

    def errors_with(fmt: str) -> dict[str, float]:
        assignment = derived(subject, statistics, dict.fromkeys(subject.names, fmt))
        return measure_sensitivity(checkpoint, assignment, statistics, 0, GUIDANCE).network_error

    errors, seconds = timed(lambda: {fmt: errors_with(fmt) for fmt in MODELOPT})
    shapes = {name: tuple(subject.model.modules["unet"].get_submodule(name).weight.shape) for name in subject.names}
    offered = [
        {fmt: Choice(stored_bytes(shapes[name], subject.roles[name], recipe),
                     errors[fmt][name] ** 2 if recipe else 0.0)
         for fmt, recipe in RECIPES.items()}
        for name in subject.names
    ]  # fmt: skip
    figures = []
    print(f"our errors of {' and '.join(MODELOPT)}: {seconds:.0f} s")
    for bits in options.bits:
        theirs, seconds = timed(lambda bits=bits: modelopts_choice(subject, statistics, bits))
        size = sum(unit[fmt].bytes for unit, fmt in zip(offered, theirs.values(), strict=True))
        ours = dict(zip(subject.names, choose(offered, size), strict=True))
        values = {"ours": psnr(ours), "modelopt": psnr(theirs)}
        for who, chosen in (("ours", ours), ("modelopt", theirs)):
            counts = {fmt: list(chosen.values()).count(fmt) for fmt in RECIPES}
            print(f"effective bits {bits:g}, {size} bytes, {who:8} {fmean(values[who]):.2f} dB {counts}")
        print(f"ours - modelopt: {paired(values['ours'], values['modelopt'])} dB; auto_quantize {seconds:.0f} s")
        figures.append({"bits": bits, "bytes": size, "psnr": values, "ours": ours, "modelopt": theirs})
    report(options, {"budgets": figures})


if __name__ == "__main__":
    main()
