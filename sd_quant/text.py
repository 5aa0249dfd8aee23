"""Text that others wrote, made fit to be shown: in a terminal, a log, a table, or inside a sentence of ours.

Error messages of libraries, names in a checkpoint and prompts may hold line breaks, control sequences of a terminal,
halves of surrogate pairs, and characters that turn the direction of writing. None of them is printable for Python. The
road not taken is a list of the dangerous ones: Unicode grows.
"""


def printable(text: object) -> str:
    """``str(text)`` with a space in place of every character that is not printable, so without line breaks too."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def escaped(text: object) -> str:
    """``str(text)`` with every character that is not printable as Python writes it in a literal, such as ``\\n``."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(text))


def one_line(text: object, limit: int = 400) -> str:
    """``printable(text)`` with single spaces between words, cut to ``limit`` characters; what was cut ends in "..."."""
    line = " ".join(printable(text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
