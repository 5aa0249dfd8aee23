"""What the machine lacks, in one sentence, whichever library complains of it: the libraries themselves are asked."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper
from PIL import Image

from sd_quant.engines import load_engine
from sd_quant.errors import (
    CANCELLED,
    LONGEST,
    ArtifactError,
    ResourceError,
    SdQuantError,
    exit_with_its_code,
    of_the_machine,
)
from sd_quant.metrics.memory import StageTimer
from tests.graphs import save_graph

pytestmark = pytest.mark.commit

TOO_MANY = 1 << 50
FULL = Path("/dev/full")  # every write to it finds no space


def test_what_fails_as_ctrl_c_passes_is_cancelled(capsys):
    """As where it comes between two steps of ``with torch.device``, whose end finds nothing to pop then."""

    def interrupted():
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("trying to pop from empty mode stack")

    with pytest.raises(SystemExit) as ended:
        exit_with_its_code(interrupted)
    assert ended.value.code == CANCELLED == 130
    assert "cancelled; nothing half written is left" in capsys.readouterr().err


def by_engine(name: str, folder: Path) -> None:
    """The product of two small inputs is a petabyte."""
    node = helper.make_node("MatMul", ["x", "y"], ["product"])
    path = save_graph(
        folder / "a.onnx", [node], {}, {"x": ["n", 1], "y": [1, "n"]}, {"product": ["n", "n"]}, np.float32
    )
    # with two threads, because with one OpenVINO 2026.4 gives a tensor of no elements and says nothing
    load_engine(name, path, threads=2)(x=torch.zeros(1 << 24, 1), y=torch.zeros(1, 1 << 24))


@pytest.mark.parametrize("ask", [
    lambda folder: torch.empty(TOO_MANY), lambda folder: np.empty(TOO_MANY, np.float32),
    lambda folder: bytearray(TOO_MANY), partial(by_engine, "onnxruntime"), partial(by_engine, "openvino"),
])  # fmt: skip
def test_too_little_memory(ask, tmp_path):
    with pytest.raises(Exception) as complaint, StageTimer()("pictures"):
        ask(tmp_path)
    refused = of_the_machine(complaint.value)
    assert isinstance(refused, ResourceError) and refused.exit_code == 4
    words = str(refused)
    assert words.startswith("out of memory in the stage pictures, with up to ") and " GB of memory (" in words
    assert words.endswith("or take a larger machine") and len(words) <= LONGEST and words.isprintable()
    with pytest.raises(
        ArtifactError
    ) as complaint:  # an engine says that a file cannot be compiled, whatever the reason
        try:
            ask(tmp_path)
        except Exception as error:
            raise ArtifactError("the file cannot be compiled") from error
    assert str(of_the_machine(complaint.value)).startswith("out of memory (")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("write", [
    lambda file: file.write(b"text"), lambda file: Image.new("RGB", (64, 64)).save(file, format="png"),
    lambda file: np.save(file, np.zeros(100_000)), lambda file: torch.save(torch.zeros(100_000), file),
])  # fmt: skip
def test_a_full_disk(write):
    with FULL.open("wb", buffering=0) as file, pytest.raises(Exception) as complaint:
        write(file)
    assert str(of_the_machine(complaint.value)).startswith("the disk is full")


def test_anything_else_is_not_the_machines_and_a_resource_error_keeps_its_words():
    quoting = ArtifactError("'No space left on device, out of memory' is no prompt")  # a refusal quotes what it refuses
    for error in (ValueError("no"), SdQuantError("no"), FileNotFoundError(2, "No such file"), KeyError(), quoting):
        assert of_the_machine(error) is None
    error = ResourceError("this machine has no GPU")
    assert of_the_machine(error) is error


def test_a_sentence_that_quotes_too_much_keeps_its_beginning_and_its_advice():
    words = str(SdQuantError("the file names xxx" + "x\x1b[2J\n\u202e" * 10_000 + "; fetch it again"))
    assert len(words) == LONGEST and words.isprintable()
    assert words.startswith("the file names xxx") and words.endswith("; fetch it again")


def test_no_thread_for_want_of_addresses_is_too_little_memory():
    """What OpenVINO says under ``ulimit -v``, below the sentence of its engine."""
    refused = ArtifactError("OpenVINO cannot compile a.onnx: Resource temporarily unavailable")
    refused.__cause__ = RuntimeError("Exception from src/plugins/plugin.cpp:54: Resource temporarily unavailable")
    assert str(of_the_machine(refused)).startswith("out of memory (Exception from")
    for said in ("Failed to serialize proto", "'onnx.ModelProto': Arena alloc failed", "dev/plugin.cpp:54: can't alloc",
                 "a.so: failed to map segment from shared object"):  # fmt: skip
        assert isinstance(of_the_machine(RuntimeError(said)), ResourceError)
