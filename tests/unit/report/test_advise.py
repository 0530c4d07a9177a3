"""The page of an `advise` run, from whole, partial and hostile records."""

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from steadygrad._checks import InputError
from steadygrad.cli import report as command
from steadygrad.record import Run, read_run
from steadygrad.report import STUDIES, render, write
from steadygrad.report.advise.branches import measured
from steadygrad.report.advise.data import Point, gather

NASTY = "<script>document.title='x'</script><img src=x onerror=alert(1)>\x00$a_b$"
CHARTS = ("scales", "branches0", "branches1", "branches2", "branches3", "tradeoff", "training")


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


def test_the_whole_page(make_run: Any):
    page = render(make_run())
    text = Reader(page).text
    assert "Train char-lm at 64 sequences per step." in text
    assert tuple(charts_of(page)) == CHARTS
    for shown in (
        "Over a whole run, batches of 64",  # its words
        "measured by branches; interval 48 – 128",
        "0.00283",  # 1e-3 * sqrt(8)
        "7.4× fewer",  # 64/8 / 1.079 = (1 + 700/8) / (1 + 700/64)
        "for 7.9% more sequences, by the fitted curve",  # (1 + 64/700) / (1 + 8/700)
        "0:16 6K:64 24K:128",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "2.13.0+cpu",
        "AMD EPYC 7763",
        "steadygrad advise --budget 5m",
        "What this cannot tell you",
    ):
        assert shown in text
    assert 'role="note"' not in page  # nothing is missing


@pytest.mark.parametrize(
    ("excess", "steps", "samples"), [(0.25, "6.4×", "25% more"), (-0.2, "10×", "20% fewer")]
)
def test_a_measured_cost_goes_before_the_fitted_one(
    make_run: Any, excess: float, steps: str, samples: str
):
    def edit(header: Any, events: Any, summary: Any) -> None:
        (row,) = (row for row in summary["tradeoff"]["rows"] if row["batch_size"] == 64)
        row["excess"] = excess

    text = Reader(render(make_run(1, edit=edit))).text
    assert f"{steps} fewer" in text  # 64/8 / (1 + excess)
    assert f"for {samples} sequences, measured" in text


def test_every_number_of_the_record_is_in_a_table(make_run: Any):
    run = make_run()
    cells = set(re.findall(r"<td[^>]*>([^<]*)</td>", render(run)))
    for branch in run.select("branch"):
        assert f"{branch['loss']:.4f}" in cells
    for point in run.select("point"):
        assert f"{point['valid_loss']:.4f}" in cells
    assert {"31.6", "23.7 – 44.2", "unresolved", "≥ 41", "−4e−4", "+7.3%", "88.5"} <= cells


def test_the_same_run_gives_the_same_bytes(make_run: Any):
    run = make_run()
    assert render(run) == render(run)
    assert render(read_run(run.folder)) == render(run)


@pytest.mark.parametrize("sample", [NASTY, "字" * 300, "x", "$\\frac$"])
def test_every_string_is_escaped(make_run: Any, sample: str):
    def edit(header: Any, events: Any, summary: Any) -> None:
        header["task"] |= {"name": NASTY, "sample": sample, NASTY: NASTY}
        header["settings"] |= {"lr_rule": NASTY, "device": NASTY, "batch_size": NASTY}
        header |= {"seed": NASTY, "command": NASTY, "time": {"created": NASTY}}
        header["environment"]["cpu"] = NASTY
        for _, fields in events:
            for key in ("at_edge", "lr", "steps"):
                if key in fields:
                    fields[key] = NASTY
        recommendation = summary["recommendation"]
        recommendation |= {"words": [NASTY, NASTY], "megatron": NASTY, "trust": NASTY}
        recommendation["schedule"][0]["lr"] = NASTY

    page = render(make_run(edit=edit))
    reader = Reader(page)
    assert reader.tags.isdisjoint({"script", "img"})
    assert "onerror" not in reader.attributes
    assert "<script>document.title='x'</script>" in reader.text
    for svg in charts_of(page).values():
        assert not list(svg.iter("script"))


def strings_become(value: Any, junk: Any) -> Any:
    """The same nest with every leaf replaced, as a damaged or foreign record might have it."""
    if isinstance(value, dict):
        return {key: strings_become(item, junk) for key, item in value.items()}
    if isinstance(value, list):
        return [strings_become(item, junk) for item in value]
    return junk


@pytest.mark.parametrize("junk", [None, "text", math.nan, math.inf, -1, 0, {}, []], ids=repr)
def test_a_record_of_nonsense_is_drawn_without_a_crash(make_run: Any, junk: Any):
    run = make_run()
    events = [strings_become(event, junk) | {"event": event["event"]} for event in run.events]
    header = strings_become(run.header, junk) | {"study": "advise"}
    page = render(Run(run.folder, header, events, strings_become(run.summary, junk), False))
    assert "Train" not in page
    assert "What this cannot tell you" in page


@pytest.mark.parametrize("name", ["point", "noise", "branch", "critical", "train"])
def test_any_kind_of_event_may_be_missing(make_run: Any, name: str):
    def edit(header: Any, events: Any, summary: Any) -> None:
        events[:] = [event for event in events if event[0] != name]

    drawn = set(charts_of(render(make_run(edit=edit))))
    panels = {chart for chart in CHARTS if "branches" in chart}
    gone = {"train": {"training"}, "branch": panels, "point": {"scales"}}.get(name, set())
    assert drawn == set(CHARTS) - gone


