"""The record of a run, ``metrics.json``: its shape, what writes it, what reads it.

``Record`` is the one description. Who assembles a record fills it in, checked by mypy; what is read from disk is
checked against the same annotations, because records come from strangers too; and everything that shows a run reads it
through the functions below. The road not taken is a check at every place that reads a number: one that is none would be
found by the last of them, half way through a page.

A number that does not exist is null with a ``reason`` beside it, or ``{"value": null, "reason": "..."}``, or absent.
Records of other versions lack names or have others: what is missing is no error, and what is unknown may be anything.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from sd_quant.files import digest, read_regular, write_json
from sd_quant.metrics import Against, Score, fidelity_scores
from sd_quant.text import one_line

RECORD = "metrics.json"
SCHEMA_VERSION = 2
DONE = "done"
TORCH = "torch"  # the engine that every other is compared with
CANDIDATE = "candidate"  # the column of a candidate's name, in place of the knobs in which a sweep's jobs differ
LORA = "lora "  # begins the names of inputs that are one
IMAGE = "image"  # beside the parts in ``latency``: from prompt to image
VARIANTS = ("full_precision", "quantized")
LARGEST = 1e18  # of a record's numbers, in any unit: a table has no place for more
ABSENT = "not in the record"


# The shape


class AboveZero:
    """Marks a number by which something is divided."""


Positive = Annotated[float, AboveZero]


class Explained(TypedDict):
    """Stands for a number, mostly for one that does not exist."""

    value: float | None
    reason: str | None  # why there is none


class Latency(TypedDict, total=False):
    """Milliseconds of one engine; see ``sd_quant.metrics.latency``. Only ``p50_ms`` where it is put together."""

    p50_ms: Positive | None  # the median, which tables show
    mean_ms: float  # their mean
    p90_ms: float  # nine in ten calls took at most this
    p99_ms: float  # 99 in 100 calls took at most this
    min_ms: float  # the shortest
    std_ms: float  # standard deviation
    n: int  # rounds that were timed, after ``warmup`` others
    warmup: int  # calls after each opening, before the timed ones
    clock: str  # what measured: the processor's clock, or events of a GPU
    samples_ms: list[float]  # of each round, in order: a call, or the mean of as many as an image makes
    composed: str  # from what the latency is put together, where it is not that of whole calls
    rest: float  # of an image: what it takes beside its calls of the denoiser, as a share of what those take
    reason: str  # why there is no latency


class Conditions(TypedDict, total=False):
    """How rounds were made: see ``sd_quant.metrics.latency`` and ``sd_quant.metrics.neighbours``."""

    together: bool  # whether all engines were in the same rounds
    stopped: str  # narrow, budget or rounds
    others: float | None  # share of the processors' time that other processes took
    steal: float | None  # the same of a hypervisor
    reference_spread: float | None  # of the unquantized engine's latency over the rounds
    openings: list[int]  # rounds of each time that the engines were opened; empty where they were opened once


class WholeImages(TypedDict, total=False):
    """Images that were made by both engines in turn, from prompt to pixels."""

    speedup: Positive  # as of rounds
    speedup_interval: list[float] | Explained  # its ends at 95 %
    agree: bool  # whether the interval meets that of the speed-up by the denoiser's calls


class Latencies(TypedDict, total=False):
    """One part at one batch size, unquantized and quantized, timed in the same rounds."""

    full_precision: Latency  # the unquantized part
    quantized: Latency  # the same part quantized; absent for parts that are not
    speedup: Positive | Explained  # full precision by quantized over the rounds: above 1 is faster
    speedup_interval: list[float] | Explained  # its ends at 95 %, see ``sd_quant.metrics.intervals``
    rounds: Conditions  # under which conditions
    whole_images: WholeImages  # of an image: the same, not from calls of the denoiser but from images


class ImageScores(TypedDict, total=False):
    """A score of single images: ``sd_quant.metrics.fidelity.summary``."""

    mean: float | None  # over the images that have one
    min: float | None  # the worst image's, where more is better
    max: float | None  # the worst image's, where less is better
    worst_index: int | None  # which image that is, from 0
    values: list[float | None]  # one for each prompt
    reason: str | None  # why some images have none


class Sizes(TypedDict):
    """Bytes of a part's files."""

    onnx_full_precision: float | Explained  # the unquantized part, with its weights
    onnx_quantized: float | Explained  # the quantized part
    plan: float | Explained  # the TensorRT plan of what is delivered
    weights_fp32: float  # what the same weights take in fp32, for comparison


