"""Trials side by side: equal results and equal files, whatever finishes first."""

import random
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from steadygrad.studies import work
from steadygrad.studies.advise import trials
from steadygrad.studies.distributed import BUDGET, Deadline, DistributedContext, StudyInterrupted
from steadygrad.studies.executors import Workers
from steadygrad.studies.folder import Results
from steadygrad.studies.trainer import Diverged
from steadygrad.studies.work import Coordinator, Workplace
from tests.refusals import refused
from tests.unit.studies.framework import Watcher, timeless
from tests.unit.studies.results import changed, make_header, make_training, trial


def toy(plan, place, arm, samples, step, seed, loss=None):
    """A training whose loss is the number of its arm, or as it is given."""
    place.advance(samples)
    return make_training(float(arm if loss is None else loss), arm=arm, samples=samples)


class Setting:
    """A study in a folder, and its executor, which finishes a random trial at most waits.

    ``trials_of`` is the study's, of its results. ``faults`` are what befalls the trials of an arm.
    """

    def __init__(self, trials_of, folder, *, workers=3, seed=0, known=(), idle=0.0):
        (folder / "results").mkdir(exist_ok=True, parents=True)
        self.folder, self.trials_of, self.results = folder, trials_of, Results(known)
        self.workers, self.random, self.faults = workers, random.Random(seed), {}
        # Share of the waits at which nothing ends, and numbers of results as trials were asked for.
        self.idle, self.asked = idle, []
        self.waiting, self.ran = [], []
        self.most = self.made = self.ended = 0
        self.monitor, self.deadline = Watcher(), Deadline()

    def make(self):
        self.made += 1
        return self

    def ask(self, header, results):
        self.asked.append(len(results))
        return self.trials_of(results)

    def submit(self, function, folder, trial, files):
        future = Future()
        self.waiting.append((future, trial))
        self.most = max(self.most, len(self.waiting))
        return future

    def wait(self, running, timeout=None, return_when=None):
        if self.waiting and self.random.random() >= self.idle:
            future, trial = self.waiting.pop(self.random.randrange(len(self.waiting)))
            number = trial.key[1]
            self.ran.append(number)
            if faults := self.faults.get(number):
                faults.pop(0)(self, future)
            else:
                future.set_result(work.work_on(trial, self.place))
        return {f for f in running if f.done()}, {f for f in running if not f.done()}

    def end(self, executor):
        self.ended += 1
        self.waiting.clear()

    def run(self, monkeypatch, parallel=True):
        if parallel:
            monkeypatch.setattr(work, "wait", self.wait)
        monkeypatch.setattr("os.fsync", lambda handle: None)
        trainer = SimpleNamespace(context=DistributedContext(self.deadline))
        trainer.by_halves = lambda attempt: attempt()
        self.place = Workplace(trainer, lambda samples: None, make_header())
        pool = Workers(self.make, lambda: self.workers, end=self.end) if parallel else None
        monkeypatch.setitem(trials.TRIALS, "training", toy)
        monkeypatch.setattr(trials, "trials_of", self.ask)
        Coordinator(self.results, self.folder, self.place, pool, self.monitor).run()
        # Times apart: a worker's own are not measured here.
        return [msgspec.structs.replace(result, time={}) for result in self.results]


def broken(setting, future):
    """A process died: all that run are lost, as with a process pool."""
    for each in [future, *(waiting for waiting, _ in setting.waiting)]:
        each.set_exception(BrokenProcessPool("a process\ndied"))
    setting.waiting.clear()


def failing(error):
    return lambda setting, future: future.set_exception(error)


NEEDS = {1: {0}, 2: {1}, 3: {0}, 4: {1}, 5: {2}, 7: {*range(7)}}
ALL = [make_training(float(n), arm=n, samples=10) for n in (*range(7), 21)]
ALL[7] = changed(ALL[7], arm=7)
KNOWN = [changed(result, time={"cost": 10}) for result in ALL]


def graph(results):
    """Some are wanted once others are there, and the last one depends on what they gave.

    Each is named twice, as two questions may want the same training.
    """
    done = {result.arm: result.loss for result in results}
    known = [trial(n) for n in range(7) if NEEDS.get(n, set()) <= {*done}] * 2
    if NEEDS[7] <= {*done}:
        known.append(replace(trial(7), given={"loss": sum(done[n] for n in range(7))}))
    return known


def several(count):
    return lambda results: [trial(number) for number in range(count)]


