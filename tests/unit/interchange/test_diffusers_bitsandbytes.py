"""Folders that diffusers and bitsandbytes quantize and save are read back as bitsandbytes computes with them."""

import json

import pytest
import torch
from diffusers import BitsAndBytesConfig

from sd_quant.errors import ArtifactError
from sd_quant.interchange.diffusers_bitsandbytes import checked_state, read, threshold
from sd_quant.interchange.stored import Folder

from ..tiny import changed
from .conftest import assert_equal, weights_of

pytestmark = pytest.mark.commit

consumer = pytest.mark.consumer
READER = "diffusers_bitsandbytes"
CASES = {
    "nf4": ("sdxl", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, torch.float32),
    "nested": (
        "flux", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, torch.bfloat16,
    ),
    "fp4": ("sd3", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, torch.float16),
    "int8": ("sdxl", {"load_in_8bit": True, "llm_int8_threshold": 2.0}, torch.float32),
    "all_int8": ("flux", {"load_in_8bit": True, "llm_int8_threshold": 0.0}, torch.float32),
}  # fmt: skip


@pytest.fixture(scope="module")
def bnb():
    """diffusers asks for a GPU before it quantizes with bitsandbytes, which computes without."""
    pytest.importorskip("accelerate")
    package = pytest.importorskip("bitsandbytes")
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    with pytest.MonkeyPatch.context() as patch:
        for kind in (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer):
            patch.setattr(kind, "validate_environment", lambda *_, **__: None)
            patch.setattr(kind, "update_device_map", lambda *_: {"": "cpu"})
        yield package


@pytest.fixture(scope="module", params=CASES)
def saved(request, tiny, tmp_path_factory, bnb):
    """A checkpoint, the candidate in the folder of its quantized denoiser, and diffusers' own network of it."""
    family, options, dtype = CASES[request.param]
    case = tiny(family)
    folder = tmp_path_factory.mktemp(request.param)
    config = BitsAndBytesConfig(**options)
    case.kind.from_pretrained(case.folder, quantization_config=config, torch_dtype=dtype).save_pretrained(folder)
    theirs = case.kind.from_pretrained(folder, torch_dtype=torch.float32).eval()
    for module in theirs.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # a kernel for some processors rounds inputs to bf16
    return case, case.read(folder, READER), theirs, folder


@consumer
def test_weights_are_those_of_bitsandbytes_and_layers_and_the_network_compute_the_same(saved, bnb):
    """Weights bit for bit. A layer of four bits rounds to its input's dtype, ``dequantize_4bit`` to the weight's.

    On a CPU LLM.int8's products are 1.8e-5 too large: bitsandbytes writes 6.200124e-05 for 1 / 127^2. Without that,
    where all is int8, layers agree further. In a network any difference moves some inputs over a rounding, and those
    move others behind them.
    """
    case, candidate, theirs, _ = saved
    expected = {}
    for name, module in theirs.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            expected[name] = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert 4 <= candidate.layers[name].bits < 7  # a tiny layer has its tables too
        elif isinstance(module, bnb.nn.Linear8bitLt):
            expected[name] = bnb.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
            assert 8 <= candidate.layers[name].bits < 9
    assert len(expected) > 20
    assert_equal(weights_of(candidate), expected)
    ours = case.network(candidate)
    some = next(iter(candidate.layers.values()))
    dtype = some.weight.dtype
    tolerance = 3e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert max(case.error_of_layers(ours, theirs, candidate).values()) < tolerance
    if some.inputs is not None and some.inputs.threshold == 0:
        for name in candidate.layers:
            ours.get_submodule(name).weight.data *= 6.200124e-05 * 127**2
        assert max(case.error_of_layers(ours, theirs, candidate).values()) < 2e-6
    lost = case.error(theirs, case.denoiser())
    part = 0.1 if some.inputs is None else 0.7 if some.inputs.threshold else 0.3
    assert case.error(theirs, ours) < part * lost
    assert case.error(candidate.runtime(), ours) < part * lost


def test_a_config_that_names_no_threshold_has_diffusers_own(tmp_path):
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert threshold(Folder(tmp_path, None)) == BitsAndBytesConfig(load_in_8bit=True).llm_int8_threshold


@consumer
@pytest.mark.parametrize("saved", ["nf4", "int8"], indirect=True)
def test_a_threshold_that_is_none_is_refused(saved, tmp_path):
    for given in ("6", -1, True, None, 1e999, [6.0]):
        folder = changed(saved[3], tmp_path, config=lambda config, given=given: config.update(llm_int8_threshold=given))
        with pytest.raises(ArtifactError, match="llm_int8_threshold"):
            read(folder, saved[0].checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        {"blocksize": 63}, {"blocksize": True}, {"blocksize": 10**30}, {"dtype": "complex64"}, {"shape": [2**40, 9]},
        {"shape": None}, {"quant_type": "fp3"}, {"more": 1}, {"nested_blocksize": 1}, {"nested_offset": 1e999},
        {"nested_offset": 10**400}, {"nested_offset": None},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_quant_state_that_nobody_writes_is_refused(change):
    sound = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [4, 4],
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5,
    }  # fmt: skip
    assert checked_state(sound, "nf4", (4, 4)).offset == 0.5
    with pytest.raises(ValueError, match=next(iter(change))):
        checked_state(sound | change, "nf4", (4, 4))
