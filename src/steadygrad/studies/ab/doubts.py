"""Doubts about pairs of runs: runs that are one run, repeated, and differences that say nothing."""

from typing import Any, NamedTuple

import numpy as np

from steadygrad.studies.paired import Course, Floats, compare


class Verdicts(NamedTuple):
    """Verdicts on a comparison after each pair: arrays of the shape ``(*, pairs)``.

    One is ``decided`` where the interval excludes zero, or the difference is ``negligible``: the
    interval lies within the smallest effect. None is where A or B is one run, ``repeated``, which
    tells of each of the two.
    """

    course: Course
    negligible: Any
    decided: Any
    repeated: Any


def judge(a: Floats, b: Floats, alpha: float, smallest: float = 0.0) -> Verdicts:
    """Compares the metrics of A and B, NaN of a failed run.

    Equal differences say something of a metric that takes no value twice, but nothing of one whose
    seed is not used, and little of an accuracy on some samples. Equal metrics tell once a change in
    a tenth of the seeds would have shown with the probability 1 - ``alpha``, after 29 pairs.
    """
    course, n = compare(a, b, alpha), np.arange(1, 1 + a.shape[-1])
    mean, half, failed = course
    varies, rare = values_of(a) == n, 0.9**n <= alpha
    repeated = ~failed & np.stack([is_one_run(a, b), is_one_run(b, a)])
    telling = failed | (~repeated.any(0) & ((half > 0) | (varies & (rare | (mean != 0)))))
    negligible = telling & ~failed & (np.abs(mean) + half <= smallest)
    decided = negligible | (telling & (np.abs(mean) > half))
    return Verdicts(course, negligible, decided, repeated)


def values_of(metrics: Floats) -> Any:
    """The number of different values after each run."""
    known = np.tri(metrics.shape[-1], k=-1, dtype=bool)
    again = (metrics[..., :, None] == metrics[..., None, :]) & known
    return (~again.any(-1)).cumsum(-1)


def typical_step(metrics: Floats) -> Any:
    """Median difference of a run from the one before, after each; one far off moves it little."""
    steps = np.abs(np.diff(metrics))
    medians = [np.median(steps[..., :n], -1)[..., None] for n in range(1, metrics.shape[-1])]
    return np.concatenate([0 * metrics[..., :1], *medians], -1)


def is_one_run(metrics: Floats, others: Floats) -> Any:
    """Whether metrics are those of one or two runs, repeated, but for the rounding of a GPU.

    They hardly vary where ``others``, on the same seeds, do; after each run.
    """
    n, shifted = np.arange(1.0, 1 + metrics.shape[-1]), metrics - metrics[..., :1]
    variance = (shifted**2).cumsum(-1) / n - (shifted.cumsum(-1) / n) ** 2
    few = (values_of(metrics) <= 2) & (values_of(others) >= 4)
    return few | (np.sqrt(np.maximum(variance, 0.0)) <= typical_step(others) / 100)


def are_one_run(a: Floats, b: Floats) -> bool:
    """Whether A and B have the same metrics, but for rounding, on three seeds or more."""
    return len(a) > 2 and bool(np.abs(b - a).max() <= typical_step(a)[-1] / 1000)
