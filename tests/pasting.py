"""What a shell makes of a command that is pasted into it."""

import subprocess
from pathlib import Path

PROGRAMS = ("sd-quant", "python", "pip", "make", "trtexec", "tensorrt_rtx")
AWKWARD = 'my run [a=1, b],$HOME ${x} it\'s "so" \\'  # a name that shells and Hydra would take apart


def words_of(command: str, folder: Path) -> list[str]:
    """The program and its arguments as ``sh`` hands them over; ``folder`` gets the programs, which are stubs."""
    folder.mkdir(exist_ok=True)
    for name in PROGRAMS:
        (folder / name).write_text('#!/bin/sh\nprintf \'%s\\0\' "${0##*/}" "$@"\n')
        (folder / name).chmod(0o755)
    options = {"cwd": folder, "env": {"PATH": str(folder)}, "capture_output": True, "text": True}
    said = subprocess.run(["/bin/sh", "-c", command], **options)
    assert (said.returncode, said.stderr) == (0, ""), (command, said.stderr)
    return said.stdout.split("\0")[:-1]