class Denoiser(TypedDict):
    part: str  # its name among the parts
    samples_per_image: float  # in one call: 2 where guidance computes with and without the prompt


class ModelKnobs(TypedDict, total=False):
    path: Any  # as it was given


class InferKnobs(TypedDict, total=False):
    engine: str  # what ran the quantized model
    batch_size: float  # images at a time


class Knobs(TypedDict, total=False):
    """Those of ``quantize`` by name, the other groups' by group; only what is read is named here."""

    model: ModelKnobs  # the section `model`
    infer: InferKnobs  # the section `infer`


class EnginePlan(TypedDict, total=False):
    targets: list[str]  # compute capabilities that the plan was built for, such as SM89
    attention: str | None  # why its attention is in high precision though the ONNX file's is quantized


class Layers(TypedDict):
    quantized: float  # layers whose weight is quantized
    high_precision: float  # those that are not


class Executed(TypedDict):
    """In which numbers the engine multiplies the layers whose weights and inputs the recipe quantizes."""

    count: float | None  # of them, that it multiplies as codes of their format
    of: float | None  # how many such layers there are
    weights_only: float | None  # quantized layers besides, whose inputs are in high precision, as are their products
    fell_back: list[str]  # those that it computes in floating point, by name
    unknown: list[str]  # those of which it does not say
    reason: str | None  # why nothing is known


class HandedOver(TypedDict):
    """What a target of ``hand_over`` holds: see ``docs/hand_over.md``."""

    folder: str  # where it lies
    quantized: float  # layers that are quantized in it
    of: float  # those that the recipe quantizes
    inputs: dict[str, str]  # by the format of weights, how the target's consumer computes inputs
    lost: dict[str, int]  # how many layers and attentions stay in high precision there, by the reason
    fidelity: dict[str, ImageScores] | None  # of what the consumer computes, by score; null where no images were made
    bytes: dict[str, int]  # of its larger files


class Hurting(TypedDict):
    """One of the layers of a candidate that cost most."""

    name: str  # diffusers'
    role: str  # its role in the network
    format: str  # of its weight
    output_error: float | None  # of its output on real inputs, relative to the norm of the full-precision one
    network_error: float | None  # of the network's output with this layer alone; null where it was not put in


class JudgedRuntime(TypedDict, total=False):
    """What the library that a candidate is made for computes of it on this machine."""

    name: str | None  # what it is
    agreement: ImageScores  # PSNR of its images to those of our reading of the candidate, in dB
    ms: Positive  # one call of the denoiser, median
    torch_ms: Positive  # the same of torch in full precision, in the same rounds
    speedup: Positive  # of the library over torch: above 1 is faster
    speedup_interval: list[float] | None  # its ends at 95 %
    reason: str | None  # why nothing is known


class Judged(TypedDict):
    """A quantized checkpoint of anybody: see ``docs/judge.md``."""

    name: str  # in tables
    path: str  # where it lies
    reader: str  # what has read it
    maker: str  # who made it, as far as the file says
    bits: float  # stored bits of the denoiser by the number of its weights
    stored_bytes: float  # of the denoiser
    formats: dict[str, int]  # how many layers have their weights in which format
    inputs: dict[str, int]  # how many layers have their inputs computed in which way
    network_error: float | None  # of the denoiser's output on sampled calls, relative to the norm of the full one
    hurting: list[Hurting]  # the layers that cost most, worst first
    runtime: JudgedRuntime  # the candidate's own library


