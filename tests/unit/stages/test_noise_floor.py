"""Other ways to compute full precision: that each really is another, is kept, and is refused where it is none."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sd_quant.cache import Cache
from sd_quant.config.comparison import WAYS
from sd_quant.errors import ConfigError, SdQuantError
from sd_quant.inference.loading import load_model
from sd_quant.stages import noise_floor as stage
from sd_quant.stages.load import with_recipe
from sd_quant.stages.session import open_unchecked
from sd_quant.stages.shared import Shared, VariantOutputs
from sd_quant.stages.variants import FRAMEWORK
from tests.presets import job

from ...zoo.families import TINY

pytestmark = pytest.mark.commit


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floor")
    TINY["sd15"](folder / "model")
    given = job(
        "model=sd15", f"model.path={folder / 'model'}", "infer.width=64", "infer.height=64", "infer.steps=2",
        "infer.prompts=[a cat,a dog]", "infer=openvino",
    )  # fmt: skip
    session = open_unchecked(given.model)
    loaded = with_recipe(session, given.model, given.infer, given.quantize)
    facts = {"inputs": {}, "versions": {}, "machine": {"cpu": "a processor", "usable_cores": 2, "gpus": []}}
    shared = Shared(facts, folder, Cache(folder / "cache", 1e9))
    variants = SimpleNamespace(
        loaded=loaded, shared=shared, engines={FRAMEWORK: load_model(session.checkpoint).torch_engines()},
        make_room=lambda: None, directory=folder,
    )  # fmt: skip
    pipeline = stage.pipeline_of(session.checkpoint, variants.engines[FRAMEWORK])
    images = stage.generate(pipeline, given.infer.prompt_list(), stage.sampling_of(given.infer), "reference")
    return SimpleNamespace(loaded=loaded, infer=given.infer, rest=(variants, VariantOutputs({FRAMEWORK: images})))


def test_each_way_computes_the_same_images_in_another_way_and_is_kept(tiny, monkeypatch):
    seen, generate, counts = {}, stage.generate, [3]

    def spied(pipeline, prompts, sampling, description, by_batch):
        made = generate(pipeline, prompts, sampling, description, by_batch)
        engine = pipeline.parts["unet"].engines["unet"]
        seen.setdefault(description.rpartition(" ")[2], []).append(
            (sampling.batch_size, torch.get_num_threads(), next(engine.module.parameters()).dtype, sampling.seed)
        )
        return made

    monkeypatch.setattr(stage, "generate", spied)
    monkeypatch.setattr(stage, "threads", lambda: 4)
    # several threads that wait for each other are slow beside other tests
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: counts.append(number))
    found = stage.noise_floor(ways := ("runtime", "batch", "threads", "bf16"), *tiny.rest)
    seed, fp32 = tiny.infer.seed, torch.float32
    assert seen["batch"] == [(2, 3, fp32, seed)] and seen["bf16"] == [(1, 3, torch.bfloat16, seed)]
    assert seen["threads"] == [(1, 2, fp32, seed), (1, 4, fp32, seed)], "as the first made the reference's very images"
    assert counts == [3, 2, 3, 4, 3]
    assert found["runtime"] == {}, "the record has these scores already"
    assert 20 < found["bf16"]["psnr"]["mean"] < 70 and len(found["bf16"]["lpips"]["values"]) == 2
    assert found["batch"]["latent_sqnr_db"][-1] is None or found["batch"]["latent_sqnr_db"][-1] > 60
    monkeypatch.setattr(stage, "generate", lambda *_: pytest.fail("it is in the cache"))
    assert stage.noise_floor(ways, *tiny.rest) == found


def test_a_way_that_fails_leaves_the_others_and_says_why(tiny, monkeypatch):
    error = SdQuantError("torch gave a latent that is not finite")
    monkeypatch.setattr(stage, "generate", Mock(side_effect=error))
    assert stage.noise_floor(("fp16", "runtime"), *tiny.rest) == {"fp16": {"reason": str(error)}, "runtime": {}}


@pytest.mark.parametrize(("way", "knobs", "reason"), [
    ("bf16", {"precision": "bf16"}, "the reference is computed in bf16"),
    ("fp32", {}, "the reference is computed in fp32"),
    ("batch", {"prompts": ["a cat"]}, "no two of these images fit into one batch"),
    ("batch", {"sizes": ["64x64", "128x64", "64x128"]}, "no two of these images fit into one batch"),
    ("runtime", {"engine": "torch_native"}, "infer.engine=torch_native computes the unquantized model as the refer"),
])  # fmt: skip
def test_a_way_that_is_none_here_is_refused_by_name_and_explained_with_all(tiny, way, knobs, reason):
    loaded = replace(tiny.loaded, infer=replace(tiny.infer, **knobs))
    with pytest.raises(ConfigError, match=f"^noise_floor has {way}, but {reason}.*; leave it out, or give noise_floor"):
        stage.check_noise_floor([way], loaded)
    stage.check_noise_floor(["all"], loaded)
    assert stage.why_not_made(way, loaded).startswith(reason)


def test_an_unknown_way_is_refused_and_all_names_every_one():
    with pytest.raises(ConfigError, match="^noise_floor is bf61, expected one of runtime, batch, threads, isa, fp32"):
        job("noise_floor=[batch,bf61]")
    assert stage.ways_of(["batch", "batch"]) == ["batch"] and stage.ways_of(["batch", "all"]) == list(WAYS)
    assert job("noise_floor=bf16").noise_floor == ["bf16"]


def test_no_class_of_processor_below_the_lowest(tiny, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert stage.why_not_made("isa", tiny.loaded) == "no class below this processor's is known"
    monkeypatch.setattr(stage, "best_device", lambda: torch.device("cuda"))
    for way in ("isa", "threads"):
        assert "torch computes on the GPU" in stage.why_not_made(way, tiny.loaded)


@pytest.mark.nightly
def test_a_lower_class_is_computed_by_a_process_of_its_own(tiny, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    (entry,) = stage.noise_floor(("isa",), *tiny.rest).values()
    assert entry["psnr"]["mean"] is None or entry["psnr"]["mean"] > 50
    assert stage.os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE" and "ATEN_CPU_CAPABILITY" not in stage.os.environ
