"""The page of an `advise` run, from whole, partial and hostile records."""

import dataclasses
import math
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from matplotlib.figure import Figure
from msgspec.structs import replace

from steadygrad._checks import InputError
from steadygrad.studies.advise.report import training
from steadygrad.studies.advise.report.data import Advice
from steadygrad.studies.advise.schema import Branch, Noise, Point, Scratch
from steadygrad.studies.folder import Run, read_run
from steadygrad.studies.page import render, write
from steadygrad.studies.schema import Result
from tests.unit.report.conftest import POINTS, loss_at

NASTY = "<script>document.title='x'</script><img src=x onerror=alert(1)>\x00$a_b$"
BRANCHES = ("branches0", "branches1", "branches2", "branches3")
CHARTS = ("scratch", "sizes", *BRANCHES, "rate", "training")


class Reader(HTMLParser):
    """Collects tags, headings, figures and text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str):
        self.text += data + "\n"


def charts_of(page: str) -> dict[str, ET.Element]:
    found = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    drawings = {}
    for svg in map(ET.fromstring, found):
        name = next(element.get("id", "") for element in svg.iter() if element.get("id"))
        drawings[re.split(r"-figure|-(?=[wn]-)", name)[0]] = svg
    return drawings


def words_of(svg: ET.Element) -> list[str]:
    return [element.text or "" for element in svg.iter("text")]


def rows_of(page: str, caption: str) -> list[list[str]]:
    """Cells of the table with a caption, row by row."""
    (found,) = re.findall(rf"<caption>{re.escape(caption)}</caption>(.*?)</table>", page)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in found.split("<tr>")[2:]]


def changed(
    kind: type[Result], change: Callable[[Any], dict[str, Any]]
) -> Callable[[list[Result]], list[Result]]:
    """Replaces fields of all events of a kind."""
    return lambda events: [replace(e, **change(e)) if isinstance(e, kind) else e for e in events]


def test_the_whole_page(whole_page: str):
    page = whole_page
    text = Reader(page).text
    assert "Train char-lm at 16 sequences per step." in text
    assert tuple(charts_of(page)) == CHARTS
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Trained from scratch",
        "Critical batch size over training",
        "How it was measured",
        "Learning rate",
        "The run itself",
        "What this cannot tell you",
        "Every number",
        "Where the numbers come from",
    ]
    for shown in (
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "2.13.0+cpu",
        "AMD EPYC 7763",
        "1, 2, 4, 8, 16, 32; 1, 2, 4, 8, 16, 32",  # the plan's multiples
        "seed 0",
        "2026-11-21",
    ):
        assert shown in text
    assert 'role="note"' not in page  # nothing is missing


def test_every_number_of_the_record_is_in_a_table(whole_run: Run, whole_page: str):
    cells = set(re.findall(r"<td[^>]*>([^<]*)</td>", whole_page))
    losses = [e.loss for e in whole_run.select(Branch) + whole_run.select(Scratch)]
    losses += [event.valid_loss for event in whole_run.select(Point)]
    assert {f"{loss:.4f}" for loss in losses if math.isfinite(loss)} <= {
        each for cell in cells for each in cell.split(", ")
    }
    assert {"∞, ∞", "unresolved", "≥ 41", "−4e−4", "300% or more"} <= cells
    assert whole_run.summary is not None
    for row in whole_run.summary["points"]:
        found = row["critical"]
        assert {f"{found['value']:.3g}", f"{found['within']}", f"{found['level']:.4f}"} <= cells


def test_the_same_run_gives_the_same_bytes(whole_run: Run, whole_page: str):
    assert render(read_run(whole_run.folder)) == whole_page


@pytest.mark.usefixtures("no_charts")
def test_runs_from_scratch_in_a_table(make_run: Any):
    def change(summary: dict[str, Any]) -> None:
        first, second = summary["checked"]
        first |= {"loss": 1.7123, "overhead": 0.1234, "low": -1 / 3, "high": 0.19}
        second |= {"within": False, "loss": math.inf, "overhead": 3.0, "low": 3.0, "high": 3.0}
        summary["schedule"]["check"] |= {"loss": 1.81, "overhead": 0.5, "low": 0.3, "high": 0.7}
        summary["schedule"]["check"]["within"] = summary["schedule"]["advised"] = False

    run = make_run(summary=change)
    # The mean of two seeds' ends: seed 0 is the main trajectory.
    (other,) = [e for e in run.select(Scratch) if (e.batch_size, e.rate) == (8, 1)]
    own = [loss for _, loss in run.select(Point)[-1].curve[-5:]]
    mean = (sum(own) / 5 + other.loss) / 2
    assert rows_of(render(run), "24,576 sequences from scratch") == [
        ["8", "0.001", "3,072", "2", f"{mean:.4f}", "–", "–", "the reference"],
        ["16", "0.00141", "1,536", "2", "1.7123", "12%", "below 0% to 19%", "within 20%"],
        ["32", "0.002", "768", "2", "∞", "300% or more", "300% or more", "diverged"],
        ["growing", "to 0.00283", "420", "2", "1.8100", "50%", "30% to 70%", "not within 20%"],
    ]


@pytest.mark.usefixtures("no_charts")
def test_the_verdict_follows_the_overhead_and_its_interval(make_run: Any):
    def change(summary: dict[str, Any]) -> None:
        lost, good = summary["checked"]
        lost |= {"overhead": 0.14, "low": -0.05, "high": 0.5, "within": False}
        good |= {"overhead": 0.05, "low": 0.05, "high": 0.05, "within": True}
        summary["schedule"]["check"] |= {"overhead": 0.6, "low": 0.5, "high": 0.7, "within": False}
        summary["recommendation"] |= {"batch_size": 8}

    rows = rows_of(render(make_run(summary=change)), "24,576 sequences from scratch")
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        ("16", "not certain"),
        ("32", "within 20%, above a size that was not"),
        ("growing", "not within 20%"),
    ]


def test_the_reference_curves_share_their_places(whole_run: Run):
    own, other = Advice(whole_run).baseline()
    assert [place for place, _ in own] == [place for place, _ in other]
    assert own[0] == (7376, pytest.approx(loss_at(7376)))  # 0.3 of the run, in whole batches
    ends = (23_040, 23_424, 23_808, 24_192, 24_576)
    assert own[-1] == (23_808, pytest.approx(sum(map(loss_at, ends)) / 5))


@pytest.mark.usefixtures("no_charts")
def test_a_recorded_seed_0_is_the_reference_instead_of_the_trajectory(make_run: Any):
    def decays(events: list[Result]) -> list[Result]:
        (other,) = [e for e in events if e.key == ("scratch", "constant", 1, 8, 1.0)]
        curve = tuple((at, loss - 0.1) for at, loss in other.curve)
        return [*events, replace(other, repeat=0, loss=other.loss - 0.1, curve=curve)]

    run = make_run(edit=decays, task={"lr_decay": "linear"})
    first, second = Advice(run).baseline()
    differences = [b[1] - a[1] for a, b in zip(first, second, strict=True)]
    assert differences == pytest.approx([0.1] * len(second))
    assert "main trajectory and the branches leave the decay out" in Reader(render(run)).text


def test_diverged_runs_are_crosses(make_run: Any):
    def crosses(page: str, chart: str) -> int:
        """Strokes in the colour of what diverged; each marker is used once or more."""
        svg = charts_of(page)[chart]
        return sum("var(--noise)" in str(e.get("style")) for e in svg.iter("use"))

    def lose(run: Scratch) -> dict[str, Any]:
        lost = run.batch_size == 32 and run.repeat == 1
        return {"loss": math.inf, "curve": ((24_576, math.inf),)} if lost else {}

    def behind(summary: dict[str, Any]) -> None:
        # Finite losses, but so far behind that the study calls it diverged.
        summary["points"][3]["critical"]["diverged"] = 128

    page = render(make_run(edit=changed(Scratch, lose), summary=behind))
    assert crosses(page, "scratch") == 1
    assert [crosses(page, name) for name in BRANCHES] == [1, 0, 0, 2]
    assert crosses(page, "sizes") == 2


def flat(point: int) -> Callable[[list[Result]], list[Result]]:
    """The validation loss no longer falls along the branches of a point."""

    def level(branch: Branch) -> dict[str, Any]:
        if branch.point != point:
            return {}
        loss = 2.0 + 0.01 * branch.repeat + 0.02 * (branch.batch_size > 8)
        return {"loss": loss, "curve": tuple((at, loss) for at, _ in branch.curve)}

    return changed(Branch, level)


def test_an_unresolved_point_is_shaded_and_said(make_run: Any, whole_page: str):
    run = make_run(edit=flat(2))
    page = render(run)
    assert "Shaded: branches over which the validation loss" in page
    assert "Shaded: branches over which the validation loss" not in whole_page
    assert words_of(charts_of(page)["sizes"]).count("not resolved ") == 1
    assert "after 6,144 sequences: not resolved" in page
    row = rows_of(page, "Critical batch size")[2]
    assert row[3:5] == ["not resolved", "–"]
    # It did not diverge: all its losses are drawn.
    assert Advice(run).points[2].diverged == math.inf


def test_the_bracket_the_interval_and_the_limit_are_drawn(make_run: Any):
    def change(summary: dict[str, Any]) -> None:
        found = {"within": 32, "beyond": math.inf, "value": 40.0, "low": 0.0, "high": math.inf}
        summary["points"][1]["critical"] |= found

    axes = Figure().subplots()
    axes.set_ylim(4, 400)
    training._draw_point(axes, Advice(make_run(summary=change)).points[1])
    bracket, interval, *triangles, limit = [line.get_ydata() for line in axes.lines]
    assert list(bracket) == [32, 400]
    assert list(interval) == [4, 400]
    assert [list(each) for each in triangles] == [[4], [400]]
    assert list(limit) == [40.0]


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("low", "The task's learning rate 0.001 looks too low for a run of {n}. Every batch size"),
        ("high", "The task's learning rate 0.001 looks too high for a run of {n}. Every batch"),
        ("fits", "No better learning rate than 0.001 was found for a run of {n}: none is ahead"),
    ],
)
def test_the_verdict_on_the_learning_rate(make_run: Any, verdict: str, words: str):
    run = make_run(summary=lambda total: total["rate"].update(verdict=verdict))
    words, other = words.format(n=f"{POINTS[-1]:,} sequences"), "That says nothing of a run of"
    text = Reader(render(run)).text
    assert words in text
    assert other not in text

    def shorter(total: dict[str, Any]) -> None:
        total["rate"].update(verdict=verdict)
        total["recommendation"]["samples"] = POINTS[-1] // 4

    text = Reader(render(make_run(summary=shorter))).text
    assert words.split(". Every")[0] in text
    # What is too low for a long run is too low for a shorter one.
    assert (f"{other} {POINTS[-1] // 4:,} sequences." in text) == (verdict != "low")
    assert ("Every batch size here was measured" in text) == (verdict == "low")


@pytest.mark.usefixtures("no_charts")
def test_without_a_verdict_nothing_is_said_of_the_learning_rate(make_run: Any):
    def rising(total: dict[str, Any]) -> None:
        total["rate"].update(verdict="", why="rising")

    page = render(make_run(summary=rising))
    assert "looks too" not in page
    assert "The smallest batch from scratch at other" not in page


@pytest.mark.usefixtures("no_charts")
def test_the_learning_rates_tried_in_a_table(make_run: Any):
    def change(summary: dict[str, Any]) -> None:
        summary["rate"] |= {
            "losses": {"0.5": 2.1, "1": 2.0, "2": 1.9},
        }

    caption = "The smallest batch from scratch at other learning rates"
    assert rows_of(render(make_run(summary=change)), caption) == [
        ["5e−4", "2.1000"],
        ["0.001", "2.0000"],
        ["0.002", "1.9000"],
    ]


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        ({}, {}, "grows with the square root of the batch size, from 0.001 at batch 8"),
        ({"lr_rule": "constant"}, {}, "stays the same at every batch size, from 0.001"),
        ({}, {}, "has no warm-up and is constant then"),
        ({"warmup_samples": 64}, {}, "warms up over 64 sequences and is constant then"),
        ({"lr_decay": "cosine"}, {}, "has a cosine decay. Runs from scratch have it"),
        ({}, {}, "beta2 (0.99) and weight decay (0.01) stayed as in the task"),
        (
            {},
            {"keep_half_life": True},
            "of beta2 (0.99) and weight decay (0.01) stayed the same in samples",
        ),
        ({"beta2": None}, {}, "At every batch size, weight decay (0.01) stayed"),
        ({}, {"seed": 7}, "rest on seed 7 alone."),
    ],
)
def test_what_it_cannot_tell(make_run: Any, task: Any, settings: Any, words: str):
    assert words in Reader(render(make_run(1, task=task, settings=settings))).text


@pytest.mark.usefixtures("no_charts")
def test_seeds_that_were_trained_are_counted(make_run: Any):
    words = "rest on seed 0 alone. The runs from scratch have 2 seeds."
    assert words in Reader(render(make_run())).text


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        (True, "rest on seed 0 alone. So do the runs from scratch. What was"),
        (False, "rest on seed 0 alone. What was"),
    ],
)
@pytest.mark.usefixtures("no_charts")
def test_no_runs_from_scratch_have_zero_seeds(make_run: Any, trained: bool, words: str):
    """A small plan has runs at other learning rates, and no others."""

    def edit(events: list[Result]) -> list[Result]:
        return [e for e in events if not isinstance(e, Scratch) or (trained and e.rate != 1)]

    run = make_run(edit=edit)
    plan = replace(run.header.plan, seeds=0, candidates=0)
    small = dataclasses.replace(run, header=replace(run.header, plan=plan))
    text = Reader(render(small)).text
    assert "0 seeds" not in text
    assert words in " ".join(text.split())


@pytest.mark.parametrize("sample", [NASTY, "字" * 300, "x", "$\\frac$"])
def test_every_string_is_escaped(make_run: Any, sample: str):
    def change(summary: dict[str, Any]) -> None:
        summary["words"] = [NASTY, NASTY]
        summary["schedule"]["megatron"] = NASTY

    task = {"name": NASTY, "sample": sample, "spec": NASTY, "provenance": {NASTY: NASTY}}
    page = render(make_run(task=task, settings={"dask": NASTY}, summary=change))
    reader = Reader(page)
    assert reader.tags.isdisjoint({"script", "img"})
    assert "onerror" not in reader.attributes
    assert "<script>document.title='x'</script>" in reader.text
    for svg in charts_of(page).values():
        assert not list(svg.iter("script"))


@pytest.mark.parametrize(
    ("kind", "gone"),
    [
        (Noise, set()),
        (Branch, {"scratch", "sizes", "rate", *BRANCHES}),
        (Scratch, {"scratch", "rate"}),
    ],
)
def test_any_kind_of_event_may_be_missing(make_run: Any, kind: Any, gone: set[str]):
    run = make_run(edit=lambda events: [e for e in events if not isinstance(e, kind)])
    assert set(charts_of(render(run))) == set(CHARTS) - gone


def test_only_a_header(make_run: Any):
    page = render(make_run(0, None))
    text = Reader(page).text
    assert "No batch size for char-lm yet." in text
    assert "The record has no summary" in text
    assert "0 of 4 planned points" in text
    assert charts_of(page) == {}
    assert "Every number" not in text
    assert "9f86d081884c7d65" in text


def test_events_without_a_summary_are_drawn(make_run: Any):
    page = render(make_run(2, None))
    assert "2 of 4 planned points" in page
    drawn = {"branches0", "branches1", "training"}
    assert set(charts_of(page)) == drawn


def test_a_point_without_branches(make_run: Any):
    def cut(events: list[Result]) -> list[Result]:
        return [e for e in events if not (isinstance(e, Branch) and e.point == 1)]

    page = render(make_run(2, "interrupted", edit=cut))
    assert words_of(charts_of(page)["sizes"]).count("not measured ") == 1
    assert rows_of(page, "Critical batch size")[1][3] == "not measured"
    assert "branches1" not in charts_of(page)


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(
    ("status", "words"),
    [("interrupted", "was interrupted"), ("budget", "ran out of its budget"), ("failed", "failed")],
)
def test_a_partial_run_says_once_what_is_missing(make_run: Any, status: str, words: str):
    page = render(make_run(2, status))
    text = Reader(page).text
    assert text.count(f"the study {words}") == 1
    assert text.count("2 of 4 points") == 1
    assert 'role="note"' not in page  # its words have said it


@pytest.mark.usefixtures("no_charts")
def test_a_result_that_cannot_be_read_is_said(make_run: Any):
    run = make_run()
    (run.folder / "results" / "noise-1.json").write_text('{"kind": "po')
    page = render(read_run(run.folder))
    assert "1 results could not be read" in Reader(page).text


@pytest.mark.usefixtures("no_charts")
def test_a_whole_run_that_finds_nothing(make_run: Any):
    def all_flat(events: list[Result]) -> list[Result]:
        for point in range(4):
            events = flat(point)(events)
        return [event for event in events if not isinstance(event, Scratch)]

    text = Reader(render(make_run(edit=all_flat))).text
    assert "This study finds no batch size for char-lm." in text
    assert "Trained from scratch" not in text


@pytest.mark.usefixtures("no_charts")
def test_unresolved_noise_is_said_in_words(make_run: Any):
    run = make_run(edit=changed(Noise, lambda _: {"resolved": False, "low": 41.0}))
    page = render(run)
    assert '<dd class="value">unresolved</dd>' in page
    assert "at least 41; too few measurements to tell" in page


@pytest.mark.parametrize("study", ["advise", "inspect"])
def test_missing_matplotlib_names_the_extra(
    whole_run: Run, monkeypatch: pytest.MonkeyPatch, study: str
):
    loaded = ("matplotlib", "steadygrad.studies.advise.report", "steadygrad.studies.inspect.report")
    for name in [*sys.modules]:
        if name.startswith((*loaded, "steadygrad.studies.charts")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = dataclasses.replace(whole_run, header=replace(whole_run.header, study=study))
    with pytest.raises(InputError, match=r'pip install "steadygrad\[cli\]"') as error:
        render(run)
    assert "\n" not in str(error.value)


def test_another_module_that_is_missing_is_not_called_matplotlib(
    whole_run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "steadygrad.studies.advise.report", None)
    with pytest.raises(ImportError, match=r"studies\.advise\.report"):
        render(whole_run)


@pytest.mark.usefixtures("no_charts")
def test_write_replaces_the_page(make_run: Any):
    folder = make_run().folder
    assert write(folder) == folder / "report.html"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page == render(read_run(folder))
    (folder / "report.html").write_text("old")
    write(folder)
    assert (folder / "report.html").read_text(encoding="utf-8") == page


@pytest.mark.usefixtures("no_charts")
def test_the_title_says_where_no_larger_batch_is_known(make_run: Any):
    run = make_run()
    found = {**run.summary["recommendation"], "batch_size": 8, "known": False}
    unknown = dataclasses.replace(run, summary={**run.summary, "recommendation": found})
    text = Reader(render(unknown)).text
    assert "Stay at 8 sequences per step: no larger batch is known to be as good." in text
    found |= {"known": True}
    assert (
        "Stay at 8 sequences per step: no larger batch is within 20%."
        in Reader(render(unknown)).text
    )


@pytest.mark.usefixtures("no_charts")
def test_the_title_of_a_prediction_says_that_it_is_one(make_run: Any):
    def change(summary: dict[str, Any]) -> None:
        summary["recommendation"] |= {"basis": "predicted", "batch_size": 64}

    text = Reader(render(make_run(2, "interrupted", summary=change))).text
    assert "Predicted, not trained: 64 sequences per step for char-lm." in text


@pytest.mark.usefixtures("no_charts")
def test_the_tasks_own_batch_size_is_no_prediction(make_run: Any):
    """It was trained: what is not known is whether a larger one is as good."""
    run = make_run(2, "interrupted")
    assert run.summary["recommendation"]["basis"] == "own"
    assert run.summary["recommendation"]["batch_size"] == 8
    text = Reader(render(run)).text
    assert "Stay at 8 sequences per step: no larger batch is known to be as good." in text
    assert "the task's own, for 1,536 sequences" in text
    assert "The fixed batch size is predicted" not in text
