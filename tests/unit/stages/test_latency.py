"""The latency of the record: which variant was timed for which number, on a clock that only the engines move."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sd_quant.cache import Cache
from sd_quant.config import PART_NAMES, Infer, Timing
from sd_quant.inference.timed_calls import ImageTimes
from sd_quant.metrics import latency
from sd_quant.models.checkpoint import contracts_of
from sd_quant.models.parts import Contract
from sd_quant.report import occasions
from sd_quant.report.record import parsed
from sd_quant.report.summary import timed_alone
from sd_quant.report.timing import Timed
from sd_quant.stages import infer
from sd_quant.stages import latency as timing
from sd_quant.stages.latency import compare_latency
from sd_quant.stages.occasions import count_run
from sd_quant.stages.shared import CallsOfAnImage, Shared
from tests.presets import job

pytestmark = [pytest.mark.commit, pytest.mark.slow]  # whole images
KNOBS = ("infer.width=64", "infer.height=64", "infer.steps=2", "infer.num_warmup_runs=1", "infer.prompts=[a rocket]")
INFER = job(*KNOBS, "infer.num_timed_runs=3").infer
TIMING = Timing(half_width=0.01, budget_s=0)


@dataclass
class Clocked:
    """Engines that give zeros of the right shapes, and a clock that they alone move."""

    contracts: dict
    seconds: float = 0.0

    def taking(self, seconds: float, part: str = "unet_xl", in_images: float = 0.0) -> Callable:
        """Of a part; ``in_images`` each call takes longer that is not a timed one: these have timesteps of one."""

        def call(**inputs):
            shown = part == "unet_xl" and inputs["timesteps"].max().item() > 1
            self.seconds += seconds + in_images * shown
            batch = len(next(iter(inputs.values())))
            if part == "unet_xl":
                return {"out": torch.zeros_like(inputs["x"])}
            if part == "vae":
                return {"dec": torch.zeros(batch, 3, 64, 64)}
            context = self.contracts["unet_xl"].inputs["context"][2]
            width = {"clip1": 64, "clip2": context - 64}[part]
            return {"z": torch.zeros(batch, 80, width), "z_pooled": torch.zeros(batch, 128)}

        call.name, call.inputs, call.device = part, self.contracts[part].dtypes, torch.device("cpu")
        return call

    def variants(self, framework: float = 8.0, full_precision: float = 4.0, quantized: float = 1.0) -> dict[str, dict]:
        """Seconds of every part of a variant; of the quantized one the UNet's."""
        full = {part: self.taking(full_precision, part) for part in PART_NAMES}
        return {
            "framework": {part: self.taking(framework, part) for part in PART_NAMES},
            "full_precision": full,
            "quantized": full | {"unet_xl": self.taking(quantized)},
        }


@pytest.fixture
def clocked(checkpoint, monkeypatch) -> Clocked:
    clocked = Clocked(contracts_of(checkpoint))
    monkeypatch.setattr(latency, "perf_counter", lambda: clocked.seconds)
    monkeypatch.setattr(timing, "probe", lambda device: {f"{device.type}_int8_tops": 2.0})
    return clocked


def compared(
    checkpoint, engines: dict, together: bool = True, infer: Infer = INFER, others=(), timing=TIMING, **more
) -> dict:
    variants = SimpleNamespace(
        loaded=SimpleNamespace(checkpoint=checkpoint), engines=engines, together=together, simulated=None,
        assignments=dict.fromkeys([checkpoint.family.DENOISER, *others]),
    )  # fmt: skip
    return compare_latency(variants, infer, timing, **more)


def read_from(latency: dict, part: str = "unet_xl", samples: int = 2, **denoiser: object) -> Timed:
    """What a report reads of a record with this latency."""
    knobs = {"infer": {"engine": "openvino", "batch_size": 1}}
    denoiser |= {"part": part, "samples_per_image": samples}
    return timed_alone("a", parsed({"latency": latency, "denoiser": denoiser, "knobs": knobs}))


