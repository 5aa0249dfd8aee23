"""What is read of an earlier run's knobs."""

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace

import pytest
import yaml

from sd_quant.config import CacheFolder, run_model
from sd_quant.config.earlier_runs import MARKS, is_finished_run, recipe_of_run, run_job
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.stages.judged_run import run_subject

from .composition import mapping_of

pytestmark = pytest.mark.commit


@pytest.fixture
def earlier(run) -> Callable[..., str]:
    """``earlier(quantize={...})``: the folder of a finished run with these changes of sections, without knobs."""
    for name in ("metrics.json", "layers.csv"):
        (run / name).touch()

    def written(**changes: object) -> str:
        knobs = deepcopy(mapping_of("quantize"))
        for section, change in changes.items():
            knobs[section] = knobs[section] | change if isinstance(change, dict) else change
        (run / "config.yaml").write_text(yaml.safe_dump(knobs))
        return str(run)

    return written


@pytest.mark.parametrize("given", [{"assignment": "edited and removed.yaml"}, {"budget": 0.2}])
def test_a_run_with_a_file_of_presets_or_a_budget_has_its_copy(earlier, run, given):
    """Whatever has become of the file, and nothing is measured anew; a copy elsewhere describes the same recipe."""
    folder = earlier(quantize=given)
    (run / "assignment.yaml").write_text("conv: nvfp4")
    for found in (run_job(folder), recipe_of_run(folder, CacheFolder(None, 1.0))):
        assert found.quantize.assignment == str(run / "assignment.yaml") and found.formats()["inputs"] == {"nvfp4"}
        assert not found.quantize.chooses_bits


@pytest.mark.parametrize("missing", MARKS)
def test_a_run_without_one_of_its_files_is_named_as_that(earlier, run, missing):
    """Not opened as someone's checkpoint, of which the first file of the folder would be a web page."""
    earlier()
    assert is_finished_run(run)
    (run / missing).unlink()
    assert not is_finished_run(run)
    with pytest.raises(ConfigError, match=f"which has no {missing}, expected the folder of a finished run"):
        run_subject("run", run, SimpleNamespace(cache=CacheFolder(None, 1.0), session=None))


def test_a_run_with_drawn_prompts_has_its_copy_of_them(earlier, run):
    """Whatever has become of the data set that they were drawn from."""
    drawn = {"prompts": "gone.json", "num_prompts": 64, "prompts_seed": 3, "prompts_category": "kind"}
    (run / "prompts.tsv").write_text("Prompt\tCategory\na cat\tAnimals\n")
    infer = run_job(earlier(infer=drawn)).infer
    assert (infer.prompt_list(), infer.categories()) == (["a cat"], ["Animals"])


def test_a_strangers_run_describes_its_recipe_and_decides_nothing_else(earlier, run):
    mine = CacheFolder("mine", 1.0)
    theirs = {
        "cache": {"dir": "elsewhere"}, "trt": {"timing_cache": "elsewhere"}, "infer": {"allow_untrusted_plan": True},
        "quantize": {"devices": 64, "accelerator": "cuda", "alpha": 0.3},
        "hand_over": "no list", "trackers": 3, "verdict": None, "unknown": 1,
    }  # fmt: skip
    found = recipe_of_run(earlier(**theirs), mine)
    assert (found.cache, found.quantize.alpha) == (mine, 0.3)
    assert (found.quantize.devices, found.quantize.accelerator) == (1, "auto")
    assert not found.infer.allow_untrusted_plan and not hasattr(found, "trt") and not hasattr(found, "trackers")
    with pytest.raises(ConfigError, match=r"^model.parts is \.\./\.\./victim, expected names of letters"):
        recipe_of_run(earlier(**theirs, model={"parts": ["../../victim", "vae"]}), mine)
    (run / "config.yaml").write_text("a: " + "x" * 2**20)
    with pytest.raises(ArtifactError, match="is not the config of a run .*no regular file of at most"):
        recipe_of_run(str(run), mine)


@pytest.mark.slow
def test_the_model_of_a_run_is_read_from_its_configuration(run):
    assert run_model(str(run)) is None
    model = mapping_of("infer")["model"] | {"path": "some.nemo", "width": 128}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    assert run_model(str(run)) == model
    numbers, lists = "model: " + "1:" * 100_000 + "1", "model: " + "[" * 9999
    for broken in ("a: [", "just text", "other: 1", numbers, lists):
        (run / "config.yaml").write_text(broken)
        with pytest.raises(ArtifactError, match=r"config\.yaml is not the config of a run"):
            run_model(str(run))
