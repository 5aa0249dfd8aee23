"""What is said of a candidate's own library, and of candidates that fail."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sd_quant.config import Judge
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.inference.pipeline import Generated
from sd_quant.metrics.latency import Rounds
from sd_quant.stages import judge, judge_one, judged_figures
from sd_quant.stages.judge import judge_all
from sd_quant.stages.judge_one import judged_entry
from sd_quant.stages.judged_figures import FRAMEWORK, LIBRARY, QUANTIZED, judged_runtime
from sd_quant.stages.third_party import OwnLibrary, Subject, SubjectPart

pytestmark = pytest.mark.commit


def subject(name: str = "a.gguf", runtime: OwnLibrary | None = None, **more) -> Subject:
    denoiser = SubjectPart("gguf", "GGUF 3", 4_000_000, 4.0, more.pop("rows", []), None)
    return Subject(name, Path(name), {}, {"unet": denoiser, **more}, {}, runtime)


def baseline(**more) -> SimpleNamespace:
    session = SimpleNamespace(checkpoint=None, parameters={"unet": 8_000_000})
    usual = {"judge": SimpleNamespace(runtimes=True, layers=3), "together": True, "session": session, "prompts": [],
             "infer": SimpleNamespace(categories=lambda: None), "timing": None, "denoiser": "unet",
             "variant": lambda *_: None, "outputs": lambda: None}  # fmt: skip
    return SimpleNamespace(**usual | more)


def images(value: int) -> Generated:
    return Generated(np.full((2, 64, 64, 3), value, np.uint8), torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("runtime", "here", "reason"),
    [
        (None, baseline(), "no library that opens it computes on this machine"),
        ("SDNQ", baseline(judge=SimpleNamespace(runtimes=False)), "judge.runtimes is false"),
        ("SDNQ", baseline(together=False), "memory does not hold it beside the full-precision model"),
    ],
)
def test_why_nothing_is_known_of_a_library_is_said(runtime, here, reason):
    found = judged_runtime(subject(runtime=runtime and OwnLibrary(runtime, None)), here, images(7), None)
    assert found == {"reason": reason}


def test_a_library_that_fails_is_a_finding_and_no_end(monkeypatch):
    """It is other people's code; our reading of the candidate stands."""

    class Strange(Exception):
        pass

    def fail(*_):
        raise Strange("a kernel\nis missing")

    monkeypatch.setattr(judged_figures, "pipeline_of", fail)
    found = judged_runtime(subject(runtime=OwnLibrary("SDNQ", None)), baseline(), images(7), None)
    assert found["name"] == "SDNQ" and found["reason"].startswith("it failed with Strange(") and "ms" not in found
    assert "\n" not in found["reason"]


def test_a_library_is_compared_with_our_reading_and_timed_beside_torch(answering):
    samples = {FRAMEWORK: [20.0 + index % 3 for index in range(40)], QUANTIZED: [10.0] * 40}
    answering(judged_figures, pipeline_of=None, sampling_of=None, generate=images(8))
    answering(judged_figures, denoiser_rounds=Rounds(samples, {}, 0, "narrow", {}))
    pool = dict.fromkeys(("unet", LIBRARY), SimpleNamespace(device=torch.device("cpu")))
    found = judged_runtime(subject(runtime=OwnLibrary("SDNQ", None)), baseline(), images(7), pool)
    assert found["ms"] == 10 and found["torch_ms"] == 21 and 1.9 < found["speedup_interval"][0] < found["speedup"] < 2.2
    assert found["agreement"]["values"] == pytest.approx([20 * np.log10(255)] * 2, abs=1e-3)  # each pixel is off by 1
    elsewhere = pool | {"unet": SimpleNamespace(device=torch.device("cuda"))}
    untimed = judged_runtime(subject(runtime=OwnLibrary("SDNQ", None)), baseline(), images(7), elsewhere)
    assert untimed.keys() == {"name", "agreement"}


def test_the_layers_that_cost_most_come_first():
    rows = [
        {"name": name, "role": "conv", "format": fmt, "inputs": "high precision", "output_error": output,
         "network_error": network}
        for name, fmt, output, network in [
            ("a", "Q4_0", 0.3, None), ("b", "Q4_0", 0.1, 0.02), ("c", "Q4_0", 0.2, 0.05),
            ("d", "high precision", None, None),
        ]
    ]  # fmt: skip
    entry = judged_entry(subject(rows=rows), baseline(), rows, 0.1, {"reason": "none"})
    assert [each["name"] for each in entry["hurting"]] == ["c", "b", "a"] and entry["bits"] == 4
    assert entry["formats"] == {"Q4_0": 3, "high precision": 1}


