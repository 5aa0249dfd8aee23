"""examples/notebook.ipynb runs as it is, and the outputs that are committed with it are of these cells."""

import nbformat
import pytest
from nbclient import NotebookClient

from sd_quant.places import HOME

pytestmark = [pytest.mark.nightly, pytest.mark.needs(memory_gb=3)]

NOTEBOOK = HOME / "examples/notebook.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, 4)


def printed(cells: list) -> list[str]:
    """The first words of every line of text that the cells have printed: the names, without figures."""
    outputs = [output for cell in cells for output in cell.get("outputs", []) if output.get("name") == "stdout"]
    return [line.partition("  ")[0] for output in outputs for line in output["text"].splitlines() if "level" in line]


def test_it_runs_and_its_outputs_are_of_today(notebook, tmp_path):
    expected = printed(notebook.cells)
    assert len(expected) == 4
    resources = {"metadata": {"path": str(tmp_path)}}
    executed = NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources).execute()
    assert printed(executed.cells) == expected
    pictures = [out for cell in executed.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    assert len(pictures) == 2
    assert len(list(tmp_path.glob("outputs/notebook/int8/onnx/*/*.onnx"))) == 4


def test_it_is_small_and_names_no_machine(notebook):
    text = NOTEBOOK.read_text()
    assert len(text) < 400_000 and str(HOME) not in text
    assert not [out for cell in notebook.cells for out in cell.get("outputs", []) if out.get("name") == "stderr"]
