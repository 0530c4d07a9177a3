"""Makers of optimizers for ``--add``, some broken in one way each, and classes of a library."""

import torch


def adamax(model, lr):
    return torch.optim.Adamax(model.parameters(), lr=lr)


def grouped(model, lr):
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 0.5 * lr}, {"params": others}], lr=lr)


def drawing(model, lr):
    torch.rand(3)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def raises(model, lr):
    raise RuntimeError("it broke\nsecond line")


def of_others(model, lr):
    return torch.optim.AdamW([torch.zeros(3, requires_grad=True)], lr=lr)


def deaf(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class _NoStep(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no step")


def no_step(model, lr):
    return _NoStep(model.parameters(), lr=lr)


def freezes(model, lr):
    next(model.parameters()).requires_grad_(False)
    return torch.optim.SGD(model.parameters(), lr=lr)


def hooks(model, lr):
    next(model.parameters()).register_hook(lambda grad: 2 * grad)
    return torch.optim.SGD(model.parameters(), lr=lr)


class _SetsRate(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["lr"] *= 0.5
        super().step()


def sets_rate(model, lr):
    return _SetsRate(model.parameters(), lr=lr)


class OwnRate(torch.optim.SGD):
    """Has an estimate ``d0`` of its rate, as Prodigy."""

    def __init__(self, params, lr=0.05, d0=1e-6):
        super().__init__(params, lr=lr)


class ScheduleFree(torch.optim.SGD):
    """Evaluated at other weights than those that it trains: at zero."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.trained, self.rates = [], []

    @torch.no_grad()
    def train(self):
        for p, trained in zip(self.param_groups[0]["params"], self.trained, strict=False):
            p.copy_(trained)
        self.trained = []

    @torch.no_grad()
    def eval(self):
        for p in self.param_groups[0]["params"]:
            self.trained.append(p.clone())
            p.zero_()

    def step(self):
        assert not self.trained
        self.rates.append(self.param_groups[0]["lr"])
        super().step()
