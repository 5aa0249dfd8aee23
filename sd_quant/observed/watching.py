"""Recording of the calls that a pipeline makes of its networks, with arguments and denoising step, in two-step runs.

The pipeline is diffusers' own, so its networks get the arguments that they get in real use. A network with real weights
computes; a network with parameters on the meta device is run there for the shapes of its outputs, and the pipeline gets
random numbers of these shapes. So a pipeline of any size is recorded in seconds and without weights in memory.
Alternative not taken: reading how each class of pipelines calls its networks, which takes a file for each family.

Five runs show which axis depends on what: ``base``, another size (``larger``), another batch (``batch``), another text
(``prompt``), and texts of unequal length (``mixed``). A pipeline of one prompt a call has three: base, larger, prompt.
Input images are resized to the run's size; one more run for each tells whether the network keeps the image's own shape.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sd_quant.errors import ArtifactError, ConfigError, SdQuantError
from sd_quant.files import is_panic
from sd_quant.files.images import fitted, has_images
from sd_quant.inference.requests import Run, request, told_steps
from sd_quant.inference.stand_ins import EngineNetwork, bound
from sd_quant.models import VAE_ENCODER
from sd_quant.models.empty import WithoutNumbers, autocast_of_meta
from sd_quant.models.family import Style
from sd_quant.observed.calls import Call, is_distribution, structure_of, tensors_in

LOG = logging.getLogger(__name__)
STEPS = 2
BATCH = 5  # prompts of the run ``batch``, a number that no other axis is likely to have
MOVING = ("frames", "video")  # kinds of results that have an axis of frames
KINDS = ("images", "image", *MOVING)
SHORT, LONG = "a red cat", "a red bicycle in front of a blue door, and a cat that looks at both of them"
PIECEWISE = ("enable_slicing", "enable_tiling")  # methods of autoencoders that decode in pieces
STYLES = (Style(), Style(each=False), Style(batched=False, each=False))


@dataclass
class Log:
    """Record of a run in ``events``: ("step", None) for a scheduler step, ("component.method", Call) for a call."""

    run: str
    events: list[tuple[str, Any]] = field(default_factory=list)
    step: int = 0
    made: list[tuple[str, Any]] = field(default_factory=list)  # what networks returned in this step
    conditioning: set[str] = field(default_factory=set)  # networks whose outputs another network takes in a step

    def next_step(self, result: Any) -> None:
        self.events.append(("step", None))
        self.step += 1
        self.made.clear()

    def takes(self, name: str, arguments: Any) -> None:
        """Add to ``conditioning`` the networks whose outputs are among the ``arguments`` of ``name``, by address."""
        given = memory_of(arguments) if self.step else set()  # texts are encoded before the first
        self.conditioning |= {other for other, made in self.made if other != name and given & memory_of(made)}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Recorded facts about how a pipeline calls its networks."""

    denoisers: tuple[str, ...]  # components that are called in each step, or in some of the steps
    conditioners: tuple[str, ...]  # components called in the steps whose outputs go into a denoiser: ControlNets
    samples_per_image: int  # in the batch of a denoiser's call
    calls_a_step: int  # of all denoisers together, in one step
    style: Style  # how the pipeline takes prompts, noise and images
    prepared: dict[str, list[str]]  # by autoencoder, methods such as enable_tiling to call once after construction
    unequal: str | None  # why prompts of unequal length cannot be in one batch; None where they can
    fixed: dict[str, str]  # the runs among "larger", "batch" and "prompt" that fail, with the failure
    outputs: str  # the attribute of the pipeline's result that holds the images, one of KINDS


@dataclass(frozen=True, kw_only=True)
class Watched(Facts):
    """Recorded calls of a pipeline's networks, and facts about them."""

    calls: dict[str, list[Call]]  # by ``part_name``, of the runs in which nothing but sizes and texts differ
    answers: dict[str, Any]  # by ``part_name``, the output of the first call
    methods: dict[str, str]  # by ``part_name``, "forward", or "decode" or "encode" of an autoencoder
    components: dict[str, str]  # by ``part_name``, the component that has the method
    sizes: dict[str, tuple[int, int]]  # width and height of each run


