"""Folders that SDNQ itself has quantized and saved: weights are its own bit for bit, and layers compute the same."""

import logging
import os
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from torch import nn

from sd_quant.errors import ConfigError
from sd_quant.interchange.diffusers_sdnq import OTHER_NAMES, at_least_as_wide, hadamard, matches, read, small_floats

from .conftest import assert_equal

pytestmark = pytest.mark.commit

consumer = pytest.mark.consumer
READER = "diffusers_sdnq"
EVERYTHING = {"quant_conv": True, "minimum_allowed_numel": 0}
BRANCH = {"use_svd": True, "svd_rank": 4}

NUMBERS = (
    "int8 uint8 int7 uint7 int6 uint6 int5 uint5 int4 uint4 int3 uint3 int2 uint2 float8_e4m3fn float8_e5m2 "
    "fp7 fp6 fp5 fp4 fp3 fp2 ufp8 ufp4 float8_e3m4fn float8_e4m3fn_sdnq float4_e3m0fn float5_e5m0fnu"
).split()
KINDS = {  # layer by layer in one network
    "numbers": {name: {"weights_dtype": name} for name in NUMBERS},
    "blocks, branches, rotations": {
        "a row": {"weights_dtype": "int8", "group_size": -1},
        "all": {"weights_dtype": "int8", "group_size": -2},
        "blocks": {"weights_dtype": "int8", "group_size": 16},
        "branch": {"weights_dtype": "uint4"} | BRANCH,
        "rotated": {"weights_dtype": "int4", "use_hadamard": True, "hadamard_group_size": 64},
        "rotated, branch": {"weights_dtype": "int4", "use_hadamard": True, "hadamard_group_size": 32} | BRANCH,
    },
}
OPTIONS = {
    "half": {"weights_dtype": "int8", "dequantize_fp32": False, "dtype": torch.bfloat16} | BRANCH,
    "dynamic": {"weights_dtype": "int2", "use_dynamic_quantization": True},
    "exceptions": {
        "weights_dtype": "uint4",
        "modules_dtype_dict": {"minimum_6bit": ["to_q", "*.ff.*"], "float8_e4m3fn": [".conv_out"]},
        "modules_quant_config": {"to_k": {"weights_dtype": "int8", "group_size": -1}, "mid_block.*conv*": dict(BRANCH)},
        "modules_to_not_convert": ["to_v"],
    },
}


@pytest.fixture(scope="module")
def sdnq():
    logging.getLogger("sdnq").setLevel(logging.ERROR)
    return pytest.importorskip("sdnq")


@pytest.fixture(scope="module")
def sdxl(tiny):
    return tiny("sdxl")


@pytest.fixture
def saved(sdnq, sdxl, tmp_path):
    def save(dtype=None, **options):
        from sdnq.loader import save_sdnq_model

        config = sdnq.SDNQConfig(**EVERYTHING | options)
        network = sdxl.kind.from_pretrained(sdxl.folder)
        network = sdnq.sdnq_post_load_quant(network, quantization_config=config, torch_dtype=dtype)
        save_sdnq_model(network, str(tmp_path / "saved"))
        return tmp_path / "saved"

    return save


@pytest.fixture
def in_turn(saved, sdxl):
    """A candidate whose layers are of these kinds in turn, SDNQ's own network of it, and the kinds by layer."""

    def save(kinds: dict[str, dict], *classes: type, **options):
        layers = [name for name, module in sdxl.denoiser().named_modules() if isinstance(module, classes)]
        chosen = dict(zip(layers, cycle(kinds), strict=False))
        assert len(chosen) > len(kinds)
        configs = {f"{name}.weight": dict(kinds[kind]) for name, kind in chosen.items()}
        candidate = sdxl.read(saved(modules_quant_config=configs, **options), READER)
        return candidate, candidate.runtime(), chosen

    return save


