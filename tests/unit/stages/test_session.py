"""Every check is made when a session opens, those that take long last; and what knobs say of images."""

from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from PIL import Image

from sd_quant.errors import ConfigError
from sd_quant.inference import memory
from sd_quant.places import HOME
from sd_quant.stages import session as stage
from sd_quant.stages.generate import keep_prompts, sampling_of
from sd_quant.stages.resources import workload_of
from tests.presets import infer_job, job

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    ("sides", "warned"),
    [
        ({}, []),
        ({"width": 128, "height": 128}, ["model.width and model.height ask for 128 x 128"]),
        ({"sizes": ["64x128", "128x192", "192x64"]}, ["model.sizes ask for 128 x 192", "model.sizes ask for 192 x 64"]),
    ],
)
def test_images_far_from_the_checkpoints_own_size_are_warned_of(caplog, sides, warned):
    path = str(HOME / "checkpoints/sdxl_mini.nemo")
    usual = {"family": "sdxl", "width": 64, "height": 64, "sizes": None, "path": path}
    sections = {"model": SimpleNamespace(**usual | sides), "infer": SimpleNamespace(**usual)}
    stage.checks.warn_of_size(sections["model"], sections)
    assert [message.partition(", and")[0] for message in caplog.messages] == warned
    assert all("and this checkpoint was made for 64 x 64" in message for message in caplog.messages)


INFER = SimpleNamespace(width=64, height=64, sizes=None, batch_size=1, engine="torch", precision="auto", vae_tile=None)


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
    session.check_images(None, INFER, simulated)
    request, structure, (name, (needs,), _) = checks.mock_calls
    assert (request, structure, name) == (call.request(None, INFER), call.structure(None, INFER), "machine")
    assert needs.gpu.keys() == stages


@pytest.mark.parametrize(("room", "together"), [(4e9, False), (1e12, True)])
def test_parts_are_open_together_only_where_a_gpu_holds_them_too(session, answering, room, together):
    answering(memory, available_memory_bytes=1e12, available_cuda_memory_bytes=room)
    assert session.together(workload_of(INFER)) is together


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


PROMPTS = "infer.prompts=[a cat, a dog]"


def test_negative_prompts_are_those_of_the_images():
    sampling = sampling_of(infer_job(PROMPTS, "infer.negative_prompt=[rain, nude]", "infer.num_samples=2").infer)
    assert sampling.negative_prompts == ["rain", "rain", "nude", "nude"] and sampling.latents is None


def test_condition_images_come_in_turn_for_each_sample_of_a_prompt(tmp_path):
    for number, name in enumerate("abc"):
        Image.new("RGB", (90, 90), (number, 0, 0)).save(tmp_path / f"{name}.png")
    knobs = PROMPTS, f"infer.control=[{tmp_path},{tmp_path}/a.png]", "infer.num_samples=2"
    infer = infer_job(*knobs).infer
    assert len(infer.prompt_list()) == 6 and sampling_of(infer_job(PROMPTS).infer).arguments is None
    rows = [[image.getpixel((0, 0))[0] for image in row["image"]] for row in sampling_of(infer).arguments]
    assert rows == [[0, 0], [0, 0], [1, 0], [1, 0], [2, 0], [2, 0]]


def test_drawn_prompts_are_kept_and_whole_texts_are_not(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na fox\n")
    (tmp_path / "prompts.csv").write_text("Prompts,Category\na cat,Animals\n'5' on a door,Text\n")
    for name, knobs, kept in (
        ("prompts.txt", (), None),
        ("prompts.txt", ("infer.num_prompts=2",), ["Prompt"]),
        ("prompts.csv", (), ["Prompt\tCategory", "a cat\tAnimals", "'5' on a door\tText"]),
    ):
        infer = infer_job(f"infer.prompts={tmp_path / name}", *knobs).infer
        keep_prompts(infer, tmp_path)
        file = tmp_path / "prompts.tsv"
        assert (file.read_text().splitlines()[: len(kept)] == kept) if kept else not file.exists()
        if kept:
            again = infer_job(f"infer.prompts={file}").infer
            assert (again.prompt_list(), again.categories()) == (infer.prompt_list(), infer.categories())
