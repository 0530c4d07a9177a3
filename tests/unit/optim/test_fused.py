"""Compiled loops find every tensor where it lies now, and leave alone what they cannot take."""

import gc
import weakref

import pytest
import torch

from steadygrad.optim import LAMB, LANS, ScaledAdam, loops
from steadygrad.optim import scaled_adam_rule as scaled_adam
from tests.contracts.problems import assert_rounded_alike

MAKERS = {
    "lans": LANS,
    "lamb": lambda p, **k: LAMB(p, max_grad_norm=1.0, **k),
    "scaled_adam": lambda p, **k: ScaledAdam(p, clipping_scale=2.0, **k),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def start(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in ((6, 5), (7,), ())]


def fill(params, step):
    draw = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)


def pair(make, dtype=torch.float32):
    """The same problem by compiled loops and by calls, to be changed alike."""
    ours, theirs = start(dtype), start(dtype)
    return (ours, make(ours, fused=True)), (theirs, make(theirs, foreach=True))


def steps(both, numbers, change=None):
    for step in numbers:
        for params, optimizer in both:
            fill(params, step)
            if change is not None:
                change(params, optimizer, step)
            optimizer.step()


def assert_close(both):
    (_, one), (_, two) = both
    assert_rounded_alike(one, two)


def move_weight(params, optimizer):
    params[0].data = params[0].detach().clone()


def move_state(params, optimizer):
    state = optimizer.state[params[0]]
    state["exp_avg_sq"] = torch.full_like(state["exp_avg_sq"], 0.5)


def move_memory_of_state(params, optimizer):
    optimizer.state[params[0]]["exp_avg_sq"].data = torch.full((6, 5), 0.5)


def move_count(params, optimizer):
    state = optimizer.state[params[0]]
    state["step"] = state["step"].clone()


