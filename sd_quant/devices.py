"""Where torch computes, the current GPU or the processor where there is none, and with how many threads.

The road not taken is a knob for it: whoever wants the processor on a machine with a GPU hides the GPU, with
CUDA_VISIBLE_DEVICES, from all that a job starts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sd_quant.process import cores

CPU = torch.device("cpu")
_lent = 0  # how many of torch's threads stand still for others


def best_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def threads() -> int:
    """With how many threads torch and every other runtime compute on the processor, so that all have the same.

    As many as torch takes, with those that it shares. It heeds OMP_NUM_THREADS and takes no two for a core, within what
    a container has. Left to themselves, OpenVINO and ONNX Runtime heed neither, and were compared with torch on fewer
    cores than they had.
    """
    return max(1, min(torch.get_num_threads() + _lent, cores()))


@contextmanager
def sharing(others: Callable[[], int]) -> Iterator[Callable[[], None]]:
    """In the block torch leaves a core to each of so many others that compute; what the block gets asks how many again.

    Its threads wait for each other without sleeping, so with one thread too many all of them lose their time.
    """
    global _lent
    before, lent = torch.get_num_threads(), _lent

    def look() -> None:
        global _lent
        torch.set_num_threads(max(1, before - others()))
        _lent = lent + before - torch.get_num_threads()

    look()
    try:
        yield look
    finally:
        torch.set_num_threads(before)
        _lent = lent


@contextmanager
def full_precision() -> Iterator[torch.device]:
    """``best_device()``, computing fp32 in fp32: left to itself, a GPU convolves in TF32, with ten bits of mantissa.

    SSIM subtracts squares that are nearly equal, so it would be a number of the machine and not of the pictures.
    """
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield best_device()
