"""Tasks that train in seconds, and tasks that are broken in one way each."""

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


unmeasured = partial(make_task, samples_per_second=None)
other_data = partial(make_task, provenance={"corpus": "made up", "sha256": "1" * 64})
already_a_mean = partial(make_task, per_sample_loss=lambda m, batch: losses(m, batch).mean())
not_finite = partial(make_task, per_sample_loss=lambda m, batch: losses(m, batch) * math.nan)
# Finite at first: the record has begun when training goes wrong.
diverging = partial(make_task, make_optimizer=lambda ps, lr: torch.optim.SGD(ps, lr=1e9 * lr))


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


model_raises = partial(make_task, make_model=boom)
model_is_none = partial(make_task, make_model=lambda: None)
wrong_shapes = partial(make_task, make_model=lambda: nn.Linear(5, 1))
frozen = partial(make_task, make_model=lambda: make_model().requires_grad_(False))
on_meta = partial(make_task, make_model=lambda: make_model().to("meta"))
optimizer_raises = partial(make_task, make_optimizer=boom)
optimizer_is_none = partial(make_task, make_optimizer=lambda parameters, lr: None)
optimizer_cannot_step = partial(make_task, make_optimizer=lambda ps, lr: torch.optim.LBFGS(ps, lr))
evaluate_raises = partial(make_task, evaluate=boom)
evaluate_is_none = partial(make_task, evaluate=lambda model, samples: None)
empty = partial(make_task, train=make_data(0, 0))
batch_too_large = partial(make_task, batch_size=5000)


def loss_raises_later() -> Task:
    return make_task(per_sample_loss=call_after(100, losses, boom))


def loss_is_a_mean_later() -> Task:
    later = call_after(100, losses, lambda model, batch: losses(model, batch).mean())
    return make_task(per_sample_loss=later)


def mean(model: nn.Module, samples: TensorSamples) -> float:
    """An evaluation of a task's own."""
    return float(losses(model, samples.batch(torch.arange(len(samples)))).mean())


def evaluate_raises_later() -> Task:
    return make_task(evaluate=call_after(20, mean, boom))


def raising() -> Task:
    raise RuntimeError("no such corpus\nsecond line")


def out_of_memory(most: int = 16) -> Task:
    """Runs out of memory above 16 samples, as on a GPU."""

    def checked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return losses(model, batch)

    return replace(without_dropout(), per_sample_loss=checked)


class StateRaises(torch.optim.SGD):
    state_dict = boom


class LoadRaises(torch.optim.SGD):
    load_state_dict = boom


state_raises = partial(make_task, make_optimizer=lambda parameters, lr: StateRaises(parameters, lr))
load_raises = partial(make_task, make_optimizer=lambda parameters, lr: LoadRaises(parameters, lr))


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


def buffer_on_meta() -> Task:
    def model() -> nn.Module:
        made = make_model()
        made.register_buffer("table", torch.zeros(3, device="meta"), persistent=False)
        return made

    return make_task(make_model=model)


class Still(torch.optim.AdamW):
    def step(self, closure=None) -> None:
        """Moves nothing."""


still = partial(make_task, make_optimizer=lambda parameters, lr: Still(parameters, lr=lr))


def evaluate_trains() -> Task:
    def evaluate(model: nn.Module, samples: TensorSamples) -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        return 1.0

    return make_task(evaluate=evaluate)


def shared() -> Task:
    """Its 63 validation samples cannot be shared equally; batches above two are accumulated."""
    return replace(without_dropout(), valid=make_data(63, 1), micro_batch_size=2)


def evaluated() -> Task:
    """With an evaluation of its own."""
    return replace(shared(), evaluate=mean)


def paced() -> Task:
    """The numbers of ``make_task``, slowly enough to be interrupted on the way."""
    return replace(slow(), samples_per_second=200.0)
