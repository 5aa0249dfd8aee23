from dataclasses import dataclass

import pytest
import torch
from diffusers.utils import BaseOutput

from sd_quant.errors import ArtifactError, SdQuantError
from sd_quant.observed import calls as calls_module
from sd_quant.observed.calls import (
    Call,
    Signature,
    given_tensors,
    one_structure,
    rebuilt,
    result_tensors,
    signature_of,
    with_outputs,
)

pytestmark = pytest.mark.commit

RUNS = {"base": (2, 8, 7), "larger": (2, 12, 7), "batch": (3, 8, 7), "prompt": (2, 8, 11)}


def arguments(batch: int, rows: int, text: int, step: int = 0) -> dict:
    return {
        "hidden_states": torch.zeros(batch, 4, rows),
        "conditions": {"text_embeds": torch.zeros(batch, text, 5), "flag": True, "nothing": None},
        "rotary": (torch.zeros(rows + text, 2), [torch.zeros(rows, dtype=torch.int64)]),
        "img_shapes": [[(1, rows, 4)]] * batch,
        "timestep": 900 - 400 * step,
        "scale": (0.5, "linear"),
    }


def calls(make=arguments) -> list[Call]:
    return [Call(make(*sizes, step), run, step) for run, sizes in RUNS.items() for step in range(2)]


@pytest.fixture
def signature() -> Signature:
    return signature_of(calls())


def test_tensors_are_named_by_their_place_and_axes_by_what_they_follow(signature):
    """The example is a call whose axes differ."""
    assert signature.inputs == {
        "hidden_states": ("batch", 4, "size_1"),
        "conditions_text_embeds": ("batch", "text_1", 5),
        "rotary_0": ("tokens_1", 2),
        "rotary_1_0": ("size_1",),
        "timestep": (),
    }
    assert signature.dtypes["rotary_1_0"] == "int64" and signature.dtypes["timestep"] == "float32"
    assert signature.example == {"batch": 2, "size_1": 12, "text_1": 7, "tokens_1": 19}
    assert [note.split()[:2] for note in signature.notes] == [["img_shapes", "follows"], ["timestep", "is"]]


def test_arguments_are_put_together_again(signature):
    given = arguments(2, 8, 7)
    again = rebuilt(signature.arguments, given_tensors(signature, given))
    assert again["img_shapes"] == [[(1, 8, 4)]] * 2 and again["scale"] == (0.5, "linear")
    assert again["conditions"]["flag"] is True and again["conditions"]["nothing"] is None
    assert again["rotary"][1][0] is given["rotary"][1][0] and isinstance(again["rotary"], tuple)
    assert again["timestep"].item() == 900
    larger = given_tensors(signature, arguments(5, 20, 9))["hidden_states"]
    assert larger.shape == (5, 4, 20), "a constant that follows the size may be another later"


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"scale": (0.7, "linear")}, "scale is (0.7, 'linear'), expected (0.5, 'linear')"),
        ({"hidden_states": torch.zeros(2, 4)}, "hidden_states is a tensor of shape (2, 4), expected a tensor of shape"),
        ({"conditions": {"text_embeds": None, "flag": True, "nothing": None}}, "conditions_text_embeds is None"),
        ({"conditions": {"text_embeds": torch.zeros(2, 7, 5), "flag": True}}, "conditions_nothing is missing"),
        ({"mask": torch.zeros(2)}, "is called with mask, which was not so"),
    ],
)
def test_a_call_that_was_not_observed_is_refused(signature, change, sentence):
    with pytest.raises(SdQuantError) as error:
        given_tensors(signature, arguments(2, 8, 7) | change)
    assert sentence in str(error.value)


def test_an_argument_of_an_unknown_kind_is_refused_and_calls_of_another_structure_are_told_apart():
    with pytest.raises(ArtifactError, match="cache is of type object, expected tensors"):
        signature_of(calls(lambda *sizes: {"x": torch.zeros(sizes[0]), "cache": object()}))
    recorded = calls()
    recorded[3].arguments["conditions"]["nothing"] = torch.zeros(2)
    assert one_structure(recorded) == [0, 1, 2, 4, 5, 6, 7]


@dataclass
class Output(BaseOutput):
    sample: torch.Tensor
    states: tuple | None = None
    cache: object = None


def test_an_output_with_attributes_is_rebuilt(signature, monkeypatch):
    monkeypatch.setattr(calls_module, "LIBRARIES", ("tests",))
    tensors = torch.ones(2), torch.zeros(3), torch.ones(4)
    output = Output(tensors[0], (tensors[1], None, tensors[2]), cache=iter([]))
    described = with_outputs(signature, output)
    assert described.results == ("out_sample", "out_states_0", "out_states_2")
    assert "out_cache" not in described.results and "cache is a list_iterator and is left out" in described.notes
    answer = rebuilt(described.outputs, dict(zip(described.results, result_tensors(output), strict=True)))
    assert answer.sample is tensors[0] and answer.states[1] is None and answer[0] is tensors[0]


@pytest.mark.parametrize("name", ["os:system", "diffusers:DiffusionPipeline", "transformers.utils:logging", "a.b:c"])
def test_no_class_but_an_output_of_the_two_libraries_is_called(name):
    with pytest.raises(SdQuantError, match="is no class of outputs of diffusers or transformers"):
        rebuilt({"dict": {}, "class": name}, {})


@pytest.mark.parametrize("output", [torch.ones(2), (torch.ones(2),), {"a": torch.ones(2)}, [torch.ones(2)]])
def test_plain_outputs_are_rebuilt(signature, output):
    described = with_outputs(signature, output)
    answer = rebuilt(described.outputs, dict(zip(described.results, result_tensors(output), strict=True)))
    assert type(answer) is type(output) and result_tensors(answer)[0] is result_tensors(output)[0]
