"""Trials side by side: equal results and equal files, whatever finishes first."""

import random
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import msgspec
import pytest

from steadygrad.studies import work
from steadygrad.studies.advise.schema import Point
from steadygrad.studies.advise.trials import TRIALS
from steadygrad.studies.deadline import BUDGET, Deadline, StudyInterrupted
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.executors import Workers
from steadygrad.studies.folder import Results
from steadygrad.studies.trainer import Diverged
from steadygrad.studies.trials import Trial
from steadygrad.studies.work import Coordinator, Workplace, finished
from tests.refusals import refused
from tests.unit.studies.advise import events
from tests.unit.studies.framework import Watcher, timeless
from tests.unit.studies.results import job, make_header, trial


def point(number, loss=None):
    return events.point(number, 8, losses=lambda _: float(number if loss is None else loss))


def toy(plan, place, **job):
    """A trial whose result is the number in its job."""
    place.advance(4, "a part of it")
    return point(job["point"], job["loss"])


class Setting:
    """A study in a folder, and its executor, which finishes a random job at every wait.

    ``faults`` are what befalls the jobs of a number.
    """

    def __init__(self, trials, folder, *, workers=3, seed=0, known=()):
        (folder / "results").mkdir(exist_ok=True, parents=True)
        self.folder, self.trials, self.results = folder, trials, Results(known)
        self.workers, self.random, self.faults = workers, random.Random(seed), {}
        self.waiting, self.ran = [], []
        self.most = self.made = self.ended = 0
        self.monitor, self.deadline = Watcher(), Deadline()

    def make(self):
        self.made += 1
        return self

    def submit(self, function, folder, found, files):
        future = Future()
        self.waiting.append((future, found))
        self.most = max(self.most, len(self.waiting))
        return future

    def wait(self, running, timeout=None, return_when=None):
        if self.waiting:
            future, found = self.waiting.pop(self.random.randrange(len(self.waiting)))
            number = found["point"]
            self.ran.append(number)
            if faults := self.faults.get(number):
                faults.pop(0)(self, future)
            else:
                future.set_result(point(number, found["loss"]))
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
        place = Workplace(trainer, None, None, make_header())
        pool = Workers(self.make, lambda: self.workers, end=self.end) if parallel else None
        monkeypatch.setitem(TRIALS, "point", toy)
        monkeypatch.setattr(work, "trials_of", lambda header, results: self.trials)
        Coordinator(self.results, self.folder, place, pool, self.monitor).run()
        # Times apart: a worker's own are not measured here.
        return [msgspec.structs.replace(result, time={}) for result in self.results]


def broken(setting, future):
    """A process died: all that run are lost, as with a process pool."""
    for each in [future, *(waiting for waiting, _ in setting.waiting)]:
        each.set_exception(BrokenProcessPool("a process\ndied"))
    setting.waiting.clear()


def failing(error):
    return lambda setting, future: future.set_exception(error)


ALL = [point(number) for number in range(8)]


def graph():
    """0 -> 1 -> 2, and what each of them begins; 7 needs all."""
    return [
        trial(0), trial(1, 0), trial(2, 1), trial(3, 0), trial(4, 1), trial(5, 2), trial(6),
        trial(7, 0, 1, 2, 3, 4, 5, 6),
    ]  # fmt: skip


def test_many_orders_give_equal_results_and_equal_files(tmp_path, monkeypatch):
    orders, files = set(), []
    for seed in range(10):
        setting = Setting(graph(), tmp_path / str(seed), seed=seed)
        assert setting.run(monkeypatch) == ALL
        assert sorted(setting.ran) == list(range(8))
        assert setting.most <= 3
        assert (setting.monitor.done, setting.ended) == (80, 1)
        assert [path.name for path in setting.folder.iterdir()] == ["results"]
        at = setting.ran.index
        assert all(at(need) < at(each.key[1]) for each in graph() for _, need in each.needs)
        orders.add(tuple(setting.ran))
        files.append(timeless(setting.folder))
    serial = Setting(graph(), tmp_path / "serial")
    assert serial.run(monkeypatch, parallel=False) == ALL
    assert all(found == timeless(serial.folder) for found in files)
    # Else the lines above say nothing.
    assert len(orders) > 3


def test_the_longest_chain_begins_first(tmp_path, monkeypatch):
    """As the plan reckons: a budget is kept only so."""
    trials = [trial(0), trial(1, cost=5), trial(2, 1, cost=20), trial(3, cost=15)]
    setting = Setting(trials, tmp_path, workers=1)
    setting.run(monkeypatch)
    assert setting.ran == [1, 2, 3, 0]


