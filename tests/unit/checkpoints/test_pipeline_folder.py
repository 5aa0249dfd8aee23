"""What is copied of a pipeline's folder: the files that are read, and nothing that a link of a stranger leads to."""

import os
from types import SimpleNamespace

import pytest

from sd_quant.checkpoints import pipeline_folder
from sd_quant.checkpoints.pipeline_folder import write_pipeline_without

pytestmark = pytest.mark.commit


class Checkpoint(SimpleNamespace):
    pass


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "theirs"
    for name in ("unet/config.json", "unet/a.safetensors", "vae/config.json", "vae/a.safetensors", "vae/run.py",
                 "notes/private.txt", "safety/config.json", "blob"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    index = {"_class_name": "Pipeline", "unet": ["d", "U"], "vae": ["d", "V"], "safety": pipeline_folder.ABSENT,
             "loop": ["d", "L"], "home": ["d", "H"], "..": ["d", "X"]}  # fmt: skip
    return Checkpoint(path=folder, index=index, components={})


def copied(checkpoint, tmp_path) -> set[str]:
    out = tmp_path / "out"
    write_pipeline_without(checkpoint, {"unet"}, out / "result")
    assert [path.name for path in out.iterdir()] == ["result"]
    return {str(path.relative_to(out / "result")) for path in out.rglob("*") if not path.is_dir()}


def test_what_a_pipeline_reads_is_copied_without_the_weights_of_some_networks(checkpoint, tmp_path):
    expected = {"model_index.json", "unet/config.json", "vae/config.json", "vae/a.safetensors"}
    assert copied(checkpoint, tmp_path) == expected


def test_links_to_files_are_followed_and_no_link_to_a_folder_a_pipe_or_a_device_is(checkpoint, tmp_path):
    """A hub's snapshots are links to files; a link to a home, or to a folder around it, would be copied for ever."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret.json").write_text("secret")
    for name, target in (("vae/b.safetensors", "../blob"), ("loop", "."), ("home", home), ("vae/deep", home),
                         ("vae/z.json", "/dev/zero")):  # fmt: skip
        (checkpoint.path / name).symlink_to(target)
    os.mkfifo(checkpoint.path / "vae/pipe.json")
    found = copied(checkpoint, tmp_path)
    expected = {"model_index.json", "unet/config.json", "vae/config.json", "vae/a.safetensors", "vae/b.safetensors"}
    assert found == expected
    assert (tmp_path / "out/result/vae/b.safetensors").read_text() == "blob"
