"""The page of a ``compare`` run, from whole and partial records."""

import html
import re
from pathlib import Path

import pytest

from steadygrad.studies.compare.findings import summarize
from steadygrad.studies.folder import Run
from steadygrad.studies.page import render
from steadygrad.studies.text import loss as show
from tests.unit.report.conftest import no_charts  # noqa: F401
from tests.unit.studies.compare.runs import header_of, noisy, planned, record

plain = pytest.mark.usefixtures("no_charts")


def made_run(loss_of=None, *, most=None, status="complete", **plan):
    """A run with the summary that the study itself would write."""
    plan = planned(**{"seeds": 6, **plan})
    header, results = header_of(plan), record(plan, loss_of or noisy(lans=-0.3), most=most)
    total = summarize(header, results, status).to_dict() if status else None
    return Run(Path(), header, results, total)


def found_in(run):
    return summarize(run.header, run.results, "complete")


def rows_of(page, caption):
    """The cells of a table by row, its heading first."""
    inner = page.split(f"<caption>{caption}</caption>")[1].split("</table>")[0]
    rows = re.findall("<tr>(.*?)</tr>", inner, re.DOTALL)
    return [[html.unescape(c) for c in re.findall("<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows]


@plain
def test_the_numbers_of_several_batch_sizes():
    run = made_run(sizes=(4, 16), names=("adamw", "lans"))
    page, found = render(run), found_in(run)
    rows = rows_of(page, "Every verdict")[1:]
    assert [row[0] for row in rows] == ["LANS, 4", "LANS, 16"]
    assert [int(row[3]) for row in rows] == [row.pairs for row in found.verdicts]
    losses = {row[0]: row[1:] for row in rows_of(page, "Losses by seed")}
    assert [*losses] == ["optimizer", "AdamW, 4", "LANS, 4", "AdamW, 16", "LANS, 16"]
    assert losses["LANS, 16"] == [show(loss) for loss in found.verdicts[1].losses.values()]
    rates = {row[0]: row[1:] for row in rows_of(page, "Tuned learning rates")}
    assert rates["LANS, 4"] == ["0.001", "0", "yes"]


# The search has 18 trials, and five pairs have 3 + 1 trainings each.
@plain
@pytest.mark.parametrize(
    ("most", "status"), [(0, None), (1, "interrupted"), (19, None), (38, "budget")]
)
def test_a_partial_record_is_drawn(most, status):
    run = made_run(most=most, status=status)
    page = render(run)
    assert "nan" not in page.lower().replace("nance", "")
    assert ("Validation loss over the learning rate" in page) == (most > 1)
    assert ("Every verdict" in page) == (most == 38)
    # No table without a row.
    assert all(len(rows_of(page, name)) > 1 for name in re.findall("<caption>(.*?)</cap", page))
    # What was not trained has not diverged.
    assert "∞" not in page
