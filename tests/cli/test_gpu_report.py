"""``sd-quant gpu-report --rehearse`` runs as it stands, on the processor, and its file names nobody."""

import getpass
import platform
import subprocess
import sys

import pytest

from sd_quant.places import HOME
from sd_quant.report.gpu_report import read_report

pytestmark = pytest.mark.nightly


def test_a_rehearsal_writes_a_whole_report(tmp_path):
    words = ["--rehearse", "--checkpoints", "mini", "--formats", "int8", "nvfp4", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "sd_quant", "gpu-report", *words], cwd=HOME, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = (tmp_path / "gpu_report.json").read_bytes()
    row, refused = read_report(content, "it").rows
    assert (row.ended, row.engine, row.executed, row.layers) == ("done", "openvino", 150, 150) and row.psnr_db > 30
    assert {each.what for each in row.parity} >= {"unet_xl with torch", "unet_xl with ONNX Runtime", "vae with torch"}
    assert all(each.relative_error <= each.tolerance for each in row.parity)
    assert refused.ended == "not run" and "OpenVINO" in refused.reason
    names = {platform.node(), str(HOME), str(tmp_path), *({user} if (user := getpass.getuser()) != "root" else ())}
    assert not [name for name in names if name.encode() in content]
