"""The record of a run, ``metrics.json``: its model, what writes it, what reads it.

``Record`` is the one description. mypy checks the stages that fill it in, pydantic checks each record when it is
written and when it is read, because records come from strangers too, and the JSON schema follows from it. Everything
that shows a run reads it through the functions below. The model is made of typed dictionaries: a record stays the
dictionary that JSON has, and pydantic is imported only when one is checked, which costs a tenth of a second. The road
not taken is ``BaseModel``: what later versions add and earlier ones lack would have to be carried by each class.

A number that does not exist is null with a ``reason`` beside it, or ``{"value": null, "reason": "..."}``, or absent.
Records of other versions lack names or have others: a missing name is no error, and an unknown one may hold anything.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from annotated_types import Gt, Lt
from typing_extensions import TypedDict

from sd_quant.errors import SdQuantError
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
LARGEST = 10**18  # of a record's numbers, in any unit: a table has no place for more
ABSENT = "not in the record"


# The shape


@dataclass(frozen=True)
class Doc:
    """The description of a name, as the JSON schema and docs/metrics.md have it."""

    text: str

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return handler(core_schema) | {"description": self.text}


class ByScore:
    """Stands for the scores against full precision, whose names and types follow from the table of scores."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        types = {Against.IMAGES: ImageScores, Against.LATENTS: list[Finite | None], Against.SET: Explained}
        names: dict[str, Any] = {}
        for score in fidelity_scores():
            names[score.key] = Annotated[types[score.against], Doc(score.title)]
            if score.against is Against.LATENTS:
                names[score.reason_key] = Annotated[str | None, Doc("why some steps have none")]
        return handler.generate_schema(TypedDict("Fidelity", names, total=False))  # type: ignore[operator]


Finite = Annotated[float, Gt(-LARGEST), Lt(LARGEST)]
Positive = Annotated[float, Gt(1 / LARGEST), Lt(LARGEST)]  # something is divided by it
Count = Annotated[int, Gt(-LARGEST), Lt(LARGEST)]
Fidelity = Annotated[dict[str, Any], ByScore()]


class Explained(TypedDict, total=False):
    """Stands for a number, mostly for one that does not exist."""

    value: Finite | None
    reason: Annotated[str | None, Doc("why there is none")]


class Latency(TypedDict, total=False):
    """Milliseconds of one engine; see ``sd_quant.metrics.latency``. Only ``p50_ms`` where it is put together."""

    p50_ms: Annotated[Positive | None, Doc("the median, which tables show")]
    mean_ms: Annotated[Finite, Doc("their mean")]
    p90_ms: Annotated[Finite, Doc("nine in ten calls took at most this")]
    p99_ms: Annotated[Finite, Doc("99 in 100 calls took at most this")]
    min_ms: Annotated[Finite, Doc("the shortest")]
    std_ms: Annotated[Finite, Doc("standard deviation")]
    n: Annotated[Count, Doc("rounds that were timed, after warmup others")]
    warmup: Annotated[Count, Doc("calls after each opening, before the timed ones")]
    clock: Annotated[str, Doc("what measured: the processor's clock, or events of a GPU")]
    samples_ms: Annotated[list[Finite], Doc("each round's call, or the mean of as many as an image makes, in order")]
    composed: Annotated[str, Doc("from what the latency is put together, where it is not that of whole calls")]
    rest: Annotated[Finite, Doc("of an image: time beside its calls of the denoiser, as a share of theirs")]
    reason: Annotated[str, Doc("why there is no latency")]


class Conditions(TypedDict, total=False):
    """How rounds were made: see ``sd_quant.metrics.latency`` and ``sd_quant.metrics.neighbours``."""

    together: Annotated[bool, Doc("whether all engines were in the same rounds")]
    stopped: Annotated[str, Doc("narrow, budget or rounds")]
    others: Annotated[Finite | None, Doc("share of the processors' time that other processes took")]
    steal: Annotated[Finite | None, Doc("the same of a hypervisor")]
    reference_spread: Annotated[Finite | None, Doc("of the unquantized engine's latency over the rounds")]
    openings: Annotated[list[Count], Doc("rounds of each opening of the engines; empty if they were opened once")]


class WholeImages(TypedDict, total=False):
    """Images that were made by both engines in turn, from prompt to pixels."""

    speedup: Annotated[Positive, Doc("as of rounds")]
    speedup_interval: Annotated[list[Finite] | Explained, Doc("its ends at 95 %")]
    agree: Annotated[bool, Doc("whether the interval meets that of the speed-up by the denoiser's calls")]


