"""An observed pipeline of diffusers as a checkpoint, with found facts in the place of a family's stated ones."""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

from torch import nn

from sd_quant.models import Dtypes
from sd_quant.models.checkpoint import Checkpoint
from sd_quant.models.family import Family, Observed, PipelineCall, StandIn
from sd_quant.models.parts import Axis, Heads, Part, SharedInput, with_dtypes
from sd_quant.observed.calls import Signature, restored
from sd_quant.observed.ladder import IN_FP32
from sd_quant.observed.layers import ObservedLayers
from sd_quant.observed.opening import Folder, network_of, with_small_weights
from sd_quant.observed.part import Rung, part_of
from sd_quant.observed.watching import MOVING, Facts

OBSERVED_JSON = "observed.json"  # the file of an observation, in a run and in the cache
SMALL_WEIGHT = 65_536  # numbers of a weight that a pipeline may read itself, such as a mean of latents


@dataclass(frozen=True)
class ObservedPart:
    """One network of the pipeline: how it is called and exported."""

    component: str
    signature: Signature
    rung: Rung
    axes: dict[str, Axis]  # sizes of the dynamic axes
    runs: tuple[str, ...]  # of ``watching``, that the graph serves


@dataclass(frozen=True, kw_only=True)
class Observation(Facts):
    """Facts about a pipeline, its parts and its layers; the content of ``observed.json``."""

    pipeline: str  # the class
    size: tuple[int, int]  # width and height of the images with which it was observed
    parts: dict[str, ObservedPart]  # the denoisers first
    layers: dict[str, ObservedLayers]  # by denoiser
    seconds: float  # that observing took

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def that_miss(self, run: str) -> list[str]:
        """Returns the exported parts whose graphs do not serve a run of the pipeline."""
        made = run not in self.fixed and (run != "batch" or self.style.batched)
        return [name for name, part in self.parts.items() if made and not part.rung.cause and run not in part.runs]

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Observation":
        """Returns the observation of ``to_json`` after a passage through JSON."""
        return restored(Observation, values)


def why_refused(rung: Rung) -> str | None:
    """The reason against exporting a part, or None. Quantized graphs hold the rest of their weights in fp16."""
    return rung.cause or next((note for note in rung.notes if note.startswith(IN_FP32)), None)


class ObservedFamily(Observed):
    """A family of one observed pipeline."""

    def __init__(
        self, observation: Observation, denoiser: str, networks: Mapping[str, str], excluded: tuple[str, ...],
        shares_steps: bool = False,
    ):  # fmt: skip
        """``shares_steps``: whether images may take a share of the steps, by their ``strength``."""
        self.SOME_STEPS = shares_steps or len(observation.denoisers) > 1
        self.PIPELINES, self.NETWORKS = (observation.pipeline,), dict(networks)
        self.DENOISER, self.DENOISERS, self.GUIDES = denoiser, observation.denoisers, observation.samples_per_image > 1
        self.ONE_BATCH = next(iter(observation.that_miss("batch")), None)
        self.ONE_SIZE = next(((part, *observation.size) for part in observation.that_miss("larger")), None)
        self.UNEQUAL, self.MOVES = observation.unequal, observation.outputs in MOVING
        self.EXCLUDED, self.by_denoiser, self.own = excluded, observation.layers, denoiser

    @property
    def layers(self) -> ObservedLayers:
        """Those of the denoiser, or of another that is in its place (``models.checkpoint.InPlace``)."""
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
    """An opened folder of any pipeline that was observed."""

    arguments: dict[str, Any]  # further ones of the pipeline's call
    excluded: tuple[str, ...]  # patterns of layers
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
        """Builds the networks, with parameters on the meta device and real buffers."""
        return {name: self.build_one(name) for name in self.configs}

    def build_one(self, component: str) -> nn.Module:
        """Builds the network of one component likewise."""
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
        """Pickles how the folder was opened; another process opens it again."""
        return self.reopen, ()
