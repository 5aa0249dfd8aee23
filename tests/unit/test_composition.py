"""What is said where a configuration cannot be composed."""

import shlex
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hypothesis import given
from hypothesis import strategies as st
from omegaconf.errors import OmegaConfBaseException

from sd_quant import composition
from sd_quant.composition import check_assigned, composing, job_of, readable, refusal, settled
from sd_quant.config import QuantizeJob
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.places import CONF

from .config.composition import NEEDED

pytestmark = pytest.mark.commit


def composed(*overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("quantize", list(overrides))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "given", "sentence"), [
    ("infer", "quant_level=3", "there is no knob quant_level in infer; it is a knob of quantize"),
    ("judge", "infer=torch", "infer is a group of knobs in judge, expected infer.<knob>=<value>"),
])  # fmt: skip
def test_what_another_command_takes_is_said_to_be_its_own(command, given, sentence):
    with pytest.raises(ConfigError, match=f"^{sentence}$"), composing(command):
        compose(command, [given])


@pytest.mark.slow
@pytest.mark.parametrize(("override", "sentence"), [
    ("quant_levle=3", "there is no knob quant_levle; did you mean quant_level"),
    ("quantize.n_step=3", "there is no knob quantize.n_step; did you mean quantize.n_steps"),
    ("+quantize.alhpa=0.5", "there is no knob quantize.alhpa; did you mean alpha?"),
    ("steps=3", "there is no knob steps; did you mean infer.steps?"),
    ("to=comfyui", "there is no knob to in quantize; it is a knob of hand_over"),
    ("xyzabc=3", "there is no knob xyzabc; none is like it; --help lists all"),
    ("infer=openvin", "there is no preset infer=openvin; did you mean openvino?"),
    ("model=xyzzy", "there is no preset model=xyzzy; none is like it; --help lists all"),
    ("hydra/launcher=one_hots", "there is no preset hydra/launcher=one_hots; did you mean one_host?"),
    ("export_trt=xyzzy", "there is no preset export_trt=xyzzy; known are auto, none, tensorrt, tensorrt_rtx"),
    ("model=sdxl_nemo", "the knob model.path has no value; give it one on the command line"),
    ("model.päth=3", "there is no knob model.päth, because no name has ä in it"),
    *((override, "") for override in ("alpha=[", "nosuch/group=a", "alpha=${nowhere}", "~nosuch")),
])  # fmt: skip
def test_a_complaint_becomes_one_sentence_with_the_nearest_name(override, sentence):
    with pytest.raises((ConfigError, HydraException, OmegaConfBaseException)) as complaint:
        job_of(QuantizeJob, composed(override))
    found = complaint.value
    refused = str(found if isinstance(found, ConfigError) else refusal(found, "quantize"))
    assert refused.startswith(sentence) and refused.isprintable() and refused
    assert str(refusal(ConfigCompositionException("two\n  lines"), "quantize")) == "two lines"
    binary = refusal(UnicodeDecodeError("utf-8", b"", 0, 1, ""), "quantize")
    assert str(binary).startswith("a file of presets is no YAML: 'utf-8' codec can't decode")


def test_a_launcher_that_is_not_installed_is_told_with_what_helps():
    for plugin, installs in composition.LAUNCHERS.items():
        complaint = f"In 'hydra/launcher/ours': Could not load 'hydra/launcher/{plugin}'.\n\nSearch path:\n\tmore"
        refused = refusal(MissingConfigException(complaint), "quantize")
        assert isinstance(refused, ResourceError)
        assert str(refused) == f"the launcher {plugin} is not installed; install it with: {installs}"


def test_an_argument_that_hydra_would_read_for_minutes_is_refused():
    with pytest.raises(ConfigError, match="^the argument model.sizes=.* expected at most 32768 and 2000 commas; give"):
        check_assigned([f"model.sizes=[{','.join(5_000 * ['64x64'])}]"])


