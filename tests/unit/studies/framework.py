"""Small runs of ``advise``, and what their tests share.

The plan is made by hand: it has every kind of trial, and trains some hundreds of steps in all.
"""

import os
import random
import re
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from steadygrad.studies.advise.schema import Settings
from steadygrad.studies.distributed import Deadline, DistributedContext
from steadygrad.studies.folder import dumps, read_run
from steadygrad.studies.run import resume, start
from steadygrad.studies.trainer import Trainer
from tests.unit.studies import tiny_task
from tests.unit.studies.results import PLAN

TINY = Path(tiny_task.__file__)
ROOT = Path(__file__).parents[3]
# A complete run, before its page is drawn.
FILES = ["header.json", "results", "summary.json"]


def tiny(factory="make_task"):
    """How the command line names a factory in ``tiny_task.py``."""
    return f"{TINY}:{factory}"


class Watcher:
    """A monitor that remembers; ``at`` calls a function when so many samples are done."""

    def __init__(self, at=None, call=None):
        self.total = self.done = self.before = 0
        self.lines, self.stages = [], []
        self._at, self._call = at, call

    def begin(self, total, done):
        self.total, self.done, self.before = total, done, done
        if self._at == 0:
            self._call()

    def advance(self, samples, what):
        before, self.done = self.done, self.done + samples
        if what and what not in self.stages:
            self.stages.append(what)
        if self._at and before < self._at <= self.done:
            self._call()

    def say(self, line):
        self.lines.append(line)


def make_trainer(task=None, *, seed=0, dtype="float32", micro_batch_size=None, **options):
    """A trainer of the tiny task."""
    context = DistributedContext(Deadline())
    task = tiny_task.make_task() if task is None else task
    trainer = Trainer(task, seed=seed, dtype=dtype, context=context, **options)
    trainer.micro_batch_size = micro_batch_size or trainer.micro_batch_size
    return trainer


def weights(trainer):
    """A copy of a model's parameters."""
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def worst(one, two):
    """The largest difference of two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True))


@contextmanager
def speed_in_a_moment():
    """Studies begin by measuring the speed of their task, which decides little in tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steadygrad.studies.calibration.SECONDS", 0.01)
        patch.setattr("steadygrad.studies.calibration.WARM_UP_STEPS", 1)
        yield


@contextmanager
def planned(plan, study="advise"):
    """Makes every plan of a study this one."""
    with pytest.MonkeyPatch.context() as patch, speed_in_a_moment():
        patch.setattr(f"steadygrad.studies.{study}.trials.plan_for", lambda *a, **k: plan)
        yield


def begin(
    folder, factory="make_task", *, at=0, plan=PLAN, study="advise", kind=Settings, **settings
):
    """A run with the hand-made plan, stopped after ``at`` samples of work."""
    chosen = {"device": "cpu", "threads": 1, "workers": 1, "budget": 1e6, **settings}
    deadline = Deadline()
    watcher = Watcher(at, lambda: deadline.limit(-1e9))
    with planned(plan, study):
        settings = kind(task=tiny(factory), **chosen)
        outcome = start(study, settings, folder, deadline=deadline, monitor=watcher)
    return checked(outcome), watcher


def go_on(folder, **given):
    """Resumes a run to its end."""
    return part(folder, None, **given)


def part(folder, at, **given):
    """Resumes a run, and stops it after ``at`` samples of work."""
    deadline = Deadline()
    watcher = Watcher(at, lambda: deadline.limit(-1e9))
    return checked(resume(folder, given, deadline=deadline, monitor=watcher)), watcher


def checked(outcome):
    """An outcome, unless it is to be raised."""
    if outcome.failure:
        raise outcome.failure
    return outcome


def copy(folder, to):
    """A copy of a run's folder."""
    return Path(shutil.copytree(folder, to))


def lines(folder):
    """A run's results in order, without times, as text, because a NaN is not equal to itself."""
    return [repr(msgspec.structs.replace(result, time={})) for result in read_run(folder).results]


def summary(folder):
    """The summary, as text."""
    return dumps(read_run(folder).summary)


def generators():
    """States of all generators of random numbers."""
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def environment():
    """Environment in which a process can import the tests and the library, on one thread."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def left(folder):
    """Names of what lies in a run's folder."""
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    """What a run holds: the bytes of its header and results."""
    files = [folder / "header.json", *(folder / "results").iterdir()]
    return {path.name: path.read_bytes() for path in files}


def timeless(folder):
    """The bytes of a run's results, but for their times and the run that they are of."""
    files, own = folder.glob("results/*.json"), rb'"time": {.*?}|"run": "\w*"'
    return {path.name: re.sub(own, b"", path.read_bytes()) for path in files}


def wait_for(condition, seconds=120.0):
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def recorded(folder):
    """Number of results that are there."""
    return len(list((folder / "results").glob("*.json")))


def alive(pid):
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
