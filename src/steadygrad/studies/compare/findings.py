"""The findings of a study: a pure function of the header and the results."""

import math
from collections.abc import Iterable, Iterator

from steadygrad.studies.compare import schema, words
from steadygrad.studies.compare.analysis import Optimizers
from steadygrad.studies.compare.schema import BASELINE, KNOWN, OWN, Edge, Header, Summary, Verdict
from steadygrad.studies.folder import Results


def summarize(header: Header, results: Results, status: str) -> Summary:
    """The summary: numbers, findings and words."""
    plan, task, rise = header.plan, header.task, header.rise(results)
    evidence = Optimizers(header, Results() if rise else results)
    tuned = tuple(map(evidence.tuned, range(len(plan.arms))))
    found = Summary(
        study="compare",
        status=status,
        task=task.name,
        sample=task.sample,
        samples=plan.samples,
        confidence=1 - plan.alpha,
        findings=tuple(find(evidence, tuned)),
        optimizers=_titles(header),
        tuned=tuned,
        costs=plan.costs,
        rise=rise,
    )
    return found.worded(words)


def find(evidence: Optimizers, tuned: Iterable[schema.Tuned]) -> Iterator[Edge | Verdict]:
    """The findings, the most important first."""
    rows = [evidence.with_ratios(row) for row in evidence.verdicts.values()]
    # A better rate could overturn the answer where it is of one that is behind.
    ahead = {(BASELINE, row.batch_size) for row in rows if row.verdict == "better"}
    behind = ahead or {(row.optimizer, row.batch_size) for row in rows}
    for own in tuned:
        if own.interior is False and math.isfinite(min(own.tried.values())):
            hangs = (own.optimizer, own.batch_size) in behind
            yield Edge(optimizer=own.optimizer, batch_size=own.batch_size, hangs=hangs)
    # Those that diverged first, then those that are better.
    order = ("better", "cannot tell", "worse")
    yield from sorted(rows, key=lambda row: (not row.lost, order.index(row.verdict)))


def _titles(header: Header) -> dict[str, str]:
    """Names of the optimizers in sentences."""
    titles = {n: KNOWN[n].title if n in KNOWN else n for n in header.plan.optimizers}
    titles |= {n: f"{n} with AdamW" for n, own in header.plan.traits.items() if own.matrices}
    if OWN in titles:
        titles[OWN] = f"{header.task.optimizer or 'The optimizer'} of the task"
    return titles
