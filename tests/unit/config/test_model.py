"""The checkpoint, its LoRAs and the images that calibration begins with."""

import pytest

from sd_quant.config import PART_NAMES, InferJob, QuantizeJob, lora_of, part_paths
from sd_quant.errors import ArtifactError, ConfigError
from sd_quant.knobs import read

from .composition import changed


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("style.safetensors", ("style.safetensors", 1.0)),
        ("a/b.safetensors:0.8", ("a/b.safetensors", 0.8)),
        ("b.safetensors:-1", ("b.safetensors", -1.0)),
    ],
)
def test_a_lora_has_a_strength(mappings, stated, expected):
    job = read(InferJob, changed(mappings["infer"], "model.loras", [stated]))
    assert lora_of(job.model.loras[0]) == expected
    with pytest.raises(ConfigError, match="^model.loras names .*, which does not exist"):
        job.model.check_files()


@pytest.mark.parametrize("stated", ["b.safetensors:much", "b.safetensors:nan", "b.safetensors:", ":0.5", ""])
def test_a_strength_that_is_no_number_is_refused(mappings, stated):
    with pytest.raises(ConfigError, match=r"^model.loras .* a file, or file:strength with a number"):
        read(InferJob, changed(mappings["infer"], "model.loras", [stated]))


def test_images_to_start_from_make_the_encoder_a_part(mappings, run, picture):
    assert not read(QuantizeJob, mappings["quantize"]).model.encoder
    for primary, job in (("quantize", QuantizeJob), ("infer", InferJob)):
        mapping = changed(mappings[primary], "infer.image", str(picture))
        assert read(job, mapping).model.encoder
    assert list(part_paths(read(InferJob, changed(mapping, "run", str(run))), "onnx")) == [*PART_NAMES, "vae_encoder"]
    calibrated = changed(mappings["quantize"], "model.calibration_image", str(picture))
    assert read(QuantizeJob, calibrated).model.encoder


def test_a_checkpoint_has_to_be_there_and_whole(mappings, quantize_mapping, archive):
    read(QuantizeJob, quantize_mapping).check_files()
    absent = read(QuantizeJob, changed(mappings["quantize"], "model.path", "no/such.nemo"))
    with pytest.raises(ConfigError, match=r"^model\.path names no/such\.nemo, which does not exist"):
        absent.check_files()
    archive.write_bytes(b"not a tar" * 100)
    with pytest.raises(ArtifactError, match="no valid tar header"):
        read(QuantizeJob, quantize_mapping).check_files()
