"""AutoRound's folders: codes and zero points by hand, and bit for bit what its own layers pack and compute."""

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file

from sd_quant.errors import ArtifactError
from sd_quant.files.tensors import lazy
from sd_quant.interchange.diffusers_autoround import AWQ, GPTQ, PIECES, Scheme, read, stored_layer
from sd_quant.interchange.stored import LayerTensors

from ..tiny import changed

pytestmark = pytest.mark.commit

READER = "diffusers_autoround"
ALONE = {"activation": None, "alpha": None, "smoothing": "none"}


def layer_of(tensors, shape, scheme, packing):
    return stored_layer(LayerTensors(Path("x"), "a", {k: lazy(v) for k, v in tensors.items()}), shape, scheme, packing)


@pytest.mark.parametrize("packing, zeros", [(GPTQ, 0x77777777), ("auto_round", 0x88888888), (AWQ, 0x88888888)])
def test_a_zero_point_of_the_other_convention_is_refused(packing, zeros):
    """It would move every weight by a whole step. The first of eight codes along the inputs is the lowest."""

    def weight(word: int, sym: bool) -> torch.Tensor:
        codes = torch.full((4, 32), 0x76543210, dtype=torch.int32)  # every eight inputs have the codes 0 to 7
        tensors = {"qweight": codes.T.contiguous() if packing == AWQ else codes}
        tensors |= {"scales": torch.full((1, 32), 0.5).half(), "qzeros": torch.full((1, 4), word).int()}
        return layer_of(tensors, (32, 32), Scheme(4, 32, sym), packing).weight.read()

    expected = (torch.arange(32) % 8 - 8.0).expand(32, 32) / 2
    assert torch.equal(weight(zeros, True), weight(zeros, False)) and weight(zeros, True).min() == -4
    assert packing == AWQ or torch.equal(weight(zeros, True), expected)
    with pytest.raises(ArtifactError, match="has the zero point [79], expected 8"):
        weight(0x77777777 if packing != GPTQ else 0x88888888, True)


@pytest.mark.slow
def test_blocks_and_patterns_name_layers_as_autoround_reads_them(written_once, tmp_path):
    case, assignment, pipeline = written_once(READER, "flux", "int4", **ALONE)
    folder = pipeline / case.component
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    left = set(config["extra_config"])
    expected = {row.name for row in assignment.values() if row.format}
    assert expected and left and not expected & left
    for entries in (
        {},
        {"block_name_to_quantize": config["block_name_to_quantize"].split(",")},
        {"block_name_to_quantize": None},
        {"block_name_to_quantize": "nothing", "extra_config": dict.fromkeys(expected, {"bits": 4})},
        {"extra_config": {name.replace(".", r"\.") + "$": {"bits": 16} for name in left}},
        {"bits": 8, "extra_config": dict.fromkeys(left, {"bits": 16}) | {".*": {"bits": 4}}},
        {"autoround_version": "0.16.1"},
    ):
        changed(folder, tmp_path, config=lambda config, entries=entries: config.update(entries))
        found = read(tmp_path, case.checkpoint)
        assert found.layers.keys() == expected
        assert found.maker == ("AutoRound 0.16.1" if "autoround_version" in entries else "AutoRound")


@pytest.fixture(scope="module")
def autoround():
    """It imports datasets, for calibration alone."""
    pytest.importorskip("accelerate")
    with pytest.MonkeyPatch.context() as patch:
        if "datasets" not in sys.modules:
            patch.setitem(sys.modules, "datasets", MagicMock())
        yield pytest.importorskip("auto_round")


@torch.no_grad()
def packed_by_them(packing: str, linear: torch.nn.Linear, scheme: Scheme):
    """Its layer of a linear, asymmetric or not, with fp32 scales: fp16's would round what it computes in fp16."""
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    rows, columns = linear.weight.shape
    size = columns if scheme.group_size == -1 else scheme.group_size
    groups = linear.weight.unflatten(1, (-1, size))
    middle = 2 ** (scheme.bits - 1)
    scales = (groups.abs().amax(-1) / middle).half()
    zeros = middle if scheme.sym else torch.arange(rows * (columns // size)).view(rows, -1) % (2**scheme.bits - 1) + 1
    if packing == AWQ:
        turned = {"scales": scales.T.contiguous(), "zeros": zeros if scheme.sym else zeros.T.contiguous()}
        return WQLinear_GEMM.from_linear(linear, scheme.bits, scheme.group_size, device="cpu", **turned)
    layer = {GPTQ: qlinear_torch_zp, "auto_round": qlinear_torch}[packing].QuantLinear(
        scheme.bits, scheme.group_size, columns, rows, linear.bias is not None
    )
    layer.device = "cpu"
    layer.pack(linear, scales, zeros, device="cpu")
    return layer


@pytest.mark.consumer
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(
    "packing, bits", [*((packing, bits) for packing in (GPTQ, "auto_round") for bits in range(2, 9)),
                      *((AWQ, bits) for bits in (4, 5, 6, 7))],
)  # fmt: skip
@torch.no_grad()
def test_weights_are_those_of_its_layers(autoround, packing, bits, sym):
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    for group in (32, 96, -1):
        torch.manual_seed(bits)
        scheme = Scheme(bits, group, sym)
        theirs = packed_by_them(packing, torch.nn.Linear(96, 64, bias=False), scheme)
        tensors = {end: tensor for end, tensor in theirs.state_dict().items() if end in PIECES}
        found = layer_of(tensors, (64, 96), scheme, packing).weight.read()
        if packing == AWQ:
            size = 96 if group == -1 else group
            expected = dequantize_gemm(theirs.qweight, theirs.qzeros, theirs.scales.float(), bits, size).T
        else:
            theirs.scales = theirs.scales.float()
            expected = theirs(torch.eye(96)).T
        assert torch.equal(found, expected)


@pytest.mark.consumer
def test_it_is_opened_in_fp16_which_keeps_its_scales(autoround, written_once):
    """diffusers casts them to the dtype that it is asked for."""
    case, assignment, folder = written_once(READER, "flux", "int4", **ALONE)
    theirs, brain = case.read(folder, READER).runtime(), case.loaded(folder, torch.bfloat16)
    stored = load_file(folder / case.component / "diffusion_pytorch_model.safetensors")
    scales = {row.name: stored[f"{row.name}.scales"] for row in assignment.values() if row.format}
    assert all(torch.equal(theirs.get_submodule(name).scales, each) for name, each in scales.items())
    assert not all(torch.equal(brain.get_submodule(name).scales.half(), each) for name, each in scales.items())
