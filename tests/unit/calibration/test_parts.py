"""Statistics of text encoders and of the decoder, on the shipped checkpoint, two prompts and two steps."""

from dataclasses import replace

import pytest
import torch
from lightning.fabric import Fabric

from sd_quant.calibration.collection import Pass, calibrate, collect_segment
from sd_quant.calibration.hooks import FIRST_OF_ALL, ROWS_PER_CALL
from sd_quant.calibration.parts import calibrate_parts, collect_parts
from sd_quant.inference.loading import pipeline_of
from sd_quant.inference.pipeline import Sampling
from sd_quant.models.checkpoint import roles_of_part

from .some_statistics import assert_same

pytestmark = pytest.mark.nightly

PROMPTS = ["a glossy icon of a rocket", "a cat"]
SAMPLING = Sampling(2, 5.0, 64, 64, batch_size=1, seed=3, negative_prompts=["rain"])
FABRIC = Fabric(accelerator="cpu", devices=1)


@pytest.fixture(scope="module")
def names(model) -> dict[str, list[str]]:
    roles = {part: roles_of_part(model.checkpoint, part) for part in ("clip1", "clip2", "vae")}
    return {part: [name for name, role in of_part.items() if role != "excluded"] for part, of_part in roles.items()}


def passes(model, names, sampling=SAMPLING) -> dict[str, Pass]:
    return {part: Pass(model, own, PROMPTS, sampling) for part, own in names.items()}


@pytest.fixture(scope="module")
def whole(model, names):
    return collect_parts(FABRIC, passes(model, names))


def test_every_layer_is_reached_in_one_step(names, whole):
    """A text encoder reads three texts: two prompts, and the negative prompt that they share."""
    for part, statistics in whole.items():
        rows = (2 if part == "vae" else 3) * ROWS_PER_CALL
        assert statistics.layers.keys() == set(names[part]) and statistics.steps == 1
        assert all(len(layer.rows.values) == rows for layer in statistics.layers.values())
        first = {FIRST_OF_ALL in layer.rows.priority for layer in statistics.layers.values()}
        assert first == {part != "vae"}, "the first token of the text is an outlier"
    assert all(layer.amax.shape == (2, 1) for layer in whole["vae"].layers.values() if layer.kind == "conv")
    assert whole["clip1"].peaks.keys() == {"clip1"}


def test_ranges_are_those_of_the_encoders_own_texts(model, whole):
    name, seen = "encoder.layers.0.mlp.fc2", []
    layer = model.modules["text_encoder"].get_submodule(name)
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].abs().flatten(0, -2).amax(0)))
    for prompt in PROMPTS:
        pipeline_of(model.checkpoint, model.torch_engines()).call.pipe.encode_prompt([prompt], negative_prompt=["rain"])
    hook.remove()
    assert torch.equal(whole["clip1"].layers[name].amax[0], torch.stack(seen).amax(0))


def test_encoders_are_called_without_the_denoiser_and_the_decoder_on_latents_of_its_pass(model, names, whole, calls):
    latents = {}
    collect_segment(FABRIC, Pass(model, [], PROMPTS, SAMPLING), range(2), on_latent=latents.__setitem__)
    calls.update(dict.fromkeys(calls, 0))
    found = collect_parts(FABRIC, passes(model, names), latents)
    assert calls == {"unet_xl": 0, "vae": 2, "clip1": 4, "clip2": 4}
    for part in names:
        assert_same(found[part], whole[part])


def test_batches_make_no_difference(model, names, whole):
    """To rounding: sums of other batches are added up in another order."""
    encoders = {part: names[part] for part in ("clip1", "clip2")}
    found = collect_parts(FABRIC, passes(model, encoders, replace(SAMPLING, batch_size=2)))
    for part in encoders:
        for name, layer in found[part].layers.items():
            torch.testing.assert_close(layer.amax, whole[part].layers[name].amax, rtol=1e-4, atol=1e-4)


def test_they_are_cached_beside_the_denoisers(model, names, whole, calls, tmp_path):
    """Whose own entry is the same with and without parts, and serves both."""
    given = {"checkpoint_sha256": "a" * 64, "cache": tmp_path}
    calibrate(Pass(model, ["conv_in"], PROMPTS, SAMPLING), FABRIC, **given)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    for _ in range(2):
        calls.update(dict.fromkeys(calls, 0))
        found = calibrate_parts(passes(model, names), FABRIC, **given)
    assert not any(calls.values()) and len(before) == 1
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1 + len(names)
    assert all(path.read_bytes() == content for path, content in before.items())
    for part in names:
        assert_same(found[part], whole[part])
    calibrate_parts(passes(model, {"clip1": names["clip1"], "vae": names["vae"][1:]}), FABRIC, **given)
    assert calls["clip1"] > 0 and calls["unet_xl"] > 0, "other layers of the decoder, whose latents are not known"
