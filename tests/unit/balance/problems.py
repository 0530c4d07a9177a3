"""Small models and losses whose gradients differ by orders of magnitude."""

import torch
import torch.nn.functional as F
from torch import nn

WEIGHTS = {"l1": 1.0, "l2": 2.0, "adv": 4.0}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7)).to(dtype)


def losses_of(ys, target):
    """Losses that are means over the items, each from its own copy of y."""
    rules = {
        "l1": lambda y: (y - target).abs().mean(),
        "l2": lambda y: 30 * (y - target).square().mean(),
        "adv": lambda y: F.softplus(-y.sum(-1)).mean() / 100,
    }
    return {name: rule(ys[name]) for name, rule in rules.items() if name in ys}


def same_y(y, names=WEIGHTS):
    return dict.fromkeys(names, y)


def partial_gradients(losses, y):
    return {k: torch.autograd.grad(v, y, retain_graph=True)[0] for k, v in losses.items()}


def gradient_handed_on(balancer, make_losses, y, call="backward", **options):
    """G, what the model gets, for losses made from a mapping of copies of y."""
    source = y.detach().clone().requires_grad_()
    seen = source.view_as(source)
    if call == "fork":
        sum(make_losses(balancer.fork(seen, **options)).values()).backward()
    else:
        balancer.backward(make_losses(same_y(seen, balancer.weights)), seen, **options)
    return source.grad


def run(balancer, y, target, call, factor=1.0, **options):
    """One backward pass of losses times a factor, by either call."""
    if call == "fork":
        (factor * sum(losses_of(balancer.fork(y, **options), target).values())).backward()
    else:
        losses = {k: factor * v for k, v in losses_of(same_y(y), target).items()}
        balancer.backward(losses, y, **options)


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
