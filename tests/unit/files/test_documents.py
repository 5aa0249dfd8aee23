"""Documents of strangers: YAML as NeMo writes it, entries of configs, and the steps of tokenizers."""

import base64
import copy
import math
from pathlib import Path

import pytest
import torch

from sd_quant.checkpoints.nemo_networks import sdxl_base_config
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.files import checks
from sd_quant.files.checks import bounded_modules
from sd_quant.files.plain_yaml import MAX_NODES, load_yaml
from sd_quant.files.schema import check_like, check_schema
from sd_quant.files.tokenizer_steps import check_steps, repetitions_in
from sd_quant.knobs import fields_of
from sd_quant.models.sdxl_nemo import NemoConfig, NemoUnet, NemoVae, unet_config, vae_config

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
def test_values_of_yaml(text, value):
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
def test_yaml_without_end_or_of_other_kinds_is_refused(text, message):
    with pytest.raises(ValueError) as caught:
        load_yaml(text)
    assert str(caught.value).startswith(message)


def test_yaml_of_nothing_is_none_and_what_is_too_deep_an_exception_of_python():
    assert load_yaml(b"") is None
    with pytest.raises(RecursionError):
        load_yaml(b"[" * 700)


BASE = sdxl_base_config()
UNET, VAE = ("unet_config",), ("first_stage_config", "ddconfig")
ENTRIES = [
    *((*UNET, name) for name in fields_of(NemoUnet)), *((*VAE, name) for name in fields_of(NemoVae)), ("scale_factor",),
]  # fmt: skip


def changed(place: tuple[str, ...], value: object) -> dict:
    config = copy.deepcopy(BASE)
    section = config
    for name in place[:-1]:
        section = section[name]
    section[place[-1]] = value
    return config


class Recorded(dict):
    """A mapping that knows what was read of it."""

    def __init__(self, content: dict, path: tuple[str, ...] = (), read: set | None = None):
        super().__init__({name: Recorded(value, (*path, name), read) if type(value) is dict else value
                          for name, value in content.items()})  # fmt: skip
        self.path, self.read = path, read

    def __getitem__(self, name):
        value = super().__getitem__(name)
        if not isinstance(value, dict):
            self.read.add((*self.path, name))
        return value


def test_the_schema_has_what_the_networks_are_built_from_and_no_more():
    read: set = set()
    config = Recorded(BASE, (), read)
    unet_config(config), vae_config(config)
    assert {place for place in read if place[0] != "conditioner_config"} == set(ENTRIES)


ANY = [None, "x", "", math.nan, math.inf, -1, 10**12, 10**400, {}, [10**12], ["x"], [True], [[1]], [1.5]]
WRONG = {
    ("scale_factor",): [True, 0, "0.13", 1e-9, 1e9], (*UNET, "use_linear_in_transformer"): [0, 1, "no", "true"],
    UNET: [None, [], "x", 3], VAE[:1]: [None, [], "x", 3], VAE: [None, [], "x", 3],
}  # fmt: skip


@pytest.mark.parametrize("place", [*ENTRIES, UNET, VAE[:1], VAE], ids=".".join)
def test_wrong_values_are_refused_by_name(place):
    for value in [*(ANY if place in ENTRIES else []), *WRONG.get(place, [])]:
        with pytest.raises(ConfigError, match=f"^{'.'.join(place)} is "):
            check_schema(NemoConfig, changed(place, value))


def test_missing_entries_are_named():
    config = changed(UNET, {name: BASE["unet_config"][name] for name in fields_of(NemoUnet) if name != "context_dim"})
    with pytest.raises(ConfigError, match="^unet_config.context_dim is missing$"):
        check_schema(NemoConfig, config)