class Latencies(TypedDict, total=False):
    """One part at one batch size, unquantized and quantized, timed in the same rounds."""

    full_precision: Annotated[Latency, Doc("the unquantized part")]
    quantized: Annotated[Latency, Doc("the same part quantized; absent for parts that are not")]
    speedup: Annotated[Positive | Explained, Doc("full precision by quantized over the rounds: above 1 is faster")]
    speedup_interval: Annotated[list[Finite] | Explained, Doc("its ends at 95 %, see sd_quant.metrics.intervals")]
    rounds: Annotated[Conditions, Doc("under which conditions")]
    whole_images: Annotated[WholeImages, Doc("of an image: the same, not from calls of the denoiser but from images")]


class ImageScores(TypedDict, total=False):
    """A score of single images: ``sd_quant.metrics.fidelity.summary``."""

    mean: Annotated[Finite | None, Doc("over the images that have one")]
    min: Annotated[Finite | None, Doc("the worst image's, where more is better")]
    max: Annotated[Finite | None, Doc("the worst image's, where less is better")]
    worst_index: Annotated[Count | None, Doc("which image that is, from 0")]
    values: Annotated[list[Finite | None], Doc("one for each prompt")]
    reason: Annotated[str | None, Doc("why some images have none")]


class Sizes(TypedDict):
    """Bytes of a part's files."""

    onnx_full_precision: Annotated[Finite | Explained, Doc("the unquantized part, with its weights")]
    onnx_quantized: Annotated[Finite | Explained, Doc("the quantized part")]
    plan: Annotated[Finite | Explained, Doc("the TensorRT plan of what is delivered")]
    weights_fp32: Annotated[Finite, Doc("what the same weights take in fp32, for comparison")]


class Denoiser(TypedDict):
    part: Annotated[str, Doc("its name among the parts")]
    samples_per_image: Annotated[Finite, Doc("in one call: 2 where guidance computes with and without the prompt")]


class ModelKnobs(TypedDict, total=False):
    path: Annotated[Any, Doc("as it was given")]


class InferKnobs(TypedDict, total=False):
    engine: Annotated[str, Doc("what ran the quantized model")]
    batch_size: Annotated[Finite, Doc("images at a time")]


class Knobs(TypedDict, total=False):
    """Those of ``quantize`` by name, the other groups' by group; only what is read is named here."""

    model: Annotated[ModelKnobs, Doc("the section `model`")]
    infer: Annotated[InferKnobs, Doc("the section `infer`")]


class EnginePlan(TypedDict, total=False):
    targets: Annotated[list[str], Doc("compute capabilities that the plan was built for, such as SM89")]
    attention: Annotated[str | None, Doc("why its attention is in high precision though the ONNX file's is quantized")]


class Layers(TypedDict):
    quantized: Annotated[Finite, Doc("layers whose weight is quantized")]
    high_precision: Annotated[Finite, Doc("those that are not")]


class Executed(TypedDict):
    """In which numbers the engine multiplies the layers whose weights and inputs the recipe quantizes."""

    count: Annotated[Finite | None, Doc("of them, that it multiplies as codes of their format")]
    of: Annotated[Finite | None, Doc("how many such layers there are")]
    weights_only: Annotated[Finite | None, Doc("further layers, of which the weight alone is quantized")]
    fell_back: Annotated[list[str], Doc("those that it computes in floating point, by name")]
    unknown: Annotated[list[str], Doc("those of which it does not say")]
    reason: Annotated[str | None, Doc("why nothing is known")]


class HandedOver(TypedDict):
    """What a target of ``hand_over`` holds: see ``docs/hand_over.md``."""

    folder: Annotated[str, Doc("where it lies")]
    quantized: Annotated[Finite, Doc("layers that are quantized in it")]
    of: Annotated[Finite, Doc("those that the recipe quantizes")]
    inputs: Annotated[dict[str, str], Doc("by the format of weights, how the target's consumer computes inputs")]
    lost: Annotated[dict[str, Count], Doc("how many layers and attentions stay in high precision there, by the reason")]
    fidelity: Annotated[dict[str, ImageScores] | None, Doc("of the tool's images, by score; null where none were made")]
    bytes: Annotated[dict[str, Count], Doc("of its larger files")]


class Hurting(TypedDict):
    """One of the layers of a candidate that cost most."""

    name: Annotated[str, Doc("diffusers'")]
    role: Annotated[str, Doc("its role in the network")]
    format: Annotated[str, Doc("of its weight")]
    output_error: Annotated[Finite | None, Doc("of its output on real inputs, relative to full precision's norm")]
    network_error: Annotated[Finite | None, Doc("of the network's output with this layer alone; null if not measured")]


