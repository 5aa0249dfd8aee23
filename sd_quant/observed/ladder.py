"""Export of a network to ONNX, verified on recorded calls; the network is changed step by step until a graph is right.

    rung = climb(build, calls, weights)  # a network that cannot be exported gives a refusal, not an exception
    rung.cause                           # None, or the sentence that says why the network is refused
    part = part_of(component, rung.signature, rung, build)  # a Part as families write it by hand
    trace(lambda: part.wrap(build()), part.contract)        # ONNX, weights as named inputs after the contract's own

``build`` returns the network with parameters on the meta device and buffers in memory, in evaluation mode or not
(``empty.without_weights``); ``weights`` maps the network's own names of parameters to tensors. The graph's names of
weights are these names with ``network.`` in front. A weight that modules share may be in the mapping under only one
of its names (``empty.reader`` finds it).

A rung is a set of changes of the network (remedies, ``RUNGS``), each larger than the previous rung's; the first rung
that serves all calls in one runtime is taken. A graph serves a call if a fresh session of the runtime returns outputs
of the network's own shapes, with an error of at most ``TOLERANCE`` of their norm. Alternative not taken: trusting every
graph that a tracer returns; some returned the traced size's shape for a new size.
"""

import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd_quant.engines import RUNTIMES, load_engine
from sd_quant.engines.base import Engine
from sd_quant.errors import ArtifactError, SdQuantError
from sd_quant.export.qdq import write_onnx
from sd_quant.export.tracing import trace
from sd_quant.models.empty import Read, random_weights, reader, run, shortened, with_weights
from sd_quant.models.parts import Part
from sd_quant.observed.calls import (
    BATCH,
    LARGER,
    Call,
    Signature,
    holds_tensors,
    leaves,
    one_structure,
    result_tensors,
    signature_of,
    with_outputs,
)
from sd_quant.observed.pairs import Numbers
from sd_quant.observed.part import BUFFERS, INPUTS, KNOWN, PREFIX, REALS, SIZES, Rung, Verified, part_of
from sd_quant.observed.sizes import Outputs, input_trees, known_without_weights, look, named_tensors, of_sizes_alone
from sd_quant.text import one_line

LOG = logging.getLogger(__name__)
TOLERANCE = 1e-4  # largest error of an output, relative to its norm, in fp32
ROUNDED = 5e-2  # likewise, with weights in fp16 or bf16
LARGE = 150_000_000  # parameters; a larger network is verified as a copy with two blocks a list and random weights
BLOCKS = 2
IN_FP32 = "weights stay in fp32"  # begins a note
POSITION = re.compile(r"(^|_)(ids|pos|positions?|rotary|rope|freqs?|cos|sin|coords?|grid)(_|$)")  # names of inputs
READ_ONNX = tuple(name for name, runtime in RUNTIMES.items() if runtime.file == "onnx")  # runtimes that verify
Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Case:
    """A network with weights, and its outputs for recorded calls, against which its graph is verified."""

    build: Build  # the network without weights
    network: nn.Module  # with weights
    read: Read  # the weights
    method: str  # that the pipeline calls
    calls: Sequence[Call]
    expected: Sequence[tuple[Tensor, ...]]  # what the network returns for each of the calls
    output: Any  # what the network returns for the first call, with its structure

    @cached_property
    def counts(self) -> dict[str, int]:
        """Paths of the modules whose outputs depend on tensor sizes alone, with each module's number of calls."""
        return of_sizes_alone(self.build, self.method, self.calls)

    @cached_property
    def numbers(self) -> Numbers:
        """Whether the network computes complex or fp64 numbers."""
        with torch.no_grad(), Numbers() as numbers:
            run(self.network, self.method, self.calls[0].arguments)
        return numbers

    @cached_property
    def known(self) -> dict[str, int]:
        """Paths of the modules without weights whose inputs depend on no weight, with each module's number of calls."""
        seen = known_without_weights(self.build, self.method, self.calls[0].arguments)
        return {path: len(outputs) for path, outputs in seen.items() if holds_tensors(outputs)}

    @cached_property
    def seen(self) -> list[Outputs]:
        """Outputs of the modules in ``counts`` and ``known``, for each recorded call."""
        paths = {**self.counts, **self.known}
        return [look(self.network, self.method, call.arguments, list(paths)) for call in self.calls]

    def signature(self, remedies: tuple[str, ...], numbers: Sequence[int]) -> Signature:
        """Return the signature for the calls with indices ``numbers`` of the network changed by ``remedies``.

        Raises ArtifactError where the remedies change nothing, or are not enough for all of the calls.
        """
        trees, extra = {}, dict[str, list[Tensor]]()
        paths = (self.counts if SIZES in remedies else {}) | (self.known if KNOWN in remedies else {})
        if SIZES in remedies and not self.counts:
            raise ArtifactError("no module depends on sizes alone")
        if KNOWN in remedies and not self.known.keys() - self.counts:
            raise ArtifactError("no other module does without weights")
        if paths:
            trees = input_trees({path: self.seen[0][path] for path in paths})
            tensors = [named_tensors(trees, self.seen[number]) for number in numbers]
            extra = {name: [each[name] for each in tensors] for name in tensors[0]}
        if not remedies and self.numbers.complex:
            raise ArtifactError("no runtime computes with complex numbers")
        if remedies == (REALS,) and not self.numbers.changed:
            raise ArtifactError("nothing is complex or in fp64")
        calls = [self.calls[number] for number in numbers]
        return replace(with_outputs(signature_of(calls, extra), self.output), outside=trees)


RUNGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plain", ()),
    ("complex numbers as pairs of reals, fp32 for fp64", (REALS,)),
    ("positions outside of the graph", (REALS, SIZES)),
    ("all that needs no weights outside of the graph", (REALS, KNOWN)),
)
ONE_BATCH_SIZE, ONE_IMAGE_SIZE, ONE_SIZE = "one graph a batch size", "one graph an image size", "one graph a size"


def climb(
    build: Build,
    calls: Sequence[Call],
    weights: Mapping[str, Tensor],
    *,
    method: str = "forward",
    dtype: torch.dtype = torch.float16,
    threads: int | None = None,
    large: int = LARGE,
) -> Rung:
    """Return the first rung whose graph serves the ``calls`` in at least one runtime, or a rung with ``cause`` set.

    All rungs are tried for all calls, then for calls of one batch size, one image size, and both. Calls structured
    unlike the first are not served. The graph is verified in fp32 for all served calls (``Rung.serves``), and with
    weights in ``dtype`` for one call. A network above ``large`` parameters is verified with few blocks (``BLOCKS``).
    """
    try:
        structure = one_structure(calls)
        case = case_of(build, [calls[number] for number in structure], weights, method, large)
    except SdQuantError as error:
        return Rung("refused", method=method, cause=str(error))
    notes = [] if case.build is build else [f"verified with {BLOCKS} blocks of each list and random weights"]
    if len(structure) < len(calls):
        notes.append(f"{len(calls) - len(structure)} of {len(calls)} calls have other arguments and are not served")
    everything = range(len(structure))
    one_batch_size = [number for number in everything if case.calls[number].run != BATCH]
    one_image_size = [number for number in everything if case.calls[number].run != LARGER]
    one_size = [number for number in one_batch_size if number in one_image_size]
    causes, not_tried = dict[str, str](), dict[str, str]()  # by the rung
    for scope, numbers in {
        "": everything, ONE_BATCH_SIZE: one_batch_size, ONE_IMAGE_SIZE: one_image_size, ONE_SIZE: one_size
    }.items():  # fmt: skip
        if scope and len(numbers) == len(everything):  # tried already
            continue
        for words, remedies in RUNGS:
            name = f"{scope}: {words}" if scope else words
            try:
                signature = case.signature(remedies, numbers)
            except Exception as error:  # whatever a network raises where it is looked at
                not_tried[name] = cause_of(error)
                LOG.debug("%s: %s", name, not_tried[name])
                continue
            serves = tuple(structure[number] for number in numbers)
            rung = Rung(name, signature, method, remedies, serves=serves, notes=(*notes, *signature.notes))
            verified, refused = outcome(case, numbers, rung, READ_ONNX, threads, TOLERANCE)
            LOG.debug("%s: %s, refused %s", name, verified, refused)
            if verified:
                return in_dtype(case, replace(rung, verified=verified, refused=refused), dtype, threads)
            causes[name] = next(iter(refused.values()))
    causes = causes or not_tried
    plainest, last = next(iter(causes.items())), list(causes.items())[-1]
    sentence = "no graph computes it within the tolerance: " + "; ".join(
        f"{name}: {cause}" for name, cause in dict([plainest, last]).items()
    )
    return Rung("refused", method=method, refused=causes, notes=tuple(notes), cause=sentence)


def in_dtype(case: Case, rung: Rung, dtype: torch.dtype, threads: int | None) -> Rung:
    """Return the rung with weights in ``dtype`` if its graph then computes one call within ``ROUNDED``, else in fp32.

    Tried in order: buffers in fp32; buffers in ``dtype``; also linears' and convolutions' inputs cast to the weights'
    dtype. Each is tried with the inputs of ``kept_single`` in fp32, then with all float inputs in ``dtype``.
    """
    if dtype == torch.float32:
        return rung
    runtime, cause, half = next(iter(rung.verified)), "", str(dtype).removeprefix("torch.")
    for more in ((), (BUFFERS,), (BUFFERS, INPUTS)):
        for single in dict.fromkeys((kept_single(rung.signature), ())):
            tried = replace(rung, remedies=(*rung.remedies, *more), weights=half, single=single)
            verified, refused = outcome(case, [0], tried, [runtime], threads, ROUNDED)
            if verified:
                return tried
            cause = cause or refused[runtime]
    return replace(rung, notes=(*rung.notes, f"{IN_FP32}, because with others the graph fails: {cause}"))


