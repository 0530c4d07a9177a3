"""The next trainings of a study: a pure function of the results.

Three searches go on side by side: for the batch size, for the learning rates, and along branches.
The first has precedence until another has taken less than its part of the samples. It decides by
its own results, at whole looks alone: neither the number of workers nor an interruption changes
which batch sizes are tried, and with which seeds.
"""

import math
from collections.abc import Iterator
from typing import get_args

from steadygrad.studies.advise.analysis import RATES, TUNING, Evidence
from steadygrad.studies.advise.plan import (
    BRANCHES,
    END_MARKS,
    FRACTIONS,
    LENGTHS,
    MICRO_BATCHES,
    OTHER_RATES,
    PAIRS,
    course_of,
    lengths_of,
)
from steadygrad.studies.advise.schema import RESULTS, Branch, Header, Noise, Point, Scratch
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Key, Result
from steadygrad.studies.sequential import LOOKS, next_look
from steadygrad.studies.trials import Job, Trial, evaluation_cost

# Largest ratio of a batch size to the largest one that seemed to pass.
STRIDE = 4
# Trainings of the search for the batch size before the others begin.
FIRST = 9


def trials_of(header: Header, results: Results) -> list[Trial]:
    """The trials that can run now, the most useful first."""
    evidence = Evidence(header, results)
    done = {
        "sizes": sum(run.samples for run in results.select(Scratch) if run.rate == 1),
        "rates": sum(run.samples for run in results.select(Scratch) if run.rate != 1),
        "branches": sum(branch.samples for branch in results.select(Branch))
        + sum(noise.samples for noise in results.select(Noise))
        + max((point.samples for point in results.select(Point)), default=0),
    }
    found = {"sizes": _sizes(evidence), "rates": _rates(evidence), "branches": _branches(evidence)}
    behind = [
        name
        for name, part in (("rates", OTHER_RATES), ("branches", BRANCHES))
        if done[name] < part * (sum(done.values()) - FIRST * evidence.length)
    ]
    trials: dict[Key, Trial] = {}
    for name in (*behind, *found):
        for job in found[name]:
            trial = _trial(evidence, job)
            trials.setdefault(trial.key, trial)
    return [trial for trial in trials.values() if trial.key not in results]


def _trial(evidence: Evidence, job: Job) -> Trial:
    plan, evaluation = evidence.plan, evaluation_cost(evidence.task.valid_size)
    kinds: dict[str, type[Result]] = {str(k.__struct_config__.tag): k for k in get_args(RESULTS)}
    key: Key = (job["kind"], *(job[name] for name in kinds[job["kind"]].key_fields))
    if job["kind"] == "scratch":
        own = job["course"] == evidence.base
        cost = job["samples"] + evaluation * END_MARKS * (len(LENGTHS) if own else 1)
        what = f"{job['course']} over {job['samples']:,}"
        what += f" at {job['rate']:g} times the rate" if job["rate"] != 1 else ""
        return Trial(key, cost, lambda results: job, f"{what}, seed {job['repeat']}")
    samples, where = plan.points[job["point"]], f"at {plan.points[job['point']]:,}"
    if job["kind"] == "point":
        start = plan.points[job["point"] - 1] if job["point"] else 0
        return Trial(key, samples - start + evaluation, lambda results: job, f"training {where}")
    if job["kind"] == "noise":
        cost = plan.noise_steps[job["point"]] * MICRO_BATCHES * plan.batch_size
        return Trial(key, cost, lambda results: job, f"noise scale {where}")
    marks = END_MARKS + (len(FRACTIONS) if job["batch_size"] == plan.batch_size else 0)
    cost = plan.branch_samples[job["point"]] + marks * evaluation
    return Trial(key, cost, lambda results: job, f"branch of {job['batch_size']:,} {where}")


def _training(evidence: Evidence, course: str, repeat: int, rate: float, samples: int) -> Job:
    warmup = 0 if course == evidence.base else evidence.warmup_samples
    names = ("kind", "course", "repeat", "rate", "samples", "warmup_samples")
    return dict(zip(names, ("scratch", course, repeat, rate, samples, warmup), strict=True))


def _look(evidence: Evidence, course: str, pairs: int, rate: float = 1.0) -> Iterator[Job]:
    """Trainings of a course and of the smallest batch with so many seeds, seed by seed.

    Where rates are tuned and those of the two are not known yet, the trainings that tell.
    """
    own, best = evidence.tuned(evidence.base), evidence.tuned(course)
    if own is None or best is None:
        yield from _tuning(evidence, evidence.base if own is None else course)
        return
    for repeat in range(pairs):
        yield from _reference(evidence, repeat, own)
        for factor in dict.fromkeys((best, rate * best)):
            yield _training(evidence, course, repeat, factor, evidence.length)


def _reference(evidence: Evidence, repeat: int, rate: float) -> Iterator[Job]:
    """The smallest batch's training; of each length, where the rate decays."""
    samples, decays = evidence.length, evidence.task.lr_decay != "none"
    for length in lengths_of(samples, evidence.tolerance) if decays else [samples]:
        yield _training(evidence, evidence.base, repeat, rate, length)


