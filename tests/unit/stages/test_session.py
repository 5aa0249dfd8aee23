"""What a job takes of memory, GPU and disk, what a session checks, what knobs say of images, a pipeline's tables."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from PIL import Image

from sd_quant.errors import ConfigError, ResourceError
from sd_quant.models.parts import exported
from sd_quant.observed.checkpoint import Observation, ObservedCheckpoint
from sd_quant.observed.part import Verified
from sd_quant.places import HOME
from sd_quant.stages import inspect, resources
from sd_quant.stages import session as stage
from sd_quant.stages.generate import keep_prompts, sampling_of
from sd_quant.stages.resources import (
    Needs,
    check_machine,
    fits,
    images_need,
    memory_of_part,
    memory_of_variant,
    memory_of_variants,
    run_needs,
    workload_of,
)
from tests.presets import infer_job, job
from tests.refusals import refused

from ..observed.conftest import observe, tiny_folder  # noqa: F401  fixtures

pytestmark = pytest.mark.commit

SDXL = {"unet_xl": 2_567_463_684, "vae": 49_490_199, "clip1": 123_060_480, "clip2": 694_659_840}
STORED = {part: (4 if part == "vae" else 2) * count for part, count in SDXL.items()}


@pytest.mark.parametrize(("sides", "warned"), [
    ({}, []), ({"width": 128, "height": 128}, ["model.width and model.height ask for 128 x 128"]),
    ({"sizes": ["64x128", "128x192", "192x64"]}, ["model.sizes ask for 128 x 192", "model.sizes ask for 192 x 64"]),
])  # fmt: skip
def test_images_far_from_the_checkpoints_own_size_are_warned_of(caplog, sides, warned):
    path = str(HOME / "checkpoints/sdxl_mini.nemo")
    usual = {"family": "sdxl", "width": 64, "height": 64, "sizes": None, "path": path}
    sections = {"model": SimpleNamespace(**usual | sides), "infer": SimpleNamespace(**usual)}
    stage.checks.warn_of_size(sections["model"], sections)
    assert [message.partition(", and")[0] for message in caplog.messages] == warned
    assert all("and this checkpoint was made for 64 x 64" in message for message in caplog.messages)


@pytest.fixture
def session(monkeypatch) -> stage.Session:
    monkeypatch.setattr(stage.Session, "parameters", {"unet_xl": 2_567_463_684, "vae": 49_490_199})
    return stage.Session(checkpoint=None)


@pytest.mark.parametrize(("simulated", "stages"), [(True, {"images", "the simulation"}), (False, {"images"})])
def test_a_gpu_has_to_hold_a_simulation_only_where_one_is_made(session, monkeypatch, simulated, stages):
    checks = Mock()
    monkeypatch.setattr(stage.checks, "check_request", checks.request)
    monkeypatch.setattr(stage.Session, "check", checks.structure)
    monkeypatch.setattr(stage.resources, "check_machine", checks.machine)
    session.check_images(None, images(64, "torch"), simulated)
    request, structure, (name, (needs,), _) = checks.mock_calls
    assert (request, structure, name) == (
        call.request(None, images(64, "torch")),
        call.structure(None, images(64, "torch")),
        "machine",
    )
    assert needs.gpu.keys() == stages


@pytest.mark.parametrize(("room", "together"), [(4e9, False), (1e12, True)])
def test_parts_are_open_together_only_where_a_gpu_holds_them_too(session, answering, room, together):
    answering(resources, available_memory_bytes=1e12, available_cuda_memory_bytes=room)
    assert session.together(workload_of(images(64, "torch"))) is together


def test_a_table_and_loras_of_an_observed_pipeline_are_heeded(monkeypatch):
    monkeypatch.setattr(stage, "open_observed", opened := Mock())
    monkeypatch.setattr(stage, "with_loras", with_loras := Mock())
    knobs = "model=diffusers", f"model.path={HOME}/checkpoints/sd3_mini", "calib_size=4"
    lora = HOME / "examples/sdxl_mini/high_contrast.safetensors"
    assert stage.observed_checkpoint(job(*knobs, f"model.loras=[{lora}:0.5]").model) is with_loras.return_value
    with_loras.assert_called_once_with(opened.return_value, [(lora, 0.5, None)])
    tables = (f"{name}={HOME}/conf/model/prompts/shapes.csv" for name in ("model.calibration_table", "infer.table"))
    with pytest.raises(ConfigError, match="has image, which StableDiffusion3Pipeline does not take"):
        stage.observed_checkpoint(job(*knobs, *tables).model)


def test_arguments_that_change_the_steps_of_a_stated_family_are_refused():
    made = job("model=sd3_mini", "model.arguments={sigmas: [1.0, 0.5]}")
    with pytest.raises(ConfigError, match="^model.arguments are .*it denoises in 2 steps, and by the knobs of steps"):
        stage.open_session(made.model, made.infer)


def test_condition_images_and_negative_prompts_come_in_turn_for_each_sample_of_a_prompt(tmp_path):
    prompts = "infer.prompts=[a cat, a dog]"
    for number, name in enumerate("abc"):
        Image.new("RGB", (90, 90), (number, 0, 0)).save(tmp_path / f"{name}.png")
    infer = infer_job(prompts, f"infer.control=[{tmp_path},{tmp_path}/a.png]", "infer.num_samples=2").infer
    plain = sampling_of(infer_job(prompts, "infer.negative_prompt=[rain, nude]", "infer.num_samples=2").infer)
    assert plain.negative_prompts == ["rain", "rain", "nude", "nude"] and plain.latents is plain.arguments is None
    assert len(infer.prompt_list()) == 6
    rows = [[image.getpixel((0, 0))[0] for image in row["image"]] for row in sampling_of(infer).arguments]
    assert rows == [[0, 0], [0, 0], [1, 0], [1, 0], [2, 0], [2, 0]]


def test_drawn_prompts_are_kept_and_whole_texts_are_not(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na fox\n")
    (tmp_path / "prompts.csv").write_text("Prompts,Category\na cat,Animals\n'5' on a door,Text\n")
    for name, knobs, kept in (
        ("prompts.txt", (), None),
        ("prompts.txt", ("infer.num_prompts=2",), ["Prompt"]),
        ("prompts.csv", ("infer.num_prompts=2",), ["Prompt"]),
    ):
        infer = infer_job(f"infer.prompts={tmp_path / name}", *knobs).infer
        keep_prompts(infer, tmp_path)
        file = tmp_path / "prompts.tsv"
        assert (file.read_text().splitlines()[: len(kept)] == kept) if kept else not file.exists()
        if kept:
            assert infer_job(f"infer.prompts={file}").infer.prompt_list() == infer.prompt_list()


def images(size: int = 1024, engine: str = "openvino", vae_tile: int | None = None) -> SimpleNamespace:
    sides = {"width": size, "height": size, "sizes": None}
    return SimpleNamespace(**sides, batch_size=1, engine=engine, precision="auto", vae_tile=vae_tile)


def run(size: int = 1024, calibration: str | None = None, plans: bool = True, engine: str = "openvino") -> Needs:
    calibrated = {"calibration": calibration, "accelerator": "auto"}
    made = images(size, engine)
    return run_needs(SDXL, STORED, made, made, SimpleNamespace(batch_size=1, **calibrated), plans, 2)


def in_gb(needs: Needs) -> dict[str, float]:
    return {f"{kind} {name}": round(size / 1e9, 1) for kind, own in vars(needs).items() for name, size in own.items()}


def test_what_a_run_of_the_full_model_takes_in_gigabytes():
    usual = {
        "memory images": 19.8, "memory calibrate": 16.6, "memory plans": 11.8, "gpu images": 10.5,
        "gpu the simulation": 13.4, "gpu calibrate": 16.6, "disk plan": 7.0, "disk onnx": 7.0, "disk the cache": 7.0,
        "disk full_precision": 5.1, "disk hand_over": 13.9, "disk ModelOpt's checkpoint": 10.3,
        "disk temporary files": 5.1,
    }  # fmt: skip
    smaller = {"memory images": 18.2, "memory calibrate": 15.1, "gpu images": 6.7, "gpu the simulation": 11.8}
    assert in_gb(run()) == usual == in_gb(run(engine="tensorrt_rtx"))  # torch makes the baseline's images
    assert in_gb(run(512)) == usual | smaller | {"gpu calibrate": 15.1}
    less = {name: size for name, size in usual.items() if "calibrate" not in name and "plan" not in name}
    assert in_gb(run(calibration="given", plans=False)) == less
    by_torch = images_need(SDXL, images(engine="torch"))
    assert in_gb(by_torch) == {"memory images": 13.4, "gpu images": 10.5}
    assert images_need(SDXL, images(engine="tensorrt_rtx")).gpu == {}, "nobody knows the format of a plan"


@pytest.fixture
def free(monkeypatch):
    """``free(memory=24, gpu=8)``: so many gigabytes of each are free."""

    def free(memory: float = 100, gpu: float | None = None) -> None:
        monkeypatch.setattr(resources, "available_memory_bytes", lambda: int(memory * 1e9))
        monkeypatch.setattr(resources, "available_cuda_memory_bytes", lambda: gpu and int(gpu * 1e9))

    return free


def test_the_full_model_works_on_24_gb_one_part_at_a_time(tmp_path, free, monkeypatch):
    """On a GPU of 22.5 GB too, as one of 24 has with a screen."""
    monkeypatch.setattr(resources, "check_room", check_room := Mock())  # of any disk, also one that is fuller than that
    free(24)
    check_machine(run(), tmp_path)
    assert [round(each.args[1] / 1e9, 1) for each in check_room.mock_calls] == [55.4]
    for memory, gpu, engine, together in (
        (24, None, "openvino", False), (80, None, "openvino", True), (100, 22.5, "torch_native", False),
        (100, 75, "torch_native", True),
    ):  # fmt: skip
        free(memory, gpu)
        sizes, on_gpu = memory_of_variants(SDXL, workload_of(images(engine=engine)))
        assert fits(sizes, "all", on_gpu) == together
        check_machine(Needs(gpu=run().gpu))
    free(gpu=1)
    assert fits({}, "a side", memory_of_variant(SDXL, workload_of(images()))[1])  # an engine for the processor
    assert not fits({}, "a side", memory_of_variant(SDXL, workload_of(images(engine="tensorrt")))[1])


def test_a_machine_that_is_too_small_is_told_what_would_help(tmp_path, free):
    room = shutil.disk_usage(tmp_path).free
    for memory, gpu, needs, told in (
        (8, None, run(), "the 8.0 GB that are free here .*calibrate 16.6 GB, plans 11.8 GB.* infer.batch_size"),
        (
            99,
            11.5,
            Needs(gpu=run().gpu),
            r"11.5 GB that are free on the GPU \(.*calibrate 16.6 GB\).* infer.batch_size",
        ),
        (99, None, Needs(disk=run().disk | {"onnx": 1e18}), "needs up to .*ModelOpt's checkpoint 10.3 GB"),
        (99, None, Needs(disk={"onnx": 0.6 * room, "plan": 0.6 * room}), "onnx"),
    ):
        free(memory, gpu)
        with refused(f".*{told}", ResourceError):
            check_machine(needs, tmp_path)


def test_decoding_takes_most_of_a_small_model_and_tiles_bound_it():
    small = memory_of_part({"unet_xl": 1000, "vae": 1000}, workload_of(images()))[0]
    assert 9e9 < small - resources.PROCESS < 10e9
    whole, tiled = (resources.working_bytes(SDXL, workload_of(images(vae_tile=tile))) for tile in (None, 512))
    assert tiled["vae"] - resources.PROCESS == (whole["vae"] - resources.PROCESS) / 4
    assert tiled["unet_xl"] == whole["unet_xl"]


@pytest.fixture
def inspected(observe, tmp_path, monkeypatch, capsys):  # noqa: F811
    """``inspected(change)``: what is printed of a pipeline whose observation is ``change``d, and its checkpoint."""

    def run(change=lambda observation: observation, **changes) -> tuple[str, ObservedCheckpoint]:
        checkpoint = observe("PixArtSigmaPipeline", **changes)
        checkpoint = replace(checkpoint, observation=change(checkpoint.observation))
        monkeypatch.setattr(inspect, "observed_checkpoint", lambda model: checkpoint)
        model = SimpleNamespace(width=64, height=48, recommended={"calib_size": 8, "steps": 5})
        inspect.inspect(SimpleNamespace(model=model), tmp_path)
        return capsys.readouterr().out, checkpoint

    return run


def test_every_network_input_and_role_has_a_row(inspected, tmp_path):
    """Layers that the user excluded are told from those that were observed."""
    printed, checkpoint = inspected(excluded=("transformer_blocks.0.ff.net.0.proj",))
    assert Observation.from_json(json.loads((tmp_path / "observed.json").read_text())) == checkpoint.observation
    for name, kind in (("transformer", "PixArtTransformer2DModel"), ("vae", "AutoencoderKL")):
        (row,) = [line for line in printed.splitlines() if line.startswith(name) and kind in line]
        assert "refused" in row and " M " in row
        assert f"{name} is not exported: not tried" in printed
    for name, shape in checkpoint.parts()["transformer"].contract.inputs.items():
        assert name in printed and " x ".join(map(str, shape)) in printed
    rows = inspect.layers_table(stage.Session(checkpoint)).rows
    counts = {role: int(count) for role, count, _ in rows}
    assert all(name in printed for _, _, name in rows)
    assert sum(counts.values()) == len(checkpoint.family.layer_roles(None)) and counts["excluded: model.excluded"] == 1
    assert len([name for name in counts if name.startswith("excluded: ")]) > 1, "the others have reasons"
    assert "calls of the denoiser a step: 1, samples in each for an image: 2" in printed
    assert printed.rstrip().endswith(f"observed: {tmp_path / 'observed.json'}")


def test_what_was_verified_what_is_fixed_and_what_cannot_be_one_batch_is_said(inspected):
    def changed(observation: Observation) -> Observation:
        part = observation.parts["transformer"]
        found = {"openvino": Verified(calls=5, error=1.2e-6)}
        rung = replace(part.rung, name="plain", cause=None, verified=found, refused={"onnxruntime": "no Where"})
        parts = {**observation.parts, "transformer": replace(part, rung=rung)}
        return replace(observation, parts=parts, unequal="masks differ", fixed={"larger": "it fails in vae.decode"})

    printed, checkpoint = inspected(changed)
    assert exported(checkpoint.parts()) == ["transformer"] and "transformer is not exported" not in printed
    for words in (
        "openvino (5 calls within 1e-06)", "transformer in onnxruntime: no Where",
        "prompts of unequal length cannot be in one batch: masks differ", "larger is fixed: it fails in vae.decode",
    ):  # fmt: skip
        assert words in printed
