"""The tables of the ``advise`` report: every number of the record."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from steadygrad.report.advise.data import Advice, Point
from steadygrad.report.numbers import interval, loss, percent, show
from steadygrad.report.page import Html, table

__all__ = ["tables"]


def tables(advice: Advice) -> Iterable[Html]:
    """Writes a table for each kind of measurement that the record holds."""
    if advice.points:
        yield _critical(advice)
        yield _noise(advice)
    if any(point.critical for point in advice.points):
        yield _overhead(advice)
    if advice.scratch:
        yield _scratch(advice)
    if any(point.branches for point in advice.points):
        yield _branches(advice)
    if advice.rate.get("verdict"):
        yield _rates(advice)


def _listing(title: str, rows: Iterable[Any], columns: Mapping[str, Callable[[Any], str]]) -> Html:
    cells = ([cell(row) for cell in columns.values()] for row in rows)
    return table(title, list(columns), cells)


def _critical(advice: Advice) -> Html:
    def limit(point: Point) -> str:
        if not point.critical:
            return "not measured"
        return show(point.critical["value"]) if point.resolved else "not resolved"

    def told(name: str) -> Callable[[Point], str]:
        return lambda point: show(point.critical.get(name))

    columns = {
        advice.samples: lambda p: show(p.samples),
        "steps": lambda p: show(p.reached.steps),
        "validation loss": lambda p: loss(p.reached.valid_loss),
        "limit": limit,
        "95% interval": lambda p: (
            interval(p.critical["low"], p.critical["high"]) if p.resolved else "–"
        ),
        "within": told("within"),
        "beyond": told("beyond"),
        "diverged": told("diverged"),
        "tolerated loss": lambda p: loss(p.critical.get("level")),
        "fall / s.e.": lambda p: show(p.critical.get("fall"), 2),
    }
    return _listing("Critical batch size", advice.points, columns)


def _noise(advice: Advice) -> Html:
    columns = {
        advice.samples: lambda p: show(p.samples),
        "noise scale": lambda p: show(p.noise.value) if p.noise.resolved else "unresolved",
        "95% interval": lambda p: interval(p.noise.low, p.noise.high),
        "|G|²": lambda p: show(p.noise.grad_sq_norm),
        "tr Σ": lambda p: show(p.noise.noise_trace),
        "measurements": lambda p: show(p.noise.measurements),
    }
    return _listing("Gradient noise scale", (p for p in advice.points if p.noise), columns)


def _overhead(advice: Advice) -> Html:
    overheads = {p.samples: p.critical["overhead"] for p in advice.points if p.critical}
    sizes = sorted({size for row in overheads.values() for size in row}, key=int)
    head = [advice.samples, *(f"batch {show(int(size))}" for size in sizes)]
    rows = [[show(at), *(percent(row.get(s)) for s in sizes)] for at, row in overheads.items()]
    return table("Sample overhead of branches, against the best batch size", head, rows)


def _scratch(advice: Advice) -> Html:
    columns = {
        "batch size": lambda r: " → ".join(show(stage.batch_size) for stage in r.stages),
        "learning rate": lambda r: " → ".join(show(stage.lr) for stage in r.stages),
        "steps": lambda r: show(r.steps),
        "seed": lambda r: show(r.repeat),
        "final loss": lambda r: loss(r.loss),
        "averaged at": lambda r: show(r.samples),
    }
    return _listing("Runs from scratch", advice.scratch, columns)


def _branches(advice: Advice) -> Html:
    columns = {
        advice.samples: lambda row: show(row[0]),
        "batch size": lambda row: show(row[1][0].batch_size),
        "learning rate": lambda row: show(row[1][0].lr),
        "steps": lambda row: show(row[1][0].steps),
        "losses": lambda row: ", ".join(loss(branch.loss) for branch in row[1]),
    }
    rows = [(p.samples, runs) for p in advice.points for runs in p.branches.values()]
    return _listing("Branches", rows, columns)


def _rates(advice: Advice) -> Html:
    found = advice.rate
    columns = {
        "learning rate": lambda rate: show(float(rate) * advice.task.lr),
        "validation loss": lambda rate: loss(found["losses"][rate]),
        "sample overhead": lambda rate: percent(found["overheads"].get(rate, 0.0)),
    }
    rates = sorted(found["losses"], key=float)
    return _listing("The smallest batch from scratch at other learning rates", rates, columns)
