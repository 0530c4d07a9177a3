"""Makers of optimizers for ``--add``, and some that are broken in one way each."""

import torch


def adamax(model, lr):
    return torch.optim.Adamax(model.parameters(), lr=lr)


def grouped(model, lr):
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 0.5 * lr}, {"params": others}], lr=lr)


def adamw(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def drawing(model, lr):
    torch.rand(3)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def raises(model, lr):
    raise RuntimeError("it broke\nsecond line")


def is_none(model, lr):
    torch.optim.AdamW(model.parameters(), lr=lr)


def of_others(model, lr):
    return torch.optim.AdamW([torch.zeros(3, requires_grad=True)], lr=lr)


def deaf(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class _NoStep(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no step")


def no_step(model, lr):
    return _NoStep(model.parameters(), lr=lr)


not_a_function = 3


def casts(model, lr):
    return torch.optim.SGD(model.double().parameters(), lr=lr)


def freezes(model, lr):
    next(model.parameters()).requires_grad_(False)
    return torch.optim.SGD(model.parameters(), lr=lr)


def hooks(model, lr):
    next(model.parameters()).register_hook(lambda grad: 2 * grad)
    return torch.optim.SGD(model.parameters(), lr=lr)
