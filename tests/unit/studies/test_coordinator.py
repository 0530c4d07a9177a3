"""Trials side by side: the record is in one order, whatever finishes first."""

import random
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures.process import BrokenProcessPool

import pytest
from steadygrad.studies.coordinator import Coordinator, run_serial

from steadygrad._checks import InputError
from steadygrad.studies import coordinator
from steadygrad.studies.advise.schema import Point
from steadygrad.studies.deadline import BUDGET, Deadline, StudyInterrupted
from steadygrad.studies.executors import Pool, WorkersLost
from steadygrad.studies.strict_json import dumps, loads
from steadygrad.studies.study import Study
from steadygrad.studies.trainer import Diverged
from steadygrad.studies.trials import Trial
from tests.unit.studies.framework import Watcher


def event(number, loss):
    return Point(point=number, samples=1, steps=1, valid_loss=loss, curve=(), training=())


def job(number, loss=None):
    loss = float(number) if loss is None else loss
    return {"kind": "point", "point": number, "loss": loss}


def trial(number, *needs, cost=10):
    keys = tuple(("point", need) for need in needs)
    return Trial(("point", number), cost, lambda journal: job(number), f"trial {number}", keys)


class Toy(Study):
    """Trials are given; a job's result is the number in it."""

    name = "advise"

    def __init__(self, trials):
        self.all = trials

    @classmethod
    def make_plan(cls, settings, trainer, *, speed, workers):
        raise NotImplementedError

    def trials(self):
        return self.all

    def run(self, job, place):
        return event(job["point"], job["loss"])

    def milestones(self):
        return {}

    def summarize(self, journal, status):
        return {}


class Recorder:
    """A writer that keeps keys, in the order in which they are written."""

    def __init__(self):
        self.keys, self.events = [], []

    def append(self, event):
        self.keys.append(event.key)
        self.events.append(event)


class Shuffled(Executor):
    """Finishes one job at every wait, chosen at random."""

    def __init__(self, seed=0):
        self.random, self.waiting, self.ran = random.Random(seed), [], []
        self.most = 0
        self.faults = {}

    def submit(self, function, folder, text):
        future = Future()
        self.waiting.append((future, loads(text)))
        self.most = max(self.most, len(self.waiting))
        return future

    def wait(self, running, timeout=None, return_when=None):
        assert set(running) == {future for future, _ in self.waiting} | {
            future for future in running if future.done()
        }
        if self.waiting:
            future, found = self.waiting.pop(self.random.randrange(len(self.waiting)))
            number = found["point"]
            self.ran.append(number)
            faults = self.faults.get(number, [])
            if faults:
                faults.pop(0)(self, future)
            else:
                result = {"event": event(number, found["loss"]).as_dict(), "repeated": []}
                future.set_result(dumps(result))
        return {f for f in running if f.done()}, {f for f in running if not f.done()}

    def shutdown(self, wait=True, *, cancel_futures=False):
        self.waiting.clear()


def broken(executor, future):
    """A process died: all that run are lost, as with a process pool."""
    for each in [future, *(waiting for waiting, _ in executor.waiting)]:
        each.set_exception(BrokenProcessPool("a process died"))
    executor.waiting.clear()


def failing(kind):
    def fault(executor, future):
        future.set_result(dumps({"kind": kind, "error": f"it {kind}", "traceback": "line 7"}))

    return fault


def journal(folder, writer=None, events=()):
    """The journal of a toy, with the results that wait in a folder."""
    return Journal(writer, events, folder / "pending", Toy.schema().events)


class Setting:
    """A study, its executor and what was recorded."""

    def __init__(self, trials, folder, *, workers=3, seed=0, events=(), monitor=None):
        self.folder, self.study = folder, Toy(trials)
        self.executor, self.writer = Shuffled(seed), Recorder()
        self.made = self.left = 0
        self.workers = workers
        self.journal = journal(folder, self.writer, events)
        self.monitor = monitor or Watcher()
        self.deadline = Deadline()
        self.pool = Pool(
            self.make,
            lambda: self.workers,
            survives=lambda error: isinstance(error, BrokenProcessPool),
            kill=lambda executor: executor.shutdown(),
            leave=self.leave,
        )

    def make(self):
        self.made += 1
        return self.executor

    def leave(self):
        self.left += 1

    def run(self, monkeypatch):
        monkeypatch.setattr(coordinator, "wait", self.executor.wait)
        Coordinator(
            self.study,
            self.journal,
            self.pool,
            self.folder,
            self.deadline,
            self.monitor,
        ).run()
        return self.writer.keys


