"""Small runs of ``inspect``; on a tiny task 16 steps of each phase take about a second."""

from pathlib import Path

import pytest

from steadygrad.studies.deadline import Deadline
from steadygrad.studies.folder import read_run
from steadygrad.studies.inspect.schema import Part, Settings
from steadygrad.studies.run import start
from tests.unit.studies.framework import Watcher

STUDIES = Path(__file__).parent.parent


def spec(factory):
    """How the command line names a factory in ``fp16_task.py``."""
    return f"{STUDIES / 'fp16_task.py'}:{factory}"


def look(folder, task, *, steps=16, at=None, monitor=None, workers=1, **settings):
    """A study; it is stopped when ``at`` samples of work are done."""
    chosen = {"budget": 600.0, "device": "cpu", "threads": 1, **settings}
    deadline = Deadline()
    monitor = monitor or Watcher(at, lambda: deadline.limit(-1e9))
    with pytest.MonkeyPatch.context() as patch:
        # The speed decides nothing here.
        patch.setattr("steadygrad.studies.calibration.SECONDS", 0.01)
        patch.setattr("steadygrad.studies.calibration.WARM_UP_STEPS", 1)
        settings = Settings(task=task, steps=steps, workers=workers, **chosen)
        return start("inspect", settings, folder, deadline=deadline, monitor=monitor)


def parts_of(folder, phase=None):
    """The recorded parts, of one phase or of all."""
    found = read_run(folder).select(Part)
    return [part for part in found if phase in (None, part.phase)]
