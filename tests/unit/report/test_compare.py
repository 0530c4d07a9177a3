"""The page of a ``compare`` run, from whole, partial and hostile records."""

import html
import io
import math
import random
import re
import shutil
from statistics import fmean

import numpy as np
import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace
from rich.console import Console

from steadygrad.studies import charts as common
from steadygrad.studies.compare import summary
from steadygrad.studies.compare.optimizers import KNOWN
from steadygrad.studies.compare.report import charts
from steadygrad.studies.compare.report.data import Comparison
from steadygrad.studies.compare.report.terminal import table
from steadygrad.studies.compare.schema import OPTIMIZERS, Header, Plan, Run, Settings, Speed
from steadygrad.studies.compare.trials import make_trials
from steadygrad.studies.folder import SCHEMA, Results
from steadygrad.studies.page import render
from steadygrad.studies.schema import Runtime, TaskInfo
from steadygrad.studies.text import loss, show
from tests.unit.report.test_browser import DARK, Look, assert_well_shown, luminance, needs_chromium
from tests.unit.studies.results import write

ALL = ("adamw", "scaledadam", "lans", "lamb", "sgd", "muon")
BATCH, HORIZONS, SEEDS = 8, (800, 1600, 3200), 5
NASTY = "<script>document.title='x'</script><img src=x onerror=alert(1)>\x00$a_b$"
TUNED = "Tuned options; octaves are of the learning rate, from its default"
# Loss above AdamW's at both horizons: better, then worse, and no more than the seeds differ.
BETTER, WORSE, CLOSE = (-0.3, -0.3), (0.3, 0.3), (0.001, 0.001)
FLIP = (-0.3, 0.3)
PLAN = Plan(
    batch_size=BATCH,
    optimizers=ALL[:3],
    multiples=(1,),
    horizons=HORIZONS,
    points=1,
    full=True,
    seeds=SEEDS,
    samples_per_second=700.0,
    work=400_000,
    span=400_000,
)
HEADER = Header(
    schema=SCHEMA,
    study="compare",
    task=TaskInfo(
        spec="made_up.py:make_task",
        name="made-up",
        sample="image",
        batch_size=BATCH,
        lr=0.01,
        lr_rule="sqrt",
        parameters=1234,
        train_size=4096,
        valid_size=64,
    ),
    runtime=Runtime(
        device="cpu",
        dtype="float32",
        world_size=1,
        sharding="none",
        threads=1,
        micro_batch_size=BATCH,
        workers=1,
    ),
    environment={"python": "3.11.7"},
    settings=Settings(task="made_up.py:make_task", budget=60.0),
    plan=PLAN,
    time={"created": "2026-11-21T01:23:45+00:00"},
)


