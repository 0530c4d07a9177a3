"""The runs whose pages the documentation shows say today what they said."""

import re
from html import unescape
from pathlib import Path

import pytest

from steadygrad._studies import STUDIES
from steadygrad.cli.console import drawn, rendered
from steadygrad.studies.folder import read_run
from steadygrad.studies.page import render
from steadygrad.studies.run import summarize
from steadygrad.studies.strict_json import dumps
from steadygrad.studies.study import study_of

HERE = Path(__file__).parent
RECORDS = HERE.parents[2] / "docs" / "records"


@pytest.mark.parametrize("study", STUDIES)
def test_the_recorded_summary_is_computed_anew_number_for_number(study):
    run = read_run(RECORDS / study)
    assert run.unreadable == ()
    found = summarize(study_of(run.header), run.results, "complete").to_dict()
    assert {*found} == {*run.summary}
    for name, value in run.summary.items():
        # As text: a NaN is not equal to itself.
        assert dumps(found[name]) == dumps(value), name


@pytest.mark.parametrize("study", STUDIES)
def test_terminal_and_page_have_the_same_words(study):
    run = read_run(RECORDS / study)
    summary = run.summary
    terminal = rendered(
        summary["answer"], drawn(summary["table"]), *summary["remarks"], stream=None
    )
    assert f"{terminal}\n" == (HERE / study / "terminal.txt").read_text()
    page = re.sub(r"<(style|svg)\b.*?</\1>", "", render(run), flags=re.DOTALL)
    page = page.partition("<h2>Where the numbers come from")[0]
    lines = (" ".join(unescape(re.sub("<[^>]*>", " ", line)).split()) for line in page.split("\n"))
    assert (
        "\n".join(line for line in lines if line) + "\n" == (HERE / study / "page.txt").read_text()
    )
