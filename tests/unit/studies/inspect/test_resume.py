"""Checkpoints of a study that was stopped: which are kept, and what a lost one costs."""

import pytest

from steadygrad.studies.strict_json import dumps
from tests.unit.studies.framework import go_on, lines
from tests.unit.studies.inspect.runs import look, spec


def checkpoints(folder):
    return sorted(path.stem for path in (folder / "checkpoints").glob("*.pt"))


@pytest.mark.few(1)
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


@pytest.mark.few(1)
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