class Stage(TypedDict):
    seconds: float  # wall time
    peak_memory_bytes: float  # of the stage and those that it overlaps, with the processes that they started


class Machine(TypedDict, total=False):
    """See ``sd_quant.report.provenance.machine``."""

    cpu: str | None  # the processor's name
    cpu_int8: list[str]  # its instructions for products of INT8
    usable_cores: float  # that the process may run on
    affinity: list[float] | None  # the numbers of these cores
    threads: float  # with how many of them torch and every runtime compute
    cpu_mhz: list[float]  # the frequency of each core as the job started
    cpu_governor: str | None  # what decides the frequency
    memory_bytes: float  # of the machine
    gpus: list[str]  # the names of its GPUs


class Environment(TypedDict):
    versions: dict[str, str | None]  # of the packages that decide results, by name; null for one that is not installed
    machine: Machine  # what the job ran on


class Record(TypedDict):
    """What ``quantize.py`` leaves of a finished job."""

    schema_version: int  # which description this record follows
    status: str  # "done"
    fingerprint: str  # digest of everything that decides the record but the machine
    overrides: list[str]  # the knobs as given on the command line
    knobs: Knobs  # every knob of the job
    denoiser: Denoiser  # the part that is quantized
    prompts: list[str]  # one for each image
    simulated: bool  # whether torch made the images, because the engine cannot execute the recipe
    simulated_because: str | None  # why it cannot
    sizes_bytes: dict[str, Sizes]  # by part
    plans: dict[str, EnginePlan]  # by part
    latency: dict[str, dict[str, dict[str, Latencies]]]  # by engine, part or `image`, and batch size
    fidelity: dict[str, Any]  # to full precision, by score
    fidelity_unquantized_engine: dict[str, Any]  # the same of the unquantized engine, without scores of sets
    text_scores: dict[str, Any]  # by variant and the keys of SCORES, and MLPerf's verdict on them
    parity: dict[str, Any]  # by what was compared, its relative error and the tolerance that it is within
    executed: Executed  # in which numbers the engine multiplies
    layers: Layers  # how many are quantized
    smoothing: dict[str, int]  # how many layers are smoothed and folded, and the graph's multiplications for it
    sensitivity: dict[str, Any]  # what the choice of layers went by, with `keep` or `quantize.budget`
    hand_over: dict[str, HandedOver]  # by target, what was written in other tools' formats
    judged: Judged | None  # of a candidate of judge.py, of which much else is absent; null for a run
    peak_memory_bytes: float | Explained  # the most memory of the job
    peak_cuda_memory_bytes: float | Explained  # the most memory of a GPU
    seconds: float  # wall time of the job from its first stage on
    stages: dict[str, Stage]  # by name, in the order in which they ended; some overlap
    environment: Environment  # what the figures belong to
    inputs: dict[str, Any]  # name to path, hash and bytes: ``sd_quant.report.provenance.fingerprint``


class InferRecord(TypedDict):
    """What ``infer.py`` leaves."""

    schema_version: int
    status: str
    latency: dict[str, dict[str, dict[str, Latency]]]  # by engine, part or IMAGE, and batch size
    chosen_because: str | None  # why infer=auto chose the engine; null: it was named
    peak_memory_bytes: float
    peak_cuda_memory_bytes: float | Explained
    prompts: list[str]
    negative_prompts: list[str] | None  # of the prompts, in turn
    provenance: dict[str, Any]


def fidelity_shape() -> Any:
    """The annotations of ``fidelity``, which follow from the table of scores."""
    shapes = {Against.IMAGES: ImageScores, Against.LATENTS: list[float | None], Against.SET: Explained}
    entries = {score.key: shapes[score.against] for score in fidelity_scores()}
    reasons = {score.reason_key: str | None for score in fidelity_scores() if score.against is Against.LATENTS}
    return TypedDict("Fidelity", {**entries, **reasons})  # type: ignore[operator]


