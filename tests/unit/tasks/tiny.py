"""The smallest task: a linear layer that is to put out zeros."""

import torch
from torch import nn

from steadygrad.tasks import Task, TensorSamples


def squared(model, batch):
    return model(batch).square().mean(1)


TASK = Task(
    name="tiny",
    sample="row",
    make_model=lambda: nn.Linear(3, 2),
    train=TensorSamples(torch.ones(10, 3)),
    valid=TensorSamples(torch.ones(4, 3)),
    per_sample_loss=squared,
    make_optimizer=torch.optim.SGD,
    lr=0.1,
    batch_size=2,
)
