"""`WarmupHoldDecay` and `Eden`: ordinary torch schedulers of known shapes."""

from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from steadygrad._checks import InputError
from steadygrad.optim.schedules import Eden, WarmupHoldDecay
from tests.contracts.problems import Watch, reloaded
from tests.reference import schedules as reference

MAKERS = {
    "lans": lambda o: WarmupHoldDecay(o, 20, warmup=4, hold=5),
    "eden": lambda o: Eden(o, lr_batches=6, lr_epochs=2, warmup_batches=3),
}
every_schedule = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def make_optimizer(*lrs):
    """An optimizer with nothing to do."""
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


# Lengths as they are given, and in steps; none: those of the LANS script.
LENGTHS = [
    (20, {"warmup": 4, "hold": 5}, (4, 5)),
    (40, {"warmup": 0, "hold": 10}, (0, 10)),
    (7, {"warmup": 3, "hold": 4}, (3, 4)),
    (100, {}, (5, 25)),
    # An int counts steps, a float is a share, also of fractions of a step.
    (4, {"warmup": 1, "hold": 0}, (1, 0)),
    (40, {"warmup": 0.25, "hold": 0.025}, (10, 1)),
    (10, {"warmup": 0.25, "hold": 0.0}, (2.5, 0)),
    (10, {"warmup": 0.7, "hold": 0.3}, (7, 3)),
]


@pytest.mark.parametrize(("total", "given", "steps"), LENGTHS, ids=str)
def test_warmup_hold_decay_is_the_lines_it_is_called_after(total, given, steps):
    optimizer = make_optimizer(1.0, 3.0)
    got = advance(optimizer, WarmupHoldDecay(optimizer, total, **given), total + 3)
    want = [reference.lans(t, total, *map(Fraction, steps)) for t in range(total + 3)]
    assert [one for one, _ in got] == pytest.approx(want, rel=1e-14, abs=1e-15)
    assert [other for _, other in got] == pytest.approx([3 * x for x in want], abs=1e-14)
    assert got[total:] == [[0, 0]] * 3  # gluon-nlp's would turn negative here


@every_schedule
def test_follows_another_in_a_sequence(make):
    alone, optimizer = make_optimizer(), make_optimizer()
    want = advance(alone, make(alone), 10)
    parts = [lr_scheduler.ConstantLR(optimizer, factor=0.125, total_iters=99), make(optimizer)]
    sequence = lr_scheduler.SequentialLR(optimizer, parts, milestones=[10])
    assert advance(optimizer, sequence, 20)[10:] == want


@pytest.mark.parametrize("warmup", [0, 500])
@pytest.mark.parametrize("epoch", [0, 0.5])
@pytest.mark.parametrize("batch", [0, 250, 499, 500, 10**8])
def test_eden_is_icefalls_formula(batch, epoch, warmup):
    optimizer = make_optimizer(1.0, 0.25)
    schedule = Eden(optimizer, lr_batches=5000, lr_epochs=3.5, warmup_batches=warmup)
    schedule.step_epoch(epoch)
    schedule.step_batch(batch)
    want = reference.icefall_eden(batch, epoch, 5000, 3.5, warmup)
    assert lrs_of(optimizer) == pytest.approx([want, want / 4], rel=1e-14)  # roots by another road
    assert schedule.get_last_lr() == lrs_of(optimizer)


def test_edens_batches_and_epochs_are_counted():
    optimizer = make_optimizer(0.04)
    # Warmed up from construction on.
    Eden(optimizer, lr_batches=5000, lr_epochs=6)
    assert lrs_of(optimizer) == [0.02]
    optimizer = make_optimizer(0.04)
    scales = {"lr_batches": 7, "lr_epochs": 1.5, "warmup_batches": 10, "warmup_start": 0.25}
    schedule = Eden(optimizer, **scales)
    for batch, (epoch, given) in enumerate([(1, None), (2, None), (0.3, 0.3), (1.3, None)]):
        schedule.step_epoch(given)
        assert (schedule.epoch, schedule.last_epoch) == (epoch, batch)
        factor = reference.icefall_eden(batch, epoch, **scales)
        assert advance(optimizer, schedule, 1) == [[pytest.approx(0.04 * factor, rel=1e-14)]]


