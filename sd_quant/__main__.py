"""The program ``sd-quant``, which is also ``python -m sd_quant``: call the command that its first argument names."""

import os
import pkgutil
import sys

from sd_quant import __version__
from sd_quant.commands import COMMANDS
from sd_quant.errors import ConfigError, exit_with_its_code, fail
from sd_quant.knobs import near
from sd_quant.places import CONF

USAGE = """Post-training quantization of diffusion models, from a checkpoint to engines, with honest numbers.

usage: sd-quant COMMAND ...

{commands}

sd-quant COMMAND --help says what a command takes; sd-quant --version prints {version}."""


def main() -> None:
    """Call the command that the first argument names with the other arguments. Exits with 2 for an unknown command."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        commands = "\n".join(f"  {name:12} {meaning}" for name, (_, meaning) in COMMANDS.items())
        print(USAGE.format(commands=commands, version=__version__))
    elif name == "--version":
        print(__version__)
    elif name == "-sc" and "COMP_LINE" in os.environ:
        complete(os.environ["COMP_LINE"])
    elif name in COMMANDS:
        sys.argv = [f"sd-quant {name}", *sys.argv[2:]]
        exit_with_its_code(pkgutil.resolve_name(f"sd_quant.{COMMANDS[name][0]}"))
    else:
        sys.exit(fail(f"there is no command {name}; {near(name, COMMANDS)}", ConfigError.exit_code))


def complete(line: str) -> None:
    """Print the words that complete ``line`` in a shell, by Hydra's completion, which expects programs of one word."""
    _, *words = line.split(" ", 2)
    if len(words) < 2:
        print(*COMMANDS)
    elif (CONF / f"{(name := words[0])}.yaml").is_file():
        os.environ["COMP_LINE"] = " ".join(words)
        sys.argv = [name, *sys.argv[1:]]
        pkgutil.resolve_name(f"sd_quant.{COMMANDS[name][0]}")()


if __name__ == "__main__":
    main()
