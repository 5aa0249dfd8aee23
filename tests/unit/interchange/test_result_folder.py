"""Which files of a folder are ours, and that no others are touched."""

import json
import os

import pytest

from sd_quant.errors import ConfigError
from sd_quant.interchange.result_folder import FIGURES, check_free, own_files, remove_result

pytestmark = pytest.mark.commit


@pytest.fixture
def result(tmp_path):
    """A result of two files, with a list that names a third elsewhere."""
    folder = tmp_path / "comfyui"
    (folder / "deep").mkdir(parents=True)
    for name in ("weights", "deep/config.json", "../canary"):
        (folder / name).touch()
    (folder / FIGURES).write_text(json.dumps({"files": ["weights", "deep/config.json", "../canary", FIGURES, "gone"]}))
    return folder


def test_a_result_is_free_to_be_replaced_and_goes_by_its_own_list(result):
    check_free(result)
    assert own_files(result) == {"weights", "deep/config.json", FIGURES}
    remove_result(result)
    assert not result.exists() and (result.parent / "canary").exists()


@pytest.mark.parametrize("name", ["thesis.txt", "deep/thesis.txt", "mine/thesis.txt"])
def test_what_a_user_has_put_there_stays_and_nothing_is_written_over_it(result, name):
    (result / name).parent.mkdir(exist_ok=True)
    (result / name).touch()
    with pytest.raises(ConfigError, match=f"comfyui exists and holds {name}, which was not handed over by us; move it"):
        check_free(result)
    remove_result(result)
    assert [path.name for path in result.rglob("*") if path.is_file()] == ["thesis.txt"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', '{"files": [["weights"]]}', "[" * 10_000])
def test_without_a_list_nothing_is_ours(result, text):
    (result / FIGURES).write_text(text)
    with pytest.raises(ConfigError, match="which was not handed over by us"):
        check_free(result)
    remove_result(result)
    assert (result / "weights").exists()


def test_nothing_and_an_empty_folder_are_free_and_no_link_or_pipe_is(result, tmp_path):
    check_free(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty")
    (tmp_path / "link").symlink_to(result)
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(ConfigError, match="is no folder of ours; set hydra.run.dir"):
            check_free(tmp_path / name)
        remove_result(tmp_path / name)
    assert (result / "weights").exists() and (tmp_path / "link").is_symlink()


def test_a_linked_folder_is_not_entered(result, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").touch()
    (result / "more").symlink_to(elsewhere)
    (result / FIGURES).write_text(json.dumps({"files": ["weights", "deep/config.json", "more/weights"]}))
    with pytest.raises(ConfigError, match="holds more, which"):
        check_free(result)
    remove_result(result)
    assert (elsewhere / "weights").exists()
