"""An optimizer with nothing to do, and both schedules on it."""

import torch
from torch import nn

from steadygrad.optim.schedules import Eden, WarmupHoldDecay


def make_optimizer(*lrs):
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in lrs or (0.5,)]
    return torch.optim.SGD(groups, lr=1.0)


def lrs_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def advance(optimizer, schedule, steps):
    """Learning rates of so many optimizer steps, all groups."""
    found = []
    for _ in range(steps):
        found.append(lrs_of(optimizer))
        optimizer.step()
        schedule.step()
    return found


MAKERS = {
    "lans": lambda o: WarmupHoldDecay(o, 20, warmup=4, hold=5),
    "eden": lambda o: Eden(o, lr_batches=6, lr_epochs=2, warmup_batches=3),
}
