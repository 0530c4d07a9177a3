"""How often ``steadygrad compare`` is wrong, and how many pairs it takes, where the truth is known.

    python benchmarks/compare_truth.py --save

Whole studies by the study's own search and looks, without training: a loss is a parabola in the
octaves of the rate, around a best rate anywhere in two octaves, beside the noise that one seed's
runs share and each run's own. With no difference, both are the same optimizer, whose ladders begin
elsewhere: every verdict is wrong.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side_by_side import hardware, save

from steadygrad.studies.compare.findings import Optimizers
from steadygrad.studies.compare.schema import Arm, Plan, Verdict
from steadygrad.studies.folder import Results
from steadygrad.studies.paired import MOST
from steadygrad.studies.schema import Training

# Deviation of the noise that the runs of a seed share, over that of each run's own.
SHARED = 2.0
# Loss that one octave from the best rate costs, over that deviation: from flat to steep.
BOWLS = (0.1, 0.3, 1.0, 3.0, 10.0)
HEAD = ("optimizers", "difference", "an octave costs", "any verdict", "right", "pairs, mean")


class Losses:
    """The losses of one study: each is drawn once, whenever it is asked for."""

    def __init__(self, number: int, bowl: float, shifts: tuple[float, ...], cliff: bool) -> None:
        self._number, self._bowl, self._shifts, self._cliff = number, bowl, shifts, cliff
        self._best = np.random.default_rng(number).uniform(-1, 1, len(shifts))

    def __call__(self, arm: int, step: float, seed: int) -> float:
        own = np.random.default_rng([self._number, arm, 100 + round(4 * step), seed, 1]).normal()
        common = SHARED * np.random.default_rng([self._number, seed]).normal()
        away = step - self._best[arm]
        # A loss that grows faster on the side of large rates is no parabola.
        steeper = 2.0 if self._cliff and away > 0 else 1.0
        return float(self._shifts[arm] + self._bowl * steeper * away**2 + own + common)


def study(number: int, bowl: float, shifts: tuple[float, ...], cliff: bool) -> list[Verdict]:
    """The verdicts of a whole study: pairs that run ahead change nothing, so that all are run."""
    names = ("adamw", *map(str, range(1, len(shifts))))
    plan = Plan(arms=tuple(Arm(name, 8) for name in names), samples=2, seeds=MOST, work=1)
    header: Any = SimpleNamespace(plan=plan, task=None, settings=None)
    losses, results = Losses(number, bowl, shifts, cliff), Results()

    def train(arm: int, step: float, seed: int) -> None:
        loss, length = losses(arm, step, seed), plan.samples
        results.add(Training(arm=arm, samples=length, step=step, seed=seed, lr=1.0, loss=loss))

    evidence = Optimizers(header, results)
    for arm in range(len(shifts)):
        while missing := [*evidence.ladders[arm].missing]:
            for step, seed in missing:
                train(arm, step, seed)
            evidence = Optimizers(header, results)
        for seed in range(MOST):
            train(arm, evidence.step(arm) or 0.0, seed)
    return [one for one, _ in Optimizers(header, results).judged.values() if one]


def row(
    studies: int, bowl: float, others: int = 1, effect: float = 0.0, cliff: bool = False
) -> str:
    """How many studies gave a verdict, a right one on the last optimizer, and by how many pairs.

    ``effect``: by how much the last optimizer is better, in deviations of a pair's difference.
    """
    shifts = (*[0.0] * others, -effect * math.sqrt(2))
    said, right, pairs = 0, 0, 0.0
    for number in range(studies):
        found = study(number, bowl, shifts, cliff)
        said += any(one.verdict != "cannot tell" for one in found)
        right += found[-1].verdict == "better"
        pairs += float(np.mean([one.pairs for one in found]))
    power = f"{100 * right / studies:.1f} %" if effect else "–"
    share, kind = f"{100 * said / studies:.1f} %", ", no parabola" if cliff else ""
    mean = f"{pairs / studies:.1f}"
    return line([f"{others}{kind}", f"{effect:g}", f"{bowl:g}", share, power, mean])


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(studies: int) -> str:
    """The table."""
    rows = [line(HEAD), line(["---"] * len(HEAD))]
    rows += [row(studies, bowl) for bowl in BOWLS]
    rows += [row(studies, 1.0, others=3), row(studies, 1.0, cliff=True)]
    rows += [row(studies // 4, bowl, effect=e) for e in (1.0, 2.0) for bowl in BOWLS[1:4]]
    text = (
        f"# `compare` where the truth is known, {date.today()}\n\n{studies:,} studies a row, and a "
        f"quarter of them where there is a difference, of up to {MOST} pairs. A difference is in "
        f"deviations of one pair's, the cost of an octave in those of one run. {hardware()}.\n"
    )
    return "\n".join([text, *rows]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    found = main(asked.studies)
    print(found)
    if asked.save:
        print(save("compare-truth", found, date.today().isoformat()))
