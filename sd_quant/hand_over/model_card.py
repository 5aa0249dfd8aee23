"""The README of a result: what it is, what it lost, how far it is from full precision, and how to open it."""

from collections.abc import Mapping
from typing import Any

from sd_quant.hand_over import AS_ASSIGNED, Target
from sd_quant.metrics.intervals import mean_interval


def model_card(figures: Mapping[str, Any], target: Target) -> str:
    """Markdown of the ``figures``, the content of hand_over.json."""
    knobs = ", ".join(f"{name} {value}" for name, value in figures["knobs"].items() if value is not None)
    inputs = "; ".join(
        f"{name} with inputs {'as the recipe quantizes them' if how == AS_ASSIGNED else how}"
        for name, how in figures["inputs"].items()
    )
    lost = [f"- {count} in high precision: {reason}" for reason, count in figures["lost"].items()]
    lost += [f"- {what}" for what in figures["left_out"]]
    absent = "".join(f", {name}=None" for name in figures["absent"])
    code = target.loading.format(folder=figures["folder"].rpartition("/")[2], absent=absent)
    packages = [] if code.startswith("#") else [f"# pip install {' '.join(target.tried)}"]
    return "\n".join([
        f"# {figures['part']} for {target.consumer}",
        "",
        f"Quantized by sd-quant: {knobs}.",
        f"{figures['quantized']} of {figures['of']} layers are in {inputs}; all else is in fp16.",
        "",
        f"Licence: {figures['licence'] or 'that of the checkpoint it was made of, which names none'}.",
        *(
            f"The LoRA {name} is fused into the weights; its licence: {licence or 'it names none'}."
            for name, licence in figures["loras"].items()
        ),
        "",
        "## How to open it",
        "",
        "```python",
        *packages,
        code,
        "```",
        "",
        f"Tried with {', '.join(target.tried)}.",
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
        f"    {figures['command']}",
        "",
        ", ".join(f"{name} {version}" for name, version in figures["versions"].items() if version),
        "",
        "| file | MB |",
        "|---|---|",
        *(f"| {name} | {size / 1e6:.1f} |" for name, size in figures["bytes"].items()),
        "",
    ])  # fmt: skip


def fidelity_lines(fidelity: Mapping | None) -> list[str]:
    """A table of the scores' means over images with their intervals."""
    if fidelity is None:
        return ["No images were made of it (`images=false`)."]
    lines = ["| score | mean of the images | 95 % interval |", "|---|---|---|"]
    for key, entry in fidelity.items():
        values = [value for value in entry["values"] if value is not None]
        if values:
            interval = mean_interval(values)
            lines.append(f"| {key} | {interval.value:.4g} | {interval.low:.4g} to {interval.high:.4g} |")
    return [*lines, "", "These are images of what the consumer computes of this file, simulated, not those of the run."]
