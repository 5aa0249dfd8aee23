"""The GPU of this machine, without importing torch where there is none."""

import ctypes

DRIVER = "libcuda.so.1"  # NVIDIA's, which every machine with a usable GPU has


def current_gpu() -> str | None:
    """The compute capability of the GPU that torch uses, such as SM89, or None."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return None
    import torch  # takes a second

    return "SM{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