def _tuning(evidence: Evidence, course: str) -> Iterator[Job]:
    for step, loss in evidence.ladder(course).items():
        if loss is None:
            for repeat in TUNING:
                yield _training(evidence, course, repeat, 2.0**step, evidence.length)


def _sizes(evidence: Evidence) -> Iterator[Job]:
    """The batch size: visited by strides and by halves, then decided, then the schedule."""
    if not evidence.length:
        return
    if not evidence.header.settings.tune and len(evidence.own) < LOOKS[0]:
        for repeat in range(LOOKS[0]):
            yield from _reference(evidence, repeat, 1.0)
        return
    size = _next_size(evidence)
    if size is not None:
        pairs = evidence.sizes.get(size)
        yield from _look(evidence, str(size), _next(evidence, len(pairs) if pairs else 0))
        return
    if schedule := evidence.schedule:
        pairs = evidence.schedule_pairs
        if pairs is None or not (pairs.passed or pairs.failed):
            look = _next(evidence, len(pairs) if pairs else 0, PAIRS)
            yield from _look(evidence, course_of(schedule), look)
    # All is decided: the sizes on either side of the border become more certain.
    border = [size for size in (evidence.passed, evidence.failed) if size]
    for size in sorted(border, key=lambda size: len(evidence.sizes[size])):
        yield from _look(evidence, str(size), _next(evidence, len(evidence.sizes[size])))


def _next(evidence: Evidence, pairs: int, most: int = LOOKS[-1]) -> int:
    return next_look(pairs, min(most, evidence.plan.seeds))


def _next_size(evidence: Evidence) -> int | None:
    """The batch size that needs a look: the smallest that would raise the advice."""
    rungs, sizes = evidence.rungs, evidence.sizes
    good, bad = evidence.passed or rungs[0], evidence.failed or math.inf
    # As far as it is known yet.
    fits = [s for s, pairs in sizes.items() if s < bad and pairs.overheads[0] <= pairs.tolerance]
    low = max(fits, default=rungs[0])
    high = min((size for size in sizes if size > low), default=STRIDE * low + 1)
    between = [size for size in rungs if low < size < high]
    if high <= STRIDE * low:
        between = between[: (len(between) + 1) // 2]
    hard = [size for size in fits if size > good and not sizes[size].passed]
    # One below those that are hard to decide may be easy.
    below = [size for size in rungs if good < size < min(hard, default=0)]
    middle = below[(len(below) - 1) // 2 : (len(below) + 1) // 2]
    undecided = [size for size in hard if _next(evidence, len(sizes[size]))]
    if wanted := [*between[-1:], *middle, *undecided]:
        return min(wanted)
    # What is above the advice: ruled out, or not.
    above = (s for s in sizes if low < s < bad and _next(evidence, len(sizes[s])))
    return next(above, None)


def _rates(evidence: Evidence) -> Iterator[Job]:
    """Other learning rates, at the smallest batch and then at the recommended one."""
    if len(evidence.own) < LOOKS[0] or evidence.header.settings.tune:
        return
    for size in dict.fromkeys((evidence.plan.batch_size, evidence.constant)):
        known = evidence.rate(size) if size else {}
        sure = len(known) == len(RATES) and any(found.sure for found in known.values())
        if size is None or sure:
            continue
        for rate in RATES:
            found = known.get(rate)
            if found is None or not found.decided:
                look = _next(evidence, found.pairs if found else 0, PAIRS)
                yield from _look(evidence, str(size), look, rate)


def _branches(evidence: Evidence) -> Iterator[Job]:
    """Point by point: the training to it, then what starts from there.

    They have the rule's rates, so that they would tell nothing where rates are tuned.
    """
    plan, results = evidence.plan, evidence.results
    if evidence.header.settings.tune:
        return
    for point, multiples in enumerate(plan.multiples):
        if results.get(Point, point) is None:
            yield {"kind": "point", "point": point}
            return
        jobs: list[Job] = [
            {"kind": "branch", "point": point, "repeat": repeat, "batch_size": m * plan.batch_size}
            for repeat in range(plan.repeats)
            for m in multiples
        ]
        if not evidence.task.dependent:
            jobs.insert(0, {"kind": "noise", "point": point})
        missing = [job for job in jobs if _trial(evidence, job).key not in results]
        # The next point waits for the middle of this one.
        if not missing and results.get(Point, point + 1) is None:
            missing = [
                job for job in _middle(evidence, point) if _trial(evidence, job).key not in results
            ]
        if missing:
            yield from missing
            return


def _middle(evidence: Evidence, point: int) -> Iterator[Job]:
    """Branches in the middle between the largest tolerable size and the next one."""
    plan, branches = evidence.plan, evidence.results.select(Branch)
    sizes = {multiple * plan.batch_size for multiple in plan.multiples[point]}
    kept = [b for b in branches if b.point == point and b.batch_size in sizes]
    found = Evidence(evidence.header, Results(kept)).criticals.get(point)
    if found is None or not found.resolved or found.beyond != 2 * found.within:
        return
    size, odd = divmod(3 * found.within, 2)
    if odd or size % evidence.header.runtime.world_size:
        return
    for repeat in range(plan.repeats):
        yield {"kind": "branch", "point": point, "repeat": repeat, "batch_size": size}
