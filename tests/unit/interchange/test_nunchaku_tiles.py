"""Each layout against flat formulas, and against the packers of cache-dit and auto-round, bit for bit."""

import pytest
import torch

from sd_quant.interchange import nunchaku_tiles as tiles

from .tile_formulas import COLUMN, GROUP, MICRO, RANK, ROW, K, N, R, awq, in_sixteens, micro_scale, scale, word

pytestmark = pytest.mark.commit


def numbers(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns).view(rows, columns)


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


@pytest.mark.consumer
def test_auto_round_packs_awq_alike(auto_round):
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ours = tiles.packed(tiles.awq_codes(N, K), codes).view(torch.int32).view(N // 4, K // 2)
    assert torch.equal(ours, auto_round("svdquant_w4a16")._pack_code_rows(codes.to(torch.int32)))
