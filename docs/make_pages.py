"""``python docs/make_pages.py`` writes what is made from the code, as it is held by tests/unit/test_docs.py.

docs/python.md comes from the docstrings of ``sd_quant.interface``; docs/metrics.md and the package's JSON schema come
from the model of the record; docs/targets.md comes from the facts of foreign formats, the presets and the table of
programs. The road not taken is a generator of documentation: it wants a theme and a server for pages that GitHub shows.
"""

import csv
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import sd_quant
from sd_quant import interface
from sd_quant.config.recipe import own_recipe, presets
from sd_quant.config.targets import inputs_held
from sd_quant.interchange import FP16, PER_ROW, TARGETS
from sd_quant.report.record import record_schema

FOLDER = Path(__file__).parent
PROGRAMS = FOLDER.parent / "benchmarks/results/programs.tsv"
MADE = "<!-- python docs/make_pages.py writes this page -->\n"
ORDER = ("open", "Model", "Quantized", "compare", "Comparison", "Result", "Statistics")  # as one meets them
ONE_LINE = 100  # characters of a signature
EXPLAINED = "Explained"  # the shape of a number with its reason


def pages() -> dict[str, str]:
    """The text of each file by its path from this folder."""
    schema = record_schema()
    return {
        "python.md": python_page(),
        "metrics.md": metrics_page(schema),
        "targets.md": targets_page(),
        "../sd_quant/report/metrics.schema.json": json.dumps(schema, indent=2) + "\n",
    }


def python_page() -> str:
    head = f"# The Python interface\n\n{MADE}"
    return "\n".join([head, text_of(interface), *(section(name, getattr(sd_quant, name)) for name in ORDER)])


def metrics_page(schema: dict) -> str:
    """A list in lists, as the record is, with a line for each name that a record can have."""
    head = f"""# The record of a run

{MADE}
`metrics.json` is written last: a run that has it is complete. Its
[JSON schema](../sd_quant/report/metrics.schema.json) is in the package. `schema_version` changes when a name is removed
or changes its meaning; names may be added within a version. A number that does not exist is null with a `reason` beside
it, or `{{"value": null, "reason": "..."}}`.
What of a run or a sweep is to be shipped stands in
[recommendation.json](sweeps.md#the-recommendation-for-other-programs).

Below, a name without a type is an object, `<...>` stands for any name, and *as* refers to an object that is described
once.

"""
    lines, outer = "", [""]  # the objects around a name, each with a dot behind it
    for name, kind, meaning in entries(schema, schema["$defs"], {}):
        if meaning or " as `" in kind:
            while not name.startswith(outer[-1]):
                outer.pop()
            kind = "" if kind == "object" else kind.removeprefix("object ") if " as `" in kind else kind
            own = f"`{name.removeprefix(outer[-1])}`{f' ({kind})' if kind else ''}"
            lines += f"{'  ' * (len(outer) - 1)}- {own}{meaning and f': {meaning}'}\n"
            outer.append(f"{name}.")
    return head + lines


def targets_page() -> str:
    """Which preset goes where, and the facts of each target."""
    head = f"""# Presets and targets

{MADE}
What a tool opens and computes, by the facts with which [`hand_over`](hand_over.md) adapts a recipe. Single layers may
still stay in fp16.

## Which target takes a preset

*As it is*: the tool multiplies what the preset multiplies, inputs rounded as the recipe says or, for `per row`, with a
scale for each row that the tool computes itself. *Weights alone*: it stores the weights and computes in fp16. Graphs
for `openvino` and `onnx` hold what their runtime executes, which `sd-quant doctor` lists.

| preset | as it is | inputs per row | weights alone |
|---|---|---|---|
"""
    stored = {name: target for name, target in TARGETS.items() if target.runtime is None}
    for name in presets():
        preset = own_recipe(name)
        assert preset is not None
        cells: dict[str, list[str]] = {"": [], PER_ROW: [], FP16: []}
        for target in stored.values():
            if (how := inputs_held(target, preset)) is not None:
                alone = how == FP16 and preset.enable.linear.activation is not None
                rows = how == PER_ROW and not preset.per_token
                cells[FP16 if alone else PER_ROW if rows else ""].append(f"`{target.name}`")
        head += f"| `{name}` | {' | '.join(', '.join(each) or '–' for each in cells.values())} |\n"
    head += """
## What a target holds

*Rest* is what is not quantized: bf16 with [`export.dtype`](checkpoints.md#precision).

| target | opened by | weights, their inputs | convolutions | rotated | multiplied inputs | branch | rest | families |
|---|---|---|---|---|---|---|---|---|
"""
    for name, target in TARGETS.items():
        every = "all that the runtime executes" if target.runtime else ""
        ways = dict.fromkeys(target.formats.values())
        held = {way: ", ".join(fmt for fmt, how in target.formats.items() if how == way) for way in ways}
        weights = every or "; ".join(f"{formats}: {way}" for way, formats in held.items())
        listed = [every and "yes" or ", ".join(sorted(each)) or "fp16" for each in (target.convolutions,)]
        listed += [every and "yes" or ", ".join(sorted(each)) or "no" for each in (target.rotated, target.multiplied)]
        families = "all" if target.families is None else ", ".join(sorted(target.families))
        branch = "yes" if target.low_rank else "no"
        rest = "fp16 or bf16" if target.bf16 is True else "fp16, of Flux bf16" if target.bf16 else "fp16"
        head += (
            f"| `{name}` | {target.consumer} | {weights} | {' | '.join(listed)} | {branch} | {rest} | {families} |\n"
        )
    return head + opened_section()