def adaptive():
    """A study whose trial 2 depends on trials 0 and 1; it may have no job, or an equal one."""

    def choose(results):
        first = results.get(Point, 0).valid_loss + results.get(Point, 1).valid_loss
        return job(20, first + 0.5)

    return [
        trial(0),
        trial(1),
        Trial(("choice", 0), 7, choose, "", (("point", 0), ("point", 1))),
        trial(3),
        Trial(("choice", 1), 7, lambda results: None, "", (("choice", 0),)),
        Trial(("choice", 2), 7, lambda results: job(20, 1.5), "", (("point", 0),)),
        trial(6),
    ]


def test_adaptive_trials(tmp_path, monkeypatch):
    setting = Setting(adaptive(), tmp_path / "a")
    expected = [point(0), point(1), point(3), point(6), point(20, 1.5)]
    assert setting.run(monkeypatch) == expected
    assert setting.ran.count(20) == 1
    assert setting.monitor.done == 61
    serial = Setting(adaptive(), tmp_path / "b")
    assert serial.run(monkeypatch, parallel=False) == expected
    assert timeless(serial.folder) == timeless(setting.folder)
    for pool in (True, False):
        again = Setting(adaptive(), tmp_path / "a", known=expected)
        assert again.run(monkeypatch, pool) == expected
        assert again.ran == []
        # What a run holds, and what it makes needless, tells no speed.
        assert again.monitor.before == again.monitor.done == 61
        assert finished("advise", again.trials, again.results) == {each.key for each in adaptive()}


@pytest.mark.parametrize("way", ["parallel", "serial"])
def test_what_finished_before_an_interruption_is_kept(tmp_path, monkeypatch, way):
    first = Setting(graph(), tmp_path)
    first.monitor = Watcher(30, lambda: first.deadline.limit(-1e9))
    with pytest.raises(StudyInterrupted) as stopped:
        first.run(monkeypatch)
    assert stopped.value.reason == BUDGET
    done = set(first.ran)
    assert [result.point for result in first.results] == sorted(done)
    second = Setting(graph(), tmp_path, seed=1, known=first.results)
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
    setting = Setting(graph(), tmp_path / "once")
    setting.faults = {3: [fault]}
    assert setting.run(monkeypatch) == ALL
    assert (setting.made, len(setting.monitor.lines)) == (2, 1)
    assert setting.monitor.done == 80
    setting = Setting(graph(), tmp_path / "twice")
    setting.faults = {3: [fault], 5: [fault]}
    with refused("--workers") as found:
        setting.run(monkeypatch)
    assert isinstance(found.value.__cause__, (CancelledError, OSError, BrokenProcessPool))
    assert "\n" not in setting.monitor.lines[0]
    assert len(timeless(setting.folder)) == len(list(setting.results)) >= 3
    assert (setting.made, setting.ended) == (2, 2)


def test_a_trial_that_fails_ends_the_study_and_keeps_the_rest(tmp_path, monkeypatch):
    setting = Setting(graph(), tmp_path)
    setting.faults = {4: [failing(Diverged("it broke"))]}
    with pytest.raises(Diverged, match=r"^trial 4: it broke$"):
        setting.run(monkeypatch)
    kept = {result.point for result in setting.results}
    assert kept == {*setting.ran} - {4}
    assert len(timeless(setting.folder)) == len(kept)
    assert setting.ended == 1


def test_a_trial_that_was_told_to_stop_is_not_kept(tmp_path, monkeypatch):
    setting = Setting(graph(), tmp_path)
    setting.faults = {1: [failing(StudyInterrupted(BUDGET))]}
    assert setting.run(monkeypatch) == ALL
    assert setting.ran.count(1) == 2


@pytest.mark.parametrize("workers", [2, 3])
def test_running_trials_see_the_stop_file_and_are_waited_for(tmp_path, monkeypatch, workers):
    """What they end with is kept; what they fail with then is not said."""
    setting, seen = Setting([trial(n) for n in range(6)], tmp_path, workers=workers), []
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
    setting = Setting([trial(n) for n in range(12)], tmp_path, workers=1)
    setting.monitor = Watcher(10, lambda: setattr(setting, "workers", 4))
    assert len(setting.run(monkeypatch)) == 12
    assert setting.most == 4
