"""Which calls of the denoiser engines are compared on, and what jobs share: in entries that know what they are of."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sd_quant.cache import Cache
from sd_quant.calibration import collection, parts
from sd_quant.engines import RUNTIMES
from sd_quant.errors import ConfigError
from sd_quant.inference.pipeline import Generated, Sampling
from sd_quant.models.parts import Contract
from sd_quant.stages import compare, export_onnx, export_trt, shared
from sd_quant.stages.shared import Shared
from sd_quant.stages.variants import FRAMEWORK, FULL_PRECISION, QUANTIZED

pytestmark = pytest.mark.commit

VARIANTS = {FRAMEWORK: 0.25, FULL_PRECISION: 0.5}  # to what each one adds
CONTRACT = Contract({"x": ("batch", 4)}, ("y",), {"x": torch.float16}, torch.float16)
SAMPLING = Sampling(steps=2, guidance_scale=5.0, height=64, width=64, batch_size=1, seed=3)
THINGS = {  # as usual, and another
    "checkpoint": ("a", "b"), "source": ("a", "b"), "cpu": ("a", "b"), "cores": (2, 4), "gpus": ([], ["H100"]),
    "contract": (CONTRACT, CONTRACT.in_dtype(torch.float32)), "identity": ("plain", "in pairs of reals"),
    "arguments": ({}, {"num_frames": 9}), "prompts": (["a cat"], ["a dog"]), "engine": ("openvino", "torch"),
    "sampling": (SAMPLING, replace(SAMPLING, schedule="ch")), "precision": ("fp32", "bf16"), "device": ("cpu", "cuda"),
    "layers": (["a", "b"], ["a"]), "newer": ("", ""),
    "onnx": (b"1", b"2"), "profile": (1, 2), "library": ("tensorrt_rtx", "tensorrt"), "targets": ([], ["SM89"]),
    "level": (3, 5), "gib": (4, 1), "rows": (None, [{"mode": "x"}]),
}  # fmt: skip
ALL = {"torch", "diffusers", "transformers"}
OF_IMAGES = {"checkpoint", "source", "contract", "arguments", "prompts", "sampling"}
OF_STATISTICS = OF_IMAGES | {"layers", "device", "rows"}


def of(prompts: list[str], **knobs: object) -> SimpleNamespace:
    return SimpleNamespace(prompt_list=lambda: prompts, **knobs)


class Adding:
    name, inputs, device = "adding", {"x": torch.float32}, torch.device("cpu")

    def __init__(self, number: float):
        self.number = number

    def __call__(self, x):
        return {"out": x + self.number}


def faked(monkeypatch):
    """A checkpoint of two parts, and engines that generate calls a step of each prompt, and then the decoder."""

    def generate(engines, prompts, sampling, description, by_batch):
        def denoise(place: int) -> dict[str, torch.Tensor]:
            for step in range(sampling.steps_taken):
                engines["unet"](x=(x := torch.tensor([float(step)])))
                x += 100  # what was seen is a copy
            return {}

        by_batch([[number] for number in range(len(prompts))], denoise, ())
        for pixel in (50.0, 60.0):  # of which the first is seen
            engines["vae"](x=torch.tensor([pixel]))

    monkeypatch.setattr(compare, "generate", generate)
    monkeypatch.setattr(compare, "sampling_of", lambda infer: SimpleNamespace(steps_taken=infer.steps, batches=list))
    monkeypatch.setattr(compare, "pipeline_of", lambda checkpoint, engines: engines)
    checkpoint = SimpleNamespace(
        family=SimpleNamespace(DENOISER="unet", DENOISERS=()), parts=lambda: {"unet": None, "vae": None}
    )
    return checkpoint, {name: dict.fromkeys(("unet", "vae"), Adding(number)) for name, number in VARIANTS.items()}


def backwards(batches, make, also):
    return [make(place) for place in reversed(range(len(batches)))][::-1]


@pytest.mark.parametrize("by_batch", [compare.in_turn, backwards])
def test_the_denoiser_is_compared_where_half_of_the_steps_are_done(monkeypatch, by_batch):
    """Not on the first call, of pure noise; whoever makes the batches, and in whichever order."""
    checkpoint, engines = faked(monkeypatch)
    by_batch, infer = Mock(side_effect=by_batch), of(["a cat"] * 8, steps=20)
    found = compare.compare_framework(checkpoint, engines[FRAMEWORK], infer, by_batch)
    assert {part: inputs["x"].item() for part, inputs in found.inputs.items()} == {"unet": 10, "vae": 50}
    assert {name: inputs["x"].item() for name, inputs in found.calls.items()} == {"2": 2, "47": 7, "92": 12, "137": 17}
    outputs = {part: output["out"].item() for part, output in found.outputs[FRAMEWORK].items()}
    assert outputs == {"unet": 10.25, "vae": 50.25}
    assert by_batch.call_args.args[2] == [[0, 2, 10], [], [47], [], [92], [], [137], []]
    assert [compare.sampled_calls(batches, 20) for batches in (1, 2)] == [[2, 7, 12, 17], [2, 7, 32, 37]]
    assert max(compare.sampled_calls(8, 1)) < 8, "of an image of one step"
    checkpoint.parts = lambda: ["unet", "vae", "second"]
    with pytest.raises(ConfigError, match="steps=20 makes images without a call of second; take more steps"):
        compare.compare_framework(checkpoint, engines[FRAMEWORK], infer)


class Kept(shared.Shared):
    """Outputs in a cache, of which two jobs' keys differ in prompts alone."""

    def origin(self, checkpoint, prompts, infer, engine, sampling):
        return {"prompts": prompts}


