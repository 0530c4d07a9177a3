"""An `advise` run, whole or cut short."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from msgspec.structs import replace

from steadygrad.studies import charts
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.folder import Results, Run
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
) -> Run:
    """A run with the summary that the study itself would write, and other fields of its header.

    So many ``points`` of training were reached; with all of them, the runs are there, too.
    Without a ``status`` there is no summary.
    """
    header = make_header(POINTS, task={**TASK, **(task or {})}, settings=settings)
    found = [
        result
        for result in _results()
        if points == len(POINTS) or (result.key[0] != "scratch" and result.point < points)
    ]
    total = summarize(header, Results(found), status).to_dict() if status else None
    return Run(Path(), header, Results(found), total)


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without drawings, for tests of what they say: drawing takes seconds."""
    monkeypatch.setattr(charts, "_svg", lambda *_, **__: Markup(""))