def test_a_config_is_like_what_its_class_takes_by_default():
    usual = {"eps": 1e-6, "deep": 2, "bias": False, "act": "silu", "size": None, "clip": -math.inf, "types": ("a", "b")}
    sound = {"eps": 0, "deep": [1, [2, 4]], "bias": True, "act": "gelu", "size": 64, "clip": -math.inf, "types": ["x"]}
    for config in ({}, sound, dict.fromkeys(usual), {"stranger": math.nan}, {"size": "auto"}, {"types": "a"}):
        check_like(usual, config)
    wrong = {"eps": ["x", True, math.nan, 1e10], "deep": [[1, [math.inf]], "2"], "bias": [1, "no", 0.0],
             "act": [3, False], "size": [math.nan, 10**12], "types": [[10**10]]}  # fmt: skip
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ConfigError, match=rf"^{name} is .*, expected "):
                check_like(usual, {name: value})


def test_modules_are_counted_only_while_it_lasts(monkeypatch):
    monkeypatch.setattr(checks, "MAX_MODULES", 10)
    with pytest.raises(ValueError, match="more than 10 modules"), bounded_modules():
        torch.nn.Sequential(*(torch.nn.Identity() for _ in range(11)))
    torch.nn.Sequential(*(torch.nn.Identity() for _ in range(11)))
    with bounded_modules():
        torch.nn.Sequential(*(torch.nn.Identity() for _ in range(10)))


LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CLIP = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+"


@pytest.mark.parametrize("regex", [LLAMA, GPT_2, CLIP, O200K, " {2,}", r"\s+", "", r"(\w+)[*+]\(", "(?:[a-z])+"])
def test_regexes_of_published_tokenizers_are_quick(regex):
    assert repetitions_in(regex) <= 2


@pytest.mark.parametrize(
    "regex",
    ["(a+)+$", "(a|a)*$", "(?:x(?:a*)b)*", "(a{1,3})+", "a{1,3}+$", "a**", "((a+))+", "(a)\\1", "(?<=a)b", "a{99999}",
     "a*a*a*b", "a" * 2001, "((((a*)*", "(?:(?:a|b)c?)+", "(aa?)+$", "(a*a*a*b)", "(?!a*)a*a*", "(a+{2,9})b",
     "a{,}a{0,99}a{9,99}b", "a?" * 9, "(?:aa?|a)" * 9],
)  # fmt: skip
def test_regexes_that_may_take_for_ever_are_not(regex):
    assert repetitions_in(regex) > 2


def replace(content: str, **pattern: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


CHARSMAP = base64.b64encode((8).to_bytes(4, "little") + bytes(8) + b"a" * 300 + b"\0").decode()


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([replace("aa", String="a")] * 32, "steps that may make a text 4e+09 times longer"),
        ([replace("a", Regex="b*")] * 9, "steps that may make a text 5e+02 times longer"),
        ([{"type": "ByteLevel"}] * 9, "steps that may make a text 5e+02 times longer"),
        ([{"type": "Precompiled", "precompiled_charsmap": CHARSMAP}], "steps that may make a text 3e+02 times longer"),
        ([{"type": "Prepend", "prepend": "a" * 65}], "a step that inserts more than 64 characters"),
        ([replace("b", Regex="(a+)+$")], "the regex '(a+)+$', expected at most two repetitions in a row, none"),
        ([replace("bbbb", Regex="a*a*b")], "steps that may make a text 5e+00 times longer, expected at most 3 times"),
        ([{"type": "Python"}], "the step 'Python', expected one of BPEDecoder"),
        ([{"type": "NFC"}] * 64, "65 steps, expected at most 64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_steps_without_a_bound_are_refused(steps, said):
    for section in ("normalizer", "decoder"):
        with pytest.raises(ArtifactError) as caught:
            check_steps(Path("tokenizer.json"), {section: {"type": "Sequence", "steps": steps}})
        assert f"tokenizer.json: its {section} has {said}" in str(caught.value)


def test_a_published_normalizer_passes():
    check_steps(Path("t"), {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"}, replace("▁", String=" "),
        replace(" ", Regex=" {2,}"),
    ]}, "decoder": None})  # fmt: skip
