"""A process that has imported everything and forks for each command, which then starts in milliseconds.

It reads a JSON list a line, the script and its arguments and the files for stdout and stderr, and answers with the exit
code and the most memory in KiB. It never runs anything itself, so it has no threads that a fork would lose.
"""

import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sd_quant
from sd_quant.places import HOME

SECONDS = 3600  # that a command may take, on a machine however busy
LATE = (  # what the project imports when it is needed
    *("diffusers", "lightning.fabric", "modelopt.torch.opt", "modelopt.torch.quantization", "onnxscript.optimizer"),
    *("onnxscript.rewriter", "torch._dynamo", "torch.onnx._internal.exporter._core"),
)
STARTING_THREADS = {f"sd_quant.engines.{name}" for name in ("onnxruntime", "openvino")}  # as they are imported
Run = Callable[..., subprocess.CompletedProcess]  # a script and its arguments to how it ended


@contextmanager
def forked(folder: Path) -> Iterator[Run]:
    """Starts such a process in ``folder``, which holds what its commands print, and what they write by default."""
    outputs = [str(folder / name) for name in ("stdout", "stderr")]
    path = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
    with (
        (folder / "warnings").open("w") as warnings,
        subprocess.Popen(
            [sys.executable, "-m", "tests.cli.forking"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=warnings, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        ) as server,
    ):  # fmt: skip
        assert server.stdout.readline() == "ready\n", (folder / "warnings").read_text()

        def run(*command: str | Path) -> subprocess.CompletedProcess:
            server.stdin.write(json.dumps([*map(str, command), *outputs]) + "\n")
            server.stdin.flush()
            code, kibibytes = map(int, server.stdout.readline().split())
            ended = subprocess.CompletedProcess(command, code, *(Path(path).read_text() for path in outputs))
            ended.memory = kibibytes * 1024
            return ended

        yield run
        server.stdin.close()


def main() -> None:
    gc.disable()
    ours = {found.name for found in pkgutil.walk_packages(sd_quant.__path__, "sd_quant.")}
    for name in (*sorted(ours - STARTING_THREADS), *LATE):
        if not name.endswith("__main__"):
            with suppress(ImportError):  # of what is not installed here
                importlib.import_module(name)
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from sd_quant.export.tracing import OPSET

    # The exporter makes its table of operators anew for every graph, always the same one, in more than a second.
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
    ONNXRegistry.from_torchlib(opset_version=OPSET)
    gc.freeze()  # a collection need not look at what is imported, nor a child copy it
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1
    print("ready", flush=True)
    for line in sys.stdin:
        *command, stdout, stderr = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(run(command, stdout, stderr))
        _, status, used = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_maxrss, flush=True)
    gc.unfreeze()  # else extensions complain of what nobody collected


def run(command: list[str], stdout: str, stderr: str) -> int:
    """The exit code of a script of the repository, or of ``-m`` and a module, and its arguments."""
    signal.alarm(SECONDS)
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    module = command[0] == "-m"
    sys.argv, code = command[module:], 0
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__")
        else:
            runpy.run_path(str(HOME / sys.argv[0]), run_name="__main__")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
