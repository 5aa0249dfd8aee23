"""The statistics pass on the shipped checkpoint, two or three prompts and two steps at a time."""

import json
import logging
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from sd_quant import cache
from sd_quant.cache import locked
from sd_quant.calibration import collection
from sd_quant.calibration.collected_elsewhere import read_statistics
from sd_quant.calibration.collection import Pass, calibrate, collect_segment, fabric_for, origin, segment_of
from sd_quant.calibration.hooks import FIRST_OF_ALL, ROWS_PER_CALL
from sd_quant.calibration.parts import calibrate_parts, collect_parts
from sd_quant.checkpoints.nemo import open_nemo
from sd_quant.errors import ResourceError, SdQuantError
from sd_quant.inference import loading
from sd_quant.inference.pipeline import Sampling
from sd_quant.inference.source_images import SourceImages
from sd_quant.models.checkpoint import contracts_of, empty_modules, roles_of_part
from sd_quant.models.sdxl import FAMILY
from sd_quant.places import HOME
from sd_quant.quantization.statistics import Statistics, merge

from .some_statistics import assert_same

pytestmark = [pytest.mark.commit, pytest.mark.slow]

PROMPTS = ["a glossy icon of a rocket", "a cat", "two flags on a pole"]
SAMPLING = Sampling(steps=2, guidance_scale=5.0, height=64, width=64, batch_size=1, seed=3)
SHA256 = "a" * 64


@pytest.fixture(scope="module")
def model():
    return loading.load_model(open_nemo(HOME / "checkpoints/sdxl_mini.nemo"))


@pytest.fixture
def calls(model):
    """The number of runs of each part since the test began."""
    counted = dict.fromkeys(model.parts, 0)
    hooks = [
        part.register_forward_pre_hook(lambda *_, name=name: counted.update({name: counted[name] + 1}))
        for name, part in model.parts.items()
    ]
    yield counted
    for hook in hooks:
        hook.remove()


@pytest.fixture(scope="module")
def names(model) -> list[str]:
    return [name for name, role in FAMILY.layer_roles(model.modules["unet"]).items() if role != "excluded"]


def collected(model, names, prompts=PROMPTS, sampling=SAMPLING, **options) -> Statistics:
    wanted = Pass(model, names, prompts, sampling)
    return calibrate(wanted, fabric_for("cpu"), checkpoint_sha256=SHA256, **options)


@pytest.fixture(scope="module")
def whole(model, names) -> Statistics:
    return collected(model, names)


def test_segments_end_at_the_snapshots():
    assert [segment_of(start, 5, [4, 2, 2]) for start in (0, 2, 4)] == [range(0, 2), range(2, 4), range(4, 5)]
    assert segment_of(0, 4, [4, 8]) == segment_of(0, 4, [8]) == segment_of(0, 4, []) == range(0, 4)


def test_every_layer_is_reached(model, names, whole):
    """Those that read the text, and no others, have its first token."""
    assert whole.layers.keys() == set(names)
    for name, layer in whole.layers.items():
        width = model.modules["unet"].get_submodule(name).weight[0].numel()
        assert layer.amax.shape == ((3, 2) if layer.kind == "conv" else (2, width)), name
        assert layer.amax.amax(dim=1).all() and layer.rows.values.shape == (3 * 2 * ROWS_PER_CALL, width), name
    assert {name: len(sample.values) for name, sample in whole.calls.items()} == dict.fromkeys(
        ["x", "timesteps", "context", "y"], 3 * 2
    )
    with_it = {name for name, layer in whole.layers.items() if FIRST_OF_ALL in layer.rows.priority}
    assert with_it == {name for name in whole.layers if name.endswith(("attn2.to_k", "attn2.to_v"))} != set()


