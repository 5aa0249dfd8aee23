"""The record of a run, ``metrics.json``: its schema, writing and reading.

The schema is ``Record`` alone: mypy checks the stages that fill it in, pydantic checks each record that is written or
read (records come from strangers too), and the JSON schema is generated from it. It consists of typed dictionaries, so
a record stays a plain dictionary; pydantic, a tenth of a second to import, is imported only for a check. Alternative
not taken: ``BaseModel``, where each class would need the names of all versions.

A number that does not exist is null with a ``reason`` beside it, ``{"value": null, "reason": "..."}``, or absent.
A missing name is no error, and an unknown name may hold anything: records of other versions have other names.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Lt
from typing_extensions import TypedDict, is_typeddict

from sd_quant.errors import SdQuantError
from sd_quant.files import digest, read_regular, write_json
from sd_quant.metrics import Against, fidelity_scores
from sd_quant.text import one_line

RECORD = "metrics.json"
SCHEMA_VERSION = 3
DONE = "done"
TORCH = "torch"  # the engine that every other is compared with
CANDIDATE = "candidate"  # the column of a candidate's name, in place of the knobs in which a sweep's jobs differ
LORA, CONTROLNET = "lora ", "controlnet "  # begin the names of inputs that are one
VAE = "vae"  # the name of an autoencoder of another file
IMAGE = "image"  # beside the parts in ``latency``: from prompt to image
VARIANTS = ("full_precision", "quantized")
LARGEST = 10**18  # of a record's numbers, in any unit: a table has no place for more
ABSENT = "not in the record"


# The shape


@dataclass(frozen=True)
class Doc:
    """Description of a field, for the JSON schema and docs/metrics.md."""

    text: str

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return handler(core_schema) | {"description": self.text}


class ByScore:
    """Pydantic schema of the scores against full precision, with names and types from ``fidelity_scores()``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        types = {Against.IMAGES: ImageScores, Against.LATENTS: list[Finite | None]}
        names: dict[str, Any] = {}
        for score in fidelity_scores():
            names[score.key] = Annotated[types[score.against], Doc(score.title)]
            if score.against is Against.LATENTS:
                names[score.reason_key] = Annotated[str | None, Doc("why some steps have none")]
        return handler.generate_schema(TypedDict("Fidelity", names, total=False))  # type: ignore[operator]


Finite = Annotated[float, Gt(-LARGEST), Lt(LARGEST)]
Positive = Annotated[float, Gt(1 / LARGEST), Lt(LARGEST)]  # something is divided by it
Count = Annotated[int, Gt(-LARGEST), Lt(LARGEST)]
Fidelity = Annotated[dict[str, "ImageScores"], ByScore()]


class Explained(TypedDict, total=False):
    """Stands for a number, mostly for one that does not exist."""

    value: Finite | None
    reason: Annotated[str | None, Doc("why there is none")]


class Latency(TypedDict, total=False):
    """Milliseconds of one engine; see ``sd_quant.metrics.latency``. Only ``p50_ms`` where they are added up."""

    p50_ms: Annotated[Positive | None, Doc("the median, which tables show")]
    mean_ms: Annotated[Finite, Doc("the mean")]
    p90_ms: Annotated[Finite, Doc("90th percentile")]
    p99_ms: Annotated[Finite, Doc("99th percentile")]
    min_ms: Annotated[Finite, Doc("the smallest")]
    std_ms: Annotated[Finite, Doc("standard deviation")]
    n: Annotated[Count, Doc("timed rounds")]
    warmup: Annotated[Count, Doc("calls after each opening, before the timed ones")]
    clock: Annotated[str, Doc("the processor's clock, or events of a GPU")]
    samples_ms: Annotated[list[Finite], Doc("each round's call, or the mean of as many as an image makes, in order")]
    composed: Annotated[str, Doc("how the latency was added up, where it was not measured as a whole")]
    rest: Annotated[Finite, Doc("of an image: time beside its denoiser, as a share of the unquantized one's calls")]
    calls_share: Annotated[Finite, Doc("of an image of other calls: their time as a share of a whole image's calls")]
    reason: Annotated[str, Doc("why there is no latency")]