# Writing


def explained(value: float | None, reason: str) -> float | Explained:
    """``value`` as the record has it: with the ``reason`` where there is none."""
    return {"value": None, "reason": reason} if value is None else value


def write_record(record: Record | InferRecord, directory: Path) -> None:
    """Write ``metrics.json``, atomically. Whoever finds one takes the run for finished, so it is written last.

    Raises SdQuantError for NaN and infinity, ResourceError when the disk is full.
    """
    write_json(directory / RECORD, record)


# Reading


def read_record(directory: Path) -> dict[str, Any] | None:
    """The record in ``directory``, None where there is none. Raises ValueError when it is damaged, OSError."""
    record = read_object(directory / RECORD)
    if record is not None:
        check_shape(record, Record, RECORD)
        for section in ("fidelity", "fidelity_unquantized_engine"):
            check_shape(record.get(section), fidelity_shape(), f"{RECORD}.{section}")
        if at(record, "denoiser", "samples_a_picture"):  # its name in version 1
            record["denoiser"]["samples_per_image"] = record["denoiser"].pop("samples_a_picture")
    return record


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON file, or None where there is none. Raises ValueError when it is not an object, OSError."""
    if not path.is_file():
        return None
    try:
        content = json.loads(read_regular(path))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no object")
    return content


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Raises ValueError unless ``value``, as JSON has it, is what the annotation ``shape`` says.

    Null passes for everything but an entry of a list, a missing name passes, and so does one that ``shape`` does not
    have. ``reason`` is a text in every dictionary. Finite numbers up to LARGEST are numbers, true and false are not.
    """
    if value is None or shape is Any:
        return
    if get_origin(shape) in (Union, UnionType):
        options = [option for option in get_args(shape) if option is not NoneType]
        shape = next((option for option in options if is_typeddict(option) == isinstance(value, dict)), options[0])
    kind, arguments = get_origin(shape), get_args(shape)
    if is_typeddict(shape) or kind is dict:
        fits = isinstance(value, dict)
    elif kind is list:
        takes_null = arguments[0] is Any or NoneType in get_args(arguments[0])
        fits = isinstance(value, list) and (takes_null or None not in value)
    elif shape in (str, bool):
        fits = isinstance(value, shape)
    else:
        least = 1 / LARGEST if AboveZero in arguments else -LARGEST
        fits = type(value) in (int, float) and least < value < LARGEST
    if not fits:
        raise ValueError(f"{where[-200:]} is {one_line(value, 100)}")
    if isinstance(value, list):
        for each in value:
            check_shape(each, arguments[0], f"{where}[]")
    elif isinstance(value, dict):
        hints = get_type_hints(shape, include_extras=True) if is_typeddict(shape) else {}
        others = arguments[1] if kind is dict else Any
        for name, each in value.items():
            check_shape(each, hints.get(name, str if name == "reason" else others), f"{where}.{name}")


def why(error: Exception) -> str:
    """What is wrong with a file, in one line whatever the file holds."""
    return one_line(f"{type(error).__name__}: {error}", 300)


