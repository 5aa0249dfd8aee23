"""Which candidates are worth their bits, and what a report says of each."""

import pytest

from sd_quant.report.candidates import candidate_tables, judgement, rule, standings, verdicts
from sd_quant.report.rebuild import rebuild
from sd_quant.report.summary import read_sweep, sweep_table

from .sweeps import change_record, write_job, write_plan

pytestmark = pytest.mark.commit

PROMPTS = ("a red apple", "a pear", "a plum", "a cherry")
JUDGED = {
    "name": "x", "path": "x", "reader": "gguf", "maker": "GGUF", "stored_bytes": 4e6, "network_error": 0.0123,
    "formats": {"Q4_0": 90, "high precision": 10}, "inputs": {"high precision": 100},
    "hurting": [
        {"name": "conv_in", "role": "excluded", "format": "Q4_0", "output_error": 0.2, "network_error": 0.1},
        {"name": "conv_out", "role": "excluded", "format": "Q4_0", "output_error": 0.3, "network_error": None},
    ],
    "runtime": {"reason": "no library that opens it computes on this machine"},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """``folder(a=(decibels, bits, more))``: candidates as ``judge.py`` leaves them."""

    def write(**candidates):
        for name, (decibels, bits, *more) in candidates.items():
            entry = JUDGED | {"bits": bits} | (more[0] if more else {})
            path = write_job(tmp_path / name, decibels, prompts=PROMPTS)
            change_record(path, {"latency": {}, "sizes_bytes": {}, "judged": entry})
        return write_plan(
            tmp_path, {}, candidates=[{"name": name, "varied": {"candidate": name}} for name in candidates]
        )

    return write


def test_a_candidate_is_worth_its_bits_if_no_smaller_one_is_as_close(folder):
    sweep = folder(large=(40.0, 8.5), small=(30.0, 4.5), middle=(29.0, 5.5))
    assert judgement(sweep) == (
        "Worth their bits: small (30.0 dB at 4.50 bits a weight) and large (40.0 dB at 8.50 bits a weight). "
        "Beaten by one that is no larger: middle."
    )
    (_, words) = verdicts(standings(sweep), 0.95)["middle"]
    assert words.startswith("beaten by small, which is no larger, by 1.0 dB (")


@pytest.mark.parametrize(
    ("fused", "other", "expected"),
    [
        (33.0, {}, "b with the LoRAs fused is closer than a with them beside it, by 3.0 dB ("),
        (28.0, {}, "a with the LoRAs beside it is closer than b with them fused, by 2.0 dB ("),
        (30.0, {}, "a with the LoRAs beside it and b with them fused cannot be told apart."),
        (33.0, {"formats": {"Q8_0": 100}}, None),
    ],
)
def test_which_is_closer_with_the_loras_is_said_of_those_with_the_same_formats(folder, fused, other, expected):
    sweep = folder(a=(30.0, 4.5, {"loras": "beside"}), b=(fused, 4.6, {"loras": "fused"} | other))
    assert expected in judgement(sweep) if expected else "LoRAs" not in judgement(sweep)
    assert "; LoRAs beside" in str(candidate_tables(sweep)[0])


def test_what_a_few_images_cannot_tell_apart_is_not_decided_but_with_less_confidence(folder, tmp_path):
    """The larger one is closer in all four images, in most of them hardly."""
    folder(small=(30.0, 4.5), large=(30.1, 8.5))
    change_record(tmp_path / "large", {"fidelity.psnr.values": [31.0, 30.4, 30.1, 29.9]})
    sweep = read_sweep(tmp_path)
    assert judgement(sweep) == (
        "Worth its bits: small (30.0 dB at 4.50 bits a weight). On 4 images not to be told apart from a smaller one: "
        "large."
    )
    assert verdicts(standings(sweep), 0.5)["large"][0] == "worth its bits"


@pytest.mark.slow
def test_a_folder_of_candidates_has_no_recipe_to_recommend_and_shows_all_the_rest(folder):
    figures = {"agreement": {"values": [None, 60.0]}, "ms": 20.0, "speedup": 0.5, "speedup_interval": [0.45, 0.55]}
    sweep = folder(a=(30.0, 4.5), b=(35.0, 8.5, {"runtime": {"name": "SDNQ", **figures}}))
    page = rebuild(sweep.directory).read_text()
    for shown in ("2 candidates", "Worth their bits", "What is in each candidate", "Which layers hurt", "conv_in",
                  "90 Q4_0 of 100", "SDNQ", "60.0 dB", "0.50x (0.45 to 0.55)", "8.50",
                  "no library that opens it computes", rule(sweep)[1:]):  # fmt: skip
        assert shown in page, shown
    table = sweep_table(sweep)
    assert "bits a weight" in table and "4.50" in table
    contents, hurting = candidate_tables(sweep)
    assert [line[0] for line in contents.rows] == ["a", "b"] and hurting.rows[0][-1] == "10 %"