@pytest.mark.parametrize(("text", "said"), [
    ("defaults: [mine]", "^a file of presets has itself among"),
    ("exp_name: 'a ${x b'", r"^\${ begins no reference to a knob there .*; write \\\${ for a text$"),
    ("\n".join(["a0: &a0 [1, 2]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 26))]),
     "than 20000 entries; write it w"),
])  # fmt: skip
def test_a_preset_that_never_ends_or_has_half_an_interpolation_is_refused(tmp_path, text, said):
    (tmp_path / "quantize").mkdir()
    (tmp_path / "quantize/mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said), composing("quantize"):
        compose("quantize", [f"hydra.searchpath=[file://{tmp_path}]", "quantize=mine"])


def test_a_preset_in_two_folders_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(composition, "GROUPS", [])
    (tmp_path / "quantize").mkdir()
    sources = [SimpleNamespace(schema="file", path=str(path)) for path in (CONF, tmp_path)]
    (tmp_path / "quantize/mine.yaml").touch()
    composition.use_groups([*sources, SimpleNamespace(schema="pkg", path="hydra.conf")])
    assert [CONF, tmp_path] == composition.GROUPS
    (tmp_path / "quantize/int8.yaml").touch()
    with pytest.raises(ConfigError, match=f"^quantize/int8.yaml is in {CONF} and in {tmp_path}, expected in one"):
        composition.use_groups(sources)


def value_of(argument: str, multirun: bool = False) -> object:
    override = OverridesParser.create().parse_override(readable(argument, multirun))
    return list(override.sweep_string_iterator()) if multirun else override.value()


@pytest.mark.parametrize(("argument", "value"), [
    ("model.path=~/x", "~/x"), ("run=outputs/a=b", "outputs/a=b"), ("infer.negative_prompt=häßlich", "häßlich"),
    ("prompts=[ein Häuschen, 一只猫,a cat!]", ["ein Häuschen", "一只猫", "a cat!"]),
    ("prompts=[(masterpiece:1.2), it's <lora:x:1> & 50%]", ["(masterpiece:1.2)", "it's <lora:x:1> & 50%"]),
    ('prompts=["a, b", \'c\', d;\n e]', ["a, b", "c", "d;\n e"]), ("prompts=[:), a (:]", [":)", "a (:"]),
    ("model.loras=[v #3 (b).safetensors:0.8,c]", ["v #3 (b).safetensors:0.8", "c"]),
    ("model.arguments={prompt_2: größer!, n: 3}", {"prompt_2": "größer!", "n": 3}),
    ("quantize.exclude={sdxl: [a(b), 2]}", {"sdxl": ["a(b)", 2]}), ("alpha=0.5", 0.5),
])  # fmt: skip
def test_texts_need_no_quotes(argument, value):
    assert value_of(argument) == value


def test_texts_of_a_sweep_and_folders_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ä")
    assert value_of("model.path=~/a,b", multirun=True) == ['"~/a"', "b"]
    assert value_of("hydra.run.dir=~/x") == value_of('hydra.run.dir="~/x"') == "/home/ä/x"


@pytest.mark.parametrize(("argument", "found", "text"), [
    ("prompts=[(best, {x}:1.2), b]", "(", ["(best, {x}:1.2)", "b"]), ("prompts=[a ${x]", "${", ["a ${x"]),
    ("model.loras=[x [SDXL].safetensors:0.8]", "[", ["x [SDXL].safetensors:0.8"]),
    ("infer.negative_prompt=ugly, bad!", ",", "ugly, bad!"), ('prompts=["a" b]', '"', ['"a" b']),
])  # fmt: skip
def test_a_text_with_several_meanings_is_refused_with_the_argument_to_write(argument, found, text):
    with pytest.raises(ConfigError) as refused:
        readable(argument, multirun=False)
    sentence, _, written = str(refused.value).partition(", write ")
    assert sentence.startswith(f"the argument {argument} cannot be read, because {found} stands outside of quotes")
    (argument,) = shlex.split(written)  # as pasted
    composed = settled(compose_infer(argument))
    section, _, knob = {"prompts": "infer.prompts"}.get(name := argument.partition("=")[0], name).partition(".")
    assert composed[section][knob] == text


@pytest.mark.parametrize("multirun", [False, True])
@given(path=st.text(st.sampled_from(" üß()'\",=🚀~a/.-"), min_size=1, max_size=12))
def test_a_path_reaches_the_job_as_typed_or_is_refused_with_one_that_does(multirun, path):
    """But for what Hydra itself means by whole quotes, and by commas in a sweep."""
    try:
        argument = readable(f"model.path={path}", multirun)
    except ConfigError as refused:
        (argument,) = shlex.split(str(refused).partition(", write ")[2])
        assert readable(argument, multirun) == argument
    override = OverridesParser.create().parse_override(argument)
    quoted, several = path.strip()[0:1] in ('"', "'"), "," in path
    kept = quoted and argument.endswith(path.strip())
    assert (override.is_sweep_override() and several) or override.value() == path or kept


def compose_infer(*overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("infer", [readable(each, multirun=False) for each in overrides])


@given(st.text(st.sampled_from("[](){},:'\"\\$=! aé#1\n"), max_size=9), st.booleans())
def test_an_argument_is_read_or_refused_with_one_that_is(text, multirun):
    try:
        argument = readable(f"x=[{text}]", multirun)
    except ConfigError as refused:
        assert " cannot be read, because " in str(refused)
        return
    assert argument == f"x=[{text}]" or OverridesParser.create().parse_override(argument)


SECRET = "${oc.env:SD_QUANT_SECRET}"


@pytest.mark.parametrize(("overrides", "knob", "value"), [
    ([f"infer.prompts=[a ${{x}}, {SECRET}]"], "prompts", ["a ${x}", SECRET]),
    ([f"prompts={SECRET}"], "prompts", SECRET), (["prompts=[${model.prompts}]"], "prompts", ["${model.prompts}"]),
    (["prompts=[a ${model.path} b]"], "prompts", ["a ${model.path} b"]), ([r'prompts=["\${x}"]'], "prompts", ["${x}"]),
    ([f"infer.negative_prompt={SECRET}"], "negative_prompt", SECRET),
    (["prompts=['a ${x b', '${}', c]"], "prompts", ["a ${x b", "${}", "c"]),
    (["+experiment=mine", "hydra.searchpath=[file://{folder}]"], "prompts", ["a ${x} b", SECRET]),
    (["prompts=${model.calibration_prompts}"], "prompts", "conf/model/prompts/sdxl_mini.txt"),
])  # fmt: skip
def test_texts_are_never_looked_up(monkeypatch, tmp_path, overrides, knob, value):
    monkeypatch.setenv("SD_QUANT_SECRET", "leaked")
    (tmp_path / "experiment").mkdir()
    preset = yaml.safe_dump({"infer": {"prompts": ["a ${x} b", SECRET]}})
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{preset}")
    config = compose_infer(*(each.replace("{folder}", str(tmp_path)) for each in overrides))
    assert settled(config)["infer"][knob] == value
    if knob == "negative_prompt":
        arguments = f"model.arguments={{prompt_2: {SECRET}, width: '${{infer.width}}'}}"
        diffusers = composed("model=diffusers", *NEEDED["model=diffusers"], arguments)
        assert settled(diffusers)["model"]["arguments"] == {"prompt_2": SECRET, "width": 512}
        theirs = settled(compose_infer())["model"] | {"path": SECRET}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": theirs}))
        assert settled(compose_infer(f"run={tmp_path}"))["model"]["path"] == SECRET
