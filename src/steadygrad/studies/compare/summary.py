"""A record becomes a summary: a pure function of the header and the events."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from steadygrad.record.schema.compare import BASELINE, Header, Run, Speed
from steadygrad.studies.compare.explain import explain
from steadygrad.studies.compare.optimizers import KNOWN
from steadygrad.studies.compare.statistics import (
    Difference,
    SampleRatio,
    compare_pairs,
    sample_ratio,
)
from steadygrad.studies.compare.trials import Search
from steadygrad.studies.journal import Journal
from steadygrad.studies.statistics import Floats

__all__ = ["Evidence", "summarize"]

# A plateau holds the learning rates that cost at most so many more samples.
PLATEAU = 0.1
# Extra samples at the critical batch size, as in `advise`.
CRITICAL = 0.2
# Trials of which a tuning effort is said.
EFFORTS = (1, 3, 9)


@dataclass(frozen=True)
class Evidence:
    """Everything that a record tells."""

    header: Header
    journal: Journal

    def title(self, name: str) -> str:
        """The optimizer's name in sentences."""
        known = KNOWN.get(name)
        return known.title if known else "the task's own optimizer" if name == "task" else name

    def search(self, multiple: int) -> Search:
        """The search with one batch size."""
        return Search(self.header.plan, self.journal, multiple)

    def losses(self, name: str, multiple: int, rung: int) -> dict[int, float]:
        """Losses of an optimizer's verdict by seed; infinite where it diverged."""
        plan, search = self.header.plan, self.search(multiple)
        point, step = search.tuned(name, rung)
        return self._by_seed(name, multiple, rung, point, step, plan.seeds)

    def _by_seed(
        self, name: str, multiple: int, rung: int, point: int, step: int, seeds: int
    ) -> dict[int, float]:
        found, samples = {}, self.header.plan.horizons[rung]
        for seed in range(1, seeds + 1):
            run = self.journal.get(Run, name, multiple, samples, point, step, seed)
            if run is not None:
                found[seed] = run.loss
        return found

    def at_default(self, name: str) -> float | None:
        """Mean loss at the optimizer's default rate, over the longest horizon."""
        losses = self._by_seed(name, 1, 2, 0, 0, self.header.plan.seeds)
        return float(np.mean([*losses.values()])) if losses else None

    def octave(self, multiple: int) -> dict[int, float]:
        """By how much the baseline's loss falls with twice the samples, by seed."""
        short, long = (self.losses(BASELINE, multiple, rung) for rung in (1, 2))
        return {seed: short[seed] - long[seed] for seed in short.keys() & long.keys()}


def summarize(header: Header, journal: Journal, status: str) -> dict[str, Any]:
    """Says what the recorded events mean.

    Args:
        header: The record's header.
        journal: Its events.
        status: ``"complete"``, ``"interrupted"``, ``"budget"`` or ``"failed"``.
    """
    evidence = Evidence(header, journal)
    rows = [row for multiple in header.plan.multiples for row in _verdicts(evidence, multiple)]
    runs = journal.select(Run)
    found = {
        "task": header.task.name,
        "sample": header.task.sample,
        "optimizers": {name: evidence.title(name) for name in header.plan.optimizers},
        "verdicts": rows,
        "flips": _flips(rows),
        "tuned": [_tuned(evidence, m, n) for m in header.plan.multiples for n in _names(evidence)],
        "critical": _critical_batches(evidence),
        "costs": _costs(journal),
        "trained": len(runs),
        "diverged": sum(math.isinf(run.loss) for run in runs),
    }
    return {**found, "words": explain(header, found, status)}


def _names(evidence: Evidence) -> Sequence[str]:
    return evidence.header.plan.optimizers


def _verdicts(evidence: Evidence, multiple: int) -> Iterator[dict[str, Any]]:
    """A row for each optimizer and horizon; those of fewer than two pairs are left out."""
    for rung in (1, 2):
        base, octave = evidence.losses(BASELINE, multiple, rung), evidence.octave(multiple)
        pairs: dict[str, tuple[list[int], Floats]] = {}
        for name in _names(evidence)[1:]:
            own = evidence.losses(name, multiple, rung)
            seeds = sorted(own.keys() & base.keys())
            if len(seeds) > 1:
                pairs[name] = seeds, np.array([_less(own[s], base[s]) for s in seeds])
        judged = compare_pairs([differences for _, differences in pairs.values()])
        for (name, (seeds, differences)), verdict in zip(pairs.items(), judged, strict=True):
            both = [i for i, seed in enumerate(seeds) if seed in octave]
            falls = np.array([octave[seeds[i]] for i in both])
            ratio = sample_ratio(differences[both], falls, verdict.confidence)
            own = evidence.losses(name, multiple, rung)
            row = _row(verdict, ratio)
            row["losses"] = {str(seed): own[seed] for seed in seeds}
            row["baseline_losses"] = {str(seed): base[seed] for seed in seeds}
            samples = evidence.header.plan.horizons[rung]
            yield {"optimizer": name, "multiple": multiple, "samples": samples, **row}


