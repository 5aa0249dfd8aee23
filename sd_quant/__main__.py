"""``sd-quant quantize quant_level=3``, which is ``python -m sd_quant quantize quant_level=3``."""

import sys
from importlib import import_module

from sd_quant import __version__
from sd_quant.commands import COMMANDS
from sd_quant.errors import ConfigError, exit_with_its_code, fail
from sd_quant.knobs import near

USAGE = """Post-training quantization of diffusion models, from a checkpoint to engines, with honest numbers.

usage: sd-quant COMMAND ...

{commands}

sd-quant COMMAND --help says what a command takes; sd-quant --version prints {version}."""


def main() -> None:
    """Calls the command that the first argument names, with the rest. Exits with 2 for one that there is not."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        print(USAGE.format(commands=listed(), version=__version__))
    elif name == "--version":
        print(__version__)
    elif name in COMMANDS:
        sys.argv = [f"sd-quant {name}", *sys.argv[2:]]
        exit_with_its_code(import_module(COMMANDS[name][0]).main)
    else:
        sys.exit(fail(f"there is no command {name}; {near(name, COMMANDS)}", ConfigError.exit_code))


def listed() -> str:
    return "\n".join(f"  {name:12} {meaning}" for name, (_, meaning) in COMMANDS.items())


if __name__ == "__main__":
    main()