@pytest.mark.parametrize("together", [True, False])
def test_each_number_is_of_its_own_variant(checkpoint, clocked, together):
    """4 s of every unquantized part, 1 s of the denoiser and of one text encoder; compiled, 2 s, a second baseline."""
    variants = clocked.variants()
    variants["compiled_framework"] = {"unet_xl": clocked.taking(2.0)}
    variants["quantized"] |= {"clip1": clocked.taking(1.0, "clip1")}
    found = compared(checkpoint, variants, together, others=["clip1"])
    unet = found["openvino"]["unet_xl"]["2"]  # guidance doubles the batch
    assert found["torch"]["unet_xl"]["2"]["full_precision"]["p50_ms"] == 8000
    assert (unet["full_precision"]["p50_ms"], unet["quantized"]["p50_ms"]) == (4000, 1000)
    assert unet["speedup"] == pytest.approx(4)
    assert (unet["quantized"]["n"], unet["quantized"]["warmup"]) == (3, 1)
    image = found["openvino"]["image"]["1"]  # of both text encoders, two steps of the UNet, the VAE
    assert found["torch"]["image"]["1"]["full_precision"]["p50_ms"] == 5 * 8000
    assert image["full_precision"]["p50_ms"] == 5 * 4000
    assert image["quantized"]["p50_ms"] == pytest.approx(2 * 4000 + 1000 + 2 * 1000)
    assert image["speedup"] == pytest.approx(20 / 11)
    rests = [image[variant]["rest"] for variant in ("full_precision", "quantized")]
    assert rests == pytest.approx([3 / 2, (2 * 4000 + 1000) / (2 * 4000)])
    assert ("composed" in image["full_precision"]) == (not together) and "composed" in image["quantized"]
    assert unet["rounds"]["together"] == together
    assert found["openvino"]["vae"]["1"]["quantized"] == {"p50_ms": None, "reason": "not quantized"}
    assert found["openvino"]["clip1"]["1"]["speedup"] == pytest.approx(4)
    assert not any("speedup" in found["openvino"][part]["1"] for part in ("vae", "clip2"))
    if together:
        assert image["whole_images"]["agree"]
    compiled = found["torch_compiled"]
    assert compiled.keys() == {"unet_xl", "image"} and compiled["unet_xl"]["2"]["full_precision"]["p50_ms"] == 2000
    # both text encoders and the VAE by the unquantized engine, two steps of the compiled denoiser
    assert compiled["image"]["1"]["full_precision"]["p50_ms"] == pytest.approx(3 * 4000 + 2 * 2000)
    read = read_from(found)
    assert read.image_over_compiled().value == pytest.approx((3 * 4 + 2 * 2) / (2 * 4 + 1 + 2 * 1))
    assert read.image_speedup().value == pytest.approx(20 / 11)


@pytest.mark.parametrize("together", [True, False])
def test_an_image_takes_the_calls_of_its_schedule(checkpoint, clocked, together):
    """4 s of every unquantized part, 1 s of the denoiser, which is called once for two steps."""
    variants = clocked.variants()
    infer = replace(INFER, schedule="cr")
    found = compared(checkpoint, variants, together, infer, calls=CallsOfAnImage(1))["openvino"]
    assert found["unet_xl"]["2"]["speedup"] == pytest.approx(4), "a call's"
    image = found["image"]["1"]
    assert image["quantized"]["p50_ms"] == pytest.approx(3 * 4000 + 1000) and image["quantized"]["calls_share"] == 0.5
    assert image["speedup"] == pytest.approx(20 / 13)
    assert read_from({"openvino": found}).image_speedup().value == pytest.approx(20 / 13)
    if together:
        assert image["whole_images"]["speedup"] == pytest.approx(20 / 13), "made with that schedule"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("others", "image"), [(["low"], 1 + 3 + 5), ([], 1 + 6 + 5)])
