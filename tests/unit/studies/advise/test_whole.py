"""Whole studies with the program's own planner, over tasks whose answers are known."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Settings
from steadygrad.studies.distributed import Deadline
from steadygrad.studies.run import start
from steadygrad.tasks import Task, TensorSamples
from tests.unit.studies.framework import Watcher, checked, speed_in_a_moment

# At the rates at which the first weight can be trained the second one goes on.
CURVATURES = torch.tensor([1.0, 0.001])


def make_model() -> nn.Module:
    model = nn.Linear(1, 2, bias=False)
    nn.init.normal_(model.weight, std=0.01)
    return model


def task_of(rule: str, lr: float = 0.005 / 64) -> Task:
    """Weights that are to become one; all samples say so. Up to 64 times these rates are low."""
    return Task(
        name="one",
        sample="number",
        make_model=make_model,
        train=TensorSamples(torch.ones(1024, 1)),
        valid=TensorSamples(torch.ones(1, 1)),
        per_sample_loss=lambda model, x: (model.weight.ravel() - x).square() @ CURVATURES,
        make_optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=lr,
        batch_size=4,
        lr_rule=rule,
    )


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
    assert found.octaves == 6
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
    found = advice(task_of("constant", lr=20.0), tmp_path / "run")
    assert found.status == "complete"
    assert 0.3 < found.lr < 1
    # Of a training at the rate that was found.
    assert [point.samples for point in found.noise] == [16, 64, 128, 256]


def test_a_stand_in_that_there_is_no_time_to_check_is_not_left_out(tmp_path):
    task, known = task_of("linear"), {"samples": 100_000_000, "budget": 25}
    with pytest.raises(InputError, match="--budget"):
        advice(replace(task, proxy=make_model), tmp_path / "run", **known)
    assert advice(task, tmp_path / "run", **known).growth.samples == 100_000_000


@pytest.mark.parametrize("proxy", [None, make_model])
def test_a_run_that_goes_on_is_not_predicted(tmp_path, proxy):
    model = make_model()
    torch.save(model.state_dict(), tmp_path / "start.pt")
    task = replace(task_of("linear"), start=tmp_path / "start.pt", proxy=proxy)
    with pytest.raises(InputError, match=r"--samples.*Task\.start"):
        advice(task, tmp_path / "run", samples=100_000_000, budget=130)
