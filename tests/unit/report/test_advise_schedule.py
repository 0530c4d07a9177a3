"""What opens the page of an `advise` run, and the schedule it shows."""

import re
from typing import Any

import pytest
from matplotlib.figure import Figure

from steadygrad.report import render
from steadygrad.report.advise import charts
from steadygrad.report.advise.data import gather


def test_its_words_are_a_sentence_and_a_list(make_run: Any):
    run = make_run()
    page = render(run)
    (lede,) = re.findall(r'<p class="lede">(.*?)</p>', page)
    (said,) = re.findall(r'<ul class="said">(.*?)</ul>', page)
    items = re.findall(r"<li>(.*?)</li>", said)
    assert [lede, *items] == run.summary["recommendation"]["words"]
    assert "".join(f"<li>{item}</li>" for item in items) == said


def test_one_sentence_has_no_list(make_run: Any):
    def edit(header: Any, events: Any, summary: Any) -> None:
        summary["recommendation"]["words"] = ["All there is."]

    page = render(make_run(edit=edit))
    assert '<p class="lede">All there is.</p>' in page
    assert 'class="said"' not in page


def schedule_of(page: str) -> list[list[str]]:
    (found,) = re.findall(r"<caption>A schedule that follows it</caption>.*?</table>", page)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in found.split("<tr>")[2:]]


def test_the_schedule_has_a_row_for_each_stage(make_run: Any):
    assert schedule_of(render(make_run())) == [
        ["0", "16", "0.00141", "375"],  # 6,000 / 16
        ["6,000", "64", "0.00283", "281"],  # 18,000 / 64
        ["24,000", "128", "0.004", "64"],  # to the end of the run: 8,192 / 128
    ]


def test_a_run_that_ends_before_a_stage_has_no_steps_of_it(make_run: Any):
    def edit(header: Any, events: Any, summary: Any) -> None:
        summary["recommendation"]["samples"] = 20_000

    assert [row[-1] for row in schedule_of(render(make_run(edit=edit)))] == ["375", "281", "–"]


@pytest.mark.parametrize(("grows", "shown"), [(200, True), (10, False), (6_000, False)])
def test_the_chart_begins_where_the_schedule_grows(make_run: Any, grows: int, shown: bool):
    """Unless that is before 1/32 of the first point, at 2,000: the points would be crammed."""

    def edit(header: Any, events: Any, summary: Any) -> None:
        summary["recommendation"]["schedule"][1]["from_samples"] = grows

    page = render(make_run(edit=edit))
    chart = page[page.index("The batch size that pays") : page.index("How it was measured")]
    # Ticks within 1.6 times the first point, at 2,000, begin above 1,000.
    assert (re.search(r"<text[^>]*>1K</text>", chart) is not None) == shown


def test_stages_over_before_the_chart_begins_are_left_out(make_run: Any):
    axes = Figure().subplots()
    charts._draw_schedule(axes, gather(make_run()), 10_000.0, 40_000.0)
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[10_000, 64], [24_000, 128], [40_000, 128]]
