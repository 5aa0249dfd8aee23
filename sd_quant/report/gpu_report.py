"""GPU report: one JSON file with the results of TensorRT plans and torch on a GPU, which its owner can send as it is.

Each row is a run of ``quantize``; its figures are copied from the run's record one by one, so that no path, prompt or
person's name gets into the file. ``GpuReport`` is the schema and forbids unknown names, because reports come from
strangers. Alternative not taken: to send the record itself, which holds paths and prompts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sd_quant.engines import COMPILED
from sd_quant.errors import ArtifactError
from sd_quant.metrics.intervals import Interval, ratio_interval, recorded
from sd_quant.report.record import DONE, Record, at, parsed
from sd_quant.text import one_line

SCHEMA = "sd-quant gpu report 1"
MOST_BYTES = 1_000_000
AGREEMENT = 0.1  # share by which the quotient of two medians may lie outside of the interval, which is of rounds
PATHS = re.compile(r"\S*[/\\~]\S*|\S+@\S+")


def without_paths(text: str) -> str:
    """Return ``text``. Raises ValueError if it holds a path or an address."""
    if found := PATHS.search(text):
        raise ValueError(f"holds the path or address {found[0]}")
    return text


Text = Annotated[str, Field(max_length=400), AfterValidator(without_paths)]
Name = Annotated[str, Field(max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]*$")]  # part of README's table
Milliseconds = Annotated[float, Field(gt=0)]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Speedup(Closed):
    """A ratio of two latencies, above 1 if faster, with its 95 % interval; the ends are null for too few rounds."""

    value: Annotated[float, Field(gt=0)]
    low: float | None
    high: float | None

    @model_validator(mode="after")
    def within_its_interval(self) -> "Speedup":
        if self.low is not None and self.high is not None and not self.low <= self.value <= self.high:
            raise ValueError(f"the speed-up {self.value:g} is outside of its interval {self.low:g} to {self.high:g}")
        return self


class Latency(Closed):
    """Median latencies of one call of the denoiser, timed in the same rounds, in milliseconds."""

    samples: int  # in the call; 2 with guidance
    compiled_ms: Milliseconds | None  # torch.compile in 16 bits, unquantized
    full_precision_ms: Milliseconds  # the row's engine, unquantized
    quantized_ms: Milliseconds
    over_compiled: Speedup | None
    over_full_precision: Speedup

    @model_validator(mode="after")
    def of_its_latencies(self) -> "Latency":
        for name, milliseconds in (("compiled", self.compiled_ms), ("full_precision", self.full_precision_ms)):
            speedup = getattr(self, f"over_{name}")
            if milliseconds is None or speedup is None:
                continue
            quotient = milliseconds / self.quantized_ms
            low, high = speedup.low or speedup.value, speedup.high or speedup.value
            if not low / (1 + AGREEMENT) <= quotient <= high * (1 + AGREEMENT):
                raise ValueError(
                    f"the speed-up over_{name} is {speedup.value:g}, and its latencies, {milliseconds:g} and "
                    f"{self.quantized_ms:g} ms, give {quotient:.3g}"
                )
        return self


class Parity(Closed):
    """An output's error relative to the norm of the reference's output, and the largest accepted error."""

    what: Text
    relative_error: float
    tolerance: float

    @model_validator(mode="after")
    def within_its_tolerance(self) -> "Parity":
        if self.relative_error > self.tolerance:
            raise ValueError(f"{self.what} has an error of {self.relative_error:g}, more than {self.tolerance:g}")
        return self


class Row(Closed):
    """Results of one run: a checkpoint in one number format on one engine."""

    checkpoint: Literal["mini", "full"]  # the shipped one, or SDXL at full size with random weights
    engine: Name
    format: Name
    ended: Literal["done", "failed", "not run"]
    reason: Text | None = None  # why it is not done
    denoiser: Latency | None = None
    image_ms: Milliseconds | None = None  # from prompt to image, quantized
    steps: int | None = None
    size: tuple[int, int] | None = Field(default=None, strict=False)  # width and height in pixels
    psnr_db: float | None = None  # mean over the images, to those of full precision
    executed: int | None = None  # layers whose codes the engine multiplies
    layers: int | None = None  # quantized layers
    parity: list[Parity] = []
    plan_bytes: int | None = None
    plan_seconds: float | None = None
    peak_cuda_memory_bytes: int | None = None
    seconds: float | None = None

    @model_validator(mode="after")
    def complete(self) -> "Row":
        if (self.ended == DONE) != (self.denoiser is not None):
            raise ValueError(f"a row that is {self.ended} has {'no' if self.denoiser is None else 'a'} latency")
        return self


class Gpu(Closed):
    """The GPU as nvidia-smi describes it."""

    name: Name
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    memory: Text
    driver: Text
    clocks: dict[Annotated[str, Field(pattern=r"^[a-z_.]+$")], Text]  # in MHz, and the power limit in W


class GpuReport(Closed):
    """A machine's report: its GPU, processor and versions, and a row for each run."""

    schema_: Literal["sd-quant gpu report 1"] = Field(alias="schema")
    made_by: Literal["sd-quant gpu-report", "make gpu-check"]
    day: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    rehearsal: bool  # without a GPU: OpenVINO stands in for plans
    gpu: Gpu
    processor: Text
    cores: int
    versions: dict[Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+$")], Text | None]
    rows: Annotated[list[Row], Field(min_length=1)]


def read_report(content: bytes, name: str) -> GpuReport:
    """Parse and validate a GPU report from ``content``, the bytes of the file ``name``.

    Raises ArtifactError for a file over MOST_BYTES, another schema, an unknown name, or contradictory figures.
    """
    if len(content) > MOST_BYTES:
        raise ArtifactError(
            f"{name} is larger than {MOST_BYTES} bytes, expected a report as sd-quant gpu-report writes it"
        )
    try:
        return GpuReport.model_validate_json(content)
    except ValidationError as error:
        raise ArtifactError(
            f"{name} is no report of {SCHEMA}: {first_of(error)}; make it again with sd-quant gpu-report"
        ) from None


def contradiction_of(row: Mapping[str, Any]) -> str | None:
    """Return the first violation of the schema by ``row``, a result of ``row_of``, or None if it is valid."""
    try:
        Row.model_validate({"checkpoint": "mini", "engine": "any", "format": "any", **row})
    except ValidationError as error:
        return first_of(error)
    return None


def first_of(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, found["loc"])) or "its content"
    return f"{one_line(where, 100)}: {one_line(found['msg'].removeprefix('Value error, '), 200)}"