def test_ranges_are_those_of_what_each_layer_reads(model, names, whole):
    ranges: dict[str, list[torch.Tensor]] = {}

    def hook(name: str):
        def see(layer: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            (x,) = inputs
            linear = isinstance(layer, nn.Linear)
            ranges.setdefault(name, []).append(x.abs().flatten(0, -2).amax(0) if linear else x.abs().amax())

        return model.modules["unet"].get_submodule(name).register_forward_pre_hook(see)

    hooks = list(map(hook, names))
    loading.pipeline_of(model.checkpoint, model.torch_engines())(PROMPTS, SAMPLING, decode=())  # as images are made
    for each in hooks:
        each.remove()
    for name, layer in whole.layers.items():
        by_call = torch.stack(ranges[name]).unflatten(0, (len(PROMPTS), SAMPLING.steps))
        assert torch.equal(layer.amax, by_call if layer.kind == "conv" else by_call.amax(0)), name


def test_layers_that_are_never_reached_are_told_of(model, monkeypatch, caplog):
    for name in ("spare", "other"):
        monkeypatch.setattr(model.modules["unet"], name, nn.Linear(2, 2), raising=False)
    assert collected(model, ["conv_in", "spare", "other"], PROMPTS[:1]).layers.keys() == {"conv_in"}
    assert "2 layers were never reached during calibration, such as spare" in caplog.text


SIZED = replace(SAMPLING, sizes=[(64, 64), (128, 64)])


def test_prompts_take_the_sizes_in_turn(model, names):
    """The ranges and rows are those of a pass of each size over its own prompts; calls are of the first size alone."""
    fabric, statistics = Fabric(accelerator="cpu", devices=1), []
    for width, share in ((64, slice(0, None, 2)), (128, slice(1, None, 2))):
        sampling = replace(SAMPLING, width=width, batch_size=2)
        statistics.append(collect_segment(fabric, Pass(model, names, PROMPTS, sampling), range(3), share))
    statistics[1].calls.clear()
    assert_same(collected(model, names, sampling=replace(SIZED, batch_size=2)), merge(statistics))
    assert statistics[0].calls["x"].values.shape == (2 * SAMPLING.steps, 2, 4, 8, 8)


# The cache


def test_what_is_to_come_is_said_once_and_what_is_cached_is_read_here_and_elsewhere(
    model, names, whole, calls, caplog, tmp_path
):
    """A second observation runs nothing; another process reads it from the folder in the log, without weights."""
    said = []
    for _ in range(2):
        calls.update(dict.fromkeys(calls, 0))
        with caplog.at_level(logging.INFO):
            found = collected(model, names, cache=tmp_path, snapshots=[2], announce=lambda *told: said.append(told))
        assert_same(found, whole)
    assert said == [("cpu", len(PROMPTS))]
    assert not any(calls.values())
    assert "from the cache: statistics of prompts 1 to 2" in caplog.text
    [path] = {told.partition("; use them elsewhere with calibration=")[2] for told in caplog.messages} - {""}
    assert f"statistics: {path};" in caplog.text and Path(path).parent == tmp_path
    empty = empty_modules(model.checkpoint)["unet"]
    layers = {name: empty.get_submodule(name) for name in names}
    contract, here = contracts_of(model.checkpoint)["unet_xl"], origin(SHA256, names, SAMPLING, "cpu")
    caplog.clear()
    assert_same(read_statistics(Path(path), layers, contract, here, len(PROMPTS)), whole)
    assert not caplog.records


def test_what_cannot_be_kept_is_collected_all_the_same(model, names, whole, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache, "open_lock", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert_same(collected(model, names, cache=tmp_path, snapshots=[1, 2]), whole)
    assert caplog.text.count("which cannot be written (Permission denied)") == 1 and not any(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("made", [True, False])
def test_of_two_that_want_the_same_one_waits(model, names, whole, calls, tmp_path, made):
    """The first of three segments is another's, which makes it while this one waits, or dies without having made it."""
    collected(model, names, PROMPTS[:1], cache=tmp_path)
    [entries] = (folder for folder in tmp_path.iterdir() if folder.is_dir())
    first = entries / "00000-00001.safetensors"
    content = first.read_bytes()
    first.unlink()
    calls.update(unet_xl=0)
    with ThreadPoolExecutor(1) as second:
        with locked(entries / ".00000-00001.lock"):
            waiting = second.submit(collected, model, names, cache=tmp_path, snapshots=[1, 2])
            time.sleep(0.5)
            assert not waiting.done() and not any(entries.glob("*.safetensors"))
            if made:
                first.write_bytes(content)
        found = waiting.result(60)
    assert_same(found, whole)
    assert first.exists() and calls["unet_xl"] == SAMPLING.steps * (len(PROMPTS) - made)


def test_a_pass_that_broke_off_goes_on_at_its_last_sound_snapshot(
    model, names, whole, calls, caplog, tmp_path, monkeypatch
):
    run, noise = loading.Pipeline.run, torch.full((1, 4, SAMPLING.height // 8, SAMPLING.width // 8), torch.nan)

    def spoiled(pipeline, prompts, numbers, sampling, *others):
        return run(pipeline, prompts, numbers, replace(sampling, latents=noise if 2 in numbers else None), *others)

    broken = r"^the input of layer \S*resnets.0.conv1 is not finite at prompt 2, step 0$"
    with monkeypatch.context() as patch, pytest.raises(SdQuantError, match=broken):
        patch.setattr(loading.Pipeline, "run", spoiled)
        collected(model, names, cache=tmp_path, snapshots=[1, 2])
    entry = next(tmp_path.rglob("00001-00002.safetensors"))
    sound = entry.read_bytes()
    entry.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    calls.update(unet_xl=0)
    assert_same(collected(model, names, cache=tmp_path, snapshots=[1, 2]), whole)
    assert calls["unet_xl"] == 2 * SAMPLING.steps and f"{entry} are damaged" in caplog.text
    assert entry.read_bytes() == sound


def test_everything_that_counts_is_in_the_origin(names, monkeypatch):
    """Other things are in ``stages.test_keys``. A pass of one size is found under its old name."""
    expected = {"steps", "guidance_scale", "height", "width", "batch_size", "seed", "negative_prompts", "latents"}
    assert SAMPLING.described().keys() == expected
    given = (SHA256, names, SAMPLING, "cpu")
    optional = {
        "negative_prompts": ["rain"], "latents": torch.zeros(1, 4, 8, 8), "sizes": [(64, 64), (64, 128)],
        "vae_tile": 32, "schedule": "crc",
        "source": SourceImages(np.zeros((1, 64, 64, 3), np.uint8), None, 0.5),
    }  # fmt: skip
    fields = Sampling.__dataclass_fields__.keys() - {"arguments"}  # which are kept with the prompts
    changes = ({field: optional[field] if field in optional else getattr(SAMPLING, field) + 1} for field in fields)
    expected, others = origin(*given), [replace(SAMPLING, **change) for change in changes]
    changed = [(*given[:2], each, "cpu") for each in others]
    assert len({json.dumps(origin(*each)) for each in [given, *changed]}) == 1 + len(changed)
    for how_much_is_kept in ("ROWS", "CALLS"):
        with monkeypatch.context() as patch:
            patch.setattr(collection, how_much_is_kept, 7)
            assert origin(*given) != expected


# Several processes


@pytest.mark.parametrize(("processes", "sampling"), [(5, SAMPLING), (2, SIZED)], ids=["one size", "sizes"])
def test_shares_of_the_prompts_make_the_whole(model, names, tmp_path, processes, sampling):
    """Holds with fewer prompts than processes too, and with snapshots of all sizes."""
    fabric, wanted = Fabric(accelerator="cpu", devices=1), Pass(model, names, PROMPTS, sampling)
    shares = [collect_segment(fabric, wanted, range(3), slice(rank, None, processes)) for rank in range(processes)]
    assert_same(merge(shares), collected(model, names, sampling=sampling, cache=tmp_path, snapshots=[1, 2]))


def test_more_gpus_than_there_are_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ResourceError, match="calibration on 2 GPUs was asked for and this machine has 1; lower"):
        fabric_for("auto", devices=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ResourceError, match="calibration on 1 GPU was asked for and this machine has 0"):
        fabric_for("cuda", devices=1)
    assert fabric_for("auto", devices=1).device.type == "cpu"


def test_lightnings_advice_to_use_srun_and_tf32_is_not_shown(tmp_path, monkeypatch, caplog):
    """``srun`` is on the PATH, without a job of Slurm around this process; TF32 is advised on an H100, as an info."""
    from lightning.fabric.utilities.rank_zero import rank_zero_info

    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    with pytest.warns(UserWarning, match="The `srun` command is available"):  # else nothing is shown below
        Fabric(accelerator="cpu", devices=1)
    with warnings.catch_warnings(record=True) as shown:
        assert fabric_for("cpu", 1).world_size == 1
    with caplog.at_level(logging.DEBUG):
        rank_zero_info("You are using a CUDA device that has Tensor Cores.")
    assert not shown and not caplog.records


# Text encoders and the decoder


@pytest.fixture(scope="module")
def of_parts(model):
    roles = {part: roles_of_part(model.checkpoint, part) for part in ("clip1", "clip2", "vae")}
    return {part: [name for name, role in of_part.items() if role != "excluded"] for part, of_part in roles.items()}


def passes(model, of_parts, **changes) -> dict[str, Pass]:
    sampling = replace(SAMPLING, negative_prompts=["rain"], **changes)
    return {part: Pass(model, own, PROMPTS[:2], sampling) for part, own in of_parts.items()}


@pytest.fixture(scope="module")
def whole_parts(model, of_parts):
    return collect_parts(fabric_for("cpu"), passes(model, of_parts))


@pytest.mark.nightly
def test_every_layer_of_a_part_is_reached_in_one_step_by_its_own_texts(model, of_parts, whole_parts):
    """A text encoder reads three texts: two prompts, and the negative prompt that they share."""
    for part, statistics in whole_parts.items():
        rows = (2 if part == "vae" else 3) * ROWS_PER_CALL
        assert statistics.layers.keys() == set(of_parts[part]) and statistics.steps == 1
        assert all(len(layer.rows.values) == rows for layer in statistics.layers.values())
        first = {FIRST_OF_ALL in layer.rows.priority for layer in statistics.layers.values()}
        assert first == {part != "vae"}, "the first token of the text is an outlier"
    assert all(layer.amax.shape == (2, 1) for layer in whole_parts["vae"].layers.values() if layer.kind == "conv")
    assert whole_parts["clip1"].peaks.keys() == {"clip1"}
    name, seen = "encoder.layers.0.mlp.fc2", []
    layer = model.modules["text_encoder"].get_submodule(name)
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].abs().flatten(0, -2).amax(0)))
    pipe = loading.pipeline_of(model.checkpoint, model.torch_engines()).call.pipe
    for prompt in PROMPTS[:2]:
        pipe.encode_prompt([prompt], negative_prompt=["rain"])
    hook.remove()
    assert torch.equal(whole_parts["clip1"].layers[name].amax[0], torch.stack(seen).amax(0))
    encoders = {part: of_parts[part] for part in ("clip1", "clip2")}
    for part, found in collect_parts(fabric_for("cpu"), passes(model, encoders, batch_size=2)).items():
        for name, layer in found.layers.items():  # to rounding: sums of other batches are added up in another order
            torch.testing.assert_close(layer.amax, whole_parts[part].layers[name].amax, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_parts_are_cached_beside_the_denoiser_whose_latents_they_take(model, of_parts, whole_parts, calls, tmp_path):
    """The denoiser's own entry is the same with and without parts, and serves both."""
    fabric, given, latents = fabric_for("cpu"), {"checkpoint_sha256": SHA256, "cache": tmp_path}, {}
    sampling = passes(model, of_parts)["vae"].sampling
    collect_segment(fabric, Pass(model, [], PROMPTS[:2], sampling), range(2), on_latent=latents.__setitem__)
    calls.update(dict.fromkeys(calls, 0))
    of_latents = collect_parts(fabric, passes(model, of_parts), latents)
    assert calls == {"unet_xl": 0, "vae": 2, "clip1": 4, "clip2": 4}
    calibrate(Pass(model, ["conv_in"], PROMPTS[:2], sampling), fabric, **given)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    for _ in range(2):
        calls.update(dict.fromkeys(calls, 0))
        found = calibrate_parts(passes(model, of_parts), fabric, **given)
    assert not any(calls.values()) and len(before) == 1
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1 + len(of_parts)
    assert all(path.read_bytes() == content for path, content in before.items())
    for part in of_parts:
        assert_same(found[part], whole_parts[part])
        assert_same(of_latents[part], whole_parts[part])
    calibrate_parts(passes(model, {"clip1": of_parts["clip1"], "vae": of_parts["vae"][1:]}), fabric, **given)
    assert calls["clip1"] > 0 and calls["unet_xl"] > 0, "other layers of the decoder, whose latents are not known"
