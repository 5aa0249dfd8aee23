"""A few damaged inputs to every reader, the same each time; ``python -m tests.run fuzz`` tries as many as one likes."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ..run import main
from .harness import OTHER, REFUSED, SAME, Place, Reader, Wrong, outcome
from .learn import CORPUS, read_corpus
from .run import EVERY_INPUT, make_readers, table

pytestmark = pytest.mark.commit

NAMES = (
    "archive", "weights", "nemo", "safetensors", "pipeline", "observed", "prompts", "statistics", "records", "report",
    "config", "onnx", "noise", "lora", "images", "plan", "cache", "gguf", "comfyui", "diffusers_bfl", "diffusers_sdnq",
    "diffusers_torchao", "autoround", "modelopt", "modelopt_hf", "vllm_int8", "sglang_fp8", "nunchaku_lite",
    "nunchaku", "nunchaku_nvfp4", "bnb_nf4", "bnb_int8", "quanto", "sdnq_with_zero_points", "torchao_nvfp4",
    "autoround_asymmetric", "quark", "quark_with_branch",
)  # fmt: skip
LEARNT = read_corpus(CORPUS)


@pytest.fixture(scope="module")
def readers(tmp_path_factory) -> dict[str, Reader]:
    return {reader.name: reader for reader in make_readers(tmp_path_factory.mktemp("made"))}


def test_every_reader_has_its_turn(readers):
    assert tuple(readers) == NAMES


@pytest.fixture
def outcomes(readers, tmp_path, monkeypatch) -> Callable:
    """``outcomes(reader, **settings)``: a test of Hypothesis, and the list that it fills with what comes of inputs."""

    def make(name: str, **wanted) -> tuple[Callable, list[str]]:
        place, found = Place(readers[name], tmp_path), list[str]()
        monkeypatch.chdir(place.outside)
        monkeypatch.setattr(tempfile, "tempdir", str(place.outside))

        @settings(**EVERY_INPUT, **wanted)
        @given(readers[name].recipes)
        def one(recipe: object) -> None:
            place.put(recipe)
            found.append(outcome(place)[0])

        return one, found

    return make


@pytest.mark.parametrize("times", [0.8, pytest.param(8, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")  # of libraries, about damaged input
def test_damage_is_refused_or_harmless(readers, name, outcomes, times):
    inputs = round(times * readers[name].weight)
    one, found = outcomes(name, max_examples=inputs, derandomize=True, phases=[Phase.generate])
    one()
    assert set(found) <= {REFUSED, SAME, OTHER} and (REFUSED in found or inputs < 5)


@pytest.mark.parametrize("name", LEARNT)
@pytest.mark.filterwarnings("ignore")
def test_what_was_learnt_is_refused_or_harmless(name, outcomes):
    """Inputs that ``learn`` has found, each of which takes a branch or ends in a sentence that no other does."""
    one, found = outcomes(name)
    for content in LEARNT[name]:
        one.hypothesis.fuzz_one_input(content)
    assert set(found) <= {REFUSED, SAME, OTHER} and len(found) > len(LEARNT[name]) / 2  # of some bytes come no edits


@pytest.mark.parametrize(("act", "complaint"), [
    (lambda folder: 1 / 0, "ZeroDivisionError"), (lambda folder: Path("canary").touch(), "write"),
    (lambda folder: (folder / "../not_for_readers").read_text(), "read"),
])  # fmt: skip
def test_what_a_reader_may_not_do_is_noticed(act, complaint, tmp_path, monkeypatch):
    def read(folder: Path) -> object:
        return (folder / "a").read_bytes() == b"sound" or act(folder)

    reader = Reader("careless", {"a": b"sound"}, st.just(None), lambda recipe: {"a": b"other"}, read)
    place = Place(reader, tmp_path)
    monkeypatch.chdir(place.outside)
    place.put(None)
    with pytest.raises(Wrong, match=complaint):
        outcome(place)


def test_the_command_counts_every_input(capsys, tmp_path):
    assert main(["fuzz", "--inputs", "20", "--reader", "prompts", "--keep", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["prompts", "20"]
    assert "anything else" in table({})
