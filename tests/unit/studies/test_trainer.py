"""The training loop: micro-batches, generators, learning rates, states."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Branch, Noise, Point, Scratch
from steadygrad.studies.advise.trials import TRIALS, noise
from steadygrad.studies.calibration import calibrate
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.folder import read_run
from steadygrad.studies.learning_rate import Rate
from steadygrad.studies.order import Order, main_order
from steadygrad.studies.work import work_on, workplace
from steadygrad.studies.workplace import Workplace
from steadygrad.tasks import TensorSamples
from tests.unit.studies import tiny_task
from tests.unit.studies.framework import (
    PLAN,
    begin,
    make_trainer,
)
from tests.unit.studies.results import RUNTIME, changed, make_header
from tests.unit.studies.tiny_task import make_task, without_dropout


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def gradients(trainer, indices):
    trainer.model.zero_grad()
    loss = trainer.backward(indices)
    return float(loss), [parameter.grad.clone() for parameter in trainer.model.parameters()]


def worst(one, two):
    return max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True))


# Micro-batches


@pytest.mark.parametrize("micro", [1, 5, 8, 23])
def test_micro_batches_give_the_gradient_of_the_whole_batch(micro):
    """Five of 24 leaves a ragged micro-batch of four, 23 one of one."""
    indices = Order(4096, 0, "here").take(0, 24)
    whole = gradients(make_trainer(without_dropout(), dtype="float64"), indices)
    split = make_trainer(without_dropout(), dtype="float64", micro_batch_size=micro)
    found = gradients(split, indices)
    # float64 sums of 24 numbers near one, in another order.
    assert found[0] == pytest.approx(whole[0], abs=1e-14)
    assert worst(found[1], whole[1]) < 1e-14


@pytest.mark.parametrize("micro", [3, 8])
def test_a_run_with_micro_batches_is_the_run_without(micro):
    runs = []
    for size in (None, micro):
        trainer = make_trainer(without_dropout(), dtype="float64", micro_batch_size=size)
        trainer.restart()
        list(trainer.run(main_order(4096, 0), 0, 400, 20))
        runs.append((weights(trainer), trainer.take_losses(), trainer.evaluate()))
    # Rounding of 20 steps; Adam divides by small second moments.
    assert worst(runs[0][0], runs[1][0]) < 1e-12
    assert runs[0][1] == pytest.approx(runs[1][1], abs=1e-12)
    assert len(runs[0][1]) == 20
    assert runs[0][2] == pytest.approx(runs[1][2], abs=1e-12)


def measured(trainer, folder):
    """The noise scale at the first point of the hand-made plan."""
    place = Workplace(trainer, Checkpoints(folder), lambda samples, what: None)
    return noise(PLAN, place, 0)


def test_the_task_bounds_the_micro_batch(tmp_path):
    seen = []

    def watched(model, batch):
        seen.append(len(batch[0]))
        return tiny_task.losses(model, batch)

    trainer = make_trainer(make_task(per_sample_loss=watched, micro_batch_size=6, batch_size=16))
    trainer.check_task()
    trainer.fit_micro_batch(64)
    assert trainer.micro_batch_size == 6
    seen.clear()
    trainer.step(torch.arange(16))
    trainer.evaluate()
    # 16 of training; 64 of validation; and twice 126 of 128, the most whole micro-batches.
    assert seen == [6, 6, 4] + [6] * 10 + [4]
    assert measured(trainer, tmp_path).samples == 252
    assert seen[-43:] == [4] + [6] * 42


def test_out_of_memory_halves_the_micro_batch():
    trainer = make_trainer(replace(tiny_task.out_of_memory(), batch_size=64))
    trainer.check_task()
    assert trainer.micro_batch_size == 16
    trainer.fit_micro_batch(100)
    # 100, 50, 25 do not fit.
    assert trainer.micro_batch_size == 12
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_one_sample_that_does_not_fit_is_the_end():
    def never(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer = make_trainer(make_task(per_sample_loss=never))
    with pytest.raises(InputError, match="OutOfMemoryError: CUDA out of memory"):
        trainer.fit_micro_batch(8)


def test_a_loss_that_is_not_finite_in_the_largest_batch_is_seen_before_training():
    x, y = make_task().train.batch(torch.arange(4096))
    y[40] = math.nan
    trainer = make_trainer(make_task(train=TensorSamples((x, y))))
    trainer.check_task()
    trainer.fit_micro_batch(32)
    with pytest.raises(InputError, match=r"one finite.*Found 1 .*NaN in the data"):
        trainer.fit_micro_batch(64)


def test_an_error_in_the_backward_pass_of_a_measurement_is_the_tasks(tmp_path):
    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx, losses):
            return losses.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer = make_trainer()
    measured(trainer, tmp_path)
    trainer.task = make_task(per_sample_loss=lambda m, b: Full.apply(tiny_task.losses(m, b)))
    with pytest.raises(InputError, match=r"The backward pass .*out of memory"):
        measured(trainer, tmp_path)


def test_memory_that_runs_out_in_a_job_changes_this_job_only(tmp_path, monkeypatch):
    """The next job starts with the run's micro-batch again: its numbers are the same anywhere."""
    sizes = []

    def hungry(plan, place, samples):
        sizes.append(place.trainer.micro_batch_size)
        place.trainer.backward(torch.arange(samples))
        return Point(point=0, samples=4, steps=1, valid_loss=1.0)

    monkeypatch.setitem(TRIALS, "point", hungry)
    trainer = make_trainer(tiny_task.out_of_memory(), micro_batch_size=64)
    header = make_header(runtime=changed(RUNTIME, micro_batch_size=64))
    place = workplace(header, {}, tmp_path, trainer)
    for samples in (60, 8):
        work_on({"kind": "point", "samples": samples}, place)
    assert sizes == [64, 32, 16, 64]


