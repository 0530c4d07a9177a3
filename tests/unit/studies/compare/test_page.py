"""The page of a ``compare`` run, from whole, partial and hostile records."""

import html
import math
import re
import shutil

import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from steadygrad.studies import charts
from steadygrad.studies.compare import page as drawing
from steadygrad.studies.compare.findings import summarize
from steadygrad.studies.compare.schema import Run
from steadygrad.studies.folder import Results
from steadygrad.studies.page import render
from steadygrad.studies.text import loss
from tests.unit.report.conftest import no_charts  # noqa: F401
from tests.unit.report.test_browser import Look, assert_well_shown, needs_chromium
from tests.unit.studies.compare.runs import ALL, header_of, noisy, planned, record
from tests.unit.studies.results import TASK, write

NASTY = "<script>document.title='x'</script><img src=x onerror=alert(1)>\x00$a_b$"


def by(**shifts):
    """Losses with optimizers that differ from AdamW by so much."""
    return noisy({name: {64: shift, 128: shift} for name, shift in shifts.items()})


@pytest.fixture
def make_run(tmp_path):
    """Writes a run with the summary that the study itself would write, and reads it back."""

    def make(loss_of=None, *, events=None, change=None, status="complete", task=None, **plan):
        plan = planned(**{"seeds": 5, **plan})
        header = header_of(plan, task=replace(TASK, **(task or {})))
        results = [*record(plan, loss_of or by(lans=-0.3))][:events]
        results = [change(event) for event in results] if change else results
        total = summarize(header, Results(results), status).to_dict() if status else None
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return write(tmp_path / "run", *results, header=header, summary=total)

    return make


def view(run):
    return drawing.view(run, summarize(run.header, run.results, run.summary["status"]))


@pytest.fixture
def painted(monkeypatch):
    """Draws a page's charts as on a wide page, and gives the axes by the names of the charts."""

    def paint(run):
        found = {}
        for kind in ("chart", "panel"):
            monkeypatch.setattr(
                charts, kind, lambda name, _, paint, **k: found.update({name: paint})
            )
        view(run)
        for name, paint in found.items():
            figure = Figure()
            paint(figure, False)
            figure.canvas.draw()
            found[name] = figure.axes[0]
        return found

    return paint


