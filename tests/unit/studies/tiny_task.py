"""Tasks that train in seconds, and some that are broken."""

import math
import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from steadygrad.tasks import Task, TensorSamples

SLOPES = torch.linspace(-1, 1, 8).unsqueeze(1)


def make_data(count: int, seed: int) -> TensorSamples:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 8, generator=generator)
    noise = torch.randn(count, 1, generator=generator)
    return TensorSamples((features, torch.tanh(features @ SLOPES) + 0.5 * noise))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    features, targets = batch
    return (model(features) - targets).square().mean(dim=1)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def make_task(**changes) -> Task:
    return Task(
        **{
            "name": "tiny",
            "sample": "row",
            "make_model": make_model,
            "train": make_data(4096, 0),
            "valid": make_data(64, 1),
            "per_sample_loss": losses,
            "make_optimizer": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
            "lr": 0.001,
            "batch_size": 4,
            "samples_per_second": 200.0,  # much less than it is: no test depends on the clock
            "provenance": {"corpus": "made up", "sha256": "0" * 64},
            **changes,
        }
    )


def talkative() -> Task:
    print("a task may print what it likes")
    return make_task()


def without_dropout() -> Task:
    """The same on any number of processes, whose random numbers differ."""
    return make_task(
        make_model=lambda: nn.Sequential(
            *(m for m in make_model() if not isinstance(m, nn.Dropout))
        )
    )


def centered(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A sample's loss depends on the others of its batch."""
    predicted = model(batch[0])
    return (predicted - predicted.mean(0) - batch[1]).square().mean(1)


def slow() -> Task:
    """Takes about a hundredth of a second a step, so that there is time to interrupt it."""

    def slowly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.01)
        return losses(model, batch)

    return make_task(per_sample_loss=slowly, samples_per_second=10_000.0)


dependent = partial(make_task, per_sample_loss=centered)
other_data = partial(make_task, provenance={"corpus": "made up", "sha256": "1" * 64})
# Finite at first: the record has begun when training goes wrong.
diverging = partial(make_task, make_optimizer=lambda ps, lr: torch.optim.SGD(ps, lr=1e9 * lr))


def diverging_above() -> Task:
    """Stable at its own learning rate, unstable at 8 times it; then the loss is not finite."""

    def brittle(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        largest = max(parameter.detach().abs().max() for parameter in model.parameters())
        return losses(model, batch) + (math.inf if largest > 100 else 0.0)

    return make_task(
        make_model=lambda: nn.Linear(8, 1),
        per_sample_loss=brittle,
        make_optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=0.2,
        batch_size=8,
        lr_rule="linear",
    )


def boom(*arguments):
    raise RuntimeError("it broke\nsecond line")


def raising() -> Task:
    raise RuntimeError("no such corpus\nsecond line")


def loss_raises_later() -> Task:
    calls = []  # more than the speed is measured by, on a fast machine too

    def breaking(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(batch)
        return (losses if len(calls) <= 400 else boom)(model, batch)

    return make_task(per_sample_loss=breaking)


def mean(model: nn.Module, samples: TensorSamples) -> float:
    """An evaluation of a task's own."""
    return float(losses(model, samples.batch(torch.arange(len(samples)))).mean())


def out_of_memory(most: int = 16) -> Task:
    """Runs out of memory above 16 samples, as on a GPU."""

    def checked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return losses(model, batch)

    return replace(without_dropout(), per_sample_loss=checked)


def shared() -> Task:
    """Its 63 validation samples cannot be shared equally; batches above two are accumulated."""
    return replace(without_dropout(), valid=make_data(63, 1), micro_batch_size=2)


def evaluated() -> Task:
    """With an evaluation of its own."""
    return replace(shared(), evaluate=mean)


def paced() -> Task:
    """The numbers of ``make_task``, slowly enough to be interrupted on the way."""
    return replace(slow(), samples_per_second=200.0)
