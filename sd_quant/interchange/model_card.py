"""The README of a result: facts, what is lost, distance from full precision, and how to open the result."""

import shlex
from collections.abc import Mapping
from typing import Any

from sd_quant.interchange import AS_ASSIGNED, ForeignFormat
from sd_quant.metrics import SCORES
from sd_quant.models import EXPORTED


def model_card(figures: Mapping[str, Any], target: ForeignFormat) -> str:
    """Return the README in Markdown; ``figures`` are the content of hand_over.json."""
    knobs = ", ".join(f"{name} {value}" for name, value in figures["knobs"].items() if value is not None)
    inputs = "; ".join(
        f"{name} with inputs {'as the recipe quantizes them' if how == AS_ASSIGNED else how}"
        for name, how in figures["inputs"].items()
    )
    counted = [("", figures), *((f" of {name}", part) for name, part in figures["parts"].items())]
    lost = [f"- {n}{of} in high precision: {reason}" for of, each in counted for reason, n in each["lost"].items()]
    lost += [f"- {what}" for what in figures["left_out"]]
    tried = [*([f"Tried with {', '.join(target.tried)}."] if target.tried else []), *filter(None, [target.untried])]
    return "\n".join([
        f"# {figures['part']} for {target.consumer}",
        "",
        f"Quantized by sd-quant: {knobs}.",
        f"{figures['quantized']} of {figures['of']} layers are in {inputs}; all else is in {figures['dtype']}.",
        *(
            f"Of {name}, {part['quantized']} of {part['of']} layers are quantized."
            for name, part in figures["parts"].items()
        ),
        "",
        f"Licence: {figures['licence'] or 'that of the checkpoint it was made of, which names none'}.",
        *(
            f"The LoRA {name} is fused into the weights; its licence: {licence or 'it names none'}."
            for name, licence in figures["loras"].items()
        ),
        "",
        "## How to open it",
        "",
        *opening(figures, target),
        "",
        *([" ".join(tried), ""] if tried else []),
        *traps_of(figures, target),
        "## How the checkpoint samples",
        "",
        *(f"- {each}" for each in figures["sampling"]),
        "",
        "## What it computes, against full precision",
        "",
        *fidelity_lines(figures["fidelity"]),
        "",
        "## What of the recipe is not in it",
        "",
        *(lost or ["Nothing."]),
        "",
        "## How it was made",
        "",
        *(f"    {line}" for line in figures["command"].splitlines()),
        "",
        ", ".join(f"{name} {version}" for name, version in figures["versions"].items() if version),
        "",
        "| file | MB |",
        "|---|---|",
        *(f"| {name} | {size / 1e6:.1f} |" for name, size in figures["bytes"].items()),
        "",
    ])  # fmt: skip


def opening(figures: Mapping[str, Any], target: ForeignFormat) -> list[str]:
    """Return the steps by which a person opens the result, the consumer's code for it, or servers' commands."""
    if target.servers:
        return serving(figures, target)
    if not isinstance(target.loading, str):
        encoders = [
            target.encoder.format(component=component)
            for part, component in figures["components"].items()
            if figures["parts"][part]["quantized"]
        ]
        steps = [*target.loading[figures["family"]], *encoders]
        return [f"{number}. {step}" for number, step in enumerate(steps, 1)]
    absent = "".join(f", {name}=None" for name in figures["absent"])
    folder = figures["folder"].rpartition("/")[2]
    code = target.loading.format(
        folder=folder,
        absent=absent,
        component=figures["component"],
        network=figures["network"],
        dtype=EXPORTED[figures["dtype"]],
    )
    install = [f"    {shlex.join(['pip', 'install', *target.tried])}", ""] if target.tried else []
    also = ["", target.also.format(folder=folder)] if target.also else []
    return [*install, "```python", code, "```", *also]


def traps_of(figures: Mapping[str, Any], target: ForeignFormat) -> list[str]:
    """Return a list of known problems with the formats in the result, and with its weights if smoothed."""
    found = [trap for name in ("", *figures["inputs"]) for trap in target.traps.get(name, ())]
    if figures["knobs"].get("smoothing", "none") != "none":
        found.append("Fuse a LoRA before, with `model.loras`: it does not fit weights that are smoothed, as these are.")
    return [*(f"- {trap}" for trap in found), ""] if found else []


def serving(figures: Mapping[str, Any], target: ForeignFormat) -> list[str]:
    """Return each server's command for the result, or why the server does not load it."""
    lines = [
        "No server has run with it: their source was read, and without a GPU the loaders of SGLang and vLLM-Omni have "
        "taken every tensor of such folders of Flux."
    ]
    for name, reason in figures["servers"].items():
        server = target.servers[name]
        if reason is not None:
            lines += ["", f"{name} {server.version} does not load it: {reason}."]
            continue
        gpus = " and ".join(dict.fromkeys(server.gpus[fmt] for fmt in figures["inputs"]))
        command = server.command.format(folder=figures["folder"].rpartition("/")[2], component=figures["component"])
        lines += ["", f"{name} {server.version}, on a GPU of {gpus}:", "", f"    {command}"]
    return lines


def fidelity_lines(scores: Mapping[str, Mapping] | None) -> list[str]:
    """Return a table of mean scores with intervals."""
    if scores is None:
        return ["No images were made of it."]
    lines = [
        "Images of this file, simulated in torch, from the text of full precision.",
        "",
        "| score | mean of the images | 95 % interval |",
        "|---|---|---|",
    ]
    for key, entry in scores.items():
        if interval := SCORES[key].mean(entry["values"]):
            ends = f"{interval.low:.4g} to {interval.high:.4g}" if interval.known else "unknown, of one image"
            lines.append(f"| {key} | {interval.value:.4g} | {ends} |")
    return lines
