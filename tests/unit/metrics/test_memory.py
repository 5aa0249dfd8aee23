import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from sd_quant.metrics import memory
from sd_quant.metrics.memory import StageTimer, peak_cuda_memory_bytes, peak_memory_bytes
from sd_quant.places import HOME
from sd_quant.process import reset_peak

pytestmark = pytest.mark.commit

PEAK = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")  # keeps the child small
from sd_quant.metrics.memory import peak_memory_bytes
print(peak_memory_bytes())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_peak_covers_what_was_allocated_and_freed_and_a_small_child_reports_its_own():
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    block = np.ones(400 * 2**20, np.uint8)
    child = int(subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout)
    assert child < block.nbytes / 2
    del block
    assert before + 390 * 2**20 < peak_memory_bytes() < 2**40


STAGES = """
import json
import numpy as np
from sd_quant.metrics.memory import StageTimer
timer = StageTimer()
with timer("plans"):
    np.ones(300 * 2**20, np.uint8)
with timer("images"):
    np.ones(150 * 2**20, np.uint8)
with timer("small"):
    pass
print(json.dumps([*(timer.stages[name]["peak_memory_bytes"] for name in ("plans", "images", "small")), timer.peak]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not reset_peak(), reason="nothing sets a peak back here")
def test_a_stage_has_its_own_peak():
    """In a process of its own, of whose memory nothing else takes or gives back any."""
    ran = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True, check=True, cwd=HOME)
    plans, images, small, peak = json.loads(ran.stdout)
    assert small + 100 * 2**20 < images < plans - 100 * 2**20
    assert peak == plans, "a job's peak is that of its largest stage"


def test_a_stage_that_is_entered_again_adds_to_its_entry(monkeypatch):
    clock = iter([0, 10, 12, 20, 23, 30])  # a job begins, its stage begins and ends twice, and it is asked
    monkeypatch.setattr(memory, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(memory, "reset_peak", lambda: False)
    timer = StageTimer()
    for _ in range(2):
        with timer("images"):
            pass
    assert list(timer.stages) == ["images"] and timer.stages["images"]["seconds"] == 5 and timer.seconds == 30
    assert timer.peak["value"] > 2**20 and "since its start" in timer.peak["reason"]  # where nothing sets it back


@pytest.mark.skipif(sys.platform != "linux", reason="a process's children are Linux's to say")
def test_the_processes_that_a_stage_starts_count(monkeypatch):
    timer, seen = StageTimer(), []

    class Seen(memory.FamilyPeak):
        def __init__(self):
            super().__init__()
            seen.append(self)

    monkeypatch.setattr(memory, "FamilyPeak", Seen)
    with timer("alone"):
        pass
    code = "import time; block = bytearray(400 * 2**20); print('ready', flush=True); time.sleep(60)"
    with timer("calibrate"), subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        deadline = time.monotonic() + 30
        enough = timer.stages["alone"]["peak_memory_bytes"] + 380 * 2**20
        while seen[-1].peak_bytes < enough and time.monotonic() < deadline:
            time.sleep(0.01)
        child.kill()
    alone, calibrate = (timer.stages[name]["peak_memory_bytes"] for name in ("alone", "calibrate"))
    assert calibrate > alone + 350 * 2**20


def test_stages_are_timed_and_logged_also_when_they_fail(caplog):
    timer = StageTimer()
    with caplog.at_level(logging.INFO, "sd_quant"):
        with timer("calibrate"):
            pass
        with pytest.raises(RuntimeError), timer("export"):
            raise RuntimeError
    assert list(timer.stages) == ["calibrate", "export"]
    assert all(stage["seconds"] >= 0 and stage["peak_memory_bytes"] > 2**20 for stage in timer.stages.values())
    assert [message.split()[0] for message in caplog.messages] == ["calibrate", "calibrate:", "export", "export:"]


def test_a_gpu_has_a_peak_for_each_job_and_what_torch_keeps_is_there_for_the_next(monkeypatch):
    """In a sweep the jobs share a process."""
    assert (peak_cuda_memory_bytes() is None) == (not torch.cuda.is_available())
    held = {"peak": 50}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(peak=0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["peak"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4, 24))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 18)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1)
    assert memory.available_cuda_memory_bytes() == 21
    StageTimer()
    assert peak_cuda_memory_bytes() == 0