def test_memory_that_runs_out_while_the_speed_is_measured_halves_the_micro_batch():
    trainer = make_trainer(tiny_task.little_memory(), micro_batch_size=4)
    assert calibrate(trainer, workers=1, threads=1, budget=1e3)[0] > 0
    assert (trainer.micro_batch_size, trainer.steps) == (2, 0)


@pytest.mark.slow
def test_a_study_that_runs_out_of_memory_ends_with_an_answer(tmp_path):
    """Every batch is split, and all numbers but the noise scale's are those of whole batches."""
    tight, _ = begin(tmp_path / "tight", "little_memory", at=None)
    begin(tmp_path / "roomy", "without_dropout", at=None)
    assert tight.summary.status == "complete"
    assert tight.summary.recommendation.samples == 256
    one, two = (read_run(tmp_path / name) for name in ("tight", "roomy"))
    assert (one.header.runtime.micro_batch_size, two.header.runtime.micro_batch_size) == (2, 16)
    assert [e.steps for e in one.select(Branch)] == [e.steps for e in two.select(Branch)]
    for kind, name in ((Point, "valid_loss"), (Branch, "loss"), (Scratch, "loss")):
        losses = [[getattr(event, name) for event in run.select(kind)] for run in (one, two)]
        # float32 sums in another order, over at most 64 steps.
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    used = [[event.samples for event in run.select(Noise)] for run in (one, two)]
    assert used[0] == used[1] == [64, 64]


# Evaluation and generators


@pytest.mark.parametrize("own", [False, True], ids=["mean loss", "Task.evaluate"])
def test_evaluation_is_in_eval_mode(own):
    modes = []

    def evaluate(model, samples):
        modes.append([module.training for module in model.modules()])
        return float(tiny_task.losses(model, samples.batch(torch.arange(len(samples)))).mean())

    def model():
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 1))

    trainer = make_trainer(make_task(make_model=model, evaluate=evaluate if own else None))
    list(trainer.run(main_order(4096, 0), 0, 80, 4))
    trainer.model[2].eval()  # a part that the user froze stays as it is
    means = trainer.model[1].running_mean.clone()
    found = trainer.evaluate()
    assert [part.training for part in trainer.model.modules()] == [True, True, True, False, True]
    features, targets = trainer.task.valid.batch(torch.arange(64))
    trainer.model.eval()
    with torch.no_grad():
        expected = float((trainer.model(features) - targets).square().mean())
    assert found == pytest.approx(expected, rel=1e-6)  # float32 sums in another order
    assert modes == ([[False] * 5] if own else [])
    assert torch.equal(trainer.model[1].running_mean, means)


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_every_generator_is_seeded_for_a_trial():
    trainer = make_trainer()
    trainer.seed_everything("branch", 0, 1)
    first = draws()
    trainer.seed_everything("branch", 0, 1)
    assert draws() == first
    trainer.seed_everything("branch", 0, 2)
    assert all(a != b for a, b in zip(draws(), first, strict=True))
    make_trainer(seed=1).seed_everything("branch", 0, 1)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_evaluating_does_not_disturb_any_generator():
    def evaluate(model, samples):
        return sum(draws())

    trainer = make_trainer(make_task(evaluate=evaluate))
    trainer.seed_everything("before")
    expected = draws()
    trainer.seed_everything("before")
    first = trainer.evaluate()
    assert draws() == expected
    assert trainer.evaluate() == first  # and draws the same numbers each time
    trainer.task = make_task(evaluate=lambda *_: tiny_task.boom(draws()))
    trainer.seed_everything("before")
    with pytest.raises(InputError, match=r"Task\.evaluate should run"):
        trainer.evaluate()
    assert draws() == expected


