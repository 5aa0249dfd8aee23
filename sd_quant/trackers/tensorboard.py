"""TensorBoard: ``tensorboard --logdir <store>/tensorboard`` shows the runs, HPARAMS compares their knobs.

Through torch's own writer. It would put knobs and metrics into a run of their own beside this one; ``run_name="."``
keeps them here. The road not taken is a text panel of the knobs: nothing can be sorted by it.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from sd_quant.trackers import Run


def log(run: Run, store: Path) -> None:
    """Write event files into ``store/tensorboard/<run>``. Raises ImportError and OSError."""
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