def test_each_of_two_denoisers_counts_with_its_calls(clocked, monkeypatch, together, others, image):
    """Unquantized, an image takes one call of 4 s and three of 2 s, and a decoder's 5 s; quantized, calls of 1 s."""
    contract = Contract({"x": ("batch", 4)}, ("out",), {"x": torch.float32}, torch.float32)
    parts = {
        name: SimpleNamespace(component=name, contract=contract, in_steps=False) for name in ("high", "low", "vae")
    }
    family = SimpleNamespace(DENOISER="high", DENOISERS=("high", "low"), GUIDES=False)
    checkpoint = SimpleNamespace(family=family, parts=lambda: parts)
    calls, infer = {"high": 1, "low": 3}, replace(INFER, steps=4, num_timed_runs=5)

    def engine(seconds: float):
        def call(x):
            clocked.seconds += seconds
            return {"out": x}

        call.inputs, call.device, call.reopen = contract.dtypes, torch.device("cpu"), lambda: False
        return call

    full = {"high": engine(4.0), "low": engine(2.0), "vae": engine(5.0)}
    engines = dict.fromkeys(["framework", "full_precision"], full)
    engines["quantized"] = full | dict.fromkeys(["high", *others], engine(1.0))
    images = ImageTimes([15e3], 0.5)
    monkeypatch.setattr(timing, "part_parameters", lambda _: dict.fromkeys(parts, 1))
    monkeypatch.setattr(timing, "image_times", lambda _, variants, *more: dict.fromkeys(variants, images))
    of_an_image = CallsOfAnImage(1, by_denoiser=calls)
    found = compared(checkpoint, engines, together, infer, others, calls=of_an_image)["openvino"]
    assert found["high"]["1"]["speedup"] == pytest.approx(4)
    assert found["low"]["1"].get("speedup") == (pytest.approx(2) if others else None)
    assert found["image"]["1"]["full_precision"]["rest"] == 0.5
    assert found["image"]["1"]["quantized"]["p50_ms"] == pytest.approx(1000 * image)
    read = read_from({"openvino": found}, "high", 1, calls=calls)
    assert read.image_speedup().value == found["image"]["1"]["speedup"] == pytest.approx(15 / image)
    assert read.denoiser_speedup().value == pytest.approx(10 / (image - 5)), "of the mean of an image's calls"


def test_whole_images_are_made_in_turn_and_the_record_says_whether_they_agree(checkpoint, clocked, caplog):
    """In images the denoiser takes as long as its calls do, or what quantizing gains is lost in them."""
    variants, infer = clocked.variants(), replace(INFER, num_timed_runs=10)
    found = compared(checkpoint, variants, infer=infer)["openvino"]["image"]["1"]["whole_images"]
    assert found["agree"] and not caplog.messages and found["speedup"] == pytest.approx(20 / 14)
    variants["quantized"] |= {"unet_xl": clocked.taking(1.0, in_images=3.0)}
    found = compared(checkpoint, variants, infer=infer)["openvino"]["image"]["1"]["whole_images"]
    assert not found["agree"] and found["speedup"] == pytest.approx(1)
    assert "whole images are 1.00x as fast, by the calls of the denoiser they should be 1.43x" in caplog.text


def test_an_image_whose_denoiser_was_disturbed_has_no_figure_and_no_ratio(checkpoint, clocked):
    """Each call of the unquantized denoiser takes five times as long in an image as in rounds; torch is quiet."""
    variants = clocked.variants(0.8, 0.4, 0.1)
    variants["full_precision"] |= {"unet_xl": clocked.taking(0.4, in_images=1.6)}
    found = compared(checkpoint, variants)
    image = found["openvino"]["image"]["1"]
    for variant in ("full_precision", "quantized"):
        assert image[variant]["p50_ms"] is None
        assert image[variant]["reason"].startswith("the denoiser took 4,000 ms in it, and 800 ms by calls of its own")
    assert image["speedup"]["value"] is None and "whole_images" not in image
    assert found["torch"]["image"]["1"]["full_precision"]["p50_ms"] == pytest.approx(5 * 800)
    assert found["openvino"]["unet_xl"]["2"]["speedup"] == pytest.approx(4)
    variants["full_precision"] |= {"unet_xl": clocked.taking(0.1, in_images=0.4)}  # less than a second in all
    assert compared(checkpoint, variants)["openvino"]["image"]["1"]["full_precision"]["p50_ms"] is not None