def training(plan, effects, diverging, job):
    """Result of a made-up training: the best rate is twice the default; with noise by seed."""
    name, samples, step = job["optimizer"], job["samples"], job["step"]
    noise = random.Random(str(sorted(job.items()))).gauss(0, 0.01)
    base = 2.0 + (samples / 800) ** -0.5 + 0.02 * random.Random(str(job["repeat"])).gauss(0, 1)
    apart = effects.get(name, (0.0, 0.0))[samples == HORIZONS[2]]
    # The larger the batch, the more samples.
    base += apart + 0.05 * (step - 1) ** 2 + 0.02 * math.log2(job["multiple"]) ** 2 + noise
    end = math.inf if name in diverging or step > 4 else base
    marks = 4 if job["repeat"] else 1
    way = [(samples * part // marks, end + 1 - part / marks) for part in range(1, marks + 1)]
    lr = (KNOWN[name].lr if name in KNOWN else 0.01) * 2.0**step
    fields = {key: value for key, value in job.items() if key != "kind"}
    return Run(**fields, lr=lr, loss=end, curve=tuple(way))


def simulated(plan, effects, diverging):
    """The events of a whole study."""
    times = {name: 0.001 * (1 + place / 10) for place, name in enumerate(plan.optimizers)}
    held = {name: 8.0 + place for place, name in enumerate(plan.optimizers)}
    journal = Results([Speed(state_bytes=held, time=times)])
    for trial in make_trials(plan, 64)[1:]:
        job = trial.job(journal)
        if job is not None:
            journal.add(training(plan, effects, diverging, job))
    return list(journal)


@pytest.fixture
def make_run(tmp_path):
    """Writes a run with the summary that the study itself would write, and reads it back."""

    def make(effects=None, *, diverging=(), events=None, status="complete", **changes):
        task, edit = changes.pop("task", {}), changes.pop("edit", lambda _: None)
        change = changes.pop("change", lambda events: events)
        plan = replace(PLAN, **changes)
        header = replace(HEADER, plan=plan, task=replace(HEADER.task, **task))
        found = change(simulated(plan, effects or {}, diverging)[:events])
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        total = None
        if status is not None:
            total = {"schema": SCHEMA, "study": "compare", "status": status}
            total |= summary.summarize(header, Results(found), status)
            edit(total)
        return write(tmp_path / "run", *found, header=header, summary=total)

    return make


@pytest.fixture
def painted(monkeypatch):
    """Calls a chart, and gives the axes that it would have drawn on a wide page."""

    def paint(chart, *arguments):
        painters = []
        for kind in ("chart", "panel"):
            monkeypatch.setattr(common, kind, lambda *a, **k: painters.append(a[2]))
        chart(*arguments)
        figure = Figure()
        painters[0](figure, False)
        figure.canvas.draw()
        return figure.axes[0]

    return paint


def words_of(page):
    body = re.sub(r"<style.*?</style>|<svg.*?</svg>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def rows_of(page, caption):
    """The cells of a table by row, its heading first."""
    inner = page.split(f"<caption>{caption}</caption>")[1].split("</table>")[0]
    rows = re.findall("<tr>(.*?)</tr>", inner)
    return [[html.unescape(c) for c in re.findall("<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows]


def title_of(run):
    return html.unescape(re.search("<h1>(.*?)</h1>", render(run))[1])


@pytest.mark.parametrize(
    ("effects", "said"),
    [
        ({"lans": BETTER, "scaledadam": CLOSE}, "LANS is better than AdamW over 3,200 images."),
        (
            {"lans": BETTER, "scaledadam": BETTER},
            "ScaledAdam and LANS are better than AdamW over 3,200 images.",
        ),
        (
            {"lans": WORSE, "scaledadam": CLOSE},
            "no optimizer is known to be better than AdamW over 3,200 images.",
        ),
        (
            {"lans": WORSE, "scaledadam": WORSE},
            "AdamW is better than ScaledAdam and LANS over 3,200 images.",
        ),
        (
            {"lans": FLIP, "scaledadam": BETTER},
            "the order of the optimizers changes with the length of the training.",
        ),
    ],
)
@pytest.mark.usefixtures("no_charts")
def test_the_headline_says_what_the_verdicts_say(make_run, effects, said):
    assert title_of(make_run(effects)) == f"made-up: {said}"


@pytest.mark.usefixtures("no_charts")
def test_a_flip_is_the_first_sentence(make_run):
    page = render(make_run({"lans": FLIP}))
    lede = html.unescape(re.search('<p class="lede">(.*?)</p>', page)[1])
    assert lede == (
        "The order changes with the length of the training: LANS is better than AdamW after 1,600 "
        "images and worse after 3,200."
    )


@pytest.mark.usefixtures("no_charts")
def test_the_headline_names_the_batch_sizes(make_run):
    def edit(total):
        for row in total["verdicts"]:
            row["verdict"] = "better" if row["multiple"] > 1 else "cannot tell"

    run = make_run(multiples=(1, 4, 16), optimizers=("adamw", "lans"), edit=edit)
    assert title_of(run) == (
        "made-up: LANS at batch size 32 and 128 is better than AdamW over 3,200 images."
    )


@pytest.mark.usefixtures("no_charts")
def test_the_headline_of_an_optimizer_that_is_better_at_each_batch_size(make_run):
    def edit(total):
        for row in total["verdicts"]:
            row["verdict"] = "better"

    run = make_run(multiples=(1, 4, 16), optimizers=("adamw", "lans"), edit=edit)
    assert title_of(run) == (
        "made-up: LANS is better than AdamW at each of 3 batch sizes, over 3,200 images."
    )


@pytest.mark.usefixtures("no_charts")
def test_every_number_of_the_verdicts_is_in_the_tables(make_run):
    run = make_run({"lans": BETTER, "scaledadam": CLOSE})
    page, costs = render(run), run.summary["costs"]
    seeds = {(row[0], row[1]): row[2:] for row in rows_of(page, "Losses by seed")[1:]}
    tests = {(row[0], row[1]): row[2:] for row in rows_of(page, "Tests of the differences")[1:]}
    for row in run.summary["verdicts"]:
        title, after = run.summary["optimizers"][row["optimizer"]], show(row["samples"])
        shown = {cells[0]: cells[1:] for cells in rows_of(page, f"After {after} images")[1:]}
        verdict, mean, difference, samples, seconds, state = shown[title]
        assert verdict == row["verdict"]
        assert mean == loss(fmean(row["losses"].values()))
        numbers = [row["mean"], row["low"], row["high"]]
        assert re.findall(r"[\d.e−]+", difference) == [show(value) for value in numbers]
        ratio, cost = row["sample_ratio"], costs[row["optimizer"]]
        ends = [f"{ratio[key]:.2f}" for key in ("value", "low", "high")]
        assert re.findall(r"[\d.]+", samples) == ends
        assert seconds.lstrip("≤≥ ") == f"{cost['time_ratio'] / ratio['value']:.2f}"
        assert state == show(cost["state_bytes"])
        assert seeds[title, after] == [loss(value) for value in row["losses"].values()]
        assert shown["AdamW"][:2] == ["baseline", loss(fmean(row["baseline_losses"].values()))]
        assert seeds["AdamW", after] == [loss(value) for value in row["baseline_losses"].values()]
        p_value, confidence, _, needed = tests[title, after]
        assert p_value == show(row["p_value"], digits=2)
        assert confidence == f"{100 * row['confidence']:.3g}%"
        assert needed == show(row["needed"])
    assert len(run.summary["verdicts"]) == 4


@pytest.mark.usefixtures("no_charts")
def test_the_search_is_in_the_tables(make_run):
    run = make_run({"lans": BETTER}, points=2)
    page = render(run)
    tuned = {row[0]: row[1:] for row in rows_of(page, TUNED)[1:]}
    for row in run.summary["tuned"]:
        title = run.summary["optimizers"][row["optimizer"]]
        rate, octaves, options, plateau, interior = tuned[title]
        assert (rate, octaves) == (show(row["lr"]), f"+{row['step']:g}")
        assert options == (
            ", ".join(f"{name} {show(value)}" for name, value in row["knobs"].items()) or "defaults"
        )
        assert (plateau, interior) == (show(row["plateau"], digits=2), show(row["interior"]))
        rows = rows_of(page, "After 3,200 images")[1:]
        (default,) = (cells[1:] for cells in rows if cells[0] == f"{title} untuned")
        # Twice the default rate is the best one.
        assert default[:3] == ["–", loss(row["default_loss"]), "–"]
        assert row["default_loss"] > min(row["tried"]["2"].values())
        for rung, samples in enumerate(HORIZONS):
            head, *rows = rows_of(page, f"Search after {show(samples)} images, by octaves")
            cells = dict(zip(head, next(r for r in rows if r[0] == title), strict=True))
            tried = row["tried"][str(rung)]
            assert {
                step.replace("−", "-").lstrip("+"): cell
                for step, cell in cells.items()
                if step != "optimizer" and cell != "–"
            } == {step: loss(value) for step, value in tried.items()}
        efforts = {r[0]: r[1:] for r in rows_of(page, "Expected best loss after 800 images")[1:]}
        assert efforts[title] == [loss(row["effort"].get(count)) for count in "139"]


@pytest.mark.usefixtures("no_charts")
def test_what_a_ratio_cannot_say_is_a_bound(make_run):
    run = make_run({"lans": (-0.3, -3.0), "scaledadam": (0.3, 3.0)})
    rows = {row[0]: row for row in rows_of(render(run), "After 3,200 images")[1:]}
    assert rows["LANS"][4].startswith("≥ 4.00 (")
    assert rows["ScaledAdam"][4] == "≤ 0.25 (≤ 0.25 to ≤ 0.25)"
    # A step takes 1.1 times as long as AdamW's.
    assert rows["ScaledAdam"][5] == "≥ 4.40"


def test_the_page_agrees_with_the_study():
    assert {*OPTIMIZERS} == KNOWN.keys() - {"adamw"}


@pytest.mark.usefixtures("no_charts")
def test_what_diverged_is_shown(make_run, painted):
    run = make_run(diverging=("lans",))
    page = render(run)
    rows = {row[0]: row for row in rows_of(page, "After 3,200 images")[1:]}
    assert rows["LANS"][1:6] == ["worse", "∞", "diverged on 5 of 5 seeds", "–", "–"]
    lost = sum(math.isinf(event.loss) for event in run.select(Run))
    assert lost > 20
    assert f"Diverged {lost} of {len(run.select(Run))} trainings" in words_of(page)
    axes = painted(charts.over_rates, Comparison(run), 2)
    rates = {event.lr for event in run.select(Run) if event.optimizer == "lans"}
    assert {line.get_xdata()[0] for line in axes.lines if line.get_marker() == "x"} == rates
    axes = painted(charts.differences, Comparison(run))
    lines = [line for line in axes.lines if line.get_marker() == "x"]
    # Below the two rows of ScaledAdam.
    assert [line.get_ydata()[0] for line in lines] == [2, 3]


@pytest.mark.usefixtures("no_charts")
def test_where_adamw_diverged_there_is_no_telling(make_run, painted):
    run = make_run(diverging=("adamw",))
    page = render(run)
    rows = {row[0]: row for row in rows_of(page, "After 3,200 images")[1:]}
    assert rows["LANS"][1:4:2] == ["cannot tell", "AdamW diverged"]
    assert "no optimizer is known to be better" in title_of(run)
    axes = painted(charts.differences, Comparison(run))
    assert not any(line.get_marker() == "x" for line in axes.lines)


def test_seeds_are_dots_and_bars_are_intervals(make_run, painted):
    run = make_run({"lans": BETTER, "scaledadam": CLOSE})
    axes = painted(charts.differences, Comparison(run))
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["ScaledAdam, 3.2K", "ScaledAdam, 1.6K", "LANS, 3.2K", "LANS, 1.6K"]
    for row in run.summary["verdicts"]:
        after = {3200: "3.2K", 1600: "1.6K"}[row["samples"]]
        y = names.index(f"{run.summary['optimizers'][row['optimizer']]}, {after}")
        here = [line for line in axes.lines if set(line.get_ydata()) == {y}]
        bar, dots, mean = here[:3]
        assert list(bar.get_xdata()) == [row["low"], row["high"]]
        apart = [row["losses"][seed] - row["baseline_losses"][seed] for seed in row["losses"]]
        assert list(dots.get_xdata()) == apart
        assert list(mean.get_xdata()) == [row["mean"]]


def test_an_interval_far_outside_does_not_press_the_others_together(make_run, painted):
    effects = {"scaledadam": CLOSE, "lans": CLOSE, "lamb": CLOSE, "sgd": (50.0, 50.0)}
    run = make_run(effects, optimizers=ALL[:5])
    axes = painted(charts.differences, Comparison(run))
    assert axes.get_xlim()[1] < 1
    triangles = [y for line in axes.lines if line.get_marker() == ">" for y in line.get_ydata()]
    assert triangles == [6, 7]


def test_a_curve_that_was_infinite_on_the_way_is_drawn(make_run, painted):
    """Its end is finite, and so are the limits of the chart."""

    def edit(events):
        first = next(e for e in events if isinstance(e, Run) and e.repeat and e.samples == 3200)
        broken = replace(first, curve=((800, math.inf), *first.curve[1:]))
        return [broken if event is first else event for event in events]

    axes = painted(charts.over_samples, Comparison(make_run({"lans": BETTER}, change=edit)))
    assert all(map(math.isfinite, axes.get_ylim()))
    assert len(axes.texts) == 3


def test_the_plateau_is_as_wide_as_the_summary_says(make_run, painted):
    run = make_run({"lans": BETTER})
    for place, row in enumerate(run.summary["tuned"]):
        axes = painted(charts.over_rates, Comparison(run), place)
        (shaded,) = axes.collections
        xs = np.concatenate([path.vertices[:, 0] for path in shaded.get_paths()])
        # The band is drawn on 400 places along the ladder of four octaves or more.
        assert math.log2(xs.max() / xs.min()) == pytest.approx(row["plateau"], abs=0.05)
        assert row["plateau"] > 0.3


def test_rates_are_drawn_as_they_were_tried(make_run, painted):
    run = make_run(points=3)
    axes = painted(charts.over_rates, Comparison(run), 0)
    (row,) = [row for row in run.summary["tuned"] if row["optimizer"] == "adamw"]
    for line, tried in zip(axes.lines[::2], row["tried"].values(), strict=False):
        finite = [value for value in tried.values() if math.isfinite(value)]
        assert sorted(line.get_ydata()) == sorted(finite)
    # Two more points of the other options, at the second horizon only.
    assert [len(line.get_xdata()) for line in axes.lines[1:6:2]] == [0, 2, 0]
    assert not any("mathdefault" in label.get_text() for label in axes.get_xticklabels())


def test_the_best_of_every_length_is_in_sight(make_run, painted):
    """Also where the seeds of the verdict differ by little, and where a short run is lost."""

    def edit(events):
        same = [replace(e, loss=1.5) if getattr(e, "repeat", 0) else e for e in events]
        return [
            replace(e, loss=1e9) if getattr(e, "samples", 0) == 800 and e.optimizer == "lans" else e
            for e in same
        ]

    found = Comparison(make_run(change=edit))
    low, high = painted(charts.over_rates, found, 0).get_ylim()
    bests = [min(found.search["adamw", 1, samples].values()) for samples in HORIZONS]
    assert low < min(bests) < max(bests) < high
    assert painted(charts.over_rates, found, 2).get_ylim()[1] < 10


def test_curves_are_means_of_the_verdict_s_seeds(make_run, painted):
    run = make_run({"lans": BETTER})
    axes = painted(charts.over_samples, Comparison(run))
    # By height.
    assert [text.get_text() for text in axes.texts] == ["LANS", "AdamW", "ScaledAdam"]
    ends = {(line.get_color(), line.get_xdata()[-1]): line.get_ydata()[-1] for line in axes.lines}
    for row in run.summary["verdicts"]:
        colour = charts.COLOURS[PLAN.optimizers.index(row["optimizer"])]
        mean = pytest.approx(fmean(row["losses"].values()), rel=1e-12)
        assert ends[colour, row["samples"]] == mean


@pytest.mark.parametrize("count", range(2, 7))
def test_up_to_six_optimizers_have_colours_of_their_own(make_run, painted, count):
    run = make_run(optimizers=ALL[:count])
    page = render(run)
    panels = re.findall(r'aria-label="Validation loss with (.*?) over the learning rate', page)
    assert panels == [KNOWN[name].title for name in ALL[:count]]
    axes = painted(charts.over_samples, Comparison(run))
    assert len({text.get_color() for text in axes.texts}) == count
    heights = sorted(text.get_window_extent().y0 for text in axes.texts)
    assert min(np.diff(heights)) > 10


@pytest.mark.usefixtures("no_charts")
def test_critical_batch_sizes(make_run, painted):
    run = make_run(optimizers=("adamw", "lans"), multiples=(1, 4, 16))
    page = render(run)
    head, *rows = rows_of(page, "Critical batch sizes")
    assert head == ["optimizer", "critical batch size", "extra at 32", "extra at 128"]
    axes = painted(charts.over_batches, Comparison(run))
    for cells, row, line in zip(rows, run.summary["critical"], axes.lines, strict=False):
        overheads = [*row["overheads"].values()]
        assert len(overheads) == 3
        assert list(line.get_xdata()) == [8, 32, 128]
        assert list(line.get_ydata()) == [100 * min(extra, 3.0) for extra in overheads]
        assert cells[2].split()[0] == f"{round(100 * overheads[1])}%"
        assert cells[1] == f"{row['within']} to {row['beyond']}"
    assert [row[:2] for row in rows_of(page, "After 3,200 images")[1:4]] == [
        ["AdamW", "8"],
        ["LANS", "8"],
        ["AdamW", "32"],
    ]


# The search has 36 trainings, and each verdict 15.
@pytest.mark.parametrize("events", [0, 1, 2, 20, 37, 46, 66])
@pytest.mark.parametrize("status", [None, "interrupted"])
def test_a_partial_record_says_so(make_run, events, status):
    run = make_run(events=events, status=status)
    page = render(run)
    text = words_of(page)
    assert ("The record has no summary" in text) == (status is None)
    assert "nan" not in page.lower().replace("nance", "")
    judged = bool(run.summary and any(row["samples"] == 3200 for row in run.summary["verdicts"]))
    assert ("no verdict yet" in text) != judged
    assert ("Validation loss over the learning rate" in text) == (events > 1)
    # What was not trained has not diverged.
    assert "∞" not in text
    if status and not judged:
        assert "Nothing was judged after 3,200 images." in text
    assert f"of {max(0, events - 1)} trainings" in text


def test_the_same_run_gives_the_same_bytes(make_run):
    run = make_run({"lans": BETTER})
    page = render(run)
    assert page == render(run)
    assert "<script" not in page
    assert "mathdefault" not in page


@pytest.mark.usefixtures("no_charts")
def test_what_was_not_compared(make_run):
    text = words_of(render(make_run(points=4, optimizers=("adamw", "muon"))))
    assert "Not compared here: scaledadam, lans, lamb, sgd and all others." in text
    assert "factors of two, and 4 points of two other options." in text


def hostile(make_run):
    name = NASTY + "x" * 300

    def edit(total):
        total["optimizers"]["lans"] = name
        total["words"] = ["z" * 500, NASTY]

    return make_run({"lans": BETTER}, edit=edit, task={"name": name, "sample": NASTY})


def test_hostile_names_are_text(make_run):
    page = render(hostile(make_run))
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert "\x00" not in page


def test_the_table_in_the_terminal(make_run):
    run = make_run({"lans": BETTER})
    console = Console(width=200, file=io.StringIO(), markup=False)
    console.print(table(run.summary))
    printed = console.file.getvalue()
    row = run.summary["verdicts"][-1]
    cells = [cell.strip() for cell in re.split("[│]", printed.splitlines()[-2])][1:-1]
    assert cells[:4] == ["LANS", "x1", "3,200", loss(fmean(row["losses"].values()))]
    assert cells[-1] == "better"
    assert table({**run.summary, "verdicts": []}) is None


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_six_optimizers_and_four_batch_sizes_in_a_browser(make_run, tmp_path, mode):
    run = make_run({"lans": BETTER}, optimizers=ALL, multiples=(1, 2, 4, 8))
    look = Look(render(run), tmp_path, *([DARK] if mode == "dark" else []))
    # Three wide charts, and a panel for each optimizer.
    assert_well_shown(look, charts=9)
    assert (luminance(look.desk["paper"]) < 0.1) == (mode == "dark")


@needs_chromium
def test_hostile_names_run_nothing_and_do_not_widen_the_page(make_run, tmp_path):
    look = Look(render(hostile(make_run)), tmp_path)
    assert_well_shown(look, charts=5)
    assert look.desk["title"].startswith("<script>")