class JudgedRuntime(TypedDict, total=False):
    """What the library that a candidate is made for computes of it on this machine."""

    name: Annotated[str | None, Doc("what it is")]
    agreement: Annotated[ImageScores, Doc("PSNR of its images to those of our reading of the candidate, in dB")]
    ms: Annotated[Positive, Doc("one call of the denoiser, median")]
    torch_ms: Annotated[Positive, Doc("the same of torch in full precision, in the same rounds")]
    speedup: Annotated[Positive, Doc("of the library over torch: above 1 is faster")]
    speedup_interval: Annotated[list[Finite] | None, Doc("its ends at 95 %")]
    reason: Annotated[str | None, Doc("why nothing is known")]


class Judged(TypedDict):
    """A quantized checkpoint of anybody: see ``docs/judge.md``."""

    name: Annotated[str, Doc("in tables")]
    path: Annotated[str, Doc("where it lies")]
    reader: Annotated[str, Doc("what has read it")]
    maker: Annotated[str, Doc("who made it, as far as the file says")]
    bits: Annotated[Finite, Doc("stored bits of the denoiser by the number of its weights")]
    stored_bytes: Annotated[Finite, Doc("of the denoiser")]
    formats: Annotated[dict[str, Count], Doc("how many layers have their weights in which format")]
    inputs: Annotated[dict[str, Count], Doc("how many layers have their inputs computed in which way")]
    network_error: Annotated[Finite | None, Doc("of the denoiser's output, relative to full precision's norm")]
    hurting: Annotated[list[Hurting], Doc("the layers that cost most, worst first")]
    runtime: Annotated[JudgedRuntime, Doc("the candidate's own library")]


class Stage(TypedDict):
    seconds: Annotated[Finite, Doc("wall time")]
    peak_memory_bytes: Annotated[Finite, Doc("of the stage, of those that it overlaps and of their processes")]


class Machine(TypedDict, total=False):
    """See ``sd_quant.report.provenance.machine``."""

    cpu: Annotated[str | None, Doc("the processor's name")]
    cpu_int8: Annotated[list[str], Doc("its instructions for products of INT8")]
    usable_cores: Annotated[Finite, Doc("that the process may run on")]
    affinity: Annotated[list[Finite] | None, Doc("the numbers of these cores")]
    threads: Annotated[Finite, Doc("with how many of them torch and every runtime compute")]
    cpu_mhz: Annotated[list[Finite], Doc("the frequency of each core as the job started")]
    cpu_governor: Annotated[str | None, Doc("what decides the frequency")]
    memory_bytes: Annotated[Finite, Doc("of the machine")]
    gpus: Annotated[list[str], Doc("the names of its GPUs")]


class Environment(TypedDict):
    versions: Annotated[dict[str, str | None], Doc("of packages that decide results; null: not installed")]
    machine: Annotated[Machine, Doc("what the job ran on")]


class AnyRecord(TypedDict):
    """What a run and a judged checkpoint have in common."""

    schema_version: Annotated[Count, Doc("which description this record follows")]
    status: Annotated[str, Doc('"done"')]
    fingerprint: Annotated[str, Doc("digest of everything that decides the record but the machine")]
    overrides: Annotated[list[str], Doc("the knobs as given on the command line")]
    knobs: Annotated[Knobs, Doc("every knob of the job")]
    denoiser: Annotated[Denoiser, Doc("the part that is quantized")]
    prompts: Annotated[list[str], Doc("one for each image")]
    simulated: Annotated[bool, Doc("whether torch made the images, because the engine cannot execute the recipe")]
    simulated_because: Annotated[str | None, Doc("why it cannot")]
    sizes_bytes: Annotated[dict[str, Sizes], Doc("by part")]
    plans: Annotated[dict[str, EnginePlan], Doc("by part")]
    latency: Annotated[dict[str, dict[str, dict[str, Latencies]]], Doc("by engine, part or `image`, and batch size")]
    fidelity: Annotated[Fidelity, Doc("to full precision, by score")]
    layers: Annotated[Layers, Doc("how many are quantized")]
    judged: Annotated[Judged | None, Doc("of a candidate of judge.py, of which much else is absent; null for a run")]
    peak_memory_bytes: Annotated[Finite | Explained, Doc("the most memory of the job")]
    peak_cuda_memory_bytes: Annotated[Finite | Explained, Doc("the most memory of a GPU")]
    seconds: Annotated[Finite, Doc("wall time of the job from its first stage on")]
    stages: Annotated[dict[str, Stage], Doc("by name, in the order in which they ended; some overlap")]
    environment: Annotated[Environment, Doc("what the figures belong to")]
    inputs: Annotated[dict[str, Any], Doc("name to path, hash and bytes: sd_quant.report.provenance.fingerprint")]


