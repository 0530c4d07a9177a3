"""The findings in words: the answer, the remarks, and the table."""

import math
import re

from steadygrad.studies.ab.schema import Comparison, Summary
from steadygrad.studies.schema import Table
from steadygrad.studies.text import listed, show, unfinished

DOUBTS = {
    "seed": "Cannot tell: it seems that the seed does not reach {0}, whose metric hardly varies in "
    "{1} runs, or it is at its bound.",
    "shared": "Cannot tell: {0} gave the same metrics, but for rounding, in all {1} pairs: nothing "
    "differs, or one takes over what the other left, such as a cache or a checkpoint.",
    "state": "Cannot tell: called again with the same seed, {0} gave another metric: a run changes "
    "the next one, or chance that the seed does not set. Commands run in processes of their own.",
}


def answer(s: Summary) -> str:
    """A sentence for each B."""
    return " ".join(sentence(found, s) for found in s.findings)


def sentence(found: Comparison, s: Summary) -> str:
    """A comparison in words."""
    name, mean = found.name, found.mean
    after = f"after {found.pairs} pair{'s' * (found.pairs != 1)}"
    if found.doubt:
        return DOUBTS[found.doubt].format(listed(found.arms), found.pairs)
    if len({arm.what for arm in s.arms}) == 1:
        noise = "an unknown amount" if found.noise is None else f"at most {show(found.noise)}"
        return f"Two runs of A differ by {noise} in 95% of pairs, {after}."
    told = found.verdict != "cannot tell"
    verdict = f"{name} is {found.verdict}" if told else "Cannot tell yet"
    if any(found.failed):
        own, other = found.failed
        return f"{verdict}: of {found.pairs} runs each, {own} of A and {other} of {name} failed."
    low, high = sorted((abs(found.low), abs(found.high)))
    if found.verdict == "no difference":
        return f"No difference larger than {show(high)}: {name} minus A is {minus(found)}, {after}."
    if told:
        how = f"{show(abs(mean))} {'lower' if mean < 0 else 'higher'}"
        return f"{verdict}: {how} ({show(low)} to {show(high)}), {after}."
    more = ", and even 10,000 would not be enough" if 0 < found.high - found.low < math.inf else ""
    if found.needed:
        more = f"; about {found.needed:,} more should be enough"
    return f"{verdict}: {name} minus A is {minus(found)} {after}{more}."


def remarks(s: Summary) -> tuple[str, ...]:
    """At most three more sentences, the most important first."""
    end = unfinished(s.status)
    for arm in s.arms:
        if arm.failed:
            why = arm.failure.rstrip(".")
            end.append(f"{arm.failed} of {arm.runs} runs of {arm.name} failed: {why}.")
    for found in s.findings:
        if found.two_sigma:
            better, worse = found.two_sigma
            end.append(
                f"The rule of one pair, more than two standard deviations of A, would call "
                f"{found.name} better in {better} of {found.pairs} pairs, and worse in {worse}. Of "
                "two equal ones it says so in 16% of pairs that are normal and independent."
            )
    return tuple(end[:3])


def table(s: Summary) -> Table:
    """The table of arms: verdict, metric, and seconds of a run."""
    heads = ("", "what", "verdict", "difference", "metric", "runs")
    rows = []
    for arm, found in zip(s.arms, (None, *s.findings), strict=True):
        verdict, apart = (found.verdict, minus(found)) if found else ("baseline", "–")
        memory = f", {arm.peak_bytes / 1e6:,.0f} MB" if arm.peak_bytes else ""
        failed = f", {arm.failed} failed" if arm.failed else ""
        runs = f"{arm.runs} × {show(arm.seconds, 2)} s{memory}{failed}"
        metric = f"{show(arm.mean, 4)} ± {show(arm.deviation, 2)}"
        what = _change(arm.what, s.arms[0].what) if found else arm.what
        rows.append((arm.name, what, verdict, apart, metric, runs))
    title = f"{s.task}: mean ± standard deviation, and intervals that are valid at every look"
    return Table(title, heads, tuple(rows), text_columns=3)


def _change(what: str, baseline: str) -> str:
    """The part of a B's command in place of A's: options of both ends are in A's row."""
    own, other = (re.split(r"\s+(?=-)", text) for text in (what, baseline))
    for end in (-1, 0):
        while own and other and own[end] == other[end]:
            del own[end], other[end]
    if not own:
        return f"without {' '.join(other)}" if other else "the same"
    said = " ".join(own)
    return said if said == what else f"… {said}"


def minus(found: Comparison) -> str:
    """A mean difference with its interval."""
    known = math.isfinite(found.high) and not any(found.failed)
    return f"{show(found.mean)} ({show(found.low)} to {show(found.high)})" if known else "unknown"
