"""Refusals while a CUDA graph records; here a test pretends that one does."""

import pytest
import torch

from steadygrad.optim import LANS, checks, skipping
from tests.contracts.problems import assert_same, give_gradients, parameters, run, snapshot

NOT_READY = {
    "a rate on the host, which would be baked in": ({}, {"lr": torch.tensor(0.01)}, "`lr`"),
    "the same of one element": ({"lr": torch.tensor([0.01])}, {}, "`lr`"),
    "a group that is not capturable": ({}, {"capturable": False}, "capturable"),
}


@pytest.mark.parametrize("case", NOT_READY)
def test_a_step_that_is_not_ready_is_refused(case, monkeypatch):
    first, second, name = NOT_READY[case]
    params, now = parameters(), [False]
    for module in (checks, skipping):
        monkeypatch.setattr(module, "is_capturing", lambda: now[0])
    groups = [{"params": params[:2], **first}, {"params": params[2:], **second}]
    optimizer = LANS(groups, capturable=True)
    run(optimizer, params, range(2))
    give_gradients(params, 2)
    before = snapshot(optimizer, params)
    now[0] = True
    with pytest.raises(RuntimeError, match=name):
        optimizer.step()
    assert_same(before, snapshot(optimizer, params))
    # A plain number is meant to hold, once all groups say so.
    for group in optimizer.param_groups:
        group.update(lr=0.01, capturable=True)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3
