"""Quantized checkpoints of other tools: each module with ``FACTS`` reads a file format, writes it, or does both.

``recognizes(path)`` returns whether a path has the format; where ``FACTS`` has a ``method``, ``quant_method`` in the
folder's config decides instead. ``read(path, checkpoint)`` returns a ``QuantizedDenoiser`` without reading a weight. It
raises ArtifactError or ConfigError for a missing, damaged or undecoded file, and for a denoiser other than that of
``checkpoint``. ``write(checkpoint, assignment, folder)`` writes the denoiser, each layer quantized by its entry in
``assignment``, other tensors in 16 bits, with one tensor in memory at a time, and returns the path for ``read``. It
raises ResourceError when the disk is full. Both also accept an ``OtherNetwork`` as ``checkpoint``, such as a text
encoder, of a class in ``networks``. A new format is a module and its name in ``NAMES``.

Readers treat files as hostile: nothing in them is executed, sizes are checked before allocation, and a file with
unknown parts is refused with their names. ``holding`` adapts an assignment to a format. Configuration needs ``FACTS``
before torch is imported, so they are evaluated from the module's source, as in Ansible.

Alternatives not taken: opening each file with its tool's library, which executes code that the file names, needs six
libraries at once, and does not show how layers are stored (an installed library only checks results, see
``QuantizedDenoiser.runtime``); and converting exported files, whose quantized values would have to be found again.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from sd_quant.engines import RUNTIMES
from sd_quant.errors import ArtifactError, ConfigError, ResourceError
from sd_quant.files import check_downloaded
from sd_quant.quantization import formats

NAMES = (
    "comfyui", "diffusers_modelopt", "diffusers_torchao", "diffusers_sdnq", "diffusers_autoround", "gguf", "openvino",
    "onnx", "modelopt_export", "vllm_int8", "sglang_fp8", "diffusers_bfl", "diffusers_nunchaku_lite",
    "nunchaku", "diffusers_bitsandbytes", "diffusers_quanto", "diffusers_quark",
)  # fmt: skip
AS_ASSIGNED, STATIC, PER_ROW, FP16 = "as the recipe says", "static", "per row", "fp16"  # how inputs are computed
IN_BLOCKS = "in blocks, while the network runs"
OWN_INPUTS = (PER_ROW, FP16)  # in the consumer's own way, whatever the recipe says
UNETS = frozenset({"sdxl", "sd15", "sd21"})
DIFFUSERS = ("diffusers==0.42.1", "accelerate==1.15.0")  # without accelerate it loads nothing quantized


@dataclass(frozen=True)
class Server:
    """An inference server, described from its source code; docs/targets.md has the results of running its loader."""

    version: str  # the version whose source was read
    command: str  # starts the server; {folder} and the denoiser's {component} are filled in
    gpus: Mapping[str, str]  # the GPUs that each weight format needs
    pipelines: frozenset[str]  # diffusers' pipeline classes whose layers the server loads quantized
    mixed: bool = False  # whether it loads several weight formats in one network
    per_token: bool = False  # whether it loads layers whose inputs are scaled per token
    one_config: bool = False  # whether it applies one denoiser's quantization_config to a second denoiser too
    # Name patterns of layers that it builds unquantized, by pipeline, as far as its source was read. If stored in FP8,
    # vLLM-Omni and SGLang dequantize some of these; NVFP4 they refuse; block FP8 SGLang uses without the scales.
    plain: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignFormat:
    """A file format of another tool: what is read, which parts of an assignment it can store, and what opens it."""

    name: str  # the name of the format's module
    reads: str | None = None  # a description of the files or folders that are read; None: the format is only written
    method: str = ""  # ``quant_method`` in the denoiser's config of such a folder; "": see ``recognizes``
    package: str | None = None  # an optional package that reads and writes the files; also the name of our extra
    consumer: str = ""  # the tool that opens what is written
    tried: tuple[str, ...] = ()  # the packages with which a test opened the result
    formats: Mapping[str, str] = field(default_factory=dict)  # weight formats written, and how inputs are computed
    inputs_in: Mapping[str, str] = field(default_factory=dict)  # weight formats whose inputs have another format
    # the consumer's code that opens the result, with {folder}, {component} and {network} for the denoiser's place and
    # class, and {absent} for the components that are missing; or the steps that a person takes, by family
    loading: str | Mapping[str, tuple[str, ...]] = ""
    also: str = ""  # another tool that opens the folder, with {folder}, in Markdown
    untried: str = ""  # if no test opens the result with the tool itself: how it was checked, and what it needs
    broken: Mapping[str, str] = field(default_factory=dict)  # package versions that cannot open the result, and why
    weights_alone: frozenset[str] = frozenset()  # weight formats whose inputs may also stay in fp16
    convolutions: frozenset[str] = frozenset()  # weight formats also of convolutions, with four axes
    multiplied: frozenset[str] = frozenset()  # formats whose inputs may be multiplied by a pre_quant_scale
    low_rank: bool = False  # whether a low-rank branch can be stored
    zero_point: bool = False  # whether quantized inputs may have a zero point
    per_token: frozenset[str] = frozenset()  # formats whose inputs may be scaled per token; "static" is "per row" then
    rotated: frozenset[str] = frozenset()  # weight formats with which the consumer can rotate inputs
    always_rotated: frozenset[str] = frozenset()  # weight formats with which it always rotates inputs
    per_channel: Mapping[str, bool] = field(default_factory=dict)  # weight formats: scales per channel, or only one
    attention: bool = False  # whether quantized products of attention can be stored
    block: int = 1  # the number of a weight's inputs has to be a multiple of this
    multiples: Mapping[str, int] = field(default_factory=dict)  # the same for both sides of a weight, by format
    layers: tuple[str, ...] = ()  # name patterns of the layers that the consumer quantizes; empty: any layer
    always: bool = False  # whether all layers that match ``layers`` have to be quantized
    excluded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name patterns barred from a format
    joined: bool = False  # whether layers stacked in the original checkpoint are one tensor, in one format
    # name suffixes of layers that the consumer fuses to one, in one format, with its names of the fused layer
    fused: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    one_range: frozenset[str] = frozenset()  # formats in which joined or fused layers share one range
    runtime: str | None = None  # key in ``RUNTIMES`` of what executes exported graphs; None: no graphs
    families: frozenset[str] | None = None  # None: all
    # whether unquantized tensors may be bf16 in place of fp16, or the denoiser classes for which they may
    bf16: bool | frozenset[str] = False
    others: bool | None = True  # a whole pipeline's folder, with other networks' weights or not; None: no folder
    marks: bool = False  # whether marker tensors state how the model samples; False: scheduler configs do
    pads: bool = False  # whether a text is padded as the checkpoint was trained; False: it has CLIP's 77 tokens
    encoder: str = ""  # the step by which a person opens a quantized text encoder, with {component}
    networks: tuple[str, ...] = ()  # patterns of the classes of other networks that the consumer opens quantized
    left_out: tuple[str, ...] = ()  # what else of the pipeline is missing in the result
    # known problems in the consumer, by weight format; "": with any format
    traps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    servers: Mapping[str, Server] = field(default_factory=dict)  # the consumers, by name, where they are servers

    @property
    def module(self) -> ModuleType:
        return import_module(f"{__name__}.{self.name}")

    @property
    def recognizes(self) -> Callable[[Path], bool]:
        from sd_quant.interchange.stored import quantized_by

        return partial(quantized_by, method=self.method) if self.method else self.module.recognizes

    def takes_per_token(self, name: str) -> bool:
        """Return whether a recipe may scale the inputs of a layer in the format ``name`` per token."""
        return name in self.per_token or self.formats.get(name) in OWN_INPUTS

    def takes_inputs(self, name: str, inputs: str | None) -> bool:
        """Return whether weights in the format ``name`` allow inputs in the format ``inputs``; None: unquantized."""
        expected = {self.inputs_in.get(name, name), *([None] if name in self.weights_alone else [])}
        return self.formats.get(name) not in (STATIC, IN_BLOCKS) or inputs in expected

    def takes_scales(self, name: str, per_row: bool, per_token: bool) -> bool:
        """Return whether ``name`` allows weights scaled ``per_row`` (else per tensor), inputs ``per_token`` or not."""
        by_row = per_token and self.formats.get(name) == STATIC  # then weights are scaled by row, as inputs are
        return by_row or self.per_channel.get(name, per_row) == per_row

    def refuses(self, where: str, name: str) -> str | None:
        """Return why the graphs' runtime cannot compute ``where`` (such as inputs) in the format ``name``, or None."""
        return RUNTIMES[self.runtime].refuses(where, formats.FORMATS[name]) if self.runtime else None


