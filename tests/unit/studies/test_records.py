"""The runs whose pages the documentation shows say today what they said."""

import re
import sys
from html import unescape
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from steadygrad._studies import STUDIES, module_of
from steadygrad.cli.console import rendered
from steadygrad.studies.folder import create, dumps, read_run, summarize, write_summary
from steadygrad.studies.page import render
from steadygrad.studies.schema import Training, Trial
from steadygrad.studies.work import run_trial
from tests.rounding import assert_close

HERE = Path(__file__).parent
RECORDS = HERE.parents[2] / "docs" / "records"
SHOWN = "terminal.txt", "page.txt"


# LAPACK, libm and scipy round otherwise on another processor. With each result of theirs moved by
# one rounding, at random, numbers of these summaries move by 1.3e-13 of their own at most, where
# terms cancel. An overhead is a ratio less one: a rounding of that may be all that is left.
CLOSE = {"rel": 1e-11, "abs": 1e-15}


@pytest.mark.parametrize("study", STUDIES)
def test_the_recorded_summary_is_computed_anew_number_for_number(study):
    run = read_run(RECORDS / study)
    assert run.unreadable == ()
    found = summary_of(run)
    assert {*found.to_dict()} == {*run.summary}
    assert_close(numbers_of(found), numbers_of(recorded(run)), **CLOSE)


@pytest.mark.parametrize("study", STUDIES)
def test_terminal_and_page_have_the_same_words(study):
    run = read_run(RECORDS / study)
    assert dumps(recorded(run).worded(module_of(study, "words"))) == dumps(recorded(run))
    header, *files = words_of(run)
    for sentence in said_in(run):
        assert sentence in header.replace("\n", " ")
    # The documentation shows these files.
    assert files == [(HERE / study / name).read_text() for name in SHOWN]


def summary_of(run):
    return summarize(run.header, run.results, run.summary["status"])


def recorded(run):
    """The summary as it was written: words of its numbers are the same on every processor."""
    return msgspec.convert(run.summary, module_of(run.header.study, "schema").Summary, strict=False)


def numbers_of(summary):
    """Its content, without what ``worded`` makes of it."""
    return replace(summary, answer="", table=None, remarks=()).to_dict()


def said_in(run):
    return run.summary["answer"], *run.summary["remarks"]


def words_of(run):
    """The words of a page's header, of the terminal, and of the page below its header."""
    answer, *remarks = said_in(run)
    terminal = rendered(answer, run.summary["table"], *remarks, stream=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steadygrad.studies.page.summarize", lambda *_: recorded(run))
        page = re.sub(r"<(style|svg)\b.*?</\1>", "", render(run), flags=re.DOTALL)
    header, body = map(texts, page.partition("<h2>Where the numbers")[0].split("</header>"))
    return header, f"{terminal}\n", body


def texts(page):
    """The lines of a page that hold words, without marks."""
    lines = (" ".join(unescape(re.sub("<[^>]*>", " ", line)).split()) for line in page.split("\n"))
    return "".join(f"{line}\n" for line in lines if line)


@pytest.mark.slow
def test_a_fresh_run_of_advise_gives_what_the_documentation_shows(tmp_path):
    shown = read_run(RECORDS / "advise")
    create(tmp_path / "run", shown.header)
    # That of the fewest steps.
    old = max(shown.results.select(Training), key=lambda one: one.arm)
    fresh = run_trial(str(tmp_path / "run"), Trial(old.key, old.samples, ""), dumps({}))
    # Equal on the same kernels. Other ones round sums of float32 differently: without vectors
    # losses differ by 1.5e-6 of their own after 258 steps, and other processors have 60 times.
    assert fresh.loss == pytest.approx(old.loss, rel=1e-3)


if __name__ == "__main__":  # renews what is compared with, of the studies that are named
    for study in sys.argv[1:] or STUDIES:
        write_summary(RECORDS / study, summary_of(read_run(RECORDS / study)).to_dict())
        for name, text in zip(SHOWN, words_of(read_run(RECORDS / study))[1:], strict=True):
            (HERE / study / name).write_text(text)
