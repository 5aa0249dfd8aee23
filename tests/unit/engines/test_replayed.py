"""When a call is recorded and what is copied; CUDA's own recording is stood in for. tests/gpu has the real one."""

import pytest
import torch

from sd_quant.engines import replayed
from sd_quant.engines.replayed import Replayed

pytestmark = pytest.mark.commit


class Doubling:
    name, inputs, device = "doubling", {"x": torch.float16}, torch.device("cpu")

    def __init__(self):
        self.closed = False

    def __call__(self, x):
        if x.shape[0] > 8:
            raise ValueError("at most 8")
        return {"y": 2 * x}

    def close(self):
        self.closed = True


@pytest.fixture
def recorded(monkeypatch):
    """Recordings so far. A stand-in replays by computing from what the recording reads into what it writes."""
    made = []

    def record(engine, given):
        static = {name: tensor.clone() for name, tensor in given.items()}
        outputs = engine(**static)

        class Graph:
            def replay(self):
                for name, tensor in engine(**static).items():
                    outputs[name].copy_(tensor)

        made.append(replayed.tensor_shapes(static))
        return Graph(), static, outputs

    monkeypatch.setattr(replayed, "record", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def test_another_shape_is_recorded_anew(recorded):
    """One recording serves all calls of a shape, and an answer outlives the next call."""
    engine = Replayed(Doubling())
    answers = [engine(x=torch.full((batch, 3), float(batch)))["y"] for batch in (2, 4, 4, 2)]
    assert [(y.shape, y.unique().item()) for y in answers] == [((batch, 3), 2.0 * batch) for batch in (2, 4, 4, 2)]
    assert [shapes["x"][0] for shapes in recorded] == [2, 4, 2] and answers[0].dtype == torch.float16


def test_what_the_engine_refuses_is_refused_and_it_is_closed_with_its_recorder(recorded):
    inner = Doubling()
    engine = Replayed(inner)
    with pytest.raises(ValueError, match="at most 8"):
        engine(x=torch.ones(9, 3))
    with pytest.raises(ValueError, match=r"takes inputs \['x'\]"):
        engine(z=torch.ones(2, 3))
    assert engine(x=torch.ones(2, 3))["y"].shape == (2, 3)
    engine.close()
    assert inner.closed
