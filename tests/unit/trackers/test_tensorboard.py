import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sd_quant.trackers import track

pytestmark = pytest.mark.commit


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
