import diffusers
import pytest
import torch

from sd_quant.inference.tiles import decode
from sd_quant.models.parts import VaePart

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(("height", "width"), [(20, 12), (8, 8), (9, 30)])
def test_tiles_are_those_of_diffusers(height, width):
    torch.manual_seed(0)
    widths, kinds = (8, 8, 8, 8), ["UpDecoderBlock2D"] * 4
    vae = diffusers.AutoencoderKL(
        block_out_channels=widths, norm_num_groups=4, sample_size=64, up_block_types=kinds,
        down_block_types=["DownEncoderBlock2D"] * 4,
    ).eval()  # fmt: skip
    vae.enable_tiling()
    part, sizes = VaePart(vae), []

    def decoder(z):
        sizes.append(tuple(z.shape[2:]))
        return part(z)

    z = torch.randn(2, 4, height, width)
    with torch.no_grad():
        expected = vae.decode(z).sample
        torch.testing.assert_close(decode(decoder, z, 64), expected, rtol=0, atol=1e-5)
        assert max(map(max, sizes)) == 8
        whole = decoder(z)
    assert sizes[-1] == (height, width)
    assert ((whole - expected).abs().max() > 1e-3) == (max(height, width) > 8)
