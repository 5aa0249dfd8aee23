"""What precise steps buy beside bits, layers that stay in high precision, and calls that are saved.

For each preset the steps that multiply unquantized inputs are chosen by the products of errors of some prompts, as
``infer.precise_steps`` does, and the images of others are compared with full precision's, all by the simulation in
fp32. All are put on one scale of time, that of nominal products: 1 in 16 bits, 1/2 with inputs in 8 bits and 1/4 in 4;
layers count by their multiplications. No machine is that: what one takes, a run of quantize.py times.

    python benchmarks/precision.py --model sd3_mini --presets int8 nvfp4

Finished rows are kept, so a cancelled run continues with the others.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from common import REPORTED, image_parser, job_with, label, open_subject, paired, reference_of
from four_bits import LEVEL
from measurer import markdown
from modelopt.torch.quantization import fold_weight
from torch import nn

from sd_quant.calibration.prompts import read_prompts
from sd_quant.config.precise_steps import with_ends
from sd_quant.files import write_json, write_text
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.precision import best_steps, products_of_steps, schedule_with
from sd_quant.inference.reuse import candidates, changed_by, products_of, replacements
from sd_quant.inference.schedules import WEIGHTS_ALONE, engine_of_letter, most_saved
from sd_quant.metrics.fidelity import fidelity
from sd_quant.models.checkpoint import denoiser_of
from sd_quant.places import HOME
from sd_quant.quantization.assignment import weights_alone
from sd_quant.quantization.formats import FORMATS
from sd_quant.simulation.sensitivity import Switched
from sd_quant.stages.assign import assign, measure_sensitivity
from sd_quant.stages.load import with_recipe
from sd_quant.stages.open_parts import open_simulated
from sd_quant.stages.session import Session

PRESETS = ("int8", "fp8", "int8_dynamic", "svdquant_w4a4", "nvfp4")
CHOOSING, PRECISE, SAVED = 8, (2, 4, 8), 5  # prompts, numbers of steps, calls
GUIDANCE = 5.0


def multiplications(network: nn.Module, layers: Iterable[str], call: Callable[[], object]) -> dict[str, int]:
    """Count the multiplications of each of the ``layers`` in one ``call`` of the network; its hooks stay."""
    counts = dict.fromkeys(layers, 0)
    for name in counts:
        network.get_submodule(name).register_forward_hook(
            lambda module, _, output, name=name: counts.update({name: output.numel() * module.weight[0].numel()})
        )
    call()
    return counts


def rows_of_preset(subject, reference, saving: str, preset: str, options) -> dict[str, dict]:
    """The fidelity of each row by its name, with the nominal time of an image beside full precision's."""
    checkpoint, denoiser, steps = subject.model.checkpoint, subject.denoiser, options.steps
    job = job_with(preset, f"model={options.model}", LEVEL)
    loaded = with_recipe(Session(checkpoint), job.model, job.infer, job.quantize)
    statistics = subject.statistics(steps)
    assignment = assign(loaded, statistics)
    simulated, *folded = (
        open_simulated(checkpoint, each) for each in (assignment, assignment, weights_alone(assignment))
    )
    for engine in folded:
        fold_weight(denoiser_of(checkpoint, engine.module))
    recipe = reference.parts | dict(zip((denoiser, engine_of_letter(denoiser, WEIGHTS_ALONE)), folded, strict=True))
    prompts = read_prompts(options.choice)[:CHOOSING]
    sampling = replace(reference.sampling, seed=1)
    products = torch.tensor(products_of_steps(checkpoint, reference.parts, recipe, prompts, sampling)).double()
    ranked = measure_sensitivity(checkpoint, assignment, statistics, GUIDANCE)
    network = denoiser_of(checkpoint, simulated.module)
    call = {name: each.values[0] for name, each in statistics.calls.items()}
    sizes = multiplications(network, ranked, lambda: simulated(**call))
    whole = sum(sizes.values())
    quick = sum(size * cost_of(assignment[name]) for name, size in sizes.items()) / whole  # of a call, of these layers

    def time_of(schedule: str) -> float:
        costs = {"c": quick, "h": 1.0}
        return sum(costs.get(letter, 0.0) for letter in schedule) / steps

    plain = "c" * steps
    counts = [count for count in PRECISE if count < steps]
    schedules = {f"{n} precise": schedule_with(best_steps(products, n), steps) for n in counts}
    schedules |= {"all precise": "h" * steps, f"{SAVED} saved": saving}
    if steps > 6:
        schedules["first 3 and last 3"] = with_ends(3, 3, steps)
    of_both = schedules[f"{counts[-1 if len(counts) < 2 else 1]} precise"]
    merged = "".join(s if s == "r" else p for s, p in zip(saving, of_both, strict=True))
    schedules |= {f"{SAVED} saved, {of_both.count('h')} precise": merged}
    kept: dict[str, tuple[list[str], float]] = {}
    for n in counts:  # layers that take as long in all steps as n precise ones
        room, names = whole * n / steps, []
        for name, size in sizes.items():
            room -= size
            if room < 0:
                break
            names.append(name)
        high = sum(sizes[name] * (1 - cost_of(assignment[name])) for name in names) / whole
        kept[f"{len(names)} layers kept"] = (names, quick + high)
    found = {}
    for name, schedule in {"the preset": plain, **schedules}.items():
        found[name] = row(name, preset, options, reference, recipe, schedule, time_of(schedule))
    switched, by_layers = Switched(network, lambda: None, list(sizes)), reference.parts | {denoiser: simulated}
    for name, (names, time) in kept.items():
        switched.run = lambda name=name, time=time: row(name, preset, options, reference, by_layers, plain, time)
        found[name] = switched.output([each for each in sizes if each not in names])
    return found


