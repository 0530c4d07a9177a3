"""Real studies of a tiny task: what is recorded, paired, resumed and refused."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch

from steadygrad.studies.compare.plan import TURNS
from steadygrad.studies.compare.schema import Run
from steadygrad.studies.compare.trials import NO_RATE, _state_bytes, speed
from steadygrad.studies.folder import read_run
from steadygrad.studies.run import StudyFailed
from tests.unit.studies import tiny_task
from tests.unit.studies.compare.runs import ADDED, PLAN, Places, begin, planned


def test_tensors_of_a_state_count_at_any_depth_and_once():
    shared, params = torch.zeros(10), [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    optimizer.state[params[0]] = {"shared": shared, "steps": 3}
    optimizer.state[params[1]] = {0: {"shared": shared, "own": torch.zeros(3).double()}}
    assert _state_bytes(optimizer) == 4 * 10 + 8 * 3


def test_a_learning_rate_between_two_of_the_ladder_is_read_back():
    fields = {"optimizer": "lans", "multiple": 1, "samples": 64, "repeat": 1}
    run = Run(**fields, step=-0.5, lr=0.1, loss=1.0, curve=())
    assert msgspec.json.decode(msgspec.json.encode(run), type=Run) == run


@pytest.mark.slow
def test_the_tasks_optimizer_and_two_of_the_users_own(tmp_path):
    names = ("adamw", "sgd", "muon", "task", "adamax", "grouped")
    plan = planned(optimizers=names, multiples=(1, 4), seeds=2)
    added = {"optimizers": "sgd,muon,task", "add": f"{ADDED}:adamax,{ADDED}:grouped"}
    # In float16 a loss scale steps all of them, also Muon with AdamW.
    options = {"plan": plan, "dtype": "float16", **added}
    outcome, watcher = begin(tmp_path / "run", at=None, **options)
    found = outcome.summary.to_dict()
    assert (found["status"], watcher.done, found["diverged"]) == ("complete", watcher.total, 0)
    assert list(found["optimizers"].values())[-3:] == ["AdamW of the task", "adamax", "grouped"]
    assert len(found["verdicts"]) == 5 * 2 * 2
    assert all(len(row["losses"]) == 2 for row in found["verdicts"])
    # Adam's two moments in float32, beside a count for each tensor; SGD's momentum alone.
    held = {name: cost["state_bytes"] for name, cost in found["costs"].items()}
    assert held["adamw"] == pytest.approx(8, rel=0.05)
    assert held["sgd"] == pytest.approx(4)
    assert 4 < held["muon"] < 8
    # AdamW of the task has the same default rate and decay: the same trainings, to the bit.
    own = {(r.optimizer, *r.key[2:]): r.loss for r in read_run(tmp_path / "run").select(Run)}
    pairs = [(own.get(("adamw", *k[1:])), loss) for k, loss in own.items() if k[0] == "task"]
    both = [(one, other) for one, other in pairs if one is not None]
    assert len(both) > 20
    assert all(one == other for one, other in both)


def test_pairs_share_weights_data_and_random_numbers(monkeypatch):
    """At a learning rate of zero all optimizers see the same losses, dropout included."""
    # One of them draws random numbers of its own when it is made.
    places = Places(optimizers="lans,sgd,muon,task", add=f"{ADDED}:drawing")
    monkeypatch.setattr("steadygrad.tasks.Task.lr_factor", lambda self, samples_seen, total: 0.0)
    seen = {}
    step = places.trainer.step

    def watched(indices, ready=None):
        step(indices, ready)
        losses.append((indices.tolist(), float(places.trainer._losses[-1])))

    monkeypatch.setattr(places.trainer, "step", watched)
    for optimizer in ("adamw", "lans", "sgd", "muon", "task", "drawing"):
        for repeat in (0, 1, 2):
            losses = []
            run = places.train(optimizer, repeat=repeat)
            assert len(losses) == 32
            seen.setdefault(repeat, []).append((run.loss, losses))
    for found in seen.values():
        assert all(each == found[0] for each in found)
    # Seeds differ in weights and in data.
    assert len({found[0][0] for found in seen.values()}) == 3
    assert len({str(found[0][1][0][0]) for found in seen.values()}) == 3


def test_a_training_has_the_batch_size_and_the_schedule_that_it_is_named_by():
    places, seen = Places(optimizers="lans"), []
    trainer, step = places.trainer, places.trainer.step

    def watched(indices, ready=None):
        step(indices, ready)
        seen.append((len(indices), trainer.optimizer.param_groups[0]["lr"]))

    trainer.step = watched
    places.train("lans", step=1.5, multiple=4, samples=640)
    assert [size for size, _ in seen] == [16] * 40
    # Linear from nothing over the first tenth, and to nothing over the rest.
    top = 1e-3 * 2**1.5
    for number, (_, lr) in enumerate(seen):
        # As in the middle of each step.
        begun, left = (number + 0.5) / 4, (39.5 - number) / 36
        assert lr == pytest.approx(top * min(begun, left, 1.0))


def test_a_training_is_the_same_whatever_ran_before():
    places = Places(optimizers="muon,sgd")
    first = places.train("muon", repeat=2)
    places.train("sgd", step=10, samples=64)
    speed(PLAN, places.place)
    places.train("adamw", multiple=4)
    assert places.train("muon", repeat=2) == first
    assert Places(optimizers="muon").train("muon", repeat=2) == first
    # It leaves the task as it was.
    assert places.trainer.task.lr == 0.001


def test_a_training_that_diverges_is_infinitely_bad():
    places = Places(optimizers="sgd")
    run = places.train("sgd", step=40)
    assert (run.loss, run.curve) == (math.inf, ((128, math.inf),))
    assert math.isfinite(places.train("sgd").loss)
    # An evaluation that is not finite, after training losses that are to the end.
    task = replace(tiny_task.make_task(), evaluate=lambda model, samples: math.nan)
    assert Places(task, optimizers="sgd").train("sgd").loss == math.inf


def test_a_training_is_evaluated_on_the_way_and_all_counts_as_work():
    places = Places(optimizers="lans")
    run = places.train("lans")
    # Four evaluations of 64 samples, a third each.
    assert sum(places.told) == 128 + 4 * 22
    assert [seen for seen, _ in run.curve] == [32, 64, 96, 128]
    assert run.curve[-1] == (run.samples, run.loss)
    # Those of the search at the end alone.
    assert len(places.train("lans", repeat=0).curve) == 1


def test_the_time_of_a_step_leaves_the_weights(monkeypatch):
    places = Places(optimizers="muon,sgd")
    before = [p.clone() for p in places.trainer.model.parameters()]
    step, rates = torch.optim.SGD.step, []

    def watched(self, closure=None):
        rates.append([group["lr"] for group in self.param_groups])
        return step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    backward, passes = places.trainer.backward, []
    monkeypatch.setattr(places.trainer, "backward", lambda *a: passes.append(backward(*a)))
    found = speed(PLAN, places.place)
    # A backward pass before each step, as in training.
    assert len(passes) == 3 * TURNS
    # All steps see the same weights.
    assert rates == [[NO_RATE]] * TURNS
    assert set(found.time) == set(found.state_bytes) == {"adamw", "muon", "sgd"}
    assert all(seconds > 0 for seconds in found.time.values())
    for own, other in zip(before, places.trainer.model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_task_that_breaks_later_keeps_what_is_measured(tmp_path, monkeypatch):
    # So that it breaks in the search.
    monkeypatch.setattr("steadygrad.studies.compare.trials.TURNS", 3)
    with pytest.raises(StudyFailed, match=r"Task\.per_sample_loss"):
        begin(tmp_path / "run", "loss_raises_later", at=None, optimizers="lans,sgd")
    assert read_run(tmp_path / "run").summary["status"] == "failed"
