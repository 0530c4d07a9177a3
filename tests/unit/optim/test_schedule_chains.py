"""The schedules together with torch's own, in sequences."""

import pytest
from torch.optim import lr_scheduler as torch_schedules

from steadygrad.optim.schedules import WarmupHoldDecay
from tests.unit.optim.schedule_examples import MAKERS, advance, make_optimizer


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
