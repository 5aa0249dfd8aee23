"""``python docs/make_python_page.py``: the page docs/python.md, from the docstrings of ``sd_quant.interface``.

The road not taken is a generator of documentation: it wants a theme and a server for one page that GitHub shows.
"""

import inspect
import re
from pathlib import Path
from textwrap import dedent

import sd_quant
from sd_quant import interface

PAGE = Path(__file__).with_name("python.md")
ORDER = ("open", "Model", "Quantized", "compare", "Comparison", "Result", "Statistics")  # as one meets them
ONE_LINE = 100  # characters of a signature


def page() -> str:
    head = "# The Python interface\n\n<!-- python docs/make_python_page.py writes this page -->\n"
    return "\n".join([head, text_of(interface), *(section(name, getattr(sd_quant, name)) for name in ORDER)])


def section(name: str, thing: type) -> str:
    parts = [
        f"## `sd_quant.{name}`\n",
        *([signature(name, thing)] if inspect.isfunction(thing) else []),
        text_of(thing),
    ]
    for attribute, member in vars(thing).items() if inspect.isclass(thing) and name != "Statistics" else ():
        member = getattr(member, "fget", None) or getattr(member, "func", member)
        if inspect.isfunction(member) and not attribute.startswith("_") and attribute not in ("generate", "job"):
            called = inspect.isfunction(vars(thing)[attribute])
            title = signature(f".{attribute}", member) if called else f"```python\n.{attribute}\n```\n"
            parts += [f"### `.{attribute}`\n", title, text_of(member)]
    return "\n".join(parts)


def signature(name: str, function: object) -> str:
    """``.images(prompts: Sequence[str], **knobs: object) -> np.ndarray`` as a block of code, without ``self``."""
    given = inspect.signature(function)  # type: ignore[arg-type]
    given = given.replace(parameters=[each for each in given.parameters.values() if each.name != "self"])
    text = re.sub(r"'([A-Z]\w+)'", r"\1", f"{name}{given}").replace("'", '"')  # names of types that come later
    text = re.sub(r"\b[a-z_]+\.(?:\w+\.)*([A-Z]\w+|ndarray)", r"\1", text)
    if len(text) > ONE_LINE:
        text = re.sub(r", (?=\*|\w+:)", ",\n    ", text)
    return f"```python\n{text}\n```\n"


def text_of(thing: object) -> str:
    """A docstring as Markdown: indented blocks become Python, ``Args`` and its like lists."""
    made: list[str] = []
    for paragraph in inspect.getdoc(thing).replace("``", "`").split("\n\n"):
        first, _, rest = paragraph.partition("\n")
        if first in ("Args:", "Returns:", "Raises:"):
            items = re.sub(r"^(\w+):", r"- `\1`:", dedent(rest), flags=re.MULTILINE)
            made.append(f"**{first.rstrip(':')}**\n\n{re.sub(r'^    ', '  ', items, flags=re.MULTILINE)}")
        elif not paragraph.startswith("    "):
            made.append(paragraph)
        elif made and made[-1].endswith("```"):  # an empty line within a block
            made[-1] = f"{made[-1].removesuffix('```')}\n{dedent(paragraph)}\n```"
        else:
            made.append(f"```python\n{dedent(paragraph)}\n```")
    return "\n\n".join(made) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