def test_a_candidate_that_fails_leaves_why_and_the_others_go_on(monkeypatch, tmp_path):
    judged = []

    def judge_one(each, here, reference, mark, folder):
        if each.name == "b":
            raise ArtifactError("b has a scale that is not finite")
        judged.append(each.name)

    monkeypatch.setattr(judge, "mark_of", lambda *_: "mark")
    monkeypatch.setattr(judge, "judge_one", judge_one)
    with pytest.raises(ArtifactError, match="not finite"):
        judge_all([subject(name) for name in "abc"], baseline(directory=tmp_path))
    assert judged == ["a", "c"]
    failure = json.loads((tmp_path / "b/failure.json").read_text())
    assert failure == {"status": "failed", "reason": "b has a scale that is not finite", "exit_code": 3}


@pytest.mark.parametrize("given", ["a.gguf", "a.gguf/inside.gguf", "."])
def test_a_candidate_is_never_where_its_results_are(given, tmp_path, monkeypatch):
    """What is left of an earlier attempt is removed there."""
    (tmp_path / "a.gguf").mkdir()
    path = tmp_path / given
    rules = SimpleNamespace(named=lambda: {"a.gguf": path}, trust_runs=False)
    here = baseline(directory=tmp_path)
    with pytest.raises(ConfigError, match="and the folder of its results, .*, lie in each other; set hydra.run.dir"):
        judge.subjects_of(rules, here)


@pytest.mark.parametrize(("there", "said"), [
    ("thesis.txt", "which holds thesis.txt that no job has written"),
    ("metrics.json", "which holds metrics.json that no job has written"),
    ("sweep.json", "holds a sweep of quantize; set hydra.run.dir to another folder"),
])  # fmt: skip
def test_a_folder_of_others_is_refused_before_anything_is_written(there, said, tmp_path):
    (tmp_path / there).write_text('{"jobs": [{"name": "quant_level=3"}]}')
    with pytest.raises(ConfigError, match=said):
        judge.judge(None, tmp_path)
    assert (tmp_path / there).read_text() == '{"jobs": [{"name": "quant_level=3"}]}'


def test_the_command_of_a_folder_is_what_was_given(monkeypatch):
    rules = Judge(["a b.gguf"], 20, True, False, 0.95)
    monkeypatch.setattr("sys.argv", ["judge.py", "candidates=[a b.gguf]"])
    plan = judge.plan_of(rules)
    assert plan["command"] == ["sd-quant", "judge", "candidates=[a b.gguf]"]


def test_results_are_not_written_into_a_folder_of_somebody(tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "mark_of", lambda *_: "mark")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.yaml").touch()
    with pytest.raises(ConfigError, match="which holds config.yaml that no job has written"):
        judge_all([subject("a")], baseline(directory=tmp_path))
    assert (tmp_path / "a/config.yaml").exists()


@dataclass
class Knobs:
    layers: int = 3
    candidates: tuple = ("a.gguf",)

    def categories(self) -> None:
        return None


def test_what_decides_a_verdict_decides_whether_it_is_found_again():
    """Which others stand in the list does not; a library that was installed since does."""
    facts = {"inputs": {"checkpoint": {"sha256": "c"}}, "versions": {"torch": "2"}}
    here = baseline(model=Knobs(), infer=Knobs(), judge=Knobs(), metrics=Knobs(), facts=facts)

    def mark(sha256: str = "f", runtime: OwnLibrary | None = None, **changes) -> str:
        return judge.mark_of(
            replace(subject(runtime=runtime), file={"sha256": sha256}), baseline(**vars(here) | changes)
        )

    assert mark() == mark(judge=Knobs(candidates=("a.gguf", "b.gguf")))
    others = [mark("g"), mark(runtime=OwnLibrary("SDNQ", None)), mark(judge=Knobs(layers=4)), mark(prompts=["a cat"])]
    others.append(mark(metrics=Knobs(layers=4)))
    assert len({mark(), *others}) == 6


def test_other_parts_have_rows_and_an_entry_of_their_own():
    row = {"name": "clip1:layer", "format": "int8", "bits": 8.5}
    plain = {"name": "clip1:other", "format": "high precision", "bits": 16.0}
    part = SubjectPart("diffusers_sdnq", "SDNQ", 1000, 10.0, [row, plain], None, lambda: {"clip1:layer": 0.01})
    candidate = subject(clip1=part)
    assert judged_figures.keys_of(candidate) == {"unet": "theirs", "clip1": "theirs clip1"}
    rows = judge_one.rows_with_others([{"name": "a", "role": "conv", "weight_error": 0.1}], candidate)
    assert [each["name"] for each in rows] == ["a", "clip1:layer", "clip1:other"]
    assert [each["weight_error"] for each in rows] == [0.1, 0.01, None] and "role" not in rows[1]
    assert judged_entry(candidate, baseline(), [], 0.1, {"reason": "none"})["parts"]["clip1"] == {
        "reader": "diffusers_sdnq", "maker": "SDNQ", "bits": 10.0, "stored_bytes": 1000,
        "formats": {"int8": 1, "high precision": 1},
    }  # fmt: skip