def dequantized(layer: nn.Module) -> torch.Tensor:
    from sdnq.utils import get_sdnq_params

    dequantize = layer.sdnq_dequantizer
    pieces = get_sdnq_params(layer)
    return dequantize(**pieces, skip_quantized_matmul=dequantize.use_quantized_matmul, skip_compile=True)


def assert_same(case, candidate, theirs, computes: bool = True):
    quantized = {name for name, module in theirs.named_modules() if hasattr(module, "sdnq_dequantizer")}
    assert candidate.layers.keys() == quantized and len(quantized) > 50
    for name, layer in candidate.layers.items():
        module = theirs.get_submodule(name)
        found, expected = layer.weight.read(), dequantized(module)
        assert found.dtype == layer.weight.dtype == expected.dtype == torch.float32
        numbers = module.sdnq_dequantizer.weights_dtype
        assert layer.format == OTHER_NAMES.get(numbers, numbers)
        assert torch.equal(found, expected), name
    state = theirs.state_dict()
    found = {name: parameter.read().float() for name, parameter in candidate.parameters.items()}
    assert_equal(found, {name: state[name] for name in found})
    if computes:
        assert case.error(theirs, case.network(candidate)) < 1e-6 < 1e-3 < case.error(theirs, case.denoiser())


@consumer
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_every_kind(kinds, sdnq, in_turn, sdxl):
    candidate, theirs, chosen = in_turn(kinds, nn.Linear, nn.Conv2d)
    assert_same(sdxl, candidate, theirs, computes=kinds is not KINDS["numbers"])
    assert candidate.maker == f"SDNQ {sdnq.common.sdnq_version}"
    assert {chosen[name] for name in candidate.layers} == kinds.keys()
    assert not any(layer.inputs for layer in candidate.layers.values())


@consumer
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, saved, sdxl):
    path = saved(**OPTIONS[name])
    candidate = sdxl.read(path, READER)
    assert_same(sdxl, candidate, candidate.runtime())
    stored = sum((path / file).stat().st_size for file in os.listdir(path) if ".safetensors" in file)
    assert 0 <= stored - candidate.stored_bytes < 100_000  # the header


AGAIN = {  # weights that are unsigned or quantized again before each product, or branches beside products of codes
    "uint8": {"weights_dtype": "uint8"},
    "blocks, branch": {"weights_dtype": "uint4"} | BRANCH,
    "blocks, branch, rotated": {"weights_dtype": "int5", "use_hadamard": True, "hadamard_group_size": 64} | BRANCH,
    "branch": {"weights_dtype": "int8"} | BRANCH,
    "rotated": {"weights_dtype": "int8", "use_hadamard": True, "hadamard_group_size": 64},
    "packed, branch": {"weights_dtype": "int6"} | BRANCH,
    "uint8 of int8": {"weights_dtype": "int8", "quantized_matmul_dtype": "uint8"},
    "int8 of float8": {"weights_dtype": "float8_e4m3fn", "quantized_matmul_dtype": "int8"},
    "float4": {"weights_dtype": "fp4", "group_size": -1},
    "ufp4": {"weights_dtype": "ufp4"},
    "int8 of e5m2": {"weights_dtype": "float8_e5m2", "quantized_matmul_dtype": "int8"},
    "float8_e3m4fn": {"weights_dtype": "float8_e3m4fn", "group_size": -1},
    "beyond": {"weights_dtype": "float6_e5m0fn", "group_size": -1},
}


@consumer
def test_branches_and_blocks_beside_products_of_codes(in_turn, sdxl):
    candidate, theirs, chosen = in_turn(AGAIN, nn.Linear, use_quantized_matmul=True)
    errors = sdxl.error_of_layers(sdxl.network(candidate), theirs, candidate)
    for name, error in errors.items():
        assert error < (4e-4 if "float8" in str(candidate.layers[name].inputs) else 5e-6), (name, chosen.get(name))
    with_codes = {name: layer for name, layer in candidate.layers.items() if layer.inputs and name in chosen}
    plain = replace(candidate, layers={key: replace(layer, inputs=None) for key, layer in candidate.layers.items()})
    without = sdxl.error_of_layers(sdxl.network(plain), theirs, plain)
    largest = {kind: max(without[name] for name in with_codes if chosen[name] == kind) for kind in AGAIN}
    assert min(largest.values()) > 2e-3, largest
    assert all((layer.branch is not None) == ("use_svd" in AGAIN[chosen[name]]) for name, layer in with_codes.items())


