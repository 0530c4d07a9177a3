"""Rows of the tables of a ``compare`` report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steadygrad.report.numbers import loss, show

__all__ = ["HEAD", "cost_rows", "critical_rows", "effort_rows", "tuned_rows", "verdict_rows"]

HEAD = ("optimizer", "batch", "after", "loss", "AdamW's", "difference", "samples", "verdict")

Rows = Iterable[Sequence[str]]
Summary = Mapping[str, Any]


def verdict_rows(summary: Summary) -> Rows:
    """Verdict by optimizer, batch size and horizon."""
    for row in summary["verdicts"]:
        ratio = row["sample_ratio"]
        yield (
            summary["optimizers"][row["optimizer"]],
            f"x{row['multiple']}",
            show(row["samples"]),
            loss(_mean(row["losses"])),
            loss(_mean(row["baseline_losses"])),
            f"{show(row['mean'])} ({show(row['low'])} to {show(row['high'])})",
            (ratio and f"x{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})") or "–",
            row["verdict"],
        )


def _mean(losses: Mapping[str, float]) -> float:
    return math.fsum(losses.values()) / len(losses)


def tuned_rows(summary: Summary) -> Rows:
    """Tuned settings of each optimizer, and its loss without tuning."""
    for row in summary["tuned"]:
        plateau, knobs = row["plateau"], row["knobs"]
        yield (
            summary["optimizers"][row["optimizer"]],
            f"x{row['multiple']}",
            show(row["lr"]),
            ", ".join(f"{name} {show(value)}" for name, value in knobs.items()) or "defaults",
            show(sum(map(len, row["tried"].values()))),
            "–" if plateau is None else f"{plateau:.1f}",
            "yes" if row["interior"] else "no",
            "–" if row["default_loss"] is None else loss(row["default_loss"]),
        )


def effort_rows(summary: Summary) -> Rows:
    """Expected best loss of a few trials, in short runs."""
    for row in summary["tuned"]:
        efforts = row["effort"]
        name, batch = summary["optimizers"][row["optimizer"]], f"x{row['multiple']}"
        yield name, batch, *(loss(efforts.get(count)) for count in ("1", "3", "9"))


def cost_rows(summary: Summary) -> Rows:
    """Time of a step and memory of each optimizer."""
    for name, cost in summary["costs"].items():
        title = summary["optimizers"][name]
        yield title, f"x{cost['time_ratio']:.2f}", show(cost["state_bytes"])


def critical_rows(summary: Summary) -> Rows:
    """Critical batch size of each optimizer."""
    for row in summary["critical"]:
        beyond = row["beyond"]
        bracket = (
            f"{show(row['within'])} to {show(beyond)}" if beyond else f"≥ {show(row['within'])}"
        )
        extra = ", ".join(f"x{m}: {100 * e:+.0f}%" for m, e in row["overheads"].items())
        yield summary["optimizers"][row["optimizer"]], bracket, extra
