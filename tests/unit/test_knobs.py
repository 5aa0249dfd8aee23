"""Names that may have been meant."""

import pytest
import torch

from sd_quant.knobs import SEED, SEEDS, near, nearest, seed_of

pytestmark = pytest.mark.commit

KNOBS = [
    "quant_level", "alpha", "calib_size", "quantize.n_steps", "quantize.batch_size", "quantize.seed", "infer.steps",
    "infer.batch_size", "infer.prompts", "infer.seed", "model.prompts", "model.parts", "trt.sizes", "unet_xl",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("quant_levle", ["quant_level"]),
        ("steps", ["infer.steps"]),  # without its section; and quantize.n_steps is less like it
        ("infer.n_steps", ["quantize.n_steps"]),
        ("quantize.n_step", ["quantize.n_steps"]),
        ("infr.seed", ["infer.seed", "quantize.seed"]),
        ("quantize.batchsize", ["quantize.batch_size", "infer.batch_size"]),  # its own section first
        ("promts", ["infer.prompts", "model.prompts"]),  # and not model.parts
        ("calib", ["calib_size"]),  # a part of it
        ("quant", ["quant_level"]),
        ("to", []),
        ("guidance", []),
    ],
)
def test_only_what_can_be_meant_is_near(name, meant):
    assert nearest(name, KNOBS) == meant


def test_what_is_another_commands_is_not_near():
    """infer.py has unet_xl, and quant_level is of quantize.py."""
    assert nearest("quant_level", [name for name in KNOBS if name != "quant_level"]) == []
    assert nearest("int4", ["int8", "int4_w4a4"]) == ["int4_w4a4"]


def test_few_names_are_listed_and_many_are_not():
    assert near("noise", ["b", "a"]) == "known are a, b"
    assert near("noise", KNOBS * 2) == "none is like it; --help lists all"
    assert near("alhpa", KNOBS) == "did you mean alpha?"


def test_the_seed_behind_the_last_is_the_first():
    assert [seed_of(7, 0), seed_of(2**32, 1), seed_of(SEEDS - 1, 0)] == [7, 2**32 + 1, SEEDS - 1]
    assert [seed_of(SEEDS - 1, number) for number in (1, 2, SEEDS)] == [0, 1, SEEDS - 1]
    for seed in (0, 2**32 + 1, 2**63 - 1, SEEDS - 1):  # as torch takes and keeps it
        assert SEED.holds(seed) and torch.Generator().manual_seed(seed).initial_seed() == seed
    assert not SEED.holds(-1) and not SEED.holds(SEEDS)
