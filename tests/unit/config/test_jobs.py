"""Files that the other commands start from."""

import pytest

from sd_quant.config import PART_NAMES, ExportJob, InferJob, artifact, part_paths
from sd_quant.errors import ConfigError
from sd_quant.knobs import read

from .composition import changed


def test_parts_come_from_the_run_and_single_paths_go_before(mappings, run, tmp_path):
    mapping = changed(mappings["export_trt"], "run", str(run))
    own = tmp_path / "own.onnx"
    own.touch()
    job = read(ExportJob, changed(mapping, "files.vae", str(own)))
    job.check_files()
    paths = part_paths(job, "onnx")
    assert list(paths) == list(PART_NAMES)
    assert paths["vae"] == own
    assert paths["unet_xl"] == run / "onnx/unet_xl/unet_xl.onnx"
    assert artifact(run, "plan", "unet_xl") == run / "plan/unet_xl.plan"


def test_an_export_takes_some_parts_and_pictures_need_all(mappings, run, archive):
    unet = str(artifact(run, "onnx", "unet_xl"))
    read(ExportJob, changed(mappings["export_trt"], "files.unet_xl", unet)).check_files()
    mapping = changed(changed(mappings["infer"], "files.unet_xl", unet), "model.path", str(archive))
    with pytest.raises(ConfigError, match=r"^no file is given for vae, clip1, clip2; set run=.* or vae=<path of its"):
        read(InferJob, mapping).check_files()


def test_without_files_an_export_is_of_the_checkpoint(mappings, run, archive):
    job = read(ExportJob, changed(mappings["export_trt"], "model.path", str(archive)))
    assert job.unquantized()
    job.check_files()
    with pytest.raises(ConfigError, match="^model.path names missing.nemo, which does not exist"):
        read(ExportJob, changed(mappings["export_trt"], "model.path", "missing.nemo")).check_files()
    read(ExportJob, changed(mappings["export_trt"], "trt.library", "none"))  # its ONNX files alone
    with pytest.raises(ConfigError, match="^trt.library is none, expected a library that builds plans"):
        read(ExportJob, changed(changed(mappings["export_trt"], "trt.library", "none"), "run", str(run)))


def test_a_missing_part_is_named_with_its_path(mappings, run):
    missing = artifact(run, "onnx", "clip1")
    missing.unlink()
    with pytest.raises(ConfigError, match=f"^clip1 should be at {missing}, which does not exist"):
        read(ExportJob, changed(mappings["export_trt"], "run", str(run))).check_files()


def test_an_out_path_below_a_file_is_refused(mappings, run, archive):
    mapping = changed(mappings["export_trt"], "run", str(run))
    read(ExportJob, changed(mapping, "infer.out_path", str(run / "new"))).check_files()
    assert not (run / "new").exists()
    below = changed(mapping, "infer.out_path", str(archive / "new"))
    with pytest.raises(ConfigError, match=r"cannot be written, because of .*empty\.nemo; set infer\.out_path$"):
        read(ExportJob, below).check_files()
