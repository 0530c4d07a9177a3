"""The findings of a study: verdicts on pairs of runs, doubts about them, and the summary."""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from scipy import special

from steadygrad.studies import paired
from steadygrad.studies.ab import words
from steadygrad.studies.ab.schema import ITSELF, MOST, Arm, Comparison, Doubt, Header, Summary
from steadygrad.studies.folder import Results
from steadygrad.studies.paired import Course, Evidence, Floats
from steadygrad.studies.schema import Training


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
    course, n = paired.compare(a, b, alpha), np.arange(1, 1 + a.shape[-1])
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


def summarize(header: Header, results: Results, status: str) -> Summary:
    """The summary: numbers, findings and words."""
    changes, count = Changes(header, results), len(header.plan.arms)
    return Summary(
        study="ab",
        status=status,
        task=header.task.name,
        sample=header.task.sample,
        findings=tuple(map(changes.comparison, range(1, count))),
        arms=tuple(map(changes.arm, range(count))),
    ).worded(words)


class Changes(Evidence):
    """The runs so far; ``ahead`` pairs are begun together after the first possible verdict."""

    def __init__(self, header: Header, results: Results) -> None:
        super().__init__(header, results)
        arms = len(self.plan.arms)
        names = [f"B{arm}" for arm in range(1, arms)] if arms > 2 else ["B"]
        self.alpha = self.settings.alpha / (arms - 1)  # each B's, by Bonferroni
        self.is_itself = len({*self.plan.arms}) == 1
        self.names = ("A", *(["A again"] if self.is_itself else names))
        self.pairs = self.settings.pairs or (ITSELF if self.is_itself else MOST)
        self.ahead = max(1, header.runtime.workers // arms)

    def runs(self, arm: int) -> Mapping[int, Training]:
        """The runs of an arm, by pair."""
        return self.trainings(arm, self.plan.samples)

    def metrics(self, *arms: int) -> Floats:
        """Metrics of arms, NaN of a failed run, in their whole pairs before the first gap."""
        return paired.losses_of(*map(self.runs, arms))

    def judged(self, arm: int) -> Verdicts:
        """A B against A, after each pair; A against itself is never decided.

        A comparison ends without a verdict, too, after as many runs that are one, repeated.
        """
        a, b = self.metrics(0, arm)
        found = judge(a, b, self.alpha, self.settings.smallest_effect)
        ended = found.decided | (found.repeated.any(0) & (np.arange(len(a)) >= ITSELF - 1))
        return found._replace(decided=ended & (not self.is_itself))

    def doubts(self, arm: int, pairs: int) -> Iterator[tuple[Doubt, list[int]]]:
        """Why no verdict on a B would be one after so many pairs, and the arms in question."""
        both, is_one = (0, arm), self.judged(arm).repeated[:, pairs - 1] & (pairs > 2)
        yield "state", [one for one in both if self._has_state(one, pairs)]
        yield "seed", [one for one, is_so in zip(both, is_one, strict=True) if is_so]
        what = self.plan.arms
        for one, other in product(both, range(len(what))):
            if self.plan.samples or what[one] == what[other]:
                continue
            a, b = self.metrics(one, other)[:, :pairs]
            # But for rounding, on three seeds or more.
            if len(a) > 2 and np.abs(b - a).max() <= typical_step(a)[-1] / 1000:
                yield "shared", sorted((one, other))

    def _has_state(self, arm: int, pairs: int) -> bool:
        """Whether a function, called with the first pair's seed once more, gave another metric."""
        own = self.metrics(arm)[0, :pairs]
        again = [run.again for run in self.runs(arm).values() if run.again is not None]
        # Rounding, as of a GPU, is less than this part of the spread over seeds.
        far = [metric for metric in again if not abs(metric - own[0]) <= np.nanstd(own) / 10]
        return bool(far) and not math.isnan(own[0])

    def comparison(self, arm: int) -> Comparison:
        """The comparison of a B with A at the first verdict, or now."""
        told = self.judged(arm)
        pairs = 1 + int(told.decided.argmax()) if told.decided.any() else len(told.decided)
        found = Comparison(name=self.names[arm], verdict="cannot tell", pairs=pairs)
        if not pairs:
            return found
        a, b = self.metrics(0, arm)[:, :pairs]
        now, failed = paired.tell(a, b, self.alpha), bool(np.isnan(b - a).any())
        found = replace(found, mean=now.mean, low=now.low, high=now.high, failed=now.lost)
        for doubt, arms in self.doubts(arm, pairs):
            if arms:
                return replace(found, doubt=doubt, arms=tuple(self.names[one] for one in arms))
        if self.is_itself or not failed:
            found = self._with_spread(found, a, b)
        if told.negligible[pairs - 1]:
            return replace(found, verdict="no difference")
        if told.decided[pairs - 1]:
            is_better = (now.mean < 0) == (self.settings.goal == "min" or failed)
            return replace(found, verdict="better" if is_better else "worse")
        if self.is_itself or failed or pairs == 1 or now.low == now.high:
            return found
        smallest = self.settings.smallest_effect
        enough = paired.pairs_needed(found.mean, now.variance, self.alpha, smallest)
        return replace(found, needed=enough and enough - pairs)

    def _with_spread(self, found: Comparison, a: Floats, b: Floats) -> Comparison:
        """The comparison with the verdicts of single pairs; of A alone, with its noise."""
        known = ~np.isnan(b - a)
        if known.sum() < 3:
            return found
        apart, own = (b - a)[known], 2 * a[known].std(ddof=1)
        lower, higher = int((apart < -own).sum()), int((apart > own).sum())
        better = (lower, higher) if self.settings.goal == "min" else (higher, lower)
        found = replace(found, two_sigma=better)
        if self.is_itself:
            noise = float(-special.stdtrit(len(apart) - 1, 0.025) * apart.std(ddof=1))
            found = replace(found, verdict="no difference", noise=noise, pairs=len(apart))
        return found

    def arm(self, number: int) -> Arm:
        """All runs of one."""
        runs = [*self.runs(number).values()]
        values = [run.loss for run in runs if not run.failure]
        seconds = [float(run.time["seconds"]) for run in runs if "seconds" in run.time]
        peaks = [float(run.time["peak_bytes"]) for run in runs if "peak_bytes" in run.time]
        return Arm(
            name=self.names[number],
            what=self.plan.arms[number],
            runs=len(runs),
            failed=len(runs) - len(values),
            failure=next((run.failure for run in reversed(runs) if run.failure), ""),
            mean=fmean(values) if values else None,
            deviation=stdev(values) if len(values) > 1 else None,
            seconds=fmean(seconds) if seconds else None,
            peak_bytes=fmean(peaks) if peaks else None,
        )