def test_targets_keep_their_type():
    """1001 is not a bfloat16 number."""
    seen = []

    def watched(model, batch):
        features, targets = batch
        seen.append((features.dtype, targets.dtype, float(targets[0])))
        return (model(features.to(torch.bfloat16)).float() - targets).square().mean(dim=1)

    data = TensorSamples((torch.randn(64, 8), torch.full((64, 1), 1001.0)))
    trainer = make_trainer(
        make_task(
            make_model=lambda: nn.Linear(8, 1).to(torch.bfloat16),
            per_sample_loss=watched,
            train=data,
            valid=data,
        )
    )
    trainer.step(torch.arange(4))
    trainer.evaluate()
    assert set(seen) == {(torch.float32, torch.float32, 1001.0)}


# Learning rates


def rate_of(trainer):
    return trainer.optimizer.param_groups[0]["lr"]


def test_the_rate_follows_the_rule_and_warms_up_from_the_tasks_own():
    trainer = make_trainer()
    trainer.set_rate(Rate(batch_size=16, factor=0.5))
    assert rate_of(trainer) == pytest.approx(0.001 * 2 * 0.5)
    for seen, factor in ((0, 1.0), (50, 1.5), (100, 2.0), (1000, 2.0)):
        trainer.set_rate(Rate(batch_size=16, warmup_samples=100), seen)
        assert rate_of(trainer) == pytest.approx(0.001 * factor)
    trainer.set_rate(Rate(batch_size=16, warmup_samples=100, start=0.0), 25)
    assert rate_of(trainer) == pytest.approx(0.001 * 0.5)


def test_the_tasks_own_warm_up_and_decay():
    task = make_task(warmup_samples=100, lr_decay="linear")
    trainer = make_trainer(task)
    for seen, factor in ((0, 0.0), (50, 0.5), (100, 1.0), (600, 0.5), (1100, 0.0)):
        trainer.set_rate(Rate(total=1100), seen)
        assert rate_of(trainer) == pytest.approx(0.001 * factor)
    trainer.set_rate(Rate(), 600)  # a run whose end is not known does not decay
    assert rate_of(trainer) == pytest.approx(0.001)


@pytest.mark.parametrize("size", [4, 16])
def test_a_step_takes_the_rate_in_the_middle_of_its_batch(size):
    """So that the mean rate over the samples is that of the schedule, whatever the batch size."""
    trainer = make_trainer(make_task(warmup_samples=64, lr_rule="constant"))
    rates = []
    for _ in trainer.run(main_order(4096, 0), 0, 64, size):
        rates.append(rate_of(trainer))
    assert rates[0] == pytest.approx(0.001 * size / 2 / 64)
    assert math.fsum(rates) / len(rates) == pytest.approx(0.0005)


def test_a_branch_goes_on_with_the_schedule():
    trainer = make_trainer(make_task(warmup_samples=400))
    next(trainer.run(main_order(4096, 0), 0, 8, 4, seen=200))
    assert rate_of(trainer) == pytest.approx(0.001 * 202 / 400)


def group_of(trainer):
    group = trainer.optimizer.param_groups[0]
    return group["betas"], group["lr"] * group["weight_decay"]


