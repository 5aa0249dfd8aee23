"""Pipelines as they are watched: who denoises, how often, for how many samples, and in which way they take prompts."""

import copy
import inspect
import re
import types
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from sd_quant.checkpoints.diffusers_network import network_of
from sd_quant.checkpoints.diffusers_pipeline import open_folder
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.requests import Run, request
from sd_quant.inference.stand_ins import EngineNetwork, bound
from sd_quant.inference.timed_calls import image_of_parts, samples_per_call
from sd_quant.models.family import Style
from sd_quant.observed import watching
from sd_quant.observed.observing import filled
from sd_quant.observed.watching import BATCH, STYLES, Asked, Log, Watched, denoisers_of, runs_of, steps_for, watch
from tests.zoo import CASES

pytestmark = pytest.mark.commit


def watched(path, width: int, height: int, scale: float = 5.0, arguments=None, empty: bool = False) -> Watched:
    """The pipeline in a folder; of networks that are ``empty`` no weight is read."""
    folder = open_folder(path)
    networks = {name: network_of(folder.described[name].kind, config) for name, config in folder.configs.items()}
    if not empty:
        networks = {name: filled(network, folder.components[name]) for name, network in networks.items()}
    return watch(folder.pipeline, networks, Asked(width, height, scale, arguments or {}))


@pytest.fixture(scope="module")
def look(tiny_folder) -> Callable[..., Watched]:
    def look(case: str, **given) -> Watched:
        known = CASES[case]
        usual = {"width": known.width, "height": known.height, "arguments": dict(known.arguments)}
        return watched(tiny_folder(case), **usual | given)

    return look


@pytest.mark.parametrize("empty", [False, True], ids=["with weights", "without weights"])
def test_guidance_doubles_the_samples_of_one_call_a_step(look, empty):
    found = look("AuraFlowPipeline", empty=empty)
    assert found.denoisers == ("transformer",) and found.outputs == "images"
    assert (found.samples_per_image, found.calls_a_step) == (2, 1)
    assert found.methods == {"text_encoder": "forward", "transformer": "forward", "vae": "decode"}
    assert found.style == Style(batched=True, each=True)
    assert (found.prepared, found.unequal, found.fixed) == ({}, None, {})
    denoising = found.calls["transformer"]
    assert [(call.run, call.step) for call in denoising] == [
        (run, step) for run in ("base", "larger", "prompt", "batch") for step in (0, 1)
    ]
    first = {call.run: call.arguments["hidden_states"].shape for call in reversed(denoising)}
    assert first["base"][0] == first["larger"][0] == 2 and first["batch"][0] == 2 * BATCH
    assert first["base"][2:] != first["larger"][2:] and first["base"][2:] == first["batch"][2:]
    texts = {call.run: call.arguments["input_ids"] for call in reversed(found.calls["text_encoder"])}
    assert texts["base"].shape == texts["prompt"].shape and not torch.equal(texts["base"], texts["prompt"])
    if not empty:
        assert look("AuraFlowPipeline", scale=1.0).samples_per_image == 1, "without guidance"


