"""The runs whose pages the documentation shows say today what they said."""

import re
from html import unescape
from pathlib import Path

import pytest
from msgspec import to_builtins

from steadygrad._studies import STUDIES
from steadygrad.cli.console import drawn, rendered
from steadygrad.studies.advise.trials import plan_for
from steadygrad.studies.folder import create, read_run
from steadygrad.studies.page import render
from steadygrad.studies.strict_json import dumps
from steadygrad.studies.summary import summarize
from steadygrad.tasks import load_task
from tests.unit.studies.framework import go_on, make_trainer

HERE = Path(__file__).parent
RECORDS = HERE.parents[2] / "docs" / "records"


@pytest.mark.parametrize("study", STUDIES)
def test_the_recorded_summary_is_computed_anew_number_for_number(study):
    run = read_run(RECORDS / study)
    assert run.unreadable == ()
    found = summarize(run.header, run.results, "complete").to_dict()
    assert {*found} == {*run.summary}
    for name, value in run.summary.items():
        # As text: a NaN is not equal to itself.
        assert dumps(found[name]) == dumps(value), name


@pytest.mark.parametrize("study", STUDIES)
def test_terminal_and_page_have_the_same_words(study):
    run = read_run(RECORDS / study)
    said = run.summary["answer"], *run.summary["remarks"]
    terminal = rendered(said[0], drawn(run.summary["table"]), *said[1:], stream=None)
    # The documentation shows these files.
    assert f"{terminal}\n" == (HERE / study / "terminal.txt").read_text()
    page = re.sub(r"<(style|svg)\b.*?</\1>", "", render(run), flags=re.DOTALL)
    header, body = map(texts, page.partition("<h2>Where the numbers")[0].split("</header>"))
    for sentence in said:
        assert sentence in header.replace("\n", " ")
    assert body == (HERE / study / "page.txt").read_text()


def texts(page):
    """The lines of a page that hold words, without marks."""
    lines = (" ".join(unescape(re.sub("<[^>]*>", " ", line)).split()) for line in page.split("\n"))
    return "".join(f"{line}\n" for line in lines if line)


def numbers(value):
    """The numbers of a nest in order, but for times."""
    if isinstance(value, dict):
        value = [part for name, part in value.items() if name != "time"]
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.slow
def test_a_fresh_run_of_advise_gives_what_the_documentation_shows(tmp_path):
    """With the recorded plan, which is the settings' at the speed that was measured that day."""
    shown = read_run(RECORDS / "advise")
    plan, trainer = shown.header.plan, make_trainer(load_task(shown.header.settings.task))
    speed, workers = plan.samples_per_second, shown.header.runtime.workers
    assert plan_for(shown.header.settings, trainer, speed=speed, workers=workers) == plan
    create(tmp_path / "run", shown.header)
    go_on(tmp_path / "run", workers=1, budget=1e6)
    found = read_run(tmp_path / "run")
    for name in ("status", "answer", "table", "remarks"):
        assert found.summary[name] == shown.summary[name], name
    fresh, old = ({result.key: result for result in run.results} for run in (found, shown))
    assert {*fresh} == {*old}
    for key, result in old.items():
        # Equal on the same kernels. Other ones round sums of float32 differently: without vectors
        # losses differ by 1.5e-6 of their own after 258 steps, and other processors have 60 times.
        expected = pytest.approx(numbers(to_builtins(result)), rel=1e-4)
        assert numbers(to_builtins(fresh[key])) == expected, key
