"""The findings in words: the answer, the remarks, and the table."""

import math

from steadygrad.studies.ab.schema import Arm, Comparison, Summary
from steadygrad.studies.schema import Table
from steadygrad.studies.text import ENDS, show


def answer(s: Summary) -> str:
    """A sentence for each B."""
    return " ".join(said(found, s) for found in s.findings)


def said(found: Comparison, s: Summary) -> str:
    """A comparison in words."""
    name, mean, after = found.name, found.mean, f"after {found.pairs} pairs"
    told = found.verdict != "cannot tell"
    if found.noise and not told and len({arm.what for arm in s.arms}) == 1:
        return f"Noise: two single runs differ by up to {show(found.noise)}, {after}."
    verdict = f"{name} is {found.verdict}" if told else "Cannot tell yet"
    if any(found.failed):
        own, other = found.failed
        return f"{verdict}: of {found.pairs} runs each, {own} of A and {other} of {name} failed."
    low, high = sorted((abs(found.low), abs(found.high)))
    if found.verdict == "no difference":
        larger = f" larger than {show(high)}" if high else ""
        return f"No difference{larger} between {name} and A, {after}."
    if told:
        how = f"{show(abs(mean))} {'lower' if mean < 0 else 'higher'}"
        return f"{verdict}: {how} ({show(low)} to {show(high)}), {after}."
    more = "; 10,000 would not tell" if math.isfinite(found.high) else ""
    if found.needed and found.hours is not None:
        minutes = f"{show(60 * found.hours, 2)} minutes"
        long = f"{show(found.hours, 2)} hours" if found.hours >= 1 else minutes
        more = f"; about {found.needed:,} more would, in {long}"
    return f"{verdict}: {name} less A is {less(found)} {after}{more}."


def remarks(s: Summary) -> tuple[str, ...]:
    """At most three more sentences, the most important first."""
    end = [f"The study {ENDS[s.status]}; --resume continues it."] if s.status in ENDS else []
    for arm in s.arms:
        if arm.failed:
            end.append(
                f"{arm.failed} of {arm.runs} runs of {arm.name} failed: {arm.failure.rstrip('.')}."
            )
        elif arm.deviation == 0:
            end.append(f"All runs of {arm.name} gave the same: its seed changes nothing.")
    for found in s.findings:
        if found.two_sigma and found.noise:
            end.append(
                f"Two sigma of A call {found.name} better in {found.two_sigma[0]} of {found.pairs} "
                f"pairs, worse in {found.two_sigma[1]}; without an effect 95% of pairs differ by "
                f"less than {show(found.noise)}."
            )
    return tuple(end[:3])


def too_little(s: Summary) -> str | None:
    """Of no pair at all it can be said that they do not tell."""
    return None


def table(s: Summary) -> Table:
    """What was compared, and what a run takes."""
    heads = ("", "what", "verdict", "metric ± of a run", "less A", "runs", "a run takes")
    rows = [_row(arm, found) for arm, found in zip(s.arms, (None, *s.findings), strict=True)]
    return Table(f"{s.task}, intervals that hold together", heads, tuple(rows), text_columns=3)


def _row(arm: Arm, found: Comparison | None) -> tuple[str, ...]:
    verdict, apart = (found.verdict, less(found)) if found else ("baseline", "–")
    runs = show(arm.runs) + (f", {arm.failed} failed" if arm.failed else "")
    memory = f", {arm.peak_bytes / 1e6:,.0f} MB" if arm.peak_bytes else ""
    metric = f"{show(arm.mean, 4)} ± {show(arm.deviation, 2)}"
    return arm.name, arm.what, verdict, metric, apart, runs, f"{show(arm.seconds)} s{memory}"


def less(found: Comparison) -> str:
    """A mean difference with its interval."""
    known = math.isfinite(found.high) and not any(found.failed)
    return f"{show(found.mean)} ({show(found.low)} to {show(found.high)})" if known else "unknown"