def _less(own: float, base: float) -> float:
    if math.isinf(own) and math.isinf(base):
        return math.nan
    return own - base


def _row(verdict: Difference, ratio: SampleRatio | None) -> dict[str, Any]:
    return {**asdict(verdict), "sample_ratio": ratio and asdict(ratio)}


def _flips(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Comparisons whose verdicts differ in sign between the horizons."""
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        found.setdefault((row["optimizer"], row["multiple"]), []).append(row["verdict"])
    return [
        {"optimizer": name, "multiple": multiple, "short": said[0], "long": said[-1]}
        for (name, multiple), said in found.items()
        if {*said} == {"better", "worse"}
    ]


def _tuned(evidence: Evidence, multiple: int, name: str) -> dict[str, Any]:
    """The search for one optimizer and batch size."""
    search, plan = evidence.search(multiple), evidence.header.plan
    point, step = search.tuned(name, 2)
    rungs = range(2 + plan.full)
    tried = {
        str(rung): {str(s): search.loss(name, rung, s) for s in search.ladders(rung)[name]}
        for rung in rungs
    }
    lr = next(
        (
            run.lr * 2.0 ** (step - run.step)
            for run in evidence.journal.select(Run)
            if run.optimizer == name
        ),
        math.nan,
    )
    return {
        "optimizer": name,
        "multiple": multiple,
        "lr": lr,
        "step": step,
        "knobs": KNOWN[name].knobs_at(point) if name in KNOWN else {},
        "interior": search.is_interior(name, 0) and search.is_interior(name, 1),
        "tried": tried,
        "plateau": _plateau(evidence, multiple, [*tried["0"].values()]),
        "effort": _effort([*tried["0"].values()]),
        "default_loss": evidence.at_default(name) if multiple == 1 else None,
    }


def _plateau(evidence: Evidence, multiple: int, losses: Sequence[float]) -> float | None:
    """Octaves of the learning rate that cost at most a tenth more samples than the best.

    Between neighbours the loss is taken to be a straight line of the rate's logarithm.
    """
    octave = [*evidence.octave(multiple).values()]
    if not octave or not math.isfinite(min(losses)) or np.mean(octave) <= 0:
        return None
    most = min(losses) + float(np.mean(octave)) * math.log2(1 + PLATEAU)
    width = 0.0
    for one, other in pairwise(losses):
        low, high = min(one, other), max(one, other)
        if high <= most:
            width += 1
        elif low <= most:
            width += 0.0 if math.isinf(high) else (most - low) / (high - low)
    return width


def _effort(losses: Sequence[float]) -> dict[str, float]:
    r"""Expected best loss of some trials, drawn without replacement from those of short runs.

    Of :math:`N` sorted losses the :math:`i`-th is the best of :math:`k` with the probability
    :math:`\binom{N - i}{k - 1} / \binom{N}{k}`.
    """
    ordered, count = sorted(losses), len(losses)
    found = {}
    for trials in EFFORTS:
        if trials <= count:
            ways = [math.comb(count - 1 - i, trials - 1) for i in range(count)]
            terms = [way * loss for way, loss in zip(ways, ordered, strict=True) if way]
            found[str(trials)] = math.fsum(terms) / math.comb(count, trials)
    return found


def _critical_batches(evidence: Evidence) -> list[dict[str, Any]]:
    """For each optimizer, extra samples by batch size, and where they pass a fifth."""
    plan, found = evidence.header.plan, []
    for name in _names(evidence) if len(plan.multiples) > 1 else ():
        own = [[*evidence.losses(name, 1, rung).values()] for rung in (1, 2)]
        if not all(own) or not np.isfinite(own[0] + own[1]).all():
            continue
        short, long = (float(np.mean(losses)) for losses in own)
        overheads = {1: 0.0}
        for multiple in plan.multiples[1:]:
            losses = [*evidence.losses(name, multiple, 2).values()]
            if losses and short > long:
                # As many samples as the smallest batch needs for the same loss, over those seen.
                exponent = (float(np.mean(losses)) - long) / (short - long)
                overheads[multiple] = 2.0 ** min(exponent, 10.0) - 1
        within = max((m for m, extra in overheads.items() if extra <= CRITICAL), default=1)
        beyond = min((m for m, extra in overheads.items() if extra > CRITICAL), default=None)
        found.append(
            {
                "optimizer": name,
                "overheads": {str(m): extra for m, extra in overheads.items()},
                "within": within * plan.batch_size,
                "beyond": beyond and beyond * plan.batch_size,
            }
        )
    return found


def _costs(journal: Journal) -> dict[str, dict[str, float]]:
    """Time of a training step over the baseline's, and bytes of state a weight, by optimizer."""
    speed = journal.get(Speed)
    if speed is None:
        return {}
    seconds = speed.time
    return {
        name: {"time_ratio": seconds[name] / seconds[BASELINE], "state_bytes": held}
        for name, held in speed.state_bytes.items()
    }
