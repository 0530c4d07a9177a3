"""The trials of ``advise`` in the order in which they are recorded.

At each point of training: the main trajectory, the noise scale, the branches and what refines
them. Then, from scratch: the smallest batch at other learning rates and with other seeds, the
candidates for the recommendation, and the schedule.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from steadygrad.studies.advise.plan import MICRO_BATCHES, end_unit
from steadygrad.studies.advise.schema import Plan
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Key
from steadygrad.studies.trials import Job, Trial, evaluation_cost

__all__ = ["Curve", "Decide", "Stages", "averaged_end", "make_trials", "scratch_job", "stretches"]

Curve = Sequence[tuple[int, float]]
"""Samples seen and validation losses."""

Decide = Callable[[Key, Results], Job | None]
"""From the key of a trial, and what was recorded before it, to its job; None: nothing to do."""

Stages = tuple[tuple[int, int], ...]
"""Stages of a schedule: pairs of samples seen at the beginning and batch size."""

# Other learning rates at which the smallest batch is tried, relative to the task's.
RATES = (0.5, 2.0)
# Parts of a branch after which the smallest batch is evaluated.
FRACTIONS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Evaluations at the end of every branch, one step of the largest batch apart: the loss after a
# single optimizer step depends too much on that step's samples.
END_MARKS = 3
# Parts of a run from scratch after which the smallest batch is evaluated.
RUN_FRACTIONS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Evaluations at the end of every run from scratch.
RUN_ENDS = 5


def make_trials(
    plan: Plan, valid_size: int, decide: Decide, *, decays: bool = False, noise: bool = True
) -> list[Trial]:
    """All trials of a plan.

    Args:
        plan: The plan.
        valid_size: Samples in one evaluation.
        decide: Makes the jobs that depend on results.
        decays: Whether the task's learning rate decays. The main trajectory and the branches
            leave the decay out, so that none of the runs from scratch is the main trajectory, and
            other rates are compared with a run of the length that the branches suggest.
        noise: Whether to measure the noise scale.
    """
    maker = _Maker(plan, evaluation_cost(valid_size), decide)
    found = [*maker.points(), *maker.runs(decays=decays)]
    return [trial for trial in found if noise or trial.key[0] != "noise"]


class _Maker:
    def __init__(self, plan: Plan, evaluation: int, decide: Decide) -> None:
        self.plan, self.evaluation, self.decide = plan, evaluation, decide

    def trial(
        self,
        key: Key,
        samples: int,
        evaluations: int,
        what: str,
        needs: tuple[Key, ...] = (),
        job: Job | None = None,
    ) -> Trial:
        if key[0] in ("point", "noise", "branch"):
            job = dict(zip(("kind", "point", "repeat", "batch_size"), key, strict=False))

        def choose(results: Results) -> Job | None:
            return self.decide(key, results) if job is None else job

        return Trial(key, samples + evaluations * self.evaluation, choose, what, needs)

    def points(self) -> Iterator[Trial]:
        """The trials at each point of training."""
        plan, start = self.plan, 0
        for i, samples in enumerate(plan.points):
            length, size = plan.branch_samples[i], plan.batch_size
            marks = len(run_marks(samples, size, first=start))
            needs: tuple[Key, ...] = (("point", i - 1),) if i else ()
            what = f"training to {samples:,} samples"
            yield self.trial(("point", i), samples - start, marks, what, needs)
            needs = (("point", i),)
            used = plan.noise_steps[i] * MICRO_BATCHES * size
            yield self.trial(("noise", i), used, 0, f"noise scale at {samples:,}", needs)
            keys: list[Key] = []
            # Repeat by repeat: a study that is cut short has whole repeats, not half of the sizes.
            for repeat, multiple in product(range(plan.repeats), plan.multiples[i]):
                marks = END_MARKS + (len(FRACTIONS) if multiple == 1 else 0)
                keys.append(("branch", i, repeat, multiple * size))
                what = f"branch of {multiple * size:,} at {samples:,}"
                yield self.trial(keys[-1], length, marks, what, needs)
            needs, what = (*needs, *keys), f"branch between two sizes at {samples:,}"
            for repeat in range(plan.repeats):
                yield self.trial(("middle", i, repeat), length, END_MARKS, what, needs)
            start = samples

    def rates(self, needs: tuple[Key, ...] = (), *, decays: bool) -> Iterator[Trial]:
        """The smallest batch at other learning rates, from scratch."""
        plan, whole = self.plan, len(RUN_FRACTIONS) + RUN_ENDS
        for rate in RATES if plan.rates else ():
            job = scratch_job(((0, plan.batch_size),), plan.length, rate=rate)
            what, key = f"learning rate times {rate:g} from scratch", ("rate", f"{rate:g}", 0)
            yield self.trial(key, plan.length, whole, what, needs, None if decays else job)

    def runs(self, *, decays: bool) -> Iterator[Trial]:
        """The runs from scratch."""
        plan, whole = self.plan, len(RUN_FRACTIONS) + RUN_ENDS
        if not decays:
            yield from self.rates(decays=decays)
        if not plan.candidates:
            return
        seeds = range(0 if decays else 1, plan.seeds)
        # A prediction rests on them.
        needs = tuple(t.key for t in self.points() if t.key[0] in ("point", "branch", "middle"))
        baselines: list[Key] = [("baseline", seed) for seed in seeds]
        for key in baselines:
            what = f"{plan.batch_size:,} from scratch"
            yield self.trial(key, plan.length, whole, what, needs)
        needs = (*needs, *baselines)
        for number in range(plan.candidates):
            keys: list[Key] = [("candidate", number, repeat) for repeat in range(plan.seeds)]
            for key in keys:
                yield self.trial(key, plan.length, RUN_ENDS, "a candidate from scratch", needs)
            needs = (*needs, *keys)
        if decays:
            yield from self.rates(tuple(baselines), decays=decays)
        for repeat in range(plan.seeds):
            what = "the schedule from scratch"
            yield self.trial(("schedule", repeat), plan.length, RUN_ENDS, what, needs)


def scratch_job(
    stages: Stages, samples: int, *, rate: float = 1.0, warmup_samples: int = 0
) -> dict[str, Any]:
    """A run from scratch with the first seed.

    Args:
        stages: One for a constant batch size, more for a schedule.
        samples: Length of the run.
        rate: Learning rate over the one that the rule gives.
        warmup_samples: Samples over which the rate rises from the task's own.
    """
    return {
        "kind": "scratch",
        "purpose": "schedule" if len(stages) > 1 else "constant",
        "repeat": 0,
        "batch_size": stages[-1][1],
        "rate": rate,
        "samples": samples,
        "warmup_samples": warmup_samples,
        "stages": [list(stage) for stage in stages],
    }


def stretches(stages: Sequence[Sequence[int]], samples: int) -> list[tuple[int, int, int]]:
    """Beginning, end and batch size of each stage of a run with ``samples``."""
    ends = [*(start for start, _ in stages[1:]), samples]
    return [(start, end, size) for (start, size), end in zip(stages, ends, strict=True)]


def run_marks(samples: int, size: int, first: int = 0) -> list[int]:
    """Samples of a run of the smallest batch after which it is evaluated, beyond ``first``."""
    way = (math.ceil(samples * part / size) * size for part in RUN_FRACTIONS)
    return [mark for mark in sorted({*way, *end_marks(samples, size)}) if mark > first]


def end_marks(samples: int, size: int) -> list[int]:
    """Samples at the end of a run after which every batch size is evaluated."""
    unit = end_unit(samples, size)
    return [samples // unit * unit - back * unit for back in reversed(range(RUN_ENDS))]


def averaged_end(curve: Curve, count: int = RUN_ENDS) -> list[tuple[int, float]]:
    """The curve with its last ``count`` points replaced by one point, their mean."""
    places, losses = zip(*curve[-count:], strict=True)
    mean = round(sum(places) / count), math.fsum(losses) / count
    return [*curve[:-count], mean]