def test_what_is_compared_is_called_as_often_in_a_row_as_an_image_calls_it(checkpoint, clocked, monkeypatch):
    monkeypatch.setattr(timing, "in_a_row", in_a_row := Mock(wraps=timing.in_a_row))
    engines = {name: own["unet_xl"] for name, own in clocked.variants().items()}
    timing.denoiser_rounds(checkpoint, engines, INFER, TIMING)
    assert [call.args[1] for call in in_a_row.mock_calls] == [2] * 3, "steps"


def test_engines_are_opened_again_where_memory_has_room(checkpoint, clocked, monkeypatch, caplog):
    opened, variants = [], clocked.variants()
    engines = {name: variants[name]["unet_xl"] for name in ("full_precision", "quantized")}
    for name, engine in engines.items():
        engine.reopen = lambda name=name: opened.append(name) or True
    enough = Timing(half_width=1e-9, budget_s=200)
    rounds = timing.denoiser_rounds(checkpoint, engines, INFER, enough)
    assert rounds.openings == [3] * len(rounds.openings) and sorted(set(opened)) == ["full_precision", "quantized"]
    assert len(opened) == 2 * (len(rounds.openings) - 1) > 2
    monkeypatch.setattr(timing, "available_memory_bytes", lambda: 1000)
    opened.clear()
    with caplog.at_level("INFO"):
        assert timing.denoiser_rounds(checkpoint, engines, INFER, enough).openings == [] == opened
    assert "memory has no room to open 2 engines again" in caplog.text


def test_a_part_is_timed_by_the_clock_of_its_engines_device(checkpoint, clocked, monkeypatch):
    """On a GPU a call returns when its work is queued: whoever forgets the clock times the queueing."""

    def of_the_device(call):
        call()
        return 5.0

    for stage in (timing, infer):
        monkeypatch.setattr(stage, "clock_of", lambda device: of_the_device)
    variants = clocked.variants(1.0, 1.0, 1.0)
    found = compared(checkpoint, variants)
    part = found["openvino"]["unet_xl"]["2"]["quantized"]
    assert (part["clock"], part["p50_ms"]) == ("of_the_device", 5.0)
    assert found["openvino"]["image"]["1"]["full_precision"]["rest"] > 0  # an image ends on the processor
    alone = infer.time_engine(checkpoint, variants["quantized"], ["a rocket"], INFER, False)["unet_xl"]["2"]
    assert (alone["clock"], alone["p50_ms"]) == ("of_the_device", 5.0)


def test_a_run_is_an_occasion_whose_intervals_those_before_widen(checkpoint, clocked, monkeypatch, tmp_path):
    """A job whose engine leaves no file here; in a job that is timed with others later nothing is probed."""
    wide = job(*KNOBS, "infer=torch_native", "infer.num_timed_runs=8")
    shared = Shared({"machine": {"cpu": "a processor"}}, tmp_path, Cache(tmp_path, 1e9))
    for hour, seconds in enumerate((1.0, 0.8, 1.2, 0.9, 1.1)):
        monkeypatch.setattr(occasions.time, "time", lambda hour=hour: 3600.0 * hour)
        variants = clocked.variants(quantized=seconds)
        enough = Timing(half_width=0.01, budget_s=9)
        found = compared(checkpoint, variants, infer=wide.infer, timing=enough)
        count_run(found, "unet_xl", wide, shared, "mark")
        call, image = found["torch_native"]["unet_xl"]["2"], found["torch_native"]["image"]["1"]
        assert ("own_interval" in call) == ("own_interval" in image) == (hour == 4)
        assert call["rounds"]["probes"] == [{"cpu_int8_tops": 2.0}] * len(call["rounds"]["probes"]) != []
    for each in (call, image):
        assert each["speedup_interval"][0] < each["own_interval"][0] < each["speedup"] < each["own_interval"][1]
    later = compared(checkpoint, clocked.variants(), infer=wide.infer)
    count_run(later, "unet_xl", wide, shared, "mark")
    assert later["torch_native"]["unet_xl"]["2"]["rounds"]["probes"] == []
    (file,) = (tmp_path / "occasions").glob("*.json")
    assert len(occasions.read_history(file)) == 5