class BetweenOccasions(TypedDict):
    """How far a figure is apart on this machine's earlier occasions: see ``sd_quant.report.occasions``."""

    deviation: Annotated[float, Ge(0), Lt(LARGEST), Doc("standard deviation of its logarithm, without its own error")]
    degrees: Annotated[int, Ge(1), Lt(10_000), Doc("degrees of freedom of that")]
    occasions: Annotated[Count, Doc("on which it rests")]


class Conditions(TypedDict, total=False):
    """The conditions of rounds: see ``sd_quant.metrics.latency`` and ``sd_quant.metrics.neighbours``."""

    together: Annotated[bool, Doc("whether all engines were in the same rounds")]
    stopped: Annotated[str, Doc("why the rounds ended: a narrow interval, the time budget or the number of rounds")]
    others: Annotated[Finite | None, Doc("share of the processors' time that other processes took")]
    steal: Annotated[Finite | None, Doc("share of that time that a hypervisor gave to other machines")]
    reference_spread: Annotated[Finite | None, Doc("spread of the unquantized engine's latency over the rounds")]
    openings: Annotated[list[Count], Doc("rounds of each opening of the engines; empty if they were opened once")]
    probes: Annotated[list[dict[str, Finite | None]], Doc("readings of `sd_quant.metrics.machine_probe`, in order")]
    shown: Annotated[dict[str, Finite | None], Doc("90th percentile of what it has reached before")]
    between: Annotated[dict[str, BetweenOccasions], Doc("by `call`, `image` or `recipes` (images of two); or a reason")]


class WholeImages(TypedDict, total=False):
    speedup: Annotated[Positive, Doc("full precision by quantized: above 1 is faster")]
    speedup_interval: Annotated[list[Finite] | Explained, Doc("ends of its 95 % interval")]
    agree: Annotated[bool, Doc("whether the interval meets that of the speed-up by the denoiser's calls")]


class Latencies(TypedDict, total=False):
    """One part at one batch size, unquantized and quantized, timed in the same rounds."""

    full_precision: Annotated[Latency, Doc("the unquantized part")]
    quantized: Annotated[Latency, Doc("the same part quantized; absent for parts that are not")]
    speedup: Annotated[Positive | Explained, Doc("full precision by quantized over the rounds: above 1 is faster")]
    speedup_interval: Annotated[list[Finite] | Explained, Doc("ends of its 95 % interval")]
    own_interval: Annotated[list[Finite], Doc("the same of these rounds alone, where `rounds.between` has widened it")]
    rounds: Annotated[Conditions, Doc("conditions of the rounds")]
    whole_images: Annotated[WholeImages, Doc("of an image: the speed-up, measured on whole images")]


class ImageScores(TypedDict, total=False):
    """A score of single images: ``sd_quant.metrics.fidelity.summary``."""

    mean: Annotated[Finite | None, Doc("over the images that have a score")]
    min: Annotated[Finite | None, Doc("the worst image's, where more is better")]
    max: Annotated[Finite | None, Doc("the worst image's, where less is better")]
    worst_index: Annotated[Count | None, Doc("index of the worst image, from 0")]
    values: Annotated[list[Finite | None], Doc("one for each prompt")]
    reason: Annotated[str | None, Doc("why some images have none")]


class OfVideos(TypedDict):
    mean: Annotated[Finite | None, Doc("over the videos")]
    interval: Annotated[list[Finite | None], Doc("both ends at 95 %; null for one video")]
    values: Annotated[list[Finite], Doc("one for each video")]
    reason: Annotated[str | None, Doc("why there is none")]


class Video(TypedDict):
    """How the frames of videos differ from full precision's: see ``sd_quant.metrics.video``."""

    frames: Annotated[Count, Doc("of a video")]
    psnr: Annotated[ImageScores, Doc("of all frames, video by video")]
    flicker: Annotated[OfVideos, Doc("levels of 255 by which the change from frame to frame errs, root mean square")]
    change: Annotated[OfVideos, Doc("the mean change from frame to frame as a share of full precision's")]


