"""The findings of a study: a pure function of the header and the results."""

from itertools import count
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy import special

from steadygrad.studies.ab import words
from steadygrad.studies.ab.schema import ITSELF, MOST, Arm, Comparison, Header, Run, Summary
from steadygrad.studies.ab.sequence import (
    Course,
    are_one_run,
    compare,
    is_one_run,
    pairs_needed,
)
from steadygrad.studies.folder import Results
from steadygrad.studies.statistics import Floats


def summarize(header: Header, results: Results, status: str) -> Summary:
    """The summary: numbers, findings and words."""
    evidence, count = Evidence(header, results), len(header.plan.arms)
    return Summary(
        study="ab",
        status=status,
        task=header.task.name,
        sample=header.task.sample,
        findings=tuple(map(evidence.comparison, range(1, count))),
        arms=tuple(map(evidence.arm, range(count))),
    ).worded(words)


class Evidence:
    """The runs so far; ``ahead`` pairs are begun together after the first possible verdict."""

    def __init__(self, header: Header, results: Results) -> None:
        self.header, self.plan, self.runs = header, header.plan, results.select(Run)
        self.values = {(run.arm, run.pair): run.value for run in self.runs}
        self.again = [(run.arm, run.again) for run in self.runs if run.again is not None]
        arms = len(self.plan.arms)
        names = [f"B{arm}" for arm in range(1, arms)] if arms > 2 else ["B"]
        self.alpha = header.settings.alpha / (arms - 1)  # each B's, by Bonferroni
        self.is_itself = len({*self.plan.arms}) == 1
        self.names = ("A", *(["A again"] if self.is_itself else names))
        self.pairs = header.settings.pairs or (ITSELF if self.is_itself else MOST)
        self.ahead = max(1, header.runtime.workers // arms)

    def metrics(self, *arms: int) -> Floats:
        """Metrics of arms, NaN of a failed run, in their whole pairs before the first gap."""
        first = next(n for n in count() if not {(arm, n) for arm in arms} <= self.values.keys())
        return np.array([[self.values[arm, n] for n in range(first)] for arm in arms], float)

    def course(self, arm: int) -> Course:
        """A B against A, after each pair; A against itself is never decided.

        A comparison ends without a verdict, too, after as many runs that are one, repeated.
        """
        a, b = self.metrics(0, arm)
        found = compare(a, b, self.alpha, self.header.settings.smallest_effect)
        ended = found.decided | (found.repeated & (np.arange(len(a)) >= ITSELF - 1))
        return found._replace(decided=ended & (not self.is_itself))

    def doubt(self, arm: int, pairs: int) -> dict[str, Any]:
        """Why no verdict on a B would be one after so many pairs, and the arms in question."""
        both, (a, b) = (0, arm), self.metrics(0, arm)[:, :pairs]
        first = {0: a[0], arm: b[0]}
        # Rounding, as of a GPU, is less than this part of the spread over seeds.
        state = [
            one
            for one, again in self.again
            if one in both and not np.isnan(first[one])
            if not abs(again - first[one]) <= np.nanstd((a, b)[one > 0]) / 10
        ]
        alone = is_one_run(a, b)[-1], is_one_run(b, a)[-1]
        seed = [one for one, is_one in zip(both, alone, strict=True) if is_one and pairs > 2]
        shared = [
            sorted((one, other))
            for one in both
            for other in range(len(self.names))
            if not self.plan.samples and self.plan.arms[one] != self.plan.arms[other]
            if are_one_run(*self.metrics(one, other)[:, :pairs])
        ]
        for kind, found in (("state", state), ("seed", seed), ("shared", [*shared, []][0])):
            if found:
                names = (self.names[one] for one in found)
                return {"doubt": kind, "arms": tuple(dict.fromkeys(names))}
        return {}

    def comparison(self, arm: int) -> Comparison:
        """The comparison of a B with A at the first verdict, or now."""
        course, (a, b), settings = self.course(arm), self.metrics(0, arm), self.header.settings
        found: dict[str, Any] = {"name": self.names[arm], "verdict": "cannot tell"}
        if not len(a):
            return Comparison(**found)
        last = int(course.decided.argmax()) if course.decided.any() else len(a) - 1
        mean, half, failed, negligible, decided, _ = (part[last].item() for part in course)
        a, b = a[: last + 1], b[: last + 1]
        counts = int(np.isnan(a).sum()), int(np.isnan(b).sum())
        found |= {"pairs": len(a), "failed": counts}
        found |= {"mean": mean, "low": mean - half, "high": mean + half}
        if doubt := self.doubt(arm, len(a)):
            return Comparison(**found, **doubt)
        known = ~np.isnan(b - a)
        if (self.is_itself or not failed) and known.sum() > 2:
            apart, own = (b - a)[known], 2 * a[known].std(ddof=1)
            better = int((apart < -own).sum()), int((apart > own).sum())
            found["two_sigma"] = better if settings.goal == "min" else better[::-1]
            if self.is_itself:
                noise = -special.stdtrit(len(apart) - 1, 0.025) * apart.std(ddof=1)
                found |= {"verdict": "no difference", "noise": float(noise), "pairs": len(apart)}
        if decided:
            is_better = (mean < 0) == (settings.goal == "min" or failed)
            found["verdict"] = "no difference" if negligible else "better" if is_better else "worse"
        elif not (self.is_itself or failed or last == 0 or half == 0):
            deviation = float((b - a).std(ddof=1))
            more = pairs_needed(mean, deviation, self.alpha, settings.smallest_effect)
            arms = [0, *(i for i in range(1, len(self.names)) if not self.course(i).decided.any())]
            workers = min(self.header.runtime.workers, self.ahead * len(arms))
            needed, seconds = more and more - len(a), sum(self.arm(i).seconds or 0.0 for i in arms)
            found |= {"needed": needed, "hours": needed and needed * seconds / workers / 3600}
        return Comparison(**found)

    def arm(self, number: int) -> Arm:
        """All runs of one."""
        runs = [run for run in self.runs if run.arm == number]
        values = [run.value for run in runs if run.value is not None]
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
