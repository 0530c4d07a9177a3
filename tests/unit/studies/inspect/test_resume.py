"""A study that was stopped or killed, against one that was not."""

import shutil
from pathlib import Path

import pytest

from steadygrad.studies.strict_json import dumps
from tests.unit.studies.framework import go_on, lines
from tests.unit.studies.inspect.runs import look, parts_of, spec

ROOT = Path(__file__).parents[4]


def checkpoints(folder):
    return sorted(path.stem for path in (folder / "checkpoints").glob("*.pt"))


@pytest.mark.parametrize("share", [0.03, 0.45, 0.6, 0.8])
def test_stopped_and_resumed_to_the_same_numbers(whole, tmp_path, share):
    complete, monitor = whole
    folder, at = tmp_path / "run", int(share * monitor.total)
    assert look(folder, spec("healthy"), at=at).summary.status == "budget"
    assert dumps(go_on(folder)[0].summary) == dumps(complete.summary)
    assert lines(folder) == lines(complete.folder)
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        # A part is 8 samples of 236, an evaluation 22. The last two parts that ended are kept, and
        # the end of the first training: it may have to be evaluated again.
        (0.2, ["before-3", "before-4"]),
        (0.6, ["before-7", "search-4", "search-5"]),
        (0.8, ["after-2", "after-3", "before-7"]),
    ],
)
def test_only_checkpoints_that_may_be_needed_are_kept(whole, tmp_path, share, kept):
    at = int(share * whole[1].total)
    look(tmp_path / "run", spec("healthy"), at=at)
    assert checkpoints(tmp_path / "run") == kept


@pytest.mark.parametrize("lost", ["the last", "all", "damaged"])
def test_a_lost_checkpoint_is_trained_again(whole, tmp_path, lost):
    (complete, monitor), folder = whole, tmp_path / "run"
    look(folder, spec("healthy"), at=int(0.8 * monitor.total))
    paths = sorted((folder / "checkpoints").glob("after-*.pt"))
    for path in paths if lost == "all" else paths[-1:]:
        path.write_bytes(path.read_bytes()[:-9]) if lost == "damaged" else path.unlink()
    outcome, watcher = go_on(folder)
    assert dumps(outcome.summary) == dumps(complete.summary)
    # It would say so if a part that is trained again gave other numbers.
    assert watcher.lines == []
    assert watcher.done == watcher.total
    assert lines(folder) == lines(complete.folder)


@pytest.mark.slow
def test_two_workers_record_the_same_lines_as_one(whole, tmp_path):
    complete, _ = whole
    outcome = look(tmp_path / "run", spec("healthy"), workers=2)
    assert lines(tmp_path / "run") == lines(complete.folder)
    assert dumps(outcome.summary) == dumps(complete.summary)


def test_what_two_workers_began_one_ends(whole, tmp_path):
    """One chain was ahead of the other."""
    (complete, monitor), folder = whole, tmp_path / "run"
    look(folder, spec("healthy"), at=int(0.2 * monitor.total))
    assert [part.phase for part in parts_of(folder)] == ["before"] * 5
    before = [complete.folder / "results" / f"part-search-{part}.json" for part in (0, 1)]
    for path in before:
        shutil.copy(path, folder / "results")
    outcome, watcher = go_on(folder)
    assert dumps(outcome.summary) == dumps(complete.summary)
    assert lines(folder) == lines(complete.folder)
    assert watcher.lines == []
    # They were not run again.
    for path in before:
        assert (folder / "results" / path.name).read_bytes() == path.read_bytes()
