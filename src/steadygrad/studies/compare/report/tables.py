"""Tables of a ``compare`` report: every number of its summary."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean

from steadygrad.studies.compare.report.data import Comparison, Row
from steadygrad.studies.compare.schema import BASELINE, LEAST_RATIO, MOST_RATIO
from steadygrad.studies.html import Html, listing
from steadygrad.studies.text import loss, percent, percent_interval, show

__all__ = ["critical", "difference", "efforts", "mean_loss", "saved", "tables", "verdicts"]

Columns = Mapping[str, Callable[[Row], str]]


def _table(found: Comparison, title: str, rows: Sequence[Row], columns: Columns) -> Html | None:
    """A table whose rows begin with the optimizer, and with the batch size where there are more."""
    place: dict[str, Callable[[Row], str]] = {
        "optimizer": lambda row: found.titles[row["optimizer"]] + row.get("note", "")
    }
    if len(found.plan.multiples) > 1 and rows and "multiple" in rows[0]:
        place["batch"] = lambda row: show(row["multiple"] * found.plan.batch_size)
    return listing(title, rows, {**place, **columns}, text_columns=1)


def _loss_at(field: str, key: str | float) -> Callable[[Row], str]:
    return lambda row: loss(row[field].get(key))


def verdicts(found: Comparison, samples: int) -> Html | None:
    """Each optimizer beside AdamW after as many samples."""
    costs = found.summary.get("costs", {})

    def seconds(row: Row) -> str:
        ratio, time = row.get("sample_ratio"), row.get("time_ratio")
        if not ratio or not time:
            return "–"
        value = ratio["value"]
        sign = "≥ " if value <= LEAST_RATIO else "≤ " if value >= MOST_RATIO else ""
        return f"{sign}{time['value']:.2f}"

    columns = {
        "verdict": lambda row: row["verdict"],
        "loss": mean_loss,
        "difference": difference,
        "AdamW's samples": saved,
        "time": seconds,
        "state": lambda row: show(costs.get(row["optimizer"], {}).get("state_bytes")),
    }
    rows = found.rows(samples)
    if rows and samples == found.longest:
        # Only two seeds have it, and only the task's batch size.
        known = [row for row in found.tuned if row["default_loss"] is not None]
        fixed = {"note": " untuned", "verdict": "–"}
        rows += [{**row, **fixed, "losses": {"": row["default_loss"]}} for row in known]
    return _table(found, f"After {show(samples)} {found.samples}", rows, columns)


def mean_loss(row: Row) -> str:
    """Mean loss of a verdict's seeds."""
    return loss(fmean(row["losses"].values()))


def difference(row: Row) -> str:
    """Mean paired difference from AdamW with its interval."""
    if row["verdict"] in ("baseline", "–"):
        return "–"
    if math.isfinite(row["mean"]):
        return f"{_signed(row['mean'])} ({_signed(row['low'])} to {_signed(row['high'])})"
    lost = sum(map(math.isinf, row["losses"].values()))
    return f"diverged on {lost} of {len(row['losses'])} seeds" if lost else "AdamW diverged"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{show(value)}"


def saved(row: Row) -> str:
    """Samples that AdamW needs for the same loss, over those spent, with the interval."""
    ratio = row.get("sample_ratio")
    if ratio is None:
        return "–"
    return f"{_ratio(ratio['value'])} ({_ratio(ratio['low'])} to {_ratio(ratio['high'])})"


def _ratio(value: float) -> str:
    sign = "≤ " if value <= LEAST_RATIO else "≥ " if value >= MOST_RATIO else ""
    return f"{sign}{value:.2f}"


def efforts(found: Comparison) -> Html | None:
    """Expected best loss of a few learning rates, in short runs."""
    columns = {f"{count} of them": _loss_at("effort", str(count)) for count in (1, 3, 9)}
    title = f"Expected best loss after {show(found.plan.horizons[0])} {found.samples}"
    return _table(found, title, found.tuned, columns)


def critical(found: Comparison) -> Html | None:
    """Critical batch size of each optimizer."""

    def bracket(row: Row) -> str:
        if len(row["overheads"]) == 1:
            return "not resolved"
        within, beyond = show(row["within"]), row["beyond"]
        return f"{within} to {show(beyond)}" if beyond else f"≥ {within}"

    def extra(multiple: int, row: Row) -> str:
        value = percent(row["overheads"].get(str(multiple)))
        ends = row.get("intervals", {}).get(str(multiple))
        return f"{value} ({percent_interval(*ends)})" if ends else value

    size = found.plan.batch_size
    extras = {f"extra at {show(m * size)}": partial(extra, m) for m in found.plan.multiples[1:]}
    columns: Columns = {"critical batch size": bracket, **extras}
    return _table(found, "Critical batch sizes", found.summary.get("critical", ()), columns)


def tables(found: Comparison) -> Iterable[Html | None]:
    """The tables with which the page ends."""
    title = "Tuned options; octaves are of the learning rate, from its default"
    yield _table(found, title, found.tuned, TUNED)
    yield from (_search(found, samples) for samples in found.plan.horizons)
    rows = [row for samples in (found.longest, found.half) for row in found.rows(samples)]
    after = {"after": lambda row: show(row["samples"])}
    seeds = {str(seed): _loss_at("losses", str(seed)) for seed in range(1, found.plan.seeds + 1)}
    yield _table(found, "Losses by seed", rows, {**after, **seeds})
    judged = [row for row in rows if row["optimizer"] != BASELINE]
    yield _table(found, "Tests of the differences", judged, {**after, **STATISTICS})
    costs = [{"optimizer": name, **cost} for name, cost in found.summary.get("costs", {}).items()]
    yield _table(found, "Costs", costs, COSTS)


TUNED: Columns = {
    "learning rate": lambda row: show(row["lr"]),
    "octaves": lambda row: _signed(row["step"]),
    "other options": lambda row: (
        ", ".join(f"{name} {show(value)}" for name, value in row["knobs"].items()) or "defaults"
    ),
    "plateau": lambda row: show(row["plateau"], digits=2),
    "interior": lambda row: show(row["interior"]),
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


def _search(found: Comparison, samples: int) -> Html | None:
    """Losses of the search at a horizon, by octaves from the default learning rate."""
    search = {key: tried for key, tried in found.search.items() if key[2] == samples}
    rows = [{"optimizer": k[0], "multiple": k[1], "tried": v} for k, v in search.items()]
    steps = sorted({step for tried in search.values() for step in tried})
    columns = {_signed(step): _loss_at("tried", step) for step in steps}
    title = f"Search after {show(samples)} {found.samples}, by octaves"
    return _table(found, title, rows, columns)
