r"""A test of paired differences that stays valid however often one looks.

One looks after 3, 4, 6, 8, 12, ... pairs. At each look Student's interval of the mean difference
has the confidence :math:`1 - 0.0078`. All ten intervals of one comparison then hold together in
95 % of studies: 5.0 % of 200,000 simulated comparisons of normal differences had one that did not.
The share depends on neither mean nor variance, since Student's ratio does not.

References:
    | Group Sequential Methods in the Design and Analysis of Clinical Trials (Pocock, 1977)
    | https://doi.org/10.1093/biomet/64.2.191
"""

from dataclasses import dataclass

import numpy as np
from scipy import special

from steadygrad.studies.statistics import Floats

LOOKS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEVEL = 0.0078


def looked(pairs: int) -> int:
    """Pairs of the last look; 0 before the first."""
    return max((look for look in LOOKS if look <= pairs), default=0)


def next_look(pairs: int, most: int = LOOKS[-1]) -> int:
    """Pairs of the next look, at most so many; 0 where there is none."""
    return next((look for look in LOOKS if pairs < look <= most), 0)


@dataclass(frozen=True)
class Prior:
    """A variance of the differences that comes from elsewhere.

    ``freedom``: the degrees of freedom that it counts for.

    References:
        | Linear Models and Empirical Bayes Methods for Assessing Differential Expression
        | (Smyth, 2004), https://doi.org/10.2202/1544-6115.1027
    """

    variance: float = 0.0
    freedom: float = 0.0

    def limit(self, pairs: int) -> float:
        """Standard errors from the mean to the interval's ends, at a look."""
        return -float(special.stdtrit(pairs - 1 + self.freedom, LEVEL / 2))

    def spread(self, differences: Floats) -> Floats:
        """Standard deviation of one difference; shape ``(*)`` for differences ``(*, pairs)``."""
        own = differences.shape[-1] - 1
        known = own * differences.var(-1, ddof=1) + self.freedom * self.variance
        return np.asarray(np.sqrt(known / (own + self.freedom)))


NOTHING = Prior()


def interval(differences: Floats, prior: Prior = NOTHING) -> tuple[Floats, Floats, Floats]:
    """Means of differences of shape ``(*, pairs)`` at a look, and the ends of their intervals."""
    pairs = differences.shape[-1]
    mean = differences.mean(-1)
    half = prior.limit(pairs) * prior.spread(differences) / np.sqrt(pairs)
    return mean, np.asarray(mean - half), np.asarray(mean + half)