class Degenerate(TypedDict):
    """A broken image, such as a black one, whose reference is not: see ``sd_quant.metrics.degenerate``."""

    index: Annotated[Count, Doc("of the image, from 0")]
    reason: Annotated[str | None, Doc('what it is, behind "image 3 is"')]


class Sizes(TypedDict):
    onnx_full_precision: Annotated[Finite | Explained, Doc("the unquantized part, with its weights")]
    onnx_quantized: Annotated[Finite | Explained, Doc("the quantized part")]
    plan: Annotated[Finite | Explained, Doc("the TensorRT plan of what is delivered")]
    weights_fp32: Annotated[Finite, Doc("what the same weights take in fp32, for comparison")]


class Denoiser(TypedDict):
    part: Annotated[str, Doc("its name among the parts")]
    samples_per_image: Annotated[Finite, Doc("samples in one call for each image: 2 with guidance")]
    calls: Annotated[dict[str, Positive] | None, Doc("in an image, of each of several denoisers; null: there is one")]


# Only the knobs that are read are named.
class ModelKnobs(TypedDict, total=False):
    path: Annotated[Any, Doc("as it was given")]


class InferKnobs(TypedDict, total=False):
    engine: Annotated[str, Doc("what ran the quantized model")]
    batch_size: Annotated[Finite, Doc("images at a time")]


class Knobs(TypedDict, total=False):
    """Knobs of ``quantize`` by name and those of other groups by group."""

    model: Annotated[ModelKnobs, Doc("the section `model`")]
    infer: Annotated[InferKnobs, Doc("the section `infer`")]


class EnginePlan(TypedDict, total=False):
    targets: Annotated[list[str], Doc("compute capabilities that the plan was built for, such as SM89")]
    attention: Annotated[str | None, Doc("why its attention is in high precision though the ONNX file's is quantized")]


class Layers(TypedDict):
    quantized: Annotated[Finite, Doc("layers whose weight is quantized")]
    high_precision: Annotated[Finite, Doc("layers that stay in high precision")]


class Moved(TypedDict, total=False):
    """The distance of a quantized part's output from full precision's: see ``sd_quant.metrics.embeddings``."""

    relative_error: Annotated[Finite | None, Doc("of the norm of the difference to full precision's")]
    cosine: Annotated[Finite, Doc("of the text's tokens, their mean; without the first token where there are several")]
    worst: Annotated[Finite, Doc("the smallest cosine of these tokens")]
    first_token: Annotated[Finite, Doc("cosine of the first token, which is the same in every text")]


class LargestActivation(TypedDict):
    """Where a part's activations are largest in calibration: see ``sd_quant.calibration.overflow``."""

    place: Annotated[str, Doc("the layer, and whether it is its input or its output")]
    largest: Annotated[Finite, Doc("the magnitude; fp16 holds 65504")]


class QuantizedPart(TypedDict):
    preset: Annotated[str, Doc("by which it is quantized")]
    layers: Annotated[Layers, Doc("how many are quantized")]
    outputs: Annotated[dict[str, Moved], Doc("how far its outputs for the first prompts moved, by name")]


class Executed(TypedDict):
    count: Annotated[Finite | None, Doc("layers that are multiplied in codes of their format")]
    of: Annotated[Finite | None, Doc("all such layers")]
    weights_only: Annotated[Finite | None, Doc("further layers, of which the weight alone is quantized")]
    fell_back: Annotated[list[str], Doc("names of layers that it computes in floating point")]
    unknown: Annotated[list[str], Doc("names of layers of which the engine does not tell")]
    reason: Annotated[str | None, Doc("why nothing is known")]


class HandedPart(TypedDict):
    quantized: Annotated[Finite, Doc("layers that are quantized in the folder; 0: it is not, or as in the checkpoint")]
    of: Annotated[Finite, Doc("layers that the recipe quantizes")]
    lost: Annotated[dict[str, Count], Doc("layers and attentions that stay in high precision, by reason")]