REFUSED = {
    "use_quantized_matmul with a convolution": {"weights_dtype": "int8", "use_quantized_matmul_conv": True},
    "inputs of float16": {"weights_dtype": "int8", "use_quantized_matmul": True, "quantized_matmul_dtype": "float16"},
    # which SDNQ 0.2.8 itself cannot compute once it is saved and loaded again
    "weights of float8_e5m2": {"weights_dtype": "float8_e5m2", "use_quantized_matmul": True},
    "weights of float7_e2m4fn": {"weights_dtype": "float7_e2m4fn", "use_quantized_matmul": True, "group_size": -1},
    "scale_dtype=int8": {"weights_dtype": "int4", "scale_dtype": "int8"},
    "use_codebook": {"weights_dtype": "uint4", "use_codebook": True, "codebook_steps": 2},
    "integers or floats of 2 to 8 bits": {"weights_dtype": "int9"},
}


@consumer
@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_decoded_is_refused_by_name(words, saved, sdxl):
    with pytest.raises(ConfigError, match=words):
        read(saved(**REFUSED[words]), sdxl.checkpoint)


@consumer
def test_patterns_are_those_that_sdnq_takes(sdnq, tmp_path):
    names = ["a.to_q.weight", "a.to_q_extra.weight", "up.0.ff.net.0.proj.weight", "proj.weight", "upside.weight"]
    patterns = "to_q a.to_q.weight .up up.*.ff.* *proj* * a.*weight a.to weight *.net x*".split()
    for name, pattern in product(names, patterns):
        expected = sdnq.utils.check_param_name_in(name, [pattern]) is not None
        assert matches(tmp_path, pattern, name) == expected, (name, pattern)


def test_a_regular_expression_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="regular expression"):
        matches(tmp_path, "(a*)*b", "a.weight")


@pytest.mark.parametrize(
    "wanted, name, expected",
    [
        ("minimum_4bit", "int3", "uint4"), ("5bits", "int3", "int5"), ("minimum_uint6", "int5", "uint6"),
        ("minimum-int8", "uint4", "int8"), ("minimum_4bit", "int4", "int4"), ("Float8_E4M3FN", "int2", "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_a_least_width_is_unsigned_up_to_four_bits(tmp_path, wanted, name, expected):
    """The answers of SDNQ 0.2.8's ``get_minimum_dtype``, by hand."""
    assert at_least_as_wide(tmp_path, wanted, name) == expected


def test_small_floats_are_ieee():
    assert torch.equal(small_floats(2, 1, False)[:8], torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]))
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes.isfinite()
    assert torch.equal(small_floats(4, 3, False)[finite], codes[finite]) and finite.sum() == 254


@pytest.mark.parametrize("size", [4, 8, 16, 256])
def test_rotations_are_undone_by_themselves(size):
    assert torch.allclose(hadamard(size) @ hadamard(size), torch.eye(size), atol=1e-6)


@consumer
def test_fp16_keeps_every_scale_of_sdnq(sdnq, written_once):
    """diffusers casts scales to the dtype that it is told to load: ours are fp16's numbers, and not bfloat16's."""
    case, assignment, folder = written_once(READER, "sd21", "int8", activation=None, alpha=None)
    name = next(name for name, layer in assignment.items() if layer.format)
    networks = (case.loaded(folder, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    expected, half, brain = (network.get_submodule(name).scale for network in networks)
    assert torch.equal(half, expected) and not torch.equal(brain, expected)
