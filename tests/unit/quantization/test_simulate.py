import modelopt.torch.opt as mto
import pytest
import torch

from sd_quant.metrics.fidelity import relative_error
from sd_quant.quantization.simulate import save_quantized, simulate


@pytest.fixture(scope="module")
def simulated(calibrated):
    """A part whose UNet is quantized at level 2.5."""
    part = calibrated.part()
    simulate(part.unet, calibrated.assignment(0.8, quant_level=2.5))
    return part


def enabled(unet, kind: str) -> set[str]:
    quantizers = {name: module for name, module in unet.named_modules() if name.endswith(f".{kind}_quantizer")}
    return {name.removesuffix(f".{kind}_quantizer") for name, module in quantizers.items() if module.is_enabled}


@pytest.mark.parametrize("kind", ["weight", "input"])
def test_exactly_the_assigned_layers_are_quantized(simulated, calibrated, kind):
    layers = calibrated.assignment(0.8, quant_level=2.5).values()
    assert enabled(simulated.unet, kind) == {layer.name for layer in layers if layer.format}
    assert not enabled(simulated.unet, "output")


def test_it_computes_nearly_what_the_original_does(simulated, calibrated):
    inputs = calibrated.calls[0]
    error = relative_error(calibrated.part()(**inputs), simulated(**inputs))
    assert 1e-2 < error < 0.3  # rounded, and not broken: measured 0.09, uneven norms are hard on a small network


def test_a_saved_model_is_restored_bit_for_bit(simulated, calibrated, tmp_path):
    save_quantized(simulated.unet, tmp_path / "quantized.pt")
    assert [file.name for file in tmp_path.iterdir()] == ["quantized.pt"]
    fresh = calibrated.part()
    mto.restore(fresh.unet, tmp_path / "quantized.pt")
    inputs = calibrated.calls[1]
    assert torch.equal(fresh(**inputs), simulated(**inputs))
    assert not torch.equal(fresh(**inputs), calibrated.part()(**inputs))


def test_the_saved_file_holds_no_code(simulated, tmp_path):
    save_quantized(simulated.unet, tmp_path / "quantized.pt")
    assert torch.load(tmp_path / "quantized.pt", weights_only=True).keys() == {"modelopt_state", "model_state_dict"}