class HandedOver(HandedPart):
    """An export to another tool, with the figures of its denoiser: see ``docs/hand_over.md``."""

    folder: Annotated[str, Doc("where it lies")]
    inputs: Annotated[dict[str, str], Doc("how the tool computes inputs, by the format of weights")]
    parts: Annotated[dict[str, HandedPart], Doc("other parts that the recipe quantizes, by name")]
    fidelity: Annotated[dict[str, ImageScores] | None, Doc("what quantization changes, by score; null without images")]
    bytes: Annotated[dict[str, Count], Doc("bytes of the larger files, by name")]


class Hurting(TypedDict):
    name: Annotated[str, Doc("its name in diffusers")]
    role: Annotated[str, Doc("its role in the network")]
    format: Annotated[str, Doc("format of its weight")]
    output_error: Annotated[Finite | None, Doc("of its output on real inputs, relative to full precision's norm")]
    network_error: Annotated[Finite | None, Doc("of the network's output with this layer alone; null if not measured")]


class JudgedRuntime(TypedDict, total=False):
    """Results of the library that a third-party checkpoint is made for, on this machine."""

    name: Annotated[str | None, Doc("its name")]
    agreement: Annotated[ImageScores, Doc("PSNR of its images against our reading of the file, dB")]
    ms: Annotated[Positive, Doc("one call of the denoiser, median")]
    torch_ms: Annotated[Positive, Doc("one call of torch in full precision, in the same rounds")]
    speedup: Annotated[Positive, Doc("of the library over torch: above 1 is faster")]
    speedup_interval: Annotated[list[Finite] | None, Doc("ends of its 95 % interval")]
    reason: Annotated[str | None, Doc("why nothing is known")]


class JudgedPart(TypedDict):
    reader: Annotated[str, Doc("the reader that opened it")]
    maker: Annotated[str, Doc("the tool that made it, as far as the file says")]
    bits: Annotated[Finite, Doc("stored bits per weight of the denoiser, or of the part")]
    stored_bytes: Annotated[Finite, Doc("of the denoiser, or of the part's network")]
    formats: Annotated[dict[str, Count], Doc("numbers of layers, by the format of their weights")]


class Judged(JudgedPart):
    """A third-party quantized checkpoint, with the figures of its denoiser: see ``docs/judge.md``."""

    name: Annotated[str, Doc("in tables")]
    path: Annotated[str, Doc("where it lies")]
    loras: Annotated[str | None, Doc("place of full precision's LoRAs: fused before quantization, or beside weights")]
    inputs: Annotated[dict[str, Count], Doc("numbers of layers, by how their inputs are computed")]
    network_error: Annotated[Finite | None, Doc("of the denoiser's output, relative to full precision's norm")]
    hurting: Annotated[list[Hurting], Doc("the layers with the largest errors, worst first")]
    parts: Annotated[dict[str, JudgedPart], Doc("other parts that it has quantized, by name")]
    runtime: Annotated[JudgedRuntime, Doc("the library that it is made for")]


class Stage(TypedDict):
    seconds: Annotated[Finite, Doc("wall time")]
    peak_memory_bytes: Annotated[Finite, Doc("of the stage, of those that it overlaps and of their processes")]


class Machine(TypedDict, total=False):
    """See ``sd_quant.report.provenance.machine``."""

    cpu: Annotated[str | None, Doc("the processor's name")]
    cpu_int8: Annotated[list[str], Doc("its instructions for products of INT8")]
    usable_cores: Annotated[Finite, Doc("that the process may run on")]
    affinity: Annotated[list[Finite] | None, Doc("the numbers of these cores")]
    threads: Annotated[Finite, Doc("threads of torch and of every runtime")]
    cpu_mhz: Annotated[list[Finite], Doc("the frequency of each core as the job started")]
    cpu_governor: Annotated[str | None, Doc("the policy for the frequency, such as performance")]
    memory_bytes: Annotated[Finite, Doc("of the machine")]
    gpus: Annotated[list[str], Doc("the names of its GPUs")]
    compute_capabilities: Annotated[list[str], Doc("those of its GPUs, such as SM90")]