def at(record: Any, *keys: Any) -> Any:
    """What lies at ``keys``, or None."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def weights_sha256(made: Mapping[str, Any]) -> str | None:
    """Of the weights that a model computes with: the checkpoint's own, with LoRAs a digest of all files and strengths.

    ``made`` is a record, or what ``provenance.made_of`` returns; None where it has no hash of a checkpoint.
    """
    own, inputs = at(made, "inputs", "checkpoint", "sha256"), at(made, "inputs")
    loras = [[name, at(inputs, name, "sha256")] for name in inputs or () if name.startswith(LORA)]
    return digest(json.dumps([own, *loras])) if own and loras else own


class Number(NamedTuple):
    """A number of a record: where ``value`` is None, ``reason`` says why, else what the number leaves out."""

    value: float | None
    reason: str | None = None


def number_at(record: Any, *keys: str) -> Number:
    """The number at ``keys``; where there is none, with the reason that stands beside where the way ends."""
    node = record
    for depth, key in enumerate(keys):
        inner = at(node, key)
        if inner is None:
            reason = at(node, "reason") if depth else None  # the run's own reason is not a number's
            return Number(None, reason or ABSENT)
        node = inner
    return Number(node.get("value"), node.get("reason")) if isinstance(node, Mapping) else Number(node)


def quotient(a: Number, b: Number) -> Number:
    """``a`` by ``b``, or the one that there is not."""
    if a.value is None or not b.value:
        return a if a.value is None else Number(None, b.reason)
    return Number(a.value / b.value)


class LatencyPair(NamedTuple):
    """One part, or an image, at one batch size: medians in milliseconds, and how much faster quantized is."""

    full_precision: Number
    quantized: Number
    speedup: Number  # the recorded one, or else the ratio of the medians
    reach: float | None  # of the recorded speed-up: how far its interval goes, to the side where it goes further


def latency_of(record: Any, engine: str, part: str, batch: str | int) -> LatencyPair:
    """What ``engine`` took for a call of ``part``, or for an IMAGE, with ``batch`` samples in it."""
    place = ("latency", engine, part, str(batch))
    full_precision, quantized = (number_at(record, *place, variant, "p50_ms") for variant in VARIANTS)
    recorded = number_at(record, *place, "speedup")
    speedup = quotient(full_precision, quantized) if recorded.value is None else recorded
    ends = at(record, *place, "speedup_interval")
    known = isinstance(ends, list) and len(ends) == 2 and recorded.value is not None
    return LatencyPair(
        full_precision, quantized, speedup, max(abs(end - recorded.value) for end in ends) if known else None
    )


class Scored(NamedTuple):
    """A score: its value, which is the mean over the images or that of the last step, the worst image's, and each."""

    value: Number
    worst: Number
    values: list[float | None]


def score_of(record: Any, score: Score) -> Scored:
    """How close the quantized variant is to full precision by ``score``."""
    fidelity = at(record, "fidelity")
    if score.against is Against.IMAGES:
        mean = number_at(record, "fidelity", score.key, "mean")
        worst = number_at(record, "fidelity", score.key, "min" if score.more_is_better else "max")
        left_out = at(fidelity, score.key, "reason")
        values = at(fidelity, score.key, "values") or []
        return Scored(mean if mean.value is None else Number(mean.value, left_out), worst, values)
    entry = at(fidelity, score.key)
    if isinstance(entry, list):
        last, reason = entry[-1] if entry else None, at(fidelity, score.reason_key)
        return Scored(Number(last, reason if last is None else None), Number(None), entry)
    return Scored(number_at(record, "fidelity", score.key), Number(None), [])


def seconds_of_job(record: Any) -> float | None:
    """The seconds of a job; where its record has none, no stages of it overlapped."""
    stages = seconds_of_stages(record)
    return number_at(record, "seconds").value or (sum(stages.values()) if stages else None)


def seconds_of_stages(record: Any) -> dict[str, float]:
    """The seconds of each stage, in the order in which they ended."""
    seconds = {name: at(record, "stages", name, "seconds") for name in names(record, "stages")}
    return {name: value for name, value in seconds.items() if value is not None}


def keys_of_steps() -> list[str]:
    """The keys of ``fidelity`` under which there is a value for each denoising step."""
    return [score.key for score in fidelity_scores() if score.against is Against.LATENTS]


def names(record: Any, *keys: str) -> list[str]:
    """The names of the dictionaries inside the one at ``keys``: engines, parts, batch sizes."""
    return [name for name, inner in (at(record, *keys) or {}).items() if isinstance(inner, Mapping)]
