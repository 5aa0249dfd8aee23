import pytest

from sd_quant.report.recommendation import front, recommend


def row(name: str, psnr: float | None, speedup: float | None, status: str = "done", ssim: float = 0.9) -> dict:
    return {
        "job": name, "status": status, "psnr_db": psnr, "ssim": ssim, "image_speedup": speedup,
        "image_ms": None if speedup is None else 100 / speedup,
        "denoiser_onnx_bytes": 1e6, "denoiser_onnx_full_precision_bytes": 4e6, "checkpoint": "0123",
    }  # fmt: skip


def named(rows):
    return recommend(rows, lambda row: row["job"])


def test_the_sentence_of_the_issue():
    advice = named([row("level 2.5", 31.0, 1.9), row("level 3", 28.0, 1.976)])
    assert advice.job == "level 2.5"
    assert advice.sentence == (
        "level 2.5: 1.90x as fast as the unquantized engine from prompt to image, PSNR 31.0 dB; "
        "level 3 gains 4% of speed and loses 3.0 dB."
    )


def test_speed_that_is_worth_its_loss():
    advice = named([row("fast", 33.0, 2.0), row("exact", 39.0, 1.2)])
    assert advice.job == "fast" and "exact loses 40% of speed and gains 6.0 dB" in advice.sentence


def test_above_what_a_person_sees_only_speed_counts():
    assert named([row("a", 55.0, 1.30), row("b", 41.0, 1.35)]).job == "b"


@pytest.mark.parametrize(("psnr", "speedup"), [(35.0, 0.8), (30.0, 1.1), (39.9, 1.0)])
def test_what_is_not_worth_it_is_said(psnr, speedup):
    advice = named([row("int8", psnr, speedup)])
    assert advice.job is None
    assert advice.sentence.startswith("Ship the unquantized engine: the best recipe here, int8, is")
    assert "25% of the unquantized one's disk" in advice.sentence


def test_identical_images_have_no_finite_psnr():
    advice = named([row("same", None, 1.1, ssim=1.0), row("near", 35.0, 1.12)])
    assert advice.job == "same" and "PSNR infinite" in advice.sentence and "near gains 2% of speed" in advice.sentence


def test_jobs_without_figures_are_no_candidates():
    rows = [row("failed", None, None, "failed"), row("simulated", 45.0, None)]
    assert named(rows).job is None and named(rows).sentence.startswith("No job has both")
    assert named([*rows, row("real", 38.0, 1.5)]).job == "real"


def test_between_checkpoints_there_is_nothing_to_choose():
    advice = named([row("sd15", 36.0, 2.0), row("sd3", 33.0, 1.2) | {"checkpoint": "4567"}, row("failed", None, None)])
    assert advice.job is None and advice.sentence.startswith("The jobs are of 2 checkpoints")


def test_the_front_is_what_no_other_beats():
    rows = [row("a", 30.0, 2.0), row("b", 29.0, 1.5), row("c", 35.0, 1.5), row("d", 34.0, 1.4), row("e", None, 3.0)]
    assert [found["job"] for found in front(rows, "image_ms")] == ["a", "c"]


def test_of_equal_costs_the_closest_is_on_the_front():
    rows = [row("a", 29.0, 1.5), row("b", 31.0, 1.5), row("c", 30.0, 1.5)]
    assert [found["job"] for found in front(rows, "image_ms")] == ["b"]
