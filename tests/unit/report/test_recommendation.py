"""Which recipe is recommended, of jobs whose rounds and images are made up."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import yaml

from sd_quant.places import HOME
from sd_quant.report.recommendation import front, options_of, reaches, recommend
from sd_quant.report.record import parsed
from sd_quant.report.rule import Rule, rule_of
from sd_quant.report.summary import Job, Sweep
from sd_quant.report.timing import Timed

pytestmark = pytest.mark.commit

PROMPTS = 8


def job(name, psnr, speedup, *, apart=0.3, noise=0.002, status="done", **record) -> Job:
    """Images whose PSNR scatter by ``apart`` dB around the mean and rounds whose latencies scatter by ``noise``.

    Jobs have drawn the same prompts: what is hard for one is hard for all.
    """
    generator = np.random.default_rng(0)
    wobble = apart * np.linspace(-1, 1, PROMPTS)
    values = [None] * PROMPTS if psnr is None else list(psnr + wobble + 0.01 * generator.normal(size=PROMPTS))
    full = [20 * np.exp(noise * each) for each in generator.normal(size=40)]
    image = {"full_precision": {"p50_ms": 60.0}, "quantized": {"p50_ms": 60 / (speedup or 1)}, "speedup": speedup}
    timed = None
    if speedup:
        own = np.random.default_rng(zlib.crc32(name.encode())).normal(size=40)
        quantized = [(60 / speedup - 20) / 2 * np.exp(noise * each) for each in own]
        timed = Timed("block 0", full, quantized, 0.5, 60.0)
    content = {
        "knobs": {"infer": {"engine": "openvino", "batch_size": 1}},
        "fidelity": {"psnr": {"mean": psnr, "values": values}, "ssim": {"mean": 0.9, "values": [0.9] * PROMPTS}},
        "latency": {"openvino": {"image": {"1": image}}} if speedup else {},
        "inputs": {"checkpoint": {"sha256": "0123"}},
    } | record
    return Job(name, None, {}, status, None, parsed(content if status == "done" else None), timed=timed)


def recommended(*jobs: Job, **verdict):
    return recommend(Sweep(None, [], [], list(jobs), verdict=verdict))


BEST, CLOSE = job("best", 35.0, 1.50, noise=0.02), job("close", 34.9, 1.4706, noise=0.02)
FAST, EXACT = job("fast", 33.0, 2.0), job("exact", 39.0, 1.2)
SAME = job("same", None, 1.1)
SAME.record["fidelity"]["ssim"] = {"mean": 1.0, "values": [1.0] * PROMPTS}
DEAR = {"time_of_a_db": 0.5, "enough_db": 34.8}  # 1.7 dB for half of the time, as 1.5 to the power of 1.7 is 2
FAILED, SIMULATED = job("failed", None, None, status="failed"), job("simulated", 45.0, None)
ELSEWHERE = job("c", 38.0, 2.5, environment={"machine": {"cpu": "another"}})
NOT_WORTH, UNSURE = ", which is not worth what it loses.", "which cannot be told to be worth what it loses"


@pytest.mark.parametrize(
    ("jobs", "knobs", "expected", "tied", "said"),
    [
        ([job("level 2.5", 32.0, 1.9), job("level 3", 29.0, 1.976)], {}, "level 2.5", (),
         "Ship level 2.5: 1.90x (1.87 to 1.93) as fast as the unquantized engine from prompt to image, PSNR 32.0 dB "
         "(31.8 to 32.2); level 3 gains 4% of speed and loses 3.0 dB."),
        ([job("int8", 35.0, 0.8)], {}, None, (), NOT_WORTH),
        ([job("int8", 30.0, 1.1)], {}, None, (), "Ship the unquantized engine: the best recipe here, int8, is"),
        ([job("int8", 38.0, 1.0)], {}, None, (), NOT_WORTH),
        # a recipe that seems worth 1 dB more than the unquantized engine, with quiet rounds and with wild ones
        ([job("int8", 37.0, 1.13, noise=0.01)], {}, "int8", (), ""),
        ([job("int8", 37.0, 1.13, noise=0.2)], {}, None, ("int8",), UNSURE),
        # the most faithful of the tied, although another seems worth more
        ([job("fast", 35.0, 1.56, noise=0.2), job("exact", 35.4, 1.50, noise=0.2)], {}, "exact", ("fast",),
         "it cannot be told apart from fast, and is the most faithful of the 2"),
        ([job("fast", 35.0, 1.56, noise=0.001), job("exact", 35.4, 1.50, noise=0.001)], {}, "fast", (), ""),
        # one that is hardly worse is told apart from the best alone, and not among thirty others
        ([BEST, CLOSE], {}, "best", (), ""),
        ([BEST, CLOSE, *(job(f"other {number}", 29.0, 1.1) for number in range(30))], {}, "best", ("close",), ""),
        ([FAST, EXACT], {}, "fast", (), "exact loses 40% of speed and gains 6.0 dB"),
        ([FAST, EXACT], {"time_of_a_db": 0.1}, "exact", (), ""),
        ([FAST, EXACT], {"enough_db": 33.0}, "fast", (), ""),
        ([job("fast", 33.0, 2.4), job("exact", 34.55, 1.2)], DEAR, "fast", (), ""),
        ([SAME, job("near", 35.0, 1.12)], {}, "same", (), "PSNR infinite; near gains 2% of speed and has 35.0 dB."),
        ([FAILED, SIMULATED], {}, None, (), "No job has both"),
        ([FAILED, SIMULATED, FAST], {}, "fast", (), ""),
        ([replace(job("int8", 39.0, 1.5), timed=None)], {}, None, ("int8",), "cannot be told"),
        ([FAST, job("sd3", 33.0, 1.2, inputs={"checkpoint": {"sha256": "4567"}}), FAILED], {}, None, (),
         "The jobs are of 2 checkpoints"),
        ([job("a", 36.0, 2.0), job("b", 36.0, 1.5), ELSEWHERE], {}, None, (),
         "The jobs were timed on 2 machines and are compared within each. On None: Ship a: 2.00x"),
    ],
)  # fmt: skip
def test_speed_that_is_surely_worth_its_loss_is_recommended_and_the_sentence_says_why(
    jobs, knobs, expected, tied, said
):
    advice = recommended(*jobs, **knobs)
    assert (advice.job, advice.tied) == (expected, tied) and said in advice.sentence


# PSNR and its half interval in dB, speed-up of an image; what documents or a stored report recommend.
# Where they have no interval, 1.8 dB stand for that of eight images, where they have a network's speed-up alone, an
# image's is a little less, as in the stored report, and one that is below 0.5 is 0.5.
DOCUMENTED = {
    "a sweep's report, examples/sdxl_mini/card": (
        {
            "1": (40.22, 1.77, 1.10), "1 keep": (51.17, 2.11, 1.07), "2": (38.31, 1.64, 1.14),
            "2 keep": (46.70, 1.74, 1.08), "2.5": (38.05, 1.53, 1.18), "2.5 keep": (46.42, 1.75, 1.17),
            "3": (37.02, 2.07, 1.20), "3 keep": (43.35, 1.55, 1.12),
        },
        "2.5 keep",
    ),
    "presets, sdxl_mini": (
        {
            "int8": (37.45, 1.8, 1.19), "int8_dynamic": (39.27, 1.8, 0.93), "fp8": (30.89, 1.8, 0.62),
            "int8_per_tensor": (33.34, 1.8, 1.21), "int8_weight_only": (54.02, 1.8, 0.95),
        },
        "int8",
    ),
    "levels 3 and 4, sd3_mini": (
        {"3": (41.22, 1.5, 1.34), "4": (39.97, 1.5, 1.32), "dynamic": (45.36, 1.5, 1.09), "fp8": (36.31, 1.5, 0.5)}, "3"
    ),
    "NVIDIA's article": ({"int8": (36.85, 1.08, 1.25), "fp8": (33.71, 1.65, 0.5)}, "int8"),
    "five timings, the slowest": ({"0.5": (37.0, 1.8, 1.26), "0.6": (37.4, 1.8, 1.26)}, "0.6"),
}  # fmt: skip
YESTERDAY = {"time_of_a_db": 0.02, "floor_db": None, "worst_db": None}


@pytest.mark.parametrize(("recipes", "expected"), DOCUMENTED.values(), ids=DOCUMENTED)
def test_what_was_recommended_still_is(recipes, expected):
    half = 2.365 * np.std(np.linspace(-1, 1, PROMPTS), ddof=1) / PROMPTS**0.5  # interval of images apart by 1 dB
    jobs = [job(name, psnr, speedup, apart=reach / half) for name, (psnr, reach, speedup) in recipes.items()]
    assert recommended(*jobs).job == recommended(*jobs, **YESTERDAY).job == expected


INT8 = ("int8", 37.5, 1.37)


@pytest.mark.parametrize(
    ("recipe", "more", "said"),
    [
        (("half the steps", 25.5, 1.9), {}, "its images have 25.5 dB in the mean."),
        (("few steps", 28.4, 1.9), {"apart": 3.0}, "its images have 28.4 dB in the mean and perhaps only 26.6 dB."),
        (("broken", 33.0, 2.1), {"apart": 19.0}, "its worst image has 14.0 dB."),
        (("black", 39.0, 2.1), {"degenerate": [{"index": 3, "reason": "black"}]}, "image 3 is black."),
    ],
)
def test_a_recipe_below_the_floor_is_not_recommended_however_fast_it_is(recipe, more, said):
    broken, slow = job(*recipe, **more), job("slow and broken", 12.0, 1.1)
    assert recommended(job(*INT8), broken, **YESTERDAY).job == (recipe[0] if recipe[0] != "black" else "int8")
    advice = recommended(job(*INT8), broken)
    assert advice.job == "int8" and not advice.tied
    fails = f"{recipe[0]} is {recipe[2]:.2f}x as fast as the unquantized engine and fails the floor: {said}"
    assert advice.sentence.endswith(f". {fails}")
    alone = recommended(broken, slow)
    engine = "Ship the unquantized engine: no recipe here passes the floor"
    assert alone.job is None and alone.sentence.startswith(engine)
    assert alone.sentence.endswith(f"{said.removesuffix('.')}; 1 more fails it.")


def test_of_few_images_the_mean_counts_for_the_floor():
    """Three images that differ by 6 dB have an interval that would fail nearly everything."""
    few = job(*INT8)
    for score, values in (("psnr", [34.5, 40.5, 37.5]), ("ssim", [0.9] * 3)):
        few.record["fidelity"][score]["values"] = values
    assert recommended(few, floor_db=36, time_of_a_db=0.001).job == "int8"
    assert "fails the floor" in recommended(few, floor_db=37.6).sentence


@pytest.mark.parametrize(
    ("target", "expected", "said"),
    [
        ({"speedup": 1.5}, "near", "Ship near: 1.60x (1.57 to 1.63) as fast as the unquantized engine from prompt to "
            "image, PSNR 36.0 dB (35.8 to 36.2); the most faithful of 2 recipes that surely reach 1.5x the speed of "
            "the unquantized engine; fast gains 25% of speed and loses 4.0 dB; exact loses 13% of speed and gains "
            "3.0 dB."),
        ({"image_ms": 40}, "near", "PSNR 36.0 dB (35.8 to 36.2), 38 ms (37 to 38) for an image; the most faithful of 2 "
            "recipes that surely reach 40 ms from prompt to image;"),
        ({"speedup": 1.62}, "fast", "the only recipe that surely reaches 1.62x"),
        ({"speedup": 1.99}, None, "No recipe that passes the floor surely reaches 1.99x the speed of the unquantized "
            "engine. The fastest, fast, is 2.00x (1.97 to 2.03) as fast as the unquantized engine from prompt to "
            "image, PSNR 32.0 dB (31.8 to 32.2): it reaches it in the mean, not surely; more rounds, a larger "
            "timing.budget_s, may tell."),
        ({"speedup": 2.02}, None, ": it may, not surely; more rounds"),
        ({"image_ms": 28}, None, ", 30 ms (30 to 31) for an image: it does not reach it."),
        ({"image_ms": 60}, None, "Ship the unquantized engine: it reaches 60 ms from prompt to image itself."),
    ],
)  # fmt: skip
def test_with_a_target_the_most_faithful_that_surely_reaches_it_is_recommended(target, expected, said):
    passing = job("exact", 39.0, 1.4), job("near", 36.0, 1.6), job("fast", 32.0, 2.0)
    advice = recommended(*passing, job("broken", 20.5, 2.9), **target)
    assert advice.job == expected and said in advice.sentence
    assert " broken is 2.90x as fast as the unquantized engine and fails the floor: its im" in advice.sentence


def test_whether_a_recipe_reaches_a_target_is_not_known_without_rounds():
    timed = job(*INT8)
    sweep = Sweep(None, [], [], [timed, replace(timed, timed=None)])
    with_rounds, without = options_of(sweep, Rule())
    for rule, expected in ((Rule(speedup=1.3), True), (Rule(speedup=1.36), None), (Rule(speedup=1.5), False)):
        assert (reaches(with_rounds, rule), reaches(without, rule)) == (expected, None)
    assert reaches(with_rounds, Rule(image_ms=50)) and reaches(without, Rule(image_ms=50)) is None
    assert "recommended that reaches 50 ms from prompt to image with" in str(Rule(image_ms=50))


def test_the_same_difference_on_every_image_is_one():
    """Paired over the prompts, where both drew the same: that prompts differ by 6 dB says nothing of the recipes."""
    one, other = job("one", 35.0, 1.5, apart=3.0), job("other", 36.5, 1.5, apart=3.0)
    advice = recommended(one, other)
    assert advice.job == "other" and not advice.tied
    other.record["fidelity"]["psnr"]["values"].pop(4)
    assert recommended(one, other).tied == ("one",)


def test_rounds_of_one_block_are_compared_round_by_round():
    """A reference that scatters says nothing of two recipes that were timed beside it in the same rounds."""
    a, b = job("a", 35.0, 1.5, noise=0.001), job("b", 35.0, 1.45, noise=0.001)
    for each in (a, b):
        each.timed.full_precision[:] = list(20 * np.exp(0.3 * np.random.default_rng(1).normal(size=40)))
    advice = recommended(a, b)
    assert (advice.job, advice.tied) == ("a", ())
    assert recommended(a, replace(b, timed=replace(b.timed, block="block 1"))).tied


def test_a_strangers_constants_that_are_none_are_the_usual_ones():
    assert Rule(**yaml.safe_load((HOME / "conf/quantize.yaml").read_text())["verdict"]) == Rule()
    for knobs in (
        None, {}, {"confidence": 2}, {"time_of_a_db": "much"}, {"enough_db": -1}, "text", {"confidence": None},
        {"floor_db": float("nan")}, {"speedup": 2.0, "image_ms": 9.0},
    ):  # fmt: skip
        assert rule_of(knobs) == Rule(), knobs
    assert "1 dB for every 20 % of" in str(rule_of({"time_of_a_db": 0.2}))


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ({"a": (30.0, 2.0), "b": (29.0, 1.5), "c": (35.0, 1.5), "d": (35.0, 1.4)}, ["a", "c"]),
        ({"a": (29.0, 1.5), "b": (31.0, 1.5), "c": (30.0, 1.5)}, ["b"]),  # of equal costs the closest
    ],
)
def test_the_front_is_what_no_other_beats(points, expected):
    rows = [{"job": name, "psnr_db": at[0], "ssim": 0.9, "image_ms": 100 / at[1]} for name, at in points.items()]
    assert [found["job"] for found in front(rows, "image_ms")] == expected
