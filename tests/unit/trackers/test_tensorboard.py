import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sd_quant.trackers import track


def test_knobs_numbers_series_and_image_are_in_the_events(record, directory, metrics, tmp_path, caplog):
    track(["tensorboard"], record, directory, tmp_path / "store")
    assert not caplog.messages
    events = EventAccumulator(str(tmp_path / "store/tensorboard/multirun/0"))
    events.Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found.pop("fidelity/latent_sqnr_db") == [(1, 40.0), (3, pytest.approx(25.1))]
    assert found == {name: [(0, pytest.approx(value))] for name, value in metrics.items()}
    image = events.Images("images/grid")[0]
    assert (image.width, image.height) == (40, 20)
    start = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"quant_level" in start and b"infer.prompts" in start


def test_a_store_that_cannot_be_written_is_a_warning(record, directory, tmp_path, caplog):
    (tmp_path / "file").touch()
    track(["tensorboard"], record, directory, tmp_path / "file")
    assert len(caplog.messages) == 1 and "the tracker tensorboard was not told" in caplog.messages[0]


def test_without_the_package_the_warning_says_what_to_install(record, directory, tmp_path, caplog, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    track(["tensorboard"], record, directory, tmp_path)
    assert "pip install 'sd-quant[tensorboard]'" in caplog.messages[0]
