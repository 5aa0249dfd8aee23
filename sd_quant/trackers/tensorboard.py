"""TensorBoard tracker: ``tensorboard --logdir <store>/tensorboard`` shows the runs, its HPARAMS tab compares knobs.

Written by ``torch.utils.tensorboard``. ``add_hparams`` would write knobs and metrics as a separate run;
``run_name="."`` keeps them in this run. Alternative not taken: a text panel of the knobs, which cannot be sorted.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from sd_quant.trackers import Run


def log(run: Run, store: Path) -> None:
    """Write events to ``store/tensorboard/<run>``. Raises ImportError without TensorBoard, OSError if writing fails."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(store / "tensorboard" / run.name) as writer:
        writer.add_hparams(run.knobs, run.metrics, run_name=".")
        for name, values in run.series.items():
            for step, value in enumerate(values, start=1):
                if value is not None:
                    writer.add_scalar(name, value, step)
        if run.image:
            with Image.open(run.image) as image:
                writer.add_image(
                    "/".join((run.image.parent.name, run.image.stem)),
                    np.asarray(image.convert("RGB")),
                    dataformats="HWC",
                )