def test_a_job_of_more_images_makes_those_that_are_missing(tmp_path):
    """As one does that goes on where another was killed: batches are kept as they are made."""
    kept, made = Kept({}, tmp_path, Cache(tmp_path / "cache", 1e9)), []
    sampling = SimpleNamespace(batches=lambda numbers: [list(numbers)[first : first + 2] for first in (0, 2, 4)])

    def images(prompts):
        def make(by_batch):
            batches = [batch for batch in sampling.batches(range(len(prompts))) if batch]

            def denoise(place):
                made.append([prompts[number] for number in batches[place]])
                return {"steps": torch.tensor([float(number) for number in batches[place]])}

            steps = torch.cat([each["steps"] for each in by_batch(batches, denoise, ())])
            pixels = np.zeros((len(prompts), 2, 2, 3), np.uint8)
            return shared.VariantOutputs({"framework": Generated(pixels, steps)}, {}, {}, {})

        return kept.provide(None, of(prompts), make, sampling=sampling).images["framework"].latents

    assert images(list("abcd")).tolist() == [0, 1, 2, 3]
    assert images(list("abcdef")).tolist() == [0, 1, 2, 3, 4, 5]
    assert made == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert images(list("ab") * 2).tolist() == [0, 1, 2, 3], "the same prompts with other numbers have other noise"
    assert made[3:] == [["a", "b"]]