class Environment(TypedDict):
    versions: Annotated[dict[str, str | None], Doc("of packages that decide results; null: not installed")]
    machine: Annotated[Machine, Doc("what the job ran on")]


class ReuseChosen(TypedDict):
    """How a schedule of calls was chosen: see ``sd_quant.inference.reuse``."""

    schedule: Annotated[str, Doc("a letter a step: c computed, r used again, e extrapolated")]
    candidates: Annotated[dict[str, Finite], Doc("the schedules among which it was, with their errors on the others")]
    error: Annotated[Finite, Doc("of the final latents, relative to their norm, on prompts that did not choose it")]
    even_error: Annotated[Finite, Doc("the same with as many reused steps evenly spread")]
    fewer_error: Annotated[Finite, Doc("the same with as few steps")]
    prompts: Annotated[Count, Doc("on which these errors are measured")]


class PreciseChosen(TypedDict):
    """How the steps with unquantized inputs were chosen: see ``sd_quant.inference.precision``."""

    schedule: Annotated[str, Doc("a letter a step: c computed, h with unquantized inputs")]
    candidates: Annotated[dict[str, Finite], Doc("dB that each schedule gains on the prompts that chose")]
    gain_db: Annotated[list[Finite | None], Doc("what the schedule gains on others, with both ends of its interval")]
    prompts: Annotated[Count, Doc("on which gains are measured")]


class Control(TypedDict):
    steps: Annotated[Count, Doc("of denoising")]
    fidelity: Annotated[dict[str, ImageScores], Doc("to full precision in all steps, by score")]


class Levers(TypedDict, total=False):
    """The levers beside bits: see ``sd_quant.stages.levers``."""

    steps: Annotated[Count, Doc("of denoising")]
    schedule: Annotated[str | None, Doc("which steps are computed; null: all")]
    calls: Annotated[Count, Doc("calls of the denoiser for an image")]
    precise_calls: Annotated[dict[str, Count], Doc("of these by letter: h with unquantized inputs, f full precision")]
    share: Annotated[Finite, Doc("time of these calls as a share of all calls of a whole image")]
    chosen: Annotated[ReuseChosen | None, Doc("how the schedule was chosen; null where it was given")]
    precise: Annotated[PreciseChosen | None, Doc("how its precise steps were chosen; null where they were not")]
    twin: Annotated[dict[str, ImageScores], Doc("of the recipe's images to full precision's by the same calls")]
    calls_alone: Annotated[dict[str, ImageScores], Doc("of these to the reference: the calls without the bits")]
    bits_alone: Annotated[dict[str, ImageScores], Doc("of the bits without the other calls, to the reference")]
    control: Annotated[Control | None, Doc("full precision with fewer steps in no less time")]
    reason: Annotated[str | None, Doc("why there is no control")]


class AnyRecord(TypedDict):
    """The names that the records of runs and of judged checkpoints share."""

    schema_version: Annotated[Count, Doc("version of this description")]
    status: Annotated[str, Doc('"done"')]
    fingerprint: Annotated[str, Doc("digest of all inputs of the record except the machine")]
    overrides: Annotated[list[str], Doc("the knobs as given on the command line")]
    knobs: Annotated[Knobs, Doc("all knobs of the job")]
    denoiser: Annotated[Denoiser, Doc("the part that is quantized")]
    prompts: Annotated[list[str], Doc("one for each image")]
    simulated: Annotated[bool, Doc("whether torch made the images, because the engine cannot execute the recipe")]
    simulated_because: Annotated[str | None, Doc("why it cannot")]
    sizes_bytes: Annotated[dict[str, Sizes], Doc("by part")]
    plans: Annotated[dict[str, EnginePlan], Doc("by part")]
    latency: Annotated[dict[str, dict[str, dict[str, Latencies]]], Doc("by engine, part or `image`, and batch size")]
    fidelity: Annotated[Fidelity, Doc("to full precision, by score")]
    video: Annotated[Video | None, Doc("of frames; null where images do not move")]
    text_scores: Annotated[dict[str, Any], Doc("by variant and score, MLPerf's too; [more](sweeps.md#more-scores)")]
    degenerate: Annotated[list[Degenerate], Doc("broken images of the quantized variant; empty if there are none")]
    layers: Annotated[Layers, Doc("how many of the denoiser, or of all that are, are quantized")]
    judged: Annotated[Judged | None, Doc("the third-party checkpoint that was judged; null for a run")]
    peak_memory_bytes: Annotated[Finite | Explained, Doc("the most memory of the job")]
    peak_cuda_memory_bytes: Annotated[Finite | Explained, Doc("the most memory of a GPU")]
    seconds: Annotated[Finite, Doc("wall time of the job from its first stage on")]
    stages: Annotated[dict[str, Stage], Doc("by name, in the order in which they ended; some overlap")]
    environment: Annotated[Environment, Doc("versions and machine of the figures")]
    inputs: Annotated[dict[str, Any], Doc("path, hash and bytes by name: sd_quant.report.provenance.fingerprint")]