def rows_of(page, caption):
    """The cells of a table by row, its heading first."""
    inner = page.split(f"<caption>{caption}</caption>")[1].split("</table>")[0]
    rows = re.findall("<tr>(.*?)</tr>", inner, re.DOTALL)
    return [[html.unescape(c) for c in re.findall("<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows]


@pytest.mark.usefixtures("no_charts")
def test_what_the_recorded_run_has_not_tried(make_run):
    """Other batch sizes, other options, and fewer optimizers."""
    names = ("adamw", "lans")
    run = make_run(by(lans=-0.3), multiples=(1, 4), points=3, optimizers=names)
    page, found = render(run), view(run)["found"]
    head, *rows = rows_of(page, "Critical batch sizes")
    assert head == ["optimizer", "critical batch size", "4"]
    for cells, row in zip(rows, found.critical, strict=True):
        assert cells[1] == (f"{row.within} to {row.beyond}" if row.beyond else f"≥ {row.within}")
        assert cells[2].startswith(f"{round(100 * row.overheads['4'])}%".replace("-", "−"))
    verdicts = rows_of(page, "Every verdict")[1:]
    assert [row[:2] for row in verdicts] == [["LANS", size] for size in ("4", "4", "16", "16")]
    search = rows_of(page, "Search, by octaves from the default learning rate")
    for row in found.tuned:
        cells = {loss(value) for tried in row.tried.values() for value in tried.values()}
        assert cells <= {cell for line in search for cell in line}
    assert "Not compared here: scaledadam, lamb, sgd, muon and all others" in page
    assert "3 points of two other options" in page


@pytest.mark.parametrize(("name", "crosses"), [("sgd", [2, 3]), ("adamw", [])])
def test_what_diverged_is_a_cross(make_run, painted, name, crosses):
    def loss_of(**fields):
        return math.inf if fields["optimizer"] == name else by()(**fields)

    run = make_run(loss_of)
    found = painted(run)
    rates = {event.lr for event in run.select(Run) if event.optimizer == name}
    panel = found[f"rates-{['adamw', 'lans', 'sgd'].index(name)}"]
    assert {line.get_xdata()[0] for line in panel.lines if line.get_marker() == "x"} == rates
    # Where AdamW diverged as well there is nothing to draw.
    marks = [line for line in found["differences"].lines if line.get_marker() == "x"]
    assert [line.get_ydata()[0] for line in marks] == crosses


def test_seeds_are_dots_and_bars_are_intervals(make_run, painted):
    run = make_run(by(lans=-0.3))
    axes, found = painted(run)["differences"], view(run)["found"]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["LANS, 128", "LANS, 64", "SGD, 128", "SGD, 64"]
    for row in found.verdicts:
        y = names.index(f"{found.optimizers[row.optimizer]}, {row.samples}")
        bar, dots, mean = [line for line in axes.lines if set(line.get_ydata()) == {y}][:3]
        assert list(bar.get_xdata()) == [row.low, row.high]
        assert list(dots.get_xdata()) == [
            row.losses[s] - row.baseline_losses[s] for s in row.losses
        ]
        assert list(mean.get_xdata()) == [row.mean]


def test_an_interval_far_outside_does_not_press_the_others_together(make_run, painted):
    run = make_run(by(sgd=50.0), optimizers=("adamw", "scaledadam", "lans", "lamb", "sgd"))
    axes = painted(run)["differences"]
    assert axes.get_xlim()[1] < 1
    triangles = [y for line in axes.lines if line.get_marker() == ">" for y in line.get_ydata()]
    assert triangles == [6, 7]


def test_rates_are_drawn_as_they_were_tried(make_run, painted):
    run = make_run(points=3)
    axes, (row, *_) = painted(run)["rates-0"], view(run)["found"].tuned
    for line, tried in zip(axes.lines[:6:2], row.tried.values(), strict=True):
        assert sorted(line.get_ydata()) == sorted(tried.values())
    # Two more points of the other options, at the second horizon only.
    assert [len(line.get_xdata()) for line in axes.lines[1:6:2]] == [0, 2, 0]
    assert not any("mathdefault" in label.get_text() for label in axes.get_xticklabels())


def test_the_best_of_every_length_is_in_sight(make_run, painted):
    """Also where the seeds of the verdict differ by little, and where a short run is lost."""

    def change(event):
        if isinstance(event, Run) and event.repeat:
            return replace(event, loss=1.5)
        is_lost = isinstance(event, Run) and (event.optimizer, event.samples) == ("lans", 32)
        return replace(event, loss=1e9) if is_lost else event

    run = make_run(change=change)
    search, found = view(run)["search"], painted(run)
    low, high = found["rates-0"].get_ylim()
    bests = [min(search["adamw", 1, samples].values()) for samples in (32, 64, 128)]
    assert low < min(bests) < max(bests) < high
    assert found["rates-1"].get_ylim()[1] < 10


# The search has 33 trainings, and each verdict 15.
@pytest.mark.parametrize(
    ("events", "status"),
    [(0, None), (1, "interrupted"), (2, "interrupted"), (34, None), (42, "interrupted"),
     (66, "interrupted")],
)  # fmt: skip
def test_a_partial_record_is_drawn(make_run, events, status):
    run = make_run(events=events, status=status)
    page = render(run)
    assert "nan" not in page.lower().replace("nance", "")
    assert ("Validation loss over the learning rate" in page) == (events > 1)
    assert ("Every verdict" in page) == bool(status and run.summary["verdicts"])
    # No table without a row.
    assert all(len(rows_of(page, name)) > 1 for name in re.findall("<caption>(.*?)</cap", page))
    # What was not trained has not diverged.
    assert "∞" not in page


def test_hostile_names_are_text(make_run, monkeypatch):
    name = NASTY + "x" * 300

    def changed(*run):
        said = {"answer": f"{NASTY} is better.", "remarks": ("z" * 500, NASTY)}
        found = summarize(*run)
        return replace(found, optimizers={**found.optimizers, "lans": name}, **said)

    monkeypatch.setattr("steadygrad.studies.page.summarize", changed)
    page = render(make_run(by(lans=-0.3), task={"name": name, "sample": NASTY}))
    assert not re.search("<script|<img|\x00", page)
    assert "&lt;script&gt;" in page


@pytest.mark.slow
@needs_chromium
def test_six_optimizers_and_four_batch_sizes_in_a_browser(make_run, tmp_path):
    run = make_run(optimizers=ALL, multiples=(1, 2, 4, 8))
    # One wide chart, and a panel for each optimizer.
    assert_well_shown(Look(render(run), tmp_path), charts=7)
