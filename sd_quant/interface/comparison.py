"""Recipes of one model side by side: their images, scores and bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_quant.errors import ConfigError
from sd_quant.interface.given import UNUSED, with_prompts
from sd_quant.interface.quantized import Quantized
from sd_quant.metrics import SCORES
from sd_quant.metrics.fidelity import fidelity
from sd_quant.metrics.images import Images
from sd_quant.metrics.intervals import Interval, exactly
from sd_quant.places import output_path
from sd_quant.report.images import comparison_grid
from sd_quant.report.summary import interval_columns
from sd_quant.report.table import plus_minus
from sd_quant.stages.generate import sampling_of
from sd_quant.text import counted


@dataclass(frozen=True, repr=False)
class Result:
    """One recipe's images and their scores against full precision."""

    quantized: Quantized
    images: Images  # uint8 [images, height, width, 3], or a list where their sizes differ
    scores: Mapping[str, Any]  # against full precision, as ``fidelity`` in metrics.json: psnr, ssim, lpips, ...

    def __repr__(self) -> str:
        return f"Result({self.quantized.label}: {self.psnr.value:.2f} dB)"

    @property
    def psnr(self) -> Interval:
        """Mean PSNR of the images in dB with a 95 % interval (Student's t over images), without identical images.

        The mean is infinite if all images are identical; the interval's ends are infinite for a single image.
        """
        return SCORES["psnr"].mean(self.scores["psnr"]["values"]) or exactly(float("inf"))

    def row(self) -> dict[str, object]:
        """Return a table row: label, megabytes of the denoiser's weights, their share of fp16, and the mean scores.

        PSNR in dB has the ends of its 95 % interval, None where they are not finite, as for a single image.
        """
        return {
            "recipe": self.quantized.label,
            "megabytes": self.quantized.weight_bytes / 1e6,
            "share_of_fp16": self.quantized.share,
            "psnr_db": self.psnr.value,
            **interval_columns("psnr_db", self.psnr),
            "ssim": self.scores["ssim"]["mean"],
            "lpips": self.scores["lpips"]["mean"],
        }


@dataclass(frozen=True, repr=False)
class Comparison:
    """Images and scores of several recipes on the same prompts and seeds, made by ``sd_quant.compare``."""

    prompts: list[str]
    full_precision: Images  # uint8 [images, height, width, 3], or a list where their sizes differ
    results: list[Result]

    def __repr__(self) -> str:
        recipes = "; ".join(result.quantized.label for result in self.results)
        return f"Comparison({recipes}; {counted(len(self.prompts), 'prompt')})"

    def rows(self) -> list[dict[str, object]]:
        """Return one row per recipe, see ``Result.row``, for pandas or a CSV writer."""
        return [result.row() for result in self.results]

    def grid(self, path: str | Path, number: int = -1) -> Path:
        """Draw the full-precision images above those of ``results[number]`` into the PNG ``path``. Return its path."""
        images, label = self.results[number].images, self.results[number].quantized.label
        return comparison_grid(self.full_precision, images, output_path(path), self.prompts, label)

    def __str__(self) -> str:
        lines = [f"{'recipe':40} {'MB':>9} {'of fp16':>8} {'PSNR, dB':>15} {'SSIM':>7} {'LPIPS':>7}"]
        for result in self.results:
            row, psnr = result.row(), plus_minus(result.psnr, "{:.2f}")
            sizes = f"{row['recipe']:40} {row['megabytes']:9.2f} {row['share_of_fp16']:8.3f}"
            lines.append(f"{sizes} {psnr:>15} {row['ssim']:7.4f} {row['lpips']:7.4f}")
        return "\n".join(lines)


def compare(quantized: Sequence[Quantized], prompts: str | Sequence[str] | None, **knobs: object) -> Comparison:
    """Generate images with several recipes of one model and in full precision, and score how far apart they are.

    Args:
        quantized: recipes of one ``Model``.
        prompts: one or more texts that say what the images show; a useful interval takes some dozens. None with the
            knob ``table``, a file with the arguments of a pipeline's calls.
        knobs: of the section ``infer``: ``steps``, ``scale``, ``seed``, ``batch_size``, ``width``, ``height``,
            ``sizes``, ``negative_prompt``, ``latents``.

    Raises:
        ConfigError: no recipe, recipes of several models, an unknown or invalid knob, or images that the checkpoint
            cannot make.
        ResourceError: memory or the GPU is too small.
    """
    models = {id(each.model): each.model for each in quantized}
    if len(models) != 1:
        raise ConfigError(f"recipes of {len(models)} models were given, expected some of one model")
    (model,) = models.values()
    full = model.generate(prompts, knobs, sampling=sampling_of)
    results = []
    for each in quantized:
        made = model.generate(prompts, knobs, each.assignments)
        results.append(Result(each, made.images, fidelity(full.images, made.images, full.latents, made.latents)))
    texts = model.job(None, UNUSED, with_prompts(prompts, knobs)).infer.prompt_list()  # one for each image
    return Comparison(texts, full.images, results)
