"""Of small modules whose operations are known."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from sd_quant.layers.tape import NotObservable, Tape, noted

pytestmark = pytest.mark.commit


def kinds(tape: Tape) -> list[str]:
    return [operation.kind for operation in tape.operations]


class Function(nn.Module):
    """A module of one linear that computes what it is given."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, **arguments):
        return self.function(self.linear, **arguments)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operations_are_noted_whole_on_any_device(device):
    def attention(linear, x):
        q, k, v = (linear(x)[:, None] for _ in range(3))
        return nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)

    network = Function(attention).to(device)
    network.decode = lambda z: network.linear(z)
    assert kinds(noted(network, {"z": torch.ones(2, 4)}, "decode")) == ["linear"]
    tape = noted(network, {"x": torch.ones(2, 3, 4)})
    parts = ["linear", "unsqueeze"] * 3
    assert [kind for kind in kinds(tape) if kind != "slice"] == [*parts, "scaled_dot_product_attention", "squeeze"]
    assert {operation.module for operation in tape.operations if operation.kind == "linear"} == {"linear"}
    assert tape.samples == 2


def test_a_value_depends_on_the_inputs_that_made_it_by_their_places_in_nested_arguments():
    def forward(linear, x, added):
        return linear(x[0]) + added["sizes"].mean(), linear(x[1]), torch.zeros_like(x[0])

    tape = noted(Function(forward), {"x": [torch.ones(2, 4), torch.ones(2, 4)], "added": {"sizes": torch.ones(3)}})
    assert tape.inputs.keys() == {"x.0", "x.1", "added.sizes"}
    assert {value.depends for value in tape.returned} == {
        frozenset({"x.0", "added.sizes"}), frozenset({"x.1"}), frozenset(),
    }  # fmt: skip


def test_a_tensor_whose_dtype_or_shape_alone_is_asked_for_is_not_read_and_one_that_is_given_twice_is_two_inputs():
    def forward(linear, x, other, again):
        return linear(x).double().type_as(other).view_as(other) + torch.zeros_like(other) + again

    x = torch.ones(2, 4)
    (sum_,) = noted(Function(forward), {"x": x, "other": torch.ones(2, 4), "again": x}).returned
    assert sum_.depends == {"x", "again"}


def test_parts_have_an_axis_and_a_place():
    def forward(linear, x):
        wide = [*x.chunk(2, dim=-1), *x.split([1, 3], -1), x.narrow(1, 1, 2), x.movedim(0, 1)[-3:, :].mT]
        return torch.cat(wide, -1).sum() + torch.cat([x.select(1, -1), *x.unbind(0)]).sum()

    tape = noted(Function(forward), {"x": torch.ones(2, 4)})
    options = {
        kind: [tuple(each.options.values()) for each in tape.operations if each.kind == kind]
        for kind in ("slice", "select")
    }
    slices = [(1, 0, 2, 1), (1, 2, 2, 1), (1, 0, 1, 1), (1, 1, 3, 1), (1, 1, 2, 1), (0, 1, 3, 1)]
    assert options == {"slice": slices, "select": [(1, 3), (0, 0), (0, 1)]}


def test_a_change_in_place_makes_a_new_value_of_the_tensor_and_of_its_views():
    def forward(linear, x):
        made = linear(x)
        view = made[:, :2]
        made.mul_(2)
        return view.sum(), made

    tape = noted(Function(forward), {"x": torch.ones(2, 4)})
    assert kinds(tape)[:1] == ["linear"] and "mul" in kinds(tape)
    changed = next(operation for operation in tape.operations if operation.kind == "changed")
    (total,) = [operation for operation in tape.operations if operation.kind == "sum"]
    assert list(total.values()) == list(tape.outputs[changed])
    product = next(operation for operation in tape.operations if operation.kind == "mul")
    assert set(changed.values()) >= set(tape.outputs[product])
    assert set(tape.outputs[product]) <= tape.returned


def test_whatever_reaches_nothing_is_no_reader_but_a_look_at_the_content_is_one():
    def forward(linear, x):
        made = linear(x)
        made.exp()
        assert bool((made.abs() < 1e9).all())
        return made.sin()

    tape = noted(Function(forward), {"x": torch.ones(2, 4)})
    (linear,) = [operation for operation in tape.operations if operation.kind == "linear"]
    assert [reader.kind for reader in tape.readers[tape.outputs[linear][0]]] == ["abs", "sin"]


def test_no_tensor_is_kept():
    seen = []

    def forward(linear, x):
        made = linear(x)
        seen.append(weakref.ref(made))
        return made * 2

    tape = noted(Function(forward), {"x": torch.ones(2, 4)})
    gc.collect()
    assert seen[0]() is None and len(tape.operations) == 2


def test_samples_are_the_first_axis_of_what_is_returned_or_the_length_of_a_list():
    for answer, samples in (
        (lambda y: y, 2),
        (lambda y: (y, y[0]), 2),
        (lambda y: {"sample": [y[0], y[0], y[0]]}, 3),
        (lambda y: (y[0],), 1),  # tokens of one image without an axis for images
    ):
        network = Function(lambda linear, x, answer=answer: answer(linear(x)))
        assert noted(network, {"x": torch.ones(2, 5, 4)}).samples == samples


def by_inputs(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) if x.sum() > 0 else x


def by_content(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) if linear(x).sum() > -1e9 else x


def test_code_that_looks_at_an_inputs_content_is_noted_without_weights():
    for x, called in ((torch.ones(2, 4), True), (-torch.ones(2, 4), False)):
        networks = Function(by_inputs), Function(by_inputs).to("meta")
        whole, empty = (kinds(noted(network, {"x": x})) for network in networks)
        assert whole == empty and ("linear" in empty) == called


def test_code_that_looks_at_the_content_of_a_meta_tensor_is_refused_with_its_place():
    assert noted(Function(by_content), {"x": torch.ones(2, 4)}).samples == 1
    with pytest.raises(NotObservable) as error:
        noted(Function(by_content).to("meta"), {"x": torch.ones(2, 4)})
    sentence = str(error.value)
    line = by_content.__code__.co_firstlineno + 1
    assert f"Function could not be run to be observed: test_tape.py, line {line} raised" in sentence
    assert sentence.endswith("observe it with weights")


def test_the_module_is_named_and_nothing_is_left_on_it():
    network = nn.ModuleDict({"inner": Function(lambda linear, x: linear(x)[:, 9])})
    network.forward = lambda x: network.inner(x=x)
    with pytest.raises(NotObservable, match=r"its module inner \(test_tape.py, line \d+\) raised IndexError: .* check"):
        noted(network, {"x": torch.ones(2, 4)})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_autocast_of_the_meta_device_is_passed_over_and_others_work():
    def forward(linear, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return linear(x)

    for device, dtype in (("meta", torch.float32), ("cpu", torch.bfloat16)):
        (answer,) = noted(Function(forward).to(device), {"x": torch.ones(2, 4)}).returned
        assert answer.dtype == dtype
