"""Tasks that train in seconds, and tasks that are broken in one way each."""

import math
import random
import time
from dataclasses import replace

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


def dependent() -> Task:
    """A sample's loss depends on the others of its batch."""

    def centered(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        predicted = model(batch[0])
        return (predicted - predicted.mean(0) - batch[1]).square().mean(1)

    return make_task(per_sample_loss=centered)


def slow() -> Task:
    """Takes about a hundredth of a second a step, so that there is time to interrupt it."""

    def slowly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.01)
        return losses(model, batch)

    return make_task(per_sample_loss=slowly, samples_per_second=10_000.0)


def unmeasured() -> Task:
    return make_task(samples_per_second=None)


def other_data() -> Task:
    return make_task(provenance={"corpus": "made up", "sha256": "1" * 64})


def already_a_mean() -> Task:
    return make_task(per_sample_loss=lambda model, batch: losses(model, batch).mean())


def not_finite() -> Task:
    return make_task(per_sample_loss=lambda model, batch: losses(model, batch) * math.nan)


def diverging() -> Task:
    """Finite at first: the record has begun when training goes wrong."""
    return make_task(make_optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=1e9 * lr))


def diverging_branches() -> Task:
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


def call_after(calls: int, work, fault):
    """Does ``work`` so many times, then ``fault`` every time."""
    left = [calls]

    def changed(*arguments):
        left[0] -= 1
        return (work if left[0] >= 0 else fault)(*arguments)

    return changed


def boom(*arguments):
    raise RuntimeError("it broke\nsecond line")


def model_raises() -> Task:
    return make_task(make_model=boom)


def model_is_none() -> Task:
    return make_task(make_model=lambda: None)


def wrong_shapes() -> Task:
    return make_task(make_model=lambda: nn.Linear(5, 1))


def optimizer_raises() -> Task:
    return make_task(make_optimizer=boom)


def optimizer_is_none() -> Task:
    return make_task(make_optimizer=lambda parameters, lr: None)


def optimizer_cannot_step() -> Task:
    return make_task(make_optimizer=lambda parameters, lr: torch.optim.LBFGS(parameters, lr=lr))


def evaluate_raises() -> Task:
    return make_task(evaluate=boom)


def loss_raises_later() -> Task:
    return make_task(per_sample_loss=call_after(100, losses, boom))


def loss_is_a_mean_later() -> Task:
    later = call_after(100, losses, lambda model, batch: losses(model, batch).mean())
    return make_task(per_sample_loss=later)


def evaluate_raises_later() -> Task:
    def evaluate(model: nn.Module, samples: TensorSamples) -> float:
        return float(losses(model, samples.batch(torch.arange(len(samples)))).mean())

    return make_task(evaluate=call_after(20, evaluate, boom))


def empty() -> Task:
    return make_task(train=make_data(0, 0))


def batch_too_large() -> Task:
    return make_task(batch_size=5000)


def raising() -> Task:
    raise RuntimeError("no such corpus\nsecond line")


def out_of_memory(most: int = 16) -> Task:
    """Runs out of memory above 16 samples, as on a GPU."""

    def checked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return losses(model, batch)

    return replace(without_dropout(), per_sample_loss=checked)


def little_memory() -> Task:
    """Not even its own batch of four fits in one piece."""
    return out_of_memory(3)


def unsavable() -> Task:
    """The optimizer's state holds what only a pickle can keep."""

    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict:
            return {**super().state_dict(), "odd": make_task}

    return make_task(make_optimizer=lambda parameters, lr: Odd(parameters, lr=lr))


class StateRaises(torch.optim.SGD):
    def state_dict(self) -> dict:
        return boom()


class LoadRaises(torch.optim.SGD):
    def load_state_dict(self, state: dict) -> None:
        boom()


def state_raises() -> Task:
    return make_task(make_optimizer=lambda parameters, lr: StateRaises(parameters, lr=lr))


def load_raises() -> Task:
    return make_task(make_optimizer=lambda parameters, lr: LoadRaises(parameters, lr=lr))


def state_raises_later() -> Task:
    """Not in that of the trial before the study, nor in that of the first point."""

    class Odd(torch.optim.SGD):
        state_dict = call_after(2, torch.optim.SGD.state_dict, boom)

    return make_task(make_optimizer=lambda parameters, lr: Odd(parameters, lr=lr))


def load_raises_later() -> Task:
    class Odd(torch.optim.SGD):
        load_state_dict = call_after(1, torch.optim.SGD.load_state_dict, boom)

    return make_task(make_optimizer=lambda parameters, lr: Odd(parameters, lr=lr))


def trains_another_model() -> Task:
    other = make_model()
    return make_task(make_optimizer=lambda _, lr: torch.optim.SGD(other.parameters(), lr=lr))


def on_meta() -> Task:
    return make_task(make_model=lambda: make_model().to("meta"))


def buffer_on_meta() -> Task:
    def model() -> nn.Module:
        made = make_model()
        made.register_buffer("table", torch.zeros(3, device="meta"), persistent=False)
        return made

    return make_task(make_model=model)


def still() -> Task:
    """Its optimizer ignores the learning rate that it is given, and has none."""
    return make_task(make_optimizer=lambda parameters, lr: _Still(parameters, lr=lr))


class _Still(torch.optim.AdamW):
    def step(self, closure=None) -> None:
        """Moves nothing."""


def frozen() -> Task:
    return make_task(make_model=lambda: make_model().requires_grad_(False))


def evaluate_trains() -> Task:
    def evaluate(model: nn.Module, samples: TensorSamples) -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        return 1.0

    return make_task(evaluate=evaluate)


def evaluate_is_none() -> Task:
    return make_task(evaluate=lambda model, samples: None)


def evaluate_borrows() -> Task:
    """Evaluates other weights, and puts its own back."""

    def evaluate(model: nn.Module, samples: TensorSamples) -> float:
        own = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
            loss = losses(model, samples.batch(torch.arange(len(samples)))).mean()
            for parameter, before in zip(model.parameters(), own, strict=True):
                parameter.copy_(before)
        return float(loss)

    return make_task(evaluate=evaluate)


def augmented() -> Task:
    """Draws from Python's and from numpy's generator."""
    import numpy as np

    def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, targets = batch
        scale = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return losses(model, (features * scale, targets))

    return make_task(per_sample_loss=noisy)


def shared() -> Task:
    """Its 63 validation samples cannot be shared equally; batches above two are accumulated."""
    return replace(without_dropout(), valid=make_data(63, 1), micro_batch_size=2)


def evaluated() -> Task:
    """With an evaluation of its own."""

    def evaluate(model: nn.Module, samples: TensorSamples) -> float:
        return float(losses(model, samples.batch(torch.arange(len(samples)))).mean())

    return replace(shared(), evaluate=evaluate)


def paced() -> Task:
    """The numbers of ``make_task``, slowly enough to be interrupted on the way."""
    task = slow()
    return replace(task, samples_per_second=200.0)
