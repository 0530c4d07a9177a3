"""A record becomes a summary: a pure function of the header and the events."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from steadygrad.studies.compare.explain import explain
from steadygrad.studies.compare.optimizers import KNOWN, OWN
from steadygrad.studies.compare.schema import BASELINE, Header, Run, Speed
from steadygrad.studies.compare.statistics import (
    SampleRatio,
    choice_variance,
    compare_pairs,
    sample_ratio,
)
from steadygrad.studies.compare.trials import DEFAULTS, Search
from steadygrad.studies.folder import Results
from steadygrad.studies.statistics import Floats

__all__ = ["Evidence", "summarize"]

# A plateau has the learning rates that cost at most a tenth more samples: this part of the loss's
# fall over the next octave, on a power law with the exponent a third.
PLATEAU = (1.1 ** (1 / 3) - 1) / (1 - 2 ** (-1 / 3))
# Extra samples at the critical batch size, as in `advise`.
CRITICAL = 0.2
# Numbers of trials for which the expected best loss is reported.
EFFORTS = (1, 3, 9)


@dataclass(frozen=True)
class Evidence:
    """Everything that is derived from a record."""

    header: Header
    results: Results
    searches: dict[int, Search] = field(default_factory=dict)

    def title(self, name: str) -> str:
        """The optimizer's name in sentences."""
        if name == OWN:
            return f"{self.header.task.optimizer or 'The optimizer'} of the task"
        return KNOWN[name].title if name in KNOWN else name

    def search(self, multiple: int) -> Search:
        """The search with one batch size."""
        if multiple not in self.searches:
            self.searches[multiple] = Search(self.header.plan, self.results, multiple)
        return self.searches[multiple]

    def losses(self, name: str, multiple: int, rung: int) -> dict[int, float]:
        """Losses of an optimizer's verdict by seed; infinite where it diverged."""
        point, step = self.search(multiple).tuned(name, rung)
        return self.by_seed(name, multiple, rung, point, step, self.header.plan.seeds)

    def by_seed(
        self, name: str, multiple: int, rung: int, point: int, step: float, seeds: int
    ) -> dict[int, float]:
        """Recorded losses at one setting, by seed."""
        samples = self.header.plan.horizons[rung]
        keys = ((name, multiple, samples, point, step, seed) for seed in range(1, seeds + 1))
        runs = (self.results.get(Run, *key) for key in keys)
        return {run.repeat: math.inf if math.isnan(run.loss) else run.loss for run in runs if run}

    def octave(self, name: str, multiple: int) -> dict[int, float]:
        """By how much an optimizer's loss falls with twice the samples, by seed."""
        short, long = (self.losses(name, multiple, rung) for rung in (1, 2))
        return {seed: _less(short[seed], long[seed]) for seed in short.keys() & long.keys()}


def summarize(header: Header, results: Results, status: str) -> dict[str, Any]:
    """Draws the conclusions from the recorded events.

    Args:
        header: The record's header.
        results: The record's events.
        status: ``"complete"``, ``"interrupted"``, ``"budget"`` or ``"failed"``.
    """
    evidence, plan = Evidence(header, results), header.plan
    costs = _costs(results)
    rows = [row for multiple in plan.multiples for row in _verdicts(evidence, multiple, costs)]
    runs = results.select(Run)
    lost = {n: sum(math.isinf(r.loss) for r in runs if r.optimizer == n) for n in plan.optimizers}
    found = {
        "task": header.task.name,
        "sample": header.task.sample,
        "optimizers": {name: evidence.title(name) for name in plan.optimizers},
        "verdicts": rows,
        "flips": _flips(rows),
        "tuned": [_tuned(evidence, m, n) for m in plan.multiples for n in plan.optimizers],
        "critical": [*_critical_batches(evidence)] if len(plan.multiples) > 1 else [],
        "costs": costs,
        "trained": len(runs),
        "diverged": sum(lost.values()),
        "diverged_by": lost,
    }
    return {**found, "words": explain(header, found, status)}