class Record(AnyRecord, total=False):
    """The record of a run, or of a checkpoint that ``judge.py`` has judged, which lacks the names below."""

    fidelity_unquantized_engine: Annotated[Fidelity, Doc("the same of the unquantized engine, without scores of sets")]
    parity: Annotated[dict[str, Any], Doc("relative error and tolerance, by what was compared")]
    parts: Annotated[dict[str, QuantizedPart], Doc("other quantized parts than the denoiser, by name")]
    peaks: Annotated[dict[str, LargestActivation], Doc("largest activations, by part; empty if not known")]
    executed: Annotated[Executed, Doc("how the engine multiplies")]
    smoothing: Annotated[dict[str, Count], Doc("smoothed layers, folded layers and the graph's multiplications")]
    sensitivity: Annotated[dict[str, Any], Doc("basis of the choice of formats by `quantize.budget` or `fit`")]
    hand_over: Annotated[dict[str, HandedOver], Doc("exports to other tools, by target")]
    levers: Annotated[Levers | None, Doc("other calls of the denoiser than the reference's; null: bits alone")]


class InferRecord(TypedDict):
    """The record of ``infer.py``."""

    schema_version: Count
    status: str
    latency: Annotated[dict[str, dict[str, dict[str, Latency]]], Doc("by engine, part or IMAGE, and batch size")]
    chosen_because: Annotated[str | None, Doc("why infer=auto chose the engine; null where it was named")]
    peak_memory_bytes: Finite
    peak_cuda_memory_bytes: Finite | Explained
    prompts: list[str]
    negative_prompts: Annotated[list[str] | None, Doc("one for each prompt")]
    provenance: dict[str, Any]


# Writing


def explained(value: float | None, reason: str) -> float | Explained:
    """Return ``value``, or ``{"value": None, "reason": reason}`` if it is None."""
    return {"value": None, "reason": reason} if value is None else value


def write_record(record: Record | InferRecord, directory: Path, shape: Any = Record) -> None:
    """Write ``metrics.json`` atomically. Write it last: its presence marks a run as finished.

    Raises SdQuantError for a record that does not fit ``shape``, ResourceError when the disk is full.
    """
    try:
        check_shape(json.loads(json.dumps(record)), shape, RECORD)
    except ValueError as error:
        raise SdQuantError(f"{RECORD} cannot be written, because {error}; report this run") from error
    write_json(directory / RECORD, record)


# Reading


def read_record(directory: Path) -> Record | None:
    """Read ``metrics.json`` in ``directory``, None if missing. Raises ValueError if damaged, OSError if unreadable."""
    if (record := read_object(directory / RECORD)) is None:
        return None
    check_shape(record, Record, RECORD)
    return parsed(record)


class Part(dict):
    """A part of a record, in which a missing name gives None, or an empty part or list where ``Record`` has one."""

    def __init__(self, content: Mapping[str, Any], shape: Any) -> None:
        self.shape = shape
        both = ((name, each, parsed(each, type_in(shape, name))) for name, each in content.items())
        super().__init__((name, value) for name, each, value in both if each is not None or value is None)

    def __missing__(self, name: str) -> Any:
        return parsed(None, type_in(self.shape, name))


