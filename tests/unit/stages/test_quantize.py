"""What a job refuses once its checkpoint is open, and before it computes anything."""

from types import SimpleNamespace

import pytest

from sd_quant.config import QuantizeJob
from sd_quant.errors import ConfigError
from sd_quant.knobs import read
from sd_quant.stages import opening

from ..config.composition import composed

pytestmark = pytest.mark.commit


def test_a_pipeline_that_no_server_loads_is_refused_before_calibration(monkeypatch, tmp_path):
    knobs = ("model=diffusers", "model.path=checkpoints/sd3_mini", "quantize=fp8", "hand_over=[modelopt_export]")
    family = SimpleNamespace(
        PIPELINES=("SanaPipeline",), NETWORKS={"transformer": "SanaTransformer2DModel"}, DENOISER="transformer"
    )
    parts = {"transformer": SimpleNamespace(component="transformer")}
    loaded = SimpleNamespace(checkpoint=SimpleNamespace(family=family, parts=lambda: parts))
    for name, stand_in in (("load", loaded), ("limit_of", None)):
        monkeypatch.setattr(opening, name, lambda *_, stand_in=stand_in: stand_in)
    monkeypatch.setattr(opening, "write_observed", lambda *_: pytest.fail("it goes on"))
    job = read(QuantizeJob, composed("quantize", *knobs))
    with pytest.raises(ConfigError, match="modelopt_export is for servers, and none loads this pipeline"):
        opening.opened(job, tmp_path)


def test_another_part_that_the_engine_cannot_execute_is_refused_before_the_first_step():
    """The denoiser is simulated instead."""
    mapping = composed("quantize", "quantize=nvfp4", "infer=openvino", "export_trt=none")
    opening.check_runtimes(read(QuantizeJob, mapping))
    mapping["quantize"]["parts"] = {"vae": "int8", "clip1": "nvfp4"}
    with pytest.raises(ConfigError, match="^quantize.parts gives clip1 the preset nvfp4, which infer.engine=openvino"):
        opening.check_runtimes(read(QuantizeJob, mapping))
