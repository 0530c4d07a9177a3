"""The training loop: micro-batches, orders, generators, learning rates, states."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim import LANS
from steadygrad.studies.advise.trials import TRIALS, noise
from steadygrad.studies.calibration import calibrate
from steadygrad.studies.course import Order, Rate, seed_for
from steadygrad.studies.schema import CommonSettings
from steadygrad.studies.trainer import Diverged
from steadygrad.studies.work import Workplace, work_on
from steadygrad.tasks import TensorSamples
from tests.unit.studies import tiny_task
from tests.unit.studies.framework import PLAN, make_trainer, weights, worst
from tests.unit.studies.results import RUNTIME, changed, make_header, make_training, trial
from tests.unit.studies.tiny_task import losses, make_task, without_dropout

# Micro-batches


@pytest.mark.parametrize("micro", [1, 8, 19])
def test_micro_batches_change_no_number(micro):
    """Eight of 20 leaves a ragged micro-batch of four, 19 one of one."""
    runs = []
    for size in (None, micro):
        trainer = make_trainer(without_dropout(), dtype="float64", micro_batch_size=size)
        trainer.backward(torch.arange(20))
        gradient = [parameter.grad.clone() for parameter in trainer.model.parameters()]
        trainer.restart()
        list(trainer.run(Order(4096, 0), 0, 400, 20))
        runs.append((gradient, weights(trainer), trainer.look(), trainer.evaluate()))
    whole, split = runs
    # float64 sums of 20 numbers near one, in another order.
    assert worst(whole[0], split[0]) < 1e-14
    # Rounding of 20 steps; Adam divides by small second moments.
    assert worst(whole[1], split[1]) < 1e-12
    assert whole[2] == pytest.approx(split[2], abs=1e-12)
    assert len(whole[2]) == 20
    assert whole[3] == pytest.approx(split[3], abs=1e-12)


def test_the_task_bounds_the_micro_batch(tmp_path):
    seen = []

    def watched(model, batch):
        seen.append(len(batch[0]))
        return losses(model, batch)

    trainer = make_trainer(make_task(per_sample_loss=watched, micro_batch_size=6, batch_size=16))
    trainer.check_task()
    trainer.fit_micro_batch(64)
    assert trainer.micro_batch_size == 6
    seen.clear()
    trainer.step(torch.arange(16))
    trainer.evaluate()
    # 16 of training and 64 of validation.
    assert seen == [6, 6, 4] + [6] * 10 + [4]
    seen.clear()
    place = Workplace(trainer, lambda samples: None)
    (*_, last) = noise(changed(PLAN, arms=(16,)), place, 64, 0.0).points
    # A noise scale takes parts of one size.
    assert (last.samples, seen) == (64, [4] * 16)


def test_out_of_memory_halves_the_micro_batch():
    trainer = make_trainer(replace(tiny_task.out_of_memory(), batch_size=64))
    trainer.check_task()
    assert trainer.micro_batch_size == 16
    trainer.fit_micro_batch(100)
    # 100, 50, 25 do not fit.
    assert trainer.micro_batch_size == 12
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    with pytest.raises(InputError, match="out of memory"):
        make_trainer(tiny_task.out_of_memory(0)).fit_micro_batch(8)
    # While the speed is measured as well.
    trainer = make_trainer(tiny_task.out_of_memory(3), micro_batch_size=4)
    assert calibrate(trainer, CommonSettings(workers=1, threads=1))[0] > 0
    assert (trainer.micro_batch_size, trainer.steps) == (2, 0)


def test_memory_that_runs_out_in_a_trial_changes_this_trial_only(monkeypatch):
    """The next one starts with the run's micro-batch again: its numbers are the same anywhere."""
    sizes = []

    def hungry(plan, place, arm, samples, step, seed):
        sizes.append(place.trainer.micro_batch_size)
        place.trainer.backward(torch.arange(samples))
        return make_training()

    monkeypatch.setitem(TRIALS, "training", hungry)
    trainer = make_trainer(tiny_task.out_of_memory(), micro_batch_size=64)
    header = make_header(runtime=changed(RUNTIME, micro_batch_size=64))
    place = Workplace(trainer, lambda samples: None, header)
    for samples in (60, 8):
        work_on(trial(0, samples), place)
    assert sizes == [64, 32, 16, 64]


def test_losses_that_are_not_finite_are_refused():
    x, y = make_task().train.batch(torch.arange(4096))
    y[40] = math.nan
    trainer = make_trainer(make_task(train=TensorSamples((x, y))))
    trainer.check_task()
    trainer.fit_micro_batch(32)
    # In the largest batch, before training.
    with pytest.raises(InputError, match="per_sample_loss"):
        trainer.fit_micro_batch(64)


