"""The findings of a study: a pure function of the header and the results."""

import math
from statistics import fmean, stdev
from typing import Any

import numpy as np
from msgspec.structs import replace
from scipy import special

from steadygrad.studies.ab import words
from steadygrad.studies.ab.schema import Arm, Comparison, Header, Run, Summary
from steadygrad.studies.ab.sequence import Course, compare, pairs_needed
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
    """The runs so far: metrics of the shape ``(arms, pairs)``, NaN for failed and missing ones."""

    def __init__(self, header: Header, results: Results) -> None:
        self.header, self.plan, self.runs = header, header.plan, results.select(Run)
        count = len(self.plan.arms)
        self.names = ("A", "B") if count == 2 else ("A", *(f"B{arm}" for arm in range(1, count)))
        shape = count, self.plan.pairs
        self.values, self.there = np.full(shape, math.nan), np.zeros(shape, bool)
        for run in self.runs:
            self.values[run.arm, run.pair] = math.nan if run.value is None else run.value
            self.there[run.arm, run.pair] = True

    def metrics(self, arm: int) -> tuple[Floats, Floats]:
        """Metrics of A and of a B, of the pairs that are whole and follow one another."""
        count = int(np.append(self.there[0] & self.there[arm], False).argmin())
        return self.values[0, :count], self.values[arm, :count]

    def course(self, arm: int) -> Course:
        """A B against A, after each pair."""
        a, b = self.metrics(arm)
        return compare(a, b, self.plan.alpha, self.header.settings.smallest_effect)

    def comparison(self, arm: int) -> Comparison:
        """What is known of a B at the first verdict, or now."""
        course, (a, b), settings = self.course(arm), self.metrics(arm), self.header.settings
        found = Comparison(name=self.names[arm], verdict="cannot tell")
        if not len(a):
            return found
        decided = bool(course.decided.any())
        last = int(course.decided.argmax()) if decided else len(a) - 1
        a, b, mean, half = a[: last + 1], b[: last + 1], course.mean[last], course.half[last]
        ends = {"mean": float(mean), "low": float(mean - half), "high": float(mean + half)}
        failed, lost = (int(np.isnan(a).sum()), int(np.isnan(b).sum())), bool(course.lost[last])
        found = replace(found, pairs=len(a), failed=failed, **ends)
        if not lost and last > 1:
            found = replace(found, **_noise(a, b if settings.goal == "min" else 2 * a - b))
        if decided:
            better = (mean < 0) == (settings.goal == "min" or lost)
            told = "no difference" if course.small[last] else "better" if better else "worse"
            return replace(found, verdict=told)
        spread = float((b - a).std(ddof=1)) if last and not lost else math.inf
        more = pairs_needed(float(mean), spread, self.plan.alpha, settings.smallest_effect)
        seconds = sum(self.arm(number).seconds or 0.0 for number in (0, arm))
        needed = more and max(more - len(a), 1)
        hours = needed and needed * seconds / min(2, self.header.runtime.workers) / 3600
        return replace(found, needed=needed, hours=hours)

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


def _noise(a: Floats, b: Floats) -> dict[str, Any]:
    """Single pairs: what the rule of two sigma says of them, and how far they are apart."""
    apart, limit, count = b - a, 2 * a.std(ddof=1), len(a)
    width = -float(special.stdtrit(count - 1, 0.025)) * math.sqrt(1 + 1 / count)
    sigma = int((apart < -limit).sum()), int((apart > limit).sum())
    return {"two_sigma": sigma, "noise": width * float(apart.std(ddof=1))}
