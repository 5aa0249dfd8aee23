"""Every check is made when a session is opened, in an order in which what takes long comes last."""

from types import SimpleNamespace

import pytest

from sd_quant.inference import memory
from sd_quant.places import HOME
from sd_quant.stages import session
from sd_quant.stages.resources import workload_of
from sd_quant.stages.session import Session, warn_of_size

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    ("sides", "warned"),
    [
        ({}, []),
        ({"width": 128, "height": 128}, ["model.width and model.height ask for 128 x 128"]),
        ({"sizes": ["64x128", "128x192", "192x64"]}, ["model.sizes ask for 128 x 192", "model.sizes ask for 192 x 64"]),
    ],
)
def test_images_far_from_the_checkpoints_own_size_are_warned_of(caplog, sides, warned):
    usual = {
        "family": "sdxl",
        "width": 64,
        "height": 64,
        "sizes": None,
        "path": str(HOME / "checkpoints/sdxl_mini.nemo"),
    }
    sections = {"model": SimpleNamespace(**usual | sides), "infer": SimpleNamespace(**usual)}
    warn_of_size(sections["model"], sections)
    assert [message.partition(", and")[0] for message in caplog.messages] == warned
    assert all("and this checkpoint was made for 64 x 64" in message for message in caplog.messages)


@pytest.mark.parametrize(("simulated", "stages"), [(True, {"images", "the simulation"}), (False, {"images"})])
def test_a_gpu_has_to_hold_a_simulation_only_where_one_is_made(monkeypatch, simulated, stages):
    asked, checked = [], []
    monkeypatch.setattr(session, "check_machine", lambda needs, directory: asked.append(needs))
    monkeypatch.setattr(session, "check_request", lambda model, infer: checked.append("request"))
    monkeypatch.setattr(Session, "check", lambda self, model, infer: checked.append("structure"))
    monkeypatch.setattr(Session, "parameters", {"unet_xl": 2_567_463_684, "vae": 49_490_199})
    infer = SimpleNamespace(width=64, height=64, sizes=None, batch_size=1, engine="torch", precision="auto",
                            vae_tile=None)  # fmt: skip
    Session(checkpoint=None).check_images(None, infer, simulated)
    assert [set(needs.gpu) for needs in asked] == [stages] and checked == ["request", "structure"]


@pytest.mark.parametrize(("room", "together"), [(4e9, False), (1e12, True)])
def test_parts_are_open_together_only_where_a_gpu_holds_them_too(monkeypatch, room, together):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1e12)
    monkeypatch.setattr(memory, "available_cuda_memory_bytes", lambda: room)
    monkeypatch.setattr(Session, "parameters", {"unet_xl": 2_567_463_684, "vae": 49_490_199})
    infer = SimpleNamespace(width=64, height=64, sizes=None, batch_size=1, engine="torch", precision="auto",
                            vae_tile=None)  # fmt: skip
    assert Session(checkpoint=None).together(workload_of(infer)) is together
