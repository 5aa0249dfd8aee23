"""Rounds of engines that were timed together, as a sweep's folder holds them."""

QUIET = {"together": True, "stopped": "narrow", "others": 0.0, "steal": 0.0, "reference_spread": 0.05}


def timing(jobs: dict[str, float], **changes) -> dict:
    """One block: each job's denoiser is so many times as fast as the unquantized one, which takes 20 ms."""
    wobble = [1 + 0.001 * (index % 7 - 3) for index in range(40)]
    block = {
        "engine": "openvino", "rest": 0.5, "image_ms": 60.0, "seconds": 3.0, "rounds": QUIET,
        "reference_ms": [20.0 * each for each in wobble],
        "subjects": [
            {"sha256": name, "jobs": [name], "samples_ms": [20.0 / ratio * each for each in reversed(wobble)]}
            for name, ratio in jobs.items()
        ],
    }  # fmt: skip
    known = {"schema_version": 1, "origin": "x", "machine": "this one", "left_out": []}
    return known | {"blocks": [block | changes]}