def test_quantized_images_are_those_of_the_jobs_own_recipe(monkeypatch, tmp_path):
    """They come from the cache for the same assignment alone, with the number of calls by which they were made."""
    checkpoint, engines = faked(monkeypatch)
    monkeypatch.setattr(compare, "recipe_sampling", lambda infer: SimpleNamespace(steps_taken=infer.steps))
    monkeypatch.setattr(compare, "counted", lambda checkpoint, totals, *_: totals)
    calls = []

    class Counting(Adding):
        def __call__(self, x):
            calls.append(self.number)
            return super().__call__(x)

    class OfRecipe(shared.Shared):
        def origin(self, checkpoint, prompts, infer, engine, sampling):
            return {"prompts": prompts, **engine}

        def provide(self, *_):
            return shared.VariantOutputs({}, {}, {FULL_PRECISION: {}}, {})

    framework = shared.VariantOutputs({}, {"unet": {"x": torch.ones(1)}}, {FRAMEWORK: {}}, {})

    def images(digest: str, simulated: str | None = None):
        parts = {"unet": Counting(float(len(digest))), "vae": Adding(0)}
        variants = SimpleNamespace(
            engines=engines | {QUANTIZED: parts}, assignments={"unet": {}}, simulated=simulated,
            digests=lambda: {"unet": digest}, loaded=SimpleNamespace(checkpoint=checkpoint),
            shared=OfRecipe({}, tmp_path, Cache(tmp_path / "cache", 1e9)),
        )  # fmt: skip
        infer = of(["a", "b"], steps=5, engine="openvino", precise_letters=set())
        made = compare.compare_images(variants, framework, infer)
        assert made.of_an_image == {"c": 10}
        calls_of_images = len(calls) - 1  # one is compared
        calls.clear()
        return calls_of_images

    assert [images("one"), images("one"), images("three")] == [10, 0, 10]
    assert [images("one", "no engine"), images("one")] == [10, 0]