@cache
def type_in(shape: Any, name: str) -> Any:
    return get_type_hints(shape).get(name) if is_typeddict(shape) else get_args(shape)[1]


def parsed(value: Any, shape: Any = Record) -> Any:
    """Return a value of the type ``shape`` as a ``Part`` or a list of parts; None gives an empty one."""
    if get_origin(shape) in (Union, UnionType):
        shape = get_args(shape)[0]  # before null and ``Explained``
    if get_origin(shape) is list and isinstance(value, list | None):
        return [parsed(each, get_args(shape)[0]) for each in value or []]
    is_part = get_origin(shape) is dict or is_typeddict(shape)
    return Part(value or {}, shape) if is_part and isinstance(value, Mapping | None) else value


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file, None if missing. Raises ValueError for other content, OSError if unreadable."""
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
    """Check parsed JSON against the type ``shape``. Raises ValueError unless it fits; messages begin with ``where``.

    Null fits all but list entries; names may be missing or unknown. A value named ``reason`` has to be a text or null.
    """
    from pydantic import ValidationError

    try:
        validator(shape).validate_python(without_nulls(value, ((), where)), strict=True)
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        raise ValueError(f"{place_of(found['loc'], value, where)} is {one_line(found['input'], 100)}") from None


@cache
def validator(shape: Any) -> Any:
    """Build pydantic's validator of ``shape``: all names optional; lists and dictionaries stop at their first error."""
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


def without_nulls(value: Any, names: tuple) -> Any:
    """Copy ``value`` without null entries and ``reason`` texts. Raises ValueError for a ``reason`` other than a text.

    ``names``: the path to the value as nested pairs ``(outer, name)``; a joined text would grow at every level.
    """
    if isinstance(value, list):
        return [without_nulls(each, names) if isinstance(each, dict | list) else each for each in value]
    if not isinstance(value, dict):
        return value
    if not isinstance(value.get("reason"), str | None):
        where = ["reason"]
        while names:
            names, name = names
            where.insert(0, name)
        raise ValueError(f"{one_line('.'.join(where))[-200:]} is {one_line(value['reason'], 100)}")
    return {
        name: without_nulls(each, (names, name))
        for name, each in value.items()
        if each is not None and name != "reason"
    }


def place_of(location: tuple[str | int, ...], value: Any, where: str) -> str:
    """Format a pydantic error's ``location`` in ``value``, named ``where``, as ``metrics.json.prompts[]``."""
    for step in location:
        if isinstance(value, dict) and step in value:
            value, where = value[step], f"{where}.{step}"
        elif isinstance(value, list) and isinstance(step, int):
            value, where = value[step], f"{where}[]"
    return one_line(where)[-200:]


def record_schema() -> dict[str, Any]:
    """Build the JSON schema of a record, draft 2020-12, in which all names are optional and unknown names allowed."""
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
    """Format an exception as one short line without control characters."""
    return one_line(f"{type(error).__name__}: {error}", 300)


def at(record: Any, *keys: Any) -> Any:
    """Return the value at nested ``keys``, or None; for other files, and for what ``Record`` leaves open."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def base_sha256(made: Mapping[str, Any]) -> str | None:
    """Return the hash of weights without LoRAs: the checkpoint's, or one over it and any given ControlNets and VAE."""
    inputs = at(made, "inputs") or {}
    own = at(inputs, "checkpoint", "sha256")
    names = [each for each in inputs if each == VAE or each.startswith(CONTROLNET)]
    others = [each for name in names for each in (name, at(inputs, name, "sha256"))]
    return digest(json.dumps([own, *others])) if own and others else own


def weights_sha256(made: Mapping[str, Any]) -> str | None:
    """Return the hash of a model's weights, LoRAs with their strengths included; None if the checkpoint has no hash.

    ``made`` is a record, or the result of ``provenance.made_of``.
    """
    own, inputs = base_sha256(made), at(made, "inputs")
    loras = [[name, at(inputs, name, "sha256")] for name in inputs or () if name.startswith(LORA)]
    return digest(json.dumps([own, *loras])) if own and loras else own
