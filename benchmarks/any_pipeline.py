"""``python -m benchmarks.any_pipeline [CLASS ...]``: what works for a tiny random pipeline of every class of diffusers.

Each pipeline is written as a folder and opened as ``model=diffusers``, by observation alone. A row says how far it got:
observed; calibrated, with INT8 in simulation; exported, with the rung of the ladder that its denoiser takes; executed
in ONNX Runtime and OpenVINO in the networks' place, with images as torch's; the INT8 graph executed; a TensorRT plan
built. Rows are kept in a folder, and those that are there are not made again.
"""

import argparse
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sd_quant
from benchmarks.measurer import markdown
from sd_quant.composition import job_with
from sd_quant.config import artifact
from sd_quant.engines import load_engine
from sd_quant.engines.pool import Pool, Variant
from sd_quant.errors import SdQuantError
from sd_quant.export.parts import trace_part, write_part
from sd_quant.files import write_json, write_text
from sd_quant.files.images import with_images
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.parts import exported
from sd_quant.observed import observing
from sd_quant.observed.checkpoint import ObservedCheckpoint, why_refused
from sd_quant.observed.ladder import climb
from sd_quant.observed.part import Rung
from sd_quant.stages.open_parts import open_torch
from tests.zoo import CASES, Case, write

PROMPTS = ["a red bicycle in the rain", "a blue door"]
STEPS, GUIDANCE = 2, 5.0
SMALLEST = 64  # pixels along a side, for which metrics of images are defined
EQUAL = 1e-4  # largest error of final latents, of their norm, and of images, of the largest value
COLUMNS = ("observed", "simulated", "exported", "onnxruntime", "openvino", "int8", "plan")
LIBRARY, GPU = "tensorrt_rtx", "SM89"


def only_denoisers(build: Any, calls: Any, weights: Any, *, method: str, dtype: torch.dtype, **options: Any) -> Rung:
    """``climb`` for denoisers, whose weights are exported in fp16; other networks stay with torch."""
    if dtype != torch.float16:
        return Rung("refused", method=method, cause="not tried, see --all")
    return climb(build, calls, weights, method=method, dtype=dtype, **options)


def nothing(build: Any, calls: Any, weights: Any, *, method: str, **options: Any) -> Rung:
    """``climb`` that exports no network."""
    return Rung("refused", method=method, cause="not tried, see --simulate")


