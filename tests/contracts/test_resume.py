"""Saving, loading, masters and gradient scalers, for every optimizer of the table."""

import copy
import io

import pytest
import torch

from steadygrad._checks import InputError
from tests.contracts.problems import assert_same, give_gradients, parameters, run, snapshot
from tests.contracts.table import TABLE
from tests.covering import covering

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_optimizer = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def clones(params):
    return [p.detach().clone().requires_grad_() for p in params]


@pytest.mark.few(28)
@covering(entry=TABLE, dtype=DTYPES, stop=[0, 1, 5])
def test_resumes_to_the_bit_from_a_file(entry, dtype, stop):
    params = parameters(dtype)
    optimizer = entry(params)
    run(optimizer, params, range(stop))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = clones(params)
    resumed = entry(others)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert_same(snapshot(optimizer, params), snapshot(resumed, others))
    run(optimizer, params, range(stop, 10))
    run(resumed, others, range(stop, 10))
    assert_same(snapshot(optimizer, params), snapshot(resumed, others))


@pytest.mark.few(7)
@every_optimizer
@pytest.mark.parametrize("way", ["resumed", "skipped"])
def test_the_first_pass_is_the_same_after_a_pause(entry, way):
    """Whatever a tensor's length: the lengths leave every remainder of 16.

    Each tensor is a group, as a group's norm would hide the rounding of one among many.
    """
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=draw).requires_grad_() for n in range(9, 400, 25)]
    others = clones(params)
    optimizer, paused = (entry([{"params": [p]} for p in own]) for own in (params, others))
    run(optimizer, params, range(4))
    run(paused, others, range(4))
    if way == "resumed":
        state = paused.state_dict()
        paused = entry([{"params": [p]} for p in others])
        paused.load_state_dict(state)
    else:
        give_gradients(others, 4)
        for p in others:
            p.grad[0] = torch.inf
        paused.step()
        assert paused.skipped == 1
    run(optimizer, params, range(4, 8))
    run(paused, others, range(4, 8))
    assert_same(snapshot(optimizer, params), snapshot(paused, others))


@every_optimizer
def test_loading_its_own_state_changes_nothing(entry):
    params = parameters(torch.bfloat16)
    optimizer = entry(params)
    run(optimizer, params, range(3))
    before = snapshot(optimizer, params)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(before, snapshot(optimizer, params))
    # A group's record is one tensor again, seen from every parameter.
    assert optimizer.state[params[0]]["skipped"] is optimizer.state[params[2]]["skipped"]


@every_optimizer
def test_a_loaded_state_is_a_copy(entry):
    params, others = parameters(), parameters()
    optimizer, other = entry(params), entry(others)
    run(optimizer, params, range(3))
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    kept = copy.deepcopy(saved)
    run(other, others, range(3, 6))
    for state, expected in zip(saved["state"].values(), kept["state"].values(), strict=True):
        assert_same(state.values(), expected.values())


@every_optimizer
@pytest.mark.parametrize("first", ["named", "unnamed"])
def test_names_may_come_and_go(entry, first):
    params = parameters()
    values = clones(params)
    given = {
        "unnamed": lambda some: some,
        "named": lambda some: [(f"p{i}", p) for i, p in enumerate(some)],
    }
    (second,) = {*given} - {first}
    optimizer, other = entry(given[first](params)), entry(given[second](values))
    run(optimizer, params, range(4))
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(values, params, strict=True):
        p.data.copy_(q)
    run(optimizer, params, range(4, 7))
    run(other, values, range(4, 7))
    assert_same(params, values)


@every_optimizer
def test_the_state_of_another_optimizer_is_refused_and_changes_nothing(entry):
    params = parameters()
    optimizer, adam = entry(params), torch.optim.AdamW(params)
    run(optimizer, params, range(2))
    adam.step()
    before = snapshot(optimizer, params)
    with pytest.raises(InputError, match=r"state_dict|betas"):
        optimizer.load_state_dict(adam.state_dict())
    assert_same(before, snapshot(optimizer, params))
    with pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(entry(params[:2]).state_dict())
    assert_same(before, snapshot(optimizer, params))


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_hold_what_sixteen_bits_cannot(entry, dtype):
    p = torch.full((64,), 1.0, dtype=dtype, requires_grad=True)
    optimizer = entry([p], lr=1e-5)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    # Steps far below the weight's rounding add up in the master only.
    assert torch.equal(p, torch.ones_like(p))
    assert (optimizer.state[p]["master_weight"] < 1).all()


@every_optimizer
def test_masters_follow_loaded_weights_and_survive_a_swap(entry):
    params = parameters(torch.bfloat16)
    optimizer = entry(params)
    run(optimizer, params, range(3))
    masters = [optimizer.state[p]["master_weight"].clone() for p in params]
    weights = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p in params:
            p.zero_()  # the averaged weights are put in for an evaluation
        for p, w in zip(params, weights, strict=True):
            p.copy_(w)  # and taken out again
        params[0][0, 0] = 7.0  # one weight is loaded anew
    twin = clones(params)
    other = entry(twin)
    other.load_state_dict(optimizer.state_dict())
    other.state[twin[0]]["master_weight"][0, 0] = 7.0
    run(optimizer, params, [3])
    run(other, twin, [3])
    assert_same(snapshot(optimizer, params), snapshot(other, twin))
    assert float(params[0].detach()[0, 0]) == pytest.approx(7.0, rel=0.2)
    assert any((m != m.bfloat16()).any() for m in masters)


@every_optimizer
def test_a_grad_scaler_that_found_inf_skips_the_step(entry):
    params = parameters()
    optimizer = entry(params)
    run(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    give_gradients(params, 2)
    # Only the scaler knows: another optimizer's gradients overflowed.
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.tensor(4.0)
    optimizer.step()
    assert_same(before, snapshot(optimizer, params))
    assert optimizer.skipped == 1
    del optimizer.found_inf, optimizer.grad_scale
    run(optimizer, params, [2])
    assert not torch.equal(before[0], params[0])