def facts_of(name: str) -> ForeignFormat:
    """Evaluate ``FACTS`` in the source of the format's module ``name``, without importing the module."""
    source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    (facts,) = (
        statement.value
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "FACTS"
    )
    found: ForeignFormat = eval(compile(ast.Expression(facts), f"{name}.py", "eval"), globals())
    return found if found.runtime is None else with_graphs(found)


def with_graphs(facts: ForeignFormat) -> ForeignFormat:
    """Return ``facts`` completed for a pipeline of exported graphs, which store every format with an ONNX type."""
    held = [name for name, row in formats.FORMATS.items() if row.onnx_type]
    every = frozenset(held)
    return replace(
        facts, formats=dict.fromkeys(held, AS_ASSIGNED), convolutions=every, multiplied=every,
        low_rank=True, zero_point=True, per_token=every, rotated=every, attention=True,
        families=UNETS | {"sd3", "flux"}, others=False, pads=True, networks=("*",),
        left_out=("texts of more than CLIP's 77 tokens, but for a T5",),
    )  # fmt: skip


FORMATS: Mapping[str, ForeignFormat] = {name: facts_of(name) for name in NAMES}
READERS = {name: facts for name, facts in FORMATS.items() if facts.reads is not None}
TARGETS = {name: facts for name, facts in FORMATS.items() if facts.formats}


def format_of(path: Path) -> ForeignFormat:
    """Return the format of a third-party checkpoint.

    Raises ConfigError for a missing path or an unknown format, ArtifactError for a file that fits two formats, and
    ResourceError without the package that decodes it.
    """
    if not path.exists():
        raise ConfigError(f"the candidate {path} does not exist; give a file or a folder")
    found = [each for each in READERS.values() if each.recognizes(path)]
    if not found:
        for place in (path, *sorted(path.glob("*/"))):
            check_downloaded(place)
        known = "; ".join(str(each.reads) for each in READERS.values())
        raise ConfigError(f"{path} is of no kind that is known here, expected one of: {known}; or a run of quantize")
    if len(found) > 1:
        raise ArtifactError(
            f"{path} can be read in {len(found)} ways ({', '.join(each.name for each in found)}), expected one; "
            "give the file that is meant, or a folder with nothing else in it"
        )
    (only,) = found
    if only.package is not None and find_spec(only.package) is None:
        raise ResourceError(
            f"{path} is decoded by the package {only.package}, which is not installed; "
            f"pip install 'sd-quant[{only.package}]'"
        )
    return only