def cost_of(layer) -> float:
    """The time of one multiplication in a layer, on the nominal scale: 1 in 16 bits."""
    return 1.0 if layer.activation_format is None else FORMATS[layer.activation_format].bits / 16


def row(name: str, preset: str, options, reference, engines: Mapping, schedule: str, time: float) -> dict:
    kept = options.out / options.model / preset / f"{label(name)}.json"
    if not kept.exists():
        sampling = replace(reference.sampling, schedule=schedule)
        made = pipeline_of(reference.subject.model.checkpoint, engines)(reference.prompts, sampling)
        scores = fidelity(reference.made.images, made.images, reference.made.latents, made.latents)
        write_json(kept, {"schedule": schedule, "time": time, "fidelity": scores})
    return json.loads(kept.read_text(encoding="utf-8"))


def table(found: Mapping[str, Mapping[str, dict]]) -> str:
    lines = []
    for preset, rows in found.items():
        first = rows["the preset"]["fidelity"]["psnr"]["values"]
        for name, each in rows.items():
            psnr, lpips = each["fidelity"]["psnr"], each["fidelity"]["lpips"]["mean"]
            gain = paired(psnr["values"], first) if name != "the preset" else ""
            cells = [f"{each['time']:.2f}", f"{psnr['mean']:.2f}", gain, f"{psnr['min']:.2f}", f"{lpips:.4f}"]
            lines.append([preset, name, each["schedule"] if set(each["schedule"]) != {"c"} else "", *cells])
    return markdown(("preset", "", "steps", "time", "PSNR, dB", "against the preset", "worst", "LPIPS"), lines)


def plot(found: Mapping[str, Mapping[str, dict]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(found), figsize=(4 * len(found), 4), sharey=True, squeeze=False)
    marks = {"precise": "o", "kept": "s", "saved": "^"}
    for axis, (preset, rows) in zip(axes[0], found.items(), strict=True):
        for word, mark in marks.items():
            chosen = [(each["time"], each["fidelity"]["psnr"]["mean"]) for name, each in rows.items() if word in name]
            axis.plot(*zip(*sorted(chosen), strict=True), mark, label=word)
        own = rows["the preset"]
        axis.plot(own["time"], own["fidelity"]["psnr"]["mean"], "k*", label="the preset")
        axis.set(title=preset, xlabel="nominal time, of 16 bits")
    axes[0][0].set_ylabel("PSNR, dB")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = image_parser(__doc__, prompts=REPORTED, out=HOME / "outputs/benchmarks/precision")
    parser.add_argument("--presets", nargs="+", default=PRESETS, metavar="NAME")
    parser.add_argument("--choice", type=Path, default=REPORTED.with_name("sdxl_mini.txt"), help="(%(default)s)")
    options = parser.parse_args()
    subject = open_subject(None, None, options.calib_size, options.model)
    reference, chosen_by = reference_of(subject, options), read_prompts(options.choice)[:CHOOSING]
    choice = replace(reference.sampling, seed=1)
    checkpoint, steps = subject.model.checkpoint, options.steps
    _, changes = changed_by(checkpoint, reference.parts, chosen_by[:4], choice, replacements(steps))
    saving = candidates(products_of(changes), steps, min(SAVED, most_saved(steps)))[0]
    found = {preset: rows_of_preset(subject, reference, saving, preset, options) for preset in options.presets}
    text = table(found)
    write_text(options.out / f"{options.model}.md", text)
    plot(found, options.out / f"{options.model}.png")
    print(text)


if __name__ == "__main__":
    main()
