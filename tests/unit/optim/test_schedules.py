"""`WarmupHoldDecay` and `Eden`: ordinary torch schedulers of known shapes."""

import io

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim.schedules import Eden, WarmupHoldDecay
from tests.reference import schedules as reference
from tests.unit.optim.batched_examples import NoHostSync
from tests.unit.optim.schedule_examples import MAKERS, advance, lrs_of, make_optimizer


def test_warmup_hold_decay_is_the_lines_it_is_called_after():
    optimizer = make_optimizer(0.5, 3.0)
    schedule = WarmupHoldDecay(optimizer, 20, warmup=4, hold=5)
    got = advance(optimizer, schedule, 24)
    factors = [reference.lans(t, 20, 4, 5) for t in range(24)]
    assert factors[:5] == [0, 0.25, 0.5, 0.75, 1]
    assert factors[9] == 1 > factors[10]
    assert got == [[pytest.approx(0.5 * f), pytest.approx(3 * f)] for f in factors]
    assert got[20:] == [[0, 0]] * 4  # gluon-nlp's would turn negative here


def test_the_defaults_are_those_of_the_lans_script():
    optimizer = make_optimizer(1.0)
    got = advance(optimizer, WarmupHoldDecay(optimizer, 100), 100)
    assert [lr for (lr,) in got] == pytest.approx(
        [reference.lans(t, 100, 5, 25) for t in range(100)]
    )


def test_an_int_counts_steps_and_a_float_is_a_share():
    one = make_optimizer()
    other = make_optimizer()
    steps = WarmupHoldDecay(one, 40, warmup=10, hold=1)
    shares = WarmupHoldDecay(other, 40, warmup=0.25, hold=0.025)
    assert advance(one, steps, 40) == advance(other, shares, 40)


def test_one_step_and_the_whole_run_are_ints():
    one, all_steps = make_optimizer(1.0), make_optimizer(1.0)
    short = advance(one, WarmupHoldDecay(one, 4, warmup=1, hold=0), 5)
    long = advance(all_steps, WarmupHoldDecay(all_steps, 4, warmup=4, hold=0), 5)
    assert [lr for (lr,) in short] == pytest.approx([0, 1, 2 / 3, 1 / 3, 0])
    assert [lr for (lr,) in long] == pytest.approx([0, 0.25, 0.5, 0.75, 0])


def test_shares_may_be_fractions_of_a_step():
    optimizer = make_optimizer(1.0)
    got = advance(optimizer, WarmupHoldDecay(optimizer, 10, warmup=0.25, hold=0.0), 4)
    assert [lr for (lr,) in got] == pytest.approx([0, 0.4, 0.8, 7 / 7.5])


def test_shares_that_fill_the_run():
    optimizer = make_optimizer(1.0)
    got = advance(optimizer, WarmupHoldDecay(optimizer, 10, warmup=0.1, hold=0.9), 11)
    assert [lr for (lr,) in got] == [0, *[1.0] * 9, 0]


def test_eden_is_icefalls_formula():
    optimizer = make_optimizer(0.04, 0.01)
    schedule = Eden(optimizer, lr_batches=7, lr_epochs=1.5, warmup_batches=10, warmup_start=0.25)
    batch = 0
    for epoch in range(4):
        schedule.step_epoch(epoch)
        for lrs in advance(optimizer, schedule, 6):
            factor = reference.icefall_eden(batch, epoch, 7, 1.5, 10, 0.25)
            assert lrs == pytest.approx([0.04 * factor, 0.01 * factor], rel=1e-14)
            batch += 1


def test_edens_epochs():
    optimizer = make_optimizer(1.0)
    schedule = Eden(optimizer, lr_batches=7, lr_epochs=1.5, warmup_batches=0)
    assert lrs_of(optimizer) == [1.0]
    for epoch, step in [(1, None), (2, None), (0.3, 0.3), (1.3, None)]:
        schedule.step_epoch(step)
        assert schedule.epoch == epoch
        assert lrs_of(optimizer) == [pytest.approx(reference.icefall_eden(0, epoch, 7, 1.5, 0))]
        assert schedule.get_last_lr() == lrs_of(optimizer)
    assert schedule.last_epoch == 0


