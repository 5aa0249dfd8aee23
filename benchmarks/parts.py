"""What each part's quantization costs the image, alone and together: text encoders, autoencoder and denoiser.

    python benchmarks/parts.py --model sdxl_mini
    python benchmarks/parts.py --model sd3_mini

Torch simulates every row, so that all of its error is that of quantization. The distance of two engines in full
precision is in the record of a run (``fidelity_unquantized_engine``). Prompts are those on which results are reported;
all parts are calibrated on the model's own. A preset that does not fit a part is left out there. A text encoder changes
an image as another prompt would, so the table also has the cosine between its tokens in both precisions.
"""

from collections.abc import Mapping
from typing import Any

from common import cells_of, image_parser, report
from measurer import markdown

import sd_quant
from sd_quant.calibration.prompts import read_prompts
from sd_quant.config.recipe import part_recipe
from sd_quant.engines.base import Engine
from sd_quant.errors import ConfigError
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.watched import WatchedVariant
from sd_quant.metrics.embeddings import moved
from sd_quant.metrics.fidelity import fidelity
from sd_quant.models.parts import exported
from sd_quant.quantization.budget import assigned_bytes
from sd_quant.stages.assign import assign_parts
from sd_quant.stages.generate import generate, sampling_of
from sd_quant.stages.load import with_recipe
from sd_quant.stages.variants import Assignments, Simulated, open_engine

PRESETS = ("int8_weight_only", "int8", "int8_dynamic", "svdquant_w4a16")


def tokens_of(cosines: Mapping[str, Mapping[str, Any]]) -> str:
    """The smallest cosine of a token, and the mean, over a part's outputs."""
    found = [each for each in cosines.values() if "cosine" in each]
    return f"{min(each['cosine'] for each in found):.5f}, {min(each['worst'] for each in found):.5f}" if found else ""


def main() -> None:
    parser = image_parser(__doc__, images=32, calib_size=None)  # the model's own prompts
    parser.add_argument("--quantize", default="int8", help="preset of the denoiser, at level 3 (%(default)s)")
    parser.add_argument("--presets", nargs="+", default=PRESETS, help="of the other parts (%(default)s)")
    chosen = parser.parse_args()
    model, prompts = sd_quant.open(chosen.model), read_prompts(chosen.prompts)[: chosen.images]
    checkpoint, denoiser = model.session.checkpoint, model.session.denoiser
    others = [part for part in exported(model.session.parts) if part != denoiser]
    needing = [preset for preset in chosen.presets if part_recipe(preset).needs_inputs]  # type: ignore[union-attr]
    knobs: dict[str, Any] = {} if chosen.calib_size is None else {"calib_size": chosen.calib_size}
    statistics = model.calibrate(**knobs, parts=dict.fromkeys(others, needing[0]) if needing else None)
    of_denoiser = {denoiser: model.quantize(statistics, chosen.quantize, quant_level=3).assignment}
    rows: dict[str, Assignments] = {f"{denoiser} {chosen.quantize}": of_denoiser}
    for preset in chosen.presets:
        of_parts: dict[str, Any] = {}
        for part in others:
            try:
                job = model.job(chosen.quantize, {"quant_level": 3, "parts": {part: preset}})
                loaded = with_recipe(model.session, job.model, job.infer, job.quantize)
            except ConfigError as error:
                print(error)
                continue
            of_parts |= assign_parts(loaded, statistics.parts)
        rows |= {f"{part} {preset}": {part: of_parts[part]} for part in of_parts}
        rows[f"all of these {preset}"] = of_parts
        rows[f"{denoiser} {chosen.quantize}, the others {preset}"] = of_denoiser | of_parts

    def engines(assignments: Assignments) -> dict[str, Engine]:
        keys: dict[str, Any] = {part: Simulated(part) if part in assignments else part for part in model.session.parts}
        return {part: open_engine(checkpoint, infer, assignments, key) for part, key in keys.items()}

    infer = model.job(None, {}, {"prompts": prompts, "steps": chosen.steps, "batch_size": chosen.batch}).infer
    watched = WatchedVariant(engines({}), {})
    full = generate(pipeline_of(checkpoint, watched), prompts, sampling_of(infer), "full precision")
    inputs = {part: calls[0] for part, calls in watched.seen.items() if part in others}
    outputs = {part: watched[part](**given) for part, given in inputs.items()}
    table = {}
    for name, assignments in rows.items():
        made = engines(assignments)
        images = generate(pipeline_of(checkpoint, made), prompts, sampling_of(infer), name)
        cosines = {
            part: {output: moved(outputs[part][output], found) for output, found in made[part](**given).items()}
            for part, given in inputs.items()
            if part in assignments
        }
        table[name] = fidelity(full.images, images.images, full.latents, images.latents), cosines
    figures, lines = {}, []
    for name, (found, cosines) in table.items():
        assignments = rows.get(name, {})
        size = sum(assigned_bytes(count, assignments.get(part, {})) for part, count in model.parameters.items())
        share = size / sum(2 * count for count in model.parameters.values())
        tokens = "; ".join(filter(None, map(tokens_of, cosines.values())))
        lines.append([name, *cells_of(found), tokens, f"{size / 1e6:.2f}", f"{share:.3f}"])
        figures[name] = {"fidelity": found, "outputs": cosines, "bytes": size}
    print(markdown(["quantized", "PSNR, dB", "worst", "LPIPS", "cosine of tokens", "MB", "of fp16"], lines))
    report(chosen, figures)


if __name__ == "__main__":
    main()
