"""The JSON schema of a run's record, for whatever reads ``metrics.json`` and is not this package.

``python -m sd_quant.report.schema`` writes ``metrics.schema.json`` beside this file. It follows from ``Record``: the
types from its annotations, the descriptions from the docstrings and from the comments behind its fields, so that there
is one description of a record and not three. The schema's ``version`` is the record's ``schema_version``; names may be
added within one version, and none is removed or changes its meaning.
"""

import ast
import inspect
import io
import json
import tokenize
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from sd_quant.files import write_text
from sd_quant.metrics import fidelity_scores
from sd_quant.report import record
from sd_quant.report.record import SCHEMA_VERSION, AboveZero, Explained, Record, fidelity_shape

FILE = Path(__file__).with_name("metrics.schema.json")
PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number"}


def record_schema() -> dict[str, Any]:
    """The schema as JSON has it, draft 2020-12. What a record has beyond it is allowed."""
    shape = schema_of(Record)
    fidelity = schema_of(fidelity_shape())
    for score in fidelity_scores():  # of which the table of scores tells
        fidelity["properties"][score.key]["description"] = score.title
        if score.reason_key in fidelity["properties"]:
            fidelity["properties"][score.reason_key]["description"] = "why some steps have none"
    for name in ("fidelity", "fidelity_unquantized_engine"):
        shape["properties"][name] |= {key: fidelity[key] for key in ("type", "properties")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "metrics.json of sd-quant",
        "version": SCHEMA_VERSION,
        **shape,
    }


def schema_of(shape: Any) -> dict[str, Any]:
    """The schema of an annotation."""
    if shape is Any:
        return {}
    if is_typeddict(shape):
        said = comments().get(shape.__name__, {})
        hints = get_type_hints(shape, include_extras=True)
        described = {name: {"description": said[name]} if name in said else {} for name in hints}
        text = None if shape is Explained else shape.__doc__  # which says less than the fields that are explained
        return {
            "type": "object",
            **({"description": " ".join(text.split())} if text else {}),
            "properties": {name: schema_of(hint) | described[name] for name, hint in hints.items()},
        }
    if (kind := get_origin(shape)) in (Union, UnionType):
        options = [schema_of(option) for option in get_args(shape) if option is not NoneType]
        nullable = NoneType in get_args(shape)
        return {"anyOf": [*options, *([{"type": "null"}] if nullable else [])]}
    if kind is dict:
        return {"type": "object", "additionalProperties": schema_of(get_args(shape)[1])}
    if kind is list:
        return {"type": "array", "items": schema_of(get_args(shape)[0])}
    if hasattr(shape, "__metadata__"):
        above = {"exclusiveMinimum": 0} if AboveZero in shape.__metadata__ else {}
        return schema_of(shape.__origin__) | above
    return {"type": PLAIN[shape]}


@cache
def comments() -> dict[str, dict[str, str]]:
    """By class of ``record`` and by field, the comment that stands behind the field."""
    source = inspect.getsource(record)
    behind = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        node.name: {
            field.target.id: behind[field.lineno].replace("``", "")
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.lineno in behind
        }
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def main() -> None:
    write_text(FILE, json.dumps(record_schema(), indent=2) + "\n")
    print(FILE)


if __name__ == "__main__":
    main()