@pytest.mark.parametrize(
    ("value", "dtype", "lr", "remedy"),
    [
        # More than float16 holds, which no lower rate helps.
        (3e5, "float16", 0.001, "--dtype bfloat16"),
        (math.nan, "float16", 0.001, "Task.lr"),
        (math.nan, "float32", 0.001, "Task.lr"),
        (1.0, "float32", 1e30, "Task.lr"),
    ],
)
def test_a_loss_that_is_not_finite_has_a_remedy(value, dtype, lr, remedy):
    x, y = make_task().train.batch(torch.arange(4096))
    x[Order(4096, 0).take(8, 4)[2], 0] = value
    task = make_task(train=TensorSamples((x, y)), lr=lr, make_model=lambda: nn.Linear(8, 1))
    with pytest.raises(Diverged, match=remedy):
        list(make_trainer(task, dtype=dtype).run(Order(4096, 0), 0, 400, 4))


def test_worker_processes_that_make_batches_change_no_number():
    found = []
    for workers in (0, 2):
        trainer = make_trainer(make_task(loader_workers=workers), micro_batch_size=3)
        trainer.seed_everything("run")
        list(trainer.run(Order(4096, 0), 0, 80, 8))
        found.append((trainer.look(), trainer.evaluate(), draws()))
    assert found[0] == found[1]
    assert len(found[0][0]) == 10
    # They are handed numbers of samples as the training asks for them: the speed is measured
    # without the batches of a whole run.
    run = trainer.run(Order(4096, 0), 0, 1 << 40, 8)
    assert [next(run) for _ in range(3)] == [8, 16, 24]


# Orders


def test_seeds_are_the_same_everywhere_and_differ_by_name():
    """Not Python's own hash, which differs from process to process."""
    assert seed_for(0, "branch", 1, 2) == 9194378708319914590
    names = [(s, kind, i) for s in range(3) for kind in ("a", "b") for i in range(3)]
    assert len({seed_for(*name) for name in names}) == len(names)
    assert seed_for(1, 23) != seed_for(12, 3)


@pytest.mark.parametrize("size", [3, 40])
def test_every_epoch_holds_every_sample_once_at_any_batch_size(size):
    order = Order(10, 0, "x")
    parts = [order.take(start, min(size, 40 - start)) for start in range(0, 40, size)]
    epochs = [order.epoch(number) for number in range(4)]
    assert torch.equal(torch.cat(parts), torch.cat(epochs))
    assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist()) == list(range(10))
    assert epochs[0].tolist() != epochs[1].tolist()


# Evaluation and generators


@pytest.mark.parametrize("evaluate", [None, tiny_task.mean])
def test_evaluation_is_in_eval_mode(evaluate):
    def model():
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 1))

    trainer = make_trainer(make_task(make_model=model, evaluate=evaluate))
    list(trainer.run(Order(4096, 0), 0, 80, 4))
    trainer.model[2].eval()  # a part that the user froze stays as it is
    means = trainer.model[1].running_mean.clone()
    found = trainer.evaluate()
    assert [part.training for part in trainer.model.modules()] == [True, True, True, False, True]
    assert torch.equal(trainer.model[1].running_mean, means)
    trainer.model.eval()
    with torch.no_grad():
        expected = tiny_task.mean(trainer.model, trainer.task.valid)
    assert found == pytest.approx(expected, rel=1e-6)  # float32 sums in another order


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_every_generator_is_seeded_for_a_trial_and_evaluating_does_not_disturb_it():
    trainer = make_trainer(make_task(evaluate=lambda model, samples: sum(draws())))
    trainer.seed_everything("branch", 0, 1)
    expected = draws()
    trainer.seed_everything("branch", 0, 1)
    first = trainer.evaluate()
    assert draws() == expected
    assert trainer.evaluate() == first  # and draws the same numbers each time
    trainer.task = make_task(evaluate=lambda *_: tiny_task.boom(draws()))
    trainer.seed_everything("branch", 0, 1)
    with pytest.raises(InputError, match=r"Task\.evaluate"):
        trainer.evaluate()
    assert draws() == expected
    trainer.seed_everything("branch", 0, 2)
    assert all(a != b for a, b in zip(draws(), expected, strict=True))
    make_trainer(seed=1).seed_everything("branch", 0, 1)
    assert all(a != b for a, b in zip(draws(), expected, strict=True))


# Learning rates


OWN = {"warmup_samples": 100, "lr_decay": "linear"}


