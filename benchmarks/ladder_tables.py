"""Critical batch sizes of long trainings, predicted from shorter ones in a table of real trainings.

    python benchmarks/ladder_tables.py TABLE.csv [--alternatives]

The columns of a table are `model,samples,batch_size,lr,loss`, of whole trainings each; a model is
its number of parameters, such as 215M. The last line is JSON. This is the plan; versions of it had
run on the dense table of Li et al. (2025), so that another table has to judge it:

* **Truth** of a model and a length: of each batch size the loss at its best rate (a parabola of the
  logarithm of the rate), and its overhead over the best batch size (the share of extra samples by
  which the model's curve, E + A n^(-1/3) through its best losses, falls as far). The critical size
  is where the overhead crosses 20 % for the last time, by interpolation of log size.
* **Targets**: lengths whose critical size is within the table, and that have a rung: lengthwise the
  same model's lengths of a quarter at most, and with a stand-in the lengths of a quarter at most of
  models of at most 55 % of the parameters. Each counts once lengthwise, once with a stand-in.
* **A rung** is a search in octaves among the table's sizes, from the middle of them or from the
  last rung's size: up while the largest one tried is within the tolerance, down until one is half
  of the largest within it. Rates are searched a factor of two apart: "tuned" at each size; "once"
  at the first one, others by the square-root rule. Its error is a quarter of an octave: not fitted.
* **Curves** of a rung leave out the target's length where two others are left. A table has no
  trainings of 1/1.2 and 1/1.6 of a length, which the program compares with; a rung pays for them.
* **Choice** among plans (one to three rungs, of one model, tuned or once): the dearest one that
  fits the share (0.7 lengthwise, 0.15 with a stand-in), or else the cheapest. Truths have no say.
* **Cost**: parameters times samples of all trainings of the plan, over the target's.
* **Safe** is the largest size that the top rung tried and passed; it is too bold where its overhead
  at the target is beyond 25 %.
"""

import argparse
import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from steadygrad.studies.advise.growth import STAND_IN, predict
from steadygrad.studies.advise.schema import WIDTH, Critical

TOLERANCE, BEYOND, NEAR = 0.2, 0.25, 1.5
SHARES = {"lengthwise": 0.7, "stand-in": 0.15}
POWER = 1 / 3
# A quarter of an octave is a deviation.
SPAN = math.exp(WIDTH * math.log(2) / 4)
# Reference trainings of a rung over 1/1.2 and 1/1.6 of its length.
REFERENCES = 1 / 1.2 + 1 / 1.6

Curve = tuple[float, float]
Cell = tuple[str, int]


def parameters(model: str) -> float:
    units = {"K": 1e3, "M": 1e6, "B": 1e9}
    return float(model[:-1]) * units[model[-1]] if model[-1] in units else float(model)


def lowest(losses: dict[float, float]) -> tuple[float, float]:
    """Logarithm of the best rate and its loss, by the parabola through the best three."""
    rates = sorted(losses)
    i = min(range(len(rates)), key=lambda k: losses[rates[k]])
    if not 0 < i < len(rates) - 1:
        return math.log(rates[i]), losses[rates[i]]
    x = np.log(rates[i - 1 : i + 2])
    a, b, _ = np.polyfit(x - x[1], [losses[rate] for rate in rates[i - 1 : i + 2]], 2)
    at = -b / (2 * a) if a > 0 else 0.0
    return float(x[1] + at), float(losses[rates[i]] + a * at**2 + b * at)


