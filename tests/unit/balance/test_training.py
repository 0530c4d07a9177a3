"""A balancer in training: weights change, it is moved, copied and reset."""

import copy
import pickle

import pytest
import torch
from torch import nn

from steadygrad import LossBalancer
from tests.unit.balance.problems import (
    WEIGHTS,
    averages_of,
    draw,
    gradient_handed_on,
    losses_of,
    make_model,
    mass_of,
)

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731


@CALLS
def test_weights_change_while_training(call):
    balancer, y = LossBalancer(WEIGHTS), draw(4, 7)
    gradient_handed_on(balancer, make, y, call)
    balancer.set_weights({"adv": 0.5, "l2": 0})
    got = gradient_handed_on(balancer, make, y, call)
    fresh = LossBalancer({"l1": 1.0, "l2": 0.0, "adv": 0.5})
    torch.testing.assert_close(got, gradient_handed_on(fresh, make, y, call), rtol=1e-12, atol=0)
    assert balancer.weights == {"l1": 1.0, "l2": 0.0, "adv": 0.5}
    # A loss without weight is measured all the same.
    assert mass_of(balancer)[1] > 1
    twin = LossBalancer(WEIGHTS)
    twin.load_state_dict(balancer.state_dict())
    assert twin.weights == balancer.weights


def test_state_finds_its_losses_by_name():
    balancer = LossBalancer(WEIGHTS)
    gradient_handed_on(balancer, make, draw(4, 7))
    turned = LossBalancer(dict(reversed(WEIGHTS.items())))
    turned.load_state_dict(balancer.state_dict())
    values = averages_of(balancer)
    assert averages_of(turned).tolist() == values.flip(0).tolist()
    assert turned.weights == WEIGHTS
    # And its own state still has its own order.
    again = LossBalancer(WEIGHTS)
    again.load_state_dict(turned.state_dict())
    assert torch.equal(averages_of(again), values)


def test_half_precision_models_keep_the_averages():
    model = nn.ModuleDict({"net": make_model(torch.float32), "balancer": LossBalancer(WEIGHTS)})
    gradient_handed_on(model["balancer"], make, draw(4, 7))
    before = copy.deepcopy(model["balancer"].state_dict())
    model.half().to("cpu").bfloat16()
    assert model["net"][0].weight.dtype == torch.bfloat16
    for key, value in model["balancer"].state_dict().items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key])


def test_copies_are_independent():
    balancer = LossBalancer(WEIGHTS)
    gradient_handed_on(balancer, make, draw(4, 7))
    twins = [copy.deepcopy(balancer), pickle.loads(pickle.dumps(balancer))]
    before = averages_of(balancer)
    for twin in twins:
        got = gradient_handed_on(twin, make, 2 * draw(4, 7))
        assert torch.isfinite(got).all()
        assert not torch.equal(averages_of(twin), before)
    assert torch.equal(averages_of(balancer), before)


def test_reset_forgets_averages_and_keeps_weights():
    balancer, y = LossBalancer(WEIGHTS), draw(4, 7)
    gradient_handed_on(balancer, make, 100 * y)
    balancer.reset()
    got = gradient_handed_on(balancer, make, y)
    assert torch.equal(got, gradient_handed_on(LossBalancer(WEIGHTS), make, y))


def test_a_fork_in_evaluation_is_the_output_itself():
    balancer, model = LossBalancer(WEIGHTS), make_model()
    with torch.no_grad():
        y = model(draw(4, 5))
        ys = balancer.fork(y)
    assert set(ys) == set(WEIGHTS)
    assert all(v is y for v in ys.values())
    assert mass_of(balancer).sum() == 0
