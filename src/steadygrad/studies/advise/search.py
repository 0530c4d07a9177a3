"""The next trainings of a study: a pure function of the results.

It decides at whole looks alone: neither the number of workers nor an interruption changes which
batch sizes are tried, and with which seeds.
"""

from collections.abc import Iterator

from steadygrad.studies.advise.analysis import BatchSizes
from steadygrad.studies.advise.growth import RESIDUAL, rungs_of
from steadygrad.studies.advise.plan import END_MARKS, LENGTHS
from steadygrad.studies.advise.schema import Header
from steadygrad.studies.folder import Results
from steadygrad.studies.paired import looked, next_look
from steadygrad.studies.schema import Trial, evaluation_cost

# Largest ratio of a batch size to the largest one that seemed to pass.
STRIDE = 4
# Largest ratio of two sizes between which the one that is sought may be interpolated.
CLOSE = 2
# Of the work, at most: for the critical size over a shorter length this times its part, over the
# longest, and for the check of a stand-in.
MORE, LONGEST, CHECK = 1.5, 0.6, 0.3


def trials_of(header: Header, results: Results) -> list[Trial]:
    """The trials that can run now, the most useful first."""
    rungs, real = rungs_of(header, results)
    found, trials = rungs[-1], list[Trial]()
    if found.pairs and not header.task.dependent and not header.plan.stand_in:
        cost, what = found.samples, f"noise scale over {found.samples:,}"
        trials.append(Trial(("noise", found.samples), cost, what, {"step": found.tuned}))
    rungs = rungs if header.plan.target else []
    # A stand-in is checked as soon as it is known at which sizes.
    for rung in sorted([*rungs, *([real] if real else [])], key=lambda rung: rung.samples):
        if not _is_done(rung) and (wanted := [*_sizes(rung, _border_arm(rung))]):
            return trials + [_trial(rung, *one) for one in wanted]
    return trials + [_trial(found, *one) for one in _sizes(found, _next_arm(found))]


def _is_done(rung: BatchSizes) -> bool:
    """The end of a length: its critical size is known or cannot be, or its work is done."""
    plan, own, arm = rung.plan, rung.critical, _border_arm(rung)
    part = MORE * rung.samples / sum(plan.rungs) if rung.samples < plan.samples else LONGEST
    part = CHECK if rung.skipped else part
    decided = arm is None and not rung.failed
    # Better than a power of the length fits, and no size between two that are far apart is left.
    known = own is not None and own.error <= RESIDUAL and (arm is None or arm in rung.pairs)
    return known or decided or rung.spent > part * plan.work


def _trial(found: BatchSizes, arm: int, samples: int, step: float, seed: int) -> Trial:
    evaluations = END_MARKS * (1 if arm or found.task.lr_decay != "none" else len(LENGTHS))
    cost = samples + evaluations * evaluation_cost(found.task.valid_size)
    what = f"batch {found.plan.arms[arm]} over {samples:,}, seed {seed}"
    what += f", {2.0**step:g} times the rate" if step else ""
    what += ", the real model" if found.skipped else ""
    return Trial(("training", found.skipped + arm, samples, step, seed), cost * found.weight, what)


def _sizes(found: BatchSizes, arm: int | None) -> Iterator[tuple[int, int, float, int]]:
    """Arm, samples, octaves and seed of trainings for the batch size that needs a look.

    Where none does, for the sizes on either side of the border.
    """
    if found.is_flat:
        return
    border = [arm for arm in (found.passed, found.failed) if arm is not None]
    border.sort(key=lambda arm: _pairs(found, arm))
    for each in border if arm is None else [arm]:
        yield from _look(found, each)


def _look(found: BatchSizes, arm: int) -> Iterator[tuple[int, int, float, int]]:
    """Trainings of an arm and of the smallest batch up to the next look, seed by seed.

    Where the learning rate is not known yet, the trainings that tell.
    """
    if (best := found.tuned) is None:
        for octave, seed in found.ladder.missing:
            yield 0, found.samples, float(octave), seed
        return
    for seed in range(_next(found, arm)):
        yield from ((0, length, best, seed) for length in found.lengths)
        yield arm, found.samples, best, seed


def _pairs(found: BatchSizes, arm: int) -> int:
    return len(found.pairs.get(arm, ()))


def _next(found: BatchSizes, arm: int) -> int:
    return next_look(_pairs(found, arm), looked(found.plan.seeds))


def _border_arm(found: BatchSizes) -> int | None:
    """The batch size that needs a look for the critical size: it is bracketed, then narrowed."""
    sizes, pairs, bad = found.sizes, found.pairs, found.failed
    fits = [arm for arm, each in pairs.items() if each.overheads[0] <= each.tolerance]
    low = max((arm for arm in fits if bad is None or arm < bad), default=0)
    if bad is None and (above := range(max(pairs, default=0) + 1, len(sizes))):
        # Until one is surely beyond the tolerance: a few pairs tell that of a much larger one.
        most = max(STRIDE * sizes[above[0] - 1], found.near)
        return max((arm for arm in above if sizes[arm] <= most), default=above[0])
    tried = [arm for arm in pairs if arm > low]
    between = range(low + 1, tried[0] if tried else len(sizes))
    if between and sizes[between[-1] + 1 if tried else -1] > CLOSE * sizes[low]:
        return between[len(between) // 2]
    border = [arm for arm in (low, *tried[:1]) if arm and _next(found, arm)]
    return min(border, key=lambda arm: _pairs(found, arm), default=None)


def _next_arm(found: BatchSizes) -> int | None:
    """The batch size that needs a look: the smallest that would raise the advice."""
    sizes, pairs = found.sizes, found.pairs
    good, bad = found.passed or 0, found.failed or len(sizes)
    # As far as it is known yet.
    fits = [a for a, each in pairs.items() if a < bad and each.overheads[0] <= each.tolerance]
    low = max(fits, default=0)
    tried = [arm for arm in pairs if arm > low]
    most = sizes[tried[0]] if tried else STRIDE * sizes[low] + 1
    between = [arm for arm in range(low + 1, len(sizes)) if sizes[arm] < most]
    if most <= STRIDE * sizes[low]:
        between = between[: (len(between) + 1) // 2]
    hard = [arm for arm in fits if arm > good and not pairs[arm].passed]
    # One below those that are hard to decide may be easy.
    below = range(good + 1, min(hard, default=0))
    middle = below[(len(below) - 1) // 2 : (len(below) + 1) // 2]
    # What is above the advice comes last: ruled out, or not.
    above = [arm for arm in pairs if low < arm < bad]
    for group in ((*between[-1:], *middle, *hard), above):
        if left := [arm for arm in group if _next(found, arm)]:
            return min(left)
    return None
