"""Tables of a ``compare`` report: every number of its summary."""

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

from steadygrad.record.schema.compare import BASELINE
from steadygrad.report.compare.data import Comparison, Row
from steadygrad.report.numbers import loss, percent, show
from steadygrad.report.page import Html, listing

__all__ = ["critical", "difference", "efforts", "mean_loss", "saved", "tables", "verdicts"]

Columns = dict[str, Callable[[Row], str]]
# Beyond these ratios the baseline's loss curve is no guide.
LEAST_RATIO, MOST_RATIO = 0.25, 4.0


def verdicts(found: Comparison, samples: int) -> Html | None:
    """Each optimizer beside AdamW after as many samples."""
    costs = found.summary.get("costs", {})

    def cost(row: Row, kind: str) -> float:
        return float(costs.get(row["optimizer"], {}).get(kind, math.nan))

    columns = {
        **_place(found),
        "verdict": lambda row: row["verdict"],
        "loss": mean_loss,
        "difference": difference,
        "AdamW's samples": saved,
        "AdamW's seconds": lambda row: saved(row, cost(row, "time_ratio")),
        "state": lambda row: show(cost(row, "state_bytes")),
    }
    title = f"After {show(samples)} {found.samples}"
    return listing(title, [*found.rows(samples)], columns, text_columns=1)


def _place(found: Comparison) -> Columns:
    columns: Columns = {"optimizer": lambda row: found.titles[row["optimizer"]]}
    if len(found.plan.multiples) > 1:
        columns["batch"] = lambda row: show(row["multiple"] * found.plan.batch_size)
    return columns


def mean_loss(row: Row) -> str:
    """Mean loss of a verdict's seeds."""
    return loss(fmean(row["losses"].values()))


def difference(row: Row) -> str:
    """Mean paired difference from AdamW with its interval."""
    if "mean" not in row:
        return "–"
    if math.isfinite(row["mean"]):
        return f"{_signed(row['mean'])} ({_signed(row['low'])} to {_signed(row['high'])})"
    lost = sum(map(math.isinf, row["losses"].values()))
    return f"diverged on {lost} of {len(row['losses'])} seeds" if lost else "AdamW diverged"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{show(value)}"


def saved(row: Row, time_ratio: float = 1.0) -> str:
    """Samples that AdamW needs for the same loss over those spent; or seconds."""
    ratio = row.get("sample_ratio")
    if ratio is None or math.isnan(time_ratio):
        return "–"

    def bounded(value: float) -> str:
        sign = "≤ " if value <= LEAST_RATIO else "≥ " if value >= MOST_RATIO else ""
        return f"{sign}{value / time_ratio:.2f}"

    value, low, high = (bounded(ratio[key]) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def efforts(found: Comparison) -> Html | None:
    """Expected best loss of a few learning rates, in short runs."""
    columns = _place(found)
    for count in ("1", "3", "9"):
        title = f"{count} trial{'s' * (count != '1')}"
        columns[title] = lambda row, count=count: loss(row["effort"].get(count))  # type: ignore[misc]
    title = f"Expected best loss after {show(found.plan.horizons[0])} {found.samples}"
    return listing(title, found.summary.get("tuned", ()), columns, text_columns=1)


def critical(found: Comparison) -> Html | None:
    """Critical batch size of each optimizer."""

    def bracket(row: Row) -> str:
        within, beyond = show(row["within"]), row["beyond"]
        return f"{within} to {show(beyond)}" if beyond else f"≥ {within}"

    columns: Columns = {
        "optimizer": lambda row: found.titles[row["optimizer"]],
        "critical batch size": bracket,
    }
    for multiple in found.plan.multiples[1:]:
        title = f"extra at {show(multiple * found.plan.batch_size)}"
        columns[title] = lambda row, key=str(multiple): percent(row["overheads"].get(key))  # type: ignore[misc]
    rows = found.summary.get("critical", ())
    return listing("Critical batch sizes", rows, columns, text_columns=1)


def tables(found: Comparison) -> Iterable[Html | None]:
    """The tables with which the page ends."""
    tuned = found.summary.get("tuned", ())
    yield listing("Tuned options", tuned, {**_place(found), **TUNED}, text_columns=1)
    yield from (_search(found, tuned, str(rung)) for rung in range(3))
    rows = [row for samples in (found.longest, found.half) for row in found.rows(samples)]
    after: Columns = {"after": lambda row: show(row["samples"])}
    title = "Losses by seed"
    yield listing(title, rows, {**_place(found), **after, **_seeds(found)}, text_columns=1)
    judged = [row for row in rows if row["optimizer"] != BASELINE]
    columns = {**_place(found), **after, **STATISTICS}
    yield listing("Tests of the differences", judged, columns, text_columns=1)
    costs = [{"optimizer": name, **cost} for name, cost in found.summary.get("costs", {}).items()]
    columns = {"optimizer": lambda row: found.titles[row["optimizer"]], **COSTS}
    yield listing("Costs", costs, columns, text_columns=1)


TUNED: Columns = {
    "learning rate": lambda row: show(row["lr"]),
    "octaves from its default": lambda row: _signed(row["step"]),
    "other options": lambda row: (
        ", ".join(f"{name} {show(value)}" for name, value in row["knobs"].items()) or "defaults"
    ),
    "plateau in octaves": lambda row: show(row["plateau"], digits=2),
    "inside of those tried": lambda row: show(row["interior"]),
    "loss at default rate": lambda row: loss(row["default_loss"]),
}
STATISTICS: Columns = {
    "p-value": lambda row: show(row["p_value"], digits=2),
    "interval's confidence": lambda row: f"{100 * row['confidence']:.3g}%",
    "bootstrap interval": lambda row: (
        " to ".join(map(_signed, row["bootstrap"])) if row["bootstrap"] else "–"
    ),
    "seeds that would tell": lambda row: show(row["needed"]),
}
COSTS: Columns = {
    "time of a step over AdamW's": lambda row: f"{row['time_ratio']:.2f}",
    "bytes of state for a weight": lambda row: show(row["state_bytes"]),
}


def _search(found: Comparison, tuned: Iterable[Row], rung: str) -> Html | None:
    """Losses of the search at a horizon, by octaves from the default learning rate."""
    rows = [row for row in tuned if row["tried"].get(rung)]
    columns = _place(found)
    for step in sorted({int(step) for row in rows for step in row["tried"][rung]}):
        columns[_signed(step)] = lambda row, step=str(step): loss(row["tried"][rung].get(step))  # type: ignore[misc]
    title = f"Search after {show(found.plan.horizons[int(rung)])} {found.samples}"
    return listing(f"{title}, by octaves", rows, columns, text_columns=1)


def _seeds(found: Comparison) -> Mapping[str, Callable[[Row], str]]:
    seeds = [str(seed) for seed in range(1, found.plan.seeds + 1)]
    return {seed: lambda row, seed=seed: loss(row["losses"].get(seed)) for seed in seeds}  # type: ignore[misc]