def kept_single(signature: Signature) -> tuple[str, ...]:
    """Return the float inputs kept in fp32: one number a sample, positions, and tensors computed outside the graph."""
    given = {leaf.get("tensor") for _, leaf in leaves(signature.arguments)}
    return tuple(
        name
        for name, shape in signature.inputs.items()
        if "float" in signature.dtypes[name]
        and (name not in given or all(axis == 1 for axis in shape[1:]) or POSITION.search(name))
    )


def case_of(build: Build, calls: Sequence[Call], weights: Mapping[str, Tensor], method: str, large: int) -> Case:
    """Build a network with ``weights`` and compute the outputs of its ``method`` that its exported graph has to equal.

    Above ``large`` parameters the network has few blocks. Raises ArtifactError if its call fails or is not finite.
    """
    network = build()
    if sum(parameter.numel() for parameter in network.parameters()) > large:

        def verified_build() -> nn.Module:
            return shortened(build(), BLOCKS)

        network = verified_build()
        read = reader(network, random_weights(network))
    else:
        verified_build, read = build, reader(network, weights)
    network, kind = with_weights(network, read), type(network).__name__
    expected, outputs = [], []
    for call in calls:
        try:
            with torch.no_grad():
                outputs.append(run(network, method, call.arguments))
        except Exception as error:  # whatever the code of a network raises
            raise ArtifactError(f"{kind} fails as it is called: {one_line(error)}") from error
        expected.append(result_tensors(outputs[-1]))
        if not all(torch.isfinite(tensor).all() for tensor in expected[-1]):
            raise ArtifactError(f"{kind} returns numbers that are not finite, so no graph can be verified")
    return Case(verified_build, network, read, method, calls, expected, outputs[0])


def outcome(
    case: Case, numbers: Sequence[int], rung: Rung, runtimes: Sequence[str], threads: int | None, tolerance: float
) -> tuple[dict[str, Verified], dict[str, str]]:
    """Export the graph of ``rung``, run the calls of indices ``numbers``; return successes and failures by runtime."""
    part = part_of("", rung.signature, rung, case.build)
    try:
        with redirect_stderr(StringIO()):  # torch prints the whole graph of a network that it cannot export
            graph = trace(lambda: part.wrap(case.build()), part.contract)
    except Exception as error:  # whatever the code of a network or torch's exporter raises
        return {}, dict.fromkeys(runtimes, f"cannot be traced: {cause_of(error)}")
    verified, refused = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.onnx"
        try:
            write_onnx(
                graph, path, inputs=len(part.contract.inputs), prefix=PREFIX,
                read=lambda name: case.read(name.removeprefix(PREFIX)), assignment={},
            )  # fmt: skip
        except Exception as error:
            return {}, dict.fromkeys(runtimes, f"cannot be written: {cause_of(error)}")
        for runtime in runtimes:
            try:
                engine = load_engine(runtime, path, threads=threads)
                calls = [(case.calls[number], case.expected[number]) for number in numbers]
                try:
                    verified[runtime] = verify(engine, part, calls, tolerance)
                finally:
                    engine.close()
            except Exception as error:  # a runtime's exceptions have no common base class
                refused[runtime] = cause_of(error)
    return verified, refused


def verify(engine: Engine, part: Part, calls: Sequence[tuple[Call, Sequence[Tensor]]], tolerance: float) -> Verified:
    """Run ``calls`` with known outputs in an engine, and return their number and the largest relative error.

    Raises ArtifactError for an output of another shape or with an error above ``tolerance``.
    """
    worst = 0.0
    for call, expected in calls:
        outputs = engine(**part.arguments(part.contract, call.arguments))
        for (name, output), reference in zip(outputs.items(), expected, strict=True):
            where = f"{name} of a call of the run {call.run}"
            if output.shape != reference.shape:
                raise ArtifactError(f"{where} has the shape {tuple(output.shape)}, expected {tuple(reference.shape)}")
            error = error_of(output, reference)
            if not error <= tolerance:  # NaN too
                raise ArtifactError(f"{where} is {error:.2g} of its norm away from the network's")
            worst = max(worst, error)
    return Verified(len(calls), worst)


def error_of(output: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference relative to the norm of the reference."""
    difference = (output.double() - reference.double()).norm().item()
    return difference / (reference.double().norm().item() or 1.0) if difference else 0.0


def cause_of(error: BaseException) -> str:
    """Return the original cause (last ``__cause__`` with a text) of an error in one line."""
    chain = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:  # torch makes rings of them
        chain.append(chain[-1].__cause__)
    return next((text for each in reversed(chain) if (text := one_line(each, 300))), type(error).__name__)
