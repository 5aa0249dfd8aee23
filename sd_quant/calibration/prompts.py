"""Prompts are hostile text: one per line, UTF-8, bounded, never part of a file's name."""

from pathlib import Path

from sd_quant.errors import ArtifactError, ConfigError

MOST_BYTES = 16 * 2**20
LONGEST = 2000  # characters; CLIP reads 77 tokens


def read_prompts(path: Path) -> list[str]:
    """The non-empty lines of a text file, a byte order mark accepted.

    Raises ConfigError when there is no such file or no prompt in it, when a line is too long or is not UTF-8 (named by
    line and byte), ArtifactError when the file is too large to read.
    """
    if not path.is_file():
        raise ConfigError(f"there is no prompt file {path}; name a text file with one prompt a line")
    if path.stat().st_size > MOST_BYTES:
        raise ArtifactError(f"prompt file {path} has {path.stat().st_size} bytes, more than the {MOST_BYTES} allowed")
    prompts = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            prompt = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"prompt file {path} is not UTF-8 at line {number}, byte {error.start + 1}; save it as UTF-8"
            ) from error
        if len(prompt) > LONGEST:
            raise ConfigError(
                f"prompt file {path} has {len(prompt)} characters in line {number}, at most {LONGEST} work"
            )
        if prompt:
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"prompt file {path} holds no prompt; write one a line")
    return prompts
