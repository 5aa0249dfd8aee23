"""Statistics of pairwise votes: preference, and the votes needed for a significant preference.

- "Cannot tell" is dropped (the sign test; Dixon & Mood, Journal of the American Statistical Association 41, 1946): the
  preference is a share of the decided votes; the undecided votes are counted separately. Alternative not taken: to
  split undecided votes half and half, which is not binomial, and hides 14 against 2 behind 48 equal pairs.
- One voter and one vote a prompt: the exact binomial interval (Clopper & Pearson, Biometrika 26, 1934).
- Several voters see the same prompts, so votes are not independent. Voters and prompts are resampled independently
  (the pigeonhole bootstrap; Owen, Annals of Applied Statistics 1, 2007). The interval is the hull of the bootstrap's
  and the exact one, because a bootstrap of unanimous votes has no width.
- Several comparisons: Holm (Scandinavian Journal of Statistics 6, 1979).
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from sd_quant.metrics.intervals import Interval

RESAMPLES = 9_999
MOST = 10_000  # votes of one comparison that are suggested at most


class Vote(NamedTuple):
    voter: Hashable
    prompt: Hashable
    answer: int  # 1 for the second of the two that are compared, -1 for the first, 0 for neither


class Preference(NamedTuple):
    """Preference between two images; ``share`` of decided votes for the second; None, like ``p``, if nobody decided."""

    first: int
    second: int
    neither: int
    share: Interval | None
    p: float | None  # two-sided, of no preference

    @property
    def votes(self) -> int:
        return self.first + self.second + self.neither


def preference(votes: Sequence[Vote], confidence: float = 0.95) -> Preference:
    """Compute the preference for the second of two images, with the interval of its share and its p-value."""
    counts = Counter(vote.answer for vote in votes)
    first, second = counts[-1], counts[1]
    decided = [vote for vote in votes if vote.answer]
    if not decided:
        return Preference(0, 0, counts[0], None, None)
    share, p = exact(second, len(decided), confidence)
    voters, prompts = ({vote[place] for vote in decided} for place in (0, 1))
    if len(voters) > 1 or len(prompts) < len(decided):
        crossed, p_crossed = resampled(decided, confidence)
        share = Interval(share.value, min(share.low, crossed.low), max(share.high, crossed.high))
        p = max(p, p_crossed)
    return Preference(first, second, counts[0], share, p)


def exact(wins: int, votes: int, confidence: float = 0.95) -> tuple[Interval, float]:
    """Compute the share of wins with its Clopper-Pearson interval, and the two-sided p-value of a share of one half."""
    from scipy.stats import binomtest  # late: half a second

    test = binomtest(wins, votes)
    ends = test.proportion_ci(confidence, method="exact")
    return Interval(wins / votes, float(ends.low), float(ends.high)), float(test.pvalue)


def resampled(votes: Sequence[Vote], confidence: float = 0.95) -> tuple[Interval, float]:
    """Compute the share of wins of decided votes, and the p-value of one half, by resampling voters and prompts."""
    voters, prompts, _ = zip(*votes, strict=True)
    places = [{name: place for place, name in enumerate(dict.fromkeys(names))} for names in (voters, prompts)]
    cast = np.zeros([len(names) for names in places])
    won = np.zeros_like(cast)
    for voter, prompt, answer in votes:
        at = places[0][voter], places[1][prompt]
        cast[at] += 1
        won[at] += answer > 0
    generator = np.random.default_rng(0)
    drawn = [generator.multinomial(size, np.full(size, 1 / size), RESAMPLES) for size in cast.shape]
    wins, all_of = (((drawn[0] @ table) * drawn[1]).sum(axis=1) for table in (won, cast))
    shares = wins[all_of > 0] / all_of[all_of > 0]
    low, high = np.quantile(shares, [(1 - confidence) / 2, (1 + confidence) / 2])
    beyond = min((shares <= 0.5).sum(), (shares >= 0.5).sum())
    p = min(1.0, 2 * (1 + int(beyond)) / (1 + len(shares)))
    return Interval(float(won.sum() / cast.sum()), float(low), float(high)), p


def votes_needed(share: float, alpha: float = 0.05, power: float = 0.8) -> int | None:
    """Return the fewest decided votes that give the exact one-sided test of one half this power; None above MOST."""
    from scipy.stats import binom  # late: half a second

    votes = np.arange(1, MOST + 1)
    wins = binom.isf(alpha, votes, 0.5) + 1
    weak = np.flatnonzero(binom.sf(wins - 1, votes, max(share, 1 - share)) < power)
    last = int(votes[weak[-1]]) if len(weak) else 0
    return last + 1 if last < MOST else None
