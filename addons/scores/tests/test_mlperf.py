import re

import pytest

from sd_quant_scores import mlperf
from sd_quant_scores.mlperf import PROTOCOL, mlperf_window

pytestmark = pytest.mark.commit


@pytest.mark.parametrize(
    ("score", "distance", "passes"),
    [
        (31.75, 23.5, True),
        (mlperf.CLIP[0], mlperf.FID[1], True),
        (31.686, 23.5, False),
        (31.75, 23.9501, False),
        (31.82, 22.9, False),
    ],
)
def test_both_have_to_be_in_mlperfs_window(score, distance, passes):
    found = mlperf_window(score, distance, PROTOCOL)
    assert found["passes"] is passes and (found["reason"] is None) is passes


def test_the_window_is_what_mlperf_makes_of_its_reference():
    assert mlperf.CLIP == pytest.approx([31.74981837 * factor for factor in (0.998, 1.002)], abs=1e-8)
    assert mlperf.FID == pytest.approx([23.48046692 * factor for factor in (0.98, 1.02)], abs=1e-8)


@pytest.mark.parametrize("name", PROTOCOL)
def test_another_protocol_neither_passes_nor_fails(name):
    found = mlperf_window(31.75, 23.5, PROTOCOL | {name: None})
    assert found["passes"] is None
    assert found["reason"].startswith(f"not MLPerf's protocol: {name} ") and "; " not in found["reason"]
    without = {other: value for other, value in PROTOCOL.items() if other != name}
    assert mlperf_window(31.75, 23.5, without) == found


def test_without_a_number_nothing_passes():
    assert mlperf_window(None, 23.5, PROTOCOL) == {"passes": None, "reason": "there is no CLIP score"}
    assert mlperf_window(None, None, PROTOCOL)["reason"] == "there is no CLIP score and no FID"


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
