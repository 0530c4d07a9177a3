"""Whole studies with the program's own planner, over tasks whose answers are known."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.studies.advise import analysis
from steadygrad.studies.advise import plan as planning
from steadygrad.studies.advise.schema import Settings
from steadygrad.studies.deadline import Deadline
from steadygrad.studies.folder import read_run
from steadygrad.studies.run import start
from steadygrad.studies.schema import Training
from steadygrad.tasks import Task, TensorSamples
from tests.unit.studies.framework import Watcher, checked, speed_in_a_moment


def make_model() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.normal_(model.weight, std=0.01)
    return model


def task_of(rule: str, lr: float = 0.005) -> Task:
    """A weight that is to become one; all samples say so."""
    return Task(
        name="one",
        sample="number",
        make_model=make_model,
        train=TensorSamples(torch.ones(1024, 1)),
        valid=TensorSamples(torch.ones(1, 1)),
        per_sample_loss=lambda model, x: (model.weight.ravel() - x.ravel()).square(),
        make_optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=lr,
        batch_size=4,
        lr_rule=rule,
    )


def noisy_task(**fields) -> Task:
    """Weights that are to become one by samples that say so on average, and a smaller model."""
    generator = torch.Generator().manual_seed(0)
    train = 1 + 3 * torch.randn(1024, 8, generator=generator)
    known = {"train": TensorSamples(train), "valid": TensorSamples(torch.ones(1, 8))}
    known["per_sample_loss"] = lambda model, x: (
        (x[:, : model.weight.numel()] - model.weight).square().mean(1)
    )
    known["make_model"], known["proxy"] = (
        (lambda: nn.Linear(8, 1, bias=False)),
        (lambda: nn.Linear(4, 1, bias=False)),
    )
    return replace(task_of("linear", 0.02), batch_size=2, samples_per_second=400, **known, **fields)


def advice(task, folder, **settings):
    """The summary of a study that has time enough for all its seeds."""
    known = {"task": "a Task object", "device": "cpu", "threads": 1, "workers": 1, "budget": 1e5}
    with speed_in_a_moment():
        chosen = Settings(**{**known, "samples": 256, "seeds": 5, **settings})
        outcome = start("advise", chosen, folder, task=task, deadline=Deadline(), monitor=Watcher())
    return checked(outcome).summary


def test_where_a_larger_batch_only_takes_fewer_steps_the_smallest_is_advised(tmp_path):
    """All samples are alike, and so are all batches: twice the batch needs twice the samples."""
    found = advice(task_of("constant"), tmp_path / "run")
    assert (found.status, found.recommendation.batch_size) == ("complete", 4)
    assert found.checked[0].batch_size == 6
    assert found.checked[0].low > 0.2
    # No sample deviates, so that the gradient has no noise.
    assert max(abs(point.noise_trace) for point in found.noise) < 1e-6


def test_where_the_rate_makes_up_for_the_batch_a_larger_one_is_advised(tmp_path):
    """A step of twice the batch goes twice as far: as far as two of the smaller ones, nearly."""
    found = advice(task_of("linear"), tmp_path / "run")
    assert found.status == "complete"
    assert found.recommendation.batch_size == max(row.batch_size for row in found.checked)
    assert found.recommendation.overhead <= 0.2
    assert found.noise[-1].samples == 256


def test_a_rate_at_which_nothing_trains_is_no_obstacle_to_a_search(tmp_path):
    """Above one a step goes farther than twice the way; so does that of the measured speed."""
    found = advice(task_of("constant", lr=20.0), tmp_path / "run", tune=True)
    assert found.status == "complete"
    assert found.lr < 1
    # Of a training at the rate that was found.
    assert [point.samples for point in found.noise] == [16, 64, 128, 256]


def test_a_stand_in_trains_what_is_too_long_for_the_real_model(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "FEW", 32)
    monkeypatch.setattr(analysis, "FEWEST_STEPS", 4)
    found = advice(noisy_task(), tmp_path / "run", samples=100_000, budget=130, seeds=4)
    run = read_run(tmp_path / "run")
    plan, runs = run.header.plan, [*run.results.select(Training)]
    assert (plan.target, plan.stand_in, found.growth.samples) == (100_000, 4, 100_000)
    assert 0 < plan.cost <= 0.6
    # The real model's arms come after the stand-in's, over the shorter length alone.
    real = [one for one in runs if one.arm >= len(plan.sizes)]
    assert 0 < len(real) < len(runs)
    assert {one.samples for one in real} == {plan.shorter[0]}
    assert {one.samples for one in runs} == {*plan.rungs}
    # They begin with other weights, as theirs are twice as many.
    first = {(one.arm % len(plan.sizes), one.samples, one.step, one.seed): one.loss for one in real}
    shared = [one for one in runs if one.arm < len(plan.sizes) and one.key[1:] in first]
    assert shared
    assert all(one.loss != first[one.key[1:]] for one in shared)


def test_a_stand_in_is_none_for_a_run_that_goes_on(tmp_path):
    model = make_model()
    torch.save(model.state_dict(), tmp_path / "start.pt")
    task = replace(task_of("linear"), start=tmp_path / "start.pt", proxy=make_model)
    with pytest.raises(InputError, match=r"Task\.proxy"):
        advice(task, tmp_path / "run")
