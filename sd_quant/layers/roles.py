"""Roles of a denoiser's layers, and which linears read the same tensor, found from one recorded call, not from names.

``models.roles`` derives the same facts from layer names for six families. Here the rules are about the data flow:

| role     | a layer whose                                                                                             |
|----------|-----------------------------------------------------------------------------------------------------------|
| excluded | place is at an edge of the network, or input holds no tokens, see ``_reason``                             |
| conv     | kind is Conv2d                                                                                            |
| qkv      | output becomes query, key or value of an attention before another layer reads it                          |
| ffn      | output reaches a second linear through an activation (and gates) alone; the second linear, too            |
| linear   | output does something else                                                                                |

An attention is a call of scaled_dot_product_attention, or any product of two tensors that both come from layers.

A modulation, which computes shifts and scales from the timestep, reads one vector an image: a thousandth of the work,
and the layers that suffer most from quantization. All modulations are excluded, in every network. ModelOpt and Quark
exclude Flux's, but not Stable Diffusion 3's, a third of its weights: there the rule of ``models.sd3`` is kept.

Linears share an input if they read the same object: equal slices or views of one tensor are different tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sd_quant.layers.flow import Call, Flow, is_layer
from sd_quant.layers.producers import producer_of
from sd_quant.layers.tape import Operation, Value, noted
from sd_quant.models.parts import Heads, SharedInput, text_readers
from sd_quant.models.roles import attention_heads

NOT_CALLED = "never called"
ELSEWHERE = "its weight is read outside its own call"
DEAD = "does not reach the network's output"
ONE_ROW = "reads no token: one row an image"
NO_CONTENT = "reads neither image nor text"
LAST = "last layer before the network's output"
FIRST = "first layer behind the network's input"
POOLED = "is read by layers of one row an image alone"
OF_TEXT = "embeds the text, before the first attention"
SKIP = "projects what a block adds its result to"
NOT_2D = "not a 2-d convolution"
GROUPED = "a convolution in groups"
REPEATED = "called several times in one call of the network"

CONVOLUTIONS = nn.Conv1d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
# diffusers' processors of attentions whose matrix products can be quantized
PROCESSORS = ("AttnProcessor2_0", "JointAttnProcessor2_0", "FluxAttnProcessor")


@dataclass(frozen=True)
class ObservedLayers:
    roles: dict[str, str]  # of every Linear and Conv2d, in the network's order
    reasons: dict[str, str]  # why a layer is excluded, or is no Conv2d but another convolution
    shared_inputs: list[SharedInput]  # of all linears
    attentions: dict[str, Heads]  # of each attention whose products can be quantized, by its name


def observed_layers(
    network: nn.Module, arguments: Mapping[str, Any], text: Collection[str], method: str = "forward"
) -> ObservedLayers:
    """Return the roles and shared inputs of the layers of ``network``, found in one call with ``arguments``.

    ``arguments`` as in ``tape.noted``, with more than one token of image and of text for each image. ``text`` names the
    arguments that are computed from the prompt alone, masks too, by name or by the start of a nested one:
    ``encoder_hidden_states``, ``added_cond_kwargs.text_embeds``.
    Raises NotObservable when the network does not run.
    """
    flow = Flow(network, noted(network, arguments, method), tuple(text))
    roles, reasons = _roles(flow)
    inputs = _shared_inputs(flow)
    return ObservedLayers(roles, reasons, inputs, _attentions(flow, text_readers(inputs)))


def _roles(flow: Flow) -> tuple[dict[str, str], dict[str, str]]:
    roles, reasons = dict[str, str](), dict[str, str]()
    for name, module in flow.network.named_modules():
        if name in flow.layers:
            reason = _reason(flow, name)
            if reason is not None:
                roles[name], reasons[name] = "excluded", reason
            elif isinstance(module, nn.Conv2d):
                roles[name] = "conv"
            elif name in flow.queries:
                roles[name] = "qkv"
            else:
                roles[name] = "ffn" if name in flow.feed_forward else "linear"
        elif isinstance(module, CONVOLUTIONS):
            reasons[name] = NOT_2D
    return roles, reasons


def _reason(flow: Flow, name: str) -> str | None:
    """Return why a layer is excluded from quantization; None for a layer that may be quantized."""
    calls, (layer, attention) = flow.calls.get(name, []), flow.behind
    if getattr(flow.layers[name], "groups", 1) != 1:
        return GROUPED
    if not calls:
        return ELSEWHERE if flow.weight_uses.get(f"{name}.weight") else NOT_CALLED
    if len(flow.weight_uses[f"{name}.weight"]) > len(calls):
        return ELSEWHERE
    if len(calls) > 1:  # which of its inputs would its one scale be for?
        return REPEATED
    if not any(call.output in flow.ahead for call in calls):
        return DEAD
    if flow.one_row(name):
        return ONE_ROW
    if all(call.input.depends and not call.input.depends & flow.content for call in calls):
        return NO_CONTENT
    if not any(call.output in flow.token_wise for call in calls):
        return POOLED
    if any(flow.ahead.get(call.output) is False for call in calls):
        return LAST
    fellows = {flow.layer_of(reader) for call in calls for reader in flow.tape.readers.get(call.input, ())}
    if not fellows & flow.queries:  # none of the layers that read the same tensor, this one included
        if any(not layer.get(call.input, False) for call in calls):
            return FIRST
        if all(flow.is_text(call.input) and not attention.get(call.input, False) for call in calls):
            return OF_TEXT
    if isinstance(flow.layers[name], nn.Conv2d) and any(_is_skip(flow, call) for call in calls):
        return SKIP
    return None


def _is_skip(flow: Flow, call: Call) -> bool:
    """Whether a layer projects a skip connection: its output is added to what other layers compute from its input."""
    additions = [each for each in flow.tape.readers.get(call.output, ()) if each.kind in ("add", "sub")]
    others = [value for each in additions for value in each.values() if value is not call.output]
    return any(_made_beside(other, call) for other in others)


def _made_beside(value: Value, call: Call) -> bool:
    """Whether other layers computed ``value`` from the input of ``call``, by a path that avoids the call itself."""
    source = call.input
    earliest = -1 if source.operation is None else source.operation.place  # nothing before can be made from it
    met, waiting = set[tuple[Value, bool]](), [(value, False)]
    while waiting:
        state = waiting.pop()
        current, layer = state
        operation = current.operation
        if current is source and layer:
            return True
        if state in met or operation is None or operation is call.operation or operation.place <= earliest:
            continue
        met.add(state)
        waiting += [(each, layer or is_layer(operation)) for each in operation.values()]
    return False


def _shared_inputs(flow: Flow) -> list[SharedInput]:
    """Return the inputs of all linears in network order; an input comes after the inputs of its own producer."""
    order = {name: index for index, name in enumerate(flow.layers)}
    linears = [name for name, layer in flow.layers.items() if isinstance(layer, nn.Linear)]
    groups, found = defaultdict[Value, list[Call]](list), list[SharedInput]()
    for name in linears:
        calls = flow.calls.get(name, [])
        if len(calls) == 1:
            groups[calls[0].input].append(calls[0])
        else:
            found.append(SharedInput((name,), text=bool(calls) and all(flow.is_text(call.input) for call in calls)))
    for value, calls in groups.items():
        calls = sorted(calls, key=lambda call: (call.name not in flow.queries, call.place))
        text, runs = flow.is_text(value), list(_runs(calls))
        producer, modulation = producer_of(flow, value, {call.operation for call in calls})
        if len(runs) > 1 and (text or producer is None):
            found += [SharedInput(tuple(call.name for call in run), text=text) for run in runs]
        else:
            one_row = flow.one_row(calls[0].name)
            found.append(SharedInput(tuple(call.name for call in calls), producer, text, modulation, one_row))
    return _producers_first(sorted(found, key=lambda shared: min(order[name] for name in shared.readers)))


def _runs(calls: Iterable[Call]) -> Iterator[list[Call]]:
    """Split calls that read one tensor where other layers are called between them, usually into one list a block.

    All blocks read the text embedding. One vector of channel factors for all blocks would be a compromise; a vector for
    each block costs one multiplication of few tokens. The same holds for tensors whose factors no module absorbs.
    """
    run: list[Call] = []
    for call in sorted(calls, key=lambda call: call.place):
        if run and call.place != run[-1].place + 1:
            yield run
            run = []
        run.append(call)
    yield run


def _producers_first(inputs: Sequence[SharedInput]) -> list[SharedInput]:
    """Sort the inputs so that an input that a linear produces comes after the input of that linear."""
    read_by = {reader: shared for shared in inputs for reader in shared.readers}
    ordered, placed = list[SharedInput](), set[tuple[str, ...]]()
    for shared in inputs:
        chain = [shared]
        while (before := read_by.get(chain[-1].producer or "")) is not None and before not in chain:
            chain.append(before)
        for each in reversed(chain):
            if each.readers not in placed:
                placed.add(each.readers)
                ordered.append(each)
    return ordered


def _attentions(flow: Flow, text: Collection[str]) -> dict[str, Heads]:
    """Return the heads of diffusers' attentions if all compute what ``quantization.attention`` assumes; else {}.

    An attention mask is allowed where the linear of the keys is in ``text``, the linears that read the text.
    """
    called = defaultdict[str, list[Operation]](list)
    for operation in flow.attended:
        called[operation.module].append(operation)
    heads = attention_heads(flow.network)
    plain = [
        _is_plain(flow.network.get_submodule(name), called.get(name, []), f"{name}.to_k" in text) for name in heads
    ]
    return heads if all(plain) and len(flow.attended) == len(heads) else {}


def _is_plain(attention: Any, calls: Sequence[Operation], cross: bool) -> bool:
    """Whether an attention is one scaled_dot_product_attention of queries and keys without norms or with RMSNorm.

    A mask is allowed only in a cross-attention (``cross``).
    """
    norms = {type(getattr(attention, name, None)).__name__ for name in ("norm_q", "norm_k")}
    one = len(calls) == 1 and calls[0].kind == "scaled_dot_product_attention"
    options = (*calls[0].operands[3:], *calls[0].options.values()) if one else ()
    plain = not any(each is True or (isinstance(each, Value) and not cross) for each in options)
    return one and plain and norms <= {"RMSNorm", "NoneType"} and type(attention.processor).__name__ in PROCESSORS
