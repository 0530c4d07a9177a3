"""Names in another order, and torch's own checkpoints."""

import copy

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.contracts.problems import assert_same, reloaded, run, snapshot

MAKERS = {
    "lamb": lambda params: LAMB(params, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0),
    "scaled_adam": lambda params: ScaledAdam(params, clipping_scale=1.5, clipping_update_period=4),
}


def test_names_in_another_order_are_refused():
    shapes = {"a": (3,), "b": (3,), "c": (2,)}
    named = {name: torch.ones(shape).requires_grad_() for name, shape in shapes.items()}
    optimizer, other = LANS(named.items()), LANS([(name, named[name]) for name in "bac"])
    with pytest.raises(InputError, match=r"'a'.*'b'"):
        optimizer.load_state_dict(other.state_dict())
    groups = [{"params": [(name, named[name])]} for name in "ab"]
    with pytest.raises(InputError, match=r"'b'.*'a'"):
        LANS(groups[::-1]).load_state_dict(LANS(groups).state_dict())
    plain, renamed = LANS(named.values()), LANS([(f"module.{k}", p) for k, p in named.items()])
    # Other names are none in another order, and names may come and go.
    for saved, loads in ((renamed, optimizer), (plain, optimizer), (renamed, plain)):
        saved.state[named["a"]]["step"] += 5
        loads.load_state_dict(reloaded(saved.state_dict()))
        assert loads.state[named["a"]]["step"] == saved.state[named["a"]]["step"]
    assert renamed.state_dict()["param_groups"][0]["param_names"][0] == "module.a"


@pytest.mark.parametrize("kind", [LANS, LAMB, ScaledAdam])
def test_weights_that_were_cast_to_float32_leave_their_masters(kind):
    p = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = kind([p])
    run(optimizer, [p], range(1))
    assert "master_weight" in optimizer.state[p]
    p.grad, p.data = None, torch.zeros(4)
    run(optimizer, [p], range(1))
    assert "master_weight" not in optimizer.state[p]
    # The masters are near one.
    assert (p != 0).all()
    assert p.abs().max() < 0.1


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[1].bfloat16()
    return model


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_the_state_dict_api_moves_no_weight(make, flat):
    """Nor takes it a step, but where there is no state: with zero gradients at a rate of zero."""
    model = network()
    params = [*model.parameters()]
    optimizer = make(params)
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
    run(optimizer, params, range(3), none=False)
    start = snapshot(optimizer, params)
    optimizer.zero_grad()
    optimizer.step = None  # not to be called
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer, options=options))
    del optimizer.step
    optimizer.state.clear()
    dcp.set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert_same(snapshot(optimizer, params), start)
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    run(optimizer, params, range(3), none=False)
    weights = [p.detach().clone() for p in params]
    optimizer.step = None
    dcp.set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert_same([p.detach() for p in params], weights)
    assert all(state["step"] == 3 for state in optimizer.state.values())
