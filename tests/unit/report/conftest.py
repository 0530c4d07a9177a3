"""An `advise` run, whole or cut short, and a way to look at its page."""

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from matplotlib.colors import to_rgb
from msgspec.structs import replace

from steadygrad.studies import charts
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.folder import Results, Run
from steadygrad.studies.page import render
from tests.unit.studies.advise.events import make_header, studied

POINTS = (1024, 4096)
TASK = {
    "name": "char-lm",
    "sample": "sequence",
    "tokens_per_sample": 64,
    "optimizer": "AdamW",
    "beta2": 0.99,
    "weight_decay": 0.01,
    "provenance": {"corpus": "Python 3.11.7 standard library, 740 files", "sha256": "9f86d081"},
}


@cache
def _results() -> tuple[Any, ...]:
    """Batch 16 passes, 24 fails, a growing batch passes; 512 diverges in one branch."""
    header = make_header(POINTS, task=TASK)
    found = studied(header, 45.0, lengths=160)
    last = ("branch", 0, 1, 512)
    return tuple(replace(r, loss=math.inf) if r.key == last else r for r in found)


def made_run(
    *,
    points: int = len(POINTS),
    status: str | None = "complete",
    task: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    edit: Callable[[Any], Any] = lambda result: result,
) -> Run:
    """A run with the summary that the study itself would write.

    Args:
        points: Points of training that were reached; with all of them, the runs are there, too.
        status: None leaves out the summary.
        task: Fields of the task to replace.
        settings: Fields of the settings to replace.
        edit: Changes a result, before it is summarized.
    """
    header = make_header(POINTS, task={**TASK, **(task or {})}, settings=settings)
    found = [
        edit(result)
        for result in _results()
        if points == len(POINTS) or (result.key[0] != "scratch" and result.point < points)
    ]
    total = summarize(header, Results(found), status).to_dict() if status else None
    return Run(Path(), header, Results(found), total)


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without drawings, for tests of what they say: drawing takes seconds."""
    monkeypatch.setattr(charts, "_svg", lambda *_, **__: Markup(""))


@pytest.fixture(scope="session")
def whole_page() -> str:
    """The page of the whole run, with its drawings."""
    return render(made_run())


def luminance(colour: str) -> float:
    """The relative luminance (WCAG 2) of ``#rrggbb``, or of a browser's ``rgb(r, g, b)``."""
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    channels = to_rgb(colour) if colour.startswith("#") else parts
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, from 1 to 21 (WCAG 2)."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
