"""Choose torch's device, the current GPU or else the CPU, and the number of threads.

Alternative not taken: a knob. CUDA_VISIBLE_DEVICES hides a GPU from everything that a job starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sd_quant.process import cores

CPU = torch.device("cpu")


def best_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def threads() -> int:
    """Return the number of CPU threads for torch and all other runtimes: torch's own, at most the available cores.

    OpenVINO and ONNX Runtime follow neither OMP_NUM_THREADS nor the container, so torch would have fewer than they.
    """
    return max(1, min(torch.get_num_threads(), cores()))


@contextmanager
def full_precision() -> Iterator[torch.device]:
    """Yield ``best_device()`` with TF32 off: with its ten bits SSIM, a small difference, would vary by machine."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield best_device()
