"""Statistics of votes against scipy, scikit-learn and published tables."""

import random

import pytest
from scipy import stats

from sd_quant_votes import statistics
from sd_quant_votes.statistics import Vote, exact, preference, votes_needed

pytestmark = pytest.mark.commit


def votes_of(wins: int, losses: int, undecided: int = 0, voter: str = "a") -> list[Vote]:
    answers = [1] * wins + [-1] * losses + [0] * undecided
    return [Vote(voter, f"prompt {index}", answer) for index, answer in enumerate(answers)]


@pytest.mark.parametrize(("wins", "losses"), [(44, 20), (8, 0), (0, 5), (32, 32)])
def test_one_voters_interval_is_clopper_and_pearsons(wins, losses):
    """By the quantiles of beta, which define it."""
    found = preference(votes_of(wins, losses))
    low = stats.beta.ppf(0.025, wins, losses + 1) if wins else 0
    high = stats.beta.ppf(0.975, wins + 1, losses) if losses else 1
    assert found.share == pytest.approx((wins / (wins + losses), low, high), abs=1e-9)
    assert found.p == pytest.approx(min(1, 2 * stats.binom.cdf(min(wins, losses), wins + losses, 0.5)))


def test_who_cannot_tell_decides_nothing():
    some, all_of = preference(votes_of(14, 2, 48)), preference(votes_of(14, 2))
    assert (some.share, some.p) == (all_of.share, all_of.p) and (some.neither, some.votes) == (48, 64)
    nobody = preference(votes_of(0, 0, 3))
    assert nobody.share is None and nobody.p is None and nobody.votes == 3
    assert preference([]).votes == 0


@pytest.mark.parametrize("voters", [range(5), 5 * "a"])
def test_voters_and_prompts_are_resampled(voters):
    """All five agree on each prompt, or one votes five times: there are 16 answers, not 80.

    And where two always prefer the first and three the second, 320 votes are no 320 independent ones.
    """
    votes = [Vote(voter, prompt, 1 if prompt < 11 else -1) for voter in voters for prompt in range(16)]
    found, sixteen = preference(votes).share, exact(11, 16)[0]
    assert found.low == pytest.approx(sixteen.low, abs=0.06) and found.high == pytest.approx(sixteen.high, abs=0.06)
    votes = [Vote(voter, prompt, 1 if voter < 3 else -1) for voter in range(5) for prompt in range(64)]
    found, naive = preference(votes), exact(3 * 64, 5 * 64)[0]
    assert found.share.value == 0.6 == naive.value and naive.low > 0.5
    assert found.share.low < 0.3 and found.share.high > 0.9 and found.p > 0.3
    agreed = preference([Vote(voter, prompt, 1) for voter in range(3) for prompt in range(4)])
    assert agreed[3:] == exact(12, 12) and 0.5 < agreed.share.low < 0.8, "some doubt is left, which no resampling has"


@pytest.mark.slow
def test_the_crossed_interval_holds_the_truth(monkeypatch):
    """Of voters and prompts that both vary, in as many trials as it states, or more."""
    monkeypatch.setattr(statistics, "RESAMPLES", 999)
    chance = random.Random(0)
    held = 0
    for _ in range(200):
        tastes = [chance.gauss(0.5, 0.5) for _ in range(12)]
        differences = [chance.gauss(0, 0.5) for _ in range(32)]
        votes = [
            Vote(voter, prompt, 1 if taste + difference + chance.gauss(0, 1) > 0 else -1)
            for voter, taste in enumerate(tastes)
            for prompt, difference in enumerate(differences)
        ]
        held += preference(votes).share.holds(stats.norm.cdf(0.5 / 1.5**0.5))
    assert held >= 184  # 92 %; nominally 190, with a standard deviation of 3


@pytest.mark.parametrize(
    ("share", "alpha", "needed"),
    [(0.60, 0.05, 169), (0.65, 0.05, 76), (0.70, 0.05, 42), (0.75, 0.05, 28), (0.30, 0.05, 42), (0.55, 0.05, 654),
     (0.60, 0.05 / 11, 307), (0.65, 0.05 / 11, 138), (0.70, 0.05 / 11, 76), (0.75, 0.05 / 11, 50)],
)  # fmt: skip
def test_the_votes_that_would_tell(share, alpha, needed):
    """Tables of the one-sided exact test; and from there on by scipy, but not one vote earlier."""
    assert votes_needed(share, alpha) == needed

    def power(votes: int) -> float:
        wins = next(
            w for w in range(votes + 2) if w > votes or stats.binomtest(w, votes, alternative="greater").pvalue <= alpha
        )
        return stats.binom.sf(wins - 1, votes, max(share, 1 - share))

    if needed < 100:
        assert power(needed - 1) < 0.8 <= min(map(power, range(needed, needed + 20)))
    assert votes_needed(0.5) is None and votes_needed(0.501) is None and votes_needed(1.0) == 5