def opened_section() -> str:
    """What programs made of exports, by `make programs-check`."""
    with PROGRAMS.open(encoding="utf-8", newline="") as file:
        kept = list(csv.DictReader(file, delimiter="\t"))
    text = """
## Who has opened it

`make programs-check` has each program open exports of tiny checkpoints, of the first family in every preset that the
target holds; [programs.tsv](../benchmarks/results/programs.tsv) has each file with the call that opened it. *Ok*: the
program took every tensor, found every parameter, holds as many quantized layers as were written, and computes what our
reader predicts. *Layer* and *call*: the largest relative errors, in fp32, of a layer and of a call of the denoiser.
*Image*: the lowest PSNR against the simulation's image.

| target | program | presets, families | layer | call | image | |
|---|---|---|---|---|---|---|
"""
    opened = {(row["target"], row["program"]) for row in kept}
    for target, program in sorted(opened, key=lambda pair: (list(TARGETS).index(pair[0]), pair[1])):
        rows = [row for row in kept if (row["target"], row["program"]) == (target, program)]
        worst = [max((float(row[key]) for row in rows if row[key]), default=None) for key in ("layer", "call")]
        images = [float(row["image"]) for row in rows if row["image"]]
        counted = f"{len({row['preset'] for row in rows})}, {', '.join(dict.fromkeys(row['family'] for row in rows))}"
        figures = ["–" if each is None else f"{each:.0e}" for each in worst]
        figures.append(f"{min(images):.1f} dB" if images else "–")
        versions = rows[0]["versions"]
        label = versions if versions.startswith(f"{program} ") else f"{program}: {versions}"
        cells = [f"`{target}`", label, counted, *figures, said(rows)]
        text += f"| {' | '.join(cells)} |\n"
    return f"{text}\nNo GPU has run any of these. What a result needs of its program stands in its README.\n"


def said(rows: Iterable[Mapping[str, str]]) -> str:
    """The verdicts of a program's files, with the presets and the reason where it is none of the best."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        found.setdefault((row["verdict"], row["far"]), {}).setdefault(row["family"], []).append(f"`{row['preset']}`")
    parts = []
    for (verdict, far), files in found.items():
        listed = "; ".join(f"{', '.join(presets)} of {family}" for family, presets in files.items())
        count = f"{sum(map(len, files.values()))} files"
        which = "" if len(found) == 1 else f" ({count if verdict == 'ok' else listed})"
        parts.append(f"{verdict}{which}{f': {far}' if far else ''}".replace("loaded: loaded;", "loaded;"))
    return "; ".join(parts).replace("|", "\\|")


def entries(schema: dict, shapes: dict, told: dict[str, str], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, type and meaning of everything in a schema; one of ``shapes`` is described where it is ``told`` first."""
    inside = schema.get("properties") or {"<...>": schema.get("additionalProperties")}
    for key, each in inside.items():
        if not isinstance(each, dict):  # any name may hold anything
            continue
        name, options = f"{path}.{key}".lstrip("."), each.get("anyOf", [each])
        named = [shape_of(option) for option in options if shape_of(option) not in (None, EXPLAINED)]
        first = told.setdefault(named[0], name) if named else name
        own = () if first != name else named  # a shape that is described elsewhere is not described again
        meaning = each.get("description") or "".join(shapes[shape].get("description", "") for shape in own)
        kind = " or ".join(map(kind_of, options)) + (f" as `{first}`" if first != name else "")
        yield name, kind, meaning.replace("``", "`")
        if first == name:
            for content in [*(shapes[shape] for shape in named), *(each for each in options if "type" in each)]:
                yield from entries(content, shapes, told, name)


def shape_of(schema: dict) -> str | None:
    """The name of the shape that a schema refers to."""
    return schema.get("$ref", "").rpartition("/")[2] or None


def kind_of(schema: dict) -> str:
    if shape_of(schema):
        return "reason" if shape_of(schema) == EXPLAINED else "object"
    if schema.get("type") == "array":
        return f"list of {kind_of(schema['items'])}"
    if "anyOf" in schema:
        return " or ".join(map(kind_of, schema["anyOf"]))
    return schema.get("type", "any")


def section(name: str, thing: type) -> str:
    parts = [
        f"## `sd_quant.{name}`\n",
        *([signature(name, thing)] if inspect.isfunction(thing) else []),
        text_of(thing),
    ]
    for attribute, member in vars(thing).items() if inspect.isclass(thing) and name != "Statistics" else ():
        member = getattr(member, "fget", None) or getattr(member, "func", member)
        if (
            inspect.isfunction(member)
            and not attribute.startswith("_")
            and attribute not in ("generate", "job", "to_generate")
        ):
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
    for page_name, content in pages().items():
        (FOLDER / page_name).write_text(content, encoding="utf-8")