def _verdicts(
    evidence: Evidence, multiple: int, costs: Mapping[str, Mapping[str, float]]
) -> Iterator[dict[str, Any]]:
    """A row for each optimizer and horizon; those of fewer than two pairs are left out."""
    octave = evidence.octave(BASELINE, multiple)
    for rung in (1, 2):
        base, pairs = evidence.losses(BASELINE, multiple, rung), {}
        for name in evidence.header.plan.optimizers[1:]:
            own = evidence.losses(name, multiple, rung)
            seeds = sorted(own.keys() & base.keys())
            if len(seeds) > 1:
                pairs[name] = own, seeds, np.array([_less(own[s], base[s]) for s in seeds])
        choices = {name: _choice(evidence, multiple, name, rung, pairs[name][2]) for name in pairs}
        judged = compare_pairs(
            [own[2] for own in pairs.values()],
            [*choices.values()],
            family=len(evidence.header.plan.optimizers) - 1,
        )
        for (name, (own, seeds, differences)), verdict in zip(pairs.items(), judged, strict=True):
            # The ratio uses all pairs of the verdict or is not computed, so that the two never
            # contradict each other.
            falls = np.array([octave.get(seed, math.nan) for seed in seeds])
            ratio = sample_ratio(
                differences, falls, verdict.confidence, ahead=rung == 1, choice=choices[name]
            )
            yield {
                "optimizer": name,
                "multiple": multiple,
                "samples": evidence.header.plan.horizons[rung],
                **asdict(verdict),
                "sample_ratio": ratio and asdict(ratio),
                # Steps were timed at the task's own batch size.
                "time_ratio": _time_ratio(ratio, costs.get(name)) if multiple == 1 else None,
                "losses": {str(seed): own[seed] for seed in seeds},
                "baseline_losses": {str(seed): base[seed] for seed in seeds},
            }


def _choice(evidence: Evidence, multiple: int, name: str, rung: int, differences: Floats) -> float:
    """Variance of a mean difference that comes from the choice of both learning rates."""
    if not np.isfinite(differences).all():
        return 0.0
    # Seeds are paired: of two runs' own noise.
    noise, search = float(differences.var(ddof=1)) / 2, evidence.search(multiple)
    return sum(choice_variance(search.bend(n, rung), noise) for n in (name, BASELINE))


def _less(own: float, base: float) -> float:
    return math.nan if math.isinf(own) and math.isinf(base) else own - base


def _time_ratio(
    ratio: SampleRatio | None, cost: Mapping[str, float] | None
) -> dict[str, float] | None:
    """Time to a loss over that which the baseline would take; it has no interval of its own."""
    if ratio is None or cost is None:
        return None
    values = ratio.value, ratio.high, ratio.low
    names = "value", "low", "high"
    return {n: cost["time_ratio"] / value for n, value in zip(names, values, strict=True)}


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
    search = evidence.search(multiple)
    rungs, is_done = range(search.last + 1), search.is_done(name, search.last)
    point, step = search.tuned(name, search.last)
    runs = evidence.results.select(Run)
    # Exact, as the search's steps are whole.
    bases = (run.lr * 2.0**-run.step for run in runs if run.optimizer == name and not run.repeat)
    tried = {rung: search.tried(name, rung) for rung in rungs}
    # On the same seeds for all, those that are at their best there included.
    defaults = evidence.by_seed(name, 1, 2, 0, 0, DEFAULTS) if multiple == 1 else {}
    first = [*tried[0].values()] if search.is_done(name, 0) else []
    plateau = _plateau(search, first)
    return {
        "optimizer": name,
        "multiple": multiple,
        "lr": next(bases) * 2.0**step if is_done else None,
        "step": step,
        "knobs": KNOWN[name].knobs_at(point) if name in KNOWN else {},
        # Over the rungs that the verdicts have their rates from.
        "interior": all(search.is_interior(name, rung) for rung in rungs[1:]) if is_done else None,
        "tried": {str(rung): {str(s): loss for s, loss in tried[rung].items()} for rung in rungs},
        "plateau": plateau and plateau[0],
        "plateau_loss": plateau and plateau[1],
        "effort": _effort(first),
        "default_loss": sum(defaults.values()) / DEFAULTS if len(defaults) == DEFAULTS else None,
    }


