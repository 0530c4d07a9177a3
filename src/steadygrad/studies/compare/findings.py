"""From results to findings: searches for rates, verdicts, samples saved, and the summary."""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from statistics import median

import numpy as np
from msgspec.structs import replace
from scipy import special

from steadygrad.studies import paired
from steadygrad.studies.compare import schema, words
from steadygrad.studies.compare.schema import Edge, Header, Plan, Ratio, Summary, Tuned, Verdict
from steadygrad.studies.folder import Results
from steadygrad.studies.paired import SEEDS, Ladder
from steadygrad.studies.schema import Training

# Mean squared errors of a chosen learning rate, in octaves squared: one that is always added, a
# quarter of an octave; and the largest that noise can cause, as of a uniform draw from the two
# octaves on either side of the best rate.
LEAST_MISS, MOST_MISS = 1 / 16, 4 / 3
# Exponents of a loss curve: the usual one of power laws, and two that it lies between.
USUAL, FLAT, STEEP = 1 / 3, 0.0, 1.0


class Optimizers(paired.Evidence):
    """The trainings of a run, with searches and verdicts by number of the arm."""

    plan: Plan

    def __init__(self, header: Header, results: Results) -> None:
        super().__init__(header, results)
        self.ladders = [Ladder(self, arm, self.plan.samples) for arm in range(len(self.plan.arms))]

    def step(self, arm: int) -> float | None:
        """Octaves of the tuned rate above the arm's own; None where the search is not done."""
        return 0.0 if self.plan.has_own_rate(arm) else self.ladders[arm].minimum

    def pairs(self, arm: int, samples: int = 0) -> Mapping[int, Training]:
        """An arm's trainings at its tuned rate, by seed. Default: those of the whole length."""
        step = self.step(arm)
        found = {} if step is None else self.trainings(arm, samples or self.plan.samples, step)
        return {seed: run for seed, run in found.items() if seed not in SEEDS}

    @cached_property
    def judged(self) -> dict[int, tuple[Verdict | None, int]]:
        """By arm, the verdict and the pairs that it needs."""
        found, plan = {}, self.plan
        for arm in plan.compared:
            pairs = paired.losses_of(self.pairs(plan.baseline(arm)), self.pairs(arm)).shape[1]
            # A resume may have raised the plan's.
            most = max(pairs, plan.seeds)
            found[arm] = paired.judged(pairs, partial(self._judge, arm), most, plan.first)
        return found

    def wanted(self, arm: int) -> int:
        """Paired seeds that an arm is to be trained with: up to the next look, if it needs one.

        A baseline needs those of all that are compared with it.
        """
        own = (one for one in self.plan.compared if arm in (one, self.plan.baseline(one)))
        return max(self.judged[one][1] for one in own)

    def _judge(self, arm: int, pairs: int) -> Verdict:
        """The verdict by an arm's first trainings, and the baseline's with the same seeds."""
        plan, base, own = self.plan, self.pairs(self.plan.baseline(arm)), self.pairs(arm)
        a, b = paired.losses_of(base, own)[:, :pairs]
        alone = paired.tell(a, b, plan.alpha)
        choice = 0.0 if any(alone.lost) else self._choice(arm, alone.variance)
        told = paired.tell(a, b, plan.alpha, choice)
        many = np.geomspace(3, paired.BEYOND, 99)
        least = paired.half_width(many, told.variance, plan.alpha, choice=choice).min()
        needed = paired.pairs_needed(told.mean, told.variance, plan.alpha, choice=choice)
        within = not any(told.lost) and bool(abs(told.mean) + alone.high - alone.mean <= least)
        return Verdict(
            arm=arm,
            optimizer=plan.arms[arm].optimizer,
            batch_size=plan.arms[arm].batch_size,
            lr=own[0].lr,
            baseline_lr=base[0].lr,
            mean=told.mean,
            low=told.low,
            high=told.high,
            pairs=pairs,
            verdict="cannot tell" if not told.is_told else "better" if told.mean < 0 else "worse",
            needed=None if told.is_told or told.mean == 0 else needed,
            rates_limit=within and not told.is_told,
            lost=told.lost[1],
            baseline_lost=told.lost[0],
            losses={seed: own[seed].loss for seed in range(pairs)},
            baseline_losses={seed: base[seed].loss for seed in range(pairs)},
        )

    def _choice(self, arm: int, variance: float) -> float:
        """Variance of a mean difference that comes from the choice of both learning rates.

        ``variance``: of one difference. Seeds are paired, so that half of it is one run's noise.
        """
        both = [one for one in (arm, self.plan.baseline(arm)) if not self.plan.has_own_rate(one)]
        noise = variance / 2 / len(SEEDS)
        return sum(choice_variance(self.ladders[one].bend, noise) for one in both)

    def with_ratios(self, row: Verdict) -> Verdict:
        """A verdict with the samples and the time that the baseline needs for the same loss.

        The baseline's loss falls from half the length to the whole one; Student's interval of that
        counts, with 95 %. The time is that of the pairs' trainings, evaluations included, at the
        task's own batch size.
        """
        whole, baseline, time = row.baseline_losses, self.plan.baseline(row.arm), None
        short = self.pairs(baseline, self.plan.samples // 2)
        if row.failed or not {*range(row.pairs)} <= short.keys():
            return row
        falls = np.array([short[seed].loss - loss for seed, loss in whole.items()])
        error = float(falls.std(ddof=1)) / math.sqrt(row.pairs)
        error *= -float(special.stdtrit(row.pairs - 1, paired.ALPHA / 2))
        ratio = sample_ratio(row.mean, (row.low, row.high), float(falls.mean()), error)
        both = self.pairs(row.arm), self.pairs(baseline)
        own, other = (median(runs[n].time.get("seconds", 0.0) for n in whole) for runs in both)
        if ratio and own and other and row.batch_size == self.task.batch_size:
            time = Ratio(*(own / other / x for x in (ratio.value, ratio.high, ratio.low)))
        return replace(row, sample_ratio=ratio, time_ratio=time)

    def tuned(self, arm: int) -> Tuned:
        """The search for an arm's rate."""
        ladder, step, own = self.ladders[arm], self.step(arm), self.plan.arms[arm]
        # At the arm's own rate.
        runs = self.trainings(arm, self.plan.samples).values()
        has_ladder = step is not None and not self.plan.has_own_rate(arm)
        ends = min(ladder.losses), max(ladder.losses)
        return Tuned(
            optimizer=own.optimizer,
            batch_size=own.batch_size,
            lr=None if step is None else next((run.lr * 2.0**step for run in runs), None),
            step=step,
            interior=ladder.best not in ends if has_ladder else None,
            tried={octave: loss for octave, loss in ladder.losses.items() if loss is not None},
        )


def choice_variance(bend: float, noise: float) -> float:
    r"""Variance of an arm's loss that comes from the choice of its learning rate.

    Around the best rate the loss is a parabola, :math:`b e^2 / 2` at an error of :math:`e` octaves;
    the ``bend`` :math:`b` is the second difference of the losses there. The minimum of a parabola
    through three losses, each with the variance ``noise``, :math:`\sigma^2`, has a mean squared
    error of :math:`\sigma^2 / 2 b^2`; the ladder's steps limit it. A quarter of an octave, squared,
    is added because the loss is not exactly a parabola. The square of a normal error has a standard
    deviation of :math:`\sqrt 2` times its mean.
    """
    if not 0 < bend < math.inf:
        return 0.0
    miss = min(noise / (2 * bend * bend), MOST_MISS) + LEAST_MISS
    return 2 * (bend / 2 * miss) ** 2


def sample_ratio(mean: float, ends: tuple[float, float], fall: float, error: float) -> Ratio | None:
    r"""Samples that the baseline needs for the same loss, over those of the training.

    The baseline's loss falls by :math:`s` with twice the samples, ``fall`` give or take ``error``.
    On a power law with exponent :math:`\alpha` it changes by :math:`d = -\rho s`, which is ``mean``
    with an interval that has these ``ends``, with :math:`r` times the samples:

    .. math:: r = (1 - \rho (2^\alpha - 1))^{-1 / \alpha} \to 2^\rho \quad (\alpha \to 0)

    The value takes the exponent to be a third; the interval has all ratios with an exponent from 0
    to 1, and with :math:`d` and :math:`s` in theirs. So it leaves out one exactly where that of
    :math:`d` leaves out zero. All lie between a quarter and four: beyond them the baseline's loss
    curve is no guide. None where the baseline's loss did not clearly fall.
    """
    if not error < fall < math.inf or math.inf in ends:
        return None
    found = [
        _ratio(-apart / octave, exponent)
        for apart in ends
        for octave in (fall - error, fall + error)
        for exponent in (FLAT, STEEP)
    ]
    return Ratio(_ratio(-mean / fall, USUAL), min(found), max(found))


def _ratio(octaves: float, exponent: float) -> float:
    """Ratio of samples that changes the loss by a number of octaves, between its bounds."""
    if exponent:
        left = 1 - octaves * (2**exponent - 1)
        octaves = -math.log2(left) / exponent if left > 0 else math.inf
    least, most = math.log2(schema.LEAST_RATIO), math.log2(schema.MOST_RATIO)
    return float(2.0 ** min(max(octaves, least), most))


def summarize(header: Header, results: Results, status: str) -> Summary:
    """The summary: numbers, findings and words."""
    plan, task, rise = header.plan, header.task, header.rise(results)
    evidence = Optimizers(header, Results() if rise else results)
    tuned = tuple(map(evidence.tuned, range(len(plan.arms))))
    return Summary(
        study="compare",
        status=status,
        task=task.name,
        sample=task.sample,
        samples=plan.samples,
        confidence=1 - plan.alpha,
        findings=tuple(find(evidence, tuned)),
        optimizers=titles_of(header),
        tuned=tuned,
        rise=rise,
    ).worded(words)


def find(evidence: Optimizers, tuned: Iterable[Tuned]) -> Iterator[Edge | Verdict]:
    """The findings, the most important first."""
    rows = [evidence.with_ratios(row) for row, _ in evidence.judged.values() if row]
    # A better rate could overturn the answer where it is of one that is behind.
    ahead = {(schema.BASELINE, row.batch_size) for row in rows if row.verdict == "better"}
    behind = ahead or {(row.optimizer, row.batch_size) for row in rows}
    for own in tuned:
        if own.interior is False and math.isfinite(min(own.tried.values())):
            hangs = (own.optimizer, own.batch_size) in behind
            yield Edge(optimizer=own.optimizer, batch_size=own.batch_size, hangs=hangs)
    # Those that diverged first, then those that are better.
    order = ("better", "cannot tell", "worse")
    yield from sorted(rows, key=lambda row: (not row.lost, order.index(row.verdict)))


def titles_of(header: Header) -> dict[str, str]:
    """Names of the optimizers in sentences, AdamW first."""
    own = f"{header.task.optimizer or 'The optimizer'} of the task"
    known = {**schema.KNOWN, schema.OWN: own}
    return {arm.optimizer: known.get(arm.optimizer, arm.optimizer) for arm in header.plan.arms}
