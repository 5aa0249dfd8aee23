"""What counts as the code that a result depends on: an edit of any file that is imported, and of no other."""

import shutil
from pathlib import Path

import pytest

from sd_quant.source import PACKAGE, everything, imported, source_digest

pytestmark = pytest.mark.commit

STATISTICS = ("calibration.collection", "checkpoints.kinds")


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("copy") / "sd_quant"
    shutil.copytree(PACKAGE, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.slow
def test_an_edit_counts_where_the_file_is_imported_and_nowhere_else(package):
    files, before = imported(STATISTICS, package), source_digest(*STATISTICS, package=package)
    whole = source_digest(package=package)
    assert whole == source_digest()
    some = sorted(everything(package))[::20]
    assert {path in files for path in some} == {True, False}
    for path in some:
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert source_digest(package=package) != whole, path
        assert (source_digest(*STATISTICS, package=package) != before) == (path in files), path
        path.write_bytes(content)


@pytest.mark.parametrize(
    "modules, counts, does_not",
    [
        (STATISTICS, ["models/sd3.py", "calibration/hooks.py", "names/sgm.py", "files/archive.py"], ["report/page.py"]),
        (("export.parts",), ["quantization/formats/nvfp4.py", "export/nodes.py"], ["metrics/lpips.py", "cli.py"]),
        (("inference.parity",), ["engines/onnxruntime.py", "engines/tensorrt/run.py"], ["stages/quantize.py"]),
    ],
)
def test_modules_that_a_table_names_count_as_imported(modules, counts, does_not):
    files = {path.relative_to(PACKAGE).as_posix() for path in imported(modules, PACKAGE)}
    assert files >= set(counts) and not files & set(does_not)
