"""Checkpoint of any diffusers pipeline, whose structure is recorded from a run, not stated in a family's module."""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

from torch import nn

from sd_quant.checkpoints.diffusers_network import network_of, with_small_weights
from sd_quant.checkpoints.diffusers_pipeline import Folder
from sd_quant.layers.roles import ObservedLayers
from sd_quant.models import Dtypes
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.models.family import Family, Observed, PipelineCall, StandIn
from sd_quant.models.parts import Axis, Heads, Part, SharedInput, with_dtypes
from sd_quant.observed.calls import Signature, restored
from sd_quant.observed.ladder import IN_FP32
from sd_quant.observed.part import Rung, part_of
from sd_quant.observed.watching import MOVING, Facts

OBSERVED_JSON = "observed.json"  # the file of an observation, in a run and in the cache
SMALL_WEIGHT = 65_536  # numbers of a weight that a pipeline may read itself, such as a mean of latents


@dataclass(frozen=True)
class ObservedPart:
    """One network of the pipeline, with the signature of its recorded calls and its exported graph."""

    component: str
    signature: Signature
    rung: Rung
    axes: dict[str, Axis]  # formulas for the sizes of the dynamic axes
    runs: tuple[str, ...]  # names of the recorded runs (``watching``) whose calls the graph computes


@dataclass(frozen=True, kw_only=True)
class Observation(Facts):
    """Facts about a pipeline, its parts and layers, recorded by running it; the content of ``observed.json``."""

    pipeline: str  # the class
    size: tuple[int, int]  # width and height of the recorded images, in pixels
    parts: dict[str, ObservedPart]  # the denoisers first
    layers: dict[str, ObservedLayers]  # roles and inputs of layers, by denoiser
    seconds: float  # duration of the recording and the exports

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def that_miss(self, run: str) -> list[str]:
        """Return the exported parts whose graphs cannot compute a ``run`` ("larger", "batch") that the pipeline can."""
        made = run not in self.fixed and (run != "batch" or self.style.batched)
        return [name for name, part in self.parts.items() if made and not part.rung.cause and run not in part.runs]

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Observation":
        """Build the observation from the parsed JSON of ``to_json``."""
        return restored(Observation, values)


def why_refused(rung: Rung) -> str | None:
    """Return why a part is not exported, or None. A need for fp32 weights is a reason: quantized graphs have fp16."""
    return rung.cause or next((note for note in rung.notes if note.startswith(IN_FP32)), None)


class ObservedFamily(Observed):
    """The interface of a family for a single pipeline, with facts recorded by running the pipeline."""

    def __init__(
        self, observation: Observation, denoiser: str, networks: Mapping[str, str], excluded: tuple[str, ...],
        shares_steps: bool = False,
    ):  # fmt: skip
        """``shares_steps``: whether the pipeline may run only a share of the steps (``strength`` of image-to-image)."""
        self.SOME_STEPS = shares_steps or len(observation.denoisers) > 1
        self.PIPELINES, self.NETWORKS = (observation.pipeline,), dict(networks)
        self.DENOISER, self.DENOISERS, self.GUIDES = denoiser, observation.denoisers, observation.samples_per_image > 1
        self.ONE_BATCH = next(iter(observation.that_miss("batch")), None)
        self.ONE_SIZE = next(((part, *observation.size) for part in observation.that_miss("larger")), None)
        self.UNEQUAL, self.MOVES = observation.unequal, observation.outputs in MOVING
        self.EXCLUDED, self.by_denoiser, self.own = excluded, observation.layers, denoiser

    @property
    def layers(self) -> ObservedLayers:
        """Layers of the network ``DENOISER``, which ``InPlace`` sets to one denoiser of several; else the first's."""
        return self.by_denoiser.get(self.DENOISER, self.by_denoiser[self.own])

    def layer_roles(self, denoiser: nn.Module) -> dict[str, str]:
        return {
            name: "excluded" if any(fnmatchcase(name, pattern) for pattern in self.EXCLUDED) else role
            for name, role in self.layers.roles.items()
        }

    def shared_inputs(self, linears: Iterable[str]) -> list[SharedInput]:
        known, found = set(linears), []
        for shared in self.layers.shared_inputs:
            readers = tuple(name for name in shared.readers if name in known)
            whole = shared.producer in known or shared.producer not in self.layers.roles
            if readers:
                found.append(
                    replace(shared, readers=readers, **({} if whole else {"producer": None, "modulation": None}))
                )
        return found

    def attentions(self, denoiser: nn.Module) -> dict[str, Heads]:
        return dict(self.layers.attentions)


@dataclass(frozen=True)
class ObservedCheckpoint(Folder):
    """Checkpoint of any diffusers pipeline, whose networks, calls and layers were recorded by running it."""

    arguments: dict[str, Any]  # further arguments of the pipeline's call
    excluded: tuple[str, ...]  # patterns of layer names
    denoiser: str  # the part that is quantized
    observation: Observation
    reopen: Callable[[], Checkpoint]
    dtypes: Dtypes = None  # of exported weights, see ``models.parts``

    @cached_property
    def family(self) -> Family:
        networks = {name: self.described[name].kind.__name__ for name in self.configs}
        shares_steps = "strength" in inspect.signature(self.kind.__call__).parameters
        return ObservedFamily(self.observation, self.denoiser, networks, self.excluded, shares_steps)

    def parts(self) -> dict[str, Part]:
        found = {}
        parts = self.observation.parts
        for name, observed in {self.denoiser: parts[self.denoiser], **parts}.items():
            build = partial(self.build_one, observed.component)
            part = part_of(observed.component, observed.signature, observed.rung, build)
            found[name] = replace(
                part, contract=replace(part.contract, axes=tuple(observed.axes.items())),
                identity=json.dumps(asdict(observed.rung)), refused=why_refused(observed.rung),
                in_steps=name in self.observation.conditioners,
            )  # fmt: skip
        return with_dtypes(found, self.dtypes, self.components)

    def build(self) -> dict[str, nn.Module]:
        """Build the networks, with parameters on the meta device and buffers in memory."""
        return {name: self.build_one(name) for name in self.configs}

    def build_one(self, component: str) -> nn.Module:
        """Build the network of one component, with parameters on the meta device and buffers in memory."""
        prepared = self.observation.prepared.get(component, [])
        return network_of(self.described[component].kind, self.configs[component], prepared)

    def called(self, stand_in: StandIn) -> PipelineCall:
        parts, networks, observed = self.parts(), self.build(), self.observation
        called = {part.component for part in parts.values()}
        for name, network in networks.items():  # a pipeline may call a layer of one, or read a small table
            with_small_weights(network, self.components[name], math.inf if name not in called else SMALL_WEIGHT)
        pipe = self.pipeline({name: stand_in(name, network) for name, network in networks.items()})
        return PipelineCall(self.family, pipe, observed.denoisers, self.arguments, observed.style, observed.outputs)

    def __reduce__(self):
        """Pickle only ``reopen``, with which the process that unpickles opens the folder again."""
        return self.reopen, ()