def test_many_orders_give_equal_results_and_equal_files(tmp_path, monkeypatch):
    orders, files = set(), []
    for seed in range(10):
        setting = Setting(graph, tmp_path / str(seed), seed=seed, idle=0.3)
        assert setting.run(monkeypatch) == ALL
        assert sorted(setting.ran) == list(range(8))
        assert setting.most <= 3
        assert (setting.monitor.done, setting.ended) == (80, 1)
        # Once to begin with, and after each result.
        assert setting.asked == list(range(9))
        assert [path.name for path in setting.folder.iterdir()] == ["results"]
        orders.add(tuple(setting.ran))
        files.append(timeless(setting.folder))
    serial = Setting(graph, tmp_path / "serial")
    assert serial.run(monkeypatch, parallel=False) == ALL
    assert all(found == timeless(serial.folder) for found in files)
    # Else the lines above say nothing.
    assert len(orders) > 3
    for parallel in (True, False):
        again = Setting(graph, tmp_path / "serial", known=KNOWN)
        assert again.run(monkeypatch, parallel) == ALL
        assert (again.ran, again.asked, again.monitor.before) == ([], [8], 80)


def test_the_most_useful_begins_first_and_none_that_is_no_longer_wanted(tmp_path, monkeypatch):
    """As the results say at that moment."""

    def trials_of(results):
        return [trial(number) for number in ((3, 1) if len(results) else (2, 0, 1))]

    setting = Setting(trials_of, tmp_path, workers=1)
    setting.run(monkeypatch)
    assert setting.ran == [2, 3, 1]


@pytest.mark.parametrize("way", ["parallel", "serial"])
def test_what_finished_before_an_interruption_is_kept(tmp_path, monkeypatch, way):
    first = Setting(graph, tmp_path)
    first.monitor = Watcher(30, lambda: first.deadline.limit(-1e9))
    with pytest.raises(StudyInterrupted) as stopped:
        first.run(monkeypatch)
    assert stopped.value.reason == BUDGET
    done = set(first.ran)
    assert [result.arm for result in first.results] == sorted(done)
    second = Setting(graph, tmp_path, seed=1, known=first.results)
    assert second.run(monkeypatch, way == "parallel") == ALL
    assert set(second.ran) == (set(range(8)) - done if way == "parallel" else set())
    assert (second.monitor.before, second.monitor.done) == (10 * len(done), 80)
    assert len(timeless(second.folder)) == 8
    assert not (tmp_path / "stop").exists()


# Workers that die


def cancelled(setting, future):
    future.cancel()


@pytest.mark.parametrize("fault", [broken, cancelled, failing(OSError("connection\nlost"))])
def test_lost_workers_are_made_once_more(tmp_path, monkeypatch, fault):
    setting = Setting(graph, tmp_path / "once")
    setting.faults = {3: [fault]}
    assert setting.run(monkeypatch) == ALL
    assert (setting.made, len(setting.monitor.lines)) == (2, 1)
    assert setting.monitor.done == 80
    setting = Setting(graph, tmp_path / "twice")
    setting.faults = {3: [fault], 5: [fault]}
    with refused("--workers") as found:
        setting.run(monkeypatch)
    assert isinstance(found.value.__cause__, (CancelledError, OSError, BrokenProcessPool))
    assert "\n" not in setting.monitor.lines[0]
    assert len(timeless(setting.folder)) == len(list(setting.results)) >= 3
    assert (setting.made, setting.ended) == (2, 2)


def test_a_trial_that_fails_ends_the_study_and_keeps_the_rest(tmp_path, monkeypatch):
    setting = Setting(graph, tmp_path)
    setting.faults = {4: [failing(Diverged("it broke"))]}
    with pytest.raises(Diverged, match=r"^trial 4: it broke$"):
        setting.run(monkeypatch)
    kept = {result.arm for result in setting.results}
    assert kept == {*setting.ran} - {4}
    assert len(timeless(setting.folder)) == len(kept)
    assert setting.ended == 1


def test_a_trial_that_was_told_to_stop_is_not_kept(tmp_path, monkeypatch):
    setting = Setting(graph, tmp_path)
    setting.faults = {1: [failing(StudyInterrupted(BUDGET))]}
    assert setting.run(monkeypatch) == ALL
    assert setting.ran.count(1) == 2


@pytest.mark.parametrize("workers", [2, 3])
def test_running_trials_see_the_stop_file_and_are_waited_for(tmp_path, monkeypatch, workers):
    """What they end with is kept; what they fail with then is not said."""
    setting, seen = Setting(several(6), tmp_path, workers=workers), []
    wait = setting.wait

    def look(running, timeout=None, return_when=None):
        seen.append((tmp_path / "stop").exists())
        return wait(running)

    setting.wait = look
    setting.monitor = Watcher(20, lambda: setting.deadline.limit(-1e9))
    with pytest.raises(StudyInterrupted):
        setting.run(monkeypatch)
    assert seen == [False, False, True]
    assert len(timeless(setting.folder)) == 3
    # For those that have not ended, as they looked at something else.
    assert (tmp_path / "stop").exists() == (workers == 3)


def test_a_cluster_that_grows_runs_more_at_a_time(tmp_path, monkeypatch):
    """Nodes of a cluster may join after the study has begun."""
    setting = Setting(several(12), tmp_path, workers=1)
    setting.monitor = Watcher(10, lambda: setattr(setting, "workers", 4))
    assert len(setting.run(monkeypatch)) == 12
    assert setting.most == 4
