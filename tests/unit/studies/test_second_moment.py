"""Which optimizers have a second moment whose half-life can be kept."""

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from steadygrad.studies.learning_rate import Rate, RateSetter, has_second_moment
from tests.unit.studies.framework import make_trainer
from tests.unit.studies.test_trainer import make_task


class Lion(torch.optim.Optimizer):
    """Two betas, neither of them a second moment's."""

    betas = (0.9, 0.99)

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "betas": self.betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(average.lerp_(p.grad, 0.01).sign(), alpha=group["lr"])


class Three(Lion):
    betas = (0.98, 0.92, 0.99)


KNOWN = [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax, LANS, LAMB, ScaledAdam]


def stepped(kind):
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=1e-3)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", KNOWN)
def test_the_second_of_two_betas_keeps_its_half_life(kind):
    optimizer, task = stepped(kind), make_task()
    assert has_second_moment(optimizer, needed=True)
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    RateSetter(optimizer, task, True)(Rate(4 * task.batch_size))
    assert optimizer.param_groups[0]["betas"] == pytest.approx((beta1, beta2**4), rel=1e-12)


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_weight_decay_keeps_its_half_life_at_any_rate(multiple):
    optimizer, task = stepped(torch.optim.AdamW), make_task(lr_rule="constant")
    (group,) = optimizer.param_groups
    halved = group["lr"] * group["weight_decay"]
    RateSetter(optimizer, task, True)(Rate(multiple * task.batch_size, factor=8.0))
    assert group["lr"] == pytest.approx(8e-3)
    assert group["lr"] * group["weight_decay"] == pytest.approx(multiple * halved)


@pytest.mark.parametrize("kind", [Lion, Three])
def test_other_betas_are_refused_where_it_is_asked_for(kind):
    optimizer = stepped(kind)
    assert not has_second_moment(optimizer, needed=False)
    with pytest.raises(InputError, match="`--keep-half-life`"):
        has_second_moment(optimizer, needed=True)


def test_without_betas_only_the_weight_decay_follows():
    assert not has_second_moment(stepped(torch.optim.SGD), needed=True)


@pytest.mark.parametrize("kind", [Lion, Three])
def test_a_study_refuses_them_before_it_begins(kind):
    task = make_task(make_optimizer=lambda params, lr: kind(params, lr))
    with pytest.raises(InputError, match="`--keep-half-life`"):
        make_trainer(task, keep_half_life=True).check_task()


def test_a_schedule_of_the_users_own_changes_nothing():
    """Its wrapped step belongs to the optimizer that the factory made."""
    made = []

    def make(params, lr):
        made.append(torch.optim.AdamW(params, lr=lr))
        torch.optim.lr_scheduler.StepLR(made[-1], 10)
        return made[-1]

    trainer = make_trainer(make_task(make_optimizer=make), keep_half_life=True)
    trainer.check_task()
    assert trainer.second_moment
