"""Image scores of exported files, computed as their consumers (the tools that load them) do, against full precision.

Each exported file is read back by the reader of its format, and images are made from the weights it returns.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from sd_quant.config import Infer
from sd_quant.engines.pool import Variant
from sd_quant.engines.torch import TorchEngine
from sd_quant.inference.loading import pipeline_of
from sd_quant.interchange import ForeignFormat
from sd_quant.interchange.denoiser import with_denoiser
from sd_quant.metrics.fidelity import image_scores
from sd_quant.metrics.images import Images
from sd_quant.models.checkpoint import Checkpoint, denoiser_of, denoiser_part, in_place
from sd_quant.report.record import ImageScores
from sd_quant.stages.generate import generate, sampling_of
from sd_quant.stages.open_parts import open_changed, open_torch
from sd_quant.stages.resources import by_torch, workload_of
from sd_quant.stages.session import Session
from sd_quant.stages.targets import Assignments, Rows

Scores = dict[str, ImageScores]  # by name
# (target, assignments, paths by part from ``write_folder``) -> scores
Measure = Callable[[ForeignFormat, Assignments, Mapping[str, Path]], Scores]


def measured_by(loaded: Session, infer: Infer, reference: Images) -> Measure:
    """Return a function that scores an exported result against ``reference``, full-precision images of ``infer``.

    The result is scored with the full text, as in ``judge``, also if its consumer cuts the text.
    """
    checkpoint = loaded.checkpoint

    def measure(target: ForeignFormat, held: Assignments, result: Mapping[str, Path]) -> Scores:
        opened = {
            part: partial(open_consumed, in_place(checkpoint, part), held[part], target, path)
            for part, path in result.items()
        }
        return fidelity_of(loaded, infer, reference, opened, target.name)

    return measure


def fidelity_of(
    session: Session, infer: Infer, reference: Images, opened: Mapping[str, Callable[[], TorchEngine]], label: str
) -> Scores:
    """Score (PSNR, SSIM, LPIPS) images made with the parts ``opened`` and, for the rest, the checkpoint's parts."""

    def open_engine(part: str) -> TorchEngine:
        return opened[part]() if part in opened else open_torch(session.checkpoint, infer, part)

    pool = session.engines(open_engine, session.together(by_torch(workload_of(infer))))
    try:
        pipeline = pipeline_of(session.checkpoint, Variant(pool, {part: part for part in (*session.parts, *opened)}))
        return image_scores(reference, generate(pipeline, infer.prompt_list(), sampling_of(infer), label).images)
    finally:
        pool.close()


def open_consumed(checkpoint: Checkpoint, rows: Rows, target: ForeignFormat, result: Path) -> TorchEngine:
    """Open an exported denoiser, computed as by its consumer (a graph: simulated)."""
    if target.runtime is None:
        denoiser = target.module.read(result, checkpoint)
        return open_changed(checkpoint, lambda module: with_denoiser(module, checkpoint, denoiser))
    from sd_quant.interchange.exported_parts import simulate_graph

    weights = denoiser_part(checkpoint).contract.weights
    return open_changed(checkpoint, lambda module: simulate_graph(denoiser_of(checkpoint, module), rows, weights))
