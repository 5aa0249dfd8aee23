"""What the command takes, as it is composed, and what it refuses before anything is loaded."""

import pytest
from hydra import compose

from sd_quant.cli import composing, job_of
from sd_quant.config import HandOverJob
from sd_quant.errors import ConfigError
from sd_quant.hand_over import TARGETS, writer


def composed(*overrides: str) -> HandOverJob:
    with composing("hand_over"):
        return job_of(HandOverJob, compose("hand_over", [*overrides]))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no metrics.json, expected the folder of a finished quantize.py"):
        composed(f"run={tmp_path}", "to=[comfyui,gguf]")


def test_an_unknown_target_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"to is \['comfyui', 'nobody'\], expected one of comfyui, .*gguf"):
        composed(f"run={tmp_path}", "to=[comfyui,nobody]")


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_a_writer(name):
    assert callable(writer(TARGETS[name])) and "{folder" in TARGETS[name].loading
