"""The findings of a study: a pure function of the header and the results."""

import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from steadygrad.studies.compare import words
from steadygrad.studies.compare.analysis import Evidence
from steadygrad.studies.compare.schema import (
    BASELINE,
    KNOWN,
    OWN,
    Brackets,
    Edge,
    Flip,
    Header,
    Run,
    Summary,
    Verdict,
)
from steadygrad.studies.folder import Results


def summarize(header: Header, results: Results, status: str) -> Summary:
    """The summary: numbers, findings and words.

    The status is ``"complete"``, ``"interrupted"``, ``"budget"`` or ``"failed"``.
    """
    plan, task, runs, rise = header.plan, header.task, results.select(Run), header.rise(results)
    evidence = Evidence(header, Results() if rise else results)
    lost = {n: sum(math.isinf(r.loss) for r in runs if r.optimizer == n) for n in plan.optimizers}
    titles = {name: KNOWN[name].title if name in KNOWN else name for name in plan.optimizers}
    titles |= {
        name: f"{name} with AdamW" for name, traits in plan.traits.items() if traits.matrices
    }
    if OWN in titles:
        titles[OWN] = f"{task.optimizer or 'The optimizer'} of the task"
    critical = map(evidence.critical, plan.optimizers if len(plan.multiples) > 1 else ())
    verdicts = tuple(row for multiple in plan.multiples for row in evidence.verdicts(multiple))
    found = Summary(
        study="compare",
        status=status,
        task=task.name,
        sample=task.sample,
        batch_size=plan.batch_size,
        findings=(),
        optimizers=titles,
        verdicts=verdicts,
        flips=tuple(_flips(verdicts)),
        tuned=tuple(evidence.tuned(m, name) for m in plan.multiples for name in plan.optimizers),
        critical=tuple(row for row in critical if row),
        costs=evidence.costs,
        trained=len(runs),
        diverged=sum(lost.values()),
        diverged_by=lost,
        rise=rise,
    )
    return replace(found, findings=tuple(find(found))).worded(words)


def find(s: Summary) -> Iterator[Flip | Edge | Brackets | Verdict]:
    """The findings in a summary's numbers, the most important first."""
    yield from s.flips
    longest = max((row.samples for row in s.verdicts), default=0)
    rows = [row for row in s.verdicts if row.samples == longest]
    # A better rate could overturn the answer where it is of one that is behind.
    ahead = {(BASELINE, row.multiple) for row in rows if row.verdict == "better"}
    behind = ahead or {(row.optimizer, row.multiple) for row in rows}
    for own in s.tuned:
        if own.interior is False and math.isfinite(min(own.tried["0"].values())):
            hangs = (own.optimizer, own.multiple) in behind
            yield Edge(optimizer=own.optimizer, multiple=own.multiple, hangs=hangs)
    if s.critical:
        yield Brackets(sizes={row.optimizer: (row.within, row.beyond) for row in s.critical})
    # Those that diverged first, then those that are better.
    order = ("better", "cannot tell", "worse")
    yield from sorted(rows, key=lambda row: (not row.lost, order.index(row.verdict)))


def _flips(rows: Sequence[Verdict]) -> Iterator[Flip]:
    """Comparisons whose verdicts differ in sign between the horizons."""
    long = {(row.optimizer, row.multiple): row for row in rows}
    short = {(row.optimizer, row.multiple): row for row in reversed(rows)}
    for (name, multiple), last in long.items():
        first = short[name, multiple]
        if {first.verdict, last.verdict} == {"better", "worse"}:
            yield Flip(
                optimizer=name,
                multiple=multiple,
                short=first.verdict,
                long=last.verdict,
                samples=(first.samples, last.samples),
            )
