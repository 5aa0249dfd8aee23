"""A process that has imported everything and forks for each command, which then starts in milliseconds.

It reads a JSON list a line, the script and its arguments and the files for stdout and stderr, and answers with the exit
code and the most memory in KiB. It never runs anything itself, so it has no threads that a fork would lose.
"""

import json
import os
import runpy
import sys
import traceback


def main() -> None:
    import sd_quant.stages.export_trt
    import sd_quant.stages.infer
    import sd_quant.stages.quantize  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        *command, stdout, stderr = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(run(command, stdout, stderr))
        _, status, used = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_maxrss, flush=True)


def run(command: list[str], stdout: str, stderr: str) -> int:
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    sys.argv, code = command, 0
    try:
        runpy.run_path(command[0], run_name="__main__")
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