@dataclass
class Table:
    """The final loss by model and length, batch size, and rate."""

    losses: dict[Cell, dict[int, dict[float, float]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Table":
        found: Any = defaultdict(lambda: defaultdict(dict))
        with path.open() as lines:
            for row in csv.DictReader(lines):
                cell = row["model"], int(float(row["samples"]))
                size, lr, loss = (float(row[name]) for name in ("batch_size", "lr", "loss"))
                if math.isfinite(loss):
                    found[cell][int(size)][lr] = loss
        return cls({cell: {**sizes} for cell, sizes in sorted(found.items())})

    def tuned(self, cell: Cell) -> dict[int, float]:
        return {size: lowest(rates)[1] for size, rates in sorted(self.losses[cell].items())}

    def slope(self, model: str, without: Cell | None = None) -> float:
        """A of a model's curve E + A n^(-1/3); NaN where it has one length."""
        cells = [cell for cell in self.losses if cell[0] == model]
        if len([cell for cell in cells if cell != without]) > 1:
            cells = [cell for cell in cells if cell != without]
        x = [cell[1] ** -POWER for cell in cells]
        y = [min(self.tuned(cell).values()) for cell in cells]
        return float(np.polyfit(x, y, 1)[0]) if len(cells) > 1 else math.nan


def overhead_of(samples: int, loss: float, best: float, slope: float) -> float:
    """The extra samples, as a share, of a training that ends at ``loss`` and not at ``best``."""
    return (1 + (loss - best) / slope * samples**POWER) ** (1 / POWER) - 1


def border(losses: dict[int, float], samples: int, slope: float) -> float:
    """The size at which the overhead crosses the tolerance for the last time; infinite if none."""
    best = min(losses.values())
    sizes = sorted(losses)
    extra = [overhead_of(samples, losses[size], best, slope) for size in sizes]
    last = max(i for i, each in enumerate(extra) if each <= TOLERANCE)
    if last == len(sizes) - 1:
        return math.inf
    part = (TOLERANCE - extra[last]) / (extra[last + 1] - extra[last])
    return float(sizes[last] * (sizes[last + 1] / sizes[last]) ** part)


@dataclass
class Search:
    """A search on one rung: what it trained, and what it found."""

    table: Table
    cell: Cell
    slope: float
    tuned: bool
    trainings: set[tuple[int, float]] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    first: tuple[int, float] | None = None

    def train(self, size: int, rate: float) -> tuple[float, float]:
        """The nearest rate of the table and its loss."""
        known = self.table.losses[self.cell][size]
        lr = min(known, key=lambda each: abs(math.log(each / rate)))
        self.trainings.add((size, lr))
        return lr, known[lr]

    def ladder(self, size: int, rate: float) -> tuple[float, float]:
        """The best rate and its loss, by a search a factor of two apart."""
        found = dict(self.train(size, rate * 2.0**step) for step in (-1, 0, 1))
        for _ in range(6):
            best = min(found, key=lambda lr: found[lr])
            end = {min(found): 0.5, max(found): 2.0}.get(best)
            if end is None:
                break
            lr, loss = self.train(size, best * end)
            if lr in found:
                break
            found[lr] = loss
        at, loss = lowest(found)
        return math.exp(at), loss

    def visit(self, size: int) -> None:
        if self.first is None:
            rates = sorted({lr for known in self.table.losses[self.cell].values() for lr in known})
            lr, self.losses[size] = self.ladder(size, rates[len(rates) // 2])
            self.first = size, lr
            return
        at, rate = self.first
        rate *= math.sqrt(size / at)
        self.losses[size] = (self.ladder if self.tuned else self.train)(size, rate)[1]

    def run(self, start: float) -> "Search":
        known = [*self.table.losses[self.cell]]
        near = min(known, key=lambda size: abs(math.log(size / start)))
        self.visit(near)
        while True:
            best = min(self.losses.values())
            extra = {
                size: overhead_of(self.cell[1], loss, best, self.slope)
                for size, loss in self.losses.items()
            }
            within = [size for size in extra if extra[size] <= TOLERANCE]
            up, down = max(self.losses), min(self.losses)
            if max(within) == up:
                wanted = 2 * up
            elif down > max(within) / 2:
                wanted = down / 2
            else:
                return self
            more = [s for s in known if s not in self.losses and 0.7 < s / wanted < 1.5]
            if not more:
                return self
            self.visit(min(more, key=lambda size: abs(math.log(size / wanted))))

    @property
    def safe(self) -> int:
        best = min(self.losses.values())
        return max(
            size
            for size, loss in self.losses.items()
            if overhead_of(self.cell[1], loss, best, self.slope) <= TOLERANCE
        )

    @property
    def cost(self) -> float:
        amount = len(self.trainings) + REFERENCES
        return amount * parameters(self.cell[0]) * self.cell[1]


@dataclass
class Study:
    """A plan that was carried out: the searches of its rungs, and the prediction."""

    searches: list[Search]
    predicted: Critical
    share: float

    @property
    def kind(self) -> tuple[int, str]:
        """How many rungs it has, and how their rates were searched."""
        return len(self.searches), "tuned" if self.searches[0].tuned else "once"


def study(table: Table, cells: tuple[Cell, ...], target: Cell, tuned: bool) -> Study | None:
    searches, rungs = list[Search](), list[Critical]()
    for cell in cells:
        slope = table.slope(cell[0], without=target)
        sizes = sorted(table.losses[cell])
        start = rungs[-1].batch_size if rungs else sizes[len(sizes) // 2]
        search = Search(table, cell, slope, tuned).run(start)
        size = border(search.losses, cell[1], slope)
        searches.append(search)
        if math.isfinite(size):
            ends = {"low": size / SPAN, "high": size * SPAN}
            rungs.append(Critical(samples=cell[1], batch_size=size, **ends))
    if not rungs or rungs[-1].samples != cells[-1][1]:
        return None
    stands_in = STAND_IN if cells[0][0] != target[0] else 0.0
    found = predict(rungs, target[1], stand_in=stands_in)
    whole = parameters(target[0]) * target[1]
    return Study(searches, found.predicted, sum(search.cost for search in searches) / whole)


def plans(table: Table, target: Cell, way: str) -> Iterator[tuple[Cell, ...]]:
    """Rungs of one model that may stand for a target."""
    most = parameters(target[0]) * (0.55 if way == "stand-in" else 1)
    for model in sorted({cell[0] for cell in table.losses}):
        if (model == target[0]) != (way == "lengthwise") or parameters(model) > most:
            continue
        if math.isnan(table.slope(model, without=target)):
            continue
        cells = [c for c in sorted(table.losses) if c[0] == model and c[1] <= target[1] / 4]
        for count in (1, 2, 3):
            yield from combinations(cells, count)


def chosen(found: list[Study], share: float) -> Study:
    fitting = [one for one in found if one.share <= share]
    return max(fitting, key=lambda s: s.share) if fitting else min(found, key=lambda s: s.share)


def judge(table: Table, target: Cell, way: str, pick: Any = chosen) -> dict[str, Any] | None:
    """The row of a target; None where it has no truth or no rung."""
    slope, losses = table.slope(target[0]), table.tuned(target)
    truth = border(losses, target[1], slope)
    if not math.isfinite(truth) or math.isnan(truth):
        return None
    tried = [
        one
        for cells in plans(table, target, way)
        for tuned in (True, False)
        if (one := study(table, cells, target, tuned))
    ]
    if not tried:
        return None
    best = pick(tried, SHARES[way])
    if best is None:
        return None
    low, high = best.predicted.low, best.predicted.high
    safe = best.searches[-1].safe
    best_loss, sizes = min(losses.values()), sorted(losses)
    extra = [overhead_of(target[1], losses[size], best_loss, slope) for size in sizes]
    return {
        "way": way,
        "model": target[0],
        "samples": target[1],
        "rungs": ", ".join(f"{s.cell[0]} {s.cell[1] / 1e6:.1f}M" for s in best.searches),
        "trainings": sum(len(s.trainings) for s in best.searches),
        "predicted": best.predicted.batch_size,
        "low": low,
        "high": high,
        "truth": truth,
        "safe": safe,
        "safe_overhead": float(np.interp(math.log(safe), np.log(sizes), extra)),
        "cost": best.share,
    }


def alternatives(table: Table) -> Iterator[str]:
    """For each kind of plan the cheapest one of every target, together."""
    yield "| way | rungs | rates | targets | covered | rms error of log size | median cost |"
    yield "| --- " * 7 + "|"
    for way, count, rates in product(SHARES, (1, 2, 3), ("tuned", "once")):

        def cheapest(found: list[Study], share: float, kind: Any = (count, rates)) -> Study | None:
            own = (one for one in found if one.kind == kind)
            return min(own, key=lambda one: one.share, default=None)

        rows = [row for cell in table.losses if (row := judge(table, cell, way, cheapest))]
        if rows:
            errors = [math.log(row["predicted"] / row["truth"]) ** 2 for row in rows]
            said = verdicts(rows)
            numbers = f"{said['targets']} | {said['covered']} | {fmean(errors) ** 0.5:.2f}"
            yield f"| {way} | {count} | {rates} | {numbers} | {said['median_cost']:.2f} |"


def verdicts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    near = [max(r["predicted"] / r["truth"], r["truth"] / r["predicted"]) for r in rows]
    return {
        "targets": len(rows),
        "covered": sum(r["low"] <= r["truth"] <= r["high"] for r in rows),
        "safe_too_bold": sum(r["safe_overhead"] > BEYOND for r in rows),
        "within_1_5": sum(each <= NEAR for each in near),
        "median_cost": round(median(r["cost"] for r in rows), 3) if rows else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", type=Path)
    parser.add_argument("--alternatives", action="store_true", help="kinds of plans beside it")
    options = parser.parse_args()
    table = Table.read(options.table)
    rows = [row for way in SHARES for cell in table.losses if (row := judge(table, cell, way))]
    print("|", " | ".join(rows[0] if rows else ()), "|")
    print("|", " --- |" * len(rows[0] if rows else ()))
    for row in rows:
        cells = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
        print("|", " | ".join(cells), "|")
    if options.alternatives:
        print(*alternatives(table), sep="\n")
    for way in SHARES:
        print(way, verdicts([row for row in rows if row["way"] == way]))
    print(json.dumps(verdicts(rows)))


if __name__ == "__main__":
    main()
