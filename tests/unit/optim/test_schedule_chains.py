"""The schedules together with torch's own, in sequences and in chains."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from steadygrad.optim.schedules import WarmupHoldDecay
from tests.unit.optim.schedule_examples import MAKERS, advance, lrs_of, make_optimizer


def test_coincides_with_torchs_own_pieces():
    ours, theirs = make_optimizer(), make_optimizer()
    got = advance(ours, WarmupHoldDecay(ours, 20, warmup=4, hold=5), 22)
    pieces = [
        torch_schedules.LambdaLR(theirs, lambda t: t / 4),
        torch_schedules.ConstantLR(theirs, factor=1.0),
        torch_schedules.LinearLR(theirs, start_factor=1.0, end_factor=0.0, total_iters=11),
    ]
    sequence = torch_schedules.SequentialLR(theirs, pieces, milestones=[4, 9])
    want = advance(theirs, sequence, 22)
    # LinearLR multiplies step by step: its rounding adds up.
    assert [lr for (lr,) in got] == pytest.approx([lr for (lr,) in want], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("name", MAKERS)
def test_takes_its_turn_in_a_sequence(name, position):
    alone, optimizer = make_optimizer(0.5), make_optimizer(0.5)
    want = advance(alone, MAKERS[name](alone), 10)
    parts = [torch_schedules.ConstantLR(optimizer, factor=0.125, total_iters=99)]
    parts.insert(position, MAKERS[name](optimizer))
    sequence = torch_schedules.SequentialLR(optimizer, parts, milestones=[10])
    got = advance(optimizer, sequence, 20)
    assert got[10 * position :][:10] == want


@pytest.mark.parametrize("tensor", [False, True])
def test_chains_with_schedules_that_multiply(tensor):
    lr = torch.tensor(0.5, dtype=torch.float64) if tensor else 0.5
    alone, optimizer = make_optimizer(0.5), make_optimizer(lr)
    want = [lr for (lr,) in advance(alone, MAKERS["eden"](alone), 12)]
    chain = torch_schedules.ChainedScheduler(
        [
            MAKERS["eden"](optimizer),
            torch_schedules.ConstantLR(optimizer, factor=0.25, total_iters=8),
            torch_schedules.ExponentialLR(optimizer, gamma=0.5),
        ]
    )
    got = [lr for (lr,) in advance(optimizer, chain, 12)]
    outside = [(0.25 if t < 8 else 1.0) * 0.5**t for t in range(12)]
    assert got == pytest.approx([w * o for w, o in zip(want, outside, strict=True)], rel=1e-13)


def test_a_chain_resumes_exactly():
    def make():
        optimizer = make_optimizer(0.3)
        parts = [MAKERS["eden"](optimizer), torch_schedules.ExponentialLR(optimizer, gamma=0.7)]
        return optimizer, torch_schedules.ChainedScheduler(parts)

    want = advance(*make(), 12)
    optimizer, chain = make()
    advance(optimizer, chain, 5)
    saved = copy.deepcopy((optimizer.state_dict(), chain.state_dict()))
    optimizer, chain = make()
    optimizer.load_state_dict(saved[0])
    chain.load_state_dict(saved[1])
    assert advance(optimizer, chain, 7) == want[5:]


def test_a_learning_rate_changed_by_hand_stays_changed():
    alone, optimizer = make_optimizer(0.5), make_optimizer(0.5)
    want = advance(alone, MAKERS["eden"](alone), 8)
    schedule = MAKERS["eden"](optimizer)
    advance(optimizer, schedule, 4)
    optimizer.param_groups[0]["lr"] *= 0.5
    assert advance(optimizer, schedule, 4) == [[lr * 0.5] for (lr,) in want[4:]]
    optimizer.param_groups[0]["lr"] = 0.0  # no factor leads back from here: it is not kept
    schedule.step()
    assert lrs_of(optimizer)[0] > 0
