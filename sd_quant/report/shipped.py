"""``recommendation.json``: the recommendation of a report with its folder, files, figures and a command for images.

The file is removed when work on the folder resumes, so it always describes the jobs in the folder. Alternative not
taken: a symbolic link to the recommended job, which is lost when the folder is copied.
"""

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sd_quant.files import write_json
from sd_quant.places import shown, url
from sd_quant.report.candidates import judgement
from sd_quant.report.recommendation import UNDECIDED, UNQUANTIZED, Recommendation, recommend
from sd_quant.report.record import VARIANTS, at, read_object
from sd_quant.report.rule import rule_of
from sd_quant.report.summary import RECOMMENDATION, REPORT, Job, Sweep
from sd_quant.shell import literal, pasted
from sd_quant.text import one_line, printable

SCHEMA_VERSION = 1
FIGURES = (
    *(f"{column}{end}" for column in ("psnr_db", "image_speedup") for end in ("", "_low", "_high")),
    *("psnr_worst_db", "image_ms", "image_full_precision_ms"),
    *("denoiser_onnx_bytes", "denoiser_onnx_full_precision_bytes", "denoiser_plan_bytes"),
)
KNOBS = (  # of ``infer``, which infer.py does not take from the run
    *("width", "height", "sizes", "steps", "scale", "negative_prompt", "image", "mask", "control"),
    *("strength", "vae_tile"),
)
STEPS = 20  # of infer.py, where a model recommends none


def recommendation_of(sweep: Sweep) -> Recommendation:
    """Return the recommendation of a report's folder with the files, figures and command that belong to it."""
    if not sweep.own:  # candidates alone, which have no latency in common and no plans
        return Recommendation(None, judgement(sweep))
    advice = recommend(sweep)
    found = [(job, row) for job, row in zip(sweep.jobs, sweep.rows, strict=True) if job.name == advice.best]
    for job, row in found:
        advice = replace(advice, figures={column: row[column] for column in FIGURES})
        if advice.ship != UNDECIDED:
            unquantized = advice.ship == UNQUANTIZED
            files = files_of(job, sweep.directory, unquantized)
            command = command_of(job, unquantized) if files["onnx"] else None
            folder = job.directory.relative_to(sweep.directory).as_posix()
            advice = replace(advice, folder=folder, files=files, command=command)
    return advice


def files_of(job: Job, directory: Path, unquantized: bool) -> dict[str, dict[str, str]]:
    """Return a job's file paths, relative to ``directory``, by kind and name; full precision's if ``unquantized``."""
    full_precision = job.directory / VARIANTS[0]
    quantized = {path.stem for path in full_precision.glob("onnx/*/*.onnx")} if unquantized else ()

    def found(pattern: str) -> dict[str, str]:
        paths = [path for path in job.directory.glob(pattern) if path.stem not in quantized]
        paths += full_precision.glob(pattern) if unquantized else []
        return {path.stem: path.relative_to(directory).as_posix() for path in sorted(paths)}

    exports = {} if unquantized else found("hand_over/*/")
    return {"onnx": found("onnx/*/*.onnx"), "plan": found("plan/*.plan"), "exports": exports}


def command_of(job: Job, unquantized: bool) -> str:
    """Return the shell command that makes an image of the job's first prompt with the job's engines and knobs."""
    model, infer = job.record["knobs"]["model"], job.record["knobs"]["infer"]
    usual = {name: at(model, name) for name in ("width", "height")}
    usual |= {name: at(model, "recommended", name) or value for name, value in (("scale", None), ("steps", STEPS))}
    values = {name: value for name in KNOBS if (value := at(infer, name)) != usual.get(name)}
    if not unquantized:
        chosen = {"schedule": schedule} if (schedule := job.record["levers"]["schedule"]) else {}
        values |= {"schedule": at(infer, "schedule")} | chosen
    prompt = next(iter(job.record["prompts"]), "what the image shows")
    table = at(infer, "table")  # has the prompts of a pipeline that takes images
    return pasted(
        "infer", f"run={literal(shown(job.directory))}", *(["variant=full_precision"] if unquantized else []),
        f"infer.table={literal(table)}" if table else f"prompts=[{literal(one_line(prompt))}]",
        *(f"infer.{name}={written(value)}" for name, value in values.items() if value not in (None, [])),
    )  # fmt: skip


def written(value: Any) -> str:
    """Format the value of a knob as typed on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return str(value) if type(value) in (int, float) else literal(one_line(value))


def write_recommendation(sweep: Sweep, advice: Recommendation) -> None:
    """Write ``recommendation.json`` into the folder. Raises ResourceError when the disk is full."""
    content = {"schema_version": SCHEMA_VERSION, **asdict(advice), "rule": str(rule_of(sweep.verdict))}
    write_json(sweep.directory / RECOMMENDATION, content)


def last_words(directory: Path) -> str:
    """Format the closing lines: the report's address, the command for images, and last the recommendation."""
    advice: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        advice = read_object(directory / RECOMMENDATION) or {}
    lines = [f"report: {url(directory / REPORT)}"]
    lines += [f"images with it: {advice['command']}"] if advice.get("command") else []
    return "\n".join(map(printable, [*lines, advice.get("sentence") or ""]))
