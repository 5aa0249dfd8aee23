"""What a record and a sweep's plan look like, as far as they are read: they come from strangers too.

The road not taken is a check at every place that reads one: a number that is none would be found by the last of them,
half way through a page.
"""

from typing import Any

from sd_quant.text import one_line

# What of a record is read in a summary, a table, a plot or a page. A list has one kind of entries, "*" is any other
# name, ``float`` is a number and PASSED one that something is divided by; what is not named may be anything.
PASSED = "a number above 0"
NOTED = {"value": float, "reason": str}  # in place of a number that does not exist
MEASURED = {"reason": str, "p50_ms": PASSED}
SCORED = {"mean": float, "min": float, "max": float, "values": [float], "reason": str}
RECORD_SHAPE: dict[str, Any] = {
    "status": str,
    "reason": str,
    "overrides": [object],
    "prompts": [object],
    "knobs": {"model": {"path": object}, "infer": {"engine": str, "batch_size": float}},
    "denoiser": {"part": str, "samples_a_picture": float},
    "sizes_bytes": {"reason": str, "*": {"reason": str, "*": (float, NOTED)}},
    "plans": {"*": {"targets": [str]}},
    "latency": {"reason": str, "*": {"reason": str, "*": {"reason": str, "*": {
        "reason": str, "full_precision": MEASURED, "quantized": MEASURED, "speedup": (PASSED, NOTED),
    }}}},
    "fidelity": {
        "psnr": SCORED, "ssim": SCORED, "lpips": SCORED, "latent_sqnr_db": [float], "latent_sqnr_reason": str,
        "frechet_efficientnet": NOTED,
    },
    "layers": {"quantized": float},
    "stages": {"*": {"seconds": float}},
    "peak_memory_bytes": (float, NOTED),
    "environment": {
        "versions": {"*": str},
        "machine": {"cpu": str, "usable_cores": float, "cpu_int8": [str], "memory_bytes": float, "gpus": [str]},
    },
}  # fmt: skip
PLAN_SHAPE = {"command": [object], "varied": [str], "jobs": [{"name": str, "varied": {}}], "published": {}}
LARGEST = 1e18  # of a record's numbers, in any unit: a table has no place for more


def why(error: Exception) -> str:
    """One line, whatever the file holds."""
    return one_line(f"{type(error).__name__}: {error}", 300)


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Raises ValueError when a value that is not null is of another shape: records come from strangers too."""
    if value is None or shape is object:
        return
    if isinstance(shape, tuple):
        shape = shape[isinstance(value, dict)]
    if isinstance(shape, dict):
        fits = isinstance(value, dict)
    elif isinstance(shape, list):
        fits = isinstance(value, list) and (shape[0] in (float, object) or None not in value)
    elif shape is str:
        fits = isinstance(value, str)
    else:
        fits = type(value) in (int, float) and abs(value) < LARGEST and (shape is float or value > 1 / LARGEST)
    if not fits:
        raise ValueError(f"{where[-200:]} is {one_line(value, 100)}")
    if isinstance(shape, list):
        for each in value:
            check_shape(each, shape[0], f"{where}[]")
    elif isinstance(shape, dict):
        for name, each in value.items():
            check_shape(each, shape.get(name, shape.get("*", object)), f"{where}.{name}")