@pytest.mark.parametrize("seen", [10, 100, 500])
def test_keep_half_life(seen):
    """Four times the batch forgets and decays as much in a step as the task's own in four."""
    task = make_task(
        make_optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1),
        warmup_samples=100,
        lr_decay="cosine",
    )
    trainer = make_trainer(task, keep_half_life=True)
    trainer.set_rate(Rate(total=1000), seen)
    (beta1, beta2), decay = group_of(trainer)
    assert (beta1, beta2) == (0.9, 0.999)
    assert decay == pytest.approx(0.1 * 0.001 * task.lr_factor(seen, 1000))
    for rate in (Rate(16, total=1000), Rate(16, total=1000, warmup_samples=300)):
        trainer.set_rate(rate, seen)
        assert group_of(trainer)[0] == (0.9, pytest.approx(0.999**4, rel=1e-12))
        # In samples the same, during the task's warm-up and decay as well.
        assert group_of(trainer)[1] == pytest.approx(4 * decay)
    plain = make_trainer(task)
    plain.set_rate(Rate(16, total=1000), seen)
    assert group_of(plain)[0] == (0.9, 0.999)
    assert plain.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_named_parameters_reach_the_optimizer():
    names = []

    def make(named, lr):
        names[:] = [name for name, _ in named]
        return torch.optim.SGD([{"params": [p], "lr": lr} for _, p in named])

    trainer = make_trainer(make_task(make_optimizer=make, optimizer_takes="named_parameters"))
    assert names == ["0.weight", "0.bias", "3.weight", "3.bias"]
    trainer.set_rate(Rate(batch_size=16))
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates == pytest.approx([0.002] * 4)


# States


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_checkpoint_keeps_every_bit(tmp_path, dtype):
    one, two = make_trainer(dtype=dtype), make_trainer(dtype=dtype)
    order = main_order(4096, 0)
    list(one.run(order, 0, 80, 4))
    Checkpoints(tmp_path, "mine").save("here", one.state(80))
    assert Checkpoints(tmp_path, "mine").load("here", 81) is None
    assert Checkpoints(tmp_path, "another").load("here", 80) is None
    two.load(Checkpoints(tmp_path, "mine").load("here", 80))
    assert two.scaler.get_scale() == one.scaler.get_scale()
    rest = []
    for trainer in (one, two):
        trainer.take_losses()
        trainer.seed_everything("rest")
        list(trainer.run(order, 80, 160, 4))
        rest.append(trainer.take_losses())
    assert rest[0] == rest[1]
    assert len(rest[0]) == 20
    assert one.steps == two.steps == 40
    assert worst(weights(one), weights(two)) == 0.0


def test_a_state_is_a_copy_on_the_host():
    trainer = make_trainer()
    list(trainer.run(main_order(4096, 0), 0, 8, 4))
    state = trainer.state(8)
    before = state.model["0.weight"].clone()
    moment = state.optimizer["state"][0]["exp_avg"].clone()
    list(trainer.run(main_order(4096, 0), 8, 16, 4))
    assert torch.equal(state.model["0.weight"], before)
    assert torch.equal(state.optimizer["state"][0]["exp_avg"], moment)
    assert not torch.equal(trainer.model[0].weight, before)
    assert state.model["0.weight"].device.type == "cpu"
    assert (state.samples, state.steps) == (8, 2)
    trainer.load(state)
    assert torch.equal(trainer.model[0].weight, before)


def test_each_repeat_has_weights_of_its_own():
    trainer = make_trainer()
    first = weights(trainer)
    list(trainer.run(main_order(4096, 0), 0, 8, 4))
    trainer.restart(1)
    second = weights(trainer)
    trainer.restart()
    assert worst(weights(trainer), first) == 0.0
    assert worst(second, first) > 0.01
    assert trainer.steps == 0
    assert trainer.optimizer.state_dict()["state"] == {}


def test_a_lazy_model_is_refused_with_the_remedy():
    lazy = make_task(make_model=lambda: nn.Sequential(nn.LazyLinear(1)))
    with pytest.raises(InputError, match=r"lazy parameters.*Remedy.*one batch through it"):
        make_trainer(lazy)


@pytest.mark.parametrize("micro", [None, 3])
def test_worker_processes_that_make_batches_change_no_number(micro):
    found = []
    for workers in (0, 2):
        trainer = make_trainer(make_task(loader_workers=workers), micro_batch_size=micro)
        trainer.seed_everything("run")
        list(trainer.run(main_order(4096, 0), 0, 80, 8))
        found.append((trainer.take_losses(), trainer.evaluate(), draws()))
    assert found[0] == found[1]
    assert len(found[0][0]) == 10


def test_the_speed_is_measured_without_making_all_batches_of_a_run():
    """Worker processes are handed numbers of samples as the training asks for them."""
    trainer = make_trainer(make_task(loader_workers=1))
    run = trainer.run(main_order(4096, 0), 0, 1 << 40, 8)
    assert [next(run) for _ in range(3)] == [8, 16, 24]


def test_a_loss_that_is_not_finite_is_said_with_the_remedy():
    trainer = make_trainer(tiny_task.diverging())
    with pytest.raises(InputError, match=r"training loss should stay finite.*lower Task.lr"):
        list(trainer.run(main_order(4096, 0), 0, 400, 4))
