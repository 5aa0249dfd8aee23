"""YAML as NeMo writes it, and what would take hours or gigabytes, which is refused at once."""

import math

import pytest

from sd_quant.files.plain_yaml import MAX_NODES, load_yaml

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("-.5", -0.5), ("1.", 1.0), ("+3", 3), ("007", 7), (".inf", math.inf), ("-.INF", -math.inf),
        ("1:20", "1:20"), ("1:20.5", "1:20.5"), ("2001-01-01", "2001-01-01"), ("0x10", "0x10"), ("1_000", "1_000"),
        ("yes", True), ("null", None), ("~", None), ("'1'", "1"), ("<<", "<<"), ("=", "="), ("9" * 400, math.inf),
        ("", None), ("[&x [1, 2], *x, {b: *x}]", [[1, 2], [1, 2], {"b": [1, 2]}]),
    ],
)  # fmt: skip
def test_values(text, value):
    assert load_yaml(f"a: {text}".encode()) == {"a": value}


def doubling(levels: int, form: str) -> bytes:
    lines = [f"a0: &a0 {form.format('k')}"]
    return "\n".join([*lines, *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, levels))]).encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (doubling(40, "[{0}]"), f"it stands for more than {MAX_NODES} entries"),
        (b"[" + b"1," * MAX_NODES + b"]", f"it holds more than {MAX_NODES} entries"),
        (b"a: &x {<<: [*x, *x]}", "a part of it contains itself"),
        (b"a: &x [*x]", "a part of it contains itself"),
        (b"a: 1\nb: 2\na: 3", "the key 'a' stands twice in a mapping"),
        (b"a: {1: x, '1': y}", "the key '1' stands twice in a mapping"),
        (b"? [1]\n: 2", "a key is a list or a mapping"),
        (b"a: !!int '1:1:1'", "'1:1:1' is no number"),
        (b"a: !!float '1_0'", "'1_0' is no number"),
        (b"a: !!timestamp 2001-01-01", "it holds 'tag:yaml.org,2002:timestamp', expected mappings, lists, texts"),
        (b"!!merge a: {b: 1}", "it holds 'tag:yaml.org,2002:merge', expected mappings, lists, texts and numbers"),
        (b"!!python/name:os.system a", "it holds 'tag:yaml.org,2002:python/name:os.system', expected"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError) as caught:
        load_yaml(text)
    assert str(caught.value).startswith(message)


def test_nothing_is_none_and_what_is_too_deep_an_exception_of_python():
    assert load_yaml(b"") is None
    with pytest.raises(RecursionError):
        load_yaml(b"[" * 700)