KEYS = [("point", number) for number in range(8)]


def graph():
    """0 -> 1 -> 2, and what each of them begins; 7 needs all."""
    return [
        trial(0), trial(1, 0), trial(2, 1), trial(3, 0), trial(4, 1), trial(5, 2), trial(6),
        trial(7, 0, 1, 2, 3, 4, 5, 6),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_results_are_recorded_in_the_order_of_the_trials(tmp_path, monkeypatch, seed):
    setting = Setting(graph(), tmp_path, seed=seed)
    assert setting.run(monkeypatch) == KEYS
    assert sorted(setting.executor.ran) == list(range(8))
    assert [e.valid_loss for e in setting.writer.events] == [float(n) for n in range(8)]
    assert setting.executor.most <= 3
    assert setting.monitor.done == 80
    assert list(tmp_path.iterdir()) == []
    assert setting.left == 1


def test_they_finish_in_many_orders(tmp_path, monkeypatch):
    """Else the test above says nothing."""
    orders = set()
    for seed in range(20):
        setting = Setting(graph(), tmp_path, seed=seed)
        setting.run(monkeypatch)
        orders.add(tuple(setting.executor.ran))
    assert len(orders) > 5


def test_needs_come_first(tmp_path, monkeypatch):
    for seed in range(20):
        setting = Setting(graph(), tmp_path, seed=seed, workers=8)
        setting.run(monkeypatch)
        at = setting.executor.ran.index
        assert at(0) < at(1) < at(2) < at(5)
        assert at(0) < at(3)
        assert at(1) < at(4)
        assert at(7) == 7


def adaptive():
    """A study whose trial 2 depends on trials 0 and 1; it may have no job, or an equal one."""

    def choose(journal):
        first = journal.get(Point, 0).valid_loss + journal.get(Point, 1).valid_loss
        return job(20, first + 0.5)

    def nothing(journal):
        return None

    def the_same(journal):
        return job(20, 1.5)

    return [
        trial(0),
        trial(1),
        Trial(("choice", 0), 7, choose, "", (("point", 0), ("point", 1))),
        trial(3),
        Trial(("choice", 1), 7, nothing, "", (("choice", 0),)),
        Trial(("choice", 2), 7, the_same, "", (("point", 0),)),
        trial(6),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_adaptive_trials_are_recorded_where_they_stand(tmp_path, monkeypatch, seed):
    setting = Setting(adaptive(), tmp_path, seed=seed)
    expected = [("point", number) for number in (0, 1, 20, 3, 6)]
    assert setting.run(monkeypatch) == expected
    assert setting.writer.events[2].valid_loss == 1.5
    assert setting.executor.ran.count(20) == 1
    assert setting.monitor.done == 61
    serial = Recorder()
    run_serial(setting.study, Journal(serial), InProcess(), Watcher())
    assert serial.events == setting.writer.events


class InProcess:
    """A worker that runs a toy's job."""

    def run(self, job, advance):
        advance(4, "a part of it")
        return event(job["point"], job["loss"]), []


def interrupted(setting):
    """A watcher that ends the study after so many samples."""
    return Watcher(30, lambda: setting.deadline.limit(-1e9))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("way", ["parallel", "serial"])
def test_results_that_wait_survive_an_interruption(tmp_path, monkeypatch, seed, way):
    first = Setting(graph(), tmp_path, seed=seed)
    first.monitor = interrupted(first)
    with pytest.raises(StudyInterrupted) as stopped:
        first.run(monkeypatch)
    assert stopped.value.reason == BUDGET
    done = set(first.executor.ran)
    waiting = {e.key for e in journal(tmp_path).events()}
    # What ran is recorded or waits, and what is recorded has no gap.
    assert first.writer.keys == KEYS[: len(first.writer.keys)]
    assert {("point", n) for n in done} == set(first.writer.keys) | waiting
    assert (tmp_path / "pending").is_dir() == bool(waiting)
    second = Setting(graph(), tmp_path, seed=seed + 100, events=first.writer.events)
    if way == "parallel":
        second.run(monkeypatch)
        assert set(second.executor.ran) == set(range(8)) - done
    else:
        run_serial(second.study, second.journal, InProcess(), second.monitor)
    assert first.writer.keys + second.writer.keys == KEYS
    assert second.monitor.done == 80 - 10 * len(done)
    assert list(tmp_path.iterdir()) == []


def test_waiting_results_exist_in_these_interruptions(tmp_path, monkeypatch):
    """Else the test above says nothing."""
    found = 0
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        setting = Setting(graph(), folder, seed=seed)
        setting.monitor = interrupted(setting)
        with pytest.raises(StudyInterrupted):
            setting.run(monkeypatch)
        found += len(journal(folder).events())
    assert found > 3


@pytest.mark.parametrize("damage", [b"", b'{"kind": "point"', b"[1]", b'{"kind": "point"}'])
def test_a_damaged_waiting_result_is_run_again(tmp_path, monkeypatch, damage):
    kept = journal(tmp_path)
    kept.keep(event(6, 6.0))
    kept.save(("point", 6))
    (path,) = (tmp_path / "pending").iterdir()
    path.write_bytes(damage or path.read_bytes().replace(b"6.0", b"7.0"))
    setting = Setting(graph(), tmp_path)
    assert setting.run(monkeypatch) == KEYS
    assert 6 in setting.executor.ran


def test_what_was_recorded_is_not_run_again_and_is_done_from_the_beginning(tmp_path, monkeypatch):
    first = Setting(adaptive(), tmp_path)
    first.run(monkeypatch)
    for way in ("parallel", "serial"):
        again = Setting(adaptive(), tmp_path, events=first.writer.events)
        if way == "parallel":
            assert again.run(monkeypatch) == []
        else:
            run_serial(again.study, again.journal, InProcess(), again.monitor)
        assert again.executor.ran == []
        assert again.writer.keys == []
        # Told of nothing: what a record holds, and what it makes needless, tells no speed.
        assert again.monitor.done == 0
        assert again.study.finished(journal(tmp_path, events=first.writer.events)) == {
            each.key for each in adaptive()
        }


# Workers that die


def test_a_dead_workers_trials_are_tried_again(tmp_path, monkeypatch):
    setting = Setting(graph(), tmp_path)
    setting.executor.faults = {3: [broken], 5: [broken]}
    assert setting.run(monkeypatch) == KEYS
    assert setting.made == 3
    assert sum("a worker died: trial 3 is tried again" in s for s in setting.monitor.lines) >= 1
    assert setting.monitor.done == 80


def test_a_result_that_came_before_the_death_is_kept(tmp_path, monkeypatch):
    def after_another(executor, future):
        other, found = executor.waiting.pop()
        other.set_result(dumps({"event": event(found["point"], 0.25).as_dict(), "repeated": []}))
        executor.kept = found["point"]
        broken(executor, future)

    setting = Setting([trial(n) for n in range(8)], tmp_path)
    setting.executor.faults = {0: [after_another]}
    assert setting.run(monkeypatch) == KEYS
    assert setting.writer.events[setting.executor.kept].valid_loss == 0.25
    assert setting.executor.kept not in setting.executor.ran


def test_three_deaths_in_one_trial_are_the_end(tmp_path, monkeypatch):
    setting = Setting(graph(), tmp_path, workers=1)
    setting.executor.faults = {4: [broken] * 3}
    message = "Found 3 that died in trial 4. Remedy: fewer --workers"
    with pytest.raises(WorkersLost, match=message):
        setting.run(monkeypatch)
    assert setting.executor.ran.count(4) == 3
    assert setting.writer.keys == KEYS[:4]
    assert setting.left == 1


def test_a_pool_that_broke_while_nothing_ran(tmp_path, monkeypatch):
    """A worker that is killed between two trials shows when the next one is handed over."""
    setting = Setting(graph(), tmp_path)
    submit, faults = setting.executor.submit, [BrokenProcessPool("idle")]

    def refusing(*arguments):
        if setting.writer.keys and faults:
            raise faults.pop()
        return submit(*arguments)

    setting.executor.submit = refusing
    assert setting.run(monkeypatch) == KEYS
    assert faults == []
    assert setting.made == 2


@pytest.mark.parametrize(
    "fault",
    [lambda e, f: f.cancel(), lambda e, f: f.set_exception(OSError("connection\nlost"))],
    ids=["cancelled", "error"],
)
def test_a_cluster_that_is_lost_is_the_end(tmp_path, monkeypatch, fault):
    setting = Setting(graph(), tmp_path, workers=1)
    setting.executor.faults = {2: [fault]}
    with pytest.raises(WorkersLost, match=r"workers that stay reachable.*--resume") as found:
        setting.run(monkeypatch)
    assert isinstance(found.value.__cause__, (CancelledError, OSError))
    assert "\n" not in str(found.value)
    assert len(setting.writer.keys) >= 2


@pytest.mark.parametrize(("kind", "error"), [("diverged", Diverged), ("input", InputError)])
def test_a_trial_that_fails_ends_the_study_and_keeps_the_rest(tmp_path, monkeypatch, kind, error):
    setting = Setting(graph(), tmp_path)
    setting.executor.faults = {4: [failing(kind)]}
    with pytest.raises(error, match=f"^trial 4: it {kind}$") as found:
        setting.run(monkeypatch)
    # What --debug shows.
    assert "line 7" in str(found.value.__cause__)
    assert KEYS[4] not in setting.writer.keys
    assert setting.writer.keys == KEYS[: len(setting.writer.keys)]
    assert not (tmp_path / "stop").exists()
    assert setting.left == 1


def test_a_trial_that_was_told_to_stop_is_not_recorded(tmp_path, monkeypatch):
    setting = Setting(graph(), tmp_path)
    setting.executor.faults = {1: [failing("interrupted")]}
    assert setting.run(monkeypatch) == KEYS
    assert setting.executor.ran.count(1) == 2


# Trials that were run again


def repeating(number, loss):
    """A result that came with that of an earlier trial, whose checkpoint was lost."""

    def fault(executor, future):
        repeated = [event(number, loss).as_dict()]
        future.set_result(dumps({"event": event(6, 6.0).as_dict(), "repeated": repeated}))

    return fault


@pytest.mark.parametrize(("loss", "differing"), [(1.0, 0), (1.5, 1)])
def test_a_repeated_trial_is_compared_and_not_recorded_out_of_turn(
    tmp_path, monkeypatch, loss, differing
):
    """1 waits for 0 when 6 repeats it."""
    order = iter([1, 6, 0, 2, 3, 4, 5, 7])

    class Chosen(random.Random):
        def randrange(self, count):
            wanted = next(order)
            numbers = [found["point"] for _, found in setting.executor.waiting]
            return numbers.index(wanted)

    setting = Setting([trial(n) for n in range(8)], tmp_path, workers=8)
    setting.executor.random = Chosen()
    setting.executor.faults = {6: [repeating(1, loss)]}
    assert setting.run(monkeypatch) == KEYS
    assert setting.writer.events[1].valid_loss == 1.0
    assert setting.journal.differing == differing


def test_a_pool_that_grows_runs_more_at_a_time(tmp_path, monkeypatch):
    """Nodes of a cluster may join after the study has begun."""
    setting = Setting([trial(n) for n in range(12)], tmp_path, workers=1)
    advance = setting.monitor.advance

    def join(*arguments):
        setting.workers = 4
        advance(*arguments)

    setting.monitor.advance = join
    assert setting.run(monkeypatch) == [("point", n) for n in range(12)]
    assert setting.executor.most == 4
