"""Each layout against flat formulas, and against the packers of cache-dit and auto-round, bit for bit."""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sd_quant.interchange import nunchaku_tiles as tiles

pytestmark = pytest.mark.commit

N, K, R = 256, 384, 48
ROW, COLUMN, GROUP, MICRO, RANK = (torch.arange(size) for size in (N, K, K // 64, K // 16, R))


def numbers(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns).view(rows, columns)


def word(n, k, columns: int = K):
    """The place of an int32 of eight codes."""
    place = ((n // 128 * (columns // 64) + k // 64) * 8 + n % 128 // 16) * 8 + n % 8
    return (place * 4 + k % 32 // 8) * 4 + n % 16 // 8 * 2 + k % 64 // 32


def in_sixteens(outer, r, inner_outer, inner, rank: int = R):
    """The place of a number of the branch, whose tiles are 16 by 16."""
    place = ((outer // 16 * (rank // 16) + r // 16) * 8 + inner_outer % 8) * 4 + inner % 8 // 2
    return ((place * 2 + inner_outer % 16 // 8) * 2 + inner % 16 // 8) * 2 + inner % 2


def scale(n, g, groups: int = K // 64):
    """The place of a scale of INT4, and of a number of a vector, whose group is one."""
    place = ((n // 128 * groups + g) * 8 + n % 128 // 16) * 4 + n % 8 // 2
    return (place * 2 + n % 16 // 8) * 2 + n % 2


def micro_scale(n, g, columns: int = K):
    place = ((n // 128 * (columns // 64) + g // 4) * 8 + n % 8) * 4 + n % 32 // 8
    return (place * 4 + n % 128 // 32) * 4 + g % 4


def awq(n, k):
    """The place of a code: an int16 has four."""
    place = (n // 4 * (K // 64) + k // 64) * 4 + n % 4
    return ((place * 2 + k % 64 // 32) * 8 + k % 8) * 4 + k % 32 // 8


PLACES = {
    "codes": (tiles.codes(N, K), 8 * word(ROW[:, None], COLUMN) + COLUMN % 8),
    "scales": (tiles.scales(N, K // 64), scale(ROW[:, None], GROUP)),
    "micro_scales": (tiles.micro_scales(N, K // 16), micro_scale(ROW[:, None], MICRO)),
    "down": (tiles.down(R, K), in_sixteens(COLUMN, RANK[:, None], RANK[:, None], COLUMN)),
    "up": (tiles.up(N, R), in_sixteens(ROW[:, None], RANK, ROW[:, None], RANK)),
    "awq": (tiles.awq_codes(N, K), awq(ROW[:, None], COLUMN)),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_number_lies_where_the_formula_says(name):
    layout, places = PLACES[name]
    matrix = numbers(*layout.shape)
    stored = layout.tiled(matrix)
    assert torch.equal(stored[places], matrix)
    assert torch.equal(layout.natural(stored), matrix)


def test_codes_are_two_to_a_byte_and_come_back():
    codes = torch.randint(-8, 8, (N, K), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    layout = tiles.codes(N, K)
    stored = tiles.packed(layout, codes)
    assert stored.dtype == torch.uint8 and len(stored) == N * K // 2
    assert torch.equal(tiles.unpacked(layout, stored.view(torch.int32)), codes.view(torch.uint8) & 15)


def test_vectors_are_scales_of_one_group():
    vector = torch.randn(N, generator=torch.Generator().manual_seed(0))
    stored = tiles.vector_in_tiles(vector)
    assert not torch.equal(stored, vector)
    assert torch.equal(tiles.vector_from_tiles(stored), vector)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32).half()


@pytest.mark.consumer
def test_cache_dit_packs_alike():
    pytest.importorskip("cache_dit")
    from cache_dit.quantization.svdquant.packing import SVDQWeightPacker

    packer = SVDQWeightPacker(bits=4)
    codes = torch.randint(-8, 8, (N, K), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    ours = tiles.packed(tiles.codes(N, K), codes.to(torch.int8)).view(torch.int8).view(N, K // 2)
    assert torch.equal(ours, packer.pack_weight(codes))
    scales = random(N, K // 64)
    theirs = packer.pack_scale(packer.pad_scale(scales.view(N, 1, -1, 1), 64), 64)
    assert torch.equal(tiles.scales(N, K // 64).tiled(scales), theirs.flatten())
    vector = random(N)
    theirs = packer.pack_scale(packer.pad_scale(vector.view(-1, 1), -1), -1)
    assert torch.equal(tiles.vector_in_tiles(vector), theirs.flatten())
    micro = random(N, K // 16).abs()
    theirs = packer.pack_micro_scale(packer.pad_scale(micro.view(N, 1, -1, 1), 16), 16)
    ours = tiles.micro_scales(N, K // 16).tiled(micro.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(ours, theirs.view(torch.uint8).flatten())
    for layout, matrix, down in ((tiles.down(R, K), random(R, K), True), (tiles.up(N, R), random(N, R), False)):
        theirs = packer.pack_lowrank_weight(packer.pad_lowrank_weight(matrix, down=down), down=down)
        assert torch.equal(layout.tiled(matrix), theirs.flatten())


@pytest.fixture
def auto_round(monkeypatch):
    """Returns a file of auto-round's as a module. The package itself would import transformers' and a dozen more."""
    package = find_spec("auto_round")
    if package is None:
        pytest.skip("auto_round is not installed")
    quantizers = SimpleNamespace(quant_element=None, quant_mx_rceil=None)  # which packing does not call
    for name in ("auto_round", "auto_round.data_type"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "auto_round.data_type.mxfp", quantizers)

    def opened(name: str) -> ModuleType:
        spec = spec_from_file_location(name, Path(package.origin).parent / "export" / f"{name}.py")
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return opened


@pytest.mark.consumer
def test_auto_round_unpacks_what_is_packed(auto_round):
    theirs = auto_round("svdquant_mxfp4")
    codes = torch.randint(-8, 8, (N, K), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    stored = tiles.packed(tiles.codes(N, K), codes).view(torch.int8).view(N, K // 2)
    assert torch.equal(theirs.NunchakuMXFP4Packer()._unpack_weight_codes(stored), codes.view(torch.uint8) & 15)
    for layout, down, shape in ((tiles.down(R, K), True, (K, R)), (tiles.up(N, R), False, (N, R))):
        matrix = random(*layout.shape)
        assert torch.equal(theirs.unpack_lowrank_weight(layout.tiled(matrix).view(shape), down), matrix)


@pytest.mark.consumer
def test_auto_round_packs_awq_alike(auto_round):
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ours = tiles.packed(tiles.awq_codes(N, K), codes).view(torch.int32).view(N // 4, K // 2)
    assert torch.equal(ours, auto_round("svdquant_w4a16")._pack_code_rows(codes.to(torch.int32)))