@every_schedule
def test_a_tensor_learning_rate_is_the_same_written_in_place_and_not_read(make):
    floats, optimizer = make_optimizer(0.5), make_optimizer(torch.tensor(0.5, dtype=torch.float64))
    want = advance(floats, make(floats), 22)
    lr, schedule = optimizer.param_groups[0]["lr"], make(optimizer)
    assert advance(optimizer, schedule, 22) == want
    with Watch() as watch:
        schedule.step()
        if isinstance(schedule, Eden):
            schedule.step_epoch(1)
    assert watch.waits == []
    assert optimizer.param_groups[0]["lr"] is lr


OTHERS = {"lans": lambda o: WarmupHoldDecay(o, 9), "eden": lambda o: Eden(o, 1, 1)}


@pytest.mark.parametrize(
    ("name", "kind", "other"), [("lans", torch.tensor, float), ("eden", float, torch.tensor)]
)
def test_resume_is_exact(name, kind, other):
    """From a file, which holds the base rates and all scales; as tensors or numbers."""

    def advanced(steps):
        optimizer = make_optimizer(kind(0.3), 0.7)
        schedule = MAKERS[name](optimizer)
        if name == "eden":
            schedule.step_epoch(3)
        return optimizer, schedule, advance(optimizer, schedule, steps)

    want = advanced(22)[-1]
    optimizer, schedule, _ = advanced(7)
    saved = reloaded([optimizer.state_dict(), schedule.state_dict()])
    optimizer = make_optimizer(other(9.0), 9.0)
    schedule = OTHERS[name](optimizer)
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    assert schedule.base_lrs == pytest.approx([0.3, 0.7])
    assert advance(optimizer, schedule, 15) == want[7:]


def test_a_state_without_its_count_is_refused():
    schedule = WarmupHoldDecay(make_optimizer(0.3), 10)
    state = schedule.state_dict()
    for name in ("last_epoch", "base_lrs", "total_steps"):
        with pytest.raises(InputError, match=name):
            schedule.load_state_dict({key: x for key, x in state.items() if key != name})


def test_counters_alone_are_icefalls_own_state():
    optimizer = make_optimizer(0.5)
    schedule = Eden(optimizer, lr_batches=7, lr_epochs=2)
    optimizer.param_groups[0]["lr"] = 0.001  # as the loaded checkpoint left it
    schedule.load_state_dict({"epoch": 3, "batch": 600})
    # Icefall's loop sets the rate of batch 601 before the next step of its optimizer.
    want = [[pytest.approx(0.5 * reference.icefall_eden(n, 3, 7, 2))] for n in (601, 602)]
    assert advance(optimizer, schedule, 2) == want


WRONG = [
    (WarmupHoldDecay, {"total_steps": 0}, "total_steps"),
    (WarmupHoldDecay, {"warmup": 1.0, "hold": 0}, "warmup"),
    (WarmupHoldDecay, {"warmup": 11}, "warmup"),
    (WarmupHoldDecay, {"hold": -1}, "hold"),
    (WarmupHoldDecay, {"warmup": 0.5, "hold": 6}, r"5 \+ 6"),
    (Eden, {"lr_batches": 0}, "lr_batches"),
    (Eden, {"warmup_batches": float("nan")}, "warmup_batches"),
    (Eden, {"warmup_start": 1.5}, "warmup_start"),
]


@pytest.mark.parametrize(("kind", "arguments", "name"), WRONG, ids=str)
def test_bad_lengths_and_scales(kind, arguments, name):
    own = {WarmupHoldDecay: {"total_steps": 10}, Eden: {"lr_batches": 5, "lr_epochs": 2}}[kind]
    with pytest.raises(InputError, match=name):
        kind(make_optimizer(), **{**own, **arguments})
