"""How often the test of the studies is wrong, and how many pairs it takes, by known truths.

    python benchmarks/ab_truth.py --save

It measures the choice of the one test that ``advise``, ``compare`` and ``ab`` have. Ten thousand
studies a row, looked at after every pair up to 100. The mixture's sequential t is tried with
several variances g of the effects. Beside it: Student's intervals at ten looks (Pocock's rule),
bets on the signs of the differences (Krichevsky and Trofimov's mixture), and the rule that believes
one pair of runs if it differs by more than two deviations of A's runs. And the test of ``advise``
and ``compare``: at their looks, with a variance that is known from elsewhere.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
from scipy import special

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side_by_side import hardware, save

from steadygrad.studies import paired
from steadygrad.studies.ab.findings import judge
from steadygrad.studies.paired import NOTHING, Prior, interval, next_look

PAIRS, ALPHA, CHUNK = 100, 0.05, 1000
# Variances of the effects.
TRIED = 1.0, 2.0, 4.0, 16.0
EFFECTS = 0.5, 1.0, 2.0, 4.0
# Pairs at ten looks and the level of each: together they are wrong in 5 % of studies.
TEN, LEVEL = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64), 0.0078
Floats = np.ndarray
Draw = Callable[[np.random.Generator, tuple[int, int]], Floats]

NOISE: dict[str, Draw] = {
    "normal": lambda g, shape: g.normal(size=shape),
    "t with 3 degrees": lambda g, shape: g.standard_t(3, shape),
    "skewed (log-normal)": lambda g, shape: g.lognormal(size=shape),
    "two values, half each": lambda g, shape: 1.0 * (g.random(shape) < 0.5),
    "two values, one in ten": lambda g, shape: 1.0 * (g.random(shape) < 0.1),
    "two values and 1 % noise": lambda g, shape: (g.random(shape) < 0.5) + g.normal(0, 0.01, shape),
    "normal, one run in ten fails": lambda g, shape: np.where(
        g.random(shape) < 0.1, math.nan, g.normal(size=shape)
    ),
}

SHAPE = CHUNK, PAIRS
# Metrics of a B that is higher by half a deviation, and that half.
HIGHER = {
    "normal": (lambda g: g.normal(0.5, 1, SHAPE), 0.5),
    "t with 3 degrees": (lambda g: g.standard_t(3, SHAPE) + 0.866, 0.866),
    "two values, half each": (lambda g: 1.0 * (g.random(SHAPE) < 0.75), 0.25),
    "two values, one in ten": (lambda g: 1.0 * (g.random(SHAPE) < 0.25), 0.15),
}


def draw(name: str, correlated: bool, g: np.random.Generator) -> tuple[Floats, Floats]:
    """Metrics of A and B; of correlated pairs four in five, or of the variance, are common."""
    common, a, b = (NOISE[name](g, SHAPE) for _ in range(3))
    if not correlated:
        return a, b
    if "two" in name or "fails" in name:
        return a, np.where(g.random(SHAPE) < 0.8, a, b)
    return tuple(math.sqrt(0.8) * common + math.sqrt(0.2) * own for own in (a, b))


def mixture(g: float, a: Floats, b: Floats) -> Floats:
    """Verdicts of better or worse; a study ends at its first one."""
    with patch.object(paired, "EFFECT_VARIANCE", g):
        found = judge(a, b, ALPHA)
    return found.decided & ~np.logical_or.accumulate(found.negligible, -1)


def ten_looks(a: Floats, b: Floats) -> Floats:
    """Verdicts of Student's intervals at ten looks."""
    found = np.zeros(a.shape, bool)
    for n in TEN:
        apart = (b - a)[:, :n]
        half = -special.stdtrit(n - 1, LEVEL / 2) * apart.std(-1, ddof=1) / math.sqrt(n)
        found[:, n - 1] = np.abs(apart.mean(-1)) > half
    return found


