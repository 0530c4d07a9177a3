"""A task of your own: ``steadygrad advise examples/my_task.py:make_task``.

A study needs a model, data, one loss for each sample, and an optimizer. Here a linear model learns
to predict a number from 20 features, by plain SGD.
"""

import torch
from torch import Tensor, nn

from steadygrad.tasks import Task, TensorSamples


def make_data(count: int, seed: int) -> TensorSamples:
    """Features with shape (count, 20) and noisy targets with shape (count, 1)."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 20, generator=generator)
    slopes = torch.linspace(-1, 1, 20).unsqueeze(1)
    noise = torch.randn(count, 1, generator=generator)
    return TensorSamples((features, features @ slopes + 0.5 * noise))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One squared error for each sample, with shape (n,): no mean over the batch here."""
    features, targets = batch
    predicted: Tensor = model(features)
    return (predicted - targets).square().mean(dim=1)


def make_task() -> Task:
    """The task; steadygrad calls this function."""
    return Task(
        name="linear-regression",
        sample="row",
        make_model=lambda: nn.Linear(20, 1),
        train=make_data(8_192, seed=0),
        valid=make_data(1_024, seed=1),
        per_sample_loss=losses,
        make_optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=0.01,  # tuned for batches of 8
        batch_size=8,  # the smallest batch the study trains at
        lr_rule="linear",  # SGD: twice the batch, twice the learning rate
    )
