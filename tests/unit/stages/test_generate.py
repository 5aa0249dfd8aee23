"""What the knobs of ``infer`` say of images."""

import pytest
import torch

from sd_quant.stages.generate import keep_prompts, sampling_of
from sd_quant.stages.job_folder import facts_of, fingerprint_of
from tests import presets
from tests.presets import infer_job

pytestmark = [pytest.mark.commit, pytest.mark.slow]

PROMPTS = "infer.prompts=[a cat, a dog]"


@pytest.mark.parametrize(
    ("given", "negatives"),
    [("null", None), ("rain", ["rain", "rain"]), ("[rain, nude]", ["rain", "rain", "nude", "nude"])],
)
def test_negative_prompts_are_those_of_the_images(given, negatives):
    sampling = sampling_of(infer_job(PROMPTS, f"infer.negative_prompt={given}", "infer.num_samples=2").infer)
    assert sampling.negative_prompts == negatives and sampling.latents is None


def test_the_hash_of_the_noise_is_one_of_the_inputs(tmp_path):
    """So it is in the record, and other noise under the same name makes another job."""
    torch.save(torch.zeros(1, 4, 8, 8), tmp_path / "noise.pt")
    asked = presets.job(PROMPTS, f"infer.latents={tmp_path / 'noise.pt'}")
    before = facts_of(asked, tmp_path)
    assert "latents" not in facts_of(presets.job(PROMPTS), tmp_path)["inputs"]
    torch.save(torch.ones(1, 4, 8, 8), tmp_path / "noise.pt")
    after = facts_of(asked, tmp_path)
    assert before["inputs"]["latents"]["sha256"] != after["inputs"]["latents"]["sha256"]
    assert fingerprint_of(asked, before) != fingerprint_of(asked, after)


def test_drawn_prompts_are_kept_and_whole_texts_are_not(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na fox\n")
    (tmp_path / "prompts.csv").write_text("Prompts,Category\na cat,Animals\n'5' on a door,Text\n")
    for name, knobs, kept in (
        ("prompts.txt", (), None),
        ("prompts.txt", ("infer.num_prompts=2",), ["Prompt"]),
        ("prompts.csv", (), ["Prompt\tCategory", "a cat\tAnimals", "'5' on a door\tText"]),
    ):
        infer = infer_job(f"infer.prompts={tmp_path / name}", *knobs).infer
        keep_prompts(infer, tmp_path)
        file = tmp_path / "prompts.tsv"
        assert (file.read_text().splitlines()[: len(kept)] == kept) if kept else not file.exists()
        if kept:
            again = infer_job(f"infer.prompts={file}").infer
            assert (again.prompt_list(), again.categories()) == (infer.prompt_list(), infer.categories())
