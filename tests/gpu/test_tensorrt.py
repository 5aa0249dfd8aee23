"""A plan built for this GPU computes what torch computes."""

import numpy as np
import pytest
import torch

from sd_quant.engines import load_engine
from sd_quant.errors import ArtifactError

pytest.importorskip("onnx")
pytestmark = pytest.mark.commit

WIDTH, OUT, SCALE = 64, 32, 2.0**-5


@pytest.fixture(scope="module", params=["tensorrt", "tensorrt_rtx"])
def library(request) -> str:
    trt = pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    target = "SM{}{}".format(*torch.cuda.get_device_capability())
    if request.param == "tensorrt_rtx" and target not in trt.ComputeCapability.__members__:
        pytest.skip(f"TensorRT for RTX does not build for this GPU ({target})")
    return request.param


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    return np.random.default_rng(0).integers(-127, 128, (WIDTH, OUT)).astype(np.int8)


@pytest.fixture(scope="module")
def plan(library, weight, tmp_path_factory):
    """y [B, 32] fp16 = QDQ(x [B, 64] fp16) @ DQ(int8 weight), B from 1 to 8; and the ids passed through, int64."""
    from onnx import helper

    from sd_quant.engines.tensorrt import build as building
    from tests.graphs import product_of_codes, save_graph

    folder = tmp_path_factory.mktemp(library)
    nodes, constants = product_of_codes(weight, np.full(OUT, 2.0**-8, np.float16), SCALE)
    nodes.append(helper.make_node("Add", ["ids", "one"], ["next_ids"]))
    constants["one"] = np.array(1, np.int64)
    inputs, outputs = {"x": ["B", WIDTH], "ids": ["B"]}, {"y": ["B", OUT], "next_ids": ["B"]}
    save_graph(folder / "tiny.onnx", nodes, constants, inputs, outputs)
    profile = {"x": ((1, WIDTH), (2, WIDTH), (8, WIDTH)), "ids": ((1,), (2,), (8,))}
    building.build_plan(folder / "tiny.onnx", folder / "tiny.plan", library=library, profile=profile)
    return folder / "tiny.plan"


@pytest.fixture
def engine(library, plan):
    engine = load_engine(library, plan)
    yield engine
    engine.close()


def test_it_computes_what_torch_computes_and_outputs_survive_the_next_call(engine, weight):
    returned = []
    for batch in (1, 3, 8):
        x = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(batch)).half()
        outputs = engine(x=x, ids=torch.arange(batch))
        levels = (x.float() / SCALE).round().clamp(-128, 127)
        expected = levels * SCALE @ (torch.from_numpy(weight).float() * 2.0**-8)
        assert outputs["y"].is_cuda and outputs["y"].dtype == torch.float16
        torch.testing.assert_close(outputs["y"].float().cpu(), expected, rtol=2e-3, atol=2e-2)
        assert outputs["next_ids"].tolist() == [index + 1 for index in range(batch)]
        returned.append((outputs["y"], outputs["y"].clone()))
    assert all(torch.equal(now, before) for now, before in returned)


def test_a_plan_of_another_gpu_is_refused(library, plan, tmp_path):
    from sd_quant.engines.tensorrt import plan as planning

    copy = tmp_path / plan.name
    copy.write_bytes(plan.read_bytes())
    target = "SM{}{}".format(*torch.cuda.get_device_capability())
    record = planning.record_path(plan).read_text().replace(f'"{target}"', '"SM10"')
    planning.record_path(copy).write_text(record)
    with pytest.raises(ArtifactError, match="runs on SM10"):
        load_engine(library, copy)