def row_of(made: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Return the figures of a ``Row`` from the record ``made`` of a run on ``engine``."""
    record: Record = parsed(made)
    part, samples = record["denoiser"]["part"], record["denoiser"]["samples_per_image"]
    latency, knobs, plan = record["latency"], record["knobs"]["infer"], record["plans"][part]
    timed = latency[engine][part][str(samples)]
    full, quantized = timed["full_precision"], timed["quantized"]
    # the unquantized engine of torch_compiled is the compiled baseline
    compiled = full if engine == COMPILED else latency[COMPILED][part][str(samples)]["full_precision"]
    return {
        "ended": DONE,
        "denoiser": {
            "samples": samples,
            "compiled_ms": compiled["p50_ms"],
            "full_precision_ms": full["p50_ms"],
            "quantized_ms": quantized["p50_ms"],
            "over_compiled": over(compiled, quantized, timed["rounds"]["openings"]),
            "over_full_precision": as_speedup(recorded(at(timed, "speedup"), timed["speedup_interval"])),
        },
        "image_ms": latency[engine]["image"]["1"]["quantized"]["p50_ms"],
        "steps": at(knobs, "steps"),
        "size": [at(knobs, "width"), at(knobs, "height")],
        "psnr_db": record["fidelity"]["psnr"]["mean"],
        "executed": record["executed"]["count"],
        "layers": record["executed"]["of"],
        "parity": [
            {"what": f"{name} with torch", **{key: entry[key] for key in ("relative_error", "tolerance")}}
            for name, entry in record["parity"].items()
            if at(entry, "relative_error") is not None
        ],
        "plan_bytes": at(plan, "bytes"),
        "plan_seconds": at(plan, "seconds"),
        "peak_cuda_memory_bytes": cuda if isinstance(cuda := record["peak_cuda_memory_bytes"], int) else None,
        "seconds": record["seconds"],
    }


def over(slower: Any, faster: Any, openings: Sequence[int]) -> dict[str, float | None] | None:
    """Return the speed-up of ``faster`` over ``slower``; None if rounds differ. ``openings``: rounds by opening."""
    a, b = slower["samples_ms"], faster["samples_ms"]
    return as_speedup(ratio_interval(a, b, openings)) if a and len(a) == len(b) else None


def as_speedup(interval: Interval) -> dict[str, float | None]:
    low, high = interval.ends
    return {"value": interval.value, "low": low, "high": high}


def without_names(text: str, names: Sequence[str]) -> str:
    """Return an error's text in one line, with paths, addresses and ``names`` (of a user or host) replaced."""
    text = PATHS.sub("<path>", text)
    for name in filter(None, names):
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return one_line(text, 400)
