from types import SimpleNamespace

import numpy as np
import pytest

from sd_quant.config import Metrics
from sd_quant.errors import ConfigError
from sd_quant.stages.text_scores import text_scores

INFER = SimpleNamespace(steps=20, scale=8.0, height=64, width=64)
PICTURES = {"full_precision": np.zeros((2, 64, 64, 3), np.uint8), "quantized": np.zeros((2, 64, 64, 3), np.uint8)}


def test_what_was_not_asked_for_is_null_with_the_reason():
    found = text_scores(Metrics(None, None, None), INFER, ["a", "b"], PICTURES)
    assert found == {"value": None, "reason": "no weights were named in metrics"}


def test_weights_that_cannot_be_used_are_a_reason_and_no_verdict(tmp_path):
    found = text_scores(Metrics(str(tmp_path), None, None), INFER, ["a", "b"], PICTURES)
    for side in PICTURES:
        clip = found[side]["clip_score"]
        assert clip["value"] is None and "has no config.json" in clip["reason"]
        assert found[side]["fid"] == {"value": None, "reason": "its weights were not named in metrics"}
        assert found[side]["mlperf"]["passes"] is None and "not MLPerf's protocol" in found[side]["mlperf"]["reason"]
        assert "guidance_scale" not in found[side]["mlperf"]["reason"]  # which is MLPerf's


def test_the_protocol_is_that_of_the_run():
    """Each thing that MLPerf fixes is named where the run did it otherwise."""
    infer = SimpleNamespace(steps=21, scale=5.0, height=65, width=66)
    found = text_scores(Metrics("nowhere", None, None), infer, ["a", "b"], PICTURES)
    for told in ("steps is 21", "guidance_scale is 5.0", "height is 65", "width is 66"):
        assert told in found["quantized"]["mlperf"]["reason"]


def test_half_of_what_fid_takes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="metrics.fid_references is None, expected given with metrics.fid_weights"):
        Metrics(None, str(tmp_path), None)
    with pytest.raises(ConfigError, match="metrics.fid_references is .*, expected given with metrics.fid_weights"):
        Metrics(None, None, str(tmp_path))
    with pytest.raises(ConfigError, match="metrics.clip_weights names nowhere, which does not exist"):
        Metrics("nowhere", None, None).check_files()
