"""Where torch computes: the current GPU, or the processor where there is none.

The road not taken is a knob for it: whoever wants the processor on a machine with a GPU hides the GPU, with
CUDA_VISIBLE_DEVICES, from all that a job starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

CPU = torch.device("cpu")


def best_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


@contextmanager
def full_precision() -> Iterator[torch.device]:
    """``best_device()``, computing fp32 in fp32: left to itself, a GPU convolves in TF32, with ten bits of mantissa.

    SSIM subtracts squares that are nearly equal, so it would be a number of the machine and not of the pictures.
    """
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield best_device()
