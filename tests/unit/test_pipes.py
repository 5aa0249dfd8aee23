"""A pipe in place of a file of somebody else: no reader waits for it."""

import os
import signal
from pathlib import Path

import pytest

from sd_quant.engines.onnx_input import onnx_files
from sd_quant.errors import SdQuantError
from sd_quant.files.archive import whole_file
from sd_quant.inference.latents import read_latents
from sd_quant.interchange import gguf
from sd_quant.report.published import read_published
from sd_quant.report.summary import last_text, read_sweep
from sd_quant.stages.choose import decided
from sd_quant.stages.compare import images_of_run

pytestmark = pytest.mark.commit

READERS = {
    "a.npy": lambda path: read_latents(path, {1}, 8, 8),
    "a.pt": lambda path: read_latents(path, {1}, 8, 8),
    "a.onnx": onnx_files,
    "a.nemo": whole_file,
    "published.yaml": lambda path: read_published(path, "published.yaml"),
    "layers.csv": decided,
    "sweep.json": lambda path: read_sweep(path.parent),
    "images/full_precision/0000.png": lambda path: images_of_run(path.parents[2], ["a prompt"]),
}


class Waited(BaseException):
    """No reader catches it."""


@pytest.fixture(autouse=True)
def alarm(monkeypatch):
    def ring(*_):
        raise Waited

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_it_in_a_sentence(tmp_path: Path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(SdQuantError):
        READERS[name](path)


def test_what_only_looks_finds_nothing(tmp_path):
    os.mkfifo(tmp_path / "a")
    assert not gguf.recognizes(tmp_path / "a") and last_text(tmp_path / "a") == ""
