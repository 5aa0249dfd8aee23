"""Make foreign text safe to show in a terminal, a log, a table or a sentence.

Error messages of libraries, names in a checkpoint and prompts may hold line breaks, terminal control sequences, lone
surrogates, and characters that change the writing direction. Python calls none of them printable. Alternative not
taken: a list of the dangerous characters, because Unicode grows.
"""


def printable(text: object) -> str:
    """Return ``str(text)`` with a space for every character that is not printable, line breaks among them."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def escaped(text: object) -> str:
    """Return ``str(text)`` with each character that is not printable as in a Python literal, such as ``\\n``."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(text))


def counted(count: int, thing: str) -> str:
    """Return ``1 prompt`` or ``2 prompts`` for a noun whose plural takes an s."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def fitted(text: str, longest: int = 28) -> str:
    """Return ``text`` on one line, with its middle cut out if it has more than ``longest`` characters."""
    line = printable(text)
    half = longest // 2
    return line if len(line) <= longest else f"{line[: half - 1]}…{line[-half:]}"


def one_line(text: object, limit: int = 400) -> str:
    """Return ``printable(text)`` with single spaces between words, cut to ``limit`` characters, "..." included."""
    line = " ".join(printable(text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
