"""What a job takes of memory, GPU and disk, and what a machine that is too small is told."""

import shutil
from types import SimpleNamespace

import pytest

from sd_quant.errors import ResourceError
from sd_quant.inference import memory as memory_model
from sd_quant.inference.memory import fits, memory_of_part, memory_of_variant, memory_of_variants
from sd_quant.stages import resources
from sd_quant.stages.resources import Needs, check_machine, images_need, run_needs, workload_of
from tests.refusals import refused

pytestmark = pytest.mark.commit

SDXL = {"unet_xl": 2_567_463_684, "vae": 49_490_199, "clip1": 123_060_480, "clip2": 694_659_840}
STORED = {part: (4 if part == "vae" else 2) * count for part, count in SDXL.items()}


def images(size: int = 1024, engine: str = "openvino", vae_tile: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(width=size, height=size, sizes=None, batch_size=1, engine=engine, precision="auto",
                           vae_tile=vae_tile)  # fmt: skip


def run(
    size: int = 1024, calibration: str | None = None, plans: bool = True, engine: str = "openvino", hessians: int = 0
) -> Needs:
    quantize = SimpleNamespace(
        batch_size=1, calibration=calibration, accelerator="auto", calib_size=64, snapshots=[32, 64, 96]
    )
    made = images(size, engine)
    return run_needs(SDXL, STORED, made, made, quantize, plans, 2, hessians)


@pytest.fixture
def free(monkeypatch):
    """``free(memory=24, gpu=8)``: so many gigabytes of each are free."""

    def free(memory: float = 100, gpu: float | None = None) -> None:
        for module in (memory_model, resources):
            monkeypatch.setattr(module, "available_memory_bytes", lambda: int(memory * 1e9))
            monkeypatch.setattr(module, "available_cuda_memory_bytes", lambda: gpu and int(gpu * 1e9))

    return free


def test_the_full_model_works_on_24_gb_one_part_at_a_time(tmp_path, free, monkeypatch):
    asked: list[float] = []
    monkeypatch.setattr(resources, "check_room", lambda path, needed, what="": asked.append(needed))
    free(24)
    check_machine(run(), tmp_path)
    assert len(asked) == 1 and 50e9 < asked[0] < 60e9  # of any disk, also one that is fuller than that
    assert not fits(memory_of_variants(SDXL, workload_of(images()))[0], "all")
    free(80)
    assert fits(memory_of_variants(SDXL, workload_of(images()))[0], "all")


def test_a_machine_that_is_too_small_is_told_what_would_help(tmp_path, free):
    free(8)
    with refused(
        r".*the 8.0 GB that are free here .*calibrate 1\d.\d GB, plans 1\d.\d GB.* infer.batch_size", ResourceError
    ):
        check_machine(run(), tmp_path)
    assert set(run(calibration="given", plans=False).memory) == {"images"}
    large, small = (run(size).memory for size in (1024, 512))
    assert all(small[stage] <= large[stage] for stage in large) and small["calibrate"] < large["calibrate"]


def test_hessians_count_on_the_device_in_memory_and_for_each_snapshot_on_the_disk():
    plain, summed = (run(hessians=hessians) for hessians in (0, 10**9))
    assert summed.memory["calibrate"] - plain.memory["calibrate"] == 3e9
    assert summed.gpu["calibrate"] - plain.gpu["calibrate"] == 1e9
    assert sum(summed.disk.values()) - sum(plain.disk.values()) == 2e9  # of prompts 1 to 32, and 33 to 64


def test_a_gpu_of_24_gb_is_enough_one_part_at_a_time(free):
    """Calibration takes most, 4 bytes of each of 3.39 B weights and the activations of guidance's two samples."""
    needed, infer = run(engine="torch_native").gpu, images(engine="torch_native")
    assert max(needed, key=needed.get) == "calibrate" and 16e9 < needed["calibrate"] < 18e9
    assert "calibrate" not in run(calibration="given", engine="torch_native").gpu
    free(gpu=22.5)  # of a card of 24 GB with a screen
    check_machine(Needs(gpu=needed))
    assert not fits({}, "all", memory_of_variants(SDXL, workload_of(infer))[1])
    free(gpu=1)
    assert fits({}, "a side", memory_of_variant(SDXL, workload_of(images()))[1])  # an engine for the processor
    assert not fits({}, "a side", memory_of_variant(SDXL, workload_of(images(engine="tensorrt")))[1])
    free(gpu=11.5)
    with refused(r".*the 11.5 GB that are free on the GPU \(.*calibrate 16.6 GB\).* infer.batch_size", ResourceError):
        check_machine(Needs(gpu=needed))
    free(gpu=75)
    assert fits({}, "all", memory_of_variants(SDXL, workload_of(infer))[1])


def test_decoding_takes_most_of_a_small_model_and_tiles_bound_it():
    small = memory_of_part({"unet_xl": 1000, "vae": 1000}, workload_of(images()))[0]
    assert 9e9 < small - memory_model.PROCESS < 10e9
    whole, tiled = (memory_model.working_bytes(SDXL, workload_of(images(vae_tile=tile))) for tile in (None, 512))
    assert tiled["vae"] - memory_model.PROCESS == (whole["vae"] - memory_model.PROCESS) / 4
    assert tiled["unet_xl"] == whole["unet_xl"]


def test_a_disk_that_is_too_small(tmp_path, free):
    free(24)
    files, room = run().disk, shutil.disk_usage(tmp_path).free
    assert 25e9 < sum(files.values()) - files["hand_over"] < 48e9 and files["plan"] > 0
    assert files["hand_over"] == 2 * files["onnx"] and "plan" not in run(plans=False).disk
    for needed, named in (
        (files | {"onnx": 1e18}, ".*needs up to .*ModelOpt's checkpoint 10.3 GB"),
        ({"onnx": 0.6 * room, "plan": 0.6 * room}, ".*onnx"),
    ):
        with refused(named, ResourceError):
            check_machine(Needs(disk=needed), tmp_path)


def test_a_gpu_is_asked_for_what_torch_takes_and_not_for_a_plan_whose_format_nobody_knows():
    assert set(images_need(SDXL, images(engine="torch")).gpu) == {"images"}
    assert images_need(SDXL, images(engine="tensorrt_rtx")).gpu == {}
    assert run(engine="tensorrt_rtx").gpu["images"] == run(engine="torch").gpu["images"]  # torch makes the baseline's