@pytest.mark.parametrize(
    ("task", "rate", "factors"),
    [
        ({}, Rate(16, factor=0.5), {0: 1.0}),
        # The study's warm-up is from the task's own rate, or from another.
        ({}, Rate(16, warmup_samples=100), {0: 1.0, 50: 1.5, 100: 2.0, 1000: 2.0}),
        ({}, Rate(16, warmup_samples=100, start=0.0), {25: 0.5}),
        # The task's own begins at zero, and is followed by its decay.
        (OWN, Rate(total=1100), {0: 0.0, 50: 0.5, 100: 1.0, 600: 0.5, 1100: 0.0}),
        # A run whose end is not known does not decay.
        (OWN, Rate(), {600: 1.0}),
    ],
)
def test_the_rate_follows_the_rule_and_its_schedule(task, rate, factors):
    """In every group of an optimizer that is handed names and parameters."""

    def make(named, lr):
        assert [name for name, _ in named] == ["0.weight", "0.bias", "3.weight", "3.bias"]
        return torch.optim.SGD([{"params": [p], "lr": lr} for _, p in named])

    made = make_task(make_optimizer=make, optimizer_takes="named_parameters", **task)
    trainer = make_trainer(made)
    for seen, factor in factors.items():
        trainer.set_rate(rate, seen)
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        assert rates == pytest.approx([0.001 * factor] * 4)


@pytest.mark.parametrize("size", [4, 16])
def test_a_step_takes_the_rate_in_the_middle_of_its_batch(size):
    """So that the mean rate over the samples is that of the schedule, whatever the batch size."""
    trainer = make_trainer(make_task(warmup_samples=64, lr_rule="constant"))
    (group,), order = trainer.optimizer.param_groups, Order(4096, 0)
    rates = [group["lr"] for _ in trainer.run(order, 0, 64, size)]
    assert rates[0] == pytest.approx(0.001 * size / 2 / 64)
    assert math.fsum(rates) / len(rates) == pytest.approx(0.0005)
    # What is trained in parts goes on with the schedule.
    next(trainer.run(order, 32, 40, 4))
    assert group["lr"] == pytest.approx(0.001 * 34 / 64)


# Half-lives


@pytest.mark.parametrize("seen", [10, 500])
def test_keep_half_life(seen):
    """Four times the batch forgets and decays as much in a step as the task's own in four."""
    task = make_task(
        make_optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1),
        warmup_samples=100,
        lr_decay="cosine",
    )
    kept, plain = make_trainer(task, keep_half_life=True), make_trainer(task)

    def options(trainer, *size, **rate):
        trainer.set_rate(Rate(*size, total=1000, **rate), seen)
        group = trainer.optimizer.param_groups[0]
        return group["betas"], group["lr"] * group["weight_decay"]

    betas, decay = options(kept)
    assert betas == (0.9, 0.999)
    assert decay == pytest.approx(0.1 * 0.001 * task.lr_factor(seen, 1000))
    for rate in ({}, {"warmup_samples": 300}, {"factor": 8.0}):
        betas, found = options(kept, 16, **rate)
        assert betas == (0.9, pytest.approx(0.999**4, rel=1e-12))
        # In samples the same, during the task's warm-up and decay as well.
        assert found == pytest.approx(4 * decay)
    # At another rate than the task's own, at its own batch size.
    assert options(kept, factor=8.0)[1] == pytest.approx(decay)
    assert options(plain, 16)[0] == (0.9, 0.999)
    assert plain.optimizer.param_groups[0]["weight_decay"] == 0.1


class Lion(torch.optim.SGD):
    """Two betas, neither of them a second moment's."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9)
        self.param_groups[0]["betas"] = (0.9, 0.99)


def checked(make_optimizer):
    trainer = make_trainer(make_task(make_optimizer=make_optimizer), keep_half_life=True)
    trainer.check_task()
    return trainer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adamax, LANS])
def test_the_second_of_two_betas_keeps_its_half_life(kind):
    trainer = checked(kind)
    assert trainer.second_moment
    group = trainer.optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    trainer.set_rate(Rate(4 * trainer.task.batch_size))
    assert group["betas"] == pytest.approx((beta1, beta2**4), rel=1e-12)


def test_other_betas_are_refused_where_it_is_asked_for():
    # Without betas only the weight decay follows.
    assert not checked(torch.optim.SGD).second_moment
    with pytest.raises(InputError, match="keep-half-life"):
        checked(Lion)
    trainer = make_trainer(make_task(make_optimizer=Lion))
    trainer.check_task()
    assert not trainer.second_moment
