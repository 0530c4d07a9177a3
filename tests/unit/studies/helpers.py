"""Running studies on the tiny task."""

from pathlib import Path

import pytest
import torch

from steadygrad.record import dumps, read_run, strip_times
from steadygrad.studies.advise import Settings, Stop, advise
from steadygrad.studies.advise.engine import Engine
from steadygrad.studies.advise.ranks import Ranks
from steadygrad.tasks import load_task

TINY = Path(__file__).with_name("tiny_task.py")


def tiny(factory="make_task"):
    """How the command line names a factory in ``tiny_task.py``."""
    return f"{TINY}:{factory}"


@pytest.fixture(autouse=True)
def one_thread():
    """Small models are fastest on one thread, and results depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Watcher:
    """A monitor that remembers; ``at`` calls a function when so many samples are done."""

    def __init__(self, at: int | None = None, call=None):
        self.total = self.done = 0
        self.lines, self.stages, self.points = [], [], {}
        self._at, self._call = at, call

    def begin(self, total, done, points):
        self.total, self.done, self.points = total, done, points

    def advance(self, samples, what):
        before, self.done = self.done, self.done + samples
        if what and what not in self.stages:
            self.stages.append(what)
        if self._at is not None and before < self._at <= self.done:
            self._call()

    def say(self, line):
        self.lines.append(line)


def study(folder, factory="make_task", *, budget=120.0, monitor=None, stop=None, **settings):
    """A study of a factory in ``tiny_task.py``; two minutes of it take about a second."""
    chosen = Settings(task=tiny(factory), budget_seconds=budget, device="cpu", **settings)
    return advise(chosen, folder, monitor=monitor or Watcher(), stop=stop or Stop())


def timeless(folder):
    """A record without times: header and events."""
    run = read_run(folder)
    # As text, because a NaN is not equal to itself.
    return dumps(strip_times(run.header)), [dumps(strip_times(event)) for event in run.events]


def make_engine():
    """The tiny task, ready to be trained."""
    task = load_task(tiny())
    return Engine(task, seed=0, dtype="float32", ranks=Ranks(Stop()))
