"""The runs whose pages the documentation shows say today what they said."""

import re
from html import unescape
from pathlib import Path

import pytest

from steadygrad._studies import STUDIES
from steadygrad.cli.console import rendered
from steadygrad.studies.folder import create, dumps, read_run, summarize, write_summary
from steadygrad.studies.page import render
from steadygrad.studies.work import run_job

HERE = Path(__file__).parent
RECORDS = HERE.parents[2] / "docs" / "records"
SHOWN = "terminal.txt", "page.txt"


@pytest.mark.parametrize("study", STUDIES)
def test_the_recorded_summary_is_computed_anew_number_for_number(study):
    run = read_run(RECORDS / study)
    assert run.unreadable == ()
    found = summary_of(run)
    assert {*found} == {*run.summary}
    for name, value in run.summary.items():
        # As text: a NaN is not equal to itself.
        assert dumps(found[name]) == dumps(value), name


@pytest.mark.parametrize("study", STUDIES)
def test_terminal_and_page_have_the_same_words(study):
    header, *files = words_of(read_run(RECORDS / study))
    for sentence in said_in(read_run(RECORDS / study)):
        assert sentence in header.replace("\n", " ")
    # The documentation shows these files.
    assert files == [(HERE / study / name).read_text() for name in SHOWN]


def summary_of(run):
    return summarize(run.header, run.results, run.summary["status"]).to_dict()


def said_in(run):
    return run.summary["answer"], *run.summary["remarks"]


def words_of(run):
    """The words of a page's header, of the terminal, and of the page below its header."""
    answer, *remarks = said_in(run)
    terminal = rendered(answer, run.summary["table"], *remarks, stream=None)
    page = re.sub(r"<(style|svg)\b.*?</\1>", "", render(run), flags=re.DOTALL)
    header, body = map(texts, page.partition("<h2>Where the numbers")[0].split("</header>"))
    return header, f"{terminal}\n", body


def texts(page):
    """The lines of a page that hold words, without marks."""
    lines = (" ".join(unescape(re.sub("<[^>]*>", " ", line)).split()) for line in page.split("\n"))
    return "".join(f"{line}\n" for line in lines if line)


JOBS = [
    ({"kind": "point", "point": 0}, "valid_loss"),
    ({"kind": "noise", "point": 0}, "value"),
    ({"kind": "branch", "point": 0, "repeat": 0, "batch_size": 16}, "loss"),
]


@pytest.mark.slow
def test_a_fresh_run_of_advise_gives_what_the_documentation_shows(tmp_path):
    shown = read_run(RECORDS / "advise")
    create(tmp_path / "run", shown.header)
    for job, number in JOBS:
        fresh = run_job(str(tmp_path / "run"), job, dumps({}))
        (old,) = (result for result in shown.results if result.key == fresh.key)
        # Equal on the same kernels. Other ones round sums of float32 differently: without vectors
        # losses differ by 1.5e-6 of their own after 258 steps, and other processors have 60 times.
        assert getattr(fresh, number) == pytest.approx(getattr(old, number), rel=1e-3)


if __name__ == "__main__":  # renews all that is compared with
    for study in STUDIES:
        write_summary(RECORDS / study, summary_of(read_run(RECORDS / study)))
        for name, text in zip(SHOWN, words_of(read_run(RECORDS / study))[1:], strict=True):
            (HERE / study / name).write_text(text)
