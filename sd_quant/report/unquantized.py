"""The unquantized engine as a row beside the recipes, which are measured against it."""

import statistics
from collections.abc import Iterable

from sd_quant.metrics import SCORES
from sd_quant.report.readings import interval_of
from sd_quant.report.recommendation import UNQUANTIZED
from sd_quant.report.record import DONE, at
from sd_quant.report.summary import Row, Sweep, interval_columns, scores_of


def unquantized_row(sweep: Sweep) -> Row | None:
    """Medians of what the jobs measured of it, and its images against full precision's.

    None without a finished job, and where jobs are of several checkpoints or machines, which have no engine in common.
    """
    own = {job.name for job in sweep.own}
    table = [row for row in sweep.rows if row["job"] in own and row["status"] == DONE]
    if len({(row["checkpoint"], row["timed_on"]) for row in table}) != 1:
        return None
    of_jobs = (at(job.record, "fidelity_unquantized_engine") for job in sweep.own)
    images = {"fidelity": next(filter(None, of_jobs), None)}
    denoiser_ms, image_ms, size = (
        median(row[f"{column}_full_precision_{unit}"] for row in table)
        for column, unit in (("denoiser", "ms"), ("image", "ms"), ("denoiser_onnx", "bytes"))
    )
    bytes_of_a_bit = median(row["denoiser_bits"] and row["denoiser_bytes"] / row["denoiser_bits"] for row in table)
    return dict.fromkeys(table[0]) | {
        "job": UNQUANTIZED,
        "status": DONE,
        **scores_of(images),
        **interval_columns("psnr_db", interval_of(images, SCORES["psnr"])),
        "denoiser_ms": denoiser_ms,
        "image_ms": image_ms,
        "denoiser_speedup": denoiser_ms and 1.0,
        **dict.fromkeys(("image_speedup", "image_relative_time"), image_ms and 1.0),
        "run_by": next((row["run_by"] for row in table if row["run_by"] != "simulation"), None),
        "denoiser_bytes": size,
        "denoiser_bits": size / bytes_of_a_bit if size and bytes_of_a_bit else None,
    }


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