class Record(AnyRecord, total=False):
    """The record of a run, or of a checkpoint that ``judge.py`` has judged, which lacks what only a run has."""

    fidelity_unquantized_engine: Annotated[Fidelity, Doc("the same of the unquantized engine, without scores of sets")]
    text_scores: Annotated[dict[str, Any], Doc("by variant and the keys of SCORES, and MLPerf's verdict on them")]
    parity: Annotated[dict[str, Any], Doc("relative error and tolerance, by what was compared")]
    executed: Annotated[Executed, Doc("in which numbers the engine multiplies")]
    smoothing: Annotated[dict[str, Count], Doc("smoothed layers, folded layers and the graph's multiplications")]
    sensitivity: Annotated[dict[str, Any], Doc("what the choice of layers went by, with `keep` or `quantize.budget`")]
    hand_over: Annotated[dict[str, HandedOver], Doc("by target, what was written in other tools' formats")]


class InferRecord(TypedDict):
    """What ``infer.py`` leaves."""

    schema_version: Count
    status: str
    latency: Annotated[dict[str, dict[str, dict[str, Latency]]], Doc("by engine, part or IMAGE, and batch size")]
    chosen_because: Annotated[str | None, Doc("why infer=auto chose the engine; null: it was named")]
    peak_memory_bytes: Finite
    peak_cuda_memory_bytes: Finite | Explained
    prompts: list[str]
    negative_prompts: Annotated[list[str] | None, Doc("of the prompts, in turn")]
    provenance: dict[str, Any]


# Writing


def explained(value: float | None, reason: str) -> float | Explained:
    """``value`` as the record has it: with the ``reason`` where there is none."""
    return {"value": None, "reason": reason} if value is None else value


def write_record(record: Record | InferRecord, directory: Path, shape: Any = Record) -> None:
    """Write ``metrics.json``, atomically. Whoever finds one takes the run for finished, so it is written last.

    Raises SdQuantError for a record that could not be read again, ResourceError when the disk is full.
    """
    try:
        check_shape(json.loads(json.dumps(record)), shape, RECORD)
    except ValueError as error:
        raise SdQuantError(f"{RECORD} cannot be written, because {error}; report this run") from error
    write_json(directory / RECORD, record)


# Reading


def read_record(directory: Path) -> dict[str, Any] | None:
    """The record in ``directory``, None where there is none. Raises ValueError when it is damaged, OSError."""
    record = read_object(directory / RECORD)
    if record is not None:
        check_shape(record, Record, RECORD)
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
    have. ``reason`` is a text in every dictionary. true and false are no numbers.
    """
    from pydantic import ValidationError

    try:
        validator(shape).validate_python(without_nulls(value, where), strict=True)
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        raise ValueError(f"{place_of(found['loc'], value, where)} is {one_line(found['input'], 100)}") from None


@cache
def validator(shape: Any) -> Any:
    """pydantic's validator of a shape of which every name may be missing.

    Lists and dictionaries end at their first error, because a stranger's may have millions.
    """
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

    def loosen(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") == "typed-dict-field":
                node["required"] = False
            elif node.get("type") in ("dict", "list"):
                node["fail_fast"] = True
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            loosen(inner)

    schema = TypeAdapter(shape).core_schema
    loosen(schema)
    return SchemaValidator(schema)


def without_nulls(value: Any, where: str) -> Any:
    """A copy without the names that are null and the texts that say why. Raises ValueError for another ``reason``."""
    if isinstance(value, list):
        return [without_nulls(each, where) if isinstance(each, dict | list) else each for each in value]
    if not isinstance(value, dict):
        return value
    if not isinstance(value.get("reason"), str | None):
        raise ValueError(f"{where}.reason is {one_line(value['reason'], 100)}")
    return {
        name: without_nulls(each, f"{where}.{name}")
        for name, each in value.items()
        if each is not None and name != "reason"
    }


def place_of(location: tuple[str | int, ...], value: Any, where: str) -> str:
    """``metrics.json.prompts[]``: a location of pydantic's, which also names the alternatives that it has tried."""
    for step in location:
        if isinstance(value, dict) and step in value:
            value, where = value[step], f"{where}.{step}"
        elif isinstance(value, list) and isinstance(step, int):
            value, where = value[step], f"{where}[]"
    return one_line(where)[-200:]


def record_schema() -> dict[str, Any]:
    """The JSON schema of a record, draft 2020-12. What a record lacks of it or has beyond it is allowed."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Published(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

        def typed_dict_schema(self, schema: Any) -> dict[str, Any]:
            made = super().typed_dict_schema(schema)
            return {name: each for name, each in made.items() if name not in ("required", "title")}

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "metrics.json of sd-quant",
        "version": SCHEMA_VERSION,
        **TypeAdapter(Record).json_schema(schema_generator=Published),
    }


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