@dataclass(frozen=True)
class Asked:
    """The request for images with which a pipeline is recorded."""

    width: int  # in pixels
    height: int
    scale: float  # guidance scale
    arguments: Mapping[str, Any]  # further arguments of the pipeline's call, equal for all images
    examples: Mapping[str, Any] = field(default_factory=dict)  # further arguments that differ between images

    @property
    def called(self) -> dict[str, Any]:
        """All arguments of one call."""
        return {**self.arguments, **self.examples}


def runs_of(width: int, height: int, style: Style) -> dict[str, list[Run]]:
    """Return, by the run's name, the requests to try until one works: five runs, or three for one prompt a call.

    Requests of ``larger`` have a larger image first, then smaller ones for networks with a limit of positions.
    """
    grains = [grain for grain in (64, 32, 16, 8) if width % grain == height % grain == 0]
    others = [(width + grain, height + 2 * grain) for grain in grains[:1]]
    others += [(width - grain, height - 2 * grain) for grain in grains if height > 2 * grain and width > grain]
    runs = {
        "base": [Run("base", [SHORT], width, height)],
        "larger": [Run("larger", [SHORT], *other) for other in others],
        "prompt": [Run("prompt", [LONG], width, height)],
        "batch": [Run("batch", [SHORT] * BATCH, width, height)],
        "mixed": [Run("mixed", [SHORT, LONG], width, height)],
    }
    return runs if style.batched else {name: runs[name] for name in ("base", "larger", "prompt")}


class Stand(EngineNetwork):
    """Stand-in for a network of a pipeline that records the calls of its ``methods`` in ``log``."""

    def __init__(self, name: str, network: nn.Module, methods: Sequence[str]):
        super().__init__(network, dict.fromkeys(methods))  # type: ignore[arg-type]
        self.name, self.log = name, Log("")
        self.answers: dict[str, Any] = {}  # the first one by method

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        network, place = self.network[0], f"{self.name}.{method}"
        self.log.takes(place, (args, kwargs))
        arguments = bound(getattr(network, method), args, kwargs)
        self.log.events.append((place, Call(arguments, self.log.run, self.log.step)))
        empty = any(parameter.is_meta for parameter in network.parameters())
        with torch.no_grad():
            if empty:
                output = partial_random(shapes_of_output(network, method, args, kwargs))
            else:
                output = getattr(network, method)(*args, **kwargs)
        self.answers.setdefault(method, pytree.tree_map(lambda each: each, output))  # a pipeline may empty its lists
        self.log.made.append((place, output))
        return output


