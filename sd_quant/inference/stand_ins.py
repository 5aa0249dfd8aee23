"""Replacements for a pipeline's networks: engines compute their outputs, and known outputs are replayed."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sd_quant.engines.base import Engine
from sd_quant.inference.calls import Outputs
from sd_quant.inference.schedules import COMPUTED, engine_of_letter
from sd_quant.models.parts import Part

Tensors = dict[str, Tensor]
Through = Callable[[Callable[..., Outputs], Outputs], Outputs]  # (compute, inputs) -> outputs


class Reached(BaseException):
    """Raised to end a pipeline's call before a part that must not run yet; some pipelines catch any ``Exception``."""

    def __init__(self, part: str, inputs: Tensors):
        super().__init__(part)
        self.part, self.inputs = part, inputs


class AnsweredPart:
    """One part of the model as its pipeline calls it, for one batch of images.

    Calls return the known ``answers``, in order. A further call is computed and appended, or raises ``Reached`` if the
    part ``waits``. ``on_call()`` runs before a computation; ``through(compute, inputs)``, if set, wraps it.
    """

    def __init__(self, engines: Mapping[str, Engine], name: str, part: Part):
        self.engines, self.name, self.part = engines, name, part
        self.begin([], waits=False)

    def begin(self, answers: list[Tensors], waits: bool) -> None:
        """Start a new call of the pipeline, whose first outputs are the known ``answers``; reset all hooks."""
        self.answers, self.waits, self.given = answers, waits, 0
        self.through: Through | None = None
        self.on_call: Callable[[], object] = lambda: None

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        if self.given == len(self.answers):
            inputs = self.part.arguments(self.part.contract, arguments)
            if self.waits:
                raise Reached(self.name, inputs)
            self.on_call()
            outputs = self.computed(inputs) if self.through is None else self.through(self.computed, inputs)
            self.answers.append({
                name: output.cpu().float() if output.is_floating_point() else output.cpu()
                for name, output in outputs.items()
            })  # fmt: skip
        answer = self.answers[self.given]
        self.given += 1
        return self.part.answer({name: output.clone() for name, output in answer.items()})  # pipelines change them

    def computed(self, inputs: Outputs, letter: str = COMPUTED) -> Outputs:
        """Compute the outputs with the engine of a schedule's ``letter``; unquantized parts have one for all."""
        own = engine_of_letter(self.name, letter)
        return self.engines[own if own in self.engines else self.name](**inputs)


class EngineNetwork(nn.Module):
    """A network of a pipeline, some methods of which are computed by parts; other attributes are ``network``'s own.

    ``network`` may be on the meta device: only its configuration, method signatures and class are used, by which some
    pipelines distinguish one ControlNet from several.
    """

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, network: nn.Module, parts: Mapping[str, AnsweredPart]):
        """``parts`` maps names of methods to the parts that compute them."""
        super().__init__()
        self.network, self.parts = [network], parts  # in a list, so that it is no submodule
        self.at = nn.Parameter(torch.empty(0), requires_grad=False)  # the device and dtype that pipelines see
        self.forward = wraps(network.forward)(partial(self.call, "forward"))  # some read its signature

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("parts", ()):
            return partial(self.call, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.network[0], name)

    @property
    def __class__(self) -> type:  # of ``isinstance``
        return type(self.network[0])

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.parts[method](bound(getattr(self.network[0], method), args, kwargs))


def bound(method: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by parameter name, tensors copied, defaults included, generators left out."""
    signature = inspect.signature(method)
    found = signature.bind(*args, **kwargs)
    found.apply_defaults()  # one call may state what another leaves out
    arguments = dict(found.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return {
        name: pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)
        for name, value in arguments.items()
        # a decoder accepts a generator, and decodes given latents without it
        if not any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves(value))
    }
