"""Refusals while a CUDA graph records; here a test pretends that one does."""

import pytest
import torch

from steadygrad.optim import checks, skipping
from tests.contracts.problems import assert_same, give_gradients, parameters, run, snapshot
from tests.contracts.table import OPTIMIZERS

every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)


@pytest.fixture
def capturing(monkeypatch):
    now = [False]
    for module in (checks, skipping):
        monkeypatch.setattr(module, "is_capturing", lambda: now[0])
    return now


@every_optimizer
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_rate_on_the_host_would_be_baked_in(entry, shape, capturing):
    params = parameters()
    optimizer = entry(params, lr=torch.full(shape, 0.01), capturable=True)
    run(optimizer, params, range(2))
    give_gradients(params, 2)
    before = snapshot(optimizer, params)
    capturing[0] = True
    message = r"`lr` on the device.*present value all replays would use.*lr\.cuda\(\)"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_same(before, snapshot(optimizer, params))
    capturing[0] = False
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3


@every_optimizer
def test_a_group_that_is_not_capturable_is_refused(entry, capturing):
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "capturable": False}]
    optimizer = entry(groups, capturable=True)
    run(optimizer, params, range(2))
    give_gradients(params, 2)
    before = snapshot(optimizer, params)
    capturing[0] = True
    message = rf"capturable=True.*{entry.make.__name__}\(\.\.\., capturable=True\)"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_same(before, snapshot(optimizer, params))
    # A plain number is meant to hold, once all groups say so.
    optimizer.param_groups[1]["capturable"] = True
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3
