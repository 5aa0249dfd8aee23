"""A few damaged inputs to every reader, the same each time; ``python -m tests.fuzz.run`` tries as many as one likes."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from .harness import OTHER, REFUSED, SAME, Place, Reader, Wrong, outcome
from .learn import CORPUS, read_corpus
from .readers import make_readers
from .run import main, table

NAMES = (
    "archive", "weights", "nemo", "safetensors", "pipeline", "prompts", "statistics", "records", "report", "config",
    "onnx", "noise", "lora", "pictures", "plan", "cache", "gguf", "comfyui", "diffusers_sdnq", "diffusers_torchao",
    "bnb_nf4", "bnb_int8", "quanto", "modelopt", "modelopt_hf",
)  # fmt: skip


LEARNT = read_corpus(CORPUS)


@pytest.fixture(scope="module")
def readers(tmp_path_factory) -> dict[str, Reader]:
    return {reader.name: reader for reader in make_readers(tmp_path_factory.mktemp("made"))}


def test_every_reader_has_its_turn(readers):
    assert tuple(readers) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")  # of libraries, about damaged input
def test_damage_is_refused_or_harmless(readers, name, tmp_path, monkeypatch):
    place = Place(readers[name], tmp_path)
    monkeypatch.chdir(place.outside)
    monkeypatch.setattr(tempfile, "tempdir", str(place.outside))
    found = []

    @settings(
        max_examples=readers[name].quick, derandomize=True, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),  # to shrink what fails can take minutes
    )  # fmt: skip
    @given(readers[name].recipes)
    def one(recipe: object) -> None:
        place.put(recipe)
        found.append(outcome(place)[0])

    one()
    assert set(found) <= {REFUSED, SAME, OTHER} and REFUSED in found


@pytest.mark.parametrize("name", LEARNT)
@pytest.mark.filterwarnings("ignore")
def test_what_was_learnt_is_refused_or_harmless(readers, name, tmp_path, monkeypatch):
    """Inputs that ``learn`` keeps, because each takes a branch that none before it took."""
    place = Place(readers[name], tmp_path)
    monkeypatch.chdir(place.outside)
    monkeypatch.setattr(tempfile, "tempdir", str(place.outside))
    found = []

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(readers[name].recipes)
    def one(recipe: object) -> None:
        place.put(recipe)
        found.append(outcome(place)[0])

    for content in LEARNT[name]:
        one.hypothesis.fuzz_one_input(content)
    assert set(found) <= {REFUSED, SAME, OTHER} and len(found) > len(LEARNT[name]) / 2  # of some bytes come no edits


def careless(name: str, read) -> Reader:
    from hypothesis import strategies as st

    return Reader(name, {"a": b"sound"}, st.just(None), lambda recipe: {"a": b"other"}, read)


@pytest.mark.parametrize(
    ("read", "complaint"),
    [
        (lambda folder: 1 / ((folder / "a").read_bytes() == b"sound"), "ZeroDivisionError"),
        (lambda folder: (folder / "a").read_bytes() == b"sound" or Path("canary").touch(), "write"),
        (lambda folder: (folder / "a").read_bytes() == b"sound" or (folder / "../not_for_readers").read_text(), "read"),
    ],
    ids=["exception", "written", "read"],
)
def test_what_a_reader_may_not_do_is_noticed(read, complaint, tmp_path, monkeypatch):
    place = Place(careless("careless", read), tmp_path)
    monkeypatch.chdir(place.outside)
    place.put(None)
    with pytest.raises(Wrong, match=complaint):
        outcome(place)


def test_the_command_counts_every_input(capsys, tmp_path):
    assert main(["--inputs", "20", "--reader", "prompts", "--keep", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["prompts", "20"]
    assert "anything else" in table({})
