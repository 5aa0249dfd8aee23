from types import SimpleNamespace

import pytest

from sd_quant.errors import ResourceError
from sd_quant.stages import needs

SDXL = {"unet_xl": 2_567_463_684, "vae": 49_490_199, "clip1": 123_060_480, "clip2": 694_659_840}


def job(size: int = 1024, calibration: str | None = None, library: str = "tensorrt_rtx", engine: str = "openvino"):
    picture = SimpleNamespace(width=size, height=size, batch_size=1, engine=engine, precision="auto")
    quantize = SimpleNamespace(batch_size=1, calibration=calibration, accelerator="auto")
    return SimpleNamespace(model=picture, infer=picture, quantize=quantize, trt=SimpleNamespace(library=library))


@pytest.fixture
def memory(monkeypatch):
    return lambda gigabytes: monkeypatch.setattr(needs, "available_memory_bytes", lambda: int(gigabytes * 1e9))


def test_the_full_model_works_on_24_gb_one_part_at_a_time(tmp_path, memory):
    memory(24)
    needs.check_machine(needs.memory_needed(SDXL, job()), {}, tmp_path)
    assert not needs.fits(needs.memory_of_sides(SDXL, job().infer), "all")
    memory(80)
    assert needs.fits(needs.memory_of_sides(SDXL, job().infer), "all")


def test_a_machine_that_is_too_small_is_told_what_would_help(tmp_path, memory):
    memory(8)
    with pytest.raises(ResourceError, match=r"the 8.0 GB that are free here .*calibrate 1\d.\d GB, plans 1\d.\d GB"):
        needs.check_machine(needs.memory_needed(SDXL, job()), {}, tmp_path)
    small = needs.memory_needed(SDXL, job(calibration="given", library="none"))
    assert set(small) == {"pictures"}


def test_a_gpu_of_24_gb_is_enough_one_part_at_a_time(tmp_path, memory, monkeypatch):
    """Calibration takes most, 4 bytes of each of 3.39 B weights and the activations of guidance's two samples."""
    memory(100)
    needed = needs.gpu_memory_needed(SDXL, job(engine="torch_native"))
    assert max(needed, key=needed.get) == "calibrate" and 16e9 < needed["calibrate"] < 18e9
    free = SimpleNamespace(bytes=int(22.5e9))  # of a card of 24 GB with a screen
    monkeypatch.setattr(needs, "available_cuda_memory_bytes", lambda: free.bytes)
    needs.check_machine({}, {}, tmp_path, needed)
    infer = job(engine="torch_native").infer
    assert not needs.fits({}, "all", needs.gpu_memory_of_sides(SDXL, infer))
    free.bytes = int(11.5e9)
    with pytest.raises(ResourceError, match=r"the 11.5 GB that are free on the GPU \(.*calibrate 16.6 GB\)"):
        needs.check_machine({}, {}, tmp_path, needed)
    given = needs.gpu_memory_needed(SDXL, job(calibration="given", engine="torch_native"))
    assert "calibrate" not in given
    free.bytes = int(75e9)
    assert needs.fits({}, "all", needs.gpu_memory_of_sides(SDXL, infer))


def test_engines_for_the_processor_take_nothing_of_a_gpu(memory, monkeypatch):
    memory(100)
    monkeypatch.setattr(needs, "available_cuda_memory_bytes", lambda: int(1e9))
    assert needs.fits({}, "a side", needs.gpu_memory_of_side(SDXL, job().infer))
    assert not needs.fits({}, "a side", needs.gpu_memory_of_side(SDXL, job(engine="tensorrt").infer))


def test_smaller_pictures_need_less(memory):
    large, small = (needs.memory_needed(SDXL, job(size)) for size in (1024, 512))
    assert all(small[stage] <= large[stage] for stage in large) and small["calibrate"] < large["calibrate"]


def test_a_disk_that_is_too_small(tmp_path, memory):
    memory(24)
    stored = {part: (4 if part == "vae" else 2) * count for part, count in SDXL.items()}
    files = needs.disk_needed(stored, job())
    assert 25e9 < sum(files.values()) < 40e9 and files["plan"] > 0
    assert needs.disk_needed(stored, job(library="none"))["plan"] == 0
    with pytest.raises(ResourceError, match=r"needs up to .*ModelOpt's checkpoint 10.3 GB"):
        needs.check_machine({}, files | {"onnx": 1e18}, tmp_path)