def row_of(name: str, folder: Path) -> dict[str, Any]:
    """Everything that was found out about one pipeline, as JSON."""
    case, started = CASES[name], time.perf_counter()
    row: dict[str, Any] = {"pipeline": name}

    def step(what: str, do: Callable[[], Any]) -> Any:
        """Returns the result of ``do``, or None where it fails; the row says how it went."""
        begun = time.perf_counter()
        try:
            found = do()
        except (Exception, SystemExit) as error:  # a table of what works has a row for whatever does not
            kind = "" if isinstance(error, SdQuantError) else f"{type(error).__name__}: "
            row[what] = {"works": False, "because": f"{kind}{error}"[:400]}
            return None
        row[what] = {"works": True, **(found if isinstance(found, dict) else {})}
        row[what]["seconds"] = round(time.perf_counter() - begun, 1)
        return found

    path = folder / "pipeline"
    scale = 2 ** max(0, math.ceil(math.log2(SMALLEST / min(case.width, case.height))))
    width, height = scale * case.width, scale * case.height
    knobs: dict[str, Any] = {"width": width, "height": height}

    def observed() -> Any:
        write(name, path)
        knobs["arguments"] = stated(case, width, height, folder) or None
        return sd_quant.open("diffusers", path, **knobs)

    model = step("observed", observed)
    if model is None:
        return row
    checkpoint = model.session.checkpoint
    observation = checkpoint.observation
    parts = {
        part: {"rung": each.rung.name, "verified": {k: v.error for k, v in each.rung.verified.items()},
               "refused": each.rung.refused, "cause": each.rung.cause}
        for part, each in observation.parts.items()
    }  # fmt: skip
    row["observed"] |= {"parts": parts, "denoisers": list(observation.denoisers), "observing": observation.seconds}

    def simulated() -> dict[str, Any]:
        statistics = model.calibrate(PROMPTS[:2], n_steps=STEPS)
        quantized = model.quantize(statistics, "int8", quant_level=3)
        comparison = sd_quant.compare([quantized], PROMPTS, steps=STEPS)
        count = sum(row["format"] is not None for row in quantized.layers())
        row["quantized"] = quantized
        return {"psnr": round(comparison.results[0].psnr.value, 2), "layers": count}

    step("simulated", simulated)
    quantized = row.pop("quantized", None)
    denoiser = observation.parts[model.session.denoiser].rung
    row["exported"] = {"works": denoiser.cause is None, "rung": denoiser.name, "because": denoiser.cause}
    if denoiser.cause is not None:
        return row | {"seconds": round(time.perf_counter() - started, 1)}
    in_fp32 = with_weights(checkpoint, "float32")
    sampling = Sampling(STEPS, GUIDANCE, height, width, 1, 123)
    torch_run = step("torch", lambda: made(in_fp32, {}, None, sampling))
    if torch_run is None:
        return row | {"seconds": round(time.perf_counter() - started, 1)}
    for part in exported(in_fp32.parts()):
        write_part(trace_part(in_fp32, part), in_fp32, part, artifact(folder, "onnx", part), {})
    for runtime in ("onnxruntime", "openvino"):
        if runtime not in denoiser.verified:
            row[runtime] = {"works": False, "because": denoiser.refused.get(runtime)}
            continue
        served = [part for part in exported(in_fp32.parts()) if runtime in observation.parts[part].rung.verified]
        files = {part: artifact(folder, "onnx", part) for part in served}
        step(runtime, lambda files=files, runtime=runtime: compared(torch_run, made(in_fp32, files, runtime, sampling)))
    if quantized is not None:

        def int8() -> dict[str, Any]:
            quantized.export(folder / "int8")
            file = {model.session.denoiser: artifact(folder / "int8", "onnx", model.session.denoiser)}
            run = made(checkpoint, file, next(iter(denoiser.verified)), sampling)
            return {"psnr": psnr(torch_run.images, run.images)}

        if because := why_refused(denoiser):
            row["int8"] = {"works": False, "because": because}
        else:
            step("int8", int8)
            step("plan", lambda: plan_of(artifact(folder / "int8", "onnx", model.session.denoiser), width, height))
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def stated(case: Case, width: int, height: int, folder: Path) -> dict[str, Any]:
    """The arguments of a case's call as ``model.arguments`` has them: images are files, which are written."""
    files = (folder / f"{number}.png" for number in count())

    def file(image: Any) -> str:
        image.save(path := next(files))
        return str(path)

    drawn = case.drawn(width, height)
    return {**case.arguments, **{name: with_images(value, file) for name, value in drawn.items()}}


def with_weights(checkpoint: ObservedCheckpoint, dtype: str) -> ObservedCheckpoint:
    """The checkpoint whose denoisers are exported with weights of this dtype."""
    observed = checkpoint.observation
    parts = {
        name: replace(part, rung=replace(part.rung, weights=dtype, notes=())) for name, part in observed.parts.items()
    }
    return replace(checkpoint, observation=replace(observed, parts=parts))


def made(checkpoint: ObservedCheckpoint, files: Mapping[str, Path], runtime: str | None, sampling: Sampling) -> Any:
    """Images with the engines of these files, and with torch for other parts."""
    infer = job_with({"model": "sdxl_mini"}, {}).infer

    def opened(part: str) -> Any:
        return load_engine(runtime, files[part]) if part in files else open_torch(checkpoint, infer, part)

    engines = Variant(Pool(opened), {part: part for part in checkpoint.parts()})
    return pipeline_of(checkpoint, engines)(PROMPTS, sampling)


