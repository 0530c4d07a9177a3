"""The tables of the ``advise`` report: every number of the record."""

from steadygrad.studies.advise.report.data import Advice, Point
from steadygrad.studies.html import Html, listing, table
from steadygrad.studies.text import interval, loss, percent, show

__all__ = ["tables"]


def tables(advice: Advice) -> list[Html]:
    """A table for each kind of measurement that the record holds."""
    kinds = (_critical, _noise, _overhead, _scratch, _branches, _rates)
    return [found for kind in kinds if (found := kind(advice))]


def _critical(advice: Advice) -> Html | None:
    def limit(point: Point) -> str:
        if not point.critical:
            return "not measured"
        return show(point.critical["value"]) if point.resolved else "not resolved"

    columns = {
        advice.samples: lambda p: show(p.samples),
        "steps": lambda p: show(p.reached.steps),
        "validation loss": lambda p: loss(p.reached.valid_loss),
        "limit": limit,
        "95% interval": lambda p: (
            interval(p.critical["low"], p.critical["high"]) if p.resolved else "–"
        ),
        "within": lambda p: show(p.critical.get("within")),
        "beyond": lambda p: show(p.critical.get("beyond")),
        "diverged": lambda p: show(p.critical.get("diverged")),
        "tolerated loss": lambda p: loss(p.critical.get("level")),
        "fall / s.e.": lambda p: show(p.critical.get("fall"), 2),
    }
    return listing("Critical batch size", advice.points, columns)


def _noise(advice: Advice) -> Html | None:
    columns = {
        advice.samples: lambda p: show(p.samples),
        "noise scale": lambda p: show(p.noise.value) if p.noise.resolved else "unresolved",
        "95% interval": lambda p: interval(p.noise.low, p.noise.high),
        "|G|²": lambda p: show(p.noise.grad_sq_norm),
        "tr Σ": lambda p: show(p.noise.noise_trace),
        "measurements": lambda p: show(p.noise.measurements),
    }
    return listing("Gradient noise scale", [p for p in advice.points if p.noise], columns)


def _overhead(advice: Advice) -> Html | None:
    overheads = {p.samples: p.critical["overhead"] for p in advice.points if p.critical}
    sizes = sorted({size for row in overheads.values() for size in row}, key=int)
    head = [advice.samples, *(f"batch {show(int(size))}" for size in sizes)]
    rows = [[show(at), *(percent(row.get(s)) for s in sizes)] for at, row in overheads.items()]
    title = "Sample overhead of branches, against the best batch size"
    return table(title, head, rows) if rows else None


def _scratch(advice: Advice) -> Html | None:
    columns = {
        "batch size": lambda r: " → ".join(show(stage.batch_size) for stage in r.stages),
        "learning rate": lambda r: " → ".join(show(stage.lr) for stage in r.stages),
        "steps": lambda r: show(r.steps),
        "seed": lambda r: show(r.repeat),
        "final loss": lambda r: loss(r.loss),
        "averaged at": lambda r: show(r.samples),
    }
    return listing("Runs from scratch", advice.scratch, columns)


def _branches(advice: Advice) -> Html | None:
    columns = {
        advice.samples: lambda row: show(row[0]),
        "batch size": lambda row: show(row[1][0].batch_size),
        "learning rate": lambda row: show(row[1][0].lr),
        "steps": lambda row: show(row[1][0].steps),
        "losses": lambda row: ", ".join(loss(branch.loss) for branch in row[1]),
    }
    rows = [(p.samples, runs) for p in advice.points for runs in p.branches.values()]
    return listing("Branches", rows, columns)


def _rates(advice: Advice) -> Html | None:
    found = advice.rate
    columns = {
        "learning rate": lambda rate: show(float(rate) * advice.task.lr),
        "mean loss, last 40%": lambda rate: loss(found["losses"][rate]),
    }
    rates = sorted(found["losses"], key=float) if found.get("verdict") else []
    return listing("The smallest batch from scratch at other learning rates", rates, columns)
