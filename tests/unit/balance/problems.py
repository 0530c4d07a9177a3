"""Small models and losses whose gradients differ by orders of magnitude."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

WEIGHTS = {"l1": 1.0, "l2": 2.0, "adv": 4.0}
CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
# float64; sums of a few dozen numbers in another order.
CLOSE = {"rtol": 1e-11, "atol": 1e-14}


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


TARGET = draw(4, 7, seed=1)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7)).double()


def losses_of(ys, target=TARGET):
    """Losses that are means over the items, each from its own copy of y."""
    rules = {
        "l1": lambda y: (y - target).abs().mean(),
        "l2": lambda y: 30 * (y - target).square().mean(),
        "adv": lambda y: F.softplus(-y.sum(-1)).mean() / 100,
    }
    return {name: rule(ys[name]) for name, rule in rules.items() if name in ys}


def changed(**rules):
    """These losses, some with a rule of y in place of their own; None: without it."""

    def losses(ys):
        found = {**losses_of(ys), **{k: rule(ys[k]) for k, rule in rules.items() if rule}}
        return {k: loss for k, loss in found.items() if rules.get(k, k)}

    return losses


def times(factor, losses=losses_of):
    """Losses that carry a factor."""
    return lambda ys: {name: factor * loss for name, loss in losses(ys).items()}


def slope(factor):
    """A loss ``a`` whose gradient is the factor everywhere."""
    return lambda ys: {"a": factor * ys["a"].sum()}


def same_y(y, names=WEIGHTS):
    return dict.fromkeys(names, y)


def go_back(balancer, y, losses=losses_of, call="backward", **options):
    """A backward pass of losses made from a mapping of copies of y, by either call."""
    if call == "fork":
        sum(losses(balancer.fork(y, **options)).values()).backward()
        return None
    return balancer.backward(losses(same_y(y, balancer.weights)), y, **options)


def gradient_handed_on(balancer, losses, y, call="backward", **options):
    """G, what the model gets."""
    source = y.detach().clone().requires_grad_()
    go_back(balancer, source.view_as(source), losses, call, **options)
    return source.grad


def parameters_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def averages_of(balancer):
    """The averaged norm of each loss, NaN before the first one."""
    numbers = balancer.state.numbers()
    return numbers.total / numbers.mass


def mass_of(balancer):
    """The mass of each loss's average: one more for each step, at a decay of one."""
    return balancer.state.numbers().mass


def state_of(balancer):
    """All that a call may change: state and metrics."""
    state = {k: v.clone() for k, v in balancer.state_dict().items()}
    return {**state, **balancer.metrics}


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0, equal_nan=True, msg=key)


class Scaler(nn.Module):
    """A gradient scaler as far as it is asked, and a module, as some are."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor

    def scale(self, outputs):
        return self.factor * outputs


class Aggregator(nn.Module):
    """Weighs gradients by a function of their inner products; a module, as TorchJD's are."""

    def __init__(self, weigh):
        super().__init__()
        self.gramian_weighting = weigh


def by_products(products):
    """Weighs each gradient by how much all of them point its way."""
    return 1 + products.sum(0)