@pytest.mark.parametrize("widths", [(64, 64), (64, 128)], ids=["one size", "several sizes"])
def test_images_are_kept_as_they_were(widths, tmp_path):
    """And a call that is kept twice can be saved: with four steps the third is half way and a further one."""
    images = [np.full((64, width, 3), number, np.uint8) for number, width in enumerate(widths * 6)]
    latents = [torch.full((2, 4, 8, width // 8), float(number)) for number, width in enumerate(widths * 6)]
    same = len(set(widths)) == 1
    made = Generated(np.stack(images) if same else images, torch.stack(latents) if same else latents)
    inputs = {"vae": {"z": torch.ones(2)}}
    packed = shared.pack(
        shared.VariantOutputs({"framework": made}, inputs, {"framework": inputs}, {"7": inputs["vae"]})
    )
    save_file(packed, tmp_path / "a.safetensors")
    kept = shared.unpack(packed)
    assert kept.calls["7"]["z"].shape == (2,)
    found = kept.images["framework"]
    assert type(found.images) is type(made.images) and type(found.latents) is type(made.latents)
    assert all(np.array_equal(*pair) for pair in zip(found.images, images, strict=True))
    assert all(torch.equal(*pair) for pair in zip(found.latents, latents, strict=True))


def test_the_calls_of_an_image_are_counted(monkeypatch):
    """Of two images in two batches, by twelve calls, two of them precise."""
    of_letters = {"c": 10, "f": 0, "h": 2}
    checkpoint, _ = faked(monkeypatch)
    infer = of(["a", "b"], scale=5.0, recipe_steps=3, given_schedule="chrc")
    found = compare.counted(checkpoint, of_letters, infer, 2)
    assert (found.number, found.in_a_step, found.precise) == (6, 2, {"h": 1})


def test_what_is_found_is_json_and_found_once(tmp_path):
    facts = {"inputs": {}, "versions": {}, "machine": {"cpu": "a processor", "usable_cores": 2, "gpus": []}}
    jobs, made = Shared(facts, tmp_path, Cache(tmp_path / "cache", 1e9)), {"products": [[1.5, None]], "schedule": "cre"}
    assert jobs.found("schedules", {"a": 1}, lambda: made) == made
    assert jobs.found("schedules", {"a": 1}, lambda: pytest.fail("it is in the cache")) == made
    values = iter([1 / 3, 1 / 7])  # no round numbers
    first = jobs.sensitivities({}, {}, 5.0, ["b", "a"], lambda name: next(values))
    again = jobs.sensitivities({}, {}, 5.0, ["b", "a"], lambda name: pytest.fail("it is in the cache"))
    assert list(first.items()) == list(again.items()) == [("b", 1 / 3), ("a", 1 / 7)], "to the bit"


class Asked(Exception):
    """Holds the key by which something was looked for."""


def ask(*key: object, **_: object) -> None:
    raise Asked(repr(key))


def key_of_images(now, patch, folder) -> None:
    machine = {"cpu": now.cpu, "usable_cores": now.cores, "gpus": now.gpus}
    facts = {"inputs": {"checkpoint": {"sha256": now.checkpoint}}, "versions": now.versions, "machine": machine}
    kept, infer = shared.Shared(facts, folder, Cache(None)), SimpleNamespace(precision=now.precision)
    ask(kept.origin(now.opened, now.prompts, infer, {"engine": now.engine}, now.sampling))


def key_of_graph(now, patch, folder) -> None:
    patch.setattr(export_onnx, "versions", lambda *names: {name: now.versions[name] for name in names})
    ask(export_onnx.graph_origin(now.opened, now.checkpoint, "unet"))


def key_of_statistics(module, now, patch, folder) -> None:
    fabric = SimpleNamespace(device=SimpleNamespace(type=now.device), world_size=1)
    patch.setattr(collection, "Entries", ask)
    patch.setattr(collection, "version", now.versions.get)
    model, given = SimpleNamespace(checkpoint=now.opened), {"checkpoint_sha256": now.checkpoint, "cache": folder}
    now.sampling = replace(now.sampling, arguments=now.rows)
    wanted = collection.Pass(model, now.layers, now.prompts, now.sampling)
    if module is collection:
        module.calibrate(wanted, fabric, **given)
    module.calibrate_parts({"vae": wanted}, fabric, **given)


def key_of_plan(now, patch, folder) -> None:
    (folder / "unet.onnx").write_bytes(now.onnx)
    library = SimpleNamespace(__version__=now.versions[now.library])
    fakes = {
        "plan_library": now.library, "formats_in": {"int8"}, "targets_for": now.targets, "check_gpu": None,
        "profile": now.profile, "runtime_module": library, "onnx_files": [folder / "unet.onnx"],
    }  # fmt: skip
    for name, value in fakes.items():
        patch.setattr(export_trt, name, lambda *_, value=value: value)
    patch.setattr(torch.cuda, "get_device_name", lambda: repr(now.gpus))
    knobs = SimpleNamespace(optimization_level=now.level, workspace_gib=now.gib, timing_cache=None)
    cache = SimpleNamespace(provide=lambda kind, origin, target, make: ask(origin))
    export_trt.build_plans({"unet": folder}, folder, knobs, None, cache)


@pytest.mark.parametrize(("look", "things", "packages"), [  # on which each depends
    (key_of_images, OF_IMAGES | {"cpu", "cores", "gpus", "precision", "engine"},
     ALL | {row.package for row in RUNTIMES.values()}),
    (key_of_graph, {"checkpoint", "source", "contract", "identity"}, ALL | {"onnx", "onnx-ir", "onnxscript"}),
    (partial(key_of_statistics, collection), OF_STATISTICS, ALL),
    (partial(key_of_statistics, parts), OF_STATISTICS, ALL),
    (key_of_plan, {"onnx", "profile", "library", "targets", "level", "gib", "gpus"}, {"tensorrt_rtx"}),
])  # fmt: skip
def test_anything_that_an_answer_depends_on_is_in_its_key(look, things, packages, monkeypatch, tmp_path):
    def key(**changes) -> str:
        now = SimpleNamespace(**{name: usual for name, (usual, _) in THINGS.items()} | changes)
        now.versions = dict.fromkeys(packages | {"tensorrt"}, "1") | {now.newer: "2"}
        part = SimpleNamespace(contract=now.contract, identity=now.identity)
        now.opened = SimpleNamespace(arguments=now.arguments, parts=lambda: {"unet": part})
        for module in (shared, export_onnx, collection, parts):
            monkeypatch.setattr(module, "source_digest", lambda *_: now.source)
        with pytest.raises(Asked) as asked:
            look(now, monkeypatch, tmp_path)
        return str(asked.value)

    assert key() == key()
    for changes in (*({name: THINGS[name][1]} for name in things), *({"newer": package} for package in packages)):
        assert key(**changes) != key(), changes
