"""``python -m sd_quant.report DIR``: rebuild tables, plots and page of a sweep or run from its records alone."""

import argparse
from pathlib import Path

from sd_quant.errors import ConfigError, exit_with_its_code
from sd_quant.report.rebuild import rebuild
from sd_quant.report.shipped import last_words


def main() -> None:
    parser = argparse.ArgumentParser(prog="sd-quant report", description="Make the report of a sweep again.")
    parser.add_argument("directory", type=Path, help="the folder of a sweep or of a run")
    directory = parser.parse_args().directory
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not there, expected the folder of a sweep or of a run")
    rebuild(directory)
    print(last_words(directory))


if __name__ == "__main__":
    exit_with_its_code(main)