def compared(expected: Any, found: Any) -> dict[str, Any]:
    """The error of final latents and of images. Raises SdQuantError for one that is too large."""
    last = [torch.as_tensor(each.latents)[:, -1].double() for each in (expected, found)]
    latents = float((last[0] - last[1]).norm() / last[0].norm())
    pixels = float(np.abs(expected.images.astype(int) - found.images.astype(int)).max())
    if not latents <= EQUAL or pixels > 1:
        raise SdQuantError(f"latents differ by {latents:.2g} of their norm, images by {pixels:.0f} of 255")
    return {"latents": latents, "pixels": pixels}


def psnr(reference: np.ndarray, images: np.ndarray) -> float | None:
    error = np.square(reference.astype(float) - images.astype(float)).mean()
    return round(float(10 * np.log10(255**2 / error)), 2) if error else None


def plan_of(path: Path, width: int, height: int) -> dict[str, Any]:
    from sd_quant.engines.tensorrt.build import build_plan, profile_of

    profile = profile_of(path, path.stem, 1, None, (width, height), guided=True)
    report = build_plan(path, path.with_suffix(".plan"), library=LIBRARY, profile=profile, compute_capabilities=[GPU])
    return {"bytes": report.bytes}


def mark(row: Mapping[str, Any], column: str) -> str:
    """The cell of a row: yes with its figure, or a dash."""
    found = row.get(column)
    if not found or not found["works"]:
        return "–"
    if column in ("simulated", "int8"):
        return f"{found['psnr']} dB"
    if column in ("onnxruntime", "openvino"):
        return f"{found['latents']:.0e}"
    if column == "exported":
        return found["rung"]
    return f"{row['observed']['observing']:.0f} s" if column == "observed" else "yes"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row for each pipeline, then the counts, then every failure with its cause."""
    counts = [str(sum(bool(row.get(column, {}).get("works")) for row in rows)) for column in COLUMNS]
    cells = [[row["pipeline"], *(mark(row, column) for column in COLUMNS)] for row in rows]
    lines = [markdown(["pipeline", *COLUMNS], [*cells, [f"of {len(rows)}", *counts]])]
    for row in rows:
        for column in (*COLUMNS, "torch"):
            if because := row.get(column, {}).get("because"):
                lines.append(f"- {row['pipeline']}, {column}: {' '.join(because.split())}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", nargs="*", metavar="CLASS", help="of diffusers, or a case of tests.zoo")
    parser.add_argument("--rows", type=Path, default=Path("outputs/any_pipeline"), help="folder of the rows")
    parser.add_argument("--out", type=Path, help="the file of the table")
    parser.add_argument("--share", default="0/1", help="the I-th of N shares of the pipelines, for N processes: I/N")
    parser.add_argument("--all", action="store_true", help="export text encoders and decoders, too (twice the time)")
    parser.add_argument("--simulate", action="store_true", help="export nothing (a tenth of the time)")
    given = parser.parse_args()
    if given.simulate:
        observing.climb = nothing
    elif not given.all:
        observing.climb = only_denoisers
    warnings.simplefilter("ignore")
    share, shares = map(int, given.share.split("/"))
    names = given.pipelines or list(CASES)
    for name in names[share::shares]:
        file = given.rows / f"{name.replace(', ', '_').replace(' ', '_')}.json"
        if not file.exists() or given.pipelines:
            with tempfile.TemporaryDirectory() as folder:
                row = row_of(name, Path(folder))
            write_json(file, row)
            print({column: mark(row, column) for column in COLUMNS}, name, flush=True)
    rows = [json.loads(path.read_text()) for path in sorted(given.rows.glob("*.json"))]
    of_images = [bool(CASES[row["pipeline"]].images) for row in rows]
    tables = [
        f"## {title}\n\n{table(kept)}"
        for title, images in (("Of a prompt", False), ("Of images", True))
        if (kept := [row for row, takes in zip(rows, of_images, strict=True) if takes is images])
    ]
    if given.out:
        write_text(given.out, "\n".join(tables))
    else:
        print("\n".join(tables))


if __name__ == "__main__":
    main()