def load(params, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def move_all_state(params, optimizer):
    state = optimizer.state[params[0]]
    optimizer.state[params[0]] = {**state, "exp_avg_sq": torch.full_like(state["exp_avg_sq"], 0.5)}


CHANGES = [move_weight, move_state, move_memory_of_state, move_count, move_all_state, load]


@every_optimizer
@pytest.mark.parametrize("change", CHANGES)
def test_memory_that_moves(make, change):
    both = pair(make)

    def move(params, optimizer, step):
        if step % 3 == 2:
            change(params, optimizer)

    steps(both, range(7), move)
    assert_close(both)


@every_optimizer
def test_gradients_in_another_order(make):
    both = pair(make)

    def turn(params, optimizer, step):
        g = params[0].grad
        params[0].grad = g.t().contiguous().t() if step % 2 else torch._neg_view(-g)

    steps(both, range(4), turn)
    assert_close(both)


@every_optimizer
def test_gradients_come_and_go(make):
    both = pair(make)

    def drop(params, optimizer, step):
        params[step % 3].grad = None

    steps(both, range(7), drop)
    assert_close(both)
    (ours, mine), (theirs, other) = both
    assert all(
        mine.state[p]["step"] == other.state[q]["step"] for p, q in zip(ours, theirs, strict=True)
    )


@every_optimizer
def test_gradients_are_let_go(make):
    params = start()
    optimizer = make(params, fused=True)
    fill(params, 0)
    grads = [weakref.ref(p.grad) for p in params]
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert [g() for g in grads] == [None] * 3


@every_optimizer
def test_state_from_before_a_load_is_let_go(make):
    params = start()
    optimizer = make(params, fused=True)
    steps([(params, optimizer)], range(2))
    old = weakref.ref(optimizer.state[params[0]]["exp_avg_sq"])
    load(params, optimizer)
    steps([(params, optimizer)], range(2))
    gc.collect()
    assert old() is None


@every_optimizer
def test_a_graph_that_still_needs_the_weights_is_told(make):
    params = start()
    optimizer = make(params, fused=True)
    loss = params[0].square().sum()
    fill(params, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_follow_what_others_write(make, dtype):
    both = pair(make, dtype)

    def write(params, optimizer, step):
        if step == 2:
            with torch.no_grad():
                params[0][1] = 3.0

    steps(both, range(5), write)
    assert_close(both)
    params, optimizer = both[0]
    for p in params:
        # The parameter is its master, rounded.
        assert torch.equal(p.detach(), optimizer.state[p]["master_weight"].to(dtype))
    assert (both[0][0][0][1] > 1.5).all()


@every_optimizer
def test_what_loops_cannot_take_goes_by_calls(make, monkeypatch):
    monkeypatch.setattr(loops, "_WARNED", set())

    def mixed():
        base = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
        return [base[:, ::2].detach().requires_grad_(), base[:, 1].clone().requires_grad_()]

    ours, theirs = mixed(), mixed()
    one, two = make(ours, fused=True), make(theirs, foreach=True)
    with pytest.warns(
        UserWarning, match=r"shape \(8, 3\) and strides \(6, 2\).*Remedy: .*contiguous\(\)"
    ) as caught:
        steps([(ours, one), (theirs, two)], range(4))
    assert len(caught) == 1
    assert_close([(ours, one), (theirs, two)])


@every_optimizer
def test_modes_may_be_exchanged_on_the_way(make):
    both = pair(make)

    def exchange(params, optimizer, step):
        group = optimizer.param_groups[0]
        if step == 2:
            group["fused"], group["foreach"] = group["foreach"], group["fused"]

    steps(both, range(6), exchange)
    assert_close(both)


def test_the_late_inner_products_of_scaled_adam_reach_the_sizes():
    """Two steps from the size step, sums are taken along by the update: as in the other mode."""
    both = pair(ScaledAdam)
    steps(both, range(6))
    ours, one = both[0]
    assert all(one.state[p]["scale_grads"].abs().min() > 0 for p in ours[:2])
    assert_close(both)


def test_a_scalers_factor_counts_in_the_norm_that_is_clipped():
    """As torch's GradScaler hands it over; thresholds from step 10 on, and then a spike."""

    def scaled(params, optimizer, step):
        for p in params:
            p.grad *= 2.0**10 * (30 if step == 12 else 1)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**10), torch.zeros(1)

    both = pair(MAKERS["scaled_adam"])
    steps(both, range(14), scaled)
    assert_close(both)
    ours, one = both[0]
    assert one.state[ours[0]]["num_clipped"] == 1
    assert 0.1 < one.state[ours[0]]["model_norms"][1] < 100


def test_the_norms_place_is_that_of_who_took_most_steps():
    """The last parameter was frozen for a time, and is behind its group."""

    def freeze(params, optimizer, step):
        params[1].requires_grad_(step >= 4)
        if step < 4:
            params[1].grad = None

    both = pair(MAKERS["scaled_adam"])
    for params, optimizer in both:
        del optimizer.param_groups[0]["params"][2], params[2]
    steps(both, range(9), freeze)
    assert_close(both)
    ours, one = both[0]
    assert one.state[ours[0]]["step"] - one.state[ours[1]]["step"] == 4
    norms = one.state[ours[0]]["model_norms"]
    assert (norms[1:9] > 0).all()
    assert norms[9] == 0


@pytest.mark.parametrize("count", [0, 3, 5, 7])
def test_a_count_that_was_edited_is_noticed(count):
    """The first pass's numbers of the step before are no longer those that are needed."""

    def edit(params, optimizer, step):
        if step == 2:
            for p in params:
                optimizer.state[p]["step"].fill_(count)

    both = pair(ScaledAdam)
    steps(both, range(6), edit)
    assert_close(both)


@pytest.mark.parametrize("mode", ["fused", "foreach"])
def test_a_frozen_parameter_is_not_looked_at(mode, monkeypatch):
    """Its weights may even be no numbers; they stop no step, and no pass reads them."""
    params = start()
    params[0].requires_grad_(False)
    params[0][0, 0] = torch.nan
    before = params[0].clone()
    optimizer, asked = ScaledAdam(params, **{mode: True}), []
    look = scaled_adam.finite
    monkeypatch.setattr(
        scaled_adam,
        "finite",
        lambda sums, needed, *more: asked.append(needed) or look(sums, needed, *more),
    )
    for step in range(5):
        fill(params[1:], step)
        optimizer.step()
    assert optimizer.skipped == 0
    assert torch.equal(params[0].nan_to_num(7.0), before.nan_to_num(7.0))
    matrices = [needed for needed in asked if len(needed) == 2]
    assert [needed.tolist() for needed in matrices] == [
        [False, step in (0, 3)] for step in range(5)
    ]