def _plateau(search: Search, losses: Sequence[float]) -> tuple[float, float] | None:
    """Octaves of learning rates that cost at most a tenth more samples; the largest loss there.

    It is of the shortest runs, and by how much the baseline's best loss falls from there to runs
    twice as long. Between neighbours the loss is taken to be a straight line of the rate's
    logarithm. There is no plateau where the baseline's loss does not fall.
    """
    best = [min(search.tried(BASELINE, rung).values(), default=math.nan) for rung in (0, 1)]
    fall = best[0] - best[1]
    if not losses or not fall > 0 or not math.isfinite(min(losses) + fall):
        return None
    most = min(losses) + fall * PLATEAU
    width = 0.0
    for low, high in map(sorted, pairwise(losses)):
        if high <= most:
            width += 1
        elif low <= most and math.isfinite(high):
            width += (most - low) / (high - low)
    return width, most


def _effort(losses: Sequence[float]) -> dict[str, float]:
    r"""Expected best loss of some trials, drawn without replacement from those of short runs.

    Of :math:`N` sorted losses the :math:`i`-th is the best of :math:`k` with the probability
    :math:`\binom{N - i}{k - 1} / \binom{N}{k}`. More trials than there are give the best.
    """
    ordered, count, found = sorted(losses), len(losses), {}
    for trials in EFFORTS if losses else ():
        drawn = min(trials, count)
        ways = [math.comb(count - 1 - place, drawn - 1) for place in range(count)]
        terms = [way * loss for way, loss in zip(ways, ordered, strict=True) if way]
        found[str(trials)] = math.fsum(terms) / math.comb(count, drawn)
    return found


def _critical_batches(evidence: Evidence) -> Iterator[dict[str, Any]]:
    """For each optimizer, extra samples by batch size, and where they pass a fifth.

    A larger batch needs as many samples more as the task's own would need fewer for the same loss.
    """
    plan = evidence.header.plan
    for name in plan.optimizers:
        first, octave = evidence.losses(name, 1, 2), evidence.octave(name, 1)
        found: dict[int, SampleRatio] = {}
        for multiple in plan.multiples:
            own = evidence.losses(name, multiple, 2)
            seeds = sorted(first.keys() & own.keys() & octave.keys())
            pairs = np.array([[_less(own[s], first[s]), octave[s]] for s in seeds]).reshape(-1, 2)
            ratio = sample_ratio(pairs[:, 0], pairs[:, 1], 0.95)
            if ratio is None and np.isposinf(pairs[:, 0]).any():
                ratio = SampleRatio(0.0, 0.0, 0.0)
            if ratio is not None:
                found[multiple] = ratio
        if len(found) < 2 or 1 not in found:
            continue
        extra = {m: 1 / ratio.value - 1 if ratio.value else math.inf for m, ratio in found.items()}
        beyond = min((m for m, more in extra.items() if more > CRITICAL), default=None)
        within = max(m for m in extra if beyond is None or m < beyond)
        yield {
            "optimizer": name,
            "overheads": {str(m): more for m, more in extra.items()},
            "intervals": {
                str(m): [1 / end - 1 if end else math.inf for end in (ratio.high, ratio.low)]
                for m, ratio in found.items()
            },
            "within": within * plan.batch_size,
            "beyond": beyond and beyond * plan.batch_size,
        }


def _costs(results: Results) -> dict[str, dict[str, float]]:
    """Time of a training step over the baseline's, and bytes of state a weight, by optimizer."""
    speed = results.get(Speed)
    seconds = speed.time if speed else {}
    return {
        name: {"time_ratio": seconds[name] / seconds[BASELINE], "state_bytes": held}
        for name, held in (speed.state_bytes.items() if speed else ())
        if name in seconds and seconds.get(BASELINE)
    }
