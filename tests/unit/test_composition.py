"""What is said where a configuration cannot be composed."""

from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf.errors import OmegaConfBaseException

from sd_quant import composition
from sd_quant.composition import composing, job_of, refusal
from sd_quant.config import QuantizeJob
from sd_quant.errors import ConfigError
from sd_quant.places import CONF

pytestmark = pytest.mark.commit


def composed(*overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("quantize", list(overrides))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("quant_levle=3", "there is no knob quant_levle; did you mean quant_level"),
        ("quantize.n_step=3", "there is no knob quantize.n_step; did you mean quantize.n_steps"),
        ("+quantize.alhpa=0.5", "there is no knob quantize.alhpa; did you mean alpha?"),
        ("steps=3", "there is no knob steps; did you mean infer.steps?"),
        ("to=comfyui", "there is no knob to in quantize; it is a knob of hand_over"),
        ("xyzabc=3", "there is no knob xyzabc; none is like it; --help lists all"),
        ("infer=openvin", "there is no preset infer=openvin; did you mean openvino?"),
        ("model=xyzzy", "there is no preset model=xyzzy; none is like it; --help lists all"),
        ("export_trt=xyzzy", "there is no preset export_trt=xyzzy; known are auto, none, tensorrt, tensorrt_rtx"),
        ("model=sdxl_nemo", "the knob model.path has no value; give it one on the command line"),
        *((override, "") for override in ("alpha=[", "nosuch/group=a", "alpha=${nowhere}", "~nosuch")),
    ],
)  # fmt: skip
def test_a_complaint_becomes_one_sentence_with_the_nearest_name(override, sentence):
    with pytest.raises((ConfigError, HydraException, OmegaConfBaseException)) as complaint:
        job_of(QuantizeJob, composed(override))
    refused = complaint.value
    if not isinstance(refused, ConfigError):
        refused = refusal(refused, "quantize")
    assert isinstance(refused, ConfigError)
    assert str(refused).startswith(sentence) and str(refused).isprintable() and str(refused)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "given", "sentence"),
    [
        ("infer", "quant_level=3", "there is no knob quant_level in infer; it is a knob of quantize"),
        ("judge", "infer=torch", "infer is a group of knobs in judge, expected infer.<knob>=<value>"),
    ],
)
def test_what_another_command_takes_is_said_to_be_its_own(command, given, sentence):
    with pytest.raises(ConfigError) as refused, composing(command):
        compose(command, [given])
    assert str(refused.value) == sentence


def test_a_complaint_without_a_pattern_keeps_its_words():
    assert str(refusal(ConfigCompositionException("two\n  lines"), "quantize")) == "two lines"


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
