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

    OpenVINO and ONNX Runtime ignore OMP_NUM_THREADS and the container's CPU quota, so they would use more than torch.
    """
    return max(1, min(torch.get_num_threads(), cores()))


@contextmanager
def full_precision() -> Iterator[torch.device]:
    """Yield ``best_device()`` with TF32 off, whose 10-bit mantissa would make metrics such as SSIM vary by machine."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield best_device()