def test_eden_is_warmed_up_from_construction():
    optimizer = make_optimizer(0.04)
    Eden(optimizer, lr_batches=5000, lr_epochs=6)
    assert lrs_of(optimizer) == [0.02]


@pytest.mark.parametrize("name", MAKERS)
def test_tensor_learning_rates(name):
    floats, optimizer = make_optimizer(0.5), make_optimizer(torch.tensor(0.5, dtype=torch.float64))
    want = advance(floats, MAKERS[name](floats), 22)
    assert advance(optimizer, MAKERS[name](optimizer), 22) == want


@pytest.mark.parametrize("name", MAKERS)
def test_a_tensor_learning_rate_is_written_in_place_and_not_read(name):
    optimizer = make_optimizer(torch.tensor(0.5))
    schedule = MAKERS[name](optimizer)
    optimizer.step()
    lr = optimizer.param_groups[0]["lr"]
    with NoHostSync():
        schedule.step()
        if name == "eden":
            schedule.step_epoch(1)
    assert optimizer.param_groups[0]["lr"] is lr
    with pytest.raises(AssertionError, match="was read"), NoHostSync():
        lr.item()


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_resume_is_exact(name, tensor):
    def make():
        lr = torch.tensor(0.3) if tensor else 0.3
        return make_optimizer(lr, 0.7)

    straight = make()
    want = advance(straight, MAKERS[name](straight), 22)
    optimizer = make()
    schedule = MAKERS[name](optimizer)
    advance(optimizer, schedule, 7)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), schedule.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    optimizer = make()
    schedule = MAKERS[name](optimizer)
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    assert schedule.base_lrs == pytest.approx([0.3, 0.7])
    assert advance(optimizer, schedule, 15) == want[7:]


def test_the_state_holds_base_learning_rates_and_epoch():
    first = make_optimizer(0.5)
    schedule = Eden(first, lr_batches=7, lr_epochs=2)
    schedule.step_epoch(3)
    second = make_optimizer(9.0)
    other = Eden(second, lr_batches=1, lr_epochs=1)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(schedule.state_dict())
    assert (other.base_lrs, other.epoch, other.lr_batches) == ([0.5], 3, 7)
    assert advance(second, other, 5) == advance(first, schedule, 5)


def test_the_counters_of_a_state_alone():
    """The remedy of the warning: new learning rates from the old run's batch on."""
    schedule = Eden(make_optimizer(0.5), lr_batches=7, lr_epochs=2)
    advance(schedule.optimizer, schedule, 5)
    schedule.step_epoch(3)
    state = schedule.state_dict()
    new = Eden(make_optimizer(0.25), lr_batches=7, lr_epochs=2)
    new.load_state_dict({"epoch": state["epoch"], "batch": state["last_epoch"] - 1})
    assert [2 * lr for lr in new.get_last_lr()] == schedule.get_last_lr()


def test_icefalls_own_state():
    """It has counters only."""
    optimizer = make_optimizer(0.5)
    schedule = Eden(optimizer, lr_batches=7, lr_epochs=2)
    optimizer.param_groups[0]["lr"] = 0.001  # as the loaded checkpoint left it
    schedule.load_state_dict({"epoch": 3, "batch": 600})
    # Icefall's loop sets the rate of batch 601 before the next step of its optimizer.
    assert lrs_of(optimizer) == [pytest.approx(0.5 * reference.icefall_eden(601, 3, 7, 2))]
    optimizer.step()
    schedule.step()
    assert lrs_of(optimizer) == [pytest.approx(0.5 * reference.icefall_eden(602, 3, 7, 2))]


def test_going_on_by_last_epoch():
    optimizer = make_optimizer(0.5)
    want = advance(optimizer, MAKERS["lans"](optimizer), 20)
    again = make_optimizer(0.5)
    again.param_groups[0]["initial_lr"] = 0.5
    schedule = WarmupHoldDecay(again, 20, warmup=4, hold=5, last_epoch=6)
    assert advance(again, schedule, 13) == want[7:]