def test_only_a_header(make_run: Any):
    page = render(make_run(0, None))
    text = Reader(page).text
    assert "No batch size for char-lm yet: the run is not complete." in text
    assert "The record has no end" in text
    assert "0 of 4 planned points" in text
    assert "No training step was recorded." in text
    assert charts_of(page) == {}
    assert "9f86d081884c7d65" in text


@pytest.mark.parametrize(
    ("status", "words"), [("interrupted", "was interrupted"), ("budget", "budget was spent")]
)
def test_a_partial_run_says_what_is_missing(make_run: Any, status: str, words: str):
    text = Reader(render(make_run(2, status))).text
    assert words in text
    assert "2 of 4 planned points" in text
    assert "Train char-lm at 64" in text


def test_a_point_cut_short_shows_what_its_summary_knows(make_run: Any):
    def edit(header: Any, events: Any, summary: Any) -> None:
        known = [fields for kind, fields in events if kind == "critical"][-1]
        events[:] = [e for e in events if not (e[0] == "critical" and e[1]["point"] == 1)]
        summary["points"] = [{"critical": None}, {"critical": known}]

    whole, cut = (Reader(render(make_run(2, "budget", edit=e))).text for e in (None, edit))
    # The same page as from the event: the count of points, the table of numbers and the chart.
    assert "2 of 4 planned points" in cut
    assert cut == whole


def test_a_killed_run_without_summary_still_shows_what_it_measured(make_run: Any):
    run = make_run(3, None)
    with open(run.folder / "record.jsonl", "ab") as file:
        file.write(b'{"event": "tra')
    page = render(read_run(run.folder))
    text = Reader(page).text
    assert "There is no summary" in text
    assert "A broken last line of the record was left out." in text
    assert list(charts_of(page)) == ["scales", "branches0", "branches1", "branches2", "training"]


def test_no_batch_size_resolved(make_run: Any):
    def edit(header: Any, events: Any, summary: Any) -> None:
        summary["recommendation"] |= {"batch_size": None, "trust": "none", "schedule": []}

    text = Reader(render(make_run(edit=edit))).text
    assert "This run resolves no batch size for char-lm." in text
    assert "A schedule that follows it" not in text


def test_unresolved_noise_is_said_in_words_and_drawn_apart(make_run: Any):
    unresolved = charts_of(render(make_run()))["scales"]
    assert words_of(unresolved).count("unresolved") == 1

    def edit(header: Any, events: Any, summary: Any) -> None:
        for kind, fields in events:
            if kind == "noise":
                fields |= {"value": math.nan, "low": math.nan, "high": math.inf, "resolved": False}

    page = render(make_run(edit=edit))
    assert words_of(charts_of(page)["scales"]).count("unresolved") == 4
    assert '<dd class="value">unresolved</dd>' in page


def test_a_critical_batch_beyond_what_was_tried_gets_an_arrow(make_run: Any):
    def edit(header: Any, events: Any, summary: Any) -> None:
        for kind, fields in events:
            if kind == "critical":
                fields["at_edge"] = "above"

    def arrows(page: str) -> int:
        # Only the shafts of arrows are quadratic curves.
        return sum("Q" in str(e.get("d")) for e in charts_of(page)["scales"].iter("path"))

    assert arrows(render(make_run(edit=edit))) == arrows(render(make_run())) + 4


def branch(size: int, loss: float, curve: list[list[float]], samples: int = 100) -> dict[str, Any]:
    return {"batch_size": size, "loss": loss, "curve": curve, "samples": samples}


def test_branches_are_sorted_by_batch_size():
    point = Point(branches=[branch(16, 9.0, []), branch(8, 1.0, []), branch(8, 2.0, [])])
    assert point.batch_sizes == [8, 16]
    assert point.losses(8) == [1.0, 2.0]


def test_the_tolerance_level_is_the_recorded_one():
    assert Point(critical={"level": 2.5}).tolerance_level == 2.5
    assert math.isnan(Point().tolerance_level)


@pytest.mark.parametrize("where", ["rows", "last point"])
def test_measured_points_lie_on_the_line_when_the_formula_holds(make_run: Any, where: str):
    critical = 700.0

    def edit(header: Any, events: Any, summary: Any) -> None:
        first = 1 + 8 / critical
        excess = {b: (1 + int(b) / critical) / first - 1 for b in ("8", "64")}
        if where == "rows":
            rows = [{"batch_size": int(b), "excess": x} for b, x in excess.items()]
            summary["tradeoff"]["rows"] = rows
        else:
            assert events[-1][0] == "critical"
            events[-1][1]["excess"] = excess

    spots = measured(gather(make_run(edit=edit)))
    assert [spot[0] for spot in spots] == [8, 64]
    for _, steps, samples in spots:
        assert (steps - 1) * (samples - 1) == pytest.approx(1.0)


def test_unknown_study(make_run: Any):
    run = make_run(0, None)
    other = Run(run.folder, run.header | {"study": "guess"}, [], None, False)
    with pytest.raises(InputError, match="study = 'guess'") as error:
        render(other)
    assert "Remedy" in str(error.value)
    assert list(STUDIES) == ["advise", "inspect"]


def test_write_replaces_the_page(make_run: Any, capsys: pytest.CaptureFixture[str]):
    folder: Path = make_run().folder
    assert write(folder) == folder / "report.html"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page == render(read_run(folder))
    (folder / "report.html").write_text("old")
    assert command.run(folder) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert (folder / "report.html").read_text(encoding="utf-8") == page


def test_report_of_a_folder_without_a_record(tmp_path: Path):
    with pytest.raises(InputError, match="Remedy"):
        command.run(tmp_path)
    assert list(tmp_path.iterdir()) == []
