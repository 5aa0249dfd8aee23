"""Which GPUs are too old for a job."""

from types import SimpleNamespace

import pytest

from sd_quant.errors import ConfigError
from sd_quant.launchers.gpus import Need, need_of, places_too_old
from tests.presets import job

pytestmark = pytest.mark.commit

ADA = Need(89, True)


@pytest.mark.parametrize(("name", "old"), [
    ("a100", True), ("NVIDIA A100-SXM4-80GB", True), ("nvidia_a100_80gb_pcie", True), ("V100", True), ("A10", True),
    ("l40s", False), ("NVIDIA-H100-80GB-HBM3", False), ("geforce_rtx_4090", False), ("B200", False),
    ("bigmem", False), ("", False), ("rtx_6000", False),
])  # fmt: skip
def test_a_gpu_is_known_by_a_word_of_its_name(name, old):
    assert ADA.too_old(name) is old
    assert not Need().too_old(name)


@pytest.mark.parametrize(("overrides", "expected"), [
    (["quantize=fp8", "infer=tensorrt_rtx"], Need(89, True)),
    (["quantize=int8", "infer=tensorrt_rtx"], Need(75, True)),
    (["quantize=nvfp4", "infer=tensorrt_rtx"], Need(100, True)),
    (["quantize=fp8", "infer=auto"], Need(89, False)),
    (["quantize=fp8", "infer=openvino"], Need()),
    (["quantize=fp8", "infer=torch_native"], Need(89, True)),
    (["quantize=int8", "infer=torch_native"], Need(80, True)),
    (["quantize=int8_weight_only", "infer=torch_native"], Need(0, True)),
])  # fmt: skip
def test_a_job_needs_what_its_engine_takes_for_its_formats(overrides, expected):
    assert need_of(job(*overrides)) == expected


def test_of_several_formats_the_newest_decides():
    mixed = SimpleNamespace(
        formats=lambda: {"inputs": {"int8", "fp8"}}, infer=SimpleNamespace(engine="torch_native", chosen_because=None)
    )
    assert need_of(mixed) == Need(89, True)


def test_a_place_is_too_old_where_all_its_gpus_are():
    places = {"n1": {"a100"}, "n2": {"a100", "h100"}, "n3": set(), "n4": {"ours"}}
    needs = {"a": ADA, "b": need_of(object()), "c": Need(75, True)}  # b has no formats
    assert places_too_old(needs, places) == {"a": ["n1"], "b": [], "c": []}


def test_a_gpu_that_no_place_has_is_refused_where_it_is_required():
    places = {"n1": {"a100"}, "n2": {"t4", "v100"}, "n3": set()}
    with pytest.raises(ConfigError, match=r"^job b takes a GPU of compute capability 8\.9, .* has a100, t4, v100;"):
        places_too_old({"a": Need(), "b": ADA}, places)
    assert places_too_old({"b": Need(89)}, places) == {"b": []}, "by another engine it runs anywhere"
    assert places_too_old({"b": ADA}, {"n3": set()}) == {"b": []}, "nothing is known of GPUs"