def shapes_of_output(network: nn.Module, method: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return the output of a network without weights, as tensors on the meta device.

    All tensors are on the meta device at first, which takes no time. Where the network's code needs numbers (a text
    encoder asks whether a mask has gaps), it runs again with real numbers in all tensors that depend on no weight.
    """
    try:
        with on_meta(network):
            return getattr(network, method)(*to_meta(args), **to_meta(kwargs))
    except (RuntimeError, NotImplementedError) as error:
        LOG.debug("%s without any numbers: %s", type(network).__name__, error)
        with WithoutNumbers(), autocast_of_meta():
            return getattr(network, method)(*args, **kwargs)


def to_meta(values: Any) -> Any:
    return pytree.tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, values)


def partial_random(values: Any) -> Any:
    """Replace meta tensors in nested values by random floats or integer zeros; a tensor that occurs twice stays one."""
    drawn: dict[int, Any] = {}

    def draw(value: Any) -> Any:
        if is_distribution(value):
            return type(value)(draw(value.parameters))
        if not (isinstance(value, Tensor) and value.is_meta):
            return value
        if id(value) not in drawn:
            zeros = torch.zeros(value.shape, dtype=value.dtype)
            random = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)
            drawn[id(value)] = random if value.is_floating_point() else zeros
        return drawn[id(value)]

    return pytree.tree_map(draw, values)


@contextmanager
def on_meta(network: nn.Module) -> Iterator[None]:
    """Put the buffers of a network, and new tensors by default, on the meta device in this context."""
    with ExitStack() as stack:
        for module in network.modules():
            stack.enter_context(mock.patch.dict(module._buffers, to_meta(dict(module._buffers))))
        stack.enter_context(torch.device("meta"))
        yield


def watch(make: Callable[[Mapping[str, nn.Module]], Any], networks: Mapping[str, nn.Module], asked: Asked) -> Watched:
    """Run the pipeline that ``make`` builds from stand-ins that record calls of ``networks``: five runs of two steps.

    Raises ArtifactError if the pipeline fails, with the cause, or has no denoiser; ConfigError if it makes no images.
    """
    methods = {  # beside ``forward``: an autoencoder's
        name: ["decode", "encode"] if hasattr(network, "decode") and hasattr(network, "encode") else []
        for name, network in networks.items()
    }
    stands = {name: Stand(name, network, methods[name]) for name, network in networks.items()}
    width, height, called = asked.width, asked.height, asked.called
    pipe = make(stands)
    pipe.set_progress_bar_config(disable=True)
    logs, failures, sizes, outputs = dict[str, Log](), dict[str, str](), {}, "images"
    prepared = dict[str, list[str]]()

    def tried(run: Run, style: Style, arguments: Mapping[str, Any] = called) -> bool:
        """Make the images of a run and store its log or failure. Return whether the pipeline succeeded."""
        nonlocal outputs
        log = Log(run.name)
        for stand in stands.values():
            stand.log = log
        try:
            with told_steps(pipe, log.next_step):
                torch.manual_seed(0)
                steps = steps_for(pipe, arguments)
                seeds = range(len(run.prompts))
                result = pipe(**request(pipe, run, asked.scale, steps, arguments, seeds, style))
        except SdQuantError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            place = log.events[-1][0] if log.events else "the pipeline itself"
            name, _, method = place.rpartition(".")
            failures[run.name] = (
                f"{type(pipe).__name__} fails when it makes images of {run.width} x {run.height}, in "
                f"{place}: {type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"
            )
            able = [each for each in PIECEWISE if method in ("decode", "encode") and hasattr(networks[name], each)]
            if not able or name in prepared:
                return False
            prepared[name] = []
            for each in able:
                with suppress(NotImplementedError):  # all autoencoders have the methods
                    getattr(networks[name], each)()
                    prepared[name].append(each)
            return tried(run, style, arguments)
        logs[run.name], outputs, sizes[run.name] = log, kind_of(pipe, result), (run.width, run.height)
        failures.pop(run.name, None)
        return True

    for style in STYLES:
        runs = runs_of(width, height, style)
        if tried(runs.pop("base")[0], style):
            break
    else:
        raise ArtifactError(f"{failures['base']}; check model.width, model.height and model.arguments")
    for requests in runs.values():
        any(tried(run, style) for run in requests)
    denoisers = denoisers_of(logs["base"])
    if not denoisers:
        raise ArtifactError(f"{type(pipe).__name__} calls no network in its denoising steps, expected a denoiser")
    images = [name for name, value in called.items() if has_images(value)]
    if images and "batch" in logs and rows_of(logs["base"], denoisers[0]) != rows_of(logs["batch"], denoisers[0]):
        failures |= dict.fromkeys(("batch", "mixed"), "it takes several images for those of one prompt")
        del logs["batch"]
    for name in images if sizes_are_asked_for(pipe) else ():
        of_its_own = {**called, name: fitted(called[name], width, 2 * height)}
        if tried(Run(name, [SHORT], width, height), replace(style, keeps=(name,)), of_its_own):
            kept = rows_of(logs.pop(name), denoisers[0]) != rows_of(logs["base"], denoisers[0])
            style = replace(style, keeps=(*style.keeps, name)) if kept else style
        sizes.pop(name, None)
        failures.pop(name, None)
    calls: dict[str, list[Call]] = {}
    for log in logs.values():
        for name, call in log.events:
            if name != "step" and log.run != "mixed":
                calls.setdefault(name, []).append(call)
    split: dict[str, tuple[str, str]] = {name: name.rpartition(".")[::2] for name in calls}
    parts = {name: part_name(*each) for name, each in split.items()}
    return Watched(
        calls={parts[name]: each for name, each in calls.items()},
        answers={parts[name]: stands[component].answers[method] for name, (component, method) in split.items()},
        methods={parts[name]: method for name, (_, method) in split.items()},
        components={parts[name]: component for name, (component, _) in split.items()},
        denoisers=tuple(parts[name] for name in denoisers),
        conditioners=tuple(parts[name] for name in sorted(logs["base"].conditioning) if name.endswith(".forward")),
        samples_per_image=batch_of(calls[denoisers[0]][0].arguments),
        calls_a_step=max(1, sum(name in denoisers for name, _ in logs["base"].events) // STEPS),
        style=style, prepared=prepared, unequal=unequal(style, logs, failures), sizes=sizes, outputs=outputs,
        fixed={name: failure for name, failure in failures.items() if name in ("larger", "batch", "prompt")},
    )  # fmt: skip


def steps_for(pipe: Any, arguments: Mapping[str, Any]) -> int:
    """Return the number of steps to request so that ``STEPS`` are run: image-to-image runs the share ``strength``."""
    stated = inspect.signature(type(pipe).__call__).parameters.get("strength")
    strength = arguments.get("strength", 1 if stated is None else stated.default)
    return math.ceil(STEPS / strength) if isinstance(strength, float) and 0 < strength < 1 else STEPS


def part_name(component: str, method: str) -> str:
    """Return the part's name for a method of a component: the component's name, with "_encoder" for ``encode``."""
    return component if method != "encode" else VAE_ENCODER if component == "vae" else f"{component}_encoder"


def sizes_are_asked_for(pipe: Any) -> bool:
    """Whether a pipeline's call has the parameters width and height; otherwise the input image's size counts."""
    return {"width", "height"} <= inspect.signature(type(pipe).__call__).parameters.keys()


def rows_of(log: Log, network: str) -> list[tuple[int, ...]]:
    """Return the shape, without the first axis, of each tensor among the arguments of a network's first call."""
    first = next(call for name, call in log.events if name == network)
    return [tuple(tensor.shape[1:]) for _, tensor in tensors_in(first.arguments)]


