"""Makers of optimizers for ``--add``, and some that are broken in one way each."""

import torch


def adamax(model, lr):
    return torch.optim.Adamax(model.parameters(), lr=lr)


def grouped(model, lr):
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 0.5 * lr}, {"params": others}], lr=lr)


def wild(model, lr):
    return torch.optim.SGD(model.parameters(), lr=1e9 * lr)


def adamw(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def drawing(model, lr):
    torch.rand(3)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def raises(model, lr):
    raise RuntimeError("it broke\nsecond line")


def is_none(model, lr):
    torch.optim.AdamW(model.parameters(), lr=lr)


def of_parameters(parameters):
    return torch.optim.AdamW(parameters)


def of_others(model, lr):
    return torch.optim.AdamW([torch.zeros(3, requires_grad=True)], lr=lr)


def deaf(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def unrated(model, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    optimizer.param_groups[0]["lr"] = None
    return optimizer


def turns(model, lr):
    with torch.no_grad():
        model[0].weight.neg_()
    return torch.optim.AdamW(model.parameters(), lr=lr)


def zeroes(model, lr):
    torch.nn.init.zeros_(model[0].weight)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def exchanges(model, lr):
    model[0] = torch.nn.Linear(8, 16)
    return torch.optim.AdamW(model.parameters(), lr=lr)


_MADE = []


def same(model, lr):
    _MADE.append(torch.optim.AdamW(model.parameters(), lr=lr))
    return _MADE[0]


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
