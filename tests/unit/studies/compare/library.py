"""Optimizers as other libraries have them: one of each kind, and some that cannot be compared."""

import torch

__version__ = "9"


class Plain(torch.optim.SGD):
    """Has a default rate of its own."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr=lr)


class Ignoring(Plain):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=0.1)


class Consuming(Plain):
    """Keeps no gradient, as HeavyBall does."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class Rateless(Plain):
    """Without a learning rate a schedule of its own, as in Adafactor."""

    def __init__(self, params, lr=None):
        super().__init__(params, lr=lr or 0.0)


class ScheduleFree(Plain):
    """Evaluated at other weights than those that it trains: at zero."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.defaults["train_mode"] = self.param_groups[0]["train_mode"] = False
        self.rates = []

    @torch.no_grad()
    def train(self):
        (group,) = self.param_groups
        for p in group["params"]:
            if "y" in self.state[p] and not group["train_mode"]:
                p.copy_(self.state[p]["y"])
        group["train_mode"] = True

    @torch.no_grad()
    def eval(self):
        (group,) = self.param_groups
        for p in group["params"]:
            self.state[p]["y"] = p.clone()
            p.zero_()
        group["train_mode"] = False

    def step(self):
        assert self.param_groups[0]["train_mode"]
        self.rates.append(self.param_groups[0]["lr"])
        super().step()


class OwnRate(Plain):
    """Estimates its rate from ``d0`` on, as Prodigy does."""

    def __init__(self, params, lr=1.0, d0=0.05):
        super().__init__(params, lr)
        self.param_groups[0]["d"] = d0

    def step(self):
        (group,) = self.param_groups
        lr = group["lr"]
        group["lr"] = group["d"] * lr
        super().step()
        group["lr"] = lr


class Matrices(Plain):
    """Refuses all but matrices when it is made, as torch's Muon does."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, lr)
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("only 2D parameters")


class MatricesInSteps(Plain):
    """Refuses them when it takes a step."""

    def step(self):
        assert all(p.ndim == 2 for group in self.param_groups for p in group["params"])
        super().step()


class Closure(Plain):
    def step(self, closure):
        super().step(closure)


class Wrapper(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer):
        self.base = base_optimizer(params)
