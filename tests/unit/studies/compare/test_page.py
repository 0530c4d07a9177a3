"""The page of a ``compare`` run, from whole and partial records."""

import html
import math
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from steadygrad.studies import charts
from steadygrad.studies.compare import page as drawing
from steadygrad.studies.compare.findings import summarize
from steadygrad.studies.folder import Results, Run
from steadygrad.studies.page import render
from tests.unit.report.conftest import no_charts  # noqa: F401
from tests.unit.studies.compare.runs import by, header_of, planned, record

plain = pytest.mark.usefixtures("no_charts")


def made_run(loss_of=None, *, events=None, status="complete", **plan):
    """A run with the summary that the study itself would write."""
    plan = planned(**{"seeds": 5, **plan})
    header, results = header_of(plan), [*record(plan, loss_of or by(lans=-0.3))][:events]
    total = summarize(header, Results(results), status).to_dict() if status else None
    return Run(Path(), header, Results(results), total)


def found_in(run):
    return summarize(run.header, run.results, "complete")


def rows_of(page, caption):
    """The cells of a table by row, its heading first."""
    inner = page.split(f"<caption>{caption}</caption>")[1].split("</table>")[0]
    rows = re.findall("<tr>(.*?)</tr>", inner, re.DOTALL)
    return [[html.unescape(c) for c in re.findall("<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows]


@plain
def test_what_the_recorded_run_has_not_tried():
    """Other batch sizes, and fewer optimizers."""
    run = made_run(multiples=(1, 4), optimizers=("adamw", "lans"))
    page = render(run)
    head, *rows = rows_of(page, "Critical batch sizes")
    assert head == ["optimizer", "critical batch size", "4"]
    for cells, row in zip(rows, found_in(run).critical, strict=True):
        assert cells[1] == (f"{row.within} to {row.beyond}" if row.beyond else f"≥ {row.within}")
        assert cells[2].startswith(f"{round(100 * row.overheads['4'])}%".replace("-", "−"))
    verdicts = rows_of(page, "Every verdict")[1:]
    assert [row[:2] for row in verdicts] == [["LANS", size] for size in ("4", "4", "16", "16")]


def test_seeds_are_dots_bars_are_intervals_and_what_diverged_is_a_cross(monkeypatch):
    def loss_of(optimizer, **fields):
        losses = by(lans=-0.3, lamb=50.0)
        return math.inf if optimizer == "sgd" else losses(optimizer=optimizer, **fields)

    run = made_run(loss_of, optimizers=("adamw", "scaledadam", "lans", "muon", "lamb", "sgd"))
    found, drawn = found_in(run), {}
    for kind in ("chart", "panel"):
        monkeypatch.setattr(charts, kind, lambda name, _, paint, **k: drawn.update({name: paint}))
    drawing.view(run, found)
    figure = Figure()
    drawn["differences"](figure, False)
    figure.canvas.draw()
    (axes, *_) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[2:4] == ["LANS, 128", "LANS, 64"]
    for row in found.verdicts:
        y = names.index(f"{found.optimizers[row.optimizer]}, {row.samples}")
        lines = [line for line in axes.lines if set(line.get_ydata()) == {y}]
        if row.optimizer == "sgd":
            assert [line.get_marker() for line in lines] == ["x"]
            continue
        bar, dots, mean = lines[:3]
        assert list(bar.get_xdata()) == [row.low, row.high]
        apart = [row.losses[seed] - row.baseline_losses[seed] for seed in row.losses]
        assert list(dots.get_xdata()) == apart
        assert list(mean.get_xdata()) == [row.mean]
    # An interval far outside does not press the others together.
    assert axes.get_xlim()[1] < 2


# The search has 33 trainings, and each verdict 15.
@plain
@pytest.mark.parametrize(
    ("events", "status"), [(0, None), (1, "interrupted"), (34, None), (66, "interrupted")]
)
def test_a_partial_record_is_drawn(events, status):
    run = made_run(events=events, status=status)
    page = render(run)
    assert "nan" not in page.lower().replace("nance", "")
    assert ("Validation loss over the learning rate" in page) == (events > 1)
    assert ("Every verdict" in page) == bool(status and run.summary["verdicts"])
    # No table without a row.
    assert all(len(rows_of(page, name)) > 1 for name in re.findall("<caption>(.*?)</cap", page))
    # What was not trained has not diverged.
    assert "∞" not in page
