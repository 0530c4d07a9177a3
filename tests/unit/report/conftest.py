"""An `advise` run, whole or cut short."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from msgspec.structs import replace

from steadygrad.studies import page
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.folder import Results, Run
from tests.unit.studies import results
from tests.unit.studies.advise.events import ARM, LENGTH, make_header, studied

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
    """Batch 16 passes, 24 fails; 512 diverges with one seed."""
    found = studied(make_header(task=TASK), 45.0, lengths=160)
    last = results.make_training(math.inf, arm=ARM[512], samples=LENGTH)
    return (*found, *(replace(last, seed=seed) for seed in range(4)))


def made_run(
    *,
    status: str | None = "complete",
    task: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Run:
    """A run with the summary that the study itself would write, and other fields of its header.

    Without a ``status`` there is no summary.
    """
    header, found = make_header(task={**TASK, **(task or {})}, settings=settings), _results()
    total = summarize(header, Results(found), status).to_dict() if status else None
    return Run(Path(), header, Results(found), total)


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without drawings, for tests of what they say: drawing takes seconds."""
    monkeypatch.setattr(page, "_svg", lambda *_, **__: Markup(""))
