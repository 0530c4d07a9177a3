"""A forward pass that overflows is the first finding of a study, and no longer its end."""

import pytest

from steadygrad.studies.folder import read_run
from steadygrad.studies.inspect.schema import Accumulation
from steadygrad.studies.page import render
from tests.unit.studies.inspect.runs import look, parts_of, spec

CAUSE = "the forward pass of 'blocks.1' made the first values that are not finite"


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    folder = tmp_path_factory.mktemp("some") / "run"
    look(folder, spec("overflowing"), steps=64)
    return read_run(folder)


def test_first_finding(some):
    assert some.summary["status"] == "complete"
    parts = parts_of(some.folder, "before")
    count = sum(part.forward.get(CAUSE, 0) for part in parts)
    assert 0 < count < sum(part.skipped for part in parts) < 64
    assert some.summary["diagnosis"]["forward"] == {CAUSE: count}
    assert some.summary["remarks"][0].startswith(f"In {count} steps {CAUSE}: ")
    assert some.summary["diagnosis"]["nonfinite_at_any_scale"] == {}


def test_such_steps_move_no_scale(some):
    """The one scale comes down by a half for each of the other overflows only."""
    parts = parts_of(some.folder, "before")
    others = sum(part.skipped - sum(part.forward.values()) for part in parts)
    assert parts[-1].scales[""] == 16.0 - others
    assert {name for part in parts for name in part.at_any_scale} == set()


def test_answer_and_page_say_so(some):
    count = some.summary["diagnosis"]["forward"][CAUSE]
    said = f"The forward pass is not finite in {count} of 64 steps, where no loss scale helps, so "
    assert some.summary["answer"].startswith(said)
    assert said in render(some)


def test_no_step_is_finite(tmp_path):
    look(tmp_path / "run", spec("always_overflowing"))
    run = read_run(tmp_path / "run")
    assert run.summary["status"] == "complete"
    assert run.summary["answer"].endswith("first: nothing can be said of the gradients.")
    assert run.summary["remarks"][0].startswith(f"In 16 steps {CAUSE}: ")
    assert run.summary["proposal"] is None
    assert [part.loss for part in parts_of(run.folder)] == [None] * 24
    assert "no loss scale" in render(run)


@pytest.mark.parametrize(("factory", "nan"), [("unlabelled", True), ("lossless", False)])
def test_a_loss_that_is_not_finite_is_no_fault_of_a_layer(factory, nan, tmp_path):
    look(tmp_path / "run", spec(factory), steps=64)
    run = read_run(tmp_path / "run")
    ((cause, count),) = run.summary["diagnosis"]["forward"].items()
    assert 0 < count < 64
    assert ("NaN is in the batch" in cause) == nan
    assert ("look for NaN" in run.summary["remarks"][0]) == nan
    assert run.summary["diagnosis"]["nonfinite_at_any_scale"] == {}


@pytest.mark.few(1)
@pytest.mark.parametrize(("factory", "bug"), [("healthy", ""), ("batch_norm", "batch")])
def test_accumulation(factory, bug, tmp_path):
    look(tmp_path / "run", spec(factory), accumulation=True)
    run = read_run(tmp_path / "run")
    (found,) = run.select(Accumulation)
    assert len(found.cuts) == (1 if bug else 4)
    assert found.cuts[0].bug == bug
    said = [words for words in run.summary["remarks"] if words.startswith("Accumulat")]
    assert ("depends on the other samples" in said[0]) == bool(bug)
