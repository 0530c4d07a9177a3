"""The tables of the ``advise`` report: every number of the record."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from steadygrad.report.advise.data import Advice, batch_of, rows_of
from steadygrad.report.numbers import interval, loss, number, show
from steadygrad.report.page import Html, table

__all__ = ["tables"]


def tables(advice: Advice) -> Iterable[Html]:
    """Writes a table for each kind of measurement that the record holds."""
    if advice.points:
        yield _critical(advice)
        yield _noise(advice)
    if any(point.excess() for point in advice.points):
        yield _excess(advice)
    if any(point.batch_sizes for point in advice.points):
        yield _losses(advice)
    if rows_of(advice.tradeoff, "rows"):
        yield _tradeoff(advice)


def _critical(advice: Advice) -> Html:
    head = [advice.samples, "steps", "validation loss", "critical batch", "interval", "at edge"]
    rows = []
    for point in advice.points:
        event = point.critical
        rows.append(
            [
                show(point.samples),
                show(point.steps),
                loss(point.valid_loss),
                _or_missing(event, show(event.get("value"))),
                interval(event.get("low"), event.get("high")),
                str(event.get("at_edge") or "–"),
                show(event.get("fitted")),
                interval(event.get("fitted_low"), event.get("fitted_high")),
            ]
        )
    return table("Critical batch size", [*head, "fitted", "fitted interval"], rows)


def _noise(advice: Advice) -> Html:
    head = [advice.samples, "noise scale", "interval", "|G|²", "tr Σ", "measurements"]
    rows = []
    for point in advice.points:
        event = point.noise
        value = show(event.get("value")) if event.get("resolved") else "unresolved"
        rows.append(
            [
                show(point.samples),
                _or_missing(event, value),
                interval(event.get("low"), event.get("high")),
                show(event.get("grad_sq_norm")),
                show(event.get("noise_trace")),
                show(event.get("measurements")),
            ]
        )
    return table("Gradient noise scale", head, rows)


def _excess(advice: Advice) -> Html:
    sizes = sorted({size for point in advice.points for size in point.excess()})
    head = [advice.samples, *(f"batch {show(size)}" for size in sizes)]
    rows = []
    for point in advice.points:
        excess = point.excess()
        rows.append([show(point.samples), *(_extra(excess.get(size)) for size in sizes)])
    return table(f"Extra {advice.samples} needed, against the smallest batch", head, rows)


def _losses(advice: Advice) -> Html:
    cells: list[list[str]] = []
    for point in advice.points:
        for size in point.batch_sizes:
            first = next(b for b in point.branches if batch_of(b) == size)
            row = [point.samples, size, first.get("lr"), first.get("steps")]
            cells.append([*map(show, row), *map(loss, point.losses(size))])
    width = max(len(row) for row in cells)
    head = [advice.samples, "batch size", "learning rate", "steps"]
    repeats = [f"loss, repeat {number}" for number in range(1, width - len(head) + 1)]
    rows = [row + ["–"] * (width - len(row)) for row in cells]
    return table("Branches", [*head, *repeats], rows)


def _tradeoff(advice: Advice) -> Html:
    head = ["batch size", "steps / fewest", "samples / fewest", "extra samples measured"]
    rows = [
        [
            *(show(row.get(key)) for key in ("batch_size", "steps_ratio", "samples_ratio")),
            _extra(row.get("excess")),
        ]
        for row in rows_of(advice.tradeoff, "rows")
    ]
    critical = show(number(advice.tradeoff.get("critical_batch")))
    return table(f"Trade-off at a fitted critical batch of {critical}", head, rows)


def _or_missing(event: Mapping[str, Any], text: str) -> str:
    return text if event else "not measured"


def _extra(fraction: Any) -> str:
    value = number(fraction)
    return show(value) if not -math.inf < value < math.inf else f"{100 * value:+.1f}%"