FACTS = {  # of classes that differ in how they call their networks
    # guidance by two calls a step: runs, steps, with and without the prompt
    "WanPipeline": {"samples_per_image": 1, "calls_a_step": 2, "outputs": "frames"},
    # a denoiser for each half of the steps
    "WanPipeline, two denoisers": {"denoisers": ("transformer", "transformer_2"), "calls_a_step": 2},
    # one generator for all images
    "AmusedPipeline": {
        "style": Style(batched=True, each=False),
        "unequal": "this pipeline draws the noise of all images of a batch from one generator",
    },
    "DreamLitePipeline": {
        "style": Style(batched=False, each=False), "denoisers": ("unet",), "fixed": {},
        "unequal": "this pipeline takes one prompt at a time",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", FACTS)
def test_facts_of_other_classes(look, case):
    found = look(case)
    assert {name: getattr(found, name) for name in FACTS[case]} == FACTS[case]
    runs = ("base", "larger", "prompt", "batch", "mixed") if found.style.batched else ("base", "larger", "prompt")
    assert found.sizes.keys() == {*runs}
    if case == "WanPipeline":
        assert len(found.calls["transformer"]) == 4 * 2 * 2
    if "two" in case:
        assert [{call.step for call in found.calls[name]} for name in found.denoisers] == [{0}, {1}]


def test_runs_of_other_sizes_begin_with_a_larger_one():
    runs = runs_of(512, 512, STYLES[0])
    assert tuple(runs) == ("base", "larger", "prompt", "batch", "mixed")
    assert [(run.width, run.height) for run in runs["larger"]] == [
        (576, 640), (448, 384), (480, 448), (496, 480), (504, 496)
    ]  # fmt: skip
    assert len(runs["batch"][0].prompts) == BATCH and len(set(map(len, runs["mixed"][0].prompts))) == 2
    assert {(run.width, run.height) for name in ("prompt", "batch", "mixed") for run in runs[name]} == {(512, 512)}
    assert runs_of(64, 64, STYLES[0])["larger"][0].width == 128


REFUSED = {  # arguments of a call, and the sentence; what a knob decides would say one thing in the record
    "num_frames": (5, "model.arguments has num_frames, which AuraFlowPipeline does not take; it takes prompt, neg.*"),
    "max_sequence_length": (
        -1, "AuraFlowPipeline fails when it makes images of .*; check model.width, model.height and model.arguments"
    ),
    **{
        name: (64, f"model.arguments has {name}, which is not stated there: sizes, steps.*")
        for name in ("width", "num_inference_steps", "output_type", "num_images_per_prompt", "prompt")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_is_refused_in_one_sentence(look, name):
    value, sentence = REFUSED[name]
    with pytest.raises((ConfigError, ArtifactError)) as caught:
        look("AuraFlowPipeline", arguments={name: value})
    assert re.fullmatch(sentence, str(caught.value)) and not re.search(r"\bself\b", str(caught.value))


class Plain:
    def __call__(self, prompt, generator, negative_prompt=None): ...


class Needs:
    def __call__(self, prompt, image, ratio, strength=0.5, **kwargs): ...


class Sizes:
    def __call__(self, batch_size, generator, num_inference_steps, negative_prompt=None): ...


def test_a_pipeline_is_asked_as_it_takes_prompts_noise_and_images():
    run = Run("base", ["a cat"], 64, 64)
    each, for_all, alone = (request(Plain(), run, 5.0, 2, {"negative_prompt": "b"}, [7], style) for style in STYLES)
    assert each["prompt"] == for_all["prompt"] == ["a cat"] and alone["prompt"] == "a cat"
    assert each["negative_prompt"] == for_all["negative_prompt"] == ["b"] and alone["negative_prompt"] == "b"
    assert isinstance(each["generator"], list)
    assert isinstance(for_all["generator"], torch.Generator) and isinstance(alone["generator"], torch.Generator)
    several = Run("batch", ["a"] * 3, 64, 64)  # of a pipeline without prompts
    given = request(Sizes(), several, 5.0, 4, {"negative_prompt": "b"}, [3, 4, 5], Style())
    assert given["batch_size"] == 3 and given["num_inference_steps"] == 4 and given["negative_prompt"] == ["b"] * 3
    assert [each.initial_seed() for each in given["generator"]] == [3, 4, 5]
    given = request(Needs(), run, 5.0, 2, {"image": 1, "ratio": 0.5}, [0], Style())
    assert given.keys() == {"prompt", "image", "ratio"}
    with pytest.raises(ConfigError, match=r"Needs takes image, ratio beside a prompt, and nothing gives it; state it"):
        request(Needs(), run, 5.0, 2, {}, [0], Style())


@pytest.mark.parametrize(("arguments", "steps"), [({}, 4), ({"strength": 0.3}, 7), ({"strength": 1.0}, 2)])
def test_two_steps_are_taken_of_an_image_whatever_the_strength(arguments, steps):
    assert steps_for(Needs(), arguments) == steps and steps_for(Sizes(), {}) == 2


def test_texts_of_two_lengths_are_watched_where_long_ones_are_cut(look):
    """A graph for one length alone would serve both prompts if both were cut to it."""
    calls = look("QwenImagePipeline", arguments={"max_sequence_length": 16}).calls["transformer"]
    lengths = {call.run: call.arguments["encoder_hidden_states"].shape[1] for call in calls}
    assert lengths["base"] < lengths["prompt"] == 16, lengths


# Pipelines of one's own


class Scheduler:
    def __init__(self):
        self.steps = 0

    def step(self, latents):
        self.steps += 1
        return latents


class Own:
    """A pipeline of two networks, of which ``call(self, prompts)`` makes images."""

    def __init__(self, call: Callable, networks):
        self.call, self.scheduler = call, Scheduler()
        self.__dict__ |= networks

    def set_progress_bar_config(self, **_): ...

    def __call__(self, prompt, width, height, num_inference_steps):
        return types.SimpleNamespace(images=self.call(self, prompt, width, height), keys=lambda: ["images"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, flag=True):
        return self.layer(x)


def watch_own(call: Callable) -> Watched:
    return watch(partial(Own, call), {"denoiser": Net(), "encoder": Net()}, Asked(64, 64, 5.0, {}))


def usual(self, prompts, width, height, **other):
    x = self.encoder(torch.ones(len(prompts), 4))
    for _ in range(2):
        x = self.scheduler.step(self.denoiser(x, **other))
    return x


def with_copies(self, prompts, width, height):
    """As of one scheduler for each frame."""
    x, schedulers = torch.ones(len(prompts), 4), [copy.deepcopy(self.scheduler) for _ in range(2)]
    for scheduler in schedulers:
        x = scheduler.step(self.denoiser(x))
    assert [scheduler.steps for scheduler in schedulers] == [1, 1], "and are the copy's own"
    return x


def unequal(prompts) -> bool:
    return len(set(map(len, prompts))) > 1


def failing(fails: Callable[[list, int], bool]) -> Callable:
    def call(self, prompts, width, height):
        if fails(prompts, width):
            raise ValueError("it cannot\nbe")
        return usual(self, prompts, width, height)

    return call


def test_what_pipelines_do_and_cannot_do_is_seen_of_their_runs():
    found = watch_own(usual)
    assert (found.denoisers, found.calls.keys(), found.unequal) == (("denoiser",), {"denoiser", "encoder"}, None)
    assert found.calls["denoiser"][0].arguments["flag"] is True  # a default that another call may state
    copied = watch_own(with_copies)
    assert copied.denoisers == ("denoiser",) and {call.step for call in copied.calls["denoiser"]} == {0, 1}
    limited = watch_own(failing(lambda prompts, width: width > 64))  # as a network that knows no more places
    assert limited.fixed == {} and limited.sizes["larger"] < limited.sizes["base"] == (64, 64)
    (fixed,) = watch_own(failing(lambda prompts, width: width != 64)).fixed.items()
    assert fixed[0] == "larger" and fixed[1].endswith("in the pipeline itself: ValueError: it cannot")
    assert "ValueError: it cannot" in watch_own(failing(lambda prompts, width: unequal(prompts))).unequal
    differs = watch_own(
        lambda self, prompts, *sizes: usual(self, prompts, *sizes, flag=None if unequal(prompts) else 1)
    )
    assert differs.unequal == "denoiser.forward is then called with other arguments"


class Asks(Net):
    """Decides by numbers that it is given, as of a mask, and makes one of another size by them."""

    def forward(self, x):
        x = self.layer(x) if bool((x > 0).all()) else x
        mask = torch.tensor([True, False, True])
        return torch.cat([x, torch.ones(3, 4)[mask], self.layer.weight[:3][mask]])


def test_numbers_that_no_weight_has_a_part_in_are_known_without_weights():
    network, given = Asks(), torch.ones(2, 4)
    network.layer.to("meta")
    output = watching.shapes_of_output(network, "forward", (given,), {})
    assert output.shape == Asks()(given).shape == (6, 4) and output.is_meta


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda self, prompts, *_: self.encoder(torch.ones(len(prompts), 4)), ArtifactError,
            "Own calls no network in its denoising steps, expected a denoiser",
        ),
        (lambda *given: (usual(*given), None)[1], ConfigError, "Own makes images, expected images or frames"),
        (lambda *_: 1 / 0, ArtifactError, "ZeroDivisionError"),
    ],
    ids=["no denoiser", "no images", "a failure"],
)  # fmt: skip
def test_a_pipeline_that_is_no_such_is_refused_and_its_scheduler_is_as_it_was(call, error, message):
    step = Scheduler.step
    with pytest.raises(error, match=message):
        watch_own(call)
    assert Scheduler.step is step


def test_arguments_are_named_copied_and_without_generators():
    def method(x, scale=2.0, generator=None, **more): ...

    x = torch.ones(2)
    found = bound(method, (x,), {"generator": torch.Generator(), "extra": [x]})
    assert found.keys() == {"x", "scale", "extra"} and found["scale"] == 2.0
    x.zero_()
    assert found["x"].sum() == found["extra"][0].sum() == 2
    stand = EngineNetwork(nn.Linear(2, 3), {})
    assert [*inspect.signature(stand.forward).parameters] == ["input"]
    assert next(stand.parameters()).dtype == torch.float32


def test_tensors_without_numbers_get_some_and_the_first_with_samples_says_how_many():
    found = watching.partial_random(torch.empty(3, 4, dtype=torch.bfloat16, device="meta"))
    assert (found.shape, found.dtype, found.is_meta) == ((3, 4), torch.bfloat16, False) and found.std() > 0.1
    whole, text = watching.partial_random([torch.empty(3, dtype=torch.int64, device="meta"), "text"])
    assert (whole.dtype, whole.is_meta, text) == (torch.int64, False, "text")
    assert watching.batch_of({"t": torch.ones(7), "x": {"y": [torch.ones(3, 2)]}, "z": torch.ones(5, 2)}) == 3
    assert watching.batch_of({"t": torch.ones(7)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "per_image"), [("FluxControlNetPipeline", 1), ("StableDiffusion3ControlNetPipeline", 2)]
)
def test_a_controlnet_is_a_part_that_is_called_in_each_step_and_denoises_nothing(observe, case, per_image):
    """Its images are diffusers', as `test_pipeline` finds."""
    checkpoint, known = observe(case), CASES[case]
    observed, parts = checkpoint.observation, checkpoint.parts()
    assert (observed.denoisers, observed.conditioners) == (("transformer",), ("controlnet",))
    assert [each for each, part in parts.items() if part.in_steps] == ["controlnet"]
    residuals = [each for each in parts["transformer"].contract.inputs if "control" in each]
    assert len(residuals) == len(parts["controlnet"].contract.outputs) > 0
    sampling = Sampling(2, 3.0, known.height, known.width, 1, 5)
    assert samples_per_call(checkpoint, "controlnet", sampling) == observed.samples_per_image == per_image
    times = image_of_parts(checkpoint, dict.fromkeys(parts, 1.0), {checkpoint.family.DENOISER: 7})
    assert times.totals == [7 + 7 + len(parts) - 2], "both are called in each step"


def test_a_network_conditions_where_another_takes_its_output_in_one_step():
    log, first, second = Log("base"), torch.ones(2), torch.ones(2)
    for _ in range(2):
        log.events += [("net.forward", None), ("own.forward", None)]
        log.takes("net.forward", ((), {}))
        log.made.append(("net.forward", [first]))
        log.takes("own.forward", ((first.view(1, 2),), {"other": second}))
        log.made.append(("own.forward", [second]))
        log.next_step(None)
    assert log.conditioning == {"net.forward"} and denoisers_of(log) == ["own.forward"]
    decodes_first = [("vae.decode", None), ("step", None), ("a.forward", None), ("step", None)]
    assert denoisers_of(Log("", decodes_first)) == ["a.forward"]
    assert watching.memory_of(torch.empty(0)) == set()
