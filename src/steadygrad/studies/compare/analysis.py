"""From results to numbers: the verdicts, the searches and the critical batch sizes."""

import math
from collections.abc import Iterator
from functools import cached_property
from statistics import fmean

import numpy as np
from msgspec.structs import asdict

from steadygrad.studies.compare.schema import (
    BASELINE,
    Cost,
    Critical,
    Header,
    Ratio,
    Run,
    Speed,
    Tuned,
    Verdict,
)
from steadygrad.studies.compare.search import Search
from steadygrad.studies.compare.statistics import choice_variance, compare_pairs, sample_ratio
from steadygrad.studies.folder import Results
from steadygrad.studies.statistics import Floats

# Extra samples at the critical batch size, as in `advise`.
CRITICAL = 0.2


class Evidence:
    """A run's header and results, and the numbers that are derived from them."""

    def __init__(self, header: Header, results: Results) -> None:
        self.plan, self.results = header.plan, results
        self.searches = {m: Search(header.plan, results, m) for m in header.plan.multiples}

    @cached_property
    def costs(self) -> dict[str, Cost]:
        """Costs of a step by optimizer; empty where they were not measured."""
        speed = self.results.get(Speed)
        if speed is None or not speed.time.get(BASELINE):
            return {}
        return {
            name: Cost(time_ratio=speed.time[name] / speed.time[BASELINE], state_bytes=held)
            for name, held in speed.state_bytes.items()
            if name in speed.time
        }

    def runs(self, name: str, multiple: int, rung: int) -> dict[int, Run]:
        """Runs of an optimizer's verdict, by seed."""
        key = name, multiple, self.plan.horizons[rung], self.searches[multiple].tuned(name, rung)
        seeds = range(1, 1 + self.plan.seeds)
        return {seed: run for seed in seeds if (run := self.results.get(Run, *key, seed))}

    def octave(self, name: str, multiple: int) -> dict[int, float]:
        """By how much an optimizer's loss falls with twice the samples, by seed."""
        short, long = (self.runs(name, multiple, rung) for rung in (1, 2))
        return {seed: _less(short[seed], long[seed]) for seed in short.keys() & long.keys()}

    def verdicts(self, multiple: int) -> Iterator[Verdict]:
        """One for each optimizer and horizon; those of fewer than two pairs are left out."""
        octave = self.octave(BASELINE, multiple)
        for rung in (1, 2):
            base, pairs = self.runs(BASELINE, multiple, rung), {}
            for name in self.plan.optimizers[1:]:
                own = self.runs(name, multiple, rung)
                seeds = sorted(own.keys() & base.keys())
                if len(seeds) > 1:
                    pairs[name] = own, seeds, np.array([_less(own[s], base[s]) for s in seeds])
            choices = {name: self._choice(multiple, name, rung, pairs[name][2]) for name in pairs}
            differences, family = [own[2] for own in pairs.values()], len(self.plan.optimizers) - 1
            judged = compare_pairs(differences, [*choices.values()], family=family)
            for (name, (own, seeds, apart)), found in zip(pairs.items(), judged, strict=True):
                # The ratio uses all pairs of the verdict or is not computed, so that the two never
                # contradict each other.
                falls, choice = np.array([octave.get(s, math.nan) for s in seeds]), choices[name]
                ratio = sample_ratio(apart, falls, found.confidence, ahead=rung == 1, choice=choice)
                losses, others = ({s: runs[s].end for s in seeds} for runs in (own, base))
                yield Verdict(
                    **asdict(found),
                    optimizer=name,
                    multiple=multiple,
                    samples=self.plan.horizons[rung],
                    lr=own[seeds[0]].lr,
                    baseline_lr=base[seeds[0]].lr,
                    loss=fmean(losses.values()),
                    baseline_loss=fmean(others.values()),
                    lost=sum(map(math.isinf, losses.values())),
                    baseline_lost=sum(map(math.isinf, others.values())),
                    sample_ratio=ratio,
                    # Steps were timed at the task's own batch size.
                    time_ratio=_time_ratio(ratio, self.costs.get(name)) if multiple == 1 else None,
                    losses={str(seed): loss for seed, loss in losses.items()},
                    baseline_losses={str(seed): loss for seed, loss in others.items()},
                )

    def _choice(self, multiple: int, name: str, rung: int, differences: Floats) -> float:
        """Variance of a mean difference that comes from the choice of both learning rates."""
        if not np.isfinite(differences).all():
            return 0.0
        # Seeds are paired: of two runs' own noise.
        noise, search = float(differences.var(ddof=1)) / 2, self.searches[multiple]
        return sum(choice_variance(search.bend(n, rung), noise) for n in (name, BASELINE))

    def tuned(self, multiple: int, name: str) -> Tuned:
        """The search for one optimizer and batch size."""
        search = self.searches[multiple]
        rungs, step = range(search.last + 1), search.tuned(name, search.last)
        tried = {rung: search.tried(name, rung) for rung in rungs}
        is_done = all(len(tried[rung]) == len(search.ladders(rung)[name]) for rung in rungs)
        runs = (run for run in self.results.select(Run) if run.optimizer == name)
        # Exact, as the search's steps are whole.
        bases = (run.lr * 2.0**-run.step for run in runs if not run.repeat)
        fixed = name in self.plan.traits and self.plan.traits[name].own_rate
        return Tuned(
            optimizer=name,
            multiple=multiple,
            lr=next(bases) * 2.0**step if is_done else None,
            step=step,
            # Over the rungs that the verdicts have their rates from.
            interior=all(search.is_interior(name, rung) for rung in rungs[1:])
            if is_done and not fixed
            else None,
            tried={str(r): {str(s): loss for s, loss in tried[r].items()} for r in rungs},
        )

    def critical(self, name: str) -> Critical | None:
        """Extra samples of an optimizer by batch size, and where they pass a fifth.

        A larger batch needs as many samples more as the task's own would need fewer for the same
        loss. None where fewer than two batch sizes can be compared.
        """
        first, octave = self.runs(name, 1, 2), self.octave(name, 1)
        found: dict[int, Ratio] = {}
        for multiple in self.plan.multiples:
            own = self.runs(name, multiple, 2)
            seeds = sorted(first.keys() & own.keys() & octave.keys())
            pairs = np.array([[_less(own[s], first[s]), octave[s]] for s in seeds]).reshape(-1, 2)
            ratio = sample_ratio(pairs[:, 0], pairs[:, 1], 0.95)
            if ratio is None and np.isposinf(pairs[:, 0]).any():
                ratio = Ratio(0.0, 0.0, 0.0)
            if ratio is not None:
                found[multiple] = ratio
        if len(found) < 2 or 1 not in found:
            return None
        extra = {multiple: _extra(ratio.value) for multiple, ratio in found.items()}
        beyond = min((m for m, more in extra.items() if more > CRITICAL), default=None)
        within = max(m for m in extra if beyond is None or m < beyond)
        return Critical(
            optimizer=name,
            overheads={str(m): more for m, more in extra.items()},
            intervals={str(m): (_extra(r.high), _extra(r.low)) for m, r in found.items()},
            within=within * self.plan.batch_size,
            beyond=beyond and beyond * self.plan.batch_size,
        )


def _less(own: Run, base: Run) -> float:
    return math.nan if math.isinf(own.end) and math.isinf(base.end) else own.end - base.end


def _extra(ratio: float) -> float:
    return 1 / ratio - 1 if ratio else math.inf


def _time_ratio(ratio: Ratio | None, cost: Cost | None) -> Ratio | None:
    """Time to a loss over that which the baseline would take; it has no interval of its own."""
    if ratio is None or cost is None:
        return None
    return Ratio(*(cost.time_ratio / value for value in (ratio.value, ratio.high, ratio.low)))
