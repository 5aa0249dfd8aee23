"""Write commands that can be pasted into a shell.

A command printed to the terminal names the program that the user has called. A command stored in a model card or
report names ``sd-quant``: its reader may have no checkout. Alternative not taken: the path of this Python, which is
right on one machine only.
"""

import re
import shlex
import sys
from pathlib import Path

from sd_quant.places import HOME

PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)\Z)(?:[a-z_/]|\.+/)[\w/.+-]*\Z", re.ASCII | re.IGNORECASE)


def program(command: str) -> list[str]:
    """Return the words that start ``command``: the checkout's script if the user runs it, else ``sd-quant``."""
    called = Path(sys.argv[0])
    script = called.parent / f"{command}.py"
    if called.suffix == ".py" and script.resolve().parent == HOME and script.is_file():
        return ["python", str(script)]
    return ["sd-quant", command]


def pasted(command: str, *arguments: str) -> str:
    """Return ``command`` with its arguments as one line, quoted for the shell."""
    return shlex.join([*program(command), *arguments])


def without_interpolation(text: str) -> str:
    """Escape ``${`` in ``text``, so that OmegaConf reads it literally."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def literal(text: object) -> str:
    """Return ``str(text)`` as an option's value on the command line, quoted where Hydra would read something else."""
    if PLAIN.match(value := str(text)):
        return value
    value = without_interpolation(value)
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + found[2].replace('"', r"\""), value) + '"'