def signs(a: Floats, b: Floats) -> Floats:
    """Verdicts of bets on the signs; valid for every symmetric distribution."""
    more, less = ((x.cumsum(-1)) for x in (b > a, b < a))
    won = special.betaln(more + 0.5, less + 0.5) - special.betaln(0.5, 0.5)
    return won + (more + less) * math.log(2) >= math.log(1 / ALPHA)


MIXTURES = {f"g = {g:g}": partial(mixture, g) for g in TRIED}
RULES = {**MIXTURES, "ten looks": ten_looks, "signs": signs}


def at_looks(g: float, prior: Prior, apart: Floats) -> Floats:
    """Verdicts on differences at the looks of ``advise`` and ``compare``, the last after 64."""
    found, look = np.zeros(apart.shape, bool), 0
    with patch.object(paired, "EFFECT_VARIANCE", g):
        while look := next_look(look):
            _, low, high = interval(apart[:, :look], ALPHA, prior)
            found[:, look - 1] = (low > 0) | (high < 0)
    return found


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def drawn(studies: int, make: Callable[[np.random.Generator], tuple]) -> Iterator[tuple]:
    g = np.random.default_rng(0)
    return (make(g) for _ in range(studies // CHUNK))


def wrong(studies: int) -> list[str]:
    """Rows of A against A."""
    rows = []
    for name in NOISE:
        for correlated in (False, True):
            hits = {rule: 0 for rule in RULES if rule in MIXTURES or "fails" not in name}
            two_sigma = 0.0
            for a, b in drawn(studies, lambda g, n=name, c=correlated: draw(n, c, g)):
                for rule in hits:
                    hits[rule] += RULES[rule](a, b).any(-1).sum()
                # No difference, NaN, is no large one.
                two_sigma += (np.abs(b - a)[:, 0] > 2 * np.nanstd(a)).sum()
            cells = [f"{100 * hits[r] / studies:.1f} %" if r in hits else "–" for r in RULES]
            cells.append(f"{100 * two_sigma / studies:.1f} %")
            rows.append(line([name, "yes" if correlated else "no", *cells]))
    return rows


def more_wrong(studies: int) -> list[str]:
    """Several Bs, differences that are skewed themselves, and an effect that is called small."""
    count = {"three Bs that are A": 0, "no true mean, differences exponential": 0}
    for (three,) in drawn(studies, lambda g: (g.normal(size=(4, *SHAPE)),)):
        found = [judge(three[0], b, ALPHA / 3).decided.any(-1) for b in three[1:]]
        count["three Bs that are A"] += np.any(found, 0).sum()
    for a, apart in drawn(studies, lambda g: (g.normal(size=SHAPE), g.exponential(size=SHAPE) - 1)):
        own = mixture(paired.EFFECT_VARIANCE, a, a + apart)
        count["no true mean, differences exponential"] += own.any(-1).sum()
    for name, (own, size) in HIGHER.items():
        key = f"{name}, B truly higher by {size:g}: no difference of {size:g}"
        count[key] = 0
        for a, b in drawn(studies, lambda g, n=name, o=own: (NOISE[n](g, SHAPE), o(g))):
            found = judge(a, b, ALPHA, smallest=size * (1 - 1e-9))
            count[key] += found.negligible[np.arange(CHUNK), found.decided.argmax(-1)].sum()
    return [line([name, f"{100 * hits / studies:.1f} %"]) for name, hits in count.items()]


def pairs(studies: int) -> list[str]:
    """Pairs that find an effect, and those of a fixed-length test with the same power."""
    rows = []
    for effect in EFFECTS:
        g = np.random.default_rng(0)
        apart = g.normal(effect, 1.0, (studies, PAIRS))
        # What both have in common: a run of A is no other one, repeated.
        common = np.split(g.normal(size=apart.shape), studies // CHUNK)
        parts = [(a, a + x) for a, x in zip(common, np.split(apart, studies // CHUNK), strict=True)]
        for rule in RULES:
            says = [RULES[rule](a, b) for a, b in parts]
            found = np.concatenate(says)
            first = np.where(found.any(-1), 1 + found.argmax(-1), PAIRS)
            for power in (0.8, 0.9):
                # The first number of pairs that reaches it; more where looks are rare.
                most = int(np.quantile(np.where(found.any(-1), first, PAIRS + 1), power))
                reached = (first <= most).mean()
                fixed = fixed_length(effect, min(float(reached), 0.9999))
                mean = np.minimum(first, most).mean()
                at_most = f"{most}" if most <= PAIRS else f"over {PAIRS}"
                numbers = [f"{effect:g}", rule, f"{100 * reached:.0f} %", f"{fixed}"]
                numbers += [f"{mean:.1f}", at_most, f"{mean / fixed:.2f}", f"{most / fixed:.2f}"]
                rows.append(line(numbers))
    return rows


def looked(studies: int) -> list[str]:
    """Studies of no effect that are wrong at looks, and mean pairs that find one; at most 64."""
    rows = []
    for freedom in (0.0, 2.0):
        for g in TRIED:
            draw, cells = np.random.default_rng(0), []
            for effect in (0.0, *EFFECTS):
                apart = draw.normal(effect, 1.0, (studies, paired.MOST))
                known = Prior(draw.chisquare(2, studies) / 2, freedom)
                found = at_looks(g, known if freedom else NOTHING, apart)
                told = found.any(-1)
                first = np.where(told, 1 + found.argmax(-1), paired.MOST)
                cells.append(f"{first.mean():.1f}" if effect else f"{100 * told.mean():.1f} %")
            rows.append(line([f"{freedom:g}", f"{g:g}", *cells]))
    return rows


def fixed_length(effect: float, power: float) -> int:
    """Pairs of Student's test that finds an effect, in deviations, with this power."""

    def reached(n: int) -> float:
        limit = -special.stdtrit(n - 1, ALPHA / 2)
        return 1 - float(special.nctdtr(n - 1, effect * math.sqrt(n), limit))

    return next(n for n in range(2, 10_000) if reached(n) >= power)


def main() -> None:
    """Prints the tables, and saves them if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--studies", type=int, default=10_000)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    today = date.today().isoformat()
    heads = {
        "wrong": ["metric", "correlated", *RULES, "two sigma, one pair"],
        "other": ["truth", "wrong"],
        "pairs": ["effect", "rule", "power", "fixed length", "mean pairs", "most"],
        "looked": ["degrees", "g", "wrong", *(f"effect {effect:g}" for effect in EFFECTS)],
    }
    heads["pairs"] += ["mean / fixed", "most / fixed"]
    rows = {"wrong": wrong, "other": more_wrong, "pairs": pairs, "looked": looked}
    tables = {
        name: "\n".join([line(head), line(["---"] * len(head)), *rows[name](args.studies)])
        for name, head in heads.items()
    }
    g = f"g = {paired.EFFECT_VARIANCE:g}"
    prior = (
        "The variance of a difference is known from elsewhere with so many degrees of freedom: it "
        "is drawn as chi-square over them, times the true one. Studies that find none count as 64."
    )
    text = [
        f"# The test of the studies where the truth is known, {today}",
        hardware(),
        f"{args.studies:,} studies a row, `python benchmarks/ab_truth.py --save`.",
        "## A against A: studies that ever say better or worse, looked at after each of 100 pairs",
        tables["wrong"],
        f"The studies have {g}. Both rows of normal metrics agree: what pairs share cancels.",
        f"## Other errors of the mixture, {g}",
        tables["other"],
        "## Pairs that find an effect, in deviations of one difference",
        "Studies end after the most pairs; the fixed-length t test has the power that they reach.",
        tables["pairs"],
        "## Studies that look at 3, 4, 5, 6, 7, 8, 10, 12, 15, ... 64 pairs: wrong, and mean pairs",
        prior,
        tables["looked"],
    ]
    print("\n\n".join(text))
    if args.save:
        print("saved to", save("ab-truth", "\n\n".join(text) + "\n", today))


if __name__ == "__main__":
    main()
