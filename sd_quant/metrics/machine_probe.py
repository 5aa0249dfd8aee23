"""Probe the machine for a second: the bandwidth of a copy, and the rates of an INT8 and an fp32 matrix product.

Other virtual machines on the same host take memory bandwidth, caches and frequency. Processor times do not show this
(``neighbours.py``); the speed of fixed work does. The copied buffer is far larger than the caches, and the matrices fit
into them. Alternative not taken: STREAM and LINPACK, which take longer than the measurement that they would check.
"""

import statistics
from time import perf_counter

import torch

from sd_quant.metrics.latency import Call, clock_of
from sd_quant.metrics.neighbours import Reading

SECONDS = 0.3  # of each figure
COPIED = 2**27  # bytes
SIDE = {"cpu": 512, "cuda": 4096}  # of the matrices


def probe(device: torch.device) -> Reading:
    """Measure bandwidth and rates of ``device`` now, with torch's number of threads, which engines use, too."""
    side = SIDE[device.type]
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    int8, fp32 = (torch.ones(side, side, dtype=dtype, device=device) for dtype in (torch.int8, torch.float32))
    return {
        f"{device.type}_copy_gb_per_second": rate(2 * COPIED / 1e9, lambda: target.copy_(source), device),
        f"{device.type}_int8_tops": rate(2 * side**3 / 1e12, lambda: torch._int_mm(int8, int8), device),
        f"{device.type}_fp32_tflops": rate(2 * side**3 / 1e12, lambda: torch.mm(fp32, fp32), device),
    }


def rate(amount: float, call: Call, device: torch.device) -> float | None:
    """Return ``amount`` per second, by the median time of ``call``; None where this version of torch cannot run it."""
    clock, times = clock_of(device), list[float]()
    try:
        call()  # starts threads and touches memory
    except (AttributeError, RuntimeError):
        return None
    end = perf_counter() + SECONDS
    while not times or perf_counter() < end:
        times.append(clock(call))
    return 1000 * amount / statistics.median(times)