def unequal(style: Style, logs: Mapping[str, Log], failures: Mapping[str, str]) -> str | None:
    """Return why prompts of unequal length, or several prompts at all, cannot be in one batch; None where they can."""
    if not style.batched:
        return "this pipeline takes one prompt at a time"
    if style.keeps:
        return f"images of {' and '.join(style.keeps)} keep their own sizes"
    if not style.each:
        return "this pipeline draws the noise of all images of a batch from one generator"
    return failures["mixed"] if "mixed" in failures else unlike(logs["base"], logs["mixed"])


def unlike(one: Log, other: Log) -> str | None:
    """Return a sentence about a network whose arguments differ in structure between two runs; None if all agree."""
    first = {name: call for name, call in reversed(one.events) if name != "step"}
    for name, call in other.events:
        if name != "step" and structure_of(call.arguments) != structure_of(first[name].arguments):
            return f"{name} is then called with other arguments"
    return None


def kind_of(pipe: Any, result: Any) -> str:
    """Return the attribute of a result that holds images, one of KINDS. Raises ConfigError if there are none."""
    for kind in KINDS:
        if getattr(result, kind, None) is not None:
            return kind
    raise ConfigError(
        f"{type(pipe).__name__} makes {', '.join(map(str, getattr(result, 'keys', list)()))}, expected images or frames"
    )


def denoisers_of(log: Log) -> list[str]:
    """Return the networks called in denoising steps, that is, from just before the first to the last scheduler step.

    ControlNets are left out. Alternative not taken: following outputs to the scheduler; guidance makes new tensors.
    """
    names = [name for name, _ in log.events]
    steps = [index for index, name in enumerate(names) if name == "step"]
    if not steps:
        return []
    between = [name for name in names[steps[0] + 1 : steps[-1]] if name != "step"]
    before = names[steps[0] - 1 : steps[0]]
    called = dict.fromkeys(name for name in [*before, *between] if name.endswith(".forward"))
    return [name for name in called if name not in log.conditioning]


def memory_of(values: Any) -> set[int]:
    """Return the storage addresses of all tensors in nested values."""
    tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]
    return {each.untyped_storage().data_ptr() for each in tensors} - {0}


def batch_of(arguments: Mapping[str, Any]) -> int:
    """Return the batch size: the length of the first tensor with two axes or more; 1 without such a tensor."""
    return next((len(tensor) for _, tensor in tensors_in(arguments) if tensor.ndim > 1), 1)