def test_a_group_added_later():
    optimizer = make_optimizer(0.5)
    schedule = Eden(optimizer, lr_batches=7, lr_epochs=2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="zip"):
        schedule.step_epoch(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_steps": 0}, "`total_steps` should be an integer of at least 1"),
        ({"total_steps": 10.0}, "`total_steps` should be an integer"),
        ({"warmup": 1.5}, "`warmup` should be a finite number in \\[0, 1\\)"),
        ({"warmup": 1.0, "hold": 0}, r"an int for steps \(1, or all 10\), a float below 1"),
        ({"warmup": 0, "hold": 1.0}, r"Found `hold = 1.0`. Remedy: an int for steps"),
        ({"warmup": 11}, "`warmup` should be a finite number in \\[0, 10\\]"),
        ({"hold": -1}, "`hold` should be"),
        ({"hold": True}, "`hold` should be"),
        ({"warmup": 0.5, "hold": 6}, "together take at most 10 steps. Found 5 \\+ 6"),
    ],
)
def test_bad_lengths(arguments, message):
    with pytest.raises(InputError, match=message):
        WarmupHoldDecay(make_optimizer(), **{"total_steps": 10, **arguments})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"lr_batches": 0}, "lr_batches"),
        ({"lr_epochs": -1.0}, "lr_epochs"),
        ({"warmup_batches": float("nan")}, "warmup_batches"),
        ({"warmup_start": 1.5}, "warmup_start"),
    ],
)
def test_bad_scales(arguments, name):
    with pytest.raises(InputError, match=f"`{name}` should be a finite number"):
        Eden(make_optimizer(), **{"lr_batches": 5, "lr_epochs": 2, **arguments})


def test_bad_epoch_and_bad_optimizer():
    schedule = Eden(make_optimizer(), lr_batches=5, lr_epochs=2)
    for name in ("epoch", "batch"):
        with pytest.raises(InputError, match=f"`{name}` should be a finite number in \\[0"):
            getattr(schedule, f"step_{name}")(-1)
    with pytest.raises(TypeError, match="list is not an Optimizer"):
        Eden([], lr_batches=5, lr_epochs=2)


@pytest.mark.parametrize(
    ("total", "warmup", "hold"), [(40, 10, 10), (40, 0, 10), (40, 10, 0), (40, 0, 0), (7, 3, 4)]
)
def test_the_factor_of_warmup_hold_decay(total, warmup, hold):
    optimizer = make_optimizer(1.0)
    schedule = WarmupHoldDecay(optimizer, total, warmup=warmup, hold=hold)
    got = [factor for (factor,) in advance(optimizer, schedule, total + 3)]
    want = [reference.lans(t, total, warmup, hold) for t in range(total + 3)]
    assert got == pytest.approx(want, rel=1e-15)  # one rounding
    assert max(got) == 1
    assert got[total:] == [0, 0, 0]


def eden(batch, epoch, **scales):
    """The factor after so many batches and epochs."""
    optimizer = make_optimizer(1.0)
    schedule = Eden(optimizer, **scales)
    schedule.step_epoch(epoch)
    schedule.step_batch(batch)
    return lrs_of(optimizer)[0]


@pytest.mark.parametrize("warmup", [0, 1, 500])
@pytest.mark.parametrize("epoch", [0, 0.5, 30])
@pytest.mark.parametrize("batch", [0, 1, 250, 499, 500, 100_000])
def test_the_factor_of_eden(batch, epoch, warmup):
    scales = {"lr_batches": 5000, "lr_epochs": 3.5}
    got = eden(batch, epoch, **scales, warmup_batches=warmup)
    want = reference.icefall_eden(batch, epoch, **scales, warmup_batches=warmup)
    assert got == pytest.approx(want, rel=1e-14)  # roots by another road


def test_eden_far_out_is_an_inverse_square_root():
    scales = {"lr_batches": 100, "lr_epochs": 1, "warmup_batches": 0, "warmup_start": 0}
    assert eden(1e8, 0, **scales) == pytest.approx(1e-3, rel=1e-9)
    assert eden(0, 1e6, **scales) == pytest.approx(1e-3, rel=1e-9)
