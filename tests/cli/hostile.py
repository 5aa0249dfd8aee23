"""``python -m tests.cli.hostile``: what each hostile checkpoint of the tests takes, beside the size of its file.

The memory is what a command had above one that is refused before any file is opened: both are forks of a process that
has imported everything.
"""

import sys
import tempfile
import time
from pathlib import Path

from sd_quant.checkpoints.nemo import open_nemo

from .forking import REPOSITORY, forked
from .test_hostile_input import CASES


def main() -> int:
    whole, wrong = open_nemo(REPOSITORY / "checkpoints/sdxl_mini.nemo"), 0
    print(f"| {'checkpoint':<45} | {'file, MB':>8} | exit code | seconds | memory, MB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, forked(Path(name)) as run:
        folder = Path(name)
        _, own = run("quantize.py", f"model.path={folder}/nowhere", f"hydra.run.dir={folder}/run")
        for number, (what, case) in enumerate(CASES.items()):
            path = folder / f"{number}.nemo"
            case.make(path, folder / "canary", whole)
            start = time.monotonic()
            ended, memory = run(
                "quantize.py", f"model.path={path}", "calib_size=1", "quantize.n_steps=1", "cache.dir=null",
                "export_trt=none", f"hydra.run.dir={folder}/run{number}",
            )  # fmt: skip
            seconds = time.monotonic() - start
            print(
                f"| {what:<45} | {path.stat().st_size / 1e6:8.2f} | {ended.returncode:9d} | {seconds:7.1f} |"
                f" {max(0, memory - own) / 1e6:10.0f} |", flush=True,
            )  # fmt: skip
            wrong += ended.returncode != case.code
            path.unlink()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
